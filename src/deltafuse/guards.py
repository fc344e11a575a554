"""No hidden guards: a proof by draws holds for analytic operators only.

Agreement on draws proves nothing about a clamp that no draw reaches. So data may pass only through operators that are
analytic in it; whatever is not on the list refuses the match.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onnx import AttributeProto, TensorProto

from deltafuse.bodies import Body, bodies, has_body
from deltafuse.graph import Graph
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.tensors import read_tensor
from deltafuse.wire import Model

TEXTS.update(
    {
        "piecewise": "the operator {op} ({node}) changes the result only for some values (a clamp, a comparison, "
        "a choice by data): no number of trials proves it away, so the site stays as it is; "
        "remove it from the model if it is not meant",
        "unsupported-operator": "the operator {op} ({node}) is not known to be smooth in its data, "
        "so the site is not proven; export it as plain arithmetic",
        "position-gate": "the operator {op} ({node}) makes a step of a loop depend on its number, "
        "so steps that no trial reaches may differ; the site stays as it is",
        "early-exit": "the loop {node} may end before its last token; give it a condition that is always true",
    }
)

_PIECEWISE = frozenset({
    "Clip", "Max", "Min", "Abs", "Sign", "Floor", "Ceil", "Round", "Mod", "Relu", "LeakyRelu", "PRelu",
    "ThresholdedRelu", "HardSigmoid", "HardSwish", "Elu", "Selu", "Celu", "Shrink", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Xor", "Where", "If", "ReduceMax", "ReduceMin",
    "ArgMax", "ArgMin", "TopK", "Softmax", "LogSoftmax", "Hardmax", "QuantizeLinear", "DequantizeLinear",
    "DynamicQuantizeLinear", "IsNaN", "IsInf", "NonZero", "Unique", "Compress", "MaxPool", "BitShift", "BitwiseAnd",
    "BitwiseOr", "BitwiseXor", "BitwiseNot",
})  # fmt: skip

#: Analytic in every operand.
_ANALYTIC = frozenset({
    "Add", "Sub", "Mul", "Div", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "MatMul", "Gemm", "Einsum", "Sum", "Mean",
    "ReduceSum", "ReduceSumSquare", "ReduceL2", "ReduceMean", "Identity", "Transpose", "Flatten", "Concat",
    "SequenceInsert", "SequenceConstruct", "ConcatFromSequence",
})  # fmt: skip

#: Analytic in operand 0 (and, for scatters, 2) as long as the others hold no data.
_ANALYTIC_IN = {
    "Pow": (0,), "CumSum": (0,), "Reshape": (0,), "Expand": (0,), "Tile": (0,), "Squeeze": (0,), "Unsqueeze": (0,),
    "Slice": (0,), "Gather": (0,), "GatherND": (0,), "GatherElements": (0,), "Split": (0,), "Trilu": (0,),
    "Pad": (0, 2), "ScatterND": (0, 2), "ScatterElements": (0, 2), "Where": (1, 2), "Dropout": (0,), "SequenceAt": (0,),
    "SplitToSequence": (0,),
}  # fmt: skip

_REAL = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_SHAPES = frozenset({"Shape", "Size"})
#: The same of onnxruntime's own operators (a product with transposes, an inverse).
_CONTRIB = frozenset({"FusedMatMul", "Inverse", "TransposeMatMul"})


@dataclass(frozen=True)
class Scope:
    """One scope that is searched.

    Attributes:
        model: whose file it is part of.
        shapes: knows the types of the main graph's values; None in a subgraph.
        around, body: the scope that a subgraph lies in, and what it takes from there.
    """

    model: Model
    graph: Graph
    kinds: bytearray
    shapes: Shapes | None
    around: Scope | None = None
    body: Body | None = None

    def dtype(self, value: int) -> int | None:
        """Element type of a value; in a subgraph it is followed to where it comes from."""
        if self.shapes is not None:
            return self.shapes.dtype(value)
        if self.around is None or self.body is None:
            return None
        outer = self.body.outside(self.around.graph, value)
        node = self.graph.producer[value]
        if outer:
            return self.around.dtype(outer)
        if node < 0 or self.graph.op[node] in _PIECEWISE | _SHAPES:
            return None
        if self.graph.op[node] == "Cast":
            return self.graph.attributes(node)["to"].i
        source = self.graph.node_inputs[node][1 if self.graph.op[node] == "CastLike" else 0]
        return self.dtype(source)


def find_guard(scope: Scope, nodes: Sequence[int], data: Collection[int], exempt: Collection[int]) -> Reason | None:
    """Looks for an operator that is not analytic in the data that reaches it.

    Args:
        scope: where the nodes are.
        nodes: a site's nodes, ascending.
        data: values that vary: the roots, and whatever else the cut reads.
        exempt: nodes that are proven otherwise (the floor of a norm).

    Returns:
        A Reason that names the first such node, None where there is none.
    """
    return _search(scope, nodes, set(data), set(), exempt)


def _search(
    scope: Scope, nodes: Sequence[int], tainted: set[int], positions: set[int], exempt: Collection[int]
) -> Reason | None:
    """`find_guard` in one scope; `positions` are values that depend on a step counter."""
    graph = scope.graph
    for node in nodes:
        op, inputs = graph.op[node], graph.node_inputs[node]
        read = graph.reads(node)
        if op in _SHAPES:
            continue
        if not positions.isdisjoint(inputs) and op in _PIECEWISE:
            return _reason(graph, node, "position-gate")
        if tainted.isdisjoint(read):
            if not positions.isdisjoint(read):
                positions.update(graph.node_outputs[node])
            continue
        varying = [position for position, value in enumerate(inputs) if value in tainted]
        found = (
            _search_bodies(scope, node, varying, tainted, positions)
            if has_body(scope.model, graph, node)
            else None
            if node in exempt or _analytic(scope, node, varying)
            else _reason(graph, node)
        )
        if found is not None:
            return found
        tainted.update(graph.node_outputs[node])
    return None


def _search_bodies(
    scope: Scope, node: int, varying: Sequence[int], tainted: set[int], positions: set[int]
) -> Reason | None:
    graph = scope.graph
    decided = {"If": (0,), "Loop": (0, 1)}.get(graph.op[node], ())
    if any(position in decided for position in varying):
        return _reason(graph, node, "piecewise")
    for body in bodies(scope.model, graph, scope.kinds, node):
        if body.flag != (0, 0) and not _runs_through(scope, node, body):
            return _reason(graph, node, "early-exit")
        outer = {value: body.outside(graph, value) for value in range(1, len(body.graph.value_names))}
        inner = {value for value, around in outer.items() if around in tainted} | set(body.carried)
        counted = {value for value, around in outer.items() if around in positions} | set(body.counters)
        within = Scope(body.model, body.graph, body.kinds, None, scope, body)
        found = _search(within, range(len(body.graph.op)), inner, counted, ())
        if found is not None:
            return found
    return None


def _runs_through(scope: Scope, node: int, body: Body) -> bool:
    """Whether a loop's condition is always true: only its trip count ends it."""
    graph, inner = scope.graph, body.graph
    start = graph.node_inputs[node][1]
    if start and not _is_true(scope.model, graph, start):
        return False
    entering, value = body.flag
    while (source := inner.producer[value]) >= 0 and inner.op[source] in ("Identity", "Cast"):
        value = inner.node_inputs[source][0]
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


def _analytic(scope: Scope, node: int, varying: Sequence[int]) -> bool:
    graph = scope.graph
    op = graph.op[node]
    if graph.domain[node] not in ("", "ai.onnx"):
        return graph.domain[node] == "com.microsoft" and op in _CONTRIB
    if op == "Cast":
        return graph.attributes(node)["to"].i in _REAL
    if op == "CastLike":
        return scope.dtype(graph.node_inputs[node][1]) in _REAL
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


def _reason(graph: Graph, node: int, code: str = "") -> Reason:
    op = graph.op[node]
    code = code or ("piecewise" if op in _PIECEWISE else "unsupported-operator")
    return Reason(code, {"op": op, "node": graph.node_name(node) or graph.name(graph.node_outputs[node][0])})
