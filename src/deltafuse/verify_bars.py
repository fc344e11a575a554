"""Which bar of the table in `deltafuse.verify_tolerances` a fused file is held to."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from deltafuse.fused import fused_nodes
from deltafuse.graph import Graph
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.shapes import Shapes
from deltafuse.verify_tolerances import EXACT, KINDS, Bar, Kind, Overrides, bar

__all__ = ["EXACT", "KINDS", "Bar", "Kind", "Overrides", "bar", "bar_of", "target_of"]

_BOUNDARIES: Mapping[int, Kind] = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
_QUANTISED = ("QLinear", "QGemm", "QAttention", "Dequantize", "DynamicQuantize", "MatMulInteger", "ConvInteger",
              "MatMulNBits", "GatherBlockQuantized")  # fmt: skip


def bar_of(shapes: Shapes, overrides: Overrides | None = None, *, rounding: bool = True) -> Bar:
    """The bar for a fused file.

    Args:
        shapes: of the file.
        overrides: what the user sets.
        rounding: at the target's precision; else in the unfused graph's own, where only the order of the arithmetic is
            another. In a half precision graph that shows in the last digit of a half all the same.
    """
    graph = shapes.graph
    kinds: set[Kind] = {_BOUNDARIES.get(dtype, "reordered") for dtype in _dtypes(shapes)} if rounding else set()
    own = {shapes.dtype(value) or 0 for value in graph.outputs}
    kinds |= {kind for dtype, kind in _BOUNDARIES.items() if dtype in own}
    if any(op.startswith(_QUANTISED) for op in set(graph.op)):
        kinds.add("quantised")
    coarse: tuple[Kind, ...] = ("fp16", "bf16", "quantised")
    kind: Kind = "reordered"
    for one in coarse:
        kind = one if one in kinds else kind
    return bar(kind, target_of(graph) if rounding else "", overrides)


def _dtypes(shapes: Shapes) -> list[int]:
    """Element types that the fused nodes take: what a Custom node says, what LinearAttention is fed with."""
    graph, found = shapes.graph, list[int]()
    for node in fused_nodes(graph, range(len(graph.op))):
        said = graph.attributes(node).get("dtype")
        if graph.op[node] != LINEAR_ATTENTION:
            found.append(TensorProto.FLOAT16 if said is None else said.i)
        else:
            found.append(shapes.dtype(graph.node_inputs[node][0]) or TensorProto.FLOAT)
    return found


def target_of(graph: Graph) -> str:
    """The target that the fused nodes are of, as far as they tell: the two of Ascend differ in bfloat16 only."""
    nodes = fused_nodes(graph, range(len(graph.op)))
    if not nodes:
        return ""
    node = nodes[0]
    if graph.op[node] == LINEAR_ATTENTION:
        return "ort" if graph.domain[node] == "com.microsoft" else "onnx"
    said = graph.attributes(node).get("dtype")
    return "ascend-a2" if said is not None and said.i == TensorProto.BFLOAT16 else "ascend-310p"
