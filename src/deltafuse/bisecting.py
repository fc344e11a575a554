"""``--bisect``: fuses some sites of a whole model at a time, to find those that move an output beyond tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from deltafuse.errors import UserError
from deltafuse.external import data_files
from deltafuse.hybrid import scratch, write_hybrid
from deltafuse.inputs import Inputs
from deltafuse.network_diff import OutputVerdict, compare_outputs
from deltafuse.network_model import runnable
from deltafuse.network_run import run_model, write_inputs
from deltafuse.options import Progress
from deltafuse.reasons import TEXTS, Reason
from deltafuse.verify_bars import Bar
from deltafuse.verify_cut import site_name
from deltafuse.verify_diff import Region
from deltafuse.verify_stage import Stage
from deltafuse.verify_trial import Finding, finding
from deltafuse.wire import Model, scan

__all__ = ["BisectReport", "Culprit", "bisect"]

TEXTS["bisect-does-not-run"] = (
    "the model does not run with only these sites fused: {error}; fuse these sites alone "
    "with --sites and look the file over with fuse lint"
)


@dataclass(frozen=True)
class Culprit:
    """Sites that move an output beyond tolerance, alone or, where it takes several, together.

    Attributes:
        sites: their names.
        output: the first output that is beyond the bar, None where the model does not run.
        nrmse: of that output.
        reason: what is wrong with it.
    """

    sites: tuple[str, ...]
    output: str | None
    nrmse: float | None
    reason: Finding


@dataclass(frozen=True)
class BisectReport:
    """What was found.

    Attributes:
        runs: whole models that were run.
        culprits: none where all sites together keep the bar.
        untried: sites that no run tells about: those inside the bodies of If, Loop and Scan.
    """

    runs: int
    culprits: tuple[Culprit, ...]
    untried: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Broken:
    """What some fused sites do to the outputs."""

    output: str | None
    nrmse: float | None
    reason: Finding


def bisect(
    stage: Stage, inputs: Inputs, close: Bar, seconds: float, memory: int | None, progress: Progress
) -> BisectReport | Reason:
    """Halves the sites until each that breaks an output is found.

    Args:
        stage: both files.
        inputs: to run whole models on.
        close: the bar for outputs.
        seconds: limit of one run.
        memory: address space limit of one run.
        progress: told how many runs there were.

    Returns:
        Why the unfused model does not run.
    """
    with TemporaryDirectory(prefix="deltafuse-") as folder:
        search = _Search(stage, inputs, close, seconds, memory, Path(folder), progress)
        reference = search.reference()
        if isinstance(reference, Reason):
            return reference
        regions = (*stage.regions, *stage.expressions)
        culprits = search.culprits(regions, reference) if regions else []
        return BisectReport(search.runs, tuple(culprits), stage.inside)


class _Search:
    """Runs hybrids; counts the runs."""

    def __init__(
        self, stage: Stage, inputs: Inputs, close: Bar, seconds: float, memory: int | None, folder: Path,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._stage, self._close, self._seconds, self._memory = stage, close, seconds, memory
        self._folder, self._progress = folder, progress
        self._files = write_inputs(inputs.arrays, folder / "inputs")
        self._vocabulary = max((role.rows for role in inputs.roles.values() if role.role == "ids"), default=0)
        self.runs = 0

    def reference(self) -> Mapping[str, Path] | Reason:
        """Outputs of the unfused model."""
        return self._run(self._stage.before.model)

    def culprits(self, regions: Sequence[Region], reference: Mapping[str, Path]) -> list[Culprit]:
        """Those among some regions: each half is tried alone, and both together where neither alone breaks anything."""
        broken = self._broken(regions, reference)
        if broken is None:
            return []
        if len(regions) == 1:
            return [self._named(regions, broken)]
        half = len(regions) // 2
        found = self.culprits(regions[:half], reference) + self.culprits(regions[half:], reference)
        return found or [self._named(regions, broken)]

    def _named(self, regions: Sequence[Region], broken: _Broken) -> Culprit:
        names = tuple(site_name(self._stage.after.graph, region) for region in regions)
        return Culprit(names, broken.output, broken.nrmse, broken.reason)

    def _broken(self, regions: Sequence[Region], reference: Mapping[str, Path]) -> _Broken | None:
        """The first output that these regions break, None where they break none."""
        before = self._stage.before.model
        place = before.path.parent if data_files(before) else self._folder
        with scratch(place, f"{before.path.name}.hybrid") as path:
            try:
                write_hybrid(self._stage.before, self._stage.after, regions, path)
            except UserError as error:
                return _Broken(None, None, Finding(error.code, str(error)))
            outputs = self._run(scan(path))
        if isinstance(outputs, Reason):
            return _Broken(None, None, finding(Reason("bisect-does-not-run", {"error": outputs.what})))
        verdicts = list(compare_outputs(reference, outputs, self._vocabulary, self._close))
        return next((_as_broken(verdict) for verdict in verdicts if verdict.verdict == "differs"), None)

    def _run(self, model: Model) -> Mapping[str, Path] | Reason:
        self.runs += 1
        self._progress.start(f"bisecting, run {self.runs}")
        name, folder = str(self._stage.before.model.path), self._folder / f"run-{self.runs}"
        with runnable(model, self._folder, foreign=self._stage.foreign) as source:
            if isinstance(source, Reason):
                return source
            ran = run_model(source, name, self._files, folder, self._seconds, self._memory)
        return ran if isinstance(ran, Reason) else ran.outputs


def _as_broken(verdict: OutputVerdict) -> _Broken:
    assert verdict.reason is not None, "what differs has a reason"
    return _Broken(verdict.name, verdict.nrmse, verdict.reason)
