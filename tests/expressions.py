"""Values of a graph as expressions: operators, attributes, constants and wiring, without names or order of nodes."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
from onnx import helper, numpy_helper

KERNELS = ("Custom", "LinearAttention")


def expressions(model: onnx.ModelProto, *, views: str = "exact") -> dict[str, str]:
    """Value -> its expression, as a digest: equal for values that are computed in the same way from the inputs.

    Args:
        model: its nodes in topological order.
        views: ``exact``; ``merged`` where a Reshape of a Reshape counts as the last of them; ``ignored`` where a
            Reshape counts as what it reshapes.
    """
    graph = model.graph
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    found = {"": ""} | {value.name: digest("input", value.name) for value in graph.input}
    found |= {tensor.name: constant(tensor) for tensor in graph.initializer}
    unshaped: dict[str, str] = {}
    for node in graph.node:
        attributes = settings(node, opset)
        if node.op_type == "Constant":
            found[node.output[0]] = constant(tensor_of(node.attribute[0]))
            continue
        if node.op_type == "Identity":
            found[node.output[0]] = found[node.input[0]]
            continue
        inputs = [found[name] for name in node.input]
        if node.op_type == "Reshape" and views == "ignored":
            found[node.output[0]] = inputs[0]
            continue
        if node.op_type == "Reshape" and views == "merged":
            unshaped[node.output[0]] = inputs[0] = unshaped.get(node.input[0], inputs[0])
        for index, name in enumerate(node.output):
            found[name] = digest(node.domain, node.op_type, attributes, inputs, index)
    return found


def settings(node: onnx.NodeProto, opset: int) -> dict[str, object]:
    """A node's attributes, those with their defaults too that it does not write."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        defaults = {}
    else:
        defaults = {
            name: helper.get_attribute_value(entry.default_value)
            for name, entry in schema.attributes.items()
            if entry.default_value.type
        }
    given = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    return dict(sorted({**defaults, **given}.items()))


def tensor_of(entry: onnx.AttributeProto) -> onnx.TensorProto:
    """What a Constant node holds, in whichever of its attributes."""
    if entry.name == "value":
        return entry.t
    kind = np.float32 if "float" in entry.name else np.int64
    return numpy_helper.from_array(np.array(helper.get_attribute_value(entry), kind))


def constant(tensor: onnx.TensorProto) -> str:
    """A constant by its type, shape and bytes."""
    array = np.asarray(numpy_helper.to_array(tensor))
    return digest("constant", tensor.data_type, array.shape, array.tobytes())


def digest(*parts: object) -> str:
    """Of anything that can be shown."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def fused(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of a target's kernels, in the order of the graph."""
    return [node for node in model.graph.node if node.op_type in KERNELS]
