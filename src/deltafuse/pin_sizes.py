"""Which symbol becomes which size, and on whose account: what some axes must be, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deltafuse.dims import Dim, Expr, substitute, symbols
from deltafuse.pin_names import declared_symbols
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes

__all__ = ["ASKED", "Seed", "Sizes"]

#: Why an axis has a size that the user gave.
ASKED = "--pin"


class Seed(NamedTuple):
    """An axis of a value that must be one size, and the code that says why where that is known."""

    value: int
    axis: int
    size: int
    why: str = ""


class Sizes:
    """Canonical symbols and the size each is to have.

    Attributes:
        shapes: the engine that knows which symbols are one.
        known: canonical symbol -> size.
        why: canonical symbol -> the code that says why, where that is known.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.known: dict[str, int] = {}
        self.why: dict[str, str] = {}

    def by_name(self) -> dict[str, int]:
        """Every symbol of every class that has a size."""
        classes = self.shapes.classes()
        return {name: size for root, size in self.known.items() for name in classes.get(root, {root})}

    def why_of(self, *dims: Dim) -> str:
        """Why sizes are what they became; "" where that is not known."""
        roots = sorted(self.shapes.unions.root(name) for dim in dims for name in symbols(dim))
        return next((self.why[root] for root in roots if root in self.why), "")

    def seed(self, seeds: Sequence[Seed], extra: Mapping[str, int]) -> Reason | None:
        """Takes what axes must be, and what the user asks for, and follows it.

        Args:
            seeds: axes that must be one size.
            extra: symbol -> size.
        """
        # A merged axis is clear once those that it was merged from are.
        for seed in sorted(seeds, key=self._unclear):
            reason = self._seed_axis(seed)
            if reason is not None:
                return reason
        declared = declared_symbols(self.shapes) if extra else frozenset[str]()
        for name, size in extra.items():
            if name not in declared:
                return Reason("pin-unknown-symbol", {"symbol": name, "known": ", ".join(sorted(declared)) or "none"})
            reason = self._assign(name, size, name, ASKED)
            if reason is not None:
                return reason
        return self._spread()

    def _unclear(self, seed: Seed) -> bool:
        shape = self.shapes.shape(seed.value) or ()
        dim = self.shapes.find(shape[seed.axis]) if seed.axis < len(shape) else seed.size
        return not isinstance(dim, int) and not _factors(dim, seed.size)

    def _seed_axis(self, seed: Seed) -> Reason | None:
        value, axis, size, why = seed
        name, shape = self.shapes.graph.name(value), self.shapes.shape(value)
        where: dict[str, object] = {"value": name, "axis": axis, "size": size}
        if shape is None or axis >= len(shape):
            return Reason("pin-shape-unknown", where)
        found = self.shapes.find(shape[axis])
        dim = substitute(found, self.known)
        if isinstance(found, int) and found != size:
            return Reason("pin-static", {**where, "found": dim})
        if isinstance(dim, int) and dim != size:
            return Reason("pin-disagree", {"symbol": str(found), "size": size, "other": dim, "value": name})
        if isinstance(dim, int):
            return None
        solved = _factors(dim, size)
        if not solved:
            return Reason("pin-expression", {**where, "found": str(dim)})
        reasons = [self._assign(free, number, name, why) for free, number in solved.items()]
        return next((reason for reason in reasons if reason is not None), None)

    def _assign(self, name: str, size: int, where: str, why: str) -> Reason | None:
        root, graph = self.shapes.unions.root(name), self.shapes.graph
        other = self.known.setdefault(root, size)
        if why:
            self.why.setdefault(root, why)
        if other != size:
            return Reason("pin-disagree", {"symbol": root, "size": size, "other": other, "value": where})
        for found, node in self.shapes.unions.demands.get(root, {}).items():
            if found != size:
                at = {"node": graph.label(node), "op": graph.op[node]}
                return Reason("pin-bound", {"symbol": root, "size": size, "found": found, **at})
        return None

    def _spread(self) -> Reason | None:
        """Follows equations such as ``s99 == 4*s17``.

        Sums are no such equation: ``total == past + step`` must not fix the cache's length.
        """
        changed = True
        while changed:
            changed = False
            for equation in self.shapes.unions.equations:
                sides = [substitute(self.shapes.find(dim), self.known) for dim in (equation.left, equation.right)]
                for dim, size in (sides, sides[::-1]):
                    solved = _factors(dim, size) if isinstance(dim, Expr) and isinstance(size, int) else {}
                    for name, number in solved.items():
                        changed = True
                        reason = self._assign(name, number, name, self.why_of(equation.left, equation.right))
                        if reason is not None:
                            return reason
        return None


def _factors(dim: Expr, size: int) -> dict[str, int]:
    """The sizes of symbols that follow from a product being `size`; nothing where none follows."""
    if len(dim.terms) != 1:
        return {}
    monomial, factor = dim.terms[0]
    names = [atom for atom, power in monomial if isinstance(atom, str) and power == 1]
    if len(names) != len(monomial) or size % factor or size // factor < 1:
        return {}
    rest = size // factor
    return dict.fromkeys(names, rest) if len(names) == 1 or rest == 1 else {}
