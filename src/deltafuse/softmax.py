"""Attention with a softmax, the neighbour of linear attention that is in most models: known by its form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from deltafuse.anchors import contracts_data
from deltafuse.classes import Kind
from deltafuse.finder import Candidate
from deltafuse.graph import Graph
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.patterns import Pattern
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes

__all__ = ["SOFTMAX_ATTENTION", "scores_inside", "softmax_attention", "weighs_values"]

#: Reason of a candidate that is such an attention.
SOFTMAX_ATTENTION = "softmax-attention"
TEXTS["softmax-attention"] = (
    "the softmax {node} of values inside the site weighs others: this is attention with softmax and not {rule}; leave "
    "it as it is, or take the softmax out of the model, if {rule} is meant"
)
#: Steps between a softmax and the contraction with the values: a cast, a dropout, a transpose, a reshape; and between
#: the contraction of queries with keys and the softmax: a scale, a mask, a bias, a soft cap.
_STEPS = 8
#: Operators that leave all numbers of a softmax at their places.
_IN_PLACE = frozenset({"Cast", "Identity", "Dropout", "Mul", "Where"})


def scores_inside(shapes: Shapes, candidate: Candidate, rule: Pattern) -> Reason | None:
    """Says that values of a site are the scores of an attention: their softmax is multiplied along its own last axis.

    Args:
        shapes: of the candidate's graph.
        candidate: that is no rule.
        rule: what it was taken for; without a decay an exponential is no part of a site, but reads its results.
    """
    graph = shapes.graph
    readers = (reader for value in candidate.frontier for reader in graph.consumers[value])
    for node in candidate.core if rule.decay != "none" else dict.fromkeys(readers):
        if any(_multiplies(graph, value) for value in _last_softmax(shapes, node)):
            return Reason(SOFTMAX_ATTENTION, {"node": graph.label(node), "rule": rule.name})
    return None


def softmax_attention(graph: Graph, kinds: bytearray) -> list[int]:
    """Nodes of a graph that are attention: an operator called so, or a softmax between two contractions of data."""
    named = {op for op in set(graph.op) if op.endswith("Attention") and op != LINEAR_ATTENTION}
    return [
        node
        for node in graph.nodes_with({"Softmax", "Exp", *named})
        if graph.op[node] in named
        or (
            (graph.standard[node] == "Softmax" or _divided(graph, node))
            and weighs_values(graph, kinds, node)
            and _of_scores(graph, kinds, node)
        )
    ]


def weighs_values(graph: Graph, kinds: bytearray, softmax: int) -> bool:
    """Whether data is contracted with a softmax's result, as attention's values are."""

    def readers(value: int) -> Iterable[int]:
        return graph.consumers[value]

    return _reaches(graph, kinds, graph.node_outputs[softmax], readers, lambda node: graph.node_outputs[node])


def _of_scores(graph: Graph, kinds: bytearray, softmax: int) -> bool:
    """Whether it is taken of a contraction of data with data."""

    def producer(value: int) -> Iterable[int]:
        return [node for node in (graph.producer[value],) if node >= 0]

    return _reaches(graph, kinds, graph.reads(softmax), producer, graph.reads)


def _reaches(
    graph: Graph,
    kinds: bytearray,
    start: Iterable[int],
    nodes_at: Callable[[int], Iterable[int]],
    values_of: Callable[[int], Iterable[int]],
) -> bool:
    values = {value for value in start if kinds[value] == Kind.DATA}
    for _ in range(_STEPS):
        nodes = {node for value in values for node in nodes_at(value)}
        if any(contracts_data(graph, kinds, node) for node in nodes):
            return True
        values = {value for node in nodes for value in values_of(node) if kinds[value] == Kind.DATA}
    return False


def _last_softmax(shapes: Shapes, node: int) -> Iterator[int]:
    """The softmax along the last axis that a node gives, or that is made of its exponential."""
    graph = shapes.graph
    if graph.standard[node] == "Softmax":
        axis = graph.attributes(node).get("axis")
        if _is_last(shapes, graph.node_outputs[node][0], -1 if axis is None else axis.i):
            yield graph.node_outputs[node][0]
    for total, quotient in _divided(graph, node):
        axes = graph.attributes(total).get("axes")
        given = graph.node_inputs[total][1:2]
        contents = shapes.contents(given[0]) if given and given[0] else None
        read = list(axes.ints) if axes is not None else [] if contents is None else contents.ravel().tolist()
        if len(read) == 1 and _is_last(shapes, graph.node_inputs[total][0], read[0]):
            yield quotient


def _is_last(shapes: Shapes, value: int, axis: object) -> bool:
    shape = shapes.shape(value)
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _divided(graph: Graph, node: int) -> list[tuple[int, int]]:
    """Of an exponential, each node that sums it up and the quotient of both: a softmax that is written out."""
    if graph.standard[node] != "Exp":
        return []
    own = _copies(graph, graph.node_outputs[node][0])
    found: list[tuple[int, int]] = []
    for total in _readers(graph, own, "ReduceSum"):
        sums = _copies(graph, graph.node_outputs[total][0])
        inverse = {graph.node_outputs[reader][0] for reader in _readers(graph, sums, "Reciprocal")}
        quotients = [one for one in _readers(graph, own, "Div") if graph.node_inputs[one][1] in sums]
        quotients += [one for one in _readers(graph, own, "Mul") if not inverse.isdisjoint(graph.node_inputs[one])]
        found += [(total, graph.node_outputs[one][0]) for one in quotients]
    return found


def _multiplies(graph: Graph, value: int) -> bool:
    """Whether a matrix product sums over the last axis of a value."""
    seen, stack = {value}, [value]
    while stack:
        own = stack.pop()
        for node in graph.consumers[own]:
            if graph.standard[node] == "MatMul" and graph.node_inputs[node][0] == own:
                return True
            result = graph.node_outputs[node][0]
            if graph.standard[node] in _IN_PLACE and result not in seen:
                seen.add(result)
                stack.append(result)
    return False


def _copies(graph: Graph, value: int) -> set[int]:
    """A value, and what casts make of it."""
    return {value, *(graph.node_outputs[node][0] for node in _readers(graph, (value,), "Cast"))}


def _readers(graph: Graph, values: Iterable[int], op: str) -> list[int]:
    return [node for value in values for node in graph.consumers[value] if graph.standard[node] == op]
