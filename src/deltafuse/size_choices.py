"""Branches that sizes choose: harmless where the choice comes round again every few tokens, as that of a pad does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
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
from deltafuse.trial import Step, Trial

TEXTS.update(
    {
        "some-tokens-only": "the site is the rule for {low} and for {high:# token}, but not for {tokens}; "
        "look for what its sizes choose",
    }
)

_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "Greater": operator.gt, "GreaterOrEqual": operator.ge, "Less": operator.lt, "LessOrEqual": operator.le,
    "Equal": operator.eq,
}  # fmt: skip

#: Largest chunk whose padding is looked through.
_LONGEST = 128
#: Most turns of all choices together that are tried.
_MOST_TURNS = 2 * _LONGEST
#: Constants that move data no farther than this act where all is proven with several sequences, too.
_NEAR = 64
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


def turns_fail(
    trial: Trial, binding: Binding, validity: Validity, choices: Sequence[Turns], sizes: Sizes
) -> Reason | None:
    """Choices that are not right at every turn of them all, or that are not known to be.

    What two choices make together may show only where both are made; so it is with what else the sizes decide: padding
    up to whole chunks, and masks, which tell even sizes from odd ones.

    Args:
        trial: what is right at some token counts.
        binding: sizes at which it is.
        validity: the range in which it is.
        choices: as `turns` finds them.
        sizes: how the site makes use of them.
    """
    length = _round_of(choices, sizes)
    for choice in choices:
        if length > _MOST_TURNS or all(choice.symbol not in symbols(dim) for dim in binding.tokens_dims):
            return Reason("position-gate", {"op": "If", "node": choice.node})
    for tokens, batch in _turning(binding, validity, length):
        at = binding.at(tokens, batch)
        if at is None or not _is_right(trial, _step(at, tokens)):
            return Reason("position-gate", {"op": "If", "node": choices[0].node})
    return None


def ends_fail(trial: Trial, binding: Binding, validity: Validity, sizes: Sizes) -> Reason | None:
    """Where positions are compared or sizes rounded up: a site that is not right for few tokens or at a whole chunk.

    Args:
        trial: what is right at some token counts.
        binding: sizes at which it is.
        validity: the range in which it is.
        sizes: how the site makes use of them.
    """
    for step in end_steps(binding, validity, sizes):
        if not _is_right(trial, step):
            tokens = step.binding.tokens
            return Reason("some-tokens-only", {"tokens": tokens, "low": validity.low, "high": validity.high})
    return None


def end_steps(binding: Binding, validity: Validity, sizes: Sizes) -> list[Step]:
    """What `ends_fail` compares: at sizes that the symbols allow."""
    counts = {1, 2, 3} if sizes.masks or sizes.chunks else set[int]()
    counts |= _meetings(sizes)
    counts |= {count for chunk in sizes.chunks for count in (chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1)}
    counts |= {validity.high} if sizes.farthest > _NEAR else set[int]()
    inside = [count for count in sorted(counts) if validity.low <= count <= validity.high]
    # The range was found with one sequence.
    tries = [
        (tokens, batch)
        for tokens in inside if binding.tokens is not None
        for batch in _batches(binding) if tokens not in validity.tried or batch not in (None, 1)
    ]  # fmt: skip
    found = [(tokens, binding.at(tokens, batch)) for tokens, batch in tries]
    return [_step(at, tokens) for tokens, at in found if at is not None]


def _meetings(sizes: Sizes) -> set[int]:
    """Token counts at which what constants have moved may meet, and at no other: each is tried."""
    if not sizes.farthest:
        return set()
    few, chunk = 2 * sizes.farthest + 2, max(sizes.chunks, default=1)
    # What lies at a remainder meets once in each round; what lies at whole chunks, after as many chunks.
    few += chunk if sizes.farthest >= chunk - 1 > 0 else 0
    whole = {count * chunk for count in range(1, 2 * sizes.farthest + 3)}
    return set(range(1, few + 1)) | whole


def turn_steps(binding: Binding, validity: Validity, choices: Sequence[Turns], sizes: Sizes) -> list[Step]:
    """What `turns_fail` compares, where all is right."""
    length = _round_of(choices, sizes)
    turning = () if length > _MOST_TURNS else _turning(binding, validity, length)
    found = [(tokens, binding.at(tokens, batch)) for tokens, batch in turning]
    return [_step(at, tokens) for tokens, at in found if at is not None]


def _round_of(choices: Sequence[Turns], sizes: Sizes) -> int:
    """After how many tokens all choices, and all else that sizes decide, come round again together; 0 for no choice."""
    return lcm(*(choice.length for choice in choices), *sizes.chunks, 2 if sizes.masks else 1) if choices else 0


def _turning(binding: Binding, validity: Validity, length: int) -> Iterator[tuple[int, int | None]]:
    """The token counts of one round, each with the batches to try."""
    for tokens in range(validity.low, min(validity.low + length - 1, validity.high) + 1):
        for batch in _batches(binding):
            yield tokens, batch


def _batches(binding: Binding) -> tuple[int | None, ...]:
    """The batches to try: one sequence, and several where the site was right for these, which may be mixed up."""
    return (binding.batch,) if binding.batch in (None, 1) else (1, binding.batch)


def _step(at: Binding, tokens: int) -> Step:
    return Step(at, DRAWS[0], tokens)


def _is_right(trial: Trial, step: Step) -> bool:
    error = trial.error(step.binding, step.how, step.seed)
    return not isinstance(error, Reason) and error <= _BAR


def _number(shapes: Shapes, value: int) -> Dim | None:
    contents = shapes.contents(value)
    if contents is None or contents.size != 1:
        return None
    item = contents.ravel().tolist()[0]
    return None if isinstance(item, (bool, float)) else item
