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
from onnx import NodeProto, TensorProto, helper

from deltafuse.ablating_heads import fused_call, heads_of, tiled
from deltafuse.fused import lower_exact
from deltafuse.lowering import Call
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
            calls = [found for node in self._pair.fused.graph.node if isinstance(found := fused_call(node), Call)]
            scale = calls[0].scale if calls else 1.0
            yield _Variant(f"scale {scale:.9g}", f"{scale * ratio:.9g}, which fits best", every.without(), ratio)
        if heads_of(self._pair, self._after):
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
            model = tiled(model, heads_of(self._pair, self._after))
        calls = {node.name: found for node in model.graph.node if isinstance(found := fused_call(node), Call)}
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


def _roundings(pair: Pair, after: Side) -> _Roundings:
    """Every value of the fused side that the file keeps in a type narrower than double."""
    graph = pair.fused.graph
    writers = {name: node for node in graph.node for name in node.output if name}
    found = _Roundings()
    for node in graph.node:
        call = fused_call(node)
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
        if name in seen or node is None or (not node.domain and node.op_type in ("Shape", "Constant")):
            continue
        seen.add(name)
        found.add(group if node.op_type in _MOVES and not node.domain else "l2 norm", name, _dtype(after, name))
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
