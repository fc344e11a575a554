"""Loops whose condition counts: `while t < T` as an exporter writes it."""

from __future__ import annotations

import numpy as np

from deltafuse.bodies import Body, bodies
from deltafuse.graph import Graph
from deltafuse.reasons import Reason
from deltafuse.scope import Scope
from deltafuse.tensors import read_tensor
from deltafuse.wire import Model

#: A trip count from here on is none: exporters write the largest number there is.
_ENDLESS = 2**31 - 1


def trip_count(model: Model, graph: Graph, kinds: bytearray, node: int) -> int:
    """The value that says how many steps a Loop takes: its trip count, or the limit that its condition counts to.

    0 where there is neither, or where there are both: then it is not known which ends the loop.
    """
    trips = graph.node_inputs[node][0]
    limits = [limit(model, graph, node, body) for body in bodies(model, graph, kinds, node)]
    if not limits or not limits[0]:
        return trips
    count = _number(model, graph, trips) if trips else _ENDLESS
    return limits[0] if count is not None and count >= _ENDLESS else 0


def limit(model: Model, graph: Graph, node: int, body: Body) -> int:
    """The value around a Loop that its condition compares a counter from 0 with, 0 where that is not what it does."""
    inner = body.graph
    result = inner.uncast(body.flag[1])
    compare = inner.producer[result]
    if compare < 0 or inner.standard[compare] != "Less":
        return 0
    counter, bound = inner.node_inputs[compare]
    around = body.outside(graph, bound)
    if not around or not _counts_up(model, graph, node, body, counter):
        return 0
    first = graph.producer[graph.uncast(graph.node_inputs[node][1])] if graph.node_inputs[node][1] else -1
    if first < 0 or graph.standard[first] != "Less" or graph.node_inputs[first][1] != around:
        return 0
    return around if _number(model, graph, graph.node_inputs[first][0]) == 0 else 0


def _counts_up(model: Model, graph: Graph, node: int, body: Body, after: int) -> bool:
    """Whether a body value is a carried counter after one more step, which starts at 0 and grows by 1."""
    inner = body.graph
    add = inner.producer[after]
    if add < 0 or inner.standard[add] != "Add":
        return False
    for counter, step in (inner.node_inputs[add], inner.node_inputs[add][::-1]):
        if counter in body.counters[1:]:
            place = inner.inputs.index(counter)
            carried = inner.outputs[place - 1] == after
            start = _number(model, graph, graph.node_inputs[node][place])
            return carried and start == 0 and _number(body.model, inner, step) == 1
    return False


def _number(model: Model, graph: Graph, value: int) -> int | None:
    """The integer that a constant is."""
    node = graph.producer[value]
    head = graph.initializers.get(value) or (graph.constant_head(node) if node >= 0 else None)
    if head is None or head.elements != 1:
        return None
    array = read_tensor(model, head)
    if isinstance(array, Reason) or not np.issubdtype(array.dtype, np.integer):
        return None
    return int(array.ravel()[0])


def is_brief(scope: Scope, node: int) -> bool:
    """Whether a loop takes the same number of steps whatever the sizes are."""
    trips = scope.graph.node_inputs[node][0]
    return scope.graph.standard[node] == "Loop" and trips != 0 and scope.number(trips) is not None


def runs_through(scope: Scope, node: int, body: Body) -> bool:
    """Whether a loop's condition is always true: only its trip count ends it."""
    graph, inner = scope.graph, body.graph
    start = graph.node_inputs[node][1]
    if start and not _is_true(scope.model, graph, start):
        return False
    entering, value = body.flag[0], inner.uncast(body.flag[1])
    if value == entering or _is_true(body.model, inner, value):
        return True
    around = body.outside(graph, value)
    return around != 0 and _is_true(scope.model, graph, around)


def _is_true(model: Model, graph: Graph, value: int) -> bool:
    node = graph.producer[value]
    head = graph.initializers.get(value) or (graph.constant_head(node) if node >= 0 else None)
    if head is None or head.elements != 1:
        return False
    array = read_tensor(model, head)
    return not isinstance(array, Reason) and bool(array.all())
