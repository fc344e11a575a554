"""Layouts as text: which shapes fit, and there and back again."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafuse import layouts

ORDERS = {
    **dict.fromkeys(layouts.GATES, "BTH"),
    **dict.fromkeys(layouts.QUERIES, "BTNK"),
    **dict.fromkeys((*layouts.VALUES, *layouts.OUTPUTS), "BTHV"),
    **dict.fromkeys(layouts.STATES, "BHKV"),
}
SIZES = st.fixed_dictionaries({letter: st.integers(1, 5) for letter in "BTNHKV"})


def sizes_for(layout: str, sizes: dict[str, int]) -> dict[str, int]:
    """Letters that the layout lacks have size one."""
    letters = set("".join(layouts.axes(layout)))
    return {letter: n if letter in letters else 1 for letter, n in sizes.items()}


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("BTHD", ("B", "T", "H", "D")),
        ("BT(HD)", ("B", "T", "HD")),
        ("(BT)(HD)", ("BT", "HD")),
        ("(BTH)V", ("BTH", "V")),
        ("BH", ("B", "H")),
    ],
)
def test_brackets_merge_axes(layout: str, groups: tuple[str, ...]) -> None:
    assert layouts.axes(layout) == groups


@given(st.sampled_from(sorted(ORDERS)), SIZES, st.integers(0, 99))
def test_pack_undoes_unpack_and_the_other_way_round(layout: str, sizes: dict[str, int], seed: int) -> None:
    order, sizes = ORDERS[layout], sizes_for(layout, sizes)
    plain = np.random.default_rng(seed).standard_normal([sizes[letter] for letter in order])
    packed = layouts.pack(plain, order, layout)
    assert packed.shape == tuple(prod(sizes[letter] for letter in group) for group in layouts.axes(layout))
    assert np.array_equal(layouts.unpack(packed, layout, order, sizes), plain)
    assert np.array_equal(layouts.pack(layouts.unpack(packed, layout, order, sizes), order, layout), packed)


@given(st.sampled_from(sorted(ORDERS)), SIZES, st.data())
def test_what_was_packed_fits_and_tells_its_sizes(layout: str, sizes: dict[str, int], data: st.DataObject) -> None:
    order, sizes = ORDERS[layout], sizes_for(layout, sizes)
    shape = layouts.pack(np.zeros([sizes[letter] for letter in order]), order, layout).shape
    # One unknown letter in each merged axis at most.
    known = {letter: sizes[letter] for group in layouts.axes(layout) for letter in group[1:]}
    for letter in data.draw(st.sets(st.sampled_from("BTNHKV"))):
        known[letter] = sizes[letter]
    found = layouts.fit(layout, shape, known)
    assert found is not None
    assert all(found[letter] == sizes[letter] for letter in {*"".join(layouts.axes(layout)), *known})


@given(st.sampled_from(sorted(ORDERS)), SIZES, st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_a_fit_is_never_a_lie(layout: str, sizes: dict[str, int], shape: list[int]) -> None:
    known = {letter: sizes[letter] for letter in "BTH"}
    found = layouts.fit(layout, shape, known)
    if found is None:
        return
    assert found.items() >= known.items()
    assert [prod(found[letter] for letter in group) for group in layouts.axes(layout)] == shape


@pytest.mark.parametrize(
    ("layout", "shape", "known"),
    [
        ("BTH", (1, 2), {}),
        ("BTH", (1, 2, 3, 4), {}),
        ("BTH", (1, 2, 3), {"H": 4}),
        ("BT(HV)", (1, 2, 7), {"H": 2}),
        ("BT(HV)", (1, 2, 6), {}),
        ("BHV", (1, 2, 6), {"T": 3}),
        ("BNK", (1, 2, 6), {"T": 2, "B": 1}),
    ],
)
def test_what_does_not_fit(layout: str, shape: tuple[int, ...], known: dict[str, int]) -> None:
    assert layouts.fit(layout, shape, known) is None


def test_a_layout_without_time_fits_one_token() -> None:
    assert layouts.fit("BHV", (2, 3, 5), {"B": 2, "T": 1, "H": 3}) == {"B": 2, "T": 1, "H": 3, "V": 5}


def test_a_state_says_nothing_of_time() -> None:
    assert layouts.fit("BHVK", (2, 3, 5, 7), {"B": 2, "T": 9, "H": 3}) == {"B": 2, "T": 9, "H": 3, "V": 5, "K": 7}


def test_all_layouts_that_fit_are_told() -> None:
    assert dict(layouts.fits(layouts.GATES, (1, 4, 4), {})) == {
        "BTH": {"B": 1, "T": 4, "H": 4},
        "BHT": {"B": 1, "H": 4, "T": 4},
    }


@pytest.mark.parametrize(
    ("layout", "shown"),
    [("BTNK", "BTHD"), ("BT(HV)", "BT(HD)"), ("BTH", "BTH"), ("BHKV", "BHKV"), ("BHVK", "BHVK"), ("B(NK)", "B(HD)")],
)
def test_the_report_s_letters(layout: str, shown: str) -> None:
    assert layouts.public(layout) == shown
