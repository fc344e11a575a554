"""Judges what stands in place of an ordinary expression: both sides in double, on numbers of every size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deltafuse.dims import evaluate
from deltafuse.expression_trial import bindings, difference, empty
from deltafuse.expressions import SCALES, Array
from deltafuse.probe import to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.verify_bars import EXACT
from deltafuse.verify_cut import Pair
from deltafuse.verify_feeds import FLOATS, Input
from deltafuse.verify_trial import SiteVerdict, finding
from deltafuse.worker import AnyArray, Session, Worker

TEXTS["expression-site-differs"] = (
    "what stands in place of the expression is not equal to it: relative error {error:.1e} in double on {shapes}; "
    "fuse the model again"
)

#: How many of the numbers are ones that stand in the nodes themselves, or twice or half of them: bounds, epsilons.
_STATED = 0.3


def judge_expression(pair: Pair, worker: Worker) -> SiteVerdict:
    """Compares both sides of a site without a fused operator; what cannot be run differs."""
    sessions: list[Session] = []
    for model in (pair.unfused, pair.fused):
        double = to_double(model)
        session = double if isinstance(double, Reason) else worker.load(double.SerializeToString())
        if isinstance(session, Reason):
            return SiteVerdict(pair.name, "differs", None, None, 0, (), reason=finding(session))
        sessions.append(session)
    verdict = _compared(pair, worker, sessions)
    if verdict.verdict == "equal":
        for session in sessions:
            worker.unload(session)
    return verdict


def _compared(pair: Pair, worker: Worker, sessions: Sequence[Session]) -> SiteVerdict:
    """Both sides on all draws; sizes at which the unfused one gives nothing tell nothing."""
    worst, draws = 0.0, 0
    for feeds in _feeds(pair):
        sides: list[dict[str, Array]] = []
        for session in sessions:
            ran = worker.run(session, feeds, pair.outputs)
            if isinstance(ran, Reason):
                return SiteVerdict(pair.name, "differs", None, None, draws, (), reason=finding(ran))
            pairs = zip(pair.outputs, ran, strict=True)
            sides.append({name: np.asarray(array, np.float64) for name, array in pairs})
            if empty(sides[0]):
                break
        if empty(sides[0]):
            continue
        error = difference(sides[1], sides[0])
        worst, draws = max(worst, error), draws + 1
        if not error <= EXACT:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items()) or "no inputs"
            reason = Reason("expression-site-differs", {"error": error, "shapes": shapes})
            return SiteVerdict(pair.name, "differs", worst, None, draws, (), reason=finding(reason))
    if not draws:
        reason = Reason("expression-empty", {"value": pair.outputs[0]})
        return SiteVerdict(pair.name, "differs", None, None, 0, (), reason=finding(reason))
    return SiteVerdict(pair.name, "equal", worst, None, draws, ())


def _feeds(pair: Pair) -> Iterator[Mapping[str, AnyArray]]:
    stated = _stated((pair.unfused, pair.fused))
    for seed, sizes in enumerate(bindings([item.shape for item in pair.inputs])):
        rng = np.random.default_rng(seed)
        for scale in (*SCALES, 100.0):
            yield {item.name: _drawn(rng, item, sizes, scale, stated) for item in pair.inputs}


def _drawn(
    rng: np.random.Generator, item: Input, sizes: Mapping[str, int], scale: float, stated: Sequence[float]
) -> AnyArray:
    shape = tuple(evaluate(dim, sizes) for dim in item.shape)
    if item.dtype not in FLOATS:
        return rng.integers(0, 2, shape).astype(helper.tensor_dtype_to_np_dtype(item.dtype))
    drawn = rng.standard_normal(shape) * scale
    if not stated:
        return drawn
    chosen = rng.choice(np.array(stated), shape) * rng.choice(np.array([0.5, 1.0, 2.0]), shape)
    return np.where(rng.random(shape) < _STATED, chosen, drawn)


def _stated(models: Sequence[onnx.ModelProto]) -> list[float]:
    """The finite float numbers that stand alone in the nodes' constants."""
    found: set[float] = set()
    for model in models:
        held = [attribute.t for node in model.graph.node for attribute in node.attribute if attribute.HasField("t")]
        for tensor in (*model.graph.initializer, *held):
            if tensor.data_type in FLOATS and np.prod(tensor.dims) == 1:
                found.add(float(numpy_helper.to_array(tensor).astype(np.float64).ravel()[0]))
    return sorted(number for number in found if np.isfinite(number))
