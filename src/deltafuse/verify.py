"""``fuse verify``: a fused file against the unfused one, at two levels; the third is in `deltafuse.verify_task`.

The site level runs what each fused site stands for against the nodes it replaced, from the two files alone, without
weights: in double, where both must agree, and once more with the fused side at the target's precision, where the
difference is the target's rounding. The network level runs both whole models on the same inputs. Its bar cannot see a
lost scale, so that it never decides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from deltafuse.ablating import AblationReport
from deltafuse.bisecting import BisectReport
from deltafuse.errors import UserError
from deltafuse.files import check_output
from deltafuse.foreign import Foreign
from deltafuse.inputs import InputOptions
from deltafuse.inputs_file import write_arrays
from deltafuse.minimizing import Reproduction
from deltafuse.options import DEFAULT_TIMEOUT, Level, Progress, SilentProgress
from deltafuse.ordering import in_order
from deltafuse.probe import Worker
from deltafuse.reasons import TEXTS, Reason
from deltafuse.rollout import TaskReport
from deltafuse.structure import SiteStructure, check_structure
from deltafuse.targets.runtime import runtime_notes
from deltafuse.verify_bars import Bar, Overrides, bar_of
from deltafuse.verify_bodies import Compared, compare_graphs, nothing_fused, swapped
from deltafuse.verify_cut import Pair, cut_expression, cut_pair, site_name
from deltafuse.verify_expression import judge_expression
from deltafuse.verify_network import NetworkReport, Networks, obstacle, run_networks
from deltafuse.verify_origin import UNRELATED, foreign_record, record_notes, recorded, unrelated
from deltafuse.verify_stage import Stage
from deltafuse.verify_trial import Finding, Rounding, SiteVerdict, finding, judge
from deltafuse.wire import scan

__all__ = ["Checked", "Finding", "NetworkReport", "Rounding", "SiteVerdict", "VerifyReport", "check", "verify"]

#: Why whole models cannot be compared here, whatever they are fed with: the site level is then all there is.
OBSTACLES = frozenset({
    "network-data-missing", "network-data-outside", "network-data-short", "network-foreign-operator",
    "network-operator-missing", "network-silent",
})  # fmt: skip


@dataclass(frozen=True)
class VerifyReport:
    """Verdicts of all fused sites, what else differs between the files, and how the whole models compare.

    Attributes:
        unfused, fused: the files; None where there are two graphs, each with a report of its own.
        network: None where the network level was not run.
        skipped: why it, or the task level, was not, where it was asked for.
        bar: what was asked for at the target's precision; None where there are two graphs.
        notes: what the installed onnxruntime could not show.
        prefill, decode: reports of the two graphs of a pair.
        task: None where the task level was not run.
        structure: each fused node: its attributes, the way of each operand, and what is wrong with them.
        bisect: which sites move an output; None where that was not asked for.
        ablations: decisions of the sites that were asked for, undone one by one.
        reproduction: what was written of the first site to blame; None where that was not asked for.
    """

    unfused: str | None
    fused: str | None
    sites: tuple[SiteVerdict, ...]
    findings: tuple[Finding, ...]
    exit: int
    network: NetworkReport | None = None
    skipped: Finding | None = None
    notes: tuple[str, ...] = ()
    prefill: VerifyReport | None = None
    decode: VerifyReport | None = None
    task: TaskReport | None = None
    structure: tuple[SiteStructure, ...] = ()
    bisect: BisectReport | None = None
    ablations: tuple[AblationReport, ...] = ()
    reproduction: Reproduction | None = None
    bar: Bar | None = None

    @property
    def unrelated(self) -> Finding | None:
        """What says that the one file was not made from the other; the first finding where there is one."""
        return next((found for found in self.findings[:1] if found.code == UNRELATED), None)

    @property
    def differs(self) -> bool:
        """Whether anything that was looked at is not as it should be."""
        parts = [part for part in (self.network, self.task) if part is not None]
        return (
            bool(self.findings)
            or any(site.verdict == "differs" for site in self.sites)
            or any(node.findings for node in self.structure)
            or any(part.verdict == "differs" for part in parts)
        )

TEXTS["network-axes"] = (
    "whole models are run at the sizes that {fused} declares, which is edited: {axis}. So they do not run ({error}); "
    "undo the edit, or take --level site"
)
_NO_SITE = "{fused} has no fused site: give what fuse wrote, and not what was made of that since (by fuse lower, say)"


@dataclass(frozen=True)
class Settings:
    """How to compare.

    Attributes:
        level: ``site`` needs no weights; ``network`` runs both whole models too; ``all`` does so where that is
            possible (weights are there, onnxruntime has every operator) and says where it is not.
        inputs: what to feed whole models with; sizes are solved and values drawn where nothing is said.
        seconds: limit of one run.
        memory: address space limit in bytes of a whole model's run; None for none.
        bars: what the user sets in place of the table in `deltafuse.verify_tolerances`.
        progress: told about stages.
        foreign: what lowers Custom nodes of other tools.
        allow_outside: take data that lies outside of a model's folder.
    """

    level: Level = "all"
    inputs: InputOptions = field(default_factory=InputOptions)
    seconds: float = DEFAULT_TIMEOUT
    memory: int | None = None
    bars: Overrides = field(default_factory=Overrides)
    progress: Progress = field(default_factory=SilentProgress)
    foreign: Foreign | None = None
    allow_outside: bool = False


@dataclass(frozen=True)
class Checked:
    """One graph's report, and what further levels need of it."""

    report: VerifyReport
    stage: Stage


def verify(
    unfused: Path,
    fused: Path,
    *,
    level: Level = "all",
    inputs: InputOptions | None = None,
    seconds: float = DEFAULT_TIMEOUT,
    memory: int | None = None,
    bars: Overrides | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compares a fused file with the unfused one.

    Args:
        unfused: the model as exported.
        fused: what was made of it; pinned axes may differ.
        level: see `Settings`, as for what follows.
        inputs: what to feed whole models with.
        seconds: limit of one run.
        memory: address space limit of a whole model's run.
        bars: what the user sets in place of the table.
        progress: told about stages.

    Returns:
        Exit 0 where every site is equal, nothing else differs and the network level, if run, meets its bar; else 5.

    Raises:
        UserError: a file or a constant beside it cannot be read, the second file has no fused site that the first
            lacks, the inputs do not fit, or a whole model cannot be run although nothing is missing.
    """
    if level == "task":
        raise UserError("usage", "--level task needs the graphs by name: --prefill U F --decode U F")
    settings = Settings(
        level, inputs or InputOptions(), seconds, memory, bars or Overrides(), progress or SilentProgress()
    )
    return check(unfused, fused, settings).report


def check(unfused: Path, fused: Path, settings: Settings) -> Checked:
    """Compares the files of one graph; see `verify`."""
    _check_options(settings.level, settings.inputs, (unfused, fused))
    settings.progress.start("comparing")
    before, after = (in_order(scan(path, allow_outside=settings.allow_outside))[0] for path in (unfused, fused))
    graphs = compare_graphs(before, after)
    if swapped(graphs):
        text = f"{unfused} holds fused nodes and {fused} none; give the unfused model first, then what fuse wrote of it"
        raise UserError("swapped-files", text)
    if nothing_fused(graphs):
        text = f"{fused} has no fused site that {unfused} lacks; give the unfused model first, then the fused"
        raise UserError("nothing-fused", text)
    main, bars = graphs[0], [bar_of(one.after.shapes, settings.bars) for one in graphs]
    close = max(bars, key=lambda bar: bar.nrmse)
    with Worker(settings.seconds) as worker:
        judged = [_sites(one, bar, settings, worker) for one, bar in zip(graphs, bars, strict=True)]
    # The levels beyond sites know the main graph.
    given = dict(pair for one, (_, pairs) in zip(graphs, judged, strict=True) for pair in one.given(pairs).items())
    own, known = judged[0], main.difference
    inside = tuple(site.name for some, _ in judged[1:] for site in some)
    stage = Stage(main.before, main.after, own[1], own[0], known.regions, settings.foreign, given,
                  known.expressions, inside)  # fmt: skip
    sites = tuple(site for some, _ in judged for site in some)
    record = recorded(after)
    origin = unrelated(before, after, known, record)
    first = foreign_record(before, after, record) if origin is None else origin
    reasons = (*([] if first is None else [first]), *(reason for one in graphs for reason in one.difference.findings))
    structure = tuple(node for one in graphs for node in check_structure(one.after, one.difference.written))
    notes = dict.fromkeys(record_notes(record))
    notes |= dict.fromkeys(note for one in graphs for note in runtime_notes(one.after.graph))
    if not sites:
        notes[_NO_SITE.format(fused=fused)] = None
    names = str(before.path), str(after.path)
    report = VerifyReport(*names, sites, tuple(map(finding, reasons)), 0, notes=tuple(notes), structure=structure)
    whole = settings.level in ("network", "all")
    network = origin if origin is not None or not whole else _blamed(report, _network(stage, close, settings))
    if isinstance(network, NetworkReport):
        report = replace(report, network=network)
    elif network is not None:
        if not report.differs and not (settings.level == "all" and network.code in OBSTACLES):
            raise UserError(network.code, network.text)
        report = replace(report, skipped=finding(network))
    return Checked(replace(report, exit=5 if report.differs else 0, bar=close), stage)


def _blamed(report: VerifyReport, network: NetworkReport | Reason) -> NetworkReport | Reason:
    """Puts the blame on the fused file where the unfused one does not run on sizes that no fuse wrote there."""
    axes = [found.text for found in report.findings if found.code == "changed-axis"]
    if isinstance(network, NetworkReport) or not axes or network.code not in ("network-does-not-run", "network-sizes"):
        return network
    return Reason("network-axes", {"fused": report.fused, "axis": axes[0].partition(";")[0], "error": network.what})


def _check_options(level: Level, options: InputOptions, files: Sequence[Path]) -> None:
    if level == "site" and (options.path or options.save or options.dims):
        raise UserError("usage", "inputs are for the network level: leave out --level site, or --inputs, --save-inputs "
                        "and --dim")  # fmt: skip
    if level == "task" and options.save:
        raise UserError("usage", "--save-inputs is for the network level: leave out --level task")
    if options.seed < 0:
        raise UserError("usage", f"--seed {options.seed}: give a whole number of 0 or more")
    if options.path is not None and not options.path.is_file():
        raise UserError("inputs-missing", f"{options.path} is no file: check the path given with --inputs")
    if options.save is not None:
        check_output(options.save, [*files, *([options.path] if options.path else [])])


def _sites(
    compared: Compared, close: Bar, settings: Settings, worker: Worker
) -> tuple[tuple[SiteVerdict, ...], tuple[Pair, ...]]:
    """Verdicts of the sites of one graph, and both sides of those that can be cut."""
    before, after, difference = compared.before, compared.after, compared.difference
    known: dict[bytes, SiteVerdict] = {}
    sites: list[SiteVerdict] = []
    pairs: list[Pair] = []
    of = len(difference.regions) + len(difference.expressions)
    settings.progress.start("running sites")
    for region in difference.regions:
        pair = cut_pair(before, after, region)
        sites.append(_verdict(pair, site_name(after.graph, region), worker, known, partial(judge, close=close)))
        pairs += [pair] if isinstance(pair, Pair) else []
        settings.progress.advance(len(sites), of)
    for region in difference.expressions:
        pair = cut_expression(before, after, region)
        sites.append(_verdict(pair, site_name(after.graph, region), worker, known, judge_expression))
        settings.progress.advance(len(sites), of)
    # A node that is equal once copies are seen through needs no run.
    sites += [SiteVerdict(f"copy {copy}", "equal", 0.0, None, 0, ()) for copy in difference.copies]
    return tuple(sites), tuple(pairs)


def _verdict(
    pair: Pair | Reason,
    name: str,
    worker: Worker,
    known: dict[bytes, SiteVerdict],
    judged: Callable[[Pair, Worker], SiteVerdict],
) -> SiteVerdict:
    if isinstance(pair, Reason) and pair.code.startswith("external-data"):
        raise UserError(pair.code, pair.text)
    if isinstance(pair, Reason):
        return SiteVerdict(name, "differs", None, None, 0, (), reason=finding(pair))
    if pair.key in known:
        return replace(known[pair.key], name=pair.name, shared_with=known[pair.key].name)
    known[pair.key] = judged(pair, worker)
    return known[pair.key]


def _network(stage: Stage, close: Bar, settings: Settings) -> NetworkReport | Reason:
    models = stage.before.model, stage.after.model
    reasons = [reason for model in models if (reason := obstacle(model, settings.foreign)) is not None]
    options = settings.inputs
    if reasons and options.save is None:
        return reasons[0]
    inputs = stage.inputs(options)
    if options.save is not None:
        write_arrays(options.save, inputs.arrays)
    if reasons:
        return reasons[0]
    networks = Networks(stage, inputs, close, options.seed, settings.seconds, settings.memory)
    return run_networks(networks, settings.progress)
