"""Symbolic sizes: polynomials with integer coefficients over symbols, `//`, `Min` and `Max`.

A `Dim` is an int where it can be, so ``isinstance(dim, int)`` asks "is it known". Symbols stand for sizes and are
taken to be 1 or more. Remainders have no form of their own: ``a % b`` is ``a - b*(a//b)``, which makes a length
padded to a multiple of 16 come out as ``16*((T + 15)//16)`` however the exporter wrote it.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce

from deltafuse.dim_algebra import (
    Atom,
    Call,
    Dim,
    Expr,
    bounds,
    exact_quotient,
    extremum,
    mul,
    symbol,
    symbol_name,
)

__all__ = [
    "Call",
    "Dim",
    "Expr",
    "bounds",
    "ceildiv",
    "evaluate",
    "is_clamped",
    "maximum",
    "minimum",
    "parse",
    "straightened",
    "substitute",
    "symbol",
    "symbol_name",
    "symbols",
    "weight",
]


def symbols(dim: Dim) -> frozenset[str]:
    """The names of all symbols in `dim`."""
    if isinstance(dim, int):
        return frozenset()
    found: set[str] = set()
    for atom in (atom for monomial, _ in dim.terms for atom, _ in monomial):
        if isinstance(atom, str):
            found.add(atom)
        else:
            found.update(*map(symbols, atom.args))
    return frozenset(found)


def weight(dim: Dim) -> int:
    """How large the expression is, in factors: callers give up on those that grow without end."""
    if isinstance(dim, int):
        return 1
    return sum(
        1 + sum(1 if isinstance(atom, str) else sum(map(weight, atom.args)) for atom, _ in monomial)
        for monomial, _ in dim.terms
    )


def is_clamped(dim: Dim) -> bool:
    """Whether a Min or Max is left in `dim`, as a slice leaves that may be longer than its axis."""
    if isinstance(dim, int):
        return False
    calls = [atom for monomial, _ in dim.terms for atom, _ in monomial if isinstance(atom, Call)]
    return any(call.op != "//" or any(map(is_clamped, call.args)) for call in calls)


def substitute(dim: Dim, values: Mapping[str, Dim]) -> Dim:
    """`dim` with symbols replaced; symbols that are not in `values` stay."""
    return _replaced(dim, lambda atom: _substitute_atom(atom, values))


def _replaced(dim: Dim, change: Callable[[Atom], Dim]) -> Dim:
    """`dim` with each symbol and call as something else."""
    if isinstance(dim, int):
        return dim
    total: Dim = 0
    for monomial, factor in dim.terms:
        product: Dim = factor
        for atom, power in monomial:
            product = reduce(mul, [change(atom)] * power, product)
        total = total + product
    return total


def evaluate(dim: Dim, binding: Mapping[str, int]) -> int:
    """The number that `dim` is under `binding`.

    Raises:
        KeyError: a symbol has no value.
    """
    result = substitute(dim, binding)
    if isinstance(result, int):
        return result
    raise KeyError(", ".join(sorted(symbols(result))))


def straightened(dim: Dim, name: str, low: int, high: int) -> Dim:
    """`dim` as it is where one symbol has these values only: what is a plain multiple there plus a number, as that.

    Of 1 to 8 tokens, ``Min(8, T)`` is ``T`` and ``(T + 7)//8`` is 1.

    Args:
        dim: any size.
        name: of the symbol.
        low: its least value.
        high: its greatest value.
    """
    return _replaced(dim, lambda atom: _straight(atom, name, low, high))


def _straight(atom: Atom, name: str, low: int, high: int) -> Dim:
    alone = Expr(((((atom, 1),), 1),))
    if isinstance(atom, str) or symbols(alone) != frozenset({name}):
        return alone
    values = [evaluate(alone, {name: value}) for value in range(low, high + 1)]
    steps = {after - before for before, after in itertools.pairwise(values)} or {0}
    return alone if len(steps) > 1 else (step := steps.pop()) * symbol(name) + (values[0] - step * low)


def minimum(*dims: Dim) -> Dim:
    """The least of `dims`, simplified where one is never greater than another."""
    return extremum("Min", dims)


def maximum(*dims: Dim) -> Dim:
    """The greatest of `dims`, simplified where one is never less than another."""
    return extremum("Max", dims)


def ceildiv(a: Dim, b: Dim) -> Dim:
    """`a` / `b` rounded up."""
    return -((-a) // b)


@lru_cache(maxsize=4096)
def parse(text: str) -> Dim:
    """A dim_param text as a `Dim`.

    ``batch``, ``4*s17``, ``s17*s53 + 1``, ``Min(8, s0)``, ``floor(s0/2)``, ``(s0//2)`` and ``Mod(s0, 4)`` are read as
    arithmetic; digits alone (``"128"``, as the transformers exporter writes) are a number; anything else is one
    symbol with the whole text as its name.
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        return int(text)
    # "total-length" is a name: exporters that subtract put blanks around the sign
    if len(text) > 1000 or re.search(r"[A-Za-z_]\w*-[A-Za-z_]", text):
        return symbol(text)
    try:
        return _whole(*_read(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return symbol(text)


def _rebuild(call: Call, args: tuple[Dim, ...]) -> Dim:
    return args[0] // args[1] if call.op == "//" else extremum(call.op, args)


def _substitute_atom(atom: Atom, values: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, str):
        return values[atom] if atom in values else symbol(atom)
    return _rebuild(atom, tuple(substitute(arg, values) for arg in atom.args))


def _whole(a: Dim, b: Dim) -> Dim:
    whole = exact_quotient(a, b)
    if whole is None:
        raise ValueError(f"({a})/({b})")
    return whole


def _read(node: ast.expr) -> tuple[Dim, Dim]:
    """An arithmetic syntax tree as a fraction."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value, 1
    if isinstance(node, (ast.Name, ast.Attribute)):
        return symbol(ast.unparse(node)), 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        a, b = _read(node.operand)
        return -a, b
    if isinstance(node, ast.BinOp):
        return _read_operator(node.op, *_read(node.left), node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        return _read_call(node.func.id.lower(), [_read(arg) for arg in node.args])
    raise ValueError(ast.dump(node))


def _read_operator(op: ast.operator, a: Dim, b: Dim, right: ast.expr) -> tuple[Dim, Dim]:
    c, d = _read(right)
    match op:
        case ast.Add():
            return a * d + c * b, b * d
        case ast.Sub():
            return a * d - c * b, b * d
        case ast.Mult():
            return a * c, b * d
        case ast.Div():
            return a * d, b * c
        case ast.FloorDiv():
            return (a * d) // (b * c), 1
        case ast.Mod() if (b, d) == (1, 1):
            return a % c, 1
        case ast.Pow() if isinstance(c, int) and 0 <= c <= 8 and (b, d) == (1, 1):
            return reduce(mul, [a] * c, 1), 1
        case _:
            raise ValueError(ast.dump(op))


def _read_call(name: str, args: list[tuple[Dim, Dim]]) -> tuple[Dim, Dim]:
    (a, b), (c, d) = args[0], args[-1]
    match name, len(args):
        case "min" | "max", _:
            return extremum(name.capitalize(), [_whole(*arg) for arg in args]), 1
        case "mod" | "pythonmod", 2:
            return _whole(a, b) % _whole(c, d), 1
        case "floordiv" | "cleandiv", 2:
            return (a * d) // (b * c), 1
        case "inttruediv", 2:
            return a * d, b * c
        case "floor" | "floortoint", 1:
            return a // b, 1
        case "ceil" | "ceiling" | "ceiltoint", 1:
            return ceildiv(a, b), 1
        case "tofloat", 1:
            return a, b
        case _:
            raise ValueError(name)
