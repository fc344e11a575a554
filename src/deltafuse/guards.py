"""No hidden guards: a proof by draws holds for analytic operators only.

Agreement on draws proves nothing about a clamp that no draw reaches. So data may pass only through operators that are
analytic in it; whatever is not on the list refuses the match.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnx import AttributeProto, TensorProto

from deltafuse.graph import Graph
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes

TEXTS.update(
    {
        "piecewise": "the operator {op} ({node}) changes the result only for some values (a clamp, a comparison, a choice by "
        "data): no number of trials proves it away, so the site stays as it is; remove it from the model if it is not meant",
        "unsupported-operator": "the operator {op} ({node}) is not known to be smooth in its data, so the site is not proven; "
        "export it as plain arithmetic",
        "unexplained-input": "the value {value} enters the site but is none of the rule's operands",
    }
)

_PIECEWISE = frozenset({
    "Clip", "Max", "Min", "Abs", "Sign", "Floor", "Ceil", "Round", "Mod", "Relu", "LeakyRelu", "PRelu", "ThresholdedRelu",
    "HardSigmoid", "HardSwish", "Elu", "Selu", "Celu", "Shrink", "Equal", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "And", "Or", "Not", "Xor", "Where", "If", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "TopK",
    "Softmax", "LogSoftmax", "Hardmax", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "IsNaN", "IsInf",
    "NonZero", "Unique", "Compress", "MaxPool", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot",
})  # fmt: skip

#: Analytic in every operand.
_ANALYTIC = frozenset({
    "Add", "Sub", "Mul", "Div", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "MatMul", "Gemm", "Einsum", "Sum", "Mean",
    "ReduceSum", "ReduceSumSquare", "ReduceL2", "ReduceMean", "Identity", "Transpose", "Flatten", "Concat",
})  # fmt: skip

#: Analytic in operand 0 (and, for scatters, 2) as long as the others hold no data.
_ANALYTIC_IN = {
    "Pow": (0,), "CumSum": (0,), "Reshape": (0,), "Expand": (0,), "Tile": (0,), "Squeeze": (0,), "Unsqueeze": (0,),
    "Slice": (0,), "Gather": (0,), "GatherND": (0,), "GatherElements": (0,), "Split": (0,), "Trilu": (0,), "Pad": (0, 2),
    "ScatterND": (0, 2), "ScatterElements": (0, 2), "Where": (1, 2), "Dropout": (0,),
}  # fmt: skip

_REAL = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_SHAPES = frozenset({"Shape", "Size"})
#: The same of onnxruntime's own operators (a product with transposes, an inverse).
_CONTRIB = frozenset({"FusedMatMul", "Inverse", "TransposeMatMul"})


def find_guard(
    graph: Graph, shapes: Shapes, nodes: Sequence[int], data: Collection[int], exempt: Collection[int]
) -> Reason | None:
    """Looks for an operator that is not analytic in the data that reaches it.

    Args:
        nodes: a site's nodes, ascending.
        data: values that vary: the roots, and whatever else the cut reads.
        exempt: nodes that are proven otherwise (the floor of a norm).

    Returns:
        A Reason that names the first such node, None where there is none.
    """
    tainted = set(data)
    for node in nodes:
        op, inputs = graph.op[node], graph.node_inputs[node]
        varying = [position for position, value in enumerate(inputs) if value in tainted]
        captured = [value for value in graph.captures.get(node, ()) if value in tainted]
        if not (varying or captured) or op in _SHAPES:
            continue
        if node not in exempt and (captured or not _analytic(graph, shapes, node, varying)):
            return _reason(graph, node)
        tainted.update(graph.node_outputs[node])
    return None


def _analytic(graph: Graph, shapes: Shapes, node: int, varying: Sequence[int]) -> bool:
    op = graph.op[node]
    if graph.domain[node] not in ("", "ai.onnx"):
        return graph.domain[node] == "com.microsoft" and op in _CONTRIB
    if op == "Cast":
        return graph.attributes(node)["to"].i in _REAL
    if op == "CastLike":
        return shapes.dtype(graph.node_inputs[node][1]) in _REAL
    if op in _ANALYTIC:
        return True
    if op not in _ANALYTIC_IN or any(position not in _ANALYTIC_IN[op] for position in varying):
        return False
    return _plain_mode(op, graph.attributes(node))


def _plain_mode(op: str, attributes: dict[str, AttributeProto]) -> bool:
    """Scatters that overwrite or add; pads with a constant."""
    if op in ("ScatterND", "ScatterElements"):
        return "reduction" not in attributes or attributes["reduction"].s in (b"none", b"add")
    if op == "Pad":
        return "mode" not in attributes or attributes["mode"].s == b"constant"
    return True


def _reason(graph: Graph, node: int) -> Reason:
    op = graph.op[node]
    code = "piecewise" if op in _PIECEWISE else "unsupported-operator"
    return Reason(code, {"op": op, "node": graph.node_name(node) or graph.name(graph.node_outputs[node][0])})
