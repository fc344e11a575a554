"""Compares the steps of two rollouts: tokens, logits and how far the recurrent states have drifted apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltafuse.measure import nrmse_of, sums_of
from deltafuse.reasons import TEXTS, Reason
from deltafuse.verify_bars import Bar
from deltafuse.verify_trial import Finding, finding

TEXTS.update(
    {
        "rollout-token": "at step {step} the unfused model goes on with token {unfused} (by {margin:.3g}), the fused "
        "one with {fused} (by {fused_margin:.3g}) ({bar}); look for the cause with fuse verify UNFUSED FUSED "
        "--bisect on the decode graph",
        "rollout-drift": "{name} drifts beyond the bar ({bar}) at step {step}: NRMSE {nrmse:.3g} (at most {most:g}); "
        "look for the cause with fuse verify UNFUSED FUSED --bisect on the decode graph",
        "rollout-logits": "the logits are beyond the bar ({bar}) at step {step}: {failed}; look for the cause with "
        "fuse verify UNFUSED FUSED --bisect on the decode graph",
        "rollout-not-finite": "{name} has infinities or NaNs in the {model} model at step {step}; give another prompt "
        "with --prompt, or look for values beyond the range of float16",
    }
)

Array = npt.NDArray[np.generic]
Double = npt.NDArray[np.float64]
Precision = Literal["exact", "rounded"]


@dataclass(frozen=True)
class TokenDifference:
    """The first step at which the most likely token is another.

    Attributes:
        step: 0 is the token that the prefill tells.
        unfused, fused: tokens.
        unfused_margin: lead of the unfused model's token over the fused one's, in the unfused logits.
        fused_margin: lead of the fused model's token over the unfused one's, in the fused logits.
    """

    step: int
    unfused: int
    fused: int
    unfused_margin: float
    fused_margin: float


@dataclass(frozen=True)
class Drift:
    """How far one state has drifted, step by step.

    Attributes:
        name: of the state; of stacked ones, with the layer behind it.
        nrmse: after the prefill, and after each step.
    """

    name: str
    nrmse: tuple[float, ...]


@dataclass(frozen=True)
class RolloutRun:
    """The fused pair against the unfused one, fed the same tokens.

    Attributes:
        precision: ``exact``: without the boundary's rounding; ``rounded``: at the target's precision.
        bar: what it is held to; nrmse: the largest NRMSE that it admits.
        equal_tokens: at how many steps the most likely token is the same.
        first_difference: None where all are.
        logits: NRMSE of the logits, step by step.
        drift: of each recurrent state, and of the outputs where there are no logits.
    """

    precision: Precision
    verdict: Literal["passes", "differs"]
    bar: str
    equal_tokens: int
    first_difference: TokenDifference | None
    logits: tuple[float, ...]
    drift: tuple[Drift, ...]
    nrmse: float
    reason: Finding | None = None


@dataclass(frozen=True)
class Steps:
    """What a rollout left.

    Attributes:
        logits: [steps, vocabulary], none where the graph gives none; the prefill's first.
        curves: state or output -> ``.npy`` [steps, layers, numbers].
    """

    logits: Array | None
    curves: Mapping[str, Path]

    @property
    def tokens(self) -> list[int]:
        """The most likely token of each step."""
        return [] if self.logits is None else [int(token) for token in self.logits.argmax(-1)]


def compare_steps(unfused: Steps, fused: Steps, precision: Precision, bar: Bar) -> RolloutRun:
    """Compares step by step. Both were fed the unfused model's tokens, so that one difference does not hide others."""
    reasons: list[Reason] = []
    equal, first = 0, None
    curve: tuple[float, ...] = ()
    if unfused.logits is not None and fused.logits is not None:
        reasons += _not_finite(unfused.logits, fused.logits)
        equal, first = _tokens(unfused, fused)
        reasons += _token_reasons(unfused, first, precision, bar)
        curve = tuple(nrmse_of(a, b) for a, b in zip(fused.logits, unfused.logits, strict=True))
        reasons += _logits_reasons(unfused.logits, fused.logits, bar)
    drift: list[Drift] = []
    for name, path in unfused.curves.items():
        found = list(_drift(name, np.load(path), np.load(fused.curves[name])))
        drift += found
        reasons += [reason for one in found if (reason := _drift_reason(one, bar)) is not None]
    reason = finding(reasons[0]) if reasons else None
    verdict = "differs" if reasons else "passes"
    return RolloutRun(precision, verdict, bar.title, equal, first, curve, tuple(drift), bar.nrmse, reason)


def _tokens(unfused: Steps, fused: Steps) -> tuple[int, TokenDifference | None]:
    pairs = list(zip(unfused.tokens, fused.tokens, strict=True))
    differ = [step for step, (a, b) in enumerate(pairs) if a != b]
    if not differ or unfused.logits is None or fused.logits is None:
        return len(pairs) - len(differ), None
    step = differ[0]
    a, b = pairs[step]
    left, right = unfused.logits[step].astype(np.float64), fused.logits[step].astype(np.float64)
    return len(pairs) - len(differ), TokenDifference(step, a, b, float(left[a] - left[b]), float(right[b] - right[a]))


def _token_reasons(
    unfused: Steps, first: TokenDifference | None, precision: Precision, bar: Bar
) -> Sequence[Reason]:
    """Without rounding all tokens are to be equal, but where two of them lead by nothing that the type can hold."""
    if first is None or unfused.logits is None:
        return ()
    top = unfused.logits[first.step, first.unfused]
    if first.unfused_margin <= 2 * float(np.spacing(np.abs(top))):
        return ()
    if precision == "rounded" and bar.tokens is not None and first.step >= bar.tokens:
        return ()
    at = {"step": first.step, "unfused": first.unfused, "fused": first.fused, "bar": bar.title}
    return (Reason("rollout-token", at | {"margin": first.unfused_margin, "fused_margin": first.fused_margin}),)


def _not_finite(unfused: Array, fused: Array) -> Sequence[Reason]:
    for model, rows in (("unfused", unfused), ("fused", fused)):
        bad = [step for step, row in enumerate(rows) if not np.isfinite(row.astype(np.float64)).all()]
        if bad:
            return (Reason("rollout-not-finite", {"name": "logits", "model": model, "step": bad[0]}),)
    return ()


def _logits_reasons(unfused: Array, fused: Array, bar: Bar) -> Sequence[Reason]:
    for step, (a, b) in enumerate(zip(unfused, fused, strict=True)):
        measured = sums_of(b, a)
        if not bar.met(*measured):
            return (Reason("rollout-logits", {"bar": bar.title, "step": step, "failed": bar.told(*measured)}),)
    return ()


def _drift(name: str, unfused: Array, fused: Array) -> list[Drift]:
    layers = unfused.shape[1]
    label = name.partition(" ")[2]
    return [
        Drift(
            f"{label}[{layer}]" if layers > 1 else label,
            tuple(nrmse_of(b, a) for a, b in zip(unfused[:, layer], fused[:, layer], strict=True)),
        )
        for layer in range(layers)
    ]


def _drift_reason(drift: Drift, bar: Bar) -> Reason | None:
    for step, nrmse in enumerate(drift.nrmse):
        if not nrmse <= bar.nrmse:
            at = {"name": drift.name, "bar": bar.title, "step": step}
            if nrmse != nrmse or nrmse == inf:
                return Reason("rollout-not-finite", at | {"model": "fused"})
            return Reason("rollout-drift", at | {"nrmse": nrmse, "most": bar.nrmse})
    return None
