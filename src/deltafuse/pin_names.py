"""Symbols given to ``--pin``: a slip of the pen is told at once, with the symbols there are."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from deltafuse.dims import symbols
from deltafuse.errors import UserError
from deltafuse.shapes import Shapes
from deltafuse.wording import some

#: How many symbols a message lists.
_SHOWN = 12


def declared_symbols(shapes: Shapes) -> frozenset[str]:
    """Every symbol that the file declares an axis with."""
    found: set[str] = set()
    for value in shapes.graph.type_spans:
        for dim in shapes.declared(value) or ():
            found |= frozenset() if dim is None else symbols(dim)
    return frozenset(found)


def check_pins(pins: Iterable[tuple[str, int]], shapes: Shapes) -> None:
    """Raises where a symbol is no dim of the model.

    Args:
        pins: symbol and size.
        shapes: of the model.

    Raises:
        UserError: ``pin-unknown-symbol``.
    """
    known = declared_symbols(shapes)
    for symbol, size in pins:
        if symbol not in known:
            raise unknown_symbol(symbol, size, _ends(shapes) or known, known)


def _ends(shapes: Shapes) -> Collection[str]:
    """Symbols of the graph's inputs: the others are names that exporters make up."""
    dims = [dim for value in shapes.graph.inputs for dim in shapes.declared(value) or () if dim is not None]
    return {name for dim in dims for name in symbols(dim)}


def unknown_symbol(symbol: str, size: int, shown: Collection[str], known: Collection[str] = ()) -> UserError:
    """The error that lists the symbols there are and the one that may be meant.

    Args:
        symbol: as given.
        size: as given.
        shown: symbols to list.
        known: all there are, where they are more.
    """
    near = difflib.get_close_matches(symbol, [*shown, *known], 1)
    names = sorted(shown)
    hint = f"did you mean --pin {near[0]}={size}? " if near else ""
    listed = f"give one of {some(names, _SHOWN)}" if names else "leave --pin out: every axis is fixed"
    return UserError("pin-unknown-symbol", f"--pin {symbol}={size}: there is no axis of that name; {hint}{listed}")
