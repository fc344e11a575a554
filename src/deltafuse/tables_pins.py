"""Axes that were fixed, for people: by the symbol that the inputs have, what only follows as a count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deltafuse.match import Pinned
from deltafuse.wording import number, some

#: Axes that are told one by one; a model of many layers has hundreds.
_AXES = 12
#: Code of why an axis was fixed -> the same in a few words.
_WHY = {
    "static-batch": "the target takes a fixed number of sequences",
    "valid_tokens": "the unfused graph is the rule for this number of tokens only",
    "--pin": "as asked for",
}


def pinned_lines(pinned: Sequence[Pinned]) -> Iterator[str]:
    """One line a symbol of the inputs, then one for axes whose names are known of no input.

    Exporters make up names for axes of outputs that always have one size; nobody chose these.
    """
    chosen = _chosen(pinned)
    for symbol in chosen:
        same = [axis for axis in pinned if axis.was == symbol]
        for size in dict.fromkeys(axis.now for axis in same):
            where = [f"{axis.value}[{axis.axis}]" for axis in same if axis.now == size]
            why = next((axis.why for axis in same if axis.now == size), "")
            told = f" ({why}: {_WHY[why]})" if why else ""
            yield f"pinned: {'axes without a name' if symbol == '?' else symbol} = {size}{told} in {some(where, _AXES)}"
    rest = [axis for axis in pinned if axis.was not in chosen]
    if rest:
        values = some(list(dict.fromkeys(axis.value for axis in rest)), _AXES)
        ending = "whose size follows" if len(rest) == 1 else "whose sizes follow"
        yield f"pinned: {number(len(rest), 'more axis')} of {values}, {ending} from these; --json lists each"


def pinned_symbols(pinned: Sequence[Pinned]) -> list[str]:
    """``batch=1`` for each symbol of the inputs."""
    chosen = _chosen(pinned)
    return list(dict.fromkeys(f"{axis.was}={axis.now}" for axis in pinned if axis.was in chosen))


def _chosen(pinned: Sequence[Pinned]) -> dict[str, None]:
    return {axis.was: None for axis in pinned if axis.kind == "input"}
