"""What ``fuse verify`` does on demand to find a cause: bisect the sites, ablate one, write one as a reproduction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from deltafuse.ablating import AblationReport, ablate
from deltafuse.bisecting import bisect
from deltafuse.errors import UserError
from deltafuse.inputs import Inputs
from deltafuse.minimizing import Reproduction, reproduce
from deltafuse.network_model import obstacle
from deltafuse.probe import Worker
from deltafuse.reasons import TEXTS, Reason
from deltafuse.verify import Checked, Settings, VerifyReport
from deltafuse.verify_bars import bar_of
from deltafuse.verify_cut import Pair, cut_expression, site_name
from deltafuse.verify_diff import Region
from deltafuse.verify_stage import Stage
from deltafuse.verify_trial import finding

__all__ = ["Causes", "find_causes"]

TEXTS.update(
    {
        "cause-inside-body": "{site} lies inside the body of an If, Loop or Scan, and {option} looks at sites of the "
        "main graph only; read its own verdict",
        "cause-expression": "{site} stands in place of an ordinary expression, and {option} undoes decisions of a "
        "rule's sites only; read its own verdict, or cut it out with --minimize",
    }
)

_INSIDE = "cause-inside-body"


@dataclass(frozen=True)
class Causes:
    """What the user asks for.

    Attributes:
        bisect: find the sites that move an output beyond tolerance.
        ablate: shell-style patterns of the sites whose decisions are to be undone one by one.
        minimize: folder for a reproduction of the first site to blame.
    """

    bisect: bool = False
    ablate: tuple[str, ...] = ()
    minimize: Path | None = None

    @property
    def any(self) -> bool:
        """Whether anything is asked for."""
        return self.bisect or bool(self.ablate) or self.minimize is not None


def find_causes(checked: Checked, causes: Causes, settings: Settings) -> VerifyReport:
    """The report with what was asked for.

    Raises:
        UserError: ``no-such-site``, or why whole models cannot be run for a bisection.
    """
    stage, report = checked.stage, checked.report
    if causes.ablate:
        report = replace(report, ablations=_ablations(stage, causes.ablate, settings))
    if causes.bisect:
        report = _bisected(stage, report, settings)
    if causes.minimize is not None:
        report = replace(report, reproduction=_reproduced(stage, report, causes.minimize, settings))
    return report


def _ablations(stage: Stage, globs: tuple[str, ...], settings: Settings) -> tuple[AblationReport, ...]:
    def named(name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in globs)

    chosen = [pair for pair in stage.pairs if named(pair.name)]
    codes = {**dict.fromkeys(_expressions(stage), "cause-expression"), **dict.fromkeys(stage.inside, _INSIDE)}
    others = [
        AblationReport(name, (), finding(Reason(code, {"site": name, "option": "--ablate"})))
        for name, code in codes.items()
        if named(name)
    ]
    if not (chosen or others):
        known = ", ".join(pair.name for pair in stage.pairs) or "none that can be run on its own"
        raise UserError("no-such-site", f"no site matches --ablate {', '.join(globs)}: there are {known}")
    settings.progress.start("undoing decisions")
    with Worker(settings.seconds) as worker:
        return (*(ablate(pair, stage.after, worker) for pair in chosen), *others)


def _expressions(stage: Stage) -> dict[str, Region]:
    """Regions in place of ordinary expressions, by their sites' names."""
    return {site_name(stage.after.graph, region): region for region in stage.expressions}


def _bisected(stage: Stage, report: VerifyReport, settings: Settings) -> VerifyReport:
    inputs = _inputs(stage, settings)
    if isinstance(inputs, Reason):
        raise UserError(inputs.code, f"--bisect runs whole models: {inputs.text}")
    close = bar_of(stage.after.shapes, settings.bars)
    found = bisect(stage, inputs, close, settings.seconds, settings.memory, settings.progress)
    if isinstance(found, Reason):
        raise UserError(found.code, found.text)
    return replace(report, bisect=found)


def _inputs(stage: Stage, settings: Settings) -> Inputs | Reason:
    reason = obstacle(stage.before.model, stage.foreign)
    return stage.inputs(replace(settings.inputs, save=None)) if reason is None else reason


def _reproduced(stage: Stage, report: VerifyReport, folder: Path, settings: Settings) -> Reproduction:
    name = to_blame(report)
    if name is None:
        return Reproduction(None, note="no site is to blame: nothing was written")
    if name in stage.inside:
        inside = Reason(_INSIDE, {"site": name, "option": "--minimize"})
        return Reproduction(None, note=f"{inside.text}: nothing was written")
    pair: Pair | Reason | None = next((pair for pair in stage.pairs if pair.name == name), None)
    region = _expressions(stage).get(name)
    if pair is None and region is not None:
        pair = cut_expression(stage.before, stage.after, region)
    if not isinstance(pair, Pair):
        return Reproduction(None, note=f"{name} cannot be cut out of both files: nothing was written")
    settings.progress.start("writing a reproduction")
    inputs = _inputs(stage, settings)
    return reproduce(
        stage, pair, None if isinstance(inputs, Reason) else inputs, folder, settings.seconds, settings.memory
    )


def to_blame(report: VerifyReport) -> str | None:
    """The first site to blame: by the whole models' values, else by its verdict, its structure, the bisection."""
    divergence = None if report.network is None else report.network.divergence
    first = None if divergence is None else divergence.first
    names = [
        *([first.site] if first is not None and first.blame == "site" else []),
        *(site.name for site in report.sites if site.verdict == "differs"),
        *(node.site for node in report.structure if node.findings),
        *(name for culprit in (report.bisect.culprits if report.bisect is not None else ()) for name in culprit.sites),
    ]
    return names[0] if names else None
