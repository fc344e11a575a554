"""What plans do to the file beside their sites, worked out while the nodes that they write are still proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from deltafuse import edits, splice
from deltafuse.adjusting import Adjustments, adjust
from deltafuse.choosing import Chosen
from deltafuse.edits import Changes, Edit
from deltafuse.enclosed import Enclosed
from deltafuse.errors import InternalError
from deltafuse.expression_match import ExpressionPlan
from deltafuse.graph import Graph
from deltafuse.layouts import axes
from deltafuse.match import Match, SiteReport
from deltafuse.pin_sizes import Seed
from deltafuse.pinning import PinPlan
from deltafuse.reasons import TEXTS, Reason
from deltafuse.user_code import at_fault
from deltafuse.wire import Model

TEXTS.update(
    {
        "body-pins": "the site lies inside {place}, where no axis is fixed, and the target needs one to be; "
        "take --target ort or onnx, or move what lies inside out of it",
        "body-moved": "the site lies inside {node}, which is itself moved or rewritten by what is fused around it; "
        "fuse one of the two with --sites, and the other in a second run",
    }
)


#: Codes of what fixes the number of sequences, and of tokens.
_BATCH, _TOKENS = "static-batch", "valid_tokens"
#: Numbers in a file of the nodes of a graph in topological order; None where they are the same.
Order: TypeAlias = "Sequence[int] | None"


@dataclass(frozen=True)
class Outline:
    """What some plans do to the rest of one graph.

    Attributes:
        stuck: sites that cannot be fused, and the result that would be written twice.
        removed: the nodes that go.
        changes: why the rest of the file cannot follow, where it cannot.
    """

    stuck: Mapping[str, int]
    removed: splice.Removed
    changes: Adjustments | Reason


@dataclass(frozen=True)
class Part:
    """What is to be changed in one graph."""

    plans: tuple[splice.AnyPlan, ...]
    removed: splice.Removed
    changes: Adjustments
    inside: bool = False

    def changed(self, graph: Graph, order: Order = None) -> Changes:
        """The changes; what the file imports is changed with the main graph. See `deltafuse.splice.changes_of`."""
        changes = splice.changes_of(graph, self.plans, self.removed, self.changes, order)
        return replace(changes, opsets=()) if self.inside else changes


@dataclass(frozen=True)
class Draft:
    """What is to be changed in a model: one part for each graph that was searched, the main one first."""

    parts: tuple[Part, ...]

    @property
    def plans(self) -> tuple[splice.AnyPlan, ...]:
        """Of all graphs."""
        return tuple(plan for part in self.parts for plan in part.plans)

    @property
    def pins(self) -> PinPlan | None:
        """Axes that become fixed."""
        return self.parts[0].changes.pins


def likely_parts(
    scopes: Sequence[Enclosed], outlined: Sequence[Outline], plans: Sequence[Sequence[splice.AnyPlan]]
) -> tuple[Part, ...]:
    """What `draft` comes to where nothing is refused any more; () where something is already."""
    parts = [
        Part(tuple(some), one.removed, one.changes, bool(scope.model.place))
        for scope, one, some in zip(scopes, outlined, plans, strict=True)
        if not (isinstance(one.changes, Reason) or one.stuck)
    ]
    return tuple(parts) if len(parts) == len(scopes) else ()


def edits_of(base: Model, scopes: Sequence[Enclosed], order: Order, parts: Sequence[Part]) -> tuple[Edit, ...]:
    """The byte edits that a draft's parts come to.

    Args:
        base: the model that is edited.
        scopes: its main graph, in topological order, and the bodies that were entered.
        order: number in `base` of each node of the main graph, None where they are the same.
        parts: of each scope.
    """
    models = [base, *(scope.model for scope in scopes[1:])]
    orders = [order, *(None for _ in models[1:])]
    changed = [
        edit
        for scope, part, model, numbers in zip(scopes, parts, models, orders, strict=True)
        for edit in edits.edits_of(model, part.changed(scope.model.graph, numbers))
    ]
    return edits.with_sizes(base, changed)


def outline(
    chosen: Chosen, scopes: Sequence[Enclosed], plans: Sequence[Sequence[splice.AnyPlan]]
) -> tuple[Outline, ...]:
    """What plans, once they are proven, do to the file; a site one of whose results would be written twice is none.

    Args:
        chosen: what is pinned, and what each site is written for.
        scopes: the main graph and the bodies that were entered, each with the outputs of its sites defined.
        plans: of the sites of each.
    """
    firsts = [_removed(scope.model.graph, some) for scope, some in zip(scopes, plans, strict=True)]
    kept = [
        [plan for plan in some if plan.match.name not in stuck]
        for some, (stuck, _) in zip(plans, firsts, strict=True)
    ]
    every = [plan for some in kept for plan in some]
    opsets = tuple(dict.fromkeys(opset for plan in every if (opset := chosen.opset_of(plan)) is not None))
    found: list[Outline] = []
    for scope, some, (stuck, removed) in zip(scopes, kept, firsts, strict=True):
        changes = _adjusted(chosen, scope, some, removed, opsets, _entered(scope, scopes)) if every else None
        found.append(Outline(stuck, removed, Adjustments() if changes is None else changes))
    return tuple(found)


def _removed(graph: Graph, plans: Sequence[splice.AnyPlan]) -> tuple[dict[str, int], splice.Removed]:
    removed = splice.removed_by(graph, plans)
    stuck = splice.stuck(graph, plans, removed)
    if stuck:
        removed = splice.removed_by(graph, [plan for plan in plans if plan.match.name not in stuck])
    return stuck, removed


def _entered(scope: Enclosed, scopes: Sequence[Enclosed]) -> frozenset[int]:
    """The nodes of a graph whose bodies are among the scopes."""
    return frozenset(body.node for body in scopes if body.around is scope)


def _adjusted(
    chosen: Chosen,
    scope: Enclosed,
    plans: Sequence[splice.AnyPlan],
    removed: splice.Removed,
    opsets: Sequence[tuple[str, int]],
    entered: frozenset[int],
) -> Adjustments | Reason:
    options, model = chosen.options, scope.model
    dead = frozenset(node for _, nodes in removed for node in nodes)
    seeds = tuple(seed for plan in plans for seed in _seeds(chosen, plan)) if options.pin else ()
    if not model.place:
        return adjust(model, scope.shapes, dead, opsets, seeds, dict(options.pins), entered)
    if seeds:
        return Reason("body-pins", {"place": model.place})
    return adjust(model, scope.shapes, dead, opsets, (), {}, entered)


def _seeds(chosen: Chosen, plan: splice.AnyPlan) -> Iterator[Seed]:
    """The axes that a plan needs to be one size, each with the code of what makes it so."""
    match = plan.match
    if not isinstance(match, Match):
        yield from (Seed(*pin) for pin in plan.pins)
        return
    layouts = {role.value: axes(role.layout) for role in (*match.operands(), *match.results())}
    codes = {limit.code for limit in chosen.target_of(match.name).limits}
    valid = match.valid_tokens
    for value, axis, size in plan.pins:
        letters = layouts[value][axis]
        if "B" in letters and _BATCH in codes:
            yield Seed(value, axis, size, _BATCH)
        elif "T" in letters and valid is not None and valid.low == valid.high:
            yield Seed(value, axis, size, _TOKENS)
        else:
            yield Seed(value, axis, size)


def _check_names(chosen: Chosen, graph: Graph, plans: Sequence[splice.AnyPlan]) -> None:
    """Raises where nodes write a name that the file, or another site's nodes, have already.

    Raises:
        InternalError: a bug in an emission.
        UserError: the same where the target, or the pattern of the expression, is the user's own.
    """
    taken: dict[str, str] = {}
    for plan in plans:
        results, site = {role.name for role in plan.match.results()}, plan.match.name
        for name in (name for node in plan.nodes for name in node.output if name and name not in results):
            where = "the file" if graph.find(name) is not None else taken.setdefault(name, site)
            if where != site:
                text = f"the nodes emitted for {site} write {name}, which {where} has already"
                own = plan.file if isinstance(plan, ExpressionPlan) else None
                target = None if own is not None else chosen.target_of(site).file
                with at_fault(own, "pattern", "emit"), at_fault(target, "target", "emit"):
                    raise InternalError(f"{text}: have new values named after the site, as emitter.node does by itself")


def draft(
    chosen: Chosen,
    scopes: Sequence[Enclosed],
    outlined: Sequence[Outline],
    plans: Sequence[Sequence[splice.AnyPlan]],
    reports: Sequence[SiteReport],
) -> tuple[Draft, tuple[SiteReport, ...]]:
    """What is to be changed; where the rest of the file cannot follow no site is left, and each report says why.

    Args:
        chosen: what each site is written for.
        scopes: the main graph and the bodies that were entered.
        outlined: what `plans` do to each.
        plans: as proven.
        reports: of all sites.
    """
    reasons: dict[str, Reason] = {}
    for scope, one in zip(scopes, outlined, strict=True):
        names = {site: scope.model.graph.name(value) for site, value in one.stuck.items()}
        reasons |= {site: Reason("inner-value-used", {"value": name}) for site, name in names.items()}
    told = _refused(reports, reasons)
    failed = next((one.changes for one in outlined if isinstance(one.changes, Reason)), None)
    if failed is not None:
        return Draft(tuple(Part((), (), Adjustments(), bool(s.model.place)) for s in scopes)), tuple(
            _refuse(report, failed) for report in told
        )
    parts = [
        Part(_kept(some, reasons), one.removed, one.changes, bool(scope.model.place))
        for scope, one, some in zip(scopes, outlined, plans, strict=True)
        if not isinstance(one.changes, Reason)
    ]
    moved = _moved(scopes, parts)
    for number, reason in moved.items():
        told = _refused(told, {plan.match.name: reason for plan in parts[number].plans})
        parts[number] = replace(parts[number], plans=(), removed=())
    for scope, part in zip(scopes, parts, strict=True):
        _check_names(chosen, scope.model.graph, part.plans)
    gone = {site: len(nodes) for part in parts for site, nodes in part.removed}
    counted = (replace(one, removed=gone.get(one.name, 0)) if one.status == "fused" else one for one in told)
    return Draft(tuple(parts)), tuple(counted)


def _moved(scopes: Sequence[Enclosed], parts: Sequence[Part]) -> dict[int, Reason]:
    """Bodies whose sites cannot be fused, because a node around them goes, moves or is written anew."""
    found: dict[int, Reason] = {}
    for number, body in enumerate(scopes):
        inner, around = body, body.around
        while parts[number].plans and around is not None:
            part = parts[next(index for index, scope in enumerate(scopes) if scope is around)]
            changes = part.changed(around.model.graph) if part.plans else Changes()
            touched = {node for _, nodes in changes.removed for node in nodes} | {node for _, node, _ in changes.moved}
            if inner.node in touched:
                found[number] = Reason("body-moved", {"node": around.model.graph.label(inner.node)})
            inner, around = around, around.around
    return found


def _kept(plans: Sequence[splice.AnyPlan], reasons: Mapping[str, Reason]) -> tuple[splice.AnyPlan, ...]:
    return tuple(plan for plan in plans if plan.match.name not in reasons)


def _refused(reports: Sequence[SiteReport], reasons: Mapping[str, Reason]) -> tuple[SiteReport, ...]:
    return tuple(_refuse(report, reasons[report.name]) if report.name in reasons else report for report in reports)


def _refuse(report: SiteReport, reason: Reason) -> SiteReport:
    return replace(report, status="refused", op=None, reason=reason, emitted={}) if report.status == "fused" else report
