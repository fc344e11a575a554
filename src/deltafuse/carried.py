"""What the steps of a loop hand on to each other, and what comes out of a subgraph."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from deltafuse.bodies import Body, bodies
from deltafuse.constant_numbers import ConstantNumbers
from deltafuse.scope import SHAPES, Scope
from deltafuse.size_flow import GATE, PLACE, Flow, FlowKind

#: All that a branch chosen by a size may do with data. A trial says little of what is computed at some sizes only.
_LAYS_OUT = frozenset({"Identity", "Cast", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Pad"})


def from_data(body: Body, data: Collection[int]) -> set[int]:
    """The carried values that are data: their start, or what a step makes of them, comes from data.

    Args:
        body: of a Loop or Scan.
        data: its values that are data around it.
    """
    graph, found = body.graph, set(data)
    standard, outputs = graph.standard, graph.node_outputs
    size = -1
    while size < len(found):
        size = len(found)
        for node in range(len(graph.op)):
            if standard[node] not in SHAPES and not found.isdisjoint(graph.reads(node)):
                found.update(outputs[node])
        found.update(value for value, after in body.carried.items() if after in found)
    return found.intersection(body.carried)


def changing(body: Body, data: Collection[int]) -> Iterator[int]:
    """The carried values that are no data, and not the same in each step: they follow the number of the step."""
    for value, after in body.carried.items():
        if value not in data and body.graph.uncast(after) != value:
            yield value


def counter(scope: Scope, node: int, value: int) -> Flow:
    """A loop's own counter, or one that is carried: the number of a step where it counts by one from the first."""
    inner, around = scope.graph, scope.around
    assert around is not None, "a counter is one of a loop"
    place = inner.inputs.index(value)
    if place == 0:
        return PLACE
    # A carried value has its start in the scope around, and its next value among the results.
    start = around.number(around.graph.node_inputs[node][place])
    add = inner.producer[inner.uncast(inner.outputs[place - 1])]
    steps = [scope.number(other) for other in inner.node_inputs[add] if inner.uncast(other) != value]
    return Flow(FlowKind.PLACE, int(abs(start))) if start in (-1.0, 0.0, 1.0) and steps == [1.0] else GATE


def only_lays_out(scope: Scope, data: Collection[int]) -> bool:
    """Whether a branch only lays its data out, and pads it with zeros.

    Args:
        scope: the branch.
        data: its values that are data.
    """
    graph, numbers = scope.graph, ConstantNumbers(scope)
    for node, op in enumerate(graph.standard):
        if op in SHAPES or not any(value in data for value in graph.reads(node)):
            continue
        fill = graph.node_inputs[node][2:3] if op == "Pad" else ()
        if op not in _LAYS_OUT or any(value and not numbers.are_zeros(value) for value in fill):
            return False
    return True


def squeezes(scope: Scope, node: int) -> bool:
    """Whether a choice is torch's squeeze: an axis goes where its own size is one, and else all stays as it is.

    Args:
        scope: that the choice lies in.
        node: an If.
    """
    graph = scope.graph
    asked = _asked(scope, graph.node_inputs[node][0])
    if asked is None:
        return False
    value, axis = asked
    for body in bodies(scope.model, graph, scope.kinds, node):
        within = Scope(body.model, body.graph, body.kinds, None, scope, body)
        for inner, op in enumerate(body.graph.standard):
            inputs = body.graph.node_inputs[inner]
            if op == "Constant":
                continue
            same = op == "Identity" or (op == "Squeeze" and len(inputs) == 2 and within.number(inputs[1]) == axis)
            if not same or within.outer(inputs[0]) != value:
                return False
    return True


def _asked(scope: Scope, condition: int) -> tuple[int, float] | None:
    """The value, and its axis, whose size a condition holds against one; None where it asks for something else."""
    graph, value, axis = scope.graph, condition, None
    for op in ("Equal", "Gather", "Shape"):
        node = graph.producer[value]
        if node < 0 or graph.standard[node] != op:
            return None
        inputs = graph.node_inputs[node]
        number = scope.number(inputs[1]) if op != "Shape" else None
        if (op == "Equal" and number != 1.0) or (op == "Shape" and graph.attributes(node)):
            return None
        axis = number if op == "Gather" else axis
        value = inputs[0]
    return None if axis is None else (value, axis)
