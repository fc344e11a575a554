"""Sizes that grow steadily but for a remainder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafuse.coverage import _follows
from deltafuse.dims import Dim, evaluate, parse, symbol
from deltafuse.quasi_linear import LONGEST, rounds

T = symbol("t")


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("7", 1), ("t", 1), ("3*t + 5", 1), ("(t + 63)//64", 64), ("64*((t + 63)//64)", 64), ("t//4 + t//6", 12),
        ("(t//4 + 1)//3", 12), ("t*t", 0), ("Min(t, 2000)", 0), ("t*(t//2)", 0), ("100//t", 0), ("t//20000", 0),
    ],
)  # fmt: skip
def test_the_length_of_a_round(text: str, length: int) -> None:
    assert rounds(parse(text)) == length


@st.composite
def sizes(draw: st.DrawFn) -> Dim:
    found: Dim = draw(st.integers(0, 9))
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.integers(1, 5)) * T + draw(st.integers(0, 20))
        for _ in range(draw(st.integers(0, 2))):
            part = (part + draw(st.integers(0, 9))) // draw(st.integers(2, 9))
        found = found + draw(st.integers(-3, 3)) * part
    return found


@given(sizes(), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_round_adds_the_same_wherever_it_begins(size: Dim, here: int, there: int) -> None:
    length = rounds(size)
    assert 0 <= length <= LONGEST
    if length:
        grown = [evaluate(size, {"t": at + length}) - evaluate(size, {"t": at}) for at in (1, here, there)]
        assert len(set(grown)) == 1


@pytest.mark.parametrize("text", ["t", "(t + 63)//64", "64*((t + 63)//64)"])
def test_a_trip_count_for_every_token_or_chunk(text: str) -> None:
    assert _follows(parse(text))


@pytest.mark.parametrize("text", ["t - t//1300", "t - 1", "t//64", "Min(t, 1300)", "2*t", "t*t"])
def test_a_trip_count_that_is_short_or_long_somewhere(text: str) -> None:
    assert not _follows(parse(text))
