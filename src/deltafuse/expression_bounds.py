"""Constant bounds of slices: a size beyond all that were tried may be cut by them, and a proof would not see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deltafuse.dims import Dim, Expr, evaluate, symbols
from deltafuse.expression_guard import Checked
from deltafuse.graph import Graph
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shape_op import elements
from deltafuse.shapes import Shapes

TEXTS["expression-bound"] = (
    "the slice that writes {value} has the bound {bound} on an axis of free size: no size beyond it was tried, so that "
    "it may be a limit that {rule} has not; give that axis a fixed size"
)

#: What exporters write for "to the end".
_END = 2**31 - 1


def untried(
    graph: Graph, shapes: Shapes, checked: Checked, rule: str, sizes: Sequence[Mapping[str, int]]
) -> Reason | None:
    """The first slice of a free axis that no choice of sizes reaches beyond.

    Args:
        graph: the main graph.
        shapes: its shapes.
        checked: the site.
        rule: name of the pattern.
        sizes: the numbers for the symbols, each way that is run.
    """
    for node in checked.nodes:
        if graph.op[node] != "Slice" or graph.domain[node]:
            continue
        for axis, bounds in _bounds(graph, shapes, node):
            largest = max((_number(axis, way) for way in sizes), default=0)
            over = [bound for bound in bounds if largest <= abs(bound) < _END]
            if over:
                args = {"value": graph.name(graph.node_outputs[node][0]), "bound": over[0], "rule": rule}
                return Reason("expression-bound", args)
    return None


def _bounds(graph: Graph, shapes: Shapes, node: int) -> Iterator[tuple[Expr, list[int]]]:
    """Free axes of what is sliced, each with its constant bounds."""
    dims = shapes.shape(graph.node_inputs[node][0]) or ()
    starts, ends, axes = (_items(graph, shapes, node, *one) for one in ((1, "starts"), (2, "ends"), (3, "axes")))
    for place, axis in enumerate(axes or range(len(starts))):
        dim = dims[axis] if isinstance(axis, int) and -len(dims) <= axis < len(dims) else 0
        given = (some[place] for some in (starts, ends) if place < len(some))
        if not isinstance(dim, int):
            yield dim, [bound for bound in given if isinstance(bound, int)]


def _items(graph: Graph, shapes: Shapes, node: int, place: int, name: str) -> Sequence[object]:
    """An argument of a Slice: an input, or an attribute before opset 10."""
    inputs, attributes = graph.node_inputs[node], graph.attributes(node)
    if name in attributes:
        return list(attributes[name].ints)
    found = shapes.contents(inputs[place]) if place < len(inputs) and inputs[place] else None
    return () if found is None else elements(found)


def _number(dim: Dim, sizes: Mapping[str, int]) -> int:
    """A size in numbers, 0 where it hangs on something that no operand has as a size."""
    return evaluate(dim, sizes) if set(symbols(dim)) <= sizes.keys() else 0
