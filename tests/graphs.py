"""Small ONNX graphs, edits of real ones, and what a fused graph is compared by."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from deltafuse import classes, patterns, pipeline
from deltafuse.finder import Candidate, Finder
from deltafuse.fused import kernel, lower_exact
from deltafuse.match import FuseReport
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.probe import to_double
from deltafuse.shapes import Shapes
from deltafuse.wire import Model, scan
from deltafuse.worker import Worker

Array = npt.NDArray[Any]

#: One step of the rule in ONNX text, 4 heads, key size 5, value size 3, scale 0.25. The places in braces are for edits.
STEP = """
<ir_version: 8, opset_import: ["" : 17]>
step (float[1,1,4,5] query, float[1,1,4,5] key, float[1,1,4,3] value, float[1,1,4] g, float[1,1,4] beta,
      float[1,4,5,3] state) => (float[1,1,4,3] out, float[1,4,5,3] final_state)
<int64[1] time = {1}, int64[1] last = {-1}, int64[1] row = {-2}, float scale = {0.25}>
{
  q0 = Squeeze(query, time)
  k0 = Squeeze(key, time)
  v0 = Squeeze(value, time)
  g0 = Squeeze(g, time)
  b0 = Squeeze(beta, time)
  e0 = Exp(g0)
  e1 = Unsqueeze(e0, last)
  e2 = Unsqueeze(e1, last)
  decayed = Mul(state, e2)
  k1 = Unsqueeze(k0, last)
  product = Mul(decayed, k1)
  known = ReduceSum<keepdims = 0>(product, row)
  missing = Sub(v0, known)
  b1 = Unsqueeze(b0, last)
  delta = Mul(missing, b1)
  delta_row = Unsqueeze(delta, row)
  update = Mul(k1, delta_row)
  final_state = Add(decayed, update)
  q1 = Mul(q0, scale)
  q2 = Unsqueeze(q1, last)
  read = Mul(final_state, q2)
  o = ReduceSum<keepdims = 0>(read, row)
  out = Unsqueeze(o, time)
}
"""


#: An edit of `STEP` that makes it no rule, and no neighbour of one.
UNNAMED = ("Sub(v0, known)", "Add(v0, known)")


def parse(text: str) -> onnx.ModelProto:
    """A model from ONNX text."""
    return parser.parse_model(text)


def step(*edits: tuple[str, str], outputs: Sequence[str] = ()) -> onnx.ModelProto:
    """`STEP` with pieces of its text replaced (each must occur), and with further graph outputs."""
    text = STEP
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    model = parse(text)
    for name in outputs:
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return model


def save(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """Writes a model and returns where."""
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def scanned(model: onnx.ModelProto, folder: Path) -> Model:
    """A model as the stages read it."""
    return scan(save(model, folder))


def candidates(model: Model) -> list[Candidate]:
    """What the finder sees in a scanned model."""
    kinds, shapes = classes.classify(model), Shapes(model)
    return list(Finder(model, kinds, shapes, pattern()).find())


def pattern() -> patterns.Pattern:
    """The shipped rule."""
    (rule,) = patterns.load(names=["gated_delta_rule"])
    return rule


@contextmanager
def one_worker() -> Iterator[Worker]:
    """Lets all runs of fuse and verify share one worker: a child process each would take most of the time."""
    with Worker() as worker, pytest.MonkeyPatch.context() as patch:
        shared = _Shared(worker)
        for module in (pipeline, importlib.import_module("deltafuse.verify")):
            patch.setattr(module, "Worker", lambda *_, **__: shared)
        yield worker


class _Shared:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> Worker:
        return self._worker

    def __exit__(self, *_: object) -> None:
        """The worker goes on."""


def fuse(model: Path, output: Path | None = None, **options: Any) -> FuseReport:
    """Runs the pipeline."""
    return pipeline.fuse(FuseOptions(model=model, output=output, **options), SilentProgress())


def codes(report: FuseReport) -> list[str]:
    """The reason code of each site, "" where it was fused."""
    return [site.reason.code if site.reason is not None else "" for site in report.sites]


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """A model on onnxruntime as it is, without optimisation."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def double(model: onnx.ModelProto) -> ort.InferenceSession:
    """A model in double on onnxruntime."""
    result = to_double(model)
    assert isinstance(result, onnx.ModelProto), result
    del result.graph.value_info[:]
    for scope in (result.graph, *result.functions):
        _without_softplus(scope)
    return session(result)


def _without_softplus(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    """onnxruntime has no Softplus in double: max(x, 0) + log(1 + exp(-|x|)) in its place."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "Softplus":
            nodes.append(node)
            continue
        x, y = node.input[0], node.output[0]
        one = numpy_helper.from_array(np.ones((), np.float64))
        steps = [("Relu", [x]), ("Abs", [x]), ("Neg", [f"{y}.1"]), ("Exp", [f"{y}.2"])]
        nodes += [helper.make_node(op, inputs, [f"{y}.{index}"]) for index, (op, inputs) in enumerate(steps)]
        nodes.append(helper.make_node("Constant", [], [f"{y}.one"], value=one))
        nodes.append(helper.make_node("Add", [f"{y}.3", f"{y}.one"], [f"{y}.4"]))
        nodes.append(helper.make_node("Log", [f"{y}.4"], [f"{y}.5"]))
        nodes.append(helper.make_node("Add", [f"{y}.0", f"{y}.5"], [y]))
    del graph.node[:]
    graph.node.extend(nodes)


def lowered_double(fused: onnx.ModelProto, report: FuseReport) -> ort.InferenceSession:
    """A fused model, its fused nodes as plain operators, in double and with the exact scales."""
    scales = {
        node.name: site.match.scale
        for site in report.sites
        if site.match is not None
        for node in fused.graph.node
        if kernel(node) and node.name.startswith(f"{site.name}/")
    }
    return double(lower_exact(fused, scales))


def difference(
    fused: ort.InferenceSession, unfused: ort.InferenceSession, feeds: Mapping[str, Array], *, strict: bool = False
) -> float:
    """Largest relative difference of any output, where the unfused one is a number; inf where shapes differ.

    Args:
        strict: inf too where only one of them is a number.
    """
    worst = 0.0
    given = [{i.name: feeds[i.name] for i in one.get_inputs()} for one in (fused, unfused)]
    for got, want in zip(fused.run(None, given[0]), unfused.run(None, given[1]), strict=True):
        # A chunk spreads one NaN over all its tokens, a recurrence over later ones only.
        finite = np.isfinite(want)
        if got.shape != want.shape or not np.isfinite(got[finite]).all():
            return float("inf")
        if strict and not np.array_equal(finite, np.isfinite(got)):
            return float("inf")
        top = np.abs(want[finite]).max(initial=0.0)
        worst = max(worst, float(np.abs(got[finite] - want[finite]).max(initial=0.0)) / float(top or 1.0))
    return worst


def wide(name: str, shape: Sequence[int], rng: np.random.Generator, large: float = 1e5) -> Array:
    """An operand by its name, far outside of what a proof draws: g to -200, beta -1..3, keys of norm 1e-6..1e3."""
    if name == "g":
        return rng.choice([-0.01, -1.0, -200.0], shape) * rng.uniform(size=shape)
    if name == "beta":
        return rng.uniform(-1, 3, shape)
    if name in ("query", "key"):
        norms = 10 ** rng.uniform(-6, 3, [*shape[:-1], 1])
        return rng.standard_normal(shape) / np.sqrt(shape[-1]) * norms
    return rng.standard_normal(shape) * large


def wide_feeds(model: onnx.ModelProto, seed: int, large: float = 1e5) -> dict[str, Array]:
    """Operands of a model without open sizes, far outside of what a proof draws."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for info in model.graph.input:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        assert all(shape), info.name
        feeds[info.name] = wide(info.name, shape, rng, large)
    return feeds


Nodes = tuple[list[onnx.NodeProto], list[TensorProto]]


def insert(model: onnx.ModelProto, value: str, make: Callable[[str, str], Nodes]) -> onnx.ModelProto:
    """A copy in which new nodes stand between a value and all its readers.

    Args:
        make: gives nodes and initializers for the name that they read and the name that they write.
    """
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    graph = edited.graph
    if any(info.name == value for info in graph.input):
        for node in graph.node:
            node.input[:] = [f"{value}.guarded" if name == value else name for name in node.input]
        nodes, constants = make(value, f"{value}.guarded")
        place = 0
    else:
        place = next(index for index, node in enumerate(graph.node) if value in node.output)
        writer = graph.node[place]
        writer.output[:] = [f"{value}.raw" if name == value else name for name in writer.output]
        nodes, constants = make(f"{value}.raw", value)
        place += 1
    for offset, node in enumerate(nodes):
        graph.node.insert(place + offset, node)
    graph.initializer.extend(constants)
    return edited


def constant(name: str, number: object, dtype: type[np.generic] = np.float32) -> TensorProto:
    """An initializer."""
    return numpy_helper.from_array(np.array(number, dtype), name)
