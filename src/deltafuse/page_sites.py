"""What the page tells of each site: a line for the list, and all else, which is looked at when the line is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deltafuse import region, splice
from deltafuse.axis_names import role_shape
from deltafuse.evidence import Evidence
from deltafuse.expression_match import ExpressionMatch, ExpressionPlan
from deltafuse.match import Match, Plan, Role, SiteReport
from deltafuse.page_nodes import emitted_document, types_of
from deltafuse.page_pictures import Pictures
from deltafuse.probing import tensor_text
from deltafuse.reasons import Nearest, compared_with, nearest_text
from deltafuse.report import OUTPUTS, ROLES, role_document, site_document
from deltafuse.tables import status_text
from deltafuse.tables_sites import recurrence_text

__all__ = ["lines", "sites"]

Document = dict[str, Any]


def lines(reports: Sequence[SiteReport]) -> list[Document]:
    """A line for each site, what the list is searched by."""
    return [
        {
            "name": site.name,
            "status": str(status_text(site)),
            "rule": site.rule or (site.match.rule if site.match else ""),
            "form": site.match.form if site.match else "",
            "op": site.op or "",
            "nodes": site.nodes,
            "added": site.added,
            "reason": "" if site.reason is None else site.reason.code,
        }
        for site in reports
    ]


def sites(
    evidence: Evidence, reports: Sequence[SiteReport], pictures: Pictures, formulas: Mapping[str, str]
) -> list[Document]:
    """All else that is known of each site, in the order of `lines`.

    Args:
        evidence: what is known beyond the reports.
        reports: of all sites.
        pictures: what is drawn goes there.
        formulas: rule -> the template of its recurrence.
    """
    plans = {plan.match.name: plan for plan in evidence.draft.plans}
    documents = [_site(evidence, site, plans.get(site.name), pictures) for site in reports]
    for document, site in zip(documents, reports, strict=True):
        if site.match is not None:
            document["recurrence"] = recurrence_text(site.match, formulas.get(site.match.rule, ""))
    return documents


def _site(evidence: Evidence, site: SiteReport, plan: splice.AnyPlan | None, pictures: Pictures) -> Document:
    document = site_document(site) | {"before": _before(evidence, site, pictures)}
    if site.match is not None:
        document["operands"] = [[name, _role(role)] for name, role in _operands(site.match).items()]
        document["results"] = [[name, _role(role)] for name, role in _results(site.match).items()]
    if isinstance(site.match, Match):
        norms = {"query": site.match.query_norm, "key": site.match.key_norm}
        document["norms"] = [[name, norm.kind, norm.eps] for name, norm in norms.items() if norm is not None]
    if site.reason is not None and site.reason.nearest is not None:
        document["nearest"] = _nearest(site.reason.nearest, site.reason.code)
    if plan is not None:
        document |= _planned(evidence, site, plan, pictures)
    if site.looked:
        document["looked"] = [
            [f"{one.kind} {one.number}", one.name, tensor_text(one.dtype, one.shape)] for one in site.looked
        ]
    return document


def _role(role: Role) -> Document:
    return {**(role_document(role) or {}), "shape": role_shape(role)}


def _before(evidence: Evidence, site: SiteReport, pictures: Pictures) -> Document | None:
    graph, match = evidence.model.graph, site.match
    if site.inside:
        # What is drawn is the main graph.
        return None
    if match is not None:
        nodes = region.between(graph, match, evidence.kinds)
        ends = [{name: role.value for name, role in some(match).items()} for some in (_operands, _results)]
        return pictures.before(site.name, nodes, *ends)
    candidate = evidence.candidates.get(site.name)
    if candidate is None:
        return None
    ends = _numbered("input", candidate.roots), _numbered("output", candidate.frontier)
    return pictures.before(site.name, region.looked_at(graph, candidate), *ends)


def _numbered(what: str, values: Sequence[int]) -> dict[str, int]:
    return {f"{what} {number}": value for number, value in enumerate(values, 1)}


def _operands(match: Match | ExpressionMatch) -> dict[str, Role]:
    return dict(match.roles) if isinstance(match, ExpressionMatch) else _named(match, ROLES)


def _results(match: Match | ExpressionMatch) -> dict[str, Role]:
    return dict(match.outputs) if isinstance(match, ExpressionMatch) else _named(match, OUTPUTS)


def _named(match: Match, names: Sequence[str]) -> dict[str, Role]:
    found: Mapping[str, Role | None] = {name: getattr(match, name) for name in names}
    return {name: role for name, role in found.items() if role is not None}


def _planned(evidence: Evidence, site: SiteReport, plan: Plan | ExpressionPlan, pictures: Pictures) -> Document:
    graph = evidence.model.graph
    types = types_of(plan, evidence.model.opset_imports.get("", 17))
    ends = [{name: role.name for name, role in some(plan.match).items()} for some in (_operands, _results)]
    return {
        "emitted": emitted_document(plan, types),
        "pins": [[graph.name(value), axis, size] for value, axis, size in _new(evidence, plan)],
        "after": pictures.after(site.name, plan.op, plan.nodes, *ends) if plan.nodes else None,
    }


def _new(evidence: Evidence, plan: Plan | ExpressionPlan) -> Iterator[tuple[int, int, int]]:
    """The axes that are pinned and did not have that size before."""
    for value, axis, size in dict.fromkeys(plan.pins):
        shape = evidence.shapes.shape(value)
        if shape is None or shape[axis] != size:
            yield value, axis, size


def _nearest(nearest: Nearest, code: str) -> Document:
    differences = list(compared_with(nearest))
    return {"said": nearest_text(nearest, code), "tokens": nearest.tokens, "differences": differences}
