"""Names of sizes: which are the file's own, and those that are made up for sizes without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deltafuse.dims import Dim, symbol, symbols

_INPUT, _UNNAMED_INPUT, _DECLARED, _MADE_UP = range(4)


@dataclass
class Names:
    """Ranks of symbols: names of graph inputs first, then unnamed axes of inputs, other declared names, made up ones.

    Attributes:
        sizes: symbol -> number, for made up names too.
        origins: made up symbol -> (value id, axis).
    """

    sizes: Mapping[str, int]
    origins: dict[str, tuple[int, int]] = field(default_factory=dict[str, "tuple[int, int]"])
    _ranks: dict[str, tuple[int, int]] = field(default_factory=dict[str, "tuple[int, int]"])

    def rank(self, name: str) -> tuple[int, int]:
        """How good a name is, the least is the best."""
        return self._ranks.setdefault(name, (_DECLARED, len(self._ranks)))

    def counts(self) -> tuple[int, int]:
        """How many names were made up, and how many have a rank."""
        return len(self.origins), len(self._ranks)

    def copy(self) -> Names:
        """The same names, to go on from here."""
        return Names(self.sizes, dict(self.origins), dict(self._ranks))

    def add_inputs(self, dims: Iterable[Dim]) -> None:
        """Notes the names that a graph input declares."""
        for dim in dims:
            for name in sorted(symbols(dim)):
                self._ranks.setdefault(name, (_INPUT, len(self._ranks)))

    def make(self, value: int, axis: int, name: str, is_input: bool) -> Dim:
        """A size for an axis that nothing tells, named after tensor and axis: ``hidden[2]``."""
        name = f"{name}[{axis}]"
        if name in self.sizes:
            return self.sizes[name]
        self._ranks[name] = (_UNNAMED_INPUT if is_input else _MADE_UP, len(self._ranks))
        self.origins[name] = (value, axis)
        return symbol(name)

    def is_input(self, name: str) -> bool:
        """Whether a graph input has this size."""
        return self.rank(name)[0] <= _UNNAMED_INPUT

    def is_made_up(self, name: str) -> bool:
        """Whether nothing tells the size."""
        return self.rank(name)[0] == _MADE_UP
