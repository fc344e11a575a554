"""Cut a part of a model out and make it run in double.

A cut is the backward slice between some values, joined from the byte ranges of its nodes. Its inputs have the sizes
that are fixed and no others, so that one session serves every batch and token count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from deltafuse.bodies import has_body
from deltafuse.graph import Graph
from deltafuse.locations import external_bytes
from deltafuse.probe_double import to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.tensors import TensorHead
from deltafuse.wire import Model
from deltafuse.worker import Session, Worker

__all__ = ["Cut", "Session", "Worker", "backward_slice", "cut_model", "to_double"]

TEXTS.update(
    {
        "cut-open": "the value {value} is computed from outside the site, so that the site cannot be run on its own; "
        "compute the value outside of the layer, or make it an input of the graph",
        "sparse-constant": "the constant {value} is a sparse tensor, which is not read; store it as a plain one",
        "cut-type-unknown": "the element type of {value} is not known; run onnx shape inference on the model first",
    }
)

#: Highest IR version that the oldest supported onnxruntime reads.
_IR_VERSION = 10
#: Largest constant that is read from outside the file; one of as many axes as a zero state may be larger.
_LARGEST, _LARGEST_STATE, _STATE_AXES = 1 << 20, 1 << 26, 4


@dataclass(frozen=True)
class Cut:
    """A stand-alone model.

    Attributes:
        model: float types as in the source.
        inputs: value ids of its inputs, in order; names are the graph's.
        outputs: value ids of its outputs, in order.
        nodes: the graph's nodes in it, in file order.
    """

    model: onnx.ModelProto
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nodes: tuple[int, ...]


def backward_slice(graph: Graph, inputs: Iterable[int], outputs: Iterable[int]) -> tuple[list[int], list[int]]:
    """Nodes that compute the outputs from the inputs, in file order, and the other values they start from.

    Returns:
        (nodes, open values: initializers, graph inputs or values without a producer that are read and not in `inputs`).
    """
    producer, node_inputs, captures = graph.producer, graph.node_inputs, graph.captures
    seen = {0, *inputs}
    nodes: set[int] = set()
    loose: list[int] = []
    stack = [value for value in outputs if value not in seen]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        node = producer[value]
        if node < 0:
            loose.append(value)
            continue
        if node not in nodes:
            nodes.add(node)
            stack += node_inputs[node]
            if node in captures:
                stack += captures[node]
    return sorted(nodes), loose


def cut_model(model: Model, shapes: Shapes, inputs: Sequence[int], outputs: Sequence[int]) -> Cut | Reason:
    """Cuts the backward slice between values out of the main graph.

    Small constants that lie outside the file are put into the cut; nothing larger is read.

    Returns:
        A Reason where a value is computed from outside, where a type is not known or a constant cannot be read.
    """
    graph = model.graph
    nodes, loose = backward_slice(graph, inputs, outputs)
    for value in loose:
        if value not in graph.initializers:
            return Reason("cut-open", {"value": graph.name(value)})
        if graph.initializers[value].form == "sparse":
            return Reason("sparse-constant", {"value": graph.name(value)})
    body = onnx.GraphProto.FromString(b"".join(bytes(graph.data[slice(*graph.spans[node])]) for node in nodes))
    body.name = "cut"
    for value in loose:
        head = graph.initializers[value]
        body.initializer.append(TensorProto.FromString(bytes(graph.data[head.start : head.end])))
    failed = _inline_external(model, body)
    if failed is not None:
        return failed
    for value in inputs:
        declared = _declare(graph, shapes, value)
        if isinstance(declared, Reason):
            return declared
        body.input.append(declared)
    body.output.extend(onnx.ValueInfoProto(name=graph.name(value)) for value in outputs)
    opsets = [helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    # Built without the checker's defaults: the file's own imports stay what they are.
    called = list(model.local_functions.values()) if any(has_body(model, graph, node) for node in nodes) else []
    cut = onnx.ModelProto(
        ir_version=min(model.ir_version, _IR_VERSION), opset_import=opsets, graph=body, functions=called
    )
    return Cut(cut, tuple(inputs), tuple(outputs), tuple(nodes))


def _declare(graph: Graph, shapes: Shapes, value: int) -> onnx.ValueInfoProto | Reason:
    dtype, shape = shapes.dtype(value), shapes.shape(value)
    if dtype is None or shape is None:
        return Reason("cut-type-unknown", {"value": graph.name(value)})
    return helper.make_tensor_value_info(
        graph.name(value), dtype, [dim if isinstance(dim, int) else None for dim in shape]
    )


def _inline_external(model: Model, body: onnx.GraphProto) -> Reason | None:
    """Puts constants that lie outside the file into the cut."""
    for tensor in _tensors(body):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        head = TensorHead(tensor.name, tensor.data_type, tuple(tensor.dims), 0, 0, entries)
        name = tensor.name or "of a Constant node"
        size = head.elements * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        limit = _LARGEST_STATE if len(head.dims) >= _STATE_AXES else _LARGEST
        if size > limit:
            return Reason("constant-too-large", {"name": name, "size": size, "limit": limit})
        raw = external_bytes(model, head, name, size)
        if isinstance(raw, Reason):
            return raw
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.DEFAULT
        tensor.raw_data = raw
    return None


def _tensors(body: onnx.GraphProto) -> Iterator[TensorProto]:
    """Every tensor of a graph, in attributes and subgraphs too."""
    yield from body.initializer
    for node in body.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == onnx.AttributeProto.GRAPH:
                yield from _tensors(attribute.g)
