"""Comparisons and arithmetic of sizes and positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltafuse.quasi_linear import LARGEST_CHUNK
from deltafuse.size_flow import FARTHEST, GATE, NEAREST, Flow, FlowKind
from deltafuse.size_values import ENDS, WHOLE, WIDE, SizedValues


def cast_size(values: SizedValues, node: int, given: Sequence[Flow | None]) -> Flow:
    """A size or position in another type."""
    graph = values.scope.graph
    outputs, inputs = graph.node_outputs[node], graph.node_inputs[node]
    wanted = graph.attributes(node)["to"].i if graph.standard[node] == "Cast" else values.scope.dtype(inputs[1])
    whole = values.scope.dtype(inputs[0]) in WHOLE
    return given[0] or GATE if wanted in WIDE and whole and len(outputs) == 1 else GATE


def compared(values: SizedValues, node: int, given: Sequence[Flow | None]) -> Flow:
    """Positions with positions, with a size or with the first of them; constants move them by one at most.

    With any other constant two such masks could together be drawn at one single size.
    """
    inputs = values.scope.graph.node_inputs[node]
    flows = [flow for flow in given if flow is not None]
    kinds = {flow.kind for flow in flows}
    pairs = ({FlowKind.PLACE}, {FlowKind.PLACE, FlowKind.SIZE}, {FlowKind.SPAN})
    moved = sum(map(values.moved_by, inputs))
    if kinds not in pairs or moved > NEAREST:
        return GATE
    for value, flow in zip(inputs, given, strict=True):
        array = values.scope.constant(value) if flow is None else None
        if flow is None and (array is None or not ENDS.issuperset(array.ravel().tolist())):
            return GATE
        if values.is_size(value) and not (values.is_plain(value) and values.is_along_tokens(value)):
            return GATE
    values.sizes.masks = True
    return Flow(FlowKind.MASK, int(moved)) if len(flows) < 2 or kinds != {FlowKind.SPAN} else GATE


def counted(values: SizedValues, op: str, node: int, given: Sequence[Flow | None]) -> Flow:
    """Whole numbers made of positions, sizes and small constants."""
    if op in ("Add", "Sub"):
        return _moved(values, op, node, given)
    kinds = [flow.kind for flow in given if flow is not None]
    moved = max((flow.moved for flow in given if flow is not None), default=0)
    plain = Flow(FlowKind.SIZE if kinds == [FlowKind.SIZE] else FlowKind.INDEX, moved)
    if op == "Neg":
        return plain
    if len(kinds) > 1:
        return GATE
    graph = values.scope.graph
    inputs = graph.node_inputs[node]
    (other,) = [value for value, flow in zip(inputs, given, strict=True) if flow is None]
    dtype = values.scope.dtype(inputs[0]) or 0
    if op == "Mul":
        factor = values.scope.constant(other)
        largest = float("inf") if factor is None else float(np.abs(factor).max(initial=0.0))
        if kinds == [FlowKind.SIZE]:
            fits = largest <= WIDE.get(dtype, 0) and moved * largest <= FARTHEST
            return Flow(plain.kind, int(moved * largest)) if fits else GATE
        # Positions that lie far apart are beyond all that is tried but for the first.
        fits = largest <= LARGEST_CHUNK and moved * largest <= FARTHEST
        return Flow(plain.kind, FARTHEST if largest > 1.0 else moved) if fits else GATE
    if op in ("Div", "Mod") and given[1] is None and kinds == [FlowKind.PLACE]:
        divisor = values.scope.number(other) or 0
        return Flow(FlowKind.INDEX, FARTHEST) if dtype in WHOLE and 0 < divisor <= LARGEST_CHUNK else GATE
    return GATE


def _moved(values: SizedValues, op: str, node: int, given: Sequence[Flow | None]) -> Flow:
    """A sum or difference."""
    inputs = values.scope.graph.node_inputs[node]
    steps = [
        values.reach_of(value) for value, flow in zip(inputs, given, strict=True)
        if flow is None or flow.kind in (FlowKind.FLAT, FlowKind.TABLE)
    ]  # fmt: skip
    flows = [flow for flow in given if flow is not None]
    kinds = {flow.kind for flow in flows}
    total = sum(step or 0 for step in steps) + sum(map(values.moved_by, inputs))
    if None in steps or total > FARTHEST:
        return GATE
    total = int(total)
    if kinds == {FlowKind.SIZE}:
        return Flow(FlowKind.SIZE, total)
    places = [flow for flow in flows if flow.kind == FlowKind.PLACE]
    if op == "Sub" and len(places) == 2:
        return Flow(FlowKind.SPAN, total)
    if len(flows) == 1 and kinds <= {FlowKind.PLACE, FlowKind.SPAN} and given[0] is not None:
        return Flow(flows[0].kind, total)
    ends = kinds == {FlowKind.PLACE, FlowKind.SIZE} and all(values.is_plain(v) for v in inputs if values.is_size(v))
    if ends and (op == "Add" or given[0] in places):
        return Flow(FlowKind.PLACE, total)
    if op == "Add" and len(flows) == 1 and kinds == {FlowKind.PLACE}:
        return Flow(FlowKind.PLACE, total)
    return Flow(FlowKind.INDEX, total)
