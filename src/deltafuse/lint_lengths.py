"""Lengths and offsets of the sequences of a fused node: constants, or computed from sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.lint_view import Finding, View
from deltafuse.targets.profile import Port
from deltafuse.wording import number

#: What a free size is taken for, a number of times the sequences: most counts divide it.
_ANY = 5040
#: Sizes that are tried for a free one beside constants.
_SIZES = 64


def length_findings(view: View) -> Iterator[Finding]:
    """Lengths that are not one for each state or do not add up to the token axis, offsets that do not end there."""
    for port in view.operator.inputs:
        value = view.ports.get(port.name)
        if value is None or port.role not in ("lengths", "offsets"):
            continue
        offsets = port.role == "offsets"
        shape, wanted = view.shape(value), _sequences(view)
        count = shape[0] if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None
        if count is not None and wanted is not None and count != wanted + offsets:
            fix = "give each sequence its own: there is one state for each of them"
            yield view.finding("lengths-count", port.name, number(count, "number"), f"{wanted + offsets}", fix)
        items, tokens = _contents(view, value), _tokens(view)
        if items is not None and tokens is not None and not _of_one_size(port, items, tokens):
            yield from _sums(view, port.name, items, tokens, offsets=offsets)


def length_notes(view: View) -> Iterator[Finding]:
    """Constants beside a token axis that is left dynamic: right for one of its sizes."""
    for port in view.operator.inputs:
        value, tokens = view.ports.get(port.name), _tokens(view)
        items = None if value is None or port.role not in ("lengths", "offsets") else _contents(view, value)
        if items is not None and tokens is not None and _of_one_size(port, items, tokens):
            fix = "nothing for inputs of that size; else leave --no-pin out when it is fused, so that the size is fixed"
            yield view.finding("lengths-fixed", port.name, [str(item) for item in items], number(tokens, "token"), fix)


def _of_one_size(port: Port, items: Sequence[Dim], tokens: Dim) -> bool:
    """Whether the operator demands constants that cannot follow the token axis, and a size of that axis fits them."""
    free = set(symbols(tokens))
    if not port.constant or not free or any(symbols(item) for item in items):
        return False
    sizes = (dict.fromkeys(free, size) for size in range(1, _SIZES + 1))
    return any(_fit(items, tokens, at, offsets=port.role == "offsets") for at in sizes)


def _sums(view: View, name: str, items: Sequence[Dim], tokens: Dim, *, offsets: bool) -> Iterator[Finding]:
    free = {symbol for dim in (*items, tokens) for symbol in symbols(dim)}
    sequences = max(len(items) - offsets, 1)
    at = dict.fromkeys(free, _ANY * sequences)
    if free and evaluate(tokens, at) % sequences:
        # Sequences of one length each: nothing follows for a count of tokens that they cannot share.
        return
    if not _fit(items, tokens, at, offsets=offsets):
        what = f"0, then rising to {tokens}" if offsets else f"a sum of {tokens}"
        fix = "give each sequence its length: they add up to the token axis"
        yield view.finding("lengths", name, [str(item) for item in items], what, fix)


def _fit(items: Sequence[Dim], tokens: Dim, at: Mapping[str, int], *, offsets: bool) -> bool:
    """Whether the sequences take all tokens, for sizes of what is free."""
    numbers = [evaluate(item, at) for item in items]
    ends = numbers if offsets else [0, *itertools.accumulate(numbers)]
    rising = all(before <= after for before, after in itertools.pairwise(ends))
    return rising and ends[:1] == [0] and ends[-1:] == [evaluate(tokens, at)]


def _sequences(view: View) -> int | None:
    """How many states there are, None where that is not known or where they are a pool that slots choose from."""
    if any(port.role == "slots" and port.name in view.ports for port in view.operator.inputs):
        return None
    state = next((view.ports.get(port.name) for port in view.operator.inputs if port.role == "state"), None)
    shape = None if state is None else view.shape(state)
    size = shape[0] if shape else None
    return size if isinstance(size, int) else None


def _tokens(view: View) -> Dim | None:
    query = next((view.ports.get(port.name) for port in view.operator.inputs if port.role == "query"), None)
    shape = None if query is None else view.shape(query)
    return shape[0] if shape else None


def _contents(view: View, value: int) -> list[Dim] | None:
    """The numbers, in terms of sizes; None where one of them is not known."""
    contents = view.shapes.contents(value)
    if contents is None:
        array = view.integers(value)
        return None if array is None else array.tolist()
    items = contents.ravel().tolist()
    return None if any(item is None or isinstance(item, float) for item in items) else items
