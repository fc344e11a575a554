"""Sizes that grow steadily but for a remainder: what holds of them for two rounds of it holds for all numbers."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, lcm
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from deltafuse.dim_algebra import Call, Dim, Expr, Monomial
from deltafuse.dims import symbols

Sizes: TypeAlias = npt.NDArray[np.int64]

#: Longest round that is looked through.
LONGEST = 1 << 14
#: Largest factor of a size: with it, sizes of any model fit their types.
_LARGEST_FACTOR = 1 << 32


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


#: Largest chunk that sizes may be rounded up to; proofs go beyond two of them.
LARGEST_CHUNK = 128


def chunked(dim: Dim) -> int:
    """The chunk size C of a size that is made of free sizes, of them rounded up to chunks, and of numbers.

    In each symbol it is ``a * T + b * ceil(T / C) + c``, and its factors may be other symbols.

    Returns:
        1 where nothing is rounded; 0 where it is anything else (a bound, a power, a remainder of another kind).
    """
    if isinstance(dim, int):
        return 1
    groups: dict[Monomial, dict[Monomial, int]] = {}
    calls = [atom for monomial, _ in dim.terms for atom, _ in monomial if isinstance(atom, Call)]
    rounded = {name for call in calls for name in _in(call)}
    for monomial, factor in dim.terms:
        if any(power != 1 for _, power in monomial) or abs(factor) > _LARGEST_FACTOR:
            return 0
        inner = tuple(pair for pair in monomial if isinstance(pair[0], Call) or pair[0] in rounded)
        outer = tuple(pair for pair in monomial if pair not in inner)
        groups.setdefault(outer, {})[inner] = factor
    found = 1
    for parts in groups.values():
        chunk = 1 if not any(parts) else _ceiling(Expr(tuple(parts.items())))
        if chunk == 0 or (1 not in (chunk, found) and chunk != found):
            return 0
        found = max(found, chunk)
    return found


def apart(dim: Dim, along: Collection[str]) -> float:
    """By how much a size is apart from a multiple of a symbol at most, whatever that is: 37 for ``2 * T + 37``.

    What lies at two such sizes meets where the symbol is small, or never: up to twice the sum of both numbers.

    Args:
        dim: the size.
        along: the symbols that count; what is a multiple of all others has to be one of these too.

    Returns:
        A whole number; infinite where there is none, or none is known.
    """
    if isinstance(dim, int):
        return abs(dim)
    groups: dict[Monomial, dict[Monomial, int]] = {}
    for monomial, factor in dim.terms:
        inner = tuple(pair for pair in monomial if isinstance(pair[0], Call) or pair[0] in along)
        outer = tuple(pair for pair in monomial if pair not in inner)
        groups.setdefault(outer, {})[inner] = factor
    found = 0.0
    for outer, parts in groups.items():
        most = _apart(Expr(tuple(parts.items())))
        if most and outer:
            return inf
        found += most
    return found


def _apart(dim: Expr) -> float:
    """`apart` for a size of one symbol."""
    names, length = symbols(dim), rounds(dim)
    if len(names) > 1 or not length:
        return inf
    values = _values(dim, np.arange(length + 1, dtype=np.int64)).tolist()
    rise = values[-1] - values[0]
    return -(-max(abs(value * length - step * rise) for step, value in enumerate(values)) // length)


def _in(call: Call) -> set[str]:
    return {name for arg in call.args for name in symbols(arg)}


def _ceiling(dim: Expr) -> int:
    """`chunked` for a size of one symbol: its steps tell, over two rounds."""
    names = symbols(dim)
    length = rounds(dim)
    if len(names) != 1 or not length:
        return 0
    sizes = np.arange(1, 2 * length + 2, dtype=np.int64)
    steps = np.diff(_values(dim, sizes))
    places = np.flatnonzero(steps != steps[0]) + 1
    if not len(places):
        return 1
    chunk = int(places[0])
    whole = len(places) == 2 * length // chunk and bool((places == chunk * np.arange(1, len(places) + 1)).all())
    alike = len(set(steps[places - 1].tolist())) == 1
    return chunk if whole and alike and length % chunk == 0 and 1 < chunk <= LARGEST_CHUNK else 0


def _values(dim: Dim, sizes: Sizes) -> Sizes:
    """A size of one symbol for many of its values."""
    if isinstance(dim, int):
        return np.full_like(sizes, dim)
    total = np.zeros_like(sizes)
    for monomial, factor in dim.terms:
        part = np.full_like(sizes, factor)
        for atom, power in monomial:
            value = sizes if isinstance(atom, str) else _values(atom.args[0], sizes) // _values(atom.args[1], sizes)
            part = part * value**power
        total += part
    return total
