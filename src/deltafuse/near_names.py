"""What may be meant by an expression that no name of a graph fits. Light."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

#: Names that are compared letter by letter: more would take seconds.
_COMPARED = 20_000


def unmatched(what: str, text: str, names: Collection[str]) -> str:
    """A note on an expression that nothing fits, with names that may be meant.

    Args:
        what: ``tensor`` or ``node``.
        text: the expression.
        names: of all there are.
    """
    said = f"no {what} has a name that {text!r} matches"
    folded = [name for name in names if re.search(text, name, re.IGNORECASE)]
    if folded:
        return f"{said}; without regard to case it is {len(folded)}, e.g. {folded[0]}: write '(?i){text}'"
    wanted = re.sub(r"\\(.)|[\^$.*+?()\[\]{}|]", r"\1", text).casefold()
    ends = {name: name.rsplit("/", 1)[-1].casefold() for name in list(names)[:_COMPARED]}
    near = difflib.get_close_matches(wanted, {*ends.values(), *map(str.casefold, ends)}, 3)
    meant = [name for one in near for name, end in ends.items() if one in (end, name.casefold())][:3]
    return f"{said}; did you mean {' or '.join(meant)}?" if meant else said
