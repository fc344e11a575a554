"""Values of a graph as expressions: operators, attributes, constants and wiring, without names or order of nodes."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
from onnx import helper, numpy_helper

KERNELS = ("Custom", "LinearAttention")


def expressions(model: onnx.ModelProto) -> dict[str, str]:
    """Value -> its expression, as a digest: equal for values that are computed in the same way from the inputs."""
    graph = model.graph
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    found = {"": ""} | {value.name: digest("input", value.name) for value in graph.input}
    found |= {tensor.name: constant(tensor) for tensor in graph.initializer}
    for node in graph.node:
        attributes = settings(node, opset)
        if node.op_type == "Constant":
            found[node.output[0]] = constant(next(entry.t for entry in node.attribute if entry.name == "value"))
            continue
        if node.op_type == "Identity":
            found[node.output[0]] = found[node.input[0]]
            continue
        inputs = [found[name] for name in node.input]
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
