"""Reasons: why a site is no match, or may not be fused. A reason is a falsy value, text is made when shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from string import Formatter

from deltafuse.wording import number, plural

#: code -> text; ``{name}`` is filled from the reason's arguments. Each text says what is the matter and, after the last
#: semicolon, what to do next: "the mask is upside down; turn it". A number in front of its noun is written
#: ``{count:# node}``, or ``{count:# node differs|nodes differ}``: of one it is "1 node".
TEXTS: dict[str, str] = {}
_BEFORE_FIX = "; "
#: Code of what has no name.
_UNTOLD = "not-the-rule"
#: Differences to neighbours that are told.
_NEAREST = 5
#: Up to here two recurrences are the same.
_SAME = 1e-8
_COUNTED = re.compile(r"\{(\w+):# ([^}|]+)\|?([^}]*)\}")


class _Counting(Formatter):
    """Formats what `TEXTS` may hold."""

    def format_field(self, value: object, format_spec: str) -> str:
        mark, _, nouns = format_spec.partition(" ")
        if mark != "#":
            return super().format_field(value, format_spec)
        one, _, many = nouns.partition("|")
        return number(value, one, many)


_FORMATTER = _Counting()


def filled(template: str, args: Mapping[str, object]) -> str:
    """A text of `TEXTS` with its arguments in place."""
    return _FORMATTER.vformat(template, (), args)


def plain(template: str) -> str:
    """A text of `TEXTS` for who reads it without arguments: ``{count} nodes`` of ``{count:# node}``."""
    return _COUNTED.sub(lambda found: f"{{{found[1]}}} {found[3] or plural(found[2])}", template)


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
        return filled(TEXTS[self.code], self.args)

    @property
    def what(self) -> str:
        """What is the matter: the text without the fix."""
        before, _, _ = TEXTS[self.code].rpartition(_BEFORE_FIX)
        return filled(before, self.args) or self.text

    @property
    def fix(self) -> str:
        """What to do next; "" where the text, which may be that of a user's own pattern, does not say."""
        _, mark, fix = TEXTS[self.code].rpartition(_BEFORE_FIX)
        return filled(fix, self.args) if mark else ""


def compared_with(nearest: Nearest) -> Iterator[tuple[str, str, float]]:
    """The rule and the neighbours that come closest, each with what it is and its difference; the smallest first."""
    others = [name for name, _ in nearest.differences if name != nearest.rule][:_NEAREST]
    told = {nearest.rule: "the rule itself"} | {
        name: plain(TEXTS.get(name, "").rpartition(_BEFORE_FIX)[0]) for name in others
    }
    return ((name, told[name], error) for name, error in nearest.differences if name in told)


def nearest_text(nearest: Nearest, code: str) -> str:
    """What the smallest difference says of a near miss.

    Args:
        nearest: what it was measured against.
        code: of its reason.
    """
    name, error = nearest.differences[0]
    if name == code:
        return f"it is the neighbour {name} of {nearest.rule}, with a difference of {error:.1e}"
    if code == _UNTOLD:
        return f"no neighbour with the rule's operands fits; the smallest difference is {error:.1e}"
    if error < _SAME:
        return f"it is what {code} says; a value inside is that of {name}, with a difference of {error:.1e}"
    return f"it is what {code} says; of the rule and the neighbours with its operands none is nearer than {error:.1e}"
