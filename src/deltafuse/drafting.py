"""What plans do to the file beside their sites, worked out while the nodes that they write are still proven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deltafuse import splice
from deltafuse.adjusting import Adjustments, adjust
from deltafuse.choosing import Chosen
from deltafuse.graph import Graph
from deltafuse.match import SiteReport
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.wire import Model


@dataclass(frozen=True)
class Outline:
    """What some plans do to the rest of the file.

    Attributes:
        stuck: sites that cannot be fused, and the result that would be written twice.
        removed: the nodes that go.
        changes: why the rest of the file cannot follow, where it cannot.
    """

    stuck: Mapping[str, int]
    removed: splice.Removed
    changes: Adjustments | Reason


@dataclass(frozen=True)
class Draft:
    """What is to be changed in a model."""

    plans: tuple[splice.AnyPlan, ...]
    removed: splice.Removed
    changes: Adjustments


def outline(chosen: Chosen, model: Model, shapes: Shapes, plans: Sequence[splice.AnyPlan]) -> Outline:
    """What plans, once they are proven, do to the file; a site one of whose results would be written twice is none.

    Args:
        chosen: what is pinned, and what each site is written for.
        model: in topological order.
        shapes: its engine, with the outputs of the sites defined.
        plans: of its sites.
    """
    graph = model.graph
    removed = splice.removed_by(graph, plans)
    stuck = splice.stuck(graph, plans, removed)
    if stuck:
        plans = [plan for plan in plans if plan.match.name not in stuck]
        removed = splice.removed_by(graph, plans)
    if not plans:
        return Outline(stuck, removed, Adjustments())
    options = chosen.options
    seeds = tuple(seed for plan in plans for seed in plan.pins) if options.pin else ()
    dead = frozenset(node for _, nodes in removed for node in nodes)
    opsets = tuple(dict.fromkeys(opset for plan in plans if (opset := chosen.opset_of(plan)) is not None))
    return Outline(stuck, removed, adjust(model, shapes, dead, opsets, seeds, dict(options.pins)))


def draft(
    graph: Graph, outlined: Outline, plans: Sequence[splice.AnyPlan], reports: Sequence[SiteReport]
) -> tuple[Draft, tuple[SiteReport, ...]]:
    """What is to be changed; where the rest of the file cannot follow no site is left, and each report says why.

    Args:
        graph: the main graph.
        outlined: what `plans` do to the file.
        plans: as proven.
        reports: of all sites.
    """
    names = {site: graph.name(value) for site, value in outlined.stuck.items()}
    reasons = {site: Reason("inner-value-used", {"value": name}) for site, name in names.items()}
    told = tuple(_refuse(report, reasons[report.name]) if report.name in reasons else report for report in reports)
    changes = outlined.changes
    if isinstance(changes, Reason):
        return Draft((), (), Adjustments()), tuple(_refuse(report, changes) for report in told)
    kept = tuple(plan for plan in plans if plan.match.name not in outlined.stuck)
    return Draft(kept, outlined.removed, changes), told


def _refuse(report: SiteReport, reason: Reason) -> SiteReport:
    return replace(report, status="refused", op=None, reason=reason) if report.status == "fused" else report
