"""Reasons: why a site is no match, or may not be fused. A reason is a falsy value, text is made when shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: code -> text; ``{name}`` is filled from the reason's arguments. Each text says what to do next.
TEXTS: dict[str, str] = {}


@dataclass(frozen=True)
class Nearest:
    """How far a site that is no rule is from the rule and its named neighbours.

    Attributes:
        rule: name of the rule.
        tokens: how many tokens were compared.
        differences: (name, smallest relative difference over the readings that were tried), the smallest first; the
            rule goes by its own name, a neighbour by its reason code.
    """

    rule: str
    tokens: int
    differences: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Reason:
    """A falsy result that says why.

    Attributes:
        code: stable short name, a key of `TEXTS`.
        args: what the text needs, e.g. ``{"tokens": 12}``.
        nearest: of a near miss, what it was measured against; None where no output could be compared.
    """

    code: str
    args: Mapping[str, object] = field(default_factory=dict[str, object])
    nearest: Nearest | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return False

    @property
    def text(self) -> str:
        """What to show the user."""
        return TEXTS[self.code].format(**self.args)
