"""Runs both sides of one site on the same draws and judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from deltafuse.draws import DRAWS
from deltafuse.fused import call as read_call
from deltafuse.fused import kernel, lower_exact, runnable
from deltafuse.lowering import Call
from deltafuse.measure import sums_of
from deltafuse.probe import Session, Worker, to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.rule import relative
from deltafuse.subexpressions import without_repeats
from deltafuse.verify_bars import EXACT, Bar, bar
from deltafuse.verify_cut import Pair
from deltafuse.verify_draws import PairDraws, Run, drawn, drawn_as_typed, exactly
from deltafuse.verify_feeds import Array

Double = npt.NDArray[np.float64]

TEXTS.update(
    {
        "site-differs": "the fused site is not what it replaced: relative error {error:.1e} in double on '{draw}' at "
        "{tokens:# token}; fuse the model again",
        "site-rounding": "equal in double, but at the target's precision the fused site is beyond the bar ({bar}): "
        "{failed}; set another bar if you have set one, else look for values beyond the range of its element type",
    }
)


@dataclass(frozen=True)
class Finding:
    """A difference, as code and text; ``fix`` is the end of the text that says what to do, "" where it has none."""

    code: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Rounding:
    """The fused site at the target's precision against the unfused one in double; the worst of its outputs."""

    max_abs: float
    cosine: float
    nrmse: float


@dataclass(frozen=True)
class SiteVerdict:
    """One fused site.

    Attributes:
        verdict: ``equal`` or ``differs``.
        error: worst relative error in double over outputs, draws and sizes; None where it could not be run.
        rounding: None where onnxruntime has no kernels for the boundary's type (bfloat16).
        draws: how many draws were compared in double.
        tokens: token counts that were run.
        shared_with: an equal site whose verdict this is.
        failed: which parts of the bar for rounding are not met.
    """

    name: str
    verdict: Literal["equal", "differs"]
    error: float | None
    rounding: Rounding | None
    draws: int
    tokens: tuple[int, ...]
    shared_with: str | None = None
    reason: Finding | None = None
    failed: tuple[str, ...] = ()


def finding(reason: Reason) -> Finding:
    """A reason as it is reported."""
    return Finding(reason.code, reason.text, reason.fix)


def judge(pair: Pair, worker: Worker, close: Bar | None = None) -> SiteVerdict:
    """Compares both sides of a site; what cannot be run differs.

    Args:
        pair: both sides.
        worker: runs them.
        close: the bar for rounding; None for that of a float16 boundary.
    """
    found = _Trial(pair, worker, (close or bar("fp16")).unbounded()).run()
    if isinstance(found, Reason):
        return SiteVerdict(pair.name, "differs", None, None, 0, (), reason=finding(found))
    return found


class _Trial:
    """Runs one pair; lives as long as one verdict."""

    def __init__(self, pair: Pair, worker: Worker, close: Bar) -> None:
        self._pair = pair
        self._worker = worker
        self._close = close

    def run(self) -> SiteVerdict | Reason:
        unfused = self._load(to_double(without_repeats(self._pair.unfused)))
        if isinstance(unfused, Reason):
            return unfused
        try:
            return self._against(unfused)
        finally:
            self._worker.unload(unfused)

    def _against(self, unfused: Session) -> SiteVerdict | Reason:
        draws = PairDraws(self._pair, lambda run: self._outputs(unfused, run))
        sizes = draws.sizes()
        if isinstance(sizes, Reason):
            return sizes
        fused = self._exact(unfused, next(draws.runs(sizes[0])))
        if isinstance(fused, Reason):
            return fused
        runs = [run for size in sizes for run in draws.runs(size)]
        worst, count, reason = 0.0, 0, None
        for run in runs:
            error = self._error(unfused, fused, run)
            if error is None:
                continue
            if isinstance(error, Reason):
                reason = error
                break
            worst, count = max(worst, error), count + 1
            if error > EXACT:
                reason = Reason("site-differs", {"error": error, "draw": run.how.name, "tokens": run.tokens})
                break
        self._worker.unload(fused)
        if not count and reason is None:
            reason = Reason("overflows", {"draw": "every draw"})
        rounding = None if reason is not None else self._rounding(unfused, runs[-len(DRAWS)])
        if isinstance(rounding, Reason):
            reason, rounding = rounding, None
        measured = None if rounding is None else (rounding.cosine, rounding.nrmse, rounding.max_abs)
        failed = () if measured is None else self._close.failed(*measured)
        if measured is not None and failed:
            reason = Reason("site-rounding", {"bar": self._close.title, "failed": self._close.told(*measured)})
        return SiteVerdict(
            self._pair.name,
            "equal" if reason is None else "differs",
            worst if count else None,
            rounding,
            count,
            tuple(dict.fromkeys(run.tokens for run in runs)),
            reason=None if reason is None else finding(reason),
            failed=failed,
        )

    def _exact(self, unfused: Session, run: Run) -> Session | Reason:
        """The fused side in double, with the scale that its float32 attribute stands for.

        The result is linear in the scale: a ratio that rounds to the same attribute tells the digits it lacks.
        """
        session = self._fused(None)
        if isinstance(session, Reason):
            return session
        wanted, found = self._outputs(unfused, run), self._outputs(session, run)
        if isinstance(wanted, Reason) or isinstance(found, Reason):
            return session
        scales = self._scales(_ratio(wanted, found))
        if scales is None:
            return session
        self._worker.unload(session)
        return self._fused(scales)

    def _scales(self, ratio: float) -> dict[str, float] | None:
        stated: dict[str, float] = {}
        for node in self._pair.fused.graph.node:
            call = read_call(node) if kernel(node) else None
            if isinstance(call, Call):
                stated[node.name] = call.scale
        exact = {name: scale * ratio for name, scale in stated.items()}
        same = all(np.float32(exact[name]) == np.float32(scale) for name, scale in stated.items())
        return exact if same and abs(ratio - 1) > EXACT / 10 else None

    def _fused(self, scales: Mapping[str, float] | None) -> Session | Reason:
        return self._load(to_double(lower_exact(self._pair.fused, scales)))

    def _load(self, model: onnx.ModelProto | Reason) -> Session | Reason:
        return model if isinstance(model, Reason) else self._worker.load(model.SerializeToString())

    def _outputs(self, session: Session, run: Run) -> list[Double] | Reason:
        return self._call(session, drawn(self._pair, run))

    def _call(self, session: Session, fed: Mapping[str, Array]) -> list[Double] | Reason:
        ran = self._worker.run(session, dict(fed), self._pair.outputs)
        return ran if isinstance(ran, Reason) else [np.asarray(array, np.float64) for array in ran]

    def _error(self, unfused: Session, fused: Session, run: Run) -> float | Reason | None:
        """Relative error of one run; None where the unfused side overflows by its decay: that tells nothing."""
        error = self._once(unfused, fused, run)
        if error is not None or not run.how.spread:
            return error
        mild = self._once(unfused, fused, replace(run, how=run.how.mild))
        if mild is None:
            return Reason("higher-degree", {"draw": run.how.name})
        if isinstance(mild, Reason) or mild > EXACT:
            return mild
        return self._once(unfused, fused, replace(run, how=run.how.plain))

    def _once(self, unfused: Session, fused: Session, run: Run) -> float | Reason | None:
        """Relative error of one run; None where the unfused side overflows."""
        wanted, found = self._outputs(unfused, run), self._outputs(fused, run)
        if isinstance(wanted, Reason):
            return wanted
        if isinstance(found, Reason):
            return found
        if not all(np.isfinite(array).all() for array in wanted):
            return None
        return max(relative(a, b) for a, b in zip(found, wanted, strict=True))

    def _rounding(self, unfused: Session, run: Run) -> Rounding | Reason | None:
        if any(item.dtype == TensorProto.BFLOAT16 for item in self._pair.inputs):
            return None
        session = self._load(runnable(self._pair.fused))
        if isinstance(session, Reason):
            return session
        typed = drawn_as_typed(self._pair, run)
        found = self._call(session, typed)
        self._worker.unload(session)
        wanted = self._call(unfused, exactly(self._pair, typed))
        if isinstance(found, Reason):
            return found
        return wanted if isinstance(wanted, Reason) else _measure(found, wanted)


def _ratio(wanted: list[Double], found: list[Double]) -> float:
    """Factor between the outputs that differ most."""
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a.shape == b.shape and a.any()]
    ratios = [_dot(a, b) / _dot(a, a) for a, b in pairs]
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=1.0)


def _measure(found: list[Double], wanted: list[Double]) -> Rounding:
    cosines, ratios, differences = zip(*map(sums_of, found, wanted), strict=True)
    return Rounding(max(differences), min(cosines), max(ratios))


def _dot(a: Double, b: Double) -> float:
    return float((a * b).sum())
