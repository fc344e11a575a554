"""Layouts: how an operand's axes become those of a kernel, in as few Reshape and Transpose nodes as can be.

A layout is text, one letter an axis, merged axes in brackets (``BT(HD)``); see `deltafuse.match.Role`.
Axes of size one may stand anywhere: moving them needs no data movement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from deltafuse.layouts import axes

#: letter -> size; None where the size is not known before the model runs. ``1`` is an axis of size one without a name.
Sizes = Mapping[str, int | None]


@dataclass(frozen=True)
class Move:
    """One node of a change of layout.

    Attributes:
        op: ``Reshape`` (to `values`: at most one of them -1, 0 keeps the size of the same axis, a letter stands for its
            size, which is not known before the model runs) or ``Transpose`` (by `values`).
    """

    op: str
    values: tuple[int | str, ...]


def moves(source: str, target: str, sizes: Sizes) -> tuple[Move, ...]:
    """Nodes that turn one layout into another, empty where they are the same array.

    Args:
        source: layout of the value at hand.
        target: layout that is wanted; a letter of size one may be missing in either.
        sizes: size of each letter that occurs.
    """
    have, want = _significant(source, sizes), _significant(target, sizes)
    if have == want:
        return ()
    if "".join(have) == "".join(want):
        return (_reshape(axes(source), axes(target), sizes),)
    result: list[Move] = []
    if any(len(axis) > 1 for axis in have):
        have = tuple("".join(have))
        result.append(_reshape(axes(source), have, sizes))
    permutation = _permutation(have, want)
    result.append(Move("Transpose", permutation))
    moved = tuple(have[axis] for axis in permutation)
    if moved != want:
        result.append(_reshape(moved, axes(target), sizes))
    return tuple(result)


def _reshape(source: Sequence[str], target: Sequence[str], sizes: Sizes) -> Move:
    """A Reshape with at most one size left to the operator: others are kept from the source, or known when it runs."""
    values: list[int | str] = [_size(axis, sizes) for axis in target]
    for index, axis in enumerate(target):
        if values.count(-1) > 1 and values[index] == -1 and index < len(source) and source[index] == axis:
            values[index] = 0
    for index, axis in enumerate(target):
        if values.count(-1) > 1 and values[index] == -1 and len(axis) == 1:
            known = sizes[axis]
            values[index] = axis if known is None else known
    return Move("Reshape", tuple(values))


def _significant(layout: str, sizes: Sizes) -> tuple[str, ...]:
    return tuple("".join(letter for letter in axis if _letter(letter, sizes) != 1) for axis in axes(layout))


def _size(axis: str, sizes: Sizes) -> int:
    # The token axis is always -1: the same constant then serves every token count.
    known = [size for letter in axis if letter != "T" and (size := _letter(letter, sizes)) is not None]
    return prod(known) if len(known) == len(axis) else -1


def _letter(letter: str, sizes: Sizes) -> int | None:
    return 1 if letter == "1" else sizes[letter]


def _permutation(have: tuple[str, ...], want: tuple[str, ...]) -> tuple[int, ...]:
    units = [index for index, axis in enumerate(have) if not axis]
    if len(have) == len(want) and all(len(axis) <= 1 for axis in want):
        return tuple(have.index(axis) if axis else units.pop(0) for axis in want)
    return (*units, *(have.index(letter) for letter in "".join(want)))
