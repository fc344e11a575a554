"""Another head map for a fused site: value head h reads key head h modulo their number."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from deltafuse.fused import call as read_call
from deltafuse.fused import kernel
from deltafuse.lowering import Call
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.reasons import Reason
from deltafuse.verify_cut import Pair, Side

__all__ = ["fused_call", "heads_of", "tiled"]


def fused_call(node: NodeProto) -> Call | Reason | None:
    """A fused node as its kernel sees it, None for any other node."""
    return read_call(node) if kernel(node) else None


def heads_of(pair: Pair, after: Side) -> tuple[int, int] | None:
    """Key and value heads where there are more of the latter; None where there is nothing to map."""
    for node in pair.fused.graph.node:
        call = fused_call(node)
        if not isinstance(call, Call):
            continue
        if call.op == LINEAR_ATTENTION:
            found = {attribute.name: attribute.i for attribute in node.attribute}
            pairs = (found.get("q_num_heads", 0), found.get("kv_num_heads", 0))
        else:
            shapes = [after.shapes.shape(after.graph.find(call.ports[port]) or 0) for port in ("key", "value")]
            sizes = [shape[1] if shape is not None and len(shape) == 3 else 0 for shape in shapes]
            pairs = tuple(size if isinstance(size, int) else 0 for size in sizes)
        return (pairs[0], pairs[1]) if 0 < pairs[0] < pairs[1] else None
    return None


def tiled(model: onnx.ModelProto, heads: tuple[int, int] | None) -> onnx.ModelProto:
    """The fused side with value head h reading key head h modulo their number."""
    assert heads is not None, "there are heads to map"
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        call = fused_call(node)
        nodes += _mapped(node, call, heads) if isinstance(call, Call) else [node]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del copy.graph.node[:]
    copy.graph.node.extend(copies)
    return copy


def _mapped(node: NodeProto, call: Call, heads: tuple[int, int]) -> list[NodeProto]:
    packed = call.op == LINEAR_ATTENTION
    arrays = {
        "order": np.arange(heads[1]) % heads[0],
        "split": np.array([0, 0, heads[0], -1]),
        "packed": np.array([0, 0, -1]),
    }
    prefix = f"{node.name or node.output[0]}/tiled"
    new = [
        helper.make_node("Constant", [], [f"{prefix}/{name}"], value=numpy_helper.from_array(array.astype(np.int64)))
        for name, array in arrays.items()
    ]
    result = NodeProto()
    result.CopyFrom(node)
    for port in ("query", "key"):
        value, base = call.ports[port], f"{prefix}/{port}"
        read = [value, f"{prefix}/order"]
        if packed:
            new.append(helper.make_node("Reshape", [value, f"{prefix}/split"], [f"{base}/split"]))
            read[0] = f"{base}/split"
        new.append(helper.make_node("Gather", read, [base], axis=2 if packed else 1))
        if packed:
            new.append(helper.make_node("Reshape", [base, f"{prefix}/packed"], [f"{base}/packed"]))
        result.input[:] = [(f"{base}/packed" if packed else base) if name == value else name for name in result.input]
    for attribute in result.attribute:
        if attribute.name == "q_num_heads":
            attribute.i = heads[1]
    return [*new, result]
