"""What the axes of a site are to the rule, beside the names that an exporter made up for their sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from deltafuse.dims import symbol_name
from deltafuse.layouts import axes
from deltafuse.match import Match, Role, SiteReport
from deltafuse.report import dim

__all__ = ["role_shape", "symbol_roles", "told"]

#: Letter of a layout -> what the axis is.
_AXES = {
    "B": "batch", "T": "tokens", "H": "heads", "D": "head size", "K": "key head size", "V": "value head size",
}  # fmt: skip


def told(size: int | str, role: str) -> str:
    """``tokens (s77)``; a number, and a name that says as much itself, stay as they are.

    Args:
        size: as it stands in the model.
        role: what the axis is, "" where it is not known.
    """
    return str(size) if isinstance(size, int) or role in ("", size) else f"{role} ({size})"


def role_shape(role: Role) -> list[str]:
    """The sizes of an operand or result, each that is no number with what its axis is.

    Args:
        role: of a rule; of an ordinary expression it has no layout, and sizes stay as they are.
    """
    letters = axes(role.layout) if role.layout else ("",) * len(role.shape)
    return [told(dim(size), _named(letter)) for size, letter in zip(role.shape, letters, strict=True)]


def symbol_roles(sites: Sequence[SiteReport]) -> Mapping[str, str]:
    """Symbol -> what the axes are that have it as their size, where it is the same in all sites.

    Args:
        sites: of a model.
    """
    found: dict[str, set[str]] = {}
    for symbol, role in _seen(site.match for site in sites if isinstance(site.match, Match)):
        found.setdefault(symbol, set()).add(role)
    return {symbol: next(iter(roles)) for symbol, roles in found.items() if len(roles) == 1}


def _seen(matches: Iterator[Match]) -> Iterator[tuple[str, str]]:
    for match in matches:
        for role in (*match.operands(), *match.results()):
            for size, letter in zip(role.shape, axes(role.layout), strict=True):
                symbol = symbol_name(size)
                if symbol is not None:
                    yield symbol, _named(letter)


def _named(letters: Collection[str]) -> str:
    return " x ".join(_AXES[letter] for letter in letters if letter in _AXES)
