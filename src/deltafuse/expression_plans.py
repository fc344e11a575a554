"""Decide for each site of an ordinary expression what becomes of it, and prove what is to be written."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import helper

from deltafuse.choosing import Chosen
from deltafuse.emitted import without_names
from deltafuse.errors import InternalError
from deltafuse.expression_guard import sizes_read
from deltafuse.expression_match import ExpressionMatch, ExpressionPlan
from deltafuse.expression_own import own_expression_file
from deltafuse.expression_prover import prove_emission
from deltafuse.expression_sites import ExpressionSite
from deltafuse.expressions import Expression, Place
from deltafuse.extract import counted
from deltafuse.files import make_folder
from deltafuse.match import SiteReport
from deltafuse.operator_counts import emitted_of
from deltafuse.opset import adapt_all
from deltafuse.options import FuseOptions
from deltafuse.planning import left_out, unchosen
from deltafuse.probe import cut_model
from deltafuse.reasons import TEXTS, Reason
from deltafuse.region import between
from deltafuse.shapes import Shapes
from deltafuse.targets.base import Target
from deltafuse.targets.emit import Emitter, version
from deltafuse.user_code import at_fault
from deltafuse.wire import Model
from deltafuse.worker import Worker

TEXTS["expression-opset"] = (
    "the operator {op} needs opset {least} and the file imports {opset}; export the model with opset {least} or newer"
)

Planned = tuple[tuple[ExpressionPlan, ...], tuple[SiteReport, ...]]


def plan_expressions(
    chosen: Chosen,
    sites: Sequence[ExpressionSite],
    worker: Worker,
    opsets: Mapping[str, int],
) -> Planned:
    """Plans and reports of all sites; what is to be written for a class of equal sites is proven once more."""
    plans: list[ExpressionPlan] = []
    reports: list[SiteReport] = []
    errors: dict[tuple[bytes, str, Hashable], float] = {}
    for site in sites:
        target = chosen.target_of(site.name)
        own = own_expression_file(site.pattern)
        theirs = target.file if site.pattern.operator else None
        with at_fault(own, "pattern", "emit"), at_fault(theirs, "target", "others"):
            planned = _plan(chosen.options, target, site, opsets.get("", 17))
        if isinstance(planned, SiteReport):
            reports.append(planned)
            continue
        key = (planned.match.class_key, target.name, _alike(planned))
        if key not in errors and site.proven is not None:
            with at_fault(own, "pattern", "emit"), at_fault(theirs, "target", "others"):
                errors[key] = prove_emission(site.pattern, planned, site.proven, worker, opsets)
        match = replace(planned.match, proof=replace(planned.match.proof, emitted_error=errors[key]))
        plans.append(replace(planned, match=match, file=own))
        notes = (*match.notes, *planned.notes)
        told = emitted_of(planned.nodes)
        shown = (planned.op, None, notes)
        reports.append(SiteReport(match.name, "fused", match, *shown, rule=match.rule, emitted=told))
    return tuple(plans), tuple(reports)


def _plan(options: FuseOptions, target: Target, site: ExpressionSite, opset: int) -> ExpressionPlan | SiteReport:
    match, rule = site.outcome, site.pattern.name
    if isinstance(match, Reason):
        status = "near-miss" if site.near_miss else "refused"
        return SiteReport(site.name, status, None, None, match, (), site.nodes, rule)
    option = "--form" if options.form is not None else unchosen(options, match.name)
    if option:
        return SiteReport(site.name, "match", match, None, left_out(option), match.notes, rule=rule)
    plan = _emitted(site.pattern, match, target, opset)
    if isinstance(plan, Reason):
        return SiteReport(site.name, "refused", match, None, plan, match.notes, rule=rule)
    return plan


def _alike(plan: ExpressionPlan) -> Hashable:
    """What a plan does to its site, whatever the names."""
    names = [role.name for role in (*plan.match.operands(), *plan.match.results())]
    aliases = tuple((names.index(output), names.index(source)) for output, source in plan.aliases.items())
    return aliases, plan.target_opset, without_names(plan)


def _emitted(pattern: Expression, match: ExpressionMatch, target: Target, opset: int) -> ExpressionPlan | Reason:
    properties = {"deltafuse.site": match.name, "deltafuse.rule": match.rule, "deltafuse.version": version()}
    emitter = Emitter(f"{match.name}/{match.rule}", properties)
    domain = target.domain_of(pattern.operator) if pattern.operator else None
    own = target.name, target.opset, domain, target.boundaries
    place = Place(match.roles, match.outputs, match.parameters, opset, *own)
    emission = pattern.emit(place, emitter)
    if isinstance(emission, Reason):
        return emission
    nodes = emitter.finish()
    aliases = {match.outputs[output].name: match.roles[role].name for output, role in emission.aliases.items()}
    written = [name for node in nodes for name in node.output]
    wanted = [role.name for role in match.results() if role.name not in aliases]
    if any(written.count(name) != 1 for name in wanted) or not aliases.keys().isdisjoint(written):
        raise InternalError(f"the nodes emitted for {match.name} do not write each of {wanted} once")
    needed = target.opset if emission.target_opset else None
    return ExpressionPlan(match, emission.op, nodes, emission.value_info, aliases, needed, emission.notes)


def extract_expressions(
    folder: Path, model: Model, kinds: bytearray, shapes: Shapes, plans: Sequence[ExpressionPlan]
) -> tuple[str, ...]:
    """Writes each planned site as stand-alone models, before and after, for viewers and onnxruntime.

    ``NAME.after.onnx`` is not written where nothing stands in the site's place.
    """
    files: list[str] = []
    for plan in plans:
        make_folder(folder)
        match = plan.match
        roles, results = ([role.value for role in some] for some in (match.operands(), match.results()))
        cut = cut_model(model, shapes, (*roles, *sizes_read(model.graph, shapes, roles, results)), results)
        if isinstance(cut, Reason):
            raise InternalError(f"{match.name} was proven but cannot be cut out: {cut.text}")
        after, opsets = _raised(plan, {entry.domain: entry.version for entry in cut.model.opset_import})
        for kind, nodes in {"before": list(cut.model.graph.node), "after": after}.items():
            if nodes:
                path = folder / f"{match.name}.{kind}.onnx"
                alone = _alone(plan, cut.model, nodes, opsets)
                if kind == "before":
                    alone.graph.doc_string = counted(match.name, len(between(model.graph, match, kinds)), alone.graph)
                path.write_bytes(alone.SerializeToString())
                files.append(str(path))
    return tuple(files)


def _raised(plan: ExpressionPlan, opsets: Mapping[str, int]) -> tuple[list[onnx.NodeProto], Mapping[str, int]]:
    """A plan's nodes as the opsets write them that its operators need, and these opsets."""
    domain, version = plan.target_opset or ("", 0)
    have = opsets.get(domain, 0)
    if have >= version:
        return list(plan.nodes), opsets
    raised = plan.nodes if domain else adapt_all(plan.nodes, have, version)
    return list(plan.nodes if isinstance(raised, Reason) else raised), {**opsets, domain: version}


def _alone(
    plan: ExpressionPlan, cut: onnx.ModelProto, nodes: list[onnx.NodeProto], opsets: Mapping[str, int]
) -> onnx.ModelProto:
    match = plan.match
    read = {name for node in nodes for name in node.input}
    sizes = [
        info
        for info in cut.graph.input
        if info.name in read and info.name not in {role.name for role in match.operands()}
    ]
    ends = [
        [helper.make_tensor_value_info(r.name, r.dtype, [d if isinstance(d, int) else str(d) for d in r.shape])
         for r in roles]
        for roles in (match.operands(), match.results())
    ]  # fmt: skip
    constants = [tensor for tensor in cut.graph.initializer if tensor.name in read]
    graph = helper.make_graph(
        nodes, match.name, ends[0] + sizes, ends[1], initializer=constants, doc_string=f"{match.rule}: {plan.op}"
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(graph, producer_name="deltafuse", opset_imports=imports, ir_version=cut.ir_version)
