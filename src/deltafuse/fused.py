"""Fused nodes of every target, read and lowered the same way: the Custom nodes of Ascend, and LinearAttention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import onnx
from onnx import NodeProto, TensorProto

from deltafuse.dims import Dim
from deltafuse.errors import UserError
from deltafuse.graph import Graph
from deltafuse.lowering import Call, fused_type, lower_node, read_call
from deltafuse.lowering_attention import (
    LINEAR_ATTENTION,
    is_linear_attention,
    lower_attention,
    read_attention,
    runtime_has,
)
from deltafuse.lowering_conv import is_causal_conv, lower_conv, runtime_has_conv
from deltafuse.opset import import_needed
from deltafuse.reasons import TEXTS, Reason

TEXTS["attention-malformed"] = "{fault}; fuse the model again"

_runtime_has = cache(runtime_has)
_runtime_has_conv = cache(runtime_has_conv)

#: Ports of LinearAttention under the names of the rule's roles.
_ROLES = {"past_state": "state", "decay": "g"}


def kernel(node: NodeProto) -> str:
    """The fused operator that a node calls, "" where it calls none."""
    return LINEAR_ATTENTION if is_linear_attention(node.op_type, node.domain) else fused_type(node)


def fused_nodes(graph: Graph, nodes: Iterable[int]) -> list[int]:
    """Those of some nodes of a graph that are fused ones."""
    return [node for node in nodes if graph.op[node] in ("Custom", LINEAR_ATTENTION) and kernel(graph.node(node))]


def call(node: NodeProto) -> Call | Reason:
    """Reads a fused node, its ports named by the rule's roles.

    Returns:
        ``custom-malformed`` or ``attention-malformed`` where it is not as its operator needs it.
    """
    if kernel(node) != LINEAR_ATTENTION:
        return read_call(node)
    try:
        found = read_attention(node)
    except UserError as error:
        return Reason("attention-malformed", {"fault": str(error)})
    ports = {_ROLES.get(name, name): value for name, value in found.ports.items()}
    return Call(LINEAR_ATTENTION, ports, found.output, found.present_state, found.scale)


def lower_all(nodes: Iterable[NodeProto], scales: Mapping[str, float] | None = None) -> list[NodeProto]:
    """Replaces each fused node by plain operators (opset 13 or later), results of LinearAttention in float32.

    For proofs, which turn every float to double; see `deltafuse.lowering.lower_nodes`.

    Args:
        nodes: nodes of one graph, e.g. those of a plan.
        scales: node name -> scale to use in place of the attribute, whose float32 hides the exact one.

    Raises:
        UserError: a fused node is not as its operator's contract says.
    """
    lowered: list[NodeProto] = []
    for node in nodes:
        scale = (scales or {}).get(node.name)
        if kernel(node) == LINEAR_ATTENTION:
            lowered += lower_attention(node, TensorProto.FLOAT, TensorProto.FLOAT, scale)
        else:
            lowered += lower_node(node, scale) if fused_type(node) else [node]
    return lowered


def lower_exact(model: onnx.ModelProto, scales: Mapping[str, float] | None = None) -> onnx.ModelProto:
    """A copy of a model with every fused node lowered, to be turned to double; see `lower_all`."""
    return _with_nodes(model, lower_all(model.graph.node, scales))


def runnable(model: onnx.ModelProto, *, keep: bool = True) -> onnx.ModelProto:
    """A copy of a model that the installed onnxruntime runs at the target's precision.

    Args:
        model: its operands' types follow from its inputs'.
        keep: what onnxruntime has a kernel for stays: then it is the kernel itself that is compared.
    """
    lowered: list[NodeProto] = []
    types = cache(lambda: _types(model))
    for node in model.graph.node:
        conv = is_causal_conv(node.op_type, node.domain)
        if kernel(node) != LINEAR_ATTENTION and not conv:
            lowered += lower_node(node) if fused_type(node) else [node]
            continue
        first, past = ([*node.input, "", "", "", ""][at] for at in (0, 3))
        dtype = types().get(first) or int(TensorProto.FLOAT)
        if keep and (_runtime_has_conv if conv else _runtime_has)(node.domain, dtype):
            lowered.append(node)
        else:
            lowered += lower_conv(node, dtype) if conv else lower_attention(node, dtype, types().get(past) or dtype)
    result = _with_nodes(model, lowered)
    import_needed(result)
    return result


def result_tokens(graph: Graph, node: int) -> int:
    """The axis that holds the tokens in a fused node's first output."""
    return 1 if graph.op[node] == LINEAR_ATTENTION else 0


def key_dim(graph: Graph, node: int, width: Dim) -> int:
    """The key head size, 0 where it is not known.

    Args:
        graph: what the node is part of.
        node: a fused node.
        width: last axis of its query.
    """
    if not isinstance(width, int):
        return 0
    if graph.op[node] != LINEAR_ATTENTION:
        return width
    heads = graph.attributes(node).get("q_num_heads")
    return width // heads.i if heads is not None and heads.i else 0


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of a model's values, as far as they follow from its inputs'."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    known = (*graph.input, *graph.value_info, *graph.output)
    return {info.name: info.type.tensor_type.elem_type for info in known}


def _with_nodes(model: onnx.ModelProto, nodes: Iterable[NodeProto]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(copies)
    return copy
