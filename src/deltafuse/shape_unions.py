"""Which dims are equal by data flow: union-find over symbols, with known sizes and equations beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from deltafuse.dims import Dim, bounds, substitute, symbol, symbol_name, symbols


@dataclass(frozen=True)
class Conflict:
    """Two sizes that a node needs to be equal and that are not.

    Attributes:
        node: node id.
        left, right: the sizes.
    """

    node: int
    left: Dim
    right: Dim


@dataclass(frozen=True)
class Equation:
    """Two sizes that a node needs to be equal, at least one of them an expression."""

    node: int
    left: Dim
    right: Dim


@dataclass
class Unions:
    """Classes of equal symbols.

    Attributes:
        rank: how good a name is as the canonical one of its class, the least wins.
        demands: canonical symbol -> sizes that data flow demands (a broadcast with a literal 32, say), each with the
            first node that does.
        equations: what is equal but no renaming, e.g. ``total`` and ``past + step``.
        conflicts: contradictions, in the order found.
    """

    rank: Callable[[str], tuple[int, int]]
    demands: dict[str, dict[int, int]] = field(default_factory=dict[str, "dict[int, int]"])
    equations: list[Equation] = field(default_factory=list[Equation])
    conflicts: list[Conflict] = field(default_factory=list[Conflict])
    _parent: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def renames(self) -> bool:
        """Whether any symbol has another as its canonical one."""
        return bool(self._parent)

    def counts(self) -> tuple[int, int, int, int]:
        """How many names were united, sizes demanded, equations and conflicts noted."""
        demands = sum(map(len, self.demands.values()))
        return len(self._parent), demands, len(self.equations), len(self.conflicts)

    def copy(self, rank: Callable[[str], tuple[int, int]]) -> Unions:
        """The same classes, to go on from here."""
        return Unions(rank, _parent=dict(self._parent))

    def root(self, name: str) -> str:
        """The canonical symbol of `name`."""
        while name in self._parent:
            name = self._parent[name]
        return name

    def find(self, dim: Dim) -> Dim:
        """`dim` in canonical symbols; known sizes are not filled in (see `demands`)."""
        if isinstance(dim, int) or not self._parent:
            return dim
        renamed: dict[str, Dim] = {name: symbol(self.root(name)) for name in symbols(dim) if name in self._parent}
        return substitute(dim, renamed) if renamed else dim

    def classes(self) -> dict[str, set[str]]:
        """Canonical symbol -> every symbol of its class, for classes of two and more."""
        found: dict[str, set[str]] = {}
        for name in self._parent:
            root = self.root(name)
            found.setdefault(root, {root}).add(name)
        return found

    def unite(self, a: Dim, b: Dim, node: int) -> None:
        """Notes that `a` and `b` are one size because `node` needs it."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        low, high = bounds(a - b)
        if low > 0 or high < 0:  # ints that differ, or n and n + 1
            self.conflicts.append(Conflict(node, a, b))
            return
        left, right = symbol_name(a), symbol_name(b)
        if left is not None and right is not None:
            self._join(left, right, node)
        elif left is not None and isinstance(b, int):
            self.bind(left, b, node)
        elif right is not None and isinstance(a, int):
            self.bind(right, a, node)
        else:
            self._equate(Equation(node, a, b))

    def bind(self, name: str, size: int, node: int) -> None:
        """Notes that the symbol is `size` because `node` needs it."""
        known = self.demands.setdefault(self.root(name), {})
        if size not in known:
            self.conflicts += [Conflict(node, other, size) for other in list(known)[:1]]
            known[size] = node

    def _join(self, a: str, b: str, node: int) -> None:
        keep, drop = sorted((a, b), key=self.rank)
        self._parent[drop] = keep
        for size in self.demands.pop(drop, {}):
            self.bind(keep, size, node)

    def _equate(self, equation: Equation) -> None:
        if not any((known.left, known.right) == (equation.left, equation.right) for known in self.equations):
            self.equations.append(equation)
