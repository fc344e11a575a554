"""Task level of ``fuse verify``: prefill and a chain of decode steps, of the unfused and of the fused pair.

The unfused pair goes its own greedy way. The fused one is fed the same tokens, so that each step can be compared, and
is run twice: without the boundary's rounding, where all tokens must be equal, and at the target's precision, where the
states drift.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltafuse.errors import UserError
from deltafuse.inputs import InputOptions
from deltafuse.options import Progress
from deltafuse.reasons import TEXTS, Reason
from deltafuse.rollout_diff import Precision, RolloutRun, Steps, compare_steps
from deltafuse.rollout_run import Limits, Runner, Went
from deltafuse.verify_bars import Bar, Overrides, bar_of
from deltafuse.verify_stage import Stage
from deltafuse.verify_trial import Finding, finding
from deltafuse.wording import number, span

__all__ = ["Chain", "LossReport", "RolloutReport", "TaskReport", "run_task"]

TEXTS.update(
    {
        "task-does-not-run": "the unfused pair runs and the fused one does not: {error}; look the fused files over "
        "with fuse lint, and fuse both again",
        "loss-beyond-bar": "the loss per token is {fused:.6f} in place of {unfused:.6f}; they may be {most:g} apart "
        "({bar}); look for the cause with fuse verify UNFUSED FUSED --bisect on one graph",
    }
)

Array = npt.NDArray[np.generic]
PRECISIONS: tuple[Precision, ...] = ("exact", "rounded")
Verdict = Literal["passes", "differs"]


@dataclass(frozen=True)
class Chain:
    """What is to be run.

    Attributes:
        prefill: None for a decode graph alone, whose first states are drawn.
        decode: None for a prefill alone, of which only a loss can be told.
        options: what the user says about the inputs of the first graph.
        steps: of decode, 0 for no rollout.
        prompt: token ids of the prefill; drawn where None.
        text: token ids whose loss is to be told; None for no loss.
        maps: states that the user pairs, as (outputs, inputs).
        bars: what the user sets in place of the table.
        limits: of one run.
    """

    prefill: Stage | None
    decode: Stage | None
    options: InputOptions
    steps: int
    prompt: Array | None
    text: Array | None
    maps: tuple[tuple[str, str], ...]
    bars: Overrides
    limits: Limits


@dataclass(frozen=True)
class RolloutReport:
    """Both pairs, step by step.

    Attributes:
        steps: decode steps that were run.
        tokens: what the unfused pair goes on with, the prefill's token first.
        mapping: which output becomes which input, as ``--map`` takes it.
        fitted: what had to be changed of a state to make it fit.
        runs: the fused pair without the boundary's rounding, then with it.
    """

    verdict: Verdict
    steps: int
    tokens: tuple[int, ...]
    mapping: tuple[str, ...]
    fitted: tuple[str, ...]
    runs: tuple[RolloutRun, ...]
    reason: Finding | None = None


@dataclass(frozen=True)
class LossReport:
    """Teacher-forced loss: mean negative log likelihood of each token, given those before it.

    Attributes:
        tokens: how many tokens the loss is of.
        prefilled: how many of them the prefill was given; the others went through decode, one a step.
        unfused: loss of the unfused pair, in nats per token.
        exact, rounded: of the fused pair, without and with the boundary's rounding.
    """

    verdict: Verdict
    tokens: int
    prefilled: int
    unfused: float
    exact: float | None
    rounded: float | None
    reason: Finding | None = None


@dataclass(frozen=True)
class TaskReport:
    """The task level; what was not asked for is None."""

    verdict: Verdict
    rollout: RolloutReport | None
    loss: LossReport | None


def run_task(chain: Chain, progress: Progress) -> TaskReport | Reason:
    """Runs both pairs and compares.

    Returns:
        Why a model of the unfused pair cannot be run.

    Raises:
        UserError: states that cannot be paired, token ids that do not fit.
    """
    if chain.prefill is not None and chain.prompt is not None and chain.steps:
        check_prompt(chain.prefill, chain.prompt.size)
    with TemporaryDirectory(prefix="deltafuse-") as folder:
        runner = Runner(
            chain.prefill, chain.decode, chain.options, chain.maps, chain.limits, Path(folder), progress
        )
        rollout = _rollout(chain, runner) if chain.steps else None
        if isinstance(rollout, Reason):
            return rollout
        loss = _loss(chain, runner, chain.text) if chain.text is not None else None
    if isinstance(loss, Reason):
        return loss
    good = all(part is None or part.verdict == "passes" for part in (rollout, loss))
    return TaskReport("passes" if good else "differs", rollout, loss)


def _rollout(chain: Chain, runner: Runner) -> RolloutReport | Reason:
    unfused = runner.go("unfused", chain.prompt, chain.steps, None)
    if isinstance(unfused, Reason):
        return unfused
    steps, runs, fitted, failed = _steps(unfused), list[RolloutRun](), unfused.fitted, None
    for precision in PRECISIONS:
        fused = runner.go(precision, chain.prompt, chain.steps, steps.tokens or None)
        if isinstance(fused, Reason):
            failed = finding(Reason("task-does-not-run", {"error": fused.what}))
            break
        fitted = tuple(dict.fromkeys((*fitted, *fused.fitted)))
        runs.append(compare_steps(steps, _steps(fused), precision, _bar(chain, precision)))
    good = failed is None and all(run.verdict == "passes" for run in runs)
    mapping = dict.fromkeys(link.text for link in (*runner.first, *runner.links))
    tokens = tuple(steps.tokens)
    return RolloutReport(
        "passes" if good else "differs", chain.steps, tokens, tuple(mapping), fitted, tuple(runs), failed
    )


def _steps(went: Went) -> Steps:
    return Steps(went.rows, went.curves)


def _bar(chain: Chain, precision: Precision) -> Bar:
    stage = chain.decode or chain.prefill
    assert stage is not None, "there is something to run"
    return bar_of(stage.after.shapes, chain.bars, rounding=precision == "rounded")


def _loss(chain: Chain, runner: Runner, text: Array) -> LossReport | Reason:
    ids = np.ravel(text)
    if ids.size < 2:
        raise UserError("prompt-ids", "a loss needs two tokens or more: give a longer file with --nll")
    head = _head(chain, ids.size)
    forced = [int(token) for token in ids[head:-1]]
    losses: dict[str, float] = {}
    failed: Reason | None = None
    for which in ("unfused", *PRECISIONS):
        went = runner.go(which, ids[:head], len(forced), forced)
        if isinstance(went, Reason):
            if which == "unfused":
                return went
            failed = Reason("task-does-not-run", {"error": went.what})
            break
        losses[which] = _nll(went, ids)
    for precision in PRECISIONS if failed is None else ():
        bar = _bar(chain, precision)
        if failed is None and not abs(losses[precision] - losses["unfused"]) <= bar.nll:
            pair = {"unfused": losses["unfused"], "fused": losses[precision]}
            failed = Reason("loss-beyond-bar", pair | {"most": bar.nll, "bar": bar.title})
    return LossReport(
        "passes" if failed is None else "differs", ids.size - 1, head, losses["unfused"], losses.get("exact"),
        losses.get("rounded"), None if failed is None else finding(failed),
    )  # fmt: skip


def _head(chain: Chain, count: int) -> int:
    """How many tokens go through the prefill: half of them where it is right for so many, so that decode counts too."""
    assert chain.prefill is not None, "a loss needs a prefill"
    if chain.decode is None:
        return count
    low, high = _right_for(chain.prefill, count)
    if low > count:
        raise UserError(
            "prompt-ids",
            f"--nll has {number(count, 'token')} and the unfused prefill is right from {low} on: give a longer file",
        )
    return min(max(count // 2, low), high)


def _right_for(prefill: Stage, most: int) -> tuple[int, int]:
    """The least and the largest number of tokens, `most` at most, that the unfused prefill is right for."""
    fixed = [pair.tokens for pair in prefill.pairs if isinstance(pair.tokens, int)]
    if fixed:
        return fixed[0], fixed[0]
    valid = [pair.valid for pair in prefill.pairs if pair.valid]
    return max([1, *(low for low, _ in valid)]), min([most, *(high for _, high in valid)])


def check_prompt(prefill: Stage, count: int) -> None:
    """Raises where the unfused prefill is wrong for a prompt of that many tokens, so that nothing can be compared.

    Raises:
        UserError: ``prompt-ids``.
    """
    low, high = _right_for(prefill, sys.maxsize)
    if low <= count <= high:
        return
    fitting = span(low, high, "token") if high < sys.maxsize else f"{low} or more tokens"
    raise UserError(
        "prompt-ids",
        f"--prompt has {number(count, 'token')} and the unfused prefill is right for {fitting}: give a prompt of that "
        f"many, or export the prefill for {count}",
    )


def _nll(went: Went, ids: Array) -> float:
    """Of each token but the first."""
    assert went.prefill is not None, "a loss needs a prefill"
    rows = [*went.prefill, *(() if went.logits is None else went.logits)]
    losses = [_surprise(row, int(token)) for row, token in zip(rows, ids[1:], strict=False)]
    return float(np.mean(losses))


def _surprise(row: Array, token: int) -> float:
    numbers = row.astype(np.float64)
    top = float(numbers.max())
    return top + float(np.log(np.exp(numbers - top).sum())) - float(numbers[token])
