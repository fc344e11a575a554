"""Edits of an edited file are edits of the file."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from deltafuse.composing import compose, pieces
from deltafuse.edits import Edit, apply

SITES = ("a", "b", "")


def applied(data: bytes, edits: tuple[Edit, ...]) -> bytes:
    out = io.BytesIO()
    apply(memoryview(data), edits, out)
    return out.getvalue()


@st.composite
def edits(draw: st.DrawFn, size: int) -> tuple[Edit, ...]:
    """Insertions, removals and replacements in the order of a file of `size` bytes."""
    places = sorted(draw(st.lists(st.integers(0, size), max_size=8)))
    made: list[Edit] = []
    for begin, end in zip(places[::2], places[1::2], strict=False):
        new = draw(st.binary(max_size=4))
        made.append(Edit(begin, end, new, draw(st.sampled_from(SITES)), "nodes"))
    return tuple(made)


@given(st.data())
def test_composed_edits_do_what_both_do(data: st.DataObject) -> None:
    file = data.draw(st.binary(max_size=30))
    first = data.draw(edits(len(file)))
    middle = applied(file, first)
    second = data.draw(edits(len(middle)))
    assert applied(file, compose(first, second)) == applied(middle, second)
    assert applied(file, compose(first, second, nested=True)) == applied(middle, second)


@given(st.data())
def test_what_a_site_removes_of_the_file_stays_its_own(data: st.DataObject) -> None:
    file = bytes(range(30))
    first = data.draw(edits(30))
    second = data.draw(edits(len(applied(file, first))))
    both = compose(first, second)
    removed = {edit.site: set() for edit in (*first, *second)}
    for edit in both:
        removed[edit.site] |= set(range(edit.start, edit.end))
    for edit in first:
        assert set(range(edit.start, edit.end)) <= removed[edit.site]
    ends = [edit.end for edit in both]
    assert all(edit.start >= end for edit, end in zip(both[1:], ends, strict=False))


def test_new_bytes_know_their_site() -> None:
    first = (Edit(2, 4, b"xyz", "a", "nodes"), Edit(6, 6, b"w", "b", "nodes"))
    assert list(pieces(first)) == [(2, 5, "a"), (7, 8, "b")]
    second = (Edit(3, 4, b"!", "c", "nodes"),)
    assert applied(b"01234567", compose(first, second)) == b"01x!z45w67"
    assert {edit.site for edit in compose(first, second)} == {"a", "b", "c"}
    assert {edit.site for edit in compose(first, second, nested=True)} == {"a", "b"}
