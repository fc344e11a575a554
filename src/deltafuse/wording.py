"""How counts, names and sizes are worded, wherever a sentence has some. Light."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

#: How the note begins that says where the page was written.
PAGE = "the page is"

_Said = TypeVar("_Said")

#: Names that are told one by one.
FEW = 3


def number(count: object, what: str, many: str = "") -> str:
    """``1 site``, ``3 sites``; of a phrase the first word: ``1 node of it`` from ``node of it``.

    Args:
        count: how many; a size without a number is several.
        what: the noun of one, a word or a phrase.
        many: that of several, where it does not follow: a verb stands behind it, say.
    """
    return f"{count} {what if count == 1 else many or plural(what)}"


def plural(what: str) -> str:
    """``sites`` of ``site``, ``axes`` of ``axis``, ``nodes of it`` of ``node of it``.

    Args:
        what: the noun of one, a word or a phrase.
    """
    head, gap, rest = what.partition(" of ")
    if head.endswith("axis"):
        head = f"{head[:-2]}e"
    elif head.endswith("y") and head[-2:-1] not in "aeiou":
        head = f"{head[:-1]}ie"
    return f"{head}s{gap}{rest}"


def span(low: int, high: int, what: str) -> str:
    """``1 token``, ``17 to 32 tokens``.

    Args:
        low: the least number.
        high: the largest.
        what: the noun of one.
    """
    return number(low, what) if low == high else f"{low} to {number(high, what)}"


def some(names: Sequence[str], few: int = FEW) -> str:
    """``a, b, c and 21 more``: the first few, and how many there are beside them.

    Args:
        names: of anything.
        few: how many are told.
    """
    more = len(names) - few
    return f"{', '.join(names[:few])} and {more} more" if more > 0 else ", ".join(names)


def grouped(pairs: Iterable[tuple[_Said, str]]) -> list[tuple[_Said, list[str]]]:
    """What is said of several names is said once.

    Args:
        pairs: what is said, and of whom.

    Returns:
        What is said, each with its names, in the order of the first.
    """
    found: dict[_Said, list[str]] = {}
    for said, name in pairs:
        found.setdefault(said, []).append(name)
    return list(found.items())


def of_sites(names: Sequence[str], total: int) -> str:
    """``layers.0, layers.1``, ``all 24 sites``, ``18 of 24 sites, layers.0 … layers.22``: whom a sentence is about.

    Args:
        names: of the sites, in the order of the report.
        total: how many sites the report has.
    """
    if len(names) == total:
        return ", ".join(names) if total <= FEW else f"all {number(total, 'site')}"
    if len(names) == 1:
        return names[0]
    if len(names) <= FEW:
        return f"{', '.join(names)} ({len(names)} of {number(total, 'site')})"
    return f"{len(names)} of {number(total, 'site')}, {names[0]} … {names[-1]}"


def size_text(count: float) -> str:
    """``1.5 GB``, in steps of a thousand.

    Args:
        count: of bytes.
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes all")
