"""``--ablate SITE``: what each decision of one site costs, told by undoing it.

The fused site runs in double with the roundings of its file put back in by hand, one for each value that the file keeps
in a narrower type. Each row of the table leaves some of them out, or takes another scale or head map. A decision whose
row is far better than the rest is the wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from deltafuse.fused import call as read_call
from deltafuse.fused import kernel, lower_exact
from deltafuse.lowering import Call
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.measure import sums_of
from deltafuse.probe import Worker, to_double
from deltafuse.reasons import Reason
from deltafuse.verify_cut import Pair, Side
from deltafuse.verify_draws import PairDraws, Run, drawn, drawn_as_typed, exactly
from deltafuse.verify_trial import Finding, finding

__all__ = ["AblationReport", "AblationRow", "ablate"]

Array = npt.NDArray[np.generic]

#: Types that are narrower than double, the narrowest first.
_NAMES: dict[int, str] = {
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.FLOAT16: "float16",
    TensorProto.FLOAT: "float32",
}
#: Operators that move numbers and leave them as they are; what else is before a kernel is a norm.
_MOVES = frozenset({
    "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Gather", "Slice", "Concat", "Expand", "Identity", "Split",
    "Tile", "Shape", "Constant", "Flatten",
})  # fmt: skip
_GROUPS = {"query": "query, key and value", "key": "query, key and value", "value": "query, key and value",
           "beta": "beta", "g": "g", "gk": "g", "state": "state", "initial_state": "state"}  # fmt: skip


@dataclass(frozen=True)
class AblationRow:
    """One decision undone.

    Attributes:
        decision: what was undone, or ``as fused``.
        instead: what was taken in its place.
        nrmse, max_abs: of the worst output against the unfused nodes; None where it does not run.
    """

    decision: str
    instead: str
    nrmse: float | None
    max_abs: float | None


@dataclass(frozen=True)
class AblationReport:
    """All decisions of one site."""

    site: str
    rows: tuple[AblationRow, ...]
    reason: Finding | None = None


@dataclass(frozen=True)
class _Variant:
    """One row: which roundings to keep, and what else to change."""

    decision: str
    instead: str
    points: Mapping[str, int]
    scale: float = 1.0
    tiled: bool = False


@dataclass
class _Roundings:
    """Values that the file keeps in a narrow type, by what they are part of."""

    groups: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    def add(self, group: str, value: str, dtype: int | None) -> None:
        if dtype in _NAMES:
            self.groups.setdefault(group, {})[value] = dtype

    def without(self, *groups: str) -> dict[str, int]:
        return {value: dtype for name, points in self.groups.items() if name not in groups
                for value, dtype in points.items()}  # fmt: skip


def ablate(pair: Pair, after: Side, worker: Worker) -> AblationReport:
    """Runs one site as fused, and once for each decision undone.

    Args:
        pair: both sides of the site.
        after: the fused file, for the types of its values.
        worker: runs them.
    """
    unfused = to_double(pair.unfused)
    session = unfused if isinstance(unfused, Reason) else worker.load(unfused.SerializeToString())
    if isinstance(session, Reason):
        return AblationReport(pair.name, (), finding(session))

    def ran(run: Run) -> Sequence[Array] | Reason:
        return worker.run(session, drawn(pair, run), pair.outputs)

    draws = PairDraws(pair, ran)
    sizes = draws.sizes()
    if isinstance(sizes, Reason):
        return AblationReport(pair.name, (), finding(sizes))
    feeds = exactly(pair, drawn_as_typed(pair, next(draws.runs(sizes[-1]))))
    wanted = worker.run(session, feeds, pair.outputs)
    if isinstance(wanted, Reason):
        return AblationReport(pair.name, (), finding(wanted))
    bench = _Bench(pair, after, worker, feeds, wanted)
    return AblationReport(pair.name, tuple(bench.row(variant) for variant in bench.variants()))


class _Bench:
    """Runs variants of one fused site on the same inputs."""

    def __init__(
        self, pair: Pair, after: Side, worker: Worker, feeds: Mapping[str, Array], wanted: Sequence[Array]
    ) -> None:
        self._pair, self._after, self._worker = pair, after, worker
        self._feeds, self._wanted = feeds, wanted
        self._roundings = _roundings(pair, after)

    def variants(self) -> Iterator[_Variant]:
        """As fused, each group of roundings undone, then the scale and the head map."""
        every = self._roundings
        yield _Variant("as fused", "", every.without())
        for name, points in every.groups.items():
            narrowest = next(kind for dtype, kind in _NAMES.items() if dtype in points.values())
            yield _Variant(f"{name} in {narrowest}", "double", every.without(name))
        yield _Variant("all of these", "double", {})
        ratio = self._ratio()
        if ratio is not None:
            calls = [found for node in self._pair.fused.graph.node if isinstance(found := _call(node), Call)]
            scale = calls[0].scale if calls else 1.0
            yield _Variant(f"scale {scale:.9g}", f"{scale * ratio:.9g}, which fits best", every.without(), ratio)
        if _heads(self._pair, self._after):
            heads = "consecutive value heads share a key head", "every n-th ones do"
            yield _Variant(*heads, every.without(), tiled=True)

    def row(self, variant: _Variant) -> AblationRow:
        """Runs a variant."""
        found = self._run(variant)
        if isinstance(found, Reason):
            return AblationRow(variant.decision, variant.instead, None, None)
        measured = [sums_of(a, b) for a, b in zip(found, self._wanted, strict=True)]
        nrmse, most = max(m[1] for m in measured), max(m[2] for m in measured)
        return AblationRow(variant.decision, variant.instead, nrmse, most)

    def _ratio(self) -> float | None:
        """The factor on the first output that fits best."""
        found = self._run(_Variant("", "", {}))
        if isinstance(found, Reason):
            return None
        a, b = (np.ravel(arrays[0]).astype(np.float64) for arrays in (found, self._wanted))
        size = float(a @ a)
        ratio = float(a @ b) / size if size else 0.0
        return ratio if isfinite(ratio) and ratio else None

    def _run(self, variant: _Variant) -> Sequence[Array] | Reason:
        model = self._pair.fused
        if variant.tiled:
            model = _tiled(model, _heads(self._pair, self._after))
        calls = {node.name: found for node in model.graph.node if isinstance(found := _call(node), Call)}
        scales = {name: found.scale * variant.scale for name, found in calls.items()}
        double = to_double(lower_exact(model, scales if variant.scale != 1.0 else None))
        if isinstance(double, Reason):
            return double
        session = self._worker.load(_with_roundings(double, variant.points).SerializeToString())
        if isinstance(session, Reason):
            return session
        found = self._worker.run(session, self._feeds, self._pair.outputs)
        self._worker.unload(session)
        return found


def _call(node: NodeProto) -> Call | Reason | None:
    return read_call(node) if kernel(node) else None


def _roundings(pair: Pair, after: Side) -> _Roundings:
    """Every value of the fused side that the file keeps in a type narrower than double."""
    graph = pair.fused.graph
    writers = {name: node for node in graph.node for name in node.output if name}
    found = _Roundings()
    for node in graph.node:
        call = _call(node)
        if not isinstance(call, Call):
            continue
        for port, value in call.ports.items():
            if port in _GROUPS:
                _follow(value, _GROUPS[port], writers, after, found)
        for name, value in (("output", call.out), ("state", call.state)):
            if value:
                found.add(name, value, _dtype(after, value))
    return found


def _follow(value: str, group: str, writers: Mapping[str, NodeProto], after: Side, found: _Roundings) -> None:
    """Values on the way to an operand: those of a norm are a decision of their own."""
    stack, seen = [value], {""}
    while stack:
        name = stack.pop()
        node = writers.get(name)
        if name in seen or node is None or node.op_type in ("Shape", "Constant"):
            continue
        seen.add(name)
        found.add(group if node.op_type in _MOVES else "l2 norm", name, _dtype(after, name))
        stack += node.input


def _dtype(after: Side, name: str) -> int | None:
    return after.shapes.dtype(after.graph.find(name) or 0)


def _with_roundings(model: onnx.ModelProto, points: Mapping[str, int]) -> onnx.ModelProto:
    """Rounds some values of a model in double to a narrower type and back."""
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name not in points:
                continue
            node.output[index] = f"{name}/exact"
            nodes.append(helper.make_node("Cast", [f"{name}/exact"], [f"{name}/narrow"], to=points[name]))
            nodes.append(helper.make_node("Cast", [f"{name}/narrow"], [name], to=TensorProto.DOUBLE))
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    return model


def _heads(pair: Pair, after: Side) -> tuple[int, int] | None:
    """Key and value heads where there are more of the latter; None where there is nothing to map."""
    for node in pair.fused.graph.node:
        call = _call(node)
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


def _tiled(model: onnx.ModelProto, heads: tuple[int, int] | None) -> onnx.ModelProto:
    """The fused side with value head h reading key head h modulo their number."""
    assert heads is not None, "there are heads to map"
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        call = _call(node)
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
