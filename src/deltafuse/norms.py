"""The L2 norm between a root and the rule: taken over from the source, so that it can be made again on fewer heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from deltafuse.classes import Kind
from deltafuse.draws import Array
from deltafuse.graph import Graph
from deltafuse.match import Norm
from deltafuse.norm_form import read_form
from deltafuse.probe import to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.scope import SHAPES
from deltafuse.shapes import Shapes
from deltafuse.wire import Model, read_tensor
from deltafuse.worker import Session, Worker

TEXTS.update(
    {
        "norm-unknown": "between {value} and the rule lies arithmetic that is no known L2 norm ({op}); "
        "move it before the heads are repeated",
    }
)

_REDUCTIONS = frozenset({"ReduceSum", "ReduceSumSquare", "ReduceL2"})
_ARITHMETIC = _REDUCTIONS | {"Add", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Max", "Clip", "Cast"}
_LAYOUT = frozenset({"Transpose", "Identity", "Expand", "Unsqueeze", "Squeeze", "Reshape"})

#: First opset in which each reduction takes its axes as an input.
_AXES_INPUT = {"ReduceSum": 13, "ReduceSumSquare": 18, "ReduceL2": 18}
_LIMIT = 1 << 10
#: Norms of the rows that every norm is run on.
_NORMS = (1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e12, 1e30, 1e60)


@dataclass
class _Copy:
    """A norm's arithmetic, layout operators left out, as it is collected.

    Attributes:
        inside: the source's nodes, layout too -> the local name of their result.
    """

    model: Model
    kinds: bytearray
    shapes: Shapes
    start: int
    names: dict[int, str] = field(default_factory=dict[int, str])
    nodes: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    source_nodes: list[int] = field(default_factory=list[int])
    inside: dict[int, str] = field(default_factory=dict[int, str])
    initializers: dict[str, TensorProto] = field(default_factory=dict[str, TensorProto])

    def value(self, value: int) -> str | Reason:
        """The local name of a value, its nodes collected first."""
        if value == self.start:
            return "x"
        if value in self.names:
            return self.names[value]
        graph: Graph = self.model.graph
        if self.kinds[value] != Kind.DATA:
            return self._constant(value)
        node = graph.producer[value]
        op = graph.standard[node] if node >= 0 else ""
        if op in _LAYOUT or (op == "Cast" and self._same_type(node)):
            name = self.value(graph.node_inputs[node][0])
            if not isinstance(name, Reason):
                self.inside[node] = name
            return name
        if op not in _ARITHMETIC or (op == "Clip" and self._has_ceiling(node)):
            kind = graph.op[node] if node >= 0 else "an input"
            return Reason("norm-unknown", {"value": graph.name(self.start), "op": kind})
        return self._node(node)

    def _has_ceiling(self, node: int) -> bool:
        """Whether a Clip has an upper bound: no trial would reach it."""
        inputs = self.model.graph.node_inputs[node]
        return (len(inputs) > 2 and inputs[2] != 0) or "max" in self.model.graph.attributes(node)

    def _same_type(self, node: int) -> bool:
        graph = self.model.graph
        return graph.attributes(node)["to"].i == self.shapes.dtype(graph.node_inputs[node][0])

    def _node(self, node: int) -> str | Reason:
        graph = self.model.graph
        op = graph.op[node]
        reduces = op in _REDUCTIONS
        inputs: list[str] = []
        for operand in graph.node_inputs[node][: 1 if reduces else None]:
            name = self.value(operand) if operand else ""
            if isinstance(name, Reason):
                return name
            inputs.append(name)
        copy = graph.node(node)
        output = f"n{len(self.nodes)}"
        attributes = {a.name: a for a in copy.attribute if a.name not in ("axes", "keepdims")}
        made = helper.make_node(op, inputs, [output])
        made.attribute.extend(attributes.values())
        if reduces:
            self._reduce_last(made)
        self.nodes.append(made)
        self.source_nodes.append(node)
        self.inside[node] = output
        self.names[graph.node_outputs[node][0]] = output
        return output

    def leak(self, result: str) -> Reason | None:
        """A part of the norm that something else reads too: its guards are proven for the norm alone."""
        graph = self.model.graph
        for node, name in self.inside.items():
            for reader in graph.consumers[graph.node_outputs[node][0]] if name not in ("x", result) else ():
                if reader not in self.inside and graph.op[reader] not in SHAPES:
                    return Reason("norm-mixed", {"value": graph.name(self.start), "op": graph.op[reader]})
        return None

    def _reduce_last(self, node: onnx.NodeProto) -> None:
        node.attribute.append(helper.make_attribute("keepdims", 1))
        if self.model.opset_imports.get("", 1) >= _AXES_INPUT[node.op_type]:
            self.initializers["axes"] = numpy_helper.from_array(np.array([-1], np.int64), "axes")
            node.input.append("axes")
        else:
            node.attribute.append(helper.make_attribute("axes", [-1]))

    def _constant(self, value: int) -> str | Reason:
        graph = self.model.graph
        node = graph.producer[value]
        head = graph.initializers.get(value) or (graph.constant_head(node) if node >= 0 else None)
        if head is None:
            return Reason("norm-unknown", {"value": graph.name(self.start), "op": "a computed constant"})
        array = read_tensor(self.model, head, _LIMIT)
        if isinstance(array, Reason):
            return array
        name = f"c{len(self.initializers)}"
        tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
        if tensor.data_type != head.dtype:
            return Reason("norm-unknown", {"value": graph.name(self.start), "op": "a bfloat16 constant"})
        self.initializers[name] = tensor
        self.names[value] = name
        return name


def take_norm(
    model: Model, kinds: bytearray, shapes: Shapes, start: int, end: int
) -> tuple[tuple[onnx.NodeProto, ...], tuple[TensorProto, ...], tuple[int, ...]] | Reason:
    """Collects the arithmetic between two values as a norm over the last axis.

    Returns:
        (nodes from ``x`` to ``y``, initializers, the source's nodes), or a Reason where there is other arithmetic.
    """
    copy = _Copy(model, kinds, shapes, start)
    result = copy.value(end)
    if isinstance(result, Reason):
        return result
    if result == "x" or not copy.nodes:
        return Reason("norm-unknown", {"value": model.graph.name(start), "op": "none"})
    leak = copy.leak(result)
    if leak is not None:
        return leak
    _rename(copy.nodes, result)
    return tuple(copy.nodes), tuple(copy.initializers.values()), tuple(copy.source_nodes)


def _rename(nodes: Sequence[onnx.NodeProto], result: str) -> None:
    for node in nodes:
        node.output[:] = ["y" if name == result else name for name in node.output]
        node.input[:] = ["y" if name == result else name for name in node.input]


def norm_model(
    nodes: Sequence[onnx.NodeProto], initializers: Sequence[TensorProto], dtype: int, opset: int
) -> onnx.ModelProto:
    """The norm alone as a model: ``x`` [n, D] to ``y`` [n, D]."""
    graph = onnx.GraphProto(name="norm", node=nodes, initializer=initializers)
    graph.input.append(helper.make_tensor_value_info("x", dtype, [None, None]))
    graph.output.append(onnx.ValueInfoProto(name="y"))
    return onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", opset)], graph=graph)


def prove_norm(
    worker: Worker,
    nodes: tuple[onnx.NodeProto, ...],
    initializers: tuple[TensorProto, ...],
    dtype: int,
    opset: int,
    where: str,
) -> Norm | Reason:
    """Reads kind and eps of a norm off its arithmetic, and runs it in double on rows far below and above eps.

    Returns:
        A Reason where it is neither x * rsqrt(sum(x^2) + eps) nor x / max(||x||, eps).
    """
    form = read_form(nodes, initializers, where)
    if isinstance(form, Reason):
        return form
    kind, eps = form
    double = to_double(norm_model(nodes, initializers, dtype, opset))
    if isinstance(double, Reason):
        return double
    session = worker.load(double.SerializeToString())
    if isinstance(session, Reason):
        return session
    rows = _rows(eps)
    ran = _run(worker, session, rows)
    worker.unload(session)
    if isinstance(ran, Reason):
        return ran
    if not np.allclose(ran, normalise(rows, kind, eps), rtol=1e-12, atol=0):
        return Reason("norm-unknown", {"value": where, "op": ", ".join(dict.fromkeys(node.op_type for node in nodes))})
    return Norm(kind, eps, dtype, nodes, initializers)


def _run(worker: Worker, session: Session, x: Array) -> Array | Reason:
    """The norm of some rows."""
    ran = worker.run(session, {"x": x})
    return ran if isinstance(ran, Reason) else cast("Array", ran[0])


def normalise(x: Array, kind: str, eps: float) -> Array:
    """The norm's formula over the last axis, in float64."""
    squares = (x * x).sum(-1, keepdims=True)
    if kind == "rsqrt":
        return x / np.sqrt(squares + eps)
    return x / np.maximum(np.sqrt(squares), eps)


def _rows(eps: float) -> Array:
    """Rows of many norms, [n, 7]."""
    draws = np.random.default_rng(7).standard_normal((4, 7))
    directions = draws / np.linalg.norm(draws, axis=-1, keepdims=True)
    around = eps * np.array([1e-6, 1e-3, 0.1, 0.5, 2, 10, 1e3]) if eps else np.array([1e-30])
    return np.concatenate([directions * norm for norm in (*around, *np.sqrt(around), *_NORMS)])
