"""Roots that no operand of a rule can be, and what a model lets others decide."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from deltafuse.classes import Kind
from deltafuse.dtypes import dtype_name
from deltafuse.graph import Graph
from deltafuse.probe_double import FLOATS
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes

TEXTS.update(
    {
        "root-type": "the site depends on {value} ({type}), and a rule has operands of floating point only; {fix}",
        "overridable": "the site depends on {value}, an initializer that is an input too, and whoever runs the model "
        "may give another; take it out of the graph's inputs, then it is a constant",
    }
)

_OVERRIDABLE = "take it out of the graph's inputs, then it is a constant"


def odd_root(graph: Graph, kinds: bytearray, shapes: Shapes, roots: Sequence[int]) -> Reason | None:
    """A root that is of no floating point type: a flag or an index that is given when the model runs."""
    for root in roots:
        if (shapes.dtype(root) or TensorProto.FLOAT) in FLOATS:
            continue
        value = _given(graph, kinds, root)
        dtype = shapes.dtype(value) or 0
        if value in graph.initializers:
            fix = _OVERRIDABLE
        elif value in graph.inputs:
            fix = "make the input a constant, or export the branch that it chooses"
        else:
            fix = "compute what it decides outside of the rule"
        names = {"value": graph.name(value), "type": dtype_name(dtype), "fix": fix}
        return Reason("root-type", names)
    return None


def _given(graph: Graph, kinds: bytearray, root: int) -> int:
    """The initializer that may be another, of those that a value is computed from; the value where there is none."""
    seen, stack = {0}, [root]
    while stack:
        value = stack.pop()
        if value in graph.initializers and kinds[value] == Kind.DATA:
            return value
        if value not in seen and graph.producer[value] >= 0:
            stack += graph.reads(graph.producer[value])
        seen.add(value)
    return root


def overridable(graph: Graph, roots: Sequence[int]) -> Reason | None:
    """A root that is a constant unless another is given when the model runs."""
    for value in roots:
        if value in graph.initializers:
            return Reason("overridable", {"value": graph.name(value)})
    return None
