"""Axis layouts as text: one letter an axis, merged axes in brackets, e.g. ``BT(HD)``.

Letters: B batch, T tokens, N key heads, H value heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from math import prod

import numpy as np

from deltafuse.draws import Array

#: Layouts worth trying for each operand of a rule over tokens and heads.
GATES = ("BTH", "BHT", "BH", "(BT)H")
CHANNEL_GATES = ("BTHK", "BHTK", "BHK", "(BT)HK")
QUERIES = ("BTNK", "BNTK", "BT(NK)", "BNK", "B(NK)", "(BT)NK", "(BT)(NK)")
VALUES = ("BTHV", "BHTV", "BT(HV)", "BHV", "B(HV)", "(BT)HV", "(BT)(HV)")
STATES = ("BHKV", "BHVK")
OUTPUTS = (*VALUES, "(BTH)V")


@cache
def axes(layout: str) -> tuple[str, ...]:
    """Splits ``BT(HD)`` into ``("B", "T", "HD")``."""
    groups: list[str] = []
    depth = 0
    for letter in layout:
        if letter == "(":
            depth = 1
            groups.append("")
        elif letter == ")":
            depth = 0
        elif depth:
            groups[-1] += letter
        else:
            groups.append(letter)
    return tuple(groups)


def fit(layout: str, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int] | None:
    """Sizes of a layout's letters given an array's shape and the letters that are known.

    Letters without an axis count as 1. None where the shape does not fit, or where two letters of one merged axis
    are unknown.
    """
    groups = axes(layout)
    if len(groups) != len(shape):
        return None
    found: dict[str, int] = {}
    for group, size in zip(groups, shape, strict=True):
        unknown = [letter for letter in group if letter not in sizes]
        known = prod(sizes[letter] for letter in group if letter in sizes)
        if len(unknown) > 1 or known == 0 or size % known:
            return None
        if unknown:
            found[unknown[0]] = size // known
        elif size != known:
            return None
    letters = set("".join(groups))
    absent = set("B" if letters >= {"K", "V"} else "BT") - letters
    if any(sizes.get(letter, 1) != 1 for letter in absent):
        return None
    return {**sizes, **found}


def unpack(array: Array, layout: str, order: str, sizes: Mapping[str, int]) -> Array:
    """Brings an array from its layout into plain axes in `order`; letters without an axis become size 1."""
    letters = "".join(axes(layout))
    plain = np.reshape(array, [sizes[letter] for letter in letters])
    missing = [letter for letter in order if letter not in letters]
    plain = np.reshape(plain, (*plain.shape, *([1] * len(missing))))
    letters += "".join(missing)
    return np.ascontiguousarray(np.transpose(plain, [letters.index(letter) for letter in order]))


def pack(array: Array, order: str, layout: str) -> Array:
    """Brings an array with plain axes in `order` into a layout; letters the layout lacks have size 1."""
    groups = axes(layout)
    letters = "".join(groups)
    absent = [letter for letter in order if letter not in letters]
    moved = np.transpose(array, [order.index(letter) for letter in (*letters, *absent)])
    sizes = dict(zip((*letters, *absent), moved.shape, strict=True))
    return np.ascontiguousarray(np.reshape(moved, [prod(sizes[letter] for letter in group) for group in groups]))


def fits(
    layouts: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]
) -> Sequence[tuple[str, Mapping[str, int]]]:
    """The layouts that a shape fits, with all sizes then known."""
    return _fits(tuple(layouts), tuple(shape), tuple(sizes.items()))


@lru_cache(maxsize=1 << 14)
def _fits(
    layouts: tuple[str, ...], shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, Mapping[str, int]], ...]:
    # Readings of many roots ask the same again and again: it is most of what a site costs that is no rule.
    known = dict(sizes)
    found = ((layout, fit(layout, shape, known)) for layout in layouts)
    return tuple((layout, fitted) for layout, fitted in found if fitted is not None)


def public(layout: str) -> str:
    """The letters that the report uses: H for either kind of head, D for either head size (states keep K and V)."""
    if set(layout) >= {"K", "V"}:
        return layout
    return layout.replace("N", "H").replace("K", "D").replace("V", "D")
