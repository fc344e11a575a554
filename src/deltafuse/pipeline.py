"""The one way through: scan, find, prove, plan, prove what is emitted, splice and pin, record, write."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from deltafuse import drafting, files, outcome, patterns, plan_file, record
from deltafuse.background import Task
from deltafuse.children import Early
from deltafuse.choosing import Chosen, of_options
from deltafuse.clock import Clock
from deltafuse.drafting import Draft
from deltafuse.emitted import prove_emitted, without_names
from deltafuse.evidence import Evidence
from deltafuse.expression_match import ExpressionPlan
from deltafuse.expression_plans import extract_expressions, plan_expressions
from deltafuse.extract import extract_sites
from deltafuse.first_nodes import Elsewhere
from deltafuse.forecast import Forecast
from deltafuse.found import Found, find
from deltafuse.fused_sites import with_held
from deltafuse.limits import bounded, no_garbage_collection
from deltafuse.match import FuseReport, Plan, SiteReport
from deltafuse.next_steps import inspection
from deltafuse.notes import Notes
from deltafuse.operator_counts import emitted_of, operators_of
from deltafuse.options import FuseOptions, Progress
from deltafuse.planning import check_names, pinned_tokens, plan_site
from deltafuse.probe import Worker
from deltafuse.reasons import Reason
from deltafuse.searching import Searched
from deltafuse.splice import adapted_nodes
from deltafuse.user_code import blamed
from deltafuse.wording import PAGE

#: The sites of a graph as they are planned, None behind the last.
_Planned = SimpleQueue[Plan | SiteReport | None]


@no_garbage_collection()
def fuse(options: FuseOptions, progress: Progress, early: Early | None = None) -> FuseReport:
    """Fuses a model; see `FuseOptions`. Nothing is written unless the report's exit is 0.

    What a command began before is used.

    Raises:
        UserError: the file, an option or the output cannot be used as they are.
        InternalError: emitted nodes are not equal to what they replace.
    """
    clock = Clock(progress)
    for file in ((options.plan,) if options.dry_run else (options.output,)):
        if file is not None:
            files.check_output(file, [options.model])
    _check_page(options)
    chosen = plan_file.chosen_by(options)
    options = chosen.options
    forecast = Forecast(chosen)
    found, draft, reports = _prepare(options, clock, forecast, early)
    report = _report(chosen, found, draft, reports, clock)
    report = replace(report, notes=(*report.notes, *outcome.unwritten(options, reports)))
    if options.plan is not None and options.dry_run:
        said = "no plan was written: there is nothing to fuse"
        if report.exit in (0, 4):
            plan_file.write_plan(options, reports)
            apply = f"fuse {options.model} --plan {options.plan} -o OUT"
            said = f"the plan is {options.plan}; edit it and do it with `{apply}`"
        report = replace(report, notes=(*report.notes, said))
    if report.exit:
        report = replace(report, sites=outcome.shown(reports))
    elif options.output is not None and not options.dry_run:
        report = _write(options.output, forecast, clock, found, draft, report)
    return _show(options, clock, found, draft, replace(report, seconds=clock.seconds))


@no_garbage_collection()
def inspect(options: FuseOptions, progress: Progress, early: Early | None = None) -> FuseReport:
    """Finds, proves and plans, and writes nothing but what ``--extract`` and ``--html`` ask for.

    What a command began before is used.
    """
    clock = Clock(progress)
    _check_page(options)
    chosen = of_options(options)
    forecast = Forecast(chosen)
    found, draft, reports = _prepare(options, clock, forecast, early)
    extracted = () if options.extract is None else _extract(options.extract, found, draft)
    report = _report(chosen, found, draft, reports, clock)
    report = replace(report, sites=outcome.shown(reports), extracted=extracted, seconds=clock.seconds)
    return _show(options, clock, found, draft, with_held(report, found.file))


def _check_page(options: FuseOptions) -> None:
    """Raises before anything is done where the page cannot be written."""
    if options.html is not None:
        files.check_output(options.html, [options.model, *([options.output] if options.output else [])])


def _show(options: FuseOptions, clock: Clock, found: Found, draft: Draft, report: FuseReport) -> FuseReport:
    """Writes the page where one is asked for; what it draws is of the main graph."""
    if options.html is None:
        return report
    from deltafuse.html_fuse import write_page

    with clock.stage("drawing the page"):
        main, scope = found.main, found.main.scope
        evidence = Evidence(found.file, scope.model, scope.kinds, scope.shapes, main.candidates, draft.parts[0])
        output = None if report.exit or options.dry_run else report.output
        write_page(options.html, replace(report, output=output), evidence, patterns.formulas(options.patterns))
    return replace(report, notes=(*report.notes, f"{PAGE} {options.html}"))


def _extract(folder: Path, found: Found, draft: Draft) -> tuple[str, ...]:
    files: list[str] = []
    for searched, part in zip(found.graphs, draft.parts, strict=True):
        scope = searched.scope
        model, shapes = scope.model, scope.shapes
        ordinary = [plan for plan in part.plans if isinstance(plan, ExpressionPlan)]
        rules = [plan for plan in part.plans if not isinstance(plan, ExpressionPlan)]
        files += extract_sites(folder, model, scope.kinds, shapes, rules)
        files += extract_expressions(folder, model, scope.kinds, shapes, ordinary)
    return tuple(files)


@blamed()
@bounded
def _prepare(
    options: FuseOptions, clock: Clock, forecast: Forecast, early: Early | None
) -> tuple[Found, Draft, tuple[SiteReport, ...]]:
    """Everything up to the writing, which fuse and inspect share."""
    child, idle = (None, None) if early is None else (early.child, early.idle)
    with Worker(seconds=options.timeout, compares=True, child=child, idle=idle) as worker:
        found = find(clock, worker, forecast, ahead=None if early is None else Elsewhere(worker))
        draft, reports = _plan(clock, worker, forecast, found)
        fused = {plan.match.name for plan in draft.plans}
        left = [name for name in found.base.gathered if name not in fused]
        if early is not None:
            early.kept.append(found)
        if not left:
            return found, draft, reports
        # What is not fused stays as the file has it, and is told with what was found of it.
        told = {report.name: replace(report, match=None) for report in reports if report.name in left}
        found = find(clock, worker, forecast, left)
        draft, reports = _plan(clock, worker, forecast, found)
        return found, draft, tuple(told.get(report.name, report) for report in reports)


def _plan(clock: Clock, worker: Worker, forecast: Forecast, found: Found) -> tuple[Draft, tuple[SiteReport, ...]]:
    """What is to be changed and what becomes of each site; the changes are worked out while the nodes are proven."""
    chosen, graphs = forecast.chosen, found.graphs
    opset, imports = found.base.model.opset_imports.get("", 17), found.base.model.opset_imports
    names = [name for searched in graphs for name in searched.names]
    plan_file.check_sites(chosen, names)
    check_names(chosen.options, names)
    with clock.stage("planning"):
        expressions = [plan_expressions(chosen, one.expressions.sites, worker, imports) for one in graphs]
        chosen.check([plan for ordinary, _ in expressions for plan in ordinary])
        scopes, planned = found.scopes, [_Planned() for _ in graphs]
        proofs = zip(graphs, planned, strict=True)
        with Task(lambda: [_prove_plans(chosen, worker, one, iter(plans.get, None)) for one, plans in proofs]) as task:
            try:
                likely = [_plan_sites(chosen, one, plans, opset) for one, plans in zip(graphs, planned, strict=True)]
            finally:
                # Nobody waits for more.
                for plans in planned:
                    plans.put(None)
            every = [(*plans, *ordinary) for plans, (ordinary, _) in zip(likely, expressions, strict=True)]
            forecast.draw_up(found.file, found.base.model, scopes, found.order, every)
        proven = task.result()
        plans = [(*first, *ordinary) for (first, _), (ordinary, _) in zip(proven, expressions, strict=True)]
        # What was refused after all does nothing to the file.
        outlined = forecast.outline(scopes, plans)
    told = zip(graphs, proven, expressions, strict=True)
    reports = [report for one, (_, first), (_, others) in told for report in one.told((*first, *others))]
    return drafting.draft(chosen, scopes, outlined, plans, reports)


def _plan_sites(chosen: Chosen, searched: Searched, planned: _Planned, opset: int) -> list[Plan]:
    """Plans the sites of a graph; each can be proven while the next ones are planned."""
    plans: list[Plan] = []
    for site in searched.sites:
        plan = plan_site(chosen.options_of(site.name), chosen.target_of(site.name), site, opset)
        plans += [plan] if isinstance(plan, Plan) else []
        planned.put(plan)
    return plans


def _prove_plans(
    chosen: Chosen, worker: Worker, searched: Searched, planned: Iterable[Plan | SiteReport]
) -> tuple[list[Plan], list[SiteReport]]:
    """Proves what is to be written, once for each class of sites and the nodes that are emitted for it."""
    plans: list[Plan] = []
    reports: list[SiteReport] = []
    errors = dict[tuple[bytes, str, Hashable], float | Reason]()
    options, opset = chosen.options, searched.scope.model.opset_imports.get("", 17)
    notes_on = Notes(searched.scope.model)
    for plan in planned:
        if isinstance(plan, SiteReport):
            reports.append(plan)
            continue
        match, target = plan.match, chosen.target_of(plan.match.name)
        key = (match.class_key, f"{target.name} {target.file}", without_names(plan))
        if key not in errors:
            trial, tokens = searched.trials[match.class_key], pinned_tokens(options, match.dims.tokens)
            errors[key] = prove_emitted(plan, trial, worker, opset, tokens, options.batch, target.file)
        error = errors[key]
        if isinstance(error, Reason):
            reports.append(SiteReport(match.name, "refused", match, None, error))
            continue
        match = replace(match, proof=replace(match.proof, emitted_error=error))
        plans.append(replace(plan, match=match))
        notes = (*match.notes, *plan.notes, *notes_on.of(match, plan.pins))
        told = emitted_of(plan.nodes)
        reports.append(SiteReport(match.name, "fused", match, plan.op, None, notes, emitted=told))
    return plans, reports


def _report(chosen: Chosen, found: Found, draft: Draft, reports: tuple[SiteReport, ...], clock: Clock) -> FuseReport:
    options = chosen.options
    graphs = [searched.scope.model.graph for searched in found.graphs]
    before = len(found.file.graph.op) + sum(len(graph.op) - graph.outer for graph in graphs[1:])
    gone = sum(len(nodes) for part in draft.parts for _, nodes in part.removed)
    new = sum(len(adapted_nodes(plan, part.changes)) for part in draft.parts for plan in part.plans)
    raised = sum(len(nodes) - 1 for part in draft.parts for _, nodes in part.changes.opsets.replaced)
    restated = outcome.restated(found.base) if draft.plans else ()
    return FuseReport(
        model=str(options.model),
        output=None if options.output is None else str(options.output),
        target=chosen.title,
        nodes_before=before,
        nodes_after=before - len(found.file.graph.op) + len(graphs[0].op) - gone + new + raised,
        sites=reports,
        pinned=() if draft.pins is None else draft.pins.pinned,
        notes=(*chosen.notes, *outcome.notes(found.file, reports, found.main), *restated),
        seconds=clock.seconds,
        exit=outcome.exit_code(options, reports),
        operators=operators_of(found.file, graphs, draft),
        again=inspection(options),
    )


def _write(
    output: Path, forecast: Forecast, clock: Clock, found: Found, draft: Draft, report: FuseReport
) -> FuseReport:
    options = forecast.chosen.options
    with clock.stage("writing"):
        built = forecast.edits(found.base.model, found.scopes, found.order, draft.parts)
        taken = {
            plan.match.name: [searched.scope.model.graph.spans.starts[node] for node in plan.match.nodes]
            for searched, part in zip(found.graphs, draft.parts, strict=True)
            for plan in part.plans
        }
        built = found.base.composed(built, taken)
        undo = None if options.record == "none" else forecast.undo(found.file, built)
        advance, how = clock.progress.advance, options.external_data
        receipt = record.publish(found.file, built, output, options.record, progress=advance, how=how, undo=undo)
    return replace(report, notes=tuple(dict.fromkeys((*report.notes, *receipt.notes))))
