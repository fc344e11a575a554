"""``fuse verify``: a fused file against the unfused one, at two levels.

The site level runs what each fused site stands for against the nodes it replaced, from the two files alone, without
weights: in double, where both must agree, and once more with the fused side at the target's precision, where the
difference is the target's rounding. The network level runs both whole models on the same inputs. Its bar cannot see a
lost scale, so that it never decides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deltafuse.dims import Dim
from deltafuse.errors import UserError
from deltafuse.files import check_output
from deltafuse.inputs import InputOptions, Inputs, make_inputs
from deltafuse.inputs_file import write_arrays
from deltafuse.inputs_sizes import SiteSizes
from deltafuse.options import DEFAULT_TIMEOUT, Level, Progress, SilentProgress
from deltafuse.ordering import in_order
from deltafuse.probe import Worker
from deltafuse.reasons import Reason
from deltafuse.targets.runtime import runtime_notes
from deltafuse.verify_cut import Pair, Side, axis_dims, cut_expression, cut_pair, site_name
from deltafuse.verify_diff import Difference, compare
from deltafuse.verify_expression import judge_expression
from deltafuse.verify_feeds import Input
from deltafuse.verify_network import NetworkReport, Networks, obstacle, run_networks
from deltafuse.verify_trial import Finding, Rounding, SiteVerdict, finding, judge
from deltafuse.wire import scan

__all__ = ["Finding", "NetworkReport", "Rounding", "SiteVerdict", "VerifyReport", "verify"]

#: Why whole models cannot be compared here, whatever they are fed with: the site level is then all there is.
OBSTACLES = frozenset({
    "network-data-missing", "network-data-short", "network-foreign-operator", "network-operator-missing",
    "network-silent",
})  # fmt: skip


@dataclass(frozen=True)
class VerifyReport:
    """Verdicts of all fused sites, what else differs between the files, and how the whole models compare.

    Attributes:
        network: None where the network level was not run.
        skipped: why it was not, where it was asked for.
        notes: what the installed onnxruntime could not show.
    """

    unfused: str
    fused: str
    sites: tuple[SiteVerdict, ...]
    findings: tuple[Finding, ...]
    exit: int
    network: NetworkReport | None = None
    skipped: Finding | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Task:
    """One call of `verify`."""

    before: Side
    after: Side
    level: Level
    options: InputOptions
    seconds: float
    memory: int | None
    progress: Progress


def verify(
    unfused: Path,
    fused: Path,
    *,
    level: Level = "all",
    inputs: InputOptions | None = None,
    seconds: float = DEFAULT_TIMEOUT,
    memory: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compares a fused file with the unfused one.

    Args:
        unfused: the model as exported.
        fused: what was made of it; pinned axes may differ.
        level: ``site`` needs no weights; ``network`` runs both whole models too; ``all`` does so where that is
            possible (weights are there, onnxruntime has every operator) and says where it is not.
        inputs: what to feed whole models with; sizes are solved and values drawn where nothing is said.
        seconds: limit of one run.
        memory: address space limit in bytes of a whole model's run; None for none.
        progress: told about stages.

    Returns:
        Exit 0 where every site is equal, nothing else differs and the network level, if run, meets its bar; else 5.

    Raises:
        UserError: a file or a constant beside it cannot be read, the second file has no fused site that the first
            lacks, the inputs do not fit, or a whole model cannot be run although nothing is missing.
    """
    options = InputOptions() if inputs is None else inputs
    _check(level, options, (unfused, fused))
    shown = progress or SilentProgress()
    shown.start("comparing")
    (before, _), (after, _) = in_order(scan(unfused)), in_order(scan(fused))
    difference = compare(before, after)
    if difference == Difference((), ()):
        raise UserError(
            "nothing-fused",
            f"{fused} has no fused site that {unfused} lacks; give the unfused model first, then the fused",
        )
    task = _Task(Side.of(before), Side.of(after), level, options, seconds, memory, shown)
    sites, pairs = _sites(task, difference)
    findings = tuple(finding(reason) for reason in difference.findings)
    failed = bool(findings) or any(site.verdict == "differs" for site in sites)
    network = None if level == "site" else _network(task, pairs, sites)
    if isinstance(network, Reason) and not failed and not (level == "all" and network.code in OBSTACLES):
        raise UserError(network.code, network.text)
    return _report(task, sites, findings, network)


def _report(
    task: _Task, sites: tuple[SiteVerdict, ...], findings: tuple[Finding, ...], network: NetworkReport | Reason | None
) -> VerifyReport:
    skipped = finding(network) if isinstance(network, Reason) else None
    ran = network if isinstance(network, NetworkReport) else None
    failed = bool(findings) or any(site.verdict == "differs" for site in sites)
    failed = failed or (ran is not None and ran.verdict == "differs")
    names = str(task.before.model.path), str(task.after.model.path)
    notes = runtime_notes(task.after.graph)
    return VerifyReport(*names, sites, findings, 5 if failed else 0, ran, skipped, notes)


def _check(level: Level, options: InputOptions, files: Sequence[Path]) -> None:
    if level == "site" and (options.path or options.save or options.dims):
        raise UserError("usage", "inputs are for the network level: leave out --level site, or --inputs, --save-inputs "
                        "and --dim")  # fmt: skip
    if options.seed < 0:
        raise UserError("usage", f"--seed {options.seed}: give a whole number of 0 or more")
    if options.path is not None and not options.path.is_file():
        raise UserError("inputs-missing", f"{options.path} is no file: check the path given with --inputs")
    if options.save is not None:
        check_output(options.save, [*files, *([options.path] if options.path else [])])


def _sites(task: _Task, difference: Difference) -> tuple[tuple[SiteVerdict, ...], tuple[Pair, ...]]:
    """Verdicts of all sites, and both sides of those that can be cut."""
    known: dict[bytes, SiteVerdict] = {}
    sites: list[SiteVerdict] = []
    pairs: list[Pair] = []
    task.progress.start("running sites")
    with Worker(task.seconds) as worker:
        for index, region in enumerate(difference.regions):
            pair = cut_pair(task.before, task.after, region)
            sites.append(_verdict(pair, site_name(task.after.graph, region), worker, known))
            pairs += [pair] if isinstance(pair, Pair) else []
            task.progress.advance(index + 1, len(difference.regions))
        for region in difference.expressions:
            pair = cut_expression(task.before, task.after, region)
            sites.append(_verdict(pair, site_name(task.after.graph, region), worker, known, judge_expression))
    # A node that is equal once copies are seen through needs no run.
    sites += [SiteVerdict(f"copy {copy}", "equal", 0.0, None, 0, ()) for copy in difference.copies]
    return tuple(sites), tuple(pairs)


def _verdict(
    pair: Pair | Reason,
    name: str,
    worker: Worker,
    known: dict[bytes, SiteVerdict],
    judged: Callable[[Pair, Worker], SiteVerdict] = judge,
) -> SiteVerdict:
    if isinstance(pair, Reason) and pair.code.startswith("external-data"):
        raise UserError(pair.code, pair.text)
    if isinstance(pair, Reason):
        return SiteVerdict(name, "differs", None, None, 0, (), reason=finding(pair))
    if pair.key in known:
        return replace(known[pair.key], name=pair.name, shared_with=known[pair.key].name)
    known[pair.key] = judged(pair, worker)
    return known[pair.key]


def _network(task: _Task, pairs: Sequence[Pair], sites: Sequence[SiteVerdict]) -> NetworkReport | Reason:
    models = task.before.model, task.after.model
    reasons = [reason for reason in map(obstacle, models) if reason is not None]
    if reasons and task.options.save is None:
        return reasons[0]
    inputs = _inputs(task, pairs, sites)
    if task.options.save is not None:
        write_arrays(task.options.save, inputs.arrays)
    if reasons:
        return reasons[0]
    return run_networks(Networks(*models, inputs, task.options.seed, task.seconds, task.memory), task.progress)


def _inputs(task: _Task, pairs: Sequence[Pair], sites: Sequence[SiteVerdict]) -> Inputs:
    ran = {site.name: site.tokens for site in sites}
    sizes = [
        SiteSizes(pair.tokens, pair.valid, ran.get(pair.name, ()), tuple(axis_dims(pair, "tokens")), _dims(pair))
        for pair in pairs
    ]
    parts = {item.name: item.part for pair in pairs for item in _operands(pair)}
    return make_inputs(task.after.model, task.after.kinds, sizes, parts, task.options)


def _dims(pair: Pair) -> tuple[Dim, ...]:
    return tuple(dim for item in _operands(pair) for dim in item.shape)


def _operands(pair: Pair) -> list[Input]:
    return [item for item in pair.inputs if item.part.role not in ("shape", "other")]
