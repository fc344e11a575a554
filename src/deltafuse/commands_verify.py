"""``fuse verify`` from its options, as the command line and Python give them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from deltafuse.errors import UserError
from deltafuse.files import check_output
from deltafuse.foreign import load_lowering
from deltafuse.inputs import InputOptions
from deltafuse.limits import within
from deltafuse.options import Progress
from deltafuse.verify import Settings, VerifyReport, check
from deltafuse.verify_bars import Overrides
from deltafuse.verify_causes import Causes, find_causes
from deltafuse.verify_task import TaskOptions, verify_task
from deltafuse.wording import PAGE

__all__ = ["run", "verify"]

#: What takes less time.
_LESS = ", or leave whole models out with --level site"


def verify(given: argparse.Namespace, progress: Progress) -> VerifyReport:
    """What the command line says."""
    inputs = InputOptions(given.inputs, given.save_inputs, given.seed, dict(given.dim))
    bars = Overrides(given.cosine, given.nrmse, given.max_abs)
    foreign = None if given.lowering is None else load_lowering(given.lowering)
    settings = Settings(given.level, inputs, given.timeout, None, bars, progress, foreign, given.allow_outside)
    graphs = _files(given.prefill), _files(given.decode)
    task = TaskOptions(*graphs, given.rollout, given.prompt, given.nll, tuple(given.maps))
    causes = Causes(given.bisect, tuple(given.ablate), given.minimize)
    return run(given.unfused, given.fused, task, causes, settings, given.html)


def _files(given: list[Path] | None) -> tuple[Path, Path] | None:
    return None if given is None else (given[0], given[1])


def run(
    unfused: Path | None,
    fused: Path | None,
    task: TaskOptions,
    causes: Causes,
    settings: Settings,
    html: Path | None = None,
) -> VerifyReport:
    """Verifies two files, or the graphs of a pair, and writes the page where one is asked for.

    Raises:
        UserError: ``usage`` where it is not said which.
    """
    files = [path for path in (unfused, fused, *(task.prefill or ()), *(task.decode or ())) if path is not None]
    if html is not None:
        check_output(html, files)
    if causes.minimize is not None:
        from deltafuse.minimizing import check_folder

        check_folder(causes.minimize, files)
    with within(settings.seconds, _LESS):
        report = _run(unfused, fused, task, causes, settings)
    if html is None:
        return report
    from deltafuse.html_verify import write_page

    write_page(report, html)
    return replace(report, notes=(*report.notes, f"{PAGE} {html}"))


def _run(
    unfused: Path | None, fused: Path | None, task: TaskOptions, causes: Causes, settings: Settings
) -> VerifyReport:
    if unfused is None and fused is None:
        if causes.any:
            text = "--bisect, --ablate and --minimize look into one graph: give two files, UNFUSED FUSED"
            raise UserError("usage", text)
        return verify_task(task, settings)
    if task.prefill or task.decode:
        raise UserError("usage", "give two files, or graphs by name with --prefill U F and --decode U F, not both")
    if unfused is None or fused is None:
        raise UserError("usage", "give two files, UNFUSED FUSED; see `fuse verify --help`")
    if task.rollout or task.prompt or task.nll or task.maps or settings.level == "task":
        raise UserError("usage", "--rollout, --prompt, --nll, --map and --level task need the graphs by name: "
                        "--prefill U F --decode U F")  # fmt: skip
    if causes.bisect and settings.level == "site":
        raise UserError("usage", "--bisect runs whole models: leave out --level site")
    return find_causes(check(unfused, fused, settings), causes, settings)
