"""Turn plans into changes of the file: nodes out, nodes in, and a local reorder where topological order demands it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import onnx

from deltafuse import aliases, region
from deltafuse.adjusting import Adjustments, adapted
from deltafuse.edits import Changes, Insertion
from deltafuse.errors import InternalError
from deltafuse.expression_match import ExpressionMatch, ExpressionPlan
from deltafuse.graph import Graph
from deltafuse.match import Match, Plan
from deltafuse.reasons import Reason

Removed = tuple[tuple[str, tuple[int, ...]], ...]
#: Of a node that no site needs.
_NONE = -1

AnyPlan = Plan | ExpressionPlan
AnyMatch = Match | ExpressionMatch


def changes_of(
    graph: Graph,
    plans: Sequence[AnyPlan],
    removed: Removed,
    adjustments: Adjustments,
    order: Sequence[int] | None = None,
) -> Changes:
    """What is to be changed in the file to fuse the planned sites and pin the axes.

    Args:
        graph: in topological order.
        plans: the sites to fuse.
        removed: the nodes that go, as `removed_by` gives them.
        adjustments: axes to pin, opsets to raise.
        order: number in the file of each node of `graph`, None where they are the same.
    """
    gone = frozenset(node for _, nodes in removed for node in nodes)
    out = list(removed)
    inserted: list[Insertion] = []
    moved: list[tuple[str, int, int]] = []
    rewritten = {node: nodes for node, nodes in adjustments.opsets.replaced if node not in gone}
    renamed = aliases.of(plans)
    readers = aliases.readers(graph, plans, gone)
    # What a raised opset rewrites belongs to no single site: its old form is wrong as long as any site stays.
    owner = {node: "" if node in rewritten else site for node, site in readers.items()}
    rewritten |= {node: renamed.apply(rewritten.get(node, (graph.node(node),))) for node in readers}
    for plan in plans:
        if not plan.nodes:
            continue
        before = _place(graph, plan.match)
        nodes = renamed.apply(adapted_nodes(plan, adjustments))
        inserted.append(Insertion(plan.match.name, before, nodes, _fresh(graph, plan)))
        results = [role.value for role in plan.match.results()]
        early = [node for node in early_readers(graph, results, before) if node not in gone]
        if not rewritten.keys() & set(early):
            moved += [(plan.match.name, node, before) for node in early]
            continue
        # A node that must move and be rewritten comes back in its new form, and with it all that move for this site.
        back = [new for node in early for new in rewritten.pop(node, (graph.node(node),))]
        inserted.append(Insertion(plan.match.name, before, tuple(back)))
        out.append((plan.match.name, tuple(early)))
    inserted += [Insertion(owner.get(node, ""), node, nodes) for node, nodes in rewritten.items()]
    out += [(owner.get(node, ""), (node,)) for node in rewritten]
    retyped = () if adjustments.pins is None else adjustments.pins.retyped
    changes = Changes(tuple(out), tuple(inserted), tuple(moved), retyped, adjustments.opsets.imports)
    return changes if order is None else _renumbered(changes, order)


def adapted_nodes(plan: AnyPlan, adjustments: Adjustments) -> tuple[onnx.NodeProto, ...]:
    """A plan's nodes as they are written: for the opset that the file will import."""
    new = adapted(plan, adjustments.opsets)
    if isinstance(new, Reason):
        raise InternalError(f"the nodes emitted for {plan.match.name} have no form at the raised opset: {new.text}")
    return new.nodes


def _fresh(graph: Graph, plan: AnyPlan) -> tuple[onnx.ValueInfoProto, ...]:
    """Declared types of values that the file does not declare already."""
    found = [(info, graph.find(info.name)) for info in plan.value_info]
    return tuple(info for info, value in found if value is None or graph.value_info(value) is None)


def _renumbered(changes: Changes, order: Sequence[int]) -> Changes:
    """The same changes in the numbers of a file that is out of order: nothing needs to move there."""
    places = (*order, len(order))
    return replace(
        changes,
        removed=tuple((site, tuple(sorted(order[node] for node in nodes))) for site, nodes in changes.removed),
        inserted=tuple(replace(insertion, before=places[insertion.before]) for insertion in changes.inserted),
        moved=(),
    )


def removed_by(graph: Graph, plans: Sequence[AnyPlan]) -> Removed:
    """The nodes that nothing needs once the sites are fused, by site.

    What several sites share (exporters share constants and shape arithmetic between layers) counts to the first that
    needs it. What a body reads of the graph around it stays.
    """
    dead = region.dead_nodes(
        graph,
        [role.value for plan in plans for role in plan.match.results()],
        [role.value for plan in plans for role in plan.match.operands()],
    )
    # The nodes of a recurrence's match reach beyond its results, those of an expression's do not.
    numbered = [*enumerate(plans)]
    exact = [(index, plan) for index, plan in numbered if isinstance(plan, ExpressionPlan)]
    owner = np.full(len(graph.op), _NONE, np.int32)
    for index, plan in (*reversed(numbered), *exact):
        owner[list(plan.match.nodes)] = index
    gone = dead[dead >= graph.outer]
    loose: list[int] = gone[owner[gone] == _NONE].tolist()
    for node in reversed(loose):
        readers = {owner.item(reader) for value in graph.node_outputs[node] for reader in graph.consumers[value]}
        owner[node] = min(readers - {_NONE}, default=0)
    owners = owner[gone]
    return tuple((plan.match.name, tuple(gone[owners == index].tolist())) for index, plan in enumerate(plans))


def stuck(graph: Graph, plans: Sequence[AnyPlan], removed: Removed) -> dict[str, int]:
    """Sites one of whose results would be written twice, and that result.

    A node that writes a result and something else that is still needed has to stay.
    """
    gone = {node for _, nodes in removed for node in nodes}
    return {
        plan.match.name: role.value
        for plan in plans
        for role in plan.match.results()
        if graph.producer[role.value] not in gone
    }


def _place(graph: Graph, match: AnyMatch) -> int:
    """The node in front of which the new ones go: the first that wrote an output, or the first after all operands."""
    last = max(graph.producer[role.value] for role in match.operands())
    first = min(graph.producer[role.value] for role in match.results())
    return max(first, last + 1)


def early_readers(graph: Graph, values: Iterable[int], before: int) -> list[int]:
    """Nodes that read some values, directly or not, and stand in front of where these are now computed.

    Args:
        graph: in topological order.
        values: that are computed anew.
        before: the node in front of which they are.
    """
    results = set(values)
    early: list[int] = []
    for node in range(min(graph.producer[value] for value in results), before):
        if any(value in results for value in graph.reads(node)):
            results.update(graph.node_outputs[node])
            early.append(node)
    return early
