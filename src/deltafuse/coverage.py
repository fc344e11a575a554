"""Whether a site is the rule for the whole token axis, or only happens to be for some sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import cast

import numpy as np

from deltafuse.bench import Binding
from deltafuse.dims import Dim, is_clamped
from deltafuse.draws import DRAWS, Array, Operands
from deltafuse.graph import Graph
from deltafuse.match import Validity
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.trial import Trial

TEXTS.update(
    {
        "trip-count": "the loop {node} has a trip count that does not follow the token axis ({count}): "
        "it may stop before the last token; give it the number of tokens",
        "few-tokens-only": "the site is the rule for {low} to {high} tokens only and computes something else from "
        "more; compare it with the rule's recurrence",
    }
)

#: From this many tokens on a site shows each step of the rule; below, wrong rules agree with it too.
_TELLING = 3


def short_loop(graph: Graph, shapes: Shapes, loops: Sequence[int]) -> Reason | None:
    """A loop whose trip count is not known to follow the token axis: it may stop short where no trial goes.

    Args:
        graph: the graph they lie in.
        shapes: knows the trip counts.
        loops: Loop and Scan nodes; a Scan takes its axis whole.
    """
    for node in loops:
        if graph.op[node] != "Loop":
            continue
        trips = shapes.contents(graph.node_inputs[node][0])
        count = [] if trips is None else cast("list[Dim]", trips.ravel().tolist())
        # A fixed count shows in the valid range.
        if len(count) != 1 or is_clamped(count[0]):
            shown = ", ".join(map(str, count)) or "not known"
            return Reason("trip-count", {"node": graph.node_name(node), "count": shown})
    return None


def other_beyond(trial: Trial, binding: Binding, validity: Validity, *, looping: bool) -> Reason | None:
    """A site that is another rule where it is not this one, rather than one that was traced for these sizes.

    What was traced for one token leaves later tokens alone; what reads them and gives other results is another rule
    that agrees on one token only. A loop takes tokens as they come, so that for it any wrong size tells.
    """
    reason = Reason("few-tokens-only", {"low": validity.low, "high": validity.high})
    if looping and "wrong" in (validity.above, validity.below):
        return reason
    if binding.tokens is None or validity.high >= _TELLING or validity.above != "wrong":
        return None
    return reason if _reads_beyond(trial, binding, validity.high) else None


def _reads_beyond(trial: Trial, binding: Binding, high: int) -> bool:
    """Whether tokens behind the first `high` ones change a result."""
    larger = binding.at(high + _TELLING, binding.batch)
    if larger is None:
        return True
    operands, _ = trial.draw(larger, DRAWS[0], 1)
    results = [trial.results(larger, changed) for changed in (operands, _later_doubled(operands, high))]
    first, second = results
    if isinstance(first, Reason) or isinstance(second, Reason):
        return False
    return any(not _equal(first, second, value) for value in first)


def _equal(first: Mapping[int, Array], second: Mapping[int, Array], value: int) -> bool:
    return bool(np.allclose(first[value], second[value], rtol=1e-9, atol=0))


def _later_doubled(operands: Operands, high: int) -> Operands:
    """Every operand but the state with its later tokens changed."""
    changed: dict[str, Array] = {}
    for field in fields(operands):
        array = np.array(cast("Array", getattr(operands, field.name)))
        if field.name != "state":
            array[:, high:] *= 0.5
        changed[field.name] = array
    return replace(operands, **changed)
