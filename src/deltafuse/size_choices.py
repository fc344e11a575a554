"""Branches that sizes choose: harmless where the choice comes round again every few tokens, as that of a pad does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltafuse.bench import Binding
from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.draws import DRAWS
from deltafuse.graph import Graph
from deltafuse.match import Validity
from deltafuse.quasi_linear import rounds
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.size_flow import Sizes
from deltafuse.trial import Trial

TEXTS.update(
    {
        "some-tokens-only": "the site is the rule for {low} and for {high} tokens, but not for {tokens}; "
        "look for what its sizes choose",
    }
)

_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "Greater": operator.gt, "GreaterOrEqual": operator.ge, "Less": operator.lt, "LessOrEqual": operator.le,
    "Equal": operator.eq,
}  # fmt: skip

#: Largest chunk whose padding is looked through.
_LONGEST = 128
_BAR = 1e-10


def period(graph: Graph, shapes: Shapes, condition: int) -> tuple[int, str]:
    """After how many steps of which symbol a condition on one size comes round again; (0, "") where it does not."""
    node = graph.producer[graph.uncast(condition)]
    if node < 0 or graph.standard[node] not in _COMPARISONS:
        return 0, ""
    sides = [_number(shapes, value) for value in graph.node_inputs[node]]
    free = {symbol for side in sides if side is not None for symbol in symbols(side)}
    if None in sides or len(free) != 1:
        return 0, ""
    (symbol,) = free
    left, right = (side for side in sides if side is not None)
    apart, compare = left - right, _COMPARISONS[graph.standard[node]]
    length = rounds(apart)
    at = [evaluate(apart, {symbol: size}) for size in range(1, 2 * length + 1)]
    outcomes = [compare(size, 0) for size in at]
    if not length or (at[0] != at[length] and not _same_side(at, length)):
        return 0, ""
    shortest = (n for n in range(1, _LONGEST + 1) if length % n == 0 and outcomes == outcomes[:n] * (2 * length // n))
    return next(((found, symbol) for found in shortest), (0, ""))


def _same_side(at: Sequence[int], length: int) -> bool:
    """Whether a size that grows or falls from round to round is on one side of zero and goes away from it."""
    grows = at[length] > at[0]
    return all(size > 0 if grows else size < 0 for size in at)


@dataclass(frozen=True)
class Turns:
    """A choice between branches by a size.

    Attributes:
        node: its name.
        length: after how many steps it comes round again.
        symbol: the size that it follows.
    """

    node: str
    length: int
    symbol: str


def turns(graph: Graph, shapes: Shapes, nodes: Sequence[int]) -> tuple[Turns, ...]:
    """The choices between branches that follow a free size; one that fixed sizes settle is no choice."""
    found: list[Turns] = []
    for node in nodes:
        if graph.standard[node] == "If":
            length, symbol = period(graph, shapes, graph.node_inputs[node][0])
            found += [Turns(graph.node_name(node), length, symbol)] if length else []
    return tuple(found)


def turns_fail(trial: Trial, binding: Binding, validity: Validity, choices: Sequence[Turns]) -> Reason | None:
    """A choice that is not right at every turn, or that is not known to be.

    Args:
        trial: what is right at some token counts.
        binding: sizes at which it is.
        validity: the range in which it is.
        choices: as `turns` finds them.
    """
    for choice in choices:
        reason = Reason("position-gate", {"op": "If", "node": choice.node})
        if all(choice.symbol not in symbols(dim) for dim in binding.tokens_dims):
            return reason
        for tokens in range(validity.low, min(validity.low + choice.length - 1, validity.high) + 1):
            at = binding.at(tokens, None if binding.batch is None else 1)
            error = reason if at is None else trial.error(at, DRAWS[0], tokens)
            if isinstance(error, Reason) or error > _BAR:
                return reason
    return None


def ends_fail(trial: Trial, binding: Binding, validity: Validity, sizes: Sizes) -> Reason | None:
    """Where positions are compared or sizes rounded up: a site that is not right for few tokens or at a whole chunk.

    Args:
        trial: what is right at some token counts.
        binding: sizes at which it is.
        validity: the range in which it is.
        sizes: how the site makes use of them.
    """
    counts = {1, 2, 3} if sizes.masks or sizes.chunks else set[int]()
    counts |= {count for chunk in sizes.chunks for count in (chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1)}
    if binding.tokens is None:
        return None
    for tokens in sorted(counts):
        if not validity.low <= tokens <= validity.high or tokens in validity.tried:
            continue
        at = binding.at(tokens, None if binding.batch is None else 1)
        error = None if at is None else trial.error(at, DRAWS[0], tokens)
        if isinstance(error, Reason) or (error is not None and error > _BAR):
            return Reason("some-tokens-only", {"tokens": tokens, "low": validity.low, "high": validity.high})
    return None


def _number(shapes: Shapes, value: int) -> Dim | None:
    contents = shapes.contents(value)
    if contents is None or contents.size != 1:
        return None
    item = contents.ravel().tolist()[0]
    return None if isinstance(item, (bool, float)) else item
