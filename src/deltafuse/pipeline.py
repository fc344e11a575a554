"""The one way through: scan, find, prove, plan, prove what is emitted, splice and pin, record, write."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from deltafuse import classes, edits, files, patterns, record, splice, targets
from deltafuse.adjusting import Adjustments, adjust
from deltafuse.dims import Dim
from deltafuse.emitted import prove_emitted
from deltafuse.external import data_files, missing_notes
from deltafuse.extract import extract_sites
from deltafuse.finder import Finder
from deltafuse.fused import fused_nodes
from deltafuse.graph import Graph
from deltafuse.match import FuseReport, Match, NoMatch, Plan, SiteReport
from deltafuse.notes import Notes
from deltafuse.options import FuseOptions, Progress
from deltafuse.ordering import in_order
from deltafuse.probe import Worker
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.sites import Site, prove_sites
from deltafuse.targets.base import Target, TargetOptions
from deltafuse.trial import Trial
from deltafuse.wire import Model, scan

TEXTS.update(
    {
        "already-fused": "the model holds {count} fused nodes already; undo them with fuse rollback",
        "batch-one-only": "the site is right for a batch of one only and this target leaves the batch free; "
        "export the model with batch 1",
        "left-out": "the site is the rule and was left out by {option}",
    }
)


@dataclass(frozen=True)
class _Found:
    """What is known of a model before anything is changed.

    Attributes:
        file: as it was scanned.
        model: the same in topological order.
        order: number in the file of each node of `model`, None where they are the same.
        trials: what each class of sites was proven with.
        anchors: operators that were looked at as a possible start of a rule.
    """

    file: Model
    model: Model
    order: tuple[int, ...] | None
    shapes: Shapes
    sites: tuple[Site, ...]
    trials: Mapping[bytes, Trial]
    anchors: int


@dataclass(frozen=True)
class _Draft:
    """What is to be changed in a model."""

    plans: tuple[Plan, ...]
    removed: splice.Removed
    changes: Adjustments


class _Clock:
    """Seconds by stage, and the stage shown to the user."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        self.progress.start(name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - begin, 3)


def fuse(options: FuseOptions, progress: Progress) -> FuseReport:
    """Fuses a model; see `FuseOptions`. Nothing is written unless the report's exit is 0.

    Raises:
        UserError: the file, an option or the output cannot be used as they are.
        InternalError: emitted nodes are not equal to what they replace.
    """
    clock = _Clock(progress)
    target = targets.get(options.target)
    if options.output is not None and not options.dry_run:
        files.check_output(options.output, [options.model])
    with Worker(seconds=options.timeout) as worker:
        found = _find(options, clock, worker)
        plans, reports = _plan(options, clock, worker, found, target)
    draft, reports = _draft(options, clock, found, plans, reports, target)
    report = _report(options, found, draft, reports, clock)
    if report.exit == 0 and options.output is not None and not options.dry_run:
        report = _write(options.output, options, clock, found, draft, report)
    return replace(report, seconds=clock.seconds)


def inspect(options: FuseOptions, progress: Progress) -> FuseReport:
    """Finds, proves and plans, and writes nothing but what ``--extract`` asks for."""
    clock = _Clock(progress)
    target = targets.get(options.target)
    extracted: tuple[str, ...] = ()
    with Worker(seconds=options.timeout) as worker:
        found = _find(options, clock, worker)
        plans, reports = _plan(options, clock, worker, found, target)
    draft, reports = _draft(options, clock, found, plans, reports, target)
    if options.extract is not None:
        extracted = extract_sites(options.extract, found.model, found.shapes, draft.plans)
    report = _report(options, found, draft, reports, clock)
    shown = tuple(replace(site, status="match") if site.status == "fused" else site for site in reports)
    return replace(report, sites=shown, extracted=extracted, seconds=clock.seconds)


def _find(options: FuseOptions, clock: _Clock, worker: Worker) -> _Found:
    with clock.stage("scanning"):
        rules = patterns.load(options.patterns, options.rules or None)
        file = scan(options.model)
        model, order = in_order(file)
        kinds = classes.classify(model)
        shapes = Shapes(model)
    sites: list[Site] = []
    trials: dict[bytes, Trial] = {}
    anchors = 0
    for rule in rules:
        with clock.stage("finding and proving"):
            finder = Finder(model, kinds, shapes, rule)
            anchors += finder.anchors_seen()
            more, proven = prove_sites(model, kinds, shapes, rule, worker, finder.find(), clock.progress.note)
        sites += more
        trials.update(proven)
    return _Found(file, model, order, shapes, tuple(sites), trials, anchors)


def _plan(
    options: FuseOptions, clock: _Clock, worker: Worker, found: _Found, target: Target
) -> tuple[tuple[Plan, ...], tuple[SiteReport, ...]]:
    plans: list[Plan] = []
    reports: list[SiteReport] = []
    errors: dict[tuple[bytes, str], float] = {}
    opset = found.model.opset_imports.get("", 17)
    notes_on = Notes(found.model)
    with clock.stage("planning"):
        for site in found.sites:
            planned = _plan_site(options, target, site, opset)
            if isinstance(planned, SiteReport):
                reports.append(planned)
                continue
            key = (planned.match.class_key, planned.op)
            if key not in errors:
                errors[key] = prove_emitted(planned, found.trials[planned.match.class_key], worker, opset)
            match = replace(planned.match, proof=replace(planned.match.proof, emitted_error=errors[key]))
            plans.append(replace(planned, match=match))
            notes = (*match.notes, *planned.notes, *notes_on.of(match))
            reports.append(SiteReport(match.name, "fused", match, planned.op, None, notes, len(match.nodes)))
    return tuple(plans), tuple(reports)


def _plan_site(options: FuseOptions, target: Target, site: Site, opset: int) -> Plan | SiteReport:
    """The plan of one site, or the report of why there is none."""
    if isinstance(site, NoMatch):
        return SiteReport(
            site.name, "near-miss" if site.near_miss else "refused", None, None, site.reason, (), site.nodes
        )
    option = _left_out(options, site)
    if option:
        return SiteReport(
            site.name, "match", site, None, Reason("left-out", {"option": option}), site.notes, len(site.nodes)
        )
    literal = _literal(options, site.dims.tokens)
    chosen = (options.op, options.allow_bf16_to_fp16, options.pin, literal, options.boundary, options.signature)
    plan = target.plan(site, TargetOptions(*chosen, opset))
    if site.one_sequence and isinstance(plan, Plan) and not plan.pins:
        plan = Reason("batch-one-only")
    if isinstance(plan, Reason):
        return SiteReport(site.name, "refused", site, None, plan, site.notes, len(site.nodes))
    return plan


def _left_out(options: FuseOptions, match: Match) -> str:
    """The option that leaves a site out, "" where none does."""
    if options.form is not None and match.form != options.form:
        return "--form"
    if options.sites and not any(fnmatchcase(match.name, glob) for glob in options.sites):
        return "--sites"
    if any(fnmatchcase(match.name, glob) for glob in options.skip_sites):
        return "--skip-sites"
    return ""


def _literal(options: FuseOptions, tokens: Dim) -> int | None:
    """The token count that the user pins, None where it stays free."""
    return None if isinstance(tokens, int) else dict(options.pins).get(str(tokens))


def _draft(
    options: FuseOptions,
    clock: _Clock,
    found: _Found,
    plans: tuple[Plan, ...],
    reports: tuple[SiteReport, ...],
    target: Target,
) -> tuple[_Draft, tuple[SiteReport, ...]]:
    """What is to be changed; where the rest of the file cannot follow no site is left, and each report says why."""
    with clock.stage("pinning"):
        graph = found.model.graph
        removed = splice.removed_by(graph, plans)
        stuck = splice.stuck(graph, plans, removed)
        if stuck:
            plans, reports = _unstick(graph, plans, reports, stuck)
            removed = splice.removed_by(graph, plans)
        if not plans:
            return _Draft(plans, removed, Adjustments()), reports
        seeds = tuple(seed for plan in plans for seed in plan.pins) if options.pin else ()
        dead = frozenset(node for _, nodes in removed for node in nodes)
        changes = adjust(found.model, found.shapes, dead, target.opset, seeds, dict(options.pins))
    if isinstance(changes, Reason):
        return _Draft((), (), Adjustments()), tuple(_refuse(report, changes) for report in reports)
    return _Draft(plans, removed, changes), reports


def _unstick(
    graph: Graph, plans: tuple[Plan, ...], reports: tuple[SiteReport, ...], stuck: Mapping[str, int]
) -> tuple[tuple[Plan, ...], tuple[SiteReport, ...]]:
    """Refuses sites whose results would be written twice."""
    reasons = {site: Reason("inner-value-used", {"value": graph.name(value)}) for site, value in stuck.items()}
    kept = tuple(plan for plan in plans if plan.match.name not in stuck)
    return kept, tuple(_refuse(r, reasons[r.name]) if r.name in reasons else r for r in reports)


def _refuse(report: SiteReport, reason: Reason) -> SiteReport:
    return replace(report, status="refused", op=None, reason=reason) if report.status == "fused" else report


def _report(
    options: FuseOptions,
    found: _Found,
    draft: _Draft,
    reports: tuple[SiteReport, ...],
    clock: _Clock,
) -> FuseReport:
    before = len(found.model.graph.op)
    gone = sum(len(nodes) for _, nodes in draft.removed)
    after = before - gone + sum(len(plan.nodes) for plan in draft.plans)
    return FuseReport(
        model=str(options.model),
        output=None if options.output is None else str(options.output),
        target=options.target,
        nodes_before=before,
        nodes_after=after,
        sites=reports,
        pinned=() if draft.changes.pins is None else draft.changes.pins.pinned,
        notes=(*_notes(found, reports), *_missing_data(found.file)),
        seconds=clock.seconds,
        exit=_exit(options, reports),
    )


def _notes(found: _Found, reports: Sequence[SiteReport]) -> tuple[str, ...]:
    if reports:
        return ()
    graph = found.model.graph
    fused = len(fused_nodes(graph, range(len(graph.op))))
    if fused:
        return (f"already-fused: {Reason('already-fused', {'count': fused}).text}",)
    return (f"no site: {found.anchors} exponentials of data were looked at, none is the decay of a rule",)


def _missing_data(model: Model) -> tuple[str, ...]:
    return missing_notes({name: 0 if path.is_file() else None for name, path in data_files(model).items()})


def _exit(options: FuseOptions, reports: Sequence[SiteReport]) -> int:
    statuses = {report.status for report in reports}
    if not statuses & {"fused", "refused"}:
        return 3
    blocked = bool(statuses & {"refused", "near-miss"}) or (options.strict and any(report.notes for report in reports))
    return 4 if "fused" not in statuses or (blocked and not options.keep_going) else 0


def _write(
    output: Path, options: FuseOptions, clock: _Clock, found: _Found, draft: _Draft, report: FuseReport
) -> FuseReport:
    with clock.stage("writing"):
        changes = splice.changes_of(found.model.graph, draft.plans, draft.removed, draft.changes, found.order)
        built = edits.build(found.file, changes)
        receipt = record.publish(found.file, built, output, options.record, progress=clock.progress.advance)
    return replace(report, notes=tuple(dict.fromkeys((*report.notes, *receipt.notes))))
