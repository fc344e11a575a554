"""Whether a site is the rule for the whole token axis, or only happens to be for some sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from deltafuse import layouts
from deltafuse.bench import Binding
from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.draws import DRAWS
from deltafuse.graph import Graph
from deltafuse.match import Validity
from deltafuse.quasi_linear import rounds
from deltafuse.reasons import TEXTS, Reason
from deltafuse.roles import Assignment
from deltafuse.shapes import Shapes
from deltafuse.trial import Beyond, Trial
from deltafuse.while_loops import trip_count
from deltafuse.wire import Model

TEXTS.update(
    {
        "trip-count": "the loop {node} has a trip count that does not follow the token axis ({count}): "
        "it may stop before the last token; give it the number of tokens",
        "heads-unknown": "the {role} {value} has the free size {size} where heads or head sizes are; "
        "export the model with fixed ones",
        "sizes-tied": "the batch cannot be one at {tokens:# token}: both sizes hang on one symbol; "
        "export the model with two",
        "batch-one-fails": "the site does not work for a batch of one ({tokens:# token}); export the model with "
        "batch 1",
        "few-tokens-only": "the site is the rule for {low} to {high:# token} only and computes something else from "
        "more; compare it with the rule's recurrence",
    }
)

#: How many tokens beyond a limit are tried: enough to show each step of the rule.
_TELLING = 3
_BAR = 1e-10


def short_loop(model: Model, kinds: bytearray, shapes: Shapes, loops: Sequence[int]) -> Reason | None:
    """A loop whose trip count is not known to follow the token axis: it may stop short where no trial goes.

    Args:
        model: whose main graph they lie in.
        kinds: of its values.
        shapes: knows the trip counts.
        loops: Loop and Scan nodes; a Scan takes its axis whole.
    """
    graph = model.graph
    for node in loops:
        if graph.standard[node] != "Loop":
            continue
        trips = shapes.contents(trip_count(model, graph, kinds, node))
        count = [] if trips is None else cast("list[Dim | None]", trips.ravel().tolist())
        if len(count) != 1 or not _follows(count[0]):
            shown = ", ".join(map(str, count)) or "not known"
            return Reason("trip-count", {"node": graph.node_name(node), "count": shown})
    return None


def _follows(count: Dim | None) -> bool:
    """Whether a trip count is the number of tokens, padded ones too, or of chunks; a fixed one shows in the range."""
    if count is None or isinstance(count, int):
        return count is not None
    free, length = symbols(count), rounds(count)
    if len(free) != 1 or not length:
        return False
    at = {tokens: evaluate(count, dict.fromkeys(free, tokens)) for tokens in range(1, 2 * length + 1)}
    chunk = max((tokens for tokens, trips in at.items() if trips == 1), default=0)
    padded = at[1]
    # Two rounds of both tell: from there on both grow by the same number.
    if chunk and length % chunk == 0 and all(trips == -(-tokens // chunk) for tokens, trips in at.items()):
        return True
    whole = padded > 0 and length % padded == 0
    return whole and all(trips == -(-tokens // padded) * padded for tokens, trips in at.items())


def other_beyond(trial: Trial, binding: Binding, validity: Validity, *, looping: bool) -> Reason | None:
    """A site that is another rule where it is not this one, rather than one that was traced for these sizes.

    What was traced for some tokens leaves later ones alone, or makes nothing of any of them. What gets the first ones
    right and then goes on differently is another rule that agrees on few tokens. A loop takes tokens as they come, so
    that for it any wrong size tells.
    """
    reason = Reason("few-tokens-only", {"low": validity.low, "high": validity.high})
    if binding.tokens is None:
        return None
    if looping and "wrong" in (validity.above, validity.below):
        return reason
    if validity.above != "wrong":
        return None
    more = beyond(binding, validity)
    return reason if more is None or trial.goes_on(more) else None


def beyond(binding: Binding, validity: Validity) -> Beyond | None:
    """The question whether a site goes on behind its range; None where the symbols allow no more tokens."""
    larger = binding.at(validity.high + _TELLING, None if binding.batch is None else 1)
    return None if larger is None else Beyond(larger, validity.high, validity.low == validity.high)


def free_heads(graph: Graph, shapes: Shapes, assignment: Assignment) -> Reason | None:
    """A head count or head size that is free: a fused node needs numbers.

    Args:
        graph: the graph the operands lie in.
        shapes: knows their sizes.
        assignment: what they are.
    """
    for role, value in assignment.values.items():
        for group, dim in zip(layouts.axes(assignment.layouts[role]), shapes.shape(value) or (), strict=True):
            if set(group) - set("BT") and not isinstance(dim, int):
                return Reason("heads-unknown", {"role": role, "size": str(dim), "value": graph.name(value)})
    return None


def spread_inside(model: Model, shapes: Shapes, assignment: Assignment, at: Binding) -> Reason | None:
    """Inside a body: operands with batches of their own, one of which may be one in the first step and spread then.

    Args:
        model: with the body as its graph; "" is the place of the main graph.
        shapes: knows the operands' sizes.
        assignment: the operands.
        at: sizes at which the site is the rule.
    """
    if not model.place or len(at.batch_dims) < 2:
        return None
    apart = set(at.batch_dims[1:])
    value = next(value for value in assignment.values.values() if not apart.isdisjoint(shapes.shape(value) or ()))
    return Reason("dims-unknown", {"value": model.graph.name(value)})


def tied(at: Binding) -> Reason | None:
    """A free batch that cannot be one at these tokens: a target that takes one sequence has no use for the site."""
    if at.batch is None or at.at(at.tokens, 1) is not None:
        return None
    return Reason("sizes-tied", {"tokens": at.tokens})


def alone_fails(trial: Trial, at: Binding) -> Reason | None:
    """A site that is not the rule for one sequence, though its batch is free."""
    single = None if at.batch is None else at.at(at.tokens, 1)
    error = 0.0 if single is None else trial.error(single, DRAWS[0], 5)
    if isinstance(error, Reason) or error > _BAR:
        return Reason("batch-one-fails", {"tokens": at.tokens})
    return None
