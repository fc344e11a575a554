"""Operators that nobody knows: what stands behind a rule may be such, and then it is no part of what is proven."""

from __future__ import annotations

from collections.abc import Sequence

from deltafuse.bodies import is_call
from deltafuse.classes import Kind
from deltafuse.guards import CONTRIB, KNOWN
from deltafuse.probe import backward_slice
from deltafuse.wire import Model

#: Operators of a norm, of a decay, and those that hold a subgraph: what is said of them depends on where they stand.
_ELSEWHERE = frozenset({
    "Cast", "CastLike", "Exp", "Div", "Reciprocal", "Pow", "Sqrt", "ReduceL2", "LpNormalization", "Log", "Loop", "Scan",
})  # fmt: skip


def behind_strangers(model: Model, kinds: bytearray, inputs: Sequence[int], ends: Sequence[int]) -> set[int]:
    """The nodes between some values that are operators of no rule, or behind one.

    Args:
        model: in topological order.
        kinds: of its values.
        inputs: where to begin.
        ends: where to end.
    """
    graph = model.graph
    nodes, _ = backward_slice(graph, inputs, ends)
    strange: set[int] = set()
    for node in nodes:
        if _is_stranger(model, kinds, node) or any(graph.producer[value] in strange for value in graph.reads(node)):
            strange.add(node)
    return strange


def _is_stranger(model: Model, kinds: bytearray, node: int) -> bool:
    """Whether a node makes data in a way that is never part of a rule, or that nobody knows."""
    graph = model.graph
    if kinds[graph.node_outputs[node][0]] != Kind.DATA or is_call(model, graph, node):
        return False
    op = graph.op[node]
    if graph.domain[node] not in ("", "ai.onnx"):
        return op not in CONTRIB or graph.domain[node] != "com.microsoft"
    return op not in KNOWN and op not in _ELSEWHERE
