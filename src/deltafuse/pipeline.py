"""The one way through: scan, find, prove, plan, prove what is emitted, splice and pin, record, write."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from deltafuse import classes, edits, files, outcome, patterns, record, splice, targets
from deltafuse.adjusting import Adjustments, adjust
from deltafuse.background import Task
from deltafuse.emitted import prove_emitted
from deltafuse.expression_match import ExpressionPlan
from deltafuse.expression_plans import extract_expressions, plan_expressions
from deltafuse.expression_sites import ExpressionSites, find_expressions
from deltafuse.expressions import Expression
from deltafuse.extract import extract_sites
from deltafuse.finder import Candidate, Finder
from deltafuse.match import FuseReport, Match, Plan, SiteReport
from deltafuse.notes import Notes
from deltafuse.options import FuseOptions, Progress
from deltafuse.ordering import in_order
from deltafuse.planning import check_names, pinned_tokens, plan_site
from deltafuse.probe import Worker
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.sites import Site, prove_sites
from deltafuse.targets.base import Target
from deltafuse.trial import Trial
from deltafuse.wire import Model, no_garbage_collection, scan


@dataclass(frozen=True)
class _Found:
    """What is known of a model before anything is changed.

    Attributes:
        file: as it was scanned.
        model: the same in topological order.
        order: number in the file of each node of `model`, None where they are the same.
        trials: what each class of sites was proven with.
        anchors: how many operators of each kind were looked at as a possible start of a rule; empty where none was
            looked for.
        expressions: sites of ordinary expressions.
    """

    file: Model
    model: Model
    order: tuple[int, ...] | None
    shapes: Shapes
    sites: tuple[Site, ...]
    trials: Mapping[bytes, Trial]
    anchors: Mapping[str, int]
    expressions: ExpressionSites


@dataclass(frozen=True)
class _Outline:
    """What some plans do to the rest of the file.

    Attributes:
        stuck: sites that cannot be fused, and the result that would be written twice.
        changes: why the rest of the file cannot follow, where it cannot.
    """

    stuck: Mapping[str, int]
    removed: splice.Removed
    changes: Adjustments | Reason


@dataclass(frozen=True)
class _Draft:
    """What is to be changed in a model."""

    plans: tuple[splice.AnyPlan, ...]
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


@no_garbage_collection()
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
    found, draft, reports = _prepare(options, clock, target)
    report = _report(options, found, draft, reports, clock)
    report = replace(report, notes=(*report.notes, *outcome.unwritten(options, reports)))
    if report.exit:
        report = replace(report, sites=outcome.shown(reports))
    elif options.output is not None and not options.dry_run:
        report = _write(options.output, options, clock, found, draft, report)
    return replace(report, seconds=clock.seconds)


@no_garbage_collection()
def inspect(options: FuseOptions, progress: Progress) -> FuseReport:
    """Finds, proves and plans, and writes nothing but what ``--extract`` asks for."""
    clock = _Clock(progress)
    extracted: tuple[str, ...] = ()
    found, draft, reports = _prepare(options, clock, targets.get(options.target))
    if options.extract is not None:
        extracted = _extract(options.extract, found, draft.plans)
    report = _report(options, found, draft, reports, clock)
    return replace(report, sites=outcome.shown(reports), extracted=extracted, seconds=clock.seconds)


def _extract(folder: Path, found: _Found, plans: tuple[splice.AnyPlan, ...]) -> tuple[str, ...]:
    ordinary = [plan for plan in plans if isinstance(plan, ExpressionPlan)]
    rules = [plan for plan in plans if not isinstance(plan, ExpressionPlan)]
    files = extract_sites(folder, found.model, found.shapes, rules)
    return (*files, *extract_expressions(folder, found.model, found.shapes, ordinary))


def _prepare(options: FuseOptions, clock: _Clock, target: Target) -> tuple[_Found, _Draft, tuple[SiteReport, ...]]:
    """Everything up to the writing, which fuse and inspect share."""
    with Worker(seconds=options.timeout) as worker:
        found = _find(options, clock, worker)
        return found, *_plan(options, clock, worker, found, target)


def _find(options: FuseOptions, clock: _Clock, worker: Worker) -> _Found:
    with clock.stage("scanning"):
        rules = patterns.load(options.patterns, options.rules or None)
        file = scan(options.model)
        model, order = in_order(file)
        kinds = classes.classify(model)
        shapes = Shapes(model)
    sites: list[Site] = []
    trials: dict[bytes, Trial] = {}
    candidates: list[Candidate] = []
    anchors: dict[str, int] = {}
    for family in patterns.families([rule for rule in rules if not isinstance(rule, Expression)]):
        with clock.stage("finding and proving"):
            finder = Finder(model, kinds, shapes, family[0], tuple(candidates))

            def advance(candidate: Candidate) -> None:
                candidates.append(candidate)
                clock.progress.note(candidate.name)

            more, proven = prove_sites(model, kinds, shapes, family, worker, finder, advance)
            if not sites:
                anchors[finder.anchors_are] = finder.anchors_seen()
        sites += outcome.worth_telling(more, family, sites)
        trials.update(proven)
    with clock.stage("finding and proving"):
        ordinary = [rule for rule in rules if isinstance(rule, Expression)]
        matches = [site for site in sites if ordinary and isinstance(site, Match)]
        taken = {node for match in matches for node in splice.between(model.graph, match)}
        expressions = find_expressions(model, kinds, shapes, ordinary, taken, worker, clock.progress)
    return _Found(file, model, order, shapes, tuple(sites), trials, anchors, expressions)


def _plan(
    options: FuseOptions, clock: _Clock, worker: Worker, found: _Found, target: Target
) -> tuple[_Draft, tuple[SiteReport, ...]]:
    """What is to be changed and what becomes of each site; the changes are worked out while the nodes are proven."""
    opset = found.model.opset_imports.get("", 17)
    check_names(options, (site.name for site in (*found.sites, *found.expressions.sites)))
    with clock.stage("planning"):
        planned = [plan_site(options, target, site, opset) for site in found.sites]
        imports = found.model.opset_imports
        ordinary, others = plan_expressions(options, target, found.expressions.sites, worker, imports)
        wanted = (*(plan for plan in planned if isinstance(plan, Plan)), *ordinary)
        with Task(lambda: _outline(options, found, wanted, target)) as outline:
            plans, reports = _prove_plans(options, worker, found, planned)
    return _draft(found, outline.result(), (*plans, *ordinary), (*reports, *others))


def _prove_plans(
    options: FuseOptions, worker: Worker, found: _Found, planned: Sequence[Plan | SiteReport]
) -> tuple[list[Plan], list[SiteReport]]:
    """Proves what is to be written, once for each class of sites and operator."""
    plans: list[Plan] = []
    reports: list[SiteReport] = []
    errors: dict[tuple[bytes, str], float] = {}
    opset = found.model.opset_imports.get("", 17)
    notes_on = Notes(found.model)
    for plan in planned:
        if isinstance(plan, SiteReport):
            reports.append(plan)
            continue
        key = (plan.match.class_key, plan.op)
        if key not in errors:
            trial, tokens = found.trials[plan.match.class_key], pinned_tokens(options, plan.match.dims.tokens)
            errors[key] = prove_emitted(plan, trial, worker, opset, tokens, options.batch)
        match = replace(plan.match, proof=replace(plan.match.proof, emitted_error=errors[key]))
        plans.append(replace(plan, match=match))
        notes = (*match.notes, *plan.notes, *notes_on.of(match))
        reports.append(SiteReport(match.name, "fused", match, plan.op, None, notes, len(match.nodes)))
    return plans, reports


def _outline(options: FuseOptions, found: _Found, plans: Sequence[splice.AnyPlan], target: Target) -> _Outline:
    """What plans, once they are proven, do to the file; a site one of whose results would be written twice is none."""
    graph = found.model.graph
    removed = splice.removed_by(graph, plans)
    stuck = splice.stuck(graph, plans, removed)
    if stuck:
        plans = [plan for plan in plans if plan.match.name not in stuck]
        removed = splice.removed_by(graph, plans)
    if not plans:
        return _Outline(stuck, removed, Adjustments())
    seeds = tuple(seed for plan in plans for seed in plan.pins) if options.pin else ()
    dead = frozenset(node for _, nodes in removed for node in nodes)
    # An ordinary expression is written in the operators that the file has.
    own = any(not isinstance(plan, ExpressionPlan) or plan.target_opset for plan in plans)
    opset = target.opset if own else None
    return _Outline(stuck, removed, adjust(found.model, found.shapes, dead, opset, seeds, dict(options.pins)))


def _draft(
    found: _Found, outline: _Outline, plans: Sequence[splice.AnyPlan], reports: Sequence[SiteReport]
) -> tuple[_Draft, tuple[SiteReport, ...]]:
    """What is to be changed; where the rest of the file cannot follow no site is left, and each report says why."""
    if isinstance(outline.changes, Reason):
        reason = outline.changes
        draft = _Draft((), (), Adjustments())
        return draft, tuple(_refuse(report, reason) for report in _unstuck(found, outline, reports))
    kept = tuple(plan for plan in plans if plan.match.name not in outline.stuck)
    return _Draft(kept, outline.removed, outline.changes), _unstuck(found, outline, reports)


def _unstuck(found: _Found, outline: _Outline, reports: Sequence[SiteReport]) -> tuple[SiteReport, ...]:
    """The reports with a refusal for each site one of whose results would be written twice."""
    names = {site: found.model.graph.name(value) for site, value in outline.stuck.items()}
    reasons = {site: Reason("inner-value-used", {"value": name}) for site, name in names.items()}
    return tuple(_refuse(r, reasons[r.name]) if r.name in reasons else r for r in reports)


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
        notes=outcome.notes(found.file, reports, found.anchors, found.expressions.anchors),
        seconds=clock.seconds,
        exit=outcome.exit_code(options, reports),
    )


def _write(
    output: Path, options: FuseOptions, clock: _Clock, found: _Found, draft: _Draft, report: FuseReport
) -> FuseReport:
    with clock.stage("writing"):
        changes = splice.changes_of(found.model.graph, draft.plans, draft.removed, draft.changes, found.order)
        built = edits.build(found.file, changes)
        receipt = record.publish(found.file, built, output, options.record, progress=clock.progress.advance)
    return replace(report, notes=tuple(dict.fromkeys((*report.notes, *receipt.notes))))
