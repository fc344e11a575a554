"""Turn every float type of a model to double, so that the mathematics is tested apart from the rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from deltafuse.errors import UserError
from deltafuse.functions import without_references
from deltafuse.lowering_conv import CAUSAL_CONV, is_causal_conv, lower_conv
from deltafuse.opset import import_needed
from deltafuse.probe_conv import declared_sizes, plain_convolution
from deltafuse.reasons import TEXTS, Reason

TEXTS.update(
    {
        "no-double-kernel": "the operator {op} has no double precision form, so the site cannot be proven; "
        "export it as plain operators",
    }
)

_Sizes: TypeAlias = "Mapping[str, Sequence[int]]"

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})

_TO_ATTRIBUTES = {"Cast": "to", "EyeLike": "dtype", "SequenceEmpty": "dtype", "RandomNormal": "dtype"}
#: ai.onnx, and where onnxruntime has its own quantised operators.
_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})
_QUANTISED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"})


def to_double(model: onnx.ModelProto) -> onnx.ModelProto | Reason:
    """A copy of a model in which each float32, float16 and bfloat16 is a double: inputs, constants, casts.

    An opset that nothing in it needs any more, once fused operators are plain ones, is lowered: an older onnxruntime
    refuses it.

    Returns:
        A Reason where an operator has no double form.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    without_references(result)
    refused = _graph(result.graph)
    for function in result.functions:
        _expand(function, {})
        refused = _nodes(function.node) if refused is None else refused
    import_needed(result)
    return result if refused is None else refused


def _graph(graph: onnx.GraphProto) -> Reason | None:
    _expand(graph, declared_sizes(graph))
    for tensor in graph.initializer:
        refused = _tensor(tensor)
        if refused is not None:
            return refused
    for info in (*graph.input, *graph.output, *graph.value_info):
        _type(info.type)
    return _nodes(graph.node)


def _type(proto: onnx.TypeProto) -> None:
    kind = proto.WhichOneof("value")
    if kind == "tensor_type" and proto.tensor_type.elem_type in FLOATS:
        proto.tensor_type.elem_type = TensorProto.DOUBLE
    elif kind in ("sequence_type", "optional_type"):
        _type(getattr(proto, kind).elem_type)


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Reason | None:
    for node in nodes:
        op = "" if node.domain not in _DOMAINS else node.op_type
        if op in _QUANTISED:
            return Reason("no-double-kernel", {"op": op})
        _state_default(op, node)
        for attribute in node.attribute:
            refused = _attribute(op, attribute)
            if refused is not None:
                return refused
    return None


def _expand(graph: onnx.GraphProto | onnx.FunctionProto, sizes: _Sizes) -> None:
    """Writes out what has no double kernel and a plain form: operators of onnxruntime's own, depthwise convolutions."""
    forms = [_PLAIN.get((node.domain, node.op_type)) for node in graph.node]
    if not any(forms):
        return
    plain = [[node] if form is None else form(node, sizes) for node, form in zip(graph.node, forms, strict=True)]
    nodes = [part for parts in plain for part in parts]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _plain_conv(node: onnx.NodeProto, _: _Sizes) -> list[onnx.NodeProto]:
    try:
        return lower_conv(node) if is_causal_conv(node.op_type, node.domain) else [node]
    except UserError:
        # A form that has no plain one: loading it says so.
        return [node]


def _plain_gate(node: onnx.NodeProto, _: _Sizes) -> list[onnx.NodeProto]:
    """The product x sigmoid(alpha x): onnxruntime's QuickGelu and the standard's Swish."""
    alphas = [attribute.f for attribute in node.attribute if attribute.name == "alpha"]
    value = numpy_helper.from_array(np.array(alphas[0] if alphas else _ALPHAS[node.op_type], np.float32))
    factor, scaled, gate = (f"{node.output[0]}/{what}" for what in ("alpha", "scaled", "gate"))
    return [
        helper.make_node("Constant", [], [factor], value=value),
        helper.make_node("Mul", [node.input[0], factor], [scaled]),
        helper.make_node("Sigmoid", [scaled], [gate]),
        helper.make_node("Mul", [node.input[0], gate], list(node.output)),
    ]


def _plain_softplus(node: onnx.NodeProto, _: _Sizes) -> list[onnx.NodeProto]:
    """log(1 + exp x) as max(x, 0) + log(1 + exp(-|x|)), which no x overflows; to 1e-16 in all."""
    names = ("zero", "one", "positive", "size", "minus", "power", "more", "log")
    zero, one, positive, size, minus, power, more, log = (f"{node.output[0]}/{what}" for what in names)
    x = node.input[0]
    return [
        *(
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(number, np.float32)))
            for name, number in ((zero, 0.0), (one, 1.0))
        ),
        helper.make_node("Max", [x, zero], [positive]),
        helper.make_node("Abs", [x], [size]),
        helper.make_node("Neg", [size], [minus]),
        helper.make_node("Exp", [minus], [power]),
        helper.make_node("Add", [power, one], [more]),
        helper.make_node("Log", [more], [log]),
        helper.make_node("Add", [positive, log], list(node.output)),
    ]


def _plain_product(node: onnx.NodeProto, _: _Sizes) -> list[onnx.NodeProto]:
    """Transposes, product, factor; left as it is where batch axes are exchanged too."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if any(name in attributes and attributes[name].i for name in ("transBatchA", "transBatchB")):
        return [node]
    left = "ki" if "transA" in attributes and attributes["transA"].i else "ik"
    right = "jk" if "transB" in attributes and attributes["transB"].i else "kj"
    product, factor = f"{node.output[0]}/product", f"{node.output[0]}/factor"
    alpha = attributes["alpha"].f if "alpha" in attributes else 1.0
    value = numpy_helper.from_array(np.array(alpha, np.float32))
    return [
        helper.make_node("Einsum", list(node.input), [product], equation=f"...{left},...{right}->...ij"),
        helper.make_node("Constant", [], [factor], value=value),
        helper.make_node("Mul", [product, factor], list(node.output)),
    ]


_ALPHAS = {"QuickGelu": 1.702, "Swish": 1.0}
_PLAIN: Mapping[tuple[str, str], Callable[[onnx.NodeProto, _Sizes], list[onnx.NodeProto]]] = {
    ("com.microsoft", "FusedMatMul"): _plain_product,
    ("com.microsoft", "QuickGelu"): _plain_gate,
    ("", "Swish"): _plain_gate,
    ("", "Softplus"): _plain_softplus,
    ("", "Conv"): plain_convolution,
    ("", CAUSAL_CONV): _plain_conv,
    ("com.microsoft", CAUSAL_CONV): _plain_conv,
}


def _state_default(op: str, node: onnx.NodeProto) -> None:
    """Writes out the type that an operator has where its attribute is missing: float."""
    given = {attribute.name for attribute in node.attribute}
    if op == "ConstantOfShape" and "value" not in given:
        zero = numpy_helper.from_array(np.zeros(1, np.float64))
        node.attribute.append(helper.make_attribute("value", zero))
    elif op == "SequenceEmpty" and "dtype" not in given:
        node.attribute.append(helper.make_attribute("dtype", TensorProto.DOUBLE))


def _attribute(op_type: str, attribute: AttributeProto) -> Reason | None:
    if attribute.name == _TO_ATTRIBUTES.get(op_type) and attribute.i in FLOATS:
        attribute.i = TensorProto.DOUBLE
    elif attribute.type == AttributeProto.TENSOR:
        return _tensor(attribute.t)
    elif op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        array = np.array(attribute.f if attribute.name == "value_float" else list(attribute.floats), np.float64)
        attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
    elif attribute.type == AttributeProto.SPARSE_TENSOR:
        return Reason("sparse-constant", {"value": attribute.sparse_tensor.values.name or attribute.name})
    elif attribute.type == AttributeProto.GRAPH:
        return _graph(attribute.g)
    return None


def _tensor(tensor: TensorProto) -> Reason | None:
    if tensor.data_type not in FLOATS or tensor.data_type == TensorProto.DOUBLE:
        return None
    try:
        array = numpy_helper.to_array(tensor).astype(np.float64)
    except ValueError as error:
        return Reason("constant-damaged", {"name": tensor.name or "of a Constant node", "error": error})
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return None
