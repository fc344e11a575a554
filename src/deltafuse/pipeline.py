"""The one way through: scan, find, prove, plan, prove what is emitted, splice and pin, record, write."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from deltafuse import classes, drafting, edits, files, outcome, patterns, record, splice, targets
from deltafuse.background import Task
from deltafuse.drafting import Draft
from deltafuse.emitted import prove_emitted
from deltafuse.expression_match import ExpressionPlan
from deltafuse.expression_plans import extract_expressions, plan_expressions
from deltafuse.expression_sites import ExpressionSites, find_expressions
from deltafuse.expressions import Expression
from deltafuse.extract import extract_sites
from deltafuse.finder import Candidate, Finder
from deltafuse.inlining import Inlined, inlined
from deltafuse.limits import bounded
from deltafuse.match import FuseReport, Match, Plan, SiteReport
from deltafuse.notes import Notes
from deltafuse.options import FuseOptions, Progress
from deltafuse.ordering import in_order
from deltafuse.patterns import Pattern
from deltafuse.planning import check_names, pinned_tokens, plan_site
from deltafuse.probe import Worker
from deltafuse.reasons import Reason
from deltafuse.sanity import checked
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
        base: the same with those calls in place that hold a rule among other nodes.
        model: `base` in topological order.
        order: number in `base` of each node of `model`, None where they are the same.
        kinds: of the values of `model`.
        trials: what each class of sites was proven with.
        anchors: how many operators of each kind were looked at as a possible start of a rule; empty where none was
            looked for.
        expressions: sites of ordinary expressions.
    """

    file: Model
    base: Inlined
    model: Model
    order: tuple[int, ...] | None
    kinds: bytearray
    shapes: Shapes
    sites: tuple[Site, ...]
    trials: Mapping[bytes, Trial]
    anchors: Mapping[str, int]
    expressions: ExpressionSites


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


@bounded
def _prepare(options: FuseOptions, clock: _Clock, target: Target) -> tuple[_Found, Draft, tuple[SiteReport, ...]]:
    """Everything up to the writing, which fuse and inspect share."""
    with Worker(seconds=options.timeout) as worker:
        found = _find(options, clock, worker, target.ordinary)
        return found, *_plan(options, clock, worker, found, target)


def _find(options: FuseOptions, clock: _Clock, worker: Worker, operators: tuple[str, ...]) -> _Found:
    with clock.stage("scanning"):
        rules = patterns.load(options.patterns, options.rules or None, operators)
        file = checked(scan(options.model, allow_outside=options.allow_outside))
    found = _search(file, Inlined(file), rules, clock, worker)
    recurrences = [rule for rule in rules if not isinstance(rule, Expression)]
    while base := inlined(found.base, found.model, found.order, found.kinds, recurrences, found.sites):
        found = _search(file, base, rules, clock, worker)
    return found


def _search(
    file: Model, base: Inlined, rules: Sequence[Pattern | Expression], clock: _Clock, worker: Worker
) -> _Found:
    with clock.stage("scanning"):
        model, order = in_order(base.model)
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
        taken = {node for match in matches for node in splice.between(model.graph, match, kinds)}
        expressions = find_expressions(model, kinds, shapes, ordinary, taken, worker, clock.progress)
    return _Found(file, base, model, order, kinds, shapes, tuple(sites), trials, anchors, expressions)


def _plan(
    options: FuseOptions, clock: _Clock, worker: Worker, found: _Found, target: Target
) -> tuple[Draft, tuple[SiteReport, ...]]:
    """What is to be changed and what becomes of each site; the changes are worked out while the nodes are proven."""
    model, shapes, opset = found.model, found.shapes, found.model.opset_imports.get("", 17)
    check_names(options, (site.name for site in (*found.sites, *found.expressions.sites)))
    with clock.stage("planning"):
        planned = [plan_site(options, target, site, opset) for site in found.sites]
        imports = model.opset_imports
        ordinary, others = plan_expressions(options, target, found.expressions.sites, worker, imports)
        likely = (*(plan for plan in planned if isinstance(plan, Plan)), *ordinary)
        with Task(lambda: drafting.outline(options, model, shapes, likely, target)) as task:
            proven, reports = _prove_plans(options, worker, found, planned)
        plans = (*proven, *ordinary)
        # What was refused after all does nothing to the file.
        whole = len(plans) == len(likely)
        outlined = task.result() if whole else drafting.outline(options, model, shapes, plans, target)
    return drafting.draft(model.graph, outlined, plans, (*reports, *others))


def _prove_plans(
    options: FuseOptions, worker: Worker, found: _Found, planned: Sequence[Plan | SiteReport]
) -> tuple[list[Plan], list[SiteReport]]:
    """Proves what is to be written, once for each class of sites and operator."""
    plans: list[Plan] = []
    reports: list[SiteReport] = []
    errors: dict[tuple[bytes, str], float | Reason] = {}
    opset = found.model.opset_imports.get("", 17)
    notes_on = Notes(found.model)
    for plan in planned:
        if isinstance(plan, SiteReport):
            reports.append(plan)
            continue
        match, key = plan.match, (plan.match.class_key, plan.op)
        if key not in errors:
            trial, tokens = found.trials[match.class_key], pinned_tokens(options, match.dims.tokens)
            errors[key] = prove_emitted(plan, trial, worker, opset, tokens, options.batch)
        error = errors[key]
        if isinstance(error, Reason):
            reports.append(SiteReport(match.name, "refused", match, None, error, (), len(match.nodes)))
            continue
        match = replace(match, proof=replace(match.proof, emitted_error=error))
        plans.append(replace(plan, match=match))
        notes = (*match.notes, *plan.notes, *notes_on.of(match, plan.pins))
        reports.append(SiteReport(match.name, "fused", match, plan.op, None, notes, len(match.nodes)))
    return plans, reports


def _report(
    options: FuseOptions,
    found: _Found,
    draft: Draft,
    reports: tuple[SiteReport, ...],
    clock: _Clock,
) -> FuseReport:
    gone = sum(len(nodes) for _, nodes in draft.removed)
    after = len(found.model.graph.op) - gone + sum(len(plan.nodes) for plan in draft.plans)
    return FuseReport(
        model=str(options.model),
        output=None if options.output is None else str(options.output),
        target=options.target,
        nodes_before=len(found.file.graph.op),
        nodes_after=after,
        sites=reports,
        pinned=() if draft.changes.pins is None else draft.changes.pins.pinned,
        notes=(
            *outcome.notes(found.file, reports, found.anchors, found.expressions.anchors),
            *(outcome.inlined(found.base.names) if draft.plans else ()),
        ),
        seconds=clock.seconds,
        exit=outcome.exit_code(options, reports),
    )


def _write(
    output: Path, options: FuseOptions, clock: _Clock, found: _Found, draft: Draft, report: FuseReport
) -> FuseReport:
    with clock.stage("writing"):
        changes = splice.changes_of(found.model.graph, draft.plans, draft.removed, draft.changes, found.order)
        built = edits.build(found.base.model, changes)
        taken = {plan.match.name: plan.match.nodes for plan in draft.plans}
        built = found.base.composed(built, found.model.graph, taken)
        advance, how = clock.progress.advance, options.external_data
        receipt = record.publish(found.file, built, output, options.record, progress=advance, how=how)
    return replace(report, notes=tuple(dict.fromkeys((*report.notes, *receipt.notes))))
