"""The bars of ``fuse verify``: one table by kind of difference, and per target where one asks for another.

What decides is `EXACT`, site by site, in double. All others are met by what rounds rightly and are a smoke test: a norm
follows the rule in every such model, so that a lost scale passes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from onnx import TensorProto

from deltafuse.errors import UserError
from deltafuse.fused import fused_nodes
from deltafuse.graph import Graph
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.shapes import Shapes

#: Largest relative error of a site in double, per output and draw.
EXACT = 1e-12

Kind = Literal["exact", "reordered", "fp16", "bf16", "quantised"]

#: What each kind is, for messages.
KINDS: dict[Kind, str] = {
    "exact": "exact",
    "reordered": "reordered arithmetic",
    "fp16": "FP16 boundary",
    "bf16": "BF16 boundary",
    "quantised": "quantised weights",
}
_NAMES = {"cosine": "cosine", "nrmse": "NRMSE", "max_abs": "largest difference"}


@dataclass(frozen=True)
class Bar:
    """How close is close enough.

    Attributes:
        cosine: least cosine of the angle between both.
        nrmse: largest root mean square of the difference, over that of the unfused values.
        max_abs: largest difference of one element.
        nll: largest difference of a loss per token.
        tokens: how many tokens of a rollout must be equal; None for all.
        kind: why both may differ at all.
        target: whose row of the table this is, "" where none was told apart.
    """

    cosine: float
    nrmse: float
    max_abs: float
    nll: float = inf
    tokens: int | None = None
    kind: Kind = "fp16"
    target: str = ""

    def failed(self, cosine: float, nrmse: float, max_abs: float) -> tuple[str, ...]:
        """Which of the three a comparison does not keep; a NaN keeps none."""
        kept = {"cosine": cosine >= self.cosine, "nrmse": nrmse <= self.nrmse, "max_abs": max_abs <= self.max_abs}
        return tuple(name for name, good in kept.items() if not good)

    def met(self, cosine: float, nrmse: float, max_abs: float) -> bool:
        """Whether a comparison keeps all three."""
        return not self.failed(cosine, nrmse, max_abs)

    @property
    def title(self) -> str:
        """What to call it, e.g. ``FP16 boundary, ascend-310p``."""
        return ", ".join(filter(None, (KINDS[self.kind], self.target)))

    def told(self, cosine: float, nrmse: float, max_abs: float) -> str:
        """The measures that failed, each with the bar it failed, e.g. ``NRMSE 0.03 (at most 0.02)``."""
        found = {"cosine": cosine, "nrmse": nrmse, "max_abs": max_abs}
        bound = {"cosine": "at least", "nrmse": "at most", "max_abs": "at most"}
        parts = [
            f"{_NAMES[name]} {found[name]:.10g} ({bound[name]} {getattr(self, name):.10g})"
            for name in self.failed(cosine, nrmse, max_abs)
        ]
        return ", ".join(parts)

    def unbounded(self) -> Bar:
        """The bar for draws that no network has, up to 1e4: the largest difference then says nothing."""
        return replace(self, max_abs=inf)


@dataclass(frozen=True)
class Overrides:
    """Bars that the user sets, for every comparison at the target's precision; None keeps the table's.

    Raises:
        UserError: ``usage`` for a bar that every difference would fail, or none.
    """

    cosine: float | None = None
    nrmse: float | None = None
    max_abs: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers: of Python they come as they are."""
        if self.cosine is not None and not 0 <= self.cosine <= 1:
            raise UserError("usage", f"cosine {self.cosine}: give a number from 0 to 1")
        for name, value in (("nrmse", self.nrmse), ("max_abs", self.max_abs)):
            if value is not None and not 0 <= value < inf:
                raise UserError("usage", f"{name} {value}: give a number of 0 or more")


#: The FP16 row is the reference exporter's own bar for fused against unfused tensors, its first two tokens too.
_TABLE: dict[Kind, Bar] = {
    "exact": Bar(1.0, 0.0, 0.0, 0.0, None, "exact"),
    "reordered": Bar(0.99999, 0.005, 0.05, 1e-3, None, "reordered"),
    "fp16": Bar(0.999, 0.02, 1.0, 0.02, 2, "fp16"),
    "bf16": Bar(0.99, 0.1, 4.0, 0.1, 2, "bf16"),
    "quantised": Bar(0.99, 0.1, 4.0, 0.1, 2, "quantised"),
}
#: Rows of targets that keep closer than others: onnxruntime's own kernels compute in float32 inside.
_TARGETS: dict[tuple[Kind, str], Bar] = {
    ("fp16", "ort"): Bar(0.9999, 0.01, 0.5, 0.01, 2, "fp16"),
    ("fp16", "onnx"): Bar(0.9999, 0.01, 0.5, 0.01, 2, "fp16"),
}
_BOUNDARIES: Mapping[int, Kind] = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
_QUANTISED = ("QLinear", "QGemm", "QAttention", "Dequantize", "DynamicQuantize", "MatMulInteger", "ConvInteger",
              "MatMulNBits", "GatherBlockQuantized")  # fmt: skip


def bar(kind: Kind, target: str = "", overrides: Overrides | None = None) -> Bar:
    """The row of a kind and target, with what the user sets in its place."""
    found = replace(_TARGETS.get((kind, target), _TABLE[kind]), target=target)
    set_ = {name: value for name, value in vars(overrides or Overrides()).items() if value is not None}
    return replace(found, **set_)


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
