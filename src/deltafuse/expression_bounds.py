"""Bounds of slices: a size beyond all that were tried may be cut by them, and a proof would not see it.

A bound counts from the start or from the end of its axis, and is cut off at both. Where it is a number or a multiple of
one free size and a number, there is a size from which on nothing of this changes any more: beyond it two are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deltafuse.dim_algebra import Monomial
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
            over = [bound for bound in bounds if not _is_tried(axis, bound, sizes)]
            if over:
                args = {"value": graph.name(graph.node_outputs[node][0]), "bound": over[0], "rule": rule}
                return Reason("expression-bound", args)
    return None


def _is_tried(axis: Expr, bound: Dim, sizes: Sequence[Mapping[str, int]]) -> bool:
    """Whether sizes are tried beyond all at which a bound of an axis acts in another way."""
    if isinstance(bound, int):
        largest = max((_number(axis, way) for way in sizes), default=0)
        return abs(bound) < largest or abs(bound) >= _END
    # Where the bound meets the start of the axis or its end, counted from either.
    meets = (bound, bound + axis, bound - axis)
    names = {name for place in (axis, bound) for name in symbols(place)}
    if len(names) != 1 or not all(_is_line(place) for place in meets):
        return False
    (name,) = names
    zeros = [_zero(place) for place in meets if isinstance(place, Expr)]
    beyond = {way[name] for way in sizes if name in way and all(way[name] > zero for zero in zeros)}
    return len(beyond) > 1


def _is_line(dim: Dim) -> bool:
    """Whether a size is a multiple of its symbol and a number."""
    return isinstance(dim, int) or all(not monomial or _power(monomial) == 1 for monomial, _ in dim.terms)


def _power(monomial: Monomial) -> int:
    return sum(power if isinstance(atom, str) else 2 for atom, power in monomial)


def _zero(line: Expr) -> float:
    """The size of its symbol at which a line is nothing."""
    factors = {bool(monomial): factor for monomial, factor in line.terms}
    return -factors.get(False, 0) / factors[True]


def _bounds(graph: Graph, shapes: Shapes, node: int) -> Iterator[tuple[Expr, list[Dim]]]:
    """Free axes of what is sliced, each with its bounds that are known."""
    dims = shapes.shape(graph.node_inputs[node][0]) or ()
    starts, ends, axes = (_items(graph, shapes, node, *one) for one in ((1, "starts"), (2, "ends"), (3, "axes")))
    for place, axis in enumerate(axes or range(len(starts))):
        dim = dims[axis] if isinstance(axis, int) and -len(dims) <= axis < len(dims) else 0
        given = (some[place] for some in (starts, ends) if place < len(some))
        if not isinstance(dim, int):
            yield dim, [bound for bound in given if isinstance(bound, (int, Expr))]


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
