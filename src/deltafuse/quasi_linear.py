"""Sizes that grow steadily but for a remainder: what holds of them for two rounds of it holds for all numbers."""

from __future__ import annotations

from math import lcm

from deltafuse.dim_algebra import Call, Dim

#: Longest round that is looked through.
LONGEST = 1 << 14


def rounds(dim: Dim) -> int:
    """After how many steps of its symbol a size has grown by the same number, wherever one starts.

    A sum of multiples of the symbol and of quotients by constants, rounded down, is such a size.

    Returns:
        1 for a plain multiple of the symbol or a number; 0 where there is no such count, or none up to `LONGEST`.
    """
    if isinstance(dim, int):
        return 1
    found = 1
    for monomial, _ in dim.terms:
        if not monomial:
            continue
        (atom, power), *more = monomial
        if more or power != 1:
            return 0
        found = lcm(found, _of_atom(atom))
        if not 0 < found <= LONGEST:
            return 0
    return found


def _of_atom(atom: str | Call) -> int:
    if isinstance(atom, str):
        return 1
    over, under = (*atom.args, 0)[:2]
    if atom.op != "//" or not isinstance(under, int) or under <= 0:
        return 0
    return rounds(over) * under
