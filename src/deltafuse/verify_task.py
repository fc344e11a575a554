"""Task level of ``fuse verify``: the graphs of a pair, prefill and decode, each looked over alone and then together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from deltafuse.errors import UserError
from deltafuse.inputs import InputOptions
from deltafuse.network_model import obstacle
from deltafuse.options import Level
from deltafuse.reasons import Reason
from deltafuse.rollout import Chain, TaskReport, run_task
from deltafuse.rollout_run import Limits
from deltafuse.verify import OBSTACLES, Checked, Settings, VerifyReport, check
from deltafuse.verify_trial import finding

__all__ = ["TaskOptions", "verify_task"]

Array = npt.NDArray[np.generic]
Files = tuple[Path, Path]


@dataclass(frozen=True)
class TaskOptions:
    """What the user asks for.

    Attributes:
        prefill, decode: unfused and fused file of each graph.
        rollout: decode steps, 0 for none.
        prompt: npy file with the prompt's token ids.
        nll: npy file with token ids whose loss is to be told.
        maps: states that the user pairs, as (outputs, inputs).
    """

    prefill: Files | None = None
    decode: Files | None = None
    rollout: int = 0
    prompt: Path | None = None
    nll: Path | None = None
    maps: tuple[tuple[str, str], ...] = ()


def verify_task(options: TaskOptions, settings: Settings) -> VerifyReport:
    """Verifies one or two graphs and runs them as they are used.

    Args:
        options: the graphs, and what to run.
        settings: how to compare; inputs are those of the first graph.

    Returns:
        Exit 0 where both graphs are equal and the task level passes, else 5.

    Raises:
        UserError: what `deltafuse.verify.verify` raises; options that do not go together, token ids that do not fit,
            states that cannot be paired.
    """
    _check(options, settings.level)
    prompt, text = (None if path is None else read_ids(path) for path in (options.prompt, options.nll))
    checked: dict[str, Checked] = {}
    for name, files in (("prefill", options.prefill), ("decode", options.decode)):
        if files is not None:
            first = not checked
            own = settings.inputs if first else InputOptions(seed=settings.inputs.seed)
            checked[name] = check(*files, replace(settings, inputs=own))
    task = _task(options, settings, checked, prompt, text) if options.rollout or text is not None else None
    return _report(checked, task, settings.level)


def _check(options: TaskOptions, level: Level) -> None:
    runs = options.rollout or options.nll is not None
    if options.prefill is None and options.decode is None:
        raise UserError("usage", "give the graphs with --prefill U F and --decode U F, or two files alone")
    if options.rollout < 0:
        raise UserError("usage", f"--rollout {options.rollout}: give a number of steps of 1 or more")
    if options.rollout and options.decode is None:
        raise UserError("usage", "--rollout chains the steps of a decode graph: give one with --decode U F")
    if options.prefill is None and (options.prompt or options.nll):
        raise UserError("usage", "--prompt and --nll need a prefill graph: give one with --prefill U F")
    if level == "task" and not runs:
        raise UserError("usage", "--level task needs something to run: give --rollout N or --nll FILE")
    if level == "site" and runs:
        raise UserError("usage", "--rollout and --nll run whole models: leave out --level site")


def read_ids(path: Path) -> Array:
    """Token ids from an npy file.

    Raises:
        UserError: ``prompt-missing``, ``prompt-ids``.
    """
    try:
        ids = cast("Array", np.load(path, allow_pickle=False))
    except FileNotFoundError:
        raise UserError("prompt-missing", f"{path} does not exist: check the path") from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError("prompt-ids", f"{path} is no npy file ({error}): write it with numpy.save") from None
    array = np.atleast_1d(ids) if type(ids) is np.ndarray else np.zeros(0)
    if array.dtype.kind not in "iu" or not array.size or array.size != max(array.shape):
        raise UserError("prompt-ids", f"{path} must hold whole numbers, the tokens of one prompt: write them with "
                        "numpy.save(path, numpy.array([...]))")  # fmt: skip
    return np.ravel(array)


def _task(
    options: TaskOptions, settings: Settings, checked: dict[str, Checked], prompt: Array | None, text: Array | None
) -> TaskReport | Reason:
    stages = {name: one.stage for name, one in checked.items()}
    models = [side.model for stage in stages.values() for side in (stage.before, stage.after)]
    found = (obstacle(model, settings.foreign) for model in models)
    reasons = [reason for reason in found if reason is not None]
    if reasons:
        return reasons[0]
    chain = Chain(
        stages.get("prefill"), stages.get("decode"), replace(settings.inputs, save=None), options.rollout, prompt,
        text, options.maps, settings.bars, Limits(settings.seconds, settings.memory),
    )  # fmt: skip
    return run_task(chain, settings.progress)


def _report(checked: dict[str, Checked], task: TaskReport | Reason | None, level: Level) -> VerifyReport:
    reports = {name: one.report for name, one in checked.items()}
    failed = any(report.exit for report in reports.values())
    if isinstance(task, Reason) and not failed and not (level == "all" and task.code in OBSTACLES):
        raise UserError(task.code, task.text)
    ran = task if isinstance(task, TaskReport) else None
    failed = failed or (ran is not None and ran.verdict == "differs")
    return VerifyReport(
        None, None, (), (), 5 if failed else 0,
        skipped=finding(task) if isinstance(task, Reason) else None,
        prefill=reports.get("prefill"), decode=reports.get("decode"), task=ran,
    )  # fmt: skip
