"""Polynomials with integer coefficients over symbols, `//`, `Min` and `Max`: the arithmetic behind `deltafuse.dims`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias


@dataclass(frozen=True)
class Call:
    """An opaque term: ``//`` with two arguments, ``Min`` or ``Max`` with two or more."""

    op: str
    args: tuple[Dim, ...]

    def __str__(self) -> str:
        if self.op == "//":
            return "({}//{})".format(*map(_operand, self.args))
        return f"{self.op}({', '.join(map(str, self.args))})"


Atom: TypeAlias = str | Call
Monomial: TypeAlias = tuple[tuple[Atom, int], ...]


@dataclass(frozen=True)
class Expr:
    """A size that depends on symbols; made by `symbol`, `parse` and arithmetic, never a plain number.

    Attributes:
        terms: (monomial, coefficient) pairs, highest degree first, the constant last; a monomial is a sorted tuple of
            (atom, power).
    """

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        return _add(self, other)

    def __radd__(self, other: int) -> Dim:
        return _add(other, self)

    def __sub__(self, other: Dim) -> Dim:
        return _add(self, mul(other, -1))

    def __rsub__(self, other: int) -> Dim:
        return _add(other, mul(self, -1))

    def __neg__(self) -> Dim:
        return mul(self, -1)

    def __mul__(self, other: Dim) -> Dim:
        return mul(self, other)

    def __rmul__(self, other: int) -> Dim:
        return mul(other, self)

    def __floordiv__(self, other: Dim) -> Dim:
        return _floordiv(self, other)

    def __rfloordiv__(self, other: int) -> Dim:
        return _floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return self - other * (self // other)

    def __rmod__(self, other: int) -> Dim:
        return other - self * (other // self)

    def __str__(self) -> str:
        """The text as a dim_param: ``4*s17``, ``s17*s53 + 1``, ``Max(1, s0)``, ``(s0//2)``."""
        text = " + ".join(_term_text(monomial, factor) for monomial, factor in self.terms)
        return text.replace("+ -", "- ")

    def __repr__(self) -> str:
        return f"Expr({self})"


Dim: TypeAlias = int | Expr


def symbol(name: str) -> Expr:
    """The size of this name."""
    return Expr(((((name, 1),), 1),))


def symbol_name(dim: Dim) -> str | None:
    """The name if `dim` is one bare symbol, else None."""
    if isinstance(dim, int) or len(dim.terms) != 1:
        return None
    ((atom, power), *more), factor = dim.terms[0]
    return atom if factor == 1 and not more and power == 1 and isinstance(atom, str) else None


def bounds(dim: Dim) -> tuple[float, float]:
    """A range that holds `dim` for all symbols >= 1 (infinities where there is no bound)."""
    if isinstance(dim, int):
        return dim, dim
    remainder = _remainder_bounds(dim)
    if remainder is not None:
        return remainder
    low, high = 0.0, 0.0
    for monomial, factor in dim.terms:
        least, most = _monomial_bounds(monomial)
        ends = sorted((_times(factor, least), _times(factor, most)))
        low, high = low + ends[0], high + ends[1]
    return low, high


def _operand(dim: Dim) -> str:
    return str(dim) if isinstance(dim, int) or symbol_name(dim) is not None else f"({dim})"


def _term_text(monomial: Monomial, factor: int) -> str:
    parts = [str(atom) if power == 1 else f"{atom}**{power}" for atom, power in monomial]
    if not parts:
        return str(factor)
    sign = "-" if factor < 0 else ""
    return sign + "*".join(parts if abs(factor) == 1 else [str(abs(factor)), *parts])


def _order(monomial: Monomial) -> tuple[int, list[tuple[str, int]]]:
    return -sum(power for _, power in monomial), [(str(atom), power) for atom, power in monomial]


def _terms(dim: Dim) -> tuple[tuple[Monomial, int], ...]:
    return (((), dim),) if isinstance(dim, int) else dim.terms


def _build(terms: Mapping[Monomial, int]) -> Dim:
    kept = [(monomial, factor) for monomial, factor in terms.items() if factor]
    if not kept or (len(kept) == 1 and not kept[0][0]):
        return kept[0][1] if kept else 0
    return Expr(tuple(sorted(kept, key=lambda term: _order(term[0]))))


@lru_cache(1 << 14, typed=True)
def _add(a: Dim, b: Dim) -> Dim:
    total = dict(_terms(a))
    for monomial, factor in _terms(b):
        total[monomial] = total.get(monomial, 0) + factor
    return _build(total)


@lru_cache(1 << 14, typed=True)
def mul(a: Dim, b: Dim) -> Dim:
    """The product, numbers or not."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    total: dict[Monomial, int] = {}
    for left, x in _terms(a):
        for right, y in _terms(b):
            monomial = _join(left, right)
            total[monomial] = total.get(monomial, 0) + x * y
    return _build(total)


def _join(left: Monomial, right: Monomial, sign: int = 1) -> Monomial:
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + sign * power
    return tuple(sorted(((atom, power) for atom, power in powers.items() if power), key=lambda pair: str(pair[0])))


def _divide_term(term: tuple[Monomial, int], by: tuple[Monomial, int]) -> Dim | None:
    monomial = _join(term[0], by[0], -1)
    if term[1] % by[1] or any(power < 0 for _, power in monomial):
        return None
    return _build({monomial: term[1] // by[1]})


def exact_quotient(a: Dim, b: Dim) -> Dim | None:
    """The polynomial q with a = q*b, None if there is none."""
    quotient: Dim = 0
    for _ in range(64):
        if a == 0:
            return quotient
        part = _divide_term(_terms(a)[0], _terms(b)[0])
        if part is None:
            return None
        quotient, a = quotient + part, a - part * b
    return None


@lru_cache(1 << 14, typed=True)
def _floordiv(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 0:
        raise ZeroDivisionError
    whole = exact_quotient(a, b)
    if whole is not None:
        return whole
    a, b = cancel(a, b)
    return _floordiv_int(a, b) if isinstance(b, int) and b > 0 else _atom("//", (a, b))


def cancel(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """Takes common factors out of a fraction."""
    terms = (*_terms(a), *_terms(b))
    shared = dict(terms[0][0])
    for monomial, _ in terms[1:]:
        powers = dict(monomial)
        shared = {atom: min(power, powers[atom]) for atom, power in shared.items() if atom in powers}
    common = (tuple(sorted(shared.items(), key=lambda pair: str(pair[0]))), math.gcd(*(factor for _, factor in terms)))
    parts = [_build({_join(m, common[0], -1): f // common[1] for m, f in _terms(dim)}) for dim in (a, b)]
    return parts[0], parts[1]


def _floordiv_int(a: Dim, b: int) -> Dim:
    whole = _build({monomial: factor // b for monomial, factor in _terms(a) if not monomial or factor % b == 0})
    rest = a - whole * b
    low, high = bounds(rest)
    if low >= 0 and high < b:
        return whole
    if _terms(rest)[0][1] < 0:  # one form for both ways to write a ceiling
        return whole - (b - 1 - rest) // b
    inner = _call(rest)
    if inner is not None and inner.op == "//" and isinstance(inner.args[1], int):
        return whole + inner.args[0] // (inner.args[1] * b)
    return whole + _atom("//", (rest, b))


def _call(dim: Dim) -> Call | None:
    """The opaque term that `dim` is, if it is one and nothing else."""
    if isinstance(dim, int) or len(dim.terms) != 1:
        return None
    ((atom, power), *more), factor = dim.terms[0]
    return atom if isinstance(atom, Call) and factor == 1 and not more and power == 1 else None


def _atom(op: str, args: tuple[Dim, ...]) -> Expr:
    return Expr(((((Call(op, args), 1),), 1),))


def extremum(op: str, dims: Iterable[Dim]) -> Dim:
    """`Min` or `Max` of `dims`."""
    kept: list[Dim] = []
    for dim in dims:
        call = _call(dim)
        for part in call.args if call is not None and call.op == op else (dim,):
            if not any(_dominates(op, other, part) for other in kept):
                kept = [*(other for other in kept if not _dominates(op, part, other)), part]
    return kept[0] if len(kept) == 1 else _atom(op, tuple(sorted(kept, key=str)))


def _dominates(op: str, a: Dim, b: Dim) -> bool:
    """Whether a makes b superfluous in Min or Max."""
    return bounds(b - a if op == "Min" else a - b)[0] >= 0


def _times(factor: float, value: float) -> float:
    return 0.0 if factor == 0 or value == 0 else factor * value


def _monomial_bounds(monomial: Monomial) -> tuple[float, float]:
    low, high = 1.0, 1.0
    for atom, power in monomial:
        least, most = (1.0, math.inf) if isinstance(atom, str) else _call_bounds(atom)
        if least < 0:
            return -math.inf, math.inf
        low, high = low * least**power, _times(high, most**power)
    return low, high


def _call_bounds(call: Call) -> tuple[float, float]:
    ranges = [bounds(arg) for arg in call.args]
    if call.op == "//":
        return _quotient_bounds(*ranges)
    pick = min if call.op == "Min" else max
    return pick(low for low, _ in ranges), pick(high for _, high in ranges)


def _quotient_bounds(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    if b[0] <= 0:
        return -math.inf, math.inf
    return min(_floor(a[0], end) for end in b), max(_floor(a[1], end) for end in b)


def _floor(number: float, by: float) -> float:
    """``number // by`` of ends of ranges, `by` positive; Python gives NaN where the number is infinite."""
    return number if math.isinf(number) else number // by


def _remainder_bounds(dim: Expr) -> tuple[float, float] | None:
    """Bounds of k*(x - n*(x//n)) + rest, which the terms one by one do not show."""
    for monomial, factor in dim.terms:
        call = _call(_build({monomial: 1})) if monomial else None
        if call is None or call.op != "//" or not isinstance(call.args[1], int) or factor % call.args[1]:
            continue
        times = -factor // call.args[1]
        rest = dim - times * (call.args[0] - call.args[1] * _build({monomial: 1}))
        if len(_terms(rest)) < len(dim.terms):
            ends = sorted((0, times * (call.args[1] - 1)))
            low, high = bounds(rest)
            return low + ends[0], high + ends[1]
    return None
