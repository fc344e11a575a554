"""Turn every float type of a model to double, so that the mathematics is tested apart from the rounding."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from deltafuse.probe_conv import plain_convolution
from deltafuse.reasons import TEXTS, Reason

TEXTS.update(
    {
        "no-double-kernel": "the operator {op} has no double precision form, so the site cannot be proven; "
        "export it as plain operators",
    }
)

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})

_TO_ATTRIBUTES = {"Cast": "to", "EyeLike": "dtype", "SequenceEmpty": "dtype", "RandomNormal": "dtype"}
_QUANTISED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"})


def to_double(model: onnx.ModelProto) -> onnx.ModelProto | Reason:
    """A copy of a model in which each float32, float16 and bfloat16 is a double: inputs, constants, casts.

    Returns:
        A Reason where an operator has no double form.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    refused = _graph(result.graph)
    for function in result.functions:
        refused = _nodes(function.node) if refused is None else refused
    return result if refused is None else refused


def _graph(graph: onnx.GraphProto) -> Reason | None:
    _expand(graph)
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
        if node.op_type in _QUANTISED:
            return Reason("no-double-kernel", {"op": node.op_type})
        _state_default(node)
        for attribute in node.attribute:
            refused = _attribute(node.op_type, attribute)
            if refused is not None:
                return refused
    return None


def _expand(graph: onnx.GraphProto) -> None:
    """Writes out what has no double kernel and a plain form: onnxruntime's FusedMatMul, depthwise convolutions."""
    forms = {"FusedMatMul": _plain_product, "Conv": plain_convolution}
    if not any(node.op_type in forms for node in graph.node):
        return
    nodes = [part for node in graph.node for part in (forms[node.op_type](node) if node.op_type in forms else [node])]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _plain_product(node: onnx.NodeProto) -> list[onnx.NodeProto]:
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


def _state_default(node: onnx.NodeProto) -> None:
    """Writes out the type that an operator has where its attribute is missing: float."""
    given = {attribute.name for attribute in node.attribute}
    if node.op_type == "ConstantOfShape" and "value" not in given:
        zero = numpy_helper.from_array(np.zeros(1, np.float64))
        node.attribute.append(helper.make_attribute("value", zero))
    elif node.op_type == "SequenceEmpty" and "dtype" not in given:
        node.attribute.append(helper.make_attribute("dtype", TensorProto.DOUBLE))


def _attribute(op_type: str, attribute: AttributeProto) -> Reason | None:
    if attribute.name == _TO_ATTRIBUTES.get(op_type) and attribute.i in FLOATS:
        attribute.i = TensorProto.DOUBLE
    elif attribute.type == AttributeProto.TENSOR:
        return _tensor(attribute.t)
    elif op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        array = np.array(attribute.f if attribute.name == "value_float" else list(attribute.floats), np.float64)
        attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
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
