"""How far an index tensor reaches: what a gather with ``arange(batch)`` says about the axis that it indexes."""

from __future__ import annotations

from deltafuse.dims import Dim
from deltafuse.shapes import Shapes

#: Operators that pass every index on unchanged.
_PASSING = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})


def index_extents(shapes: Shapes, indices: int) -> list[Dim | None]:
    """For the index tensor of a GatherND: the number of consecutive indices from 0 that each component counts.

    Args:
        shapes: the engine of the graph.
        indices: value id of the index tensor, [..., components].

    Returns:
        One entry a component: N where it is ``arange(N)`` spread over the tensor, None where that is not seen.
    """
    graph = shapes.graph
    node = graph.producer[indices]
    if node < 0 or graph.standard[node] != "Concat":
        return []
    widths = [shapes.shape(part) for part in graph.node_inputs[node]]
    if any(width is None or width[-1:] != (1,) for width in widths):
        return []
    return [_extent(shapes, part) for part in graph.node_inputs[node]]


def _extent(shapes: Shapes, value: int) -> Dim | None:
    graph = shapes.graph
    while True:
        node = graph.producer[value]
        if node < 0:
            return None
        op, inputs = graph.standard[node], graph.node_inputs[node]
        if op == "Where":  # negative indices counted from the end: Where(i < 0, i + size, i)
            value = inputs[2]
        elif op in _PASSING:
            value = inputs[0]
        else:
            return _range_length(shapes, value) if op == "Range" else None


def _range_length(shapes: Shapes, value: int) -> Dim | None:
    inputs = shapes.graph.node_inputs[shapes.graph.producer[value]]
    start, delta = shapes.contents(inputs[0]), shapes.contents(inputs[2])
    if start is None or delta is None or (start.item(), delta.item()) != (0, 1):
        return None
    shape = shapes.shape(value)
    return None if shape is None else shape[0]
