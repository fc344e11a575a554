"""Turn plans into changes of the file: nodes out, nodes in, and a local reorder where topological order demands it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deltafuse import region
from deltafuse.edits import Changes, Insertion
from deltafuse.graph import Graph
from deltafuse.match import Match, Plan
from deltafuse.pinning import PinPlan


def changes_of(
    graph: Graph, plans: Sequence[Plan], pins: PinPlan | None, order: Sequence[int] | None = None
) -> Changes:
    """What is to be changed in the file to fuse the planned sites and pin the axes.

    Args:
        graph: in topological order.
        plans: the sites to fuse.
        pins: the axes to pin.
        order: number in the file of each node of `graph`, None where they are the same.
    """
    removed = _removed(graph, plans)
    gone = frozenset(node for _, nodes in removed for node in nodes)
    inserted: list[Insertion] = []
    moved: list[tuple[str, int, int]] = []
    for plan in plans:
        before = _place(graph, plan.match)
        inserted.append(Insertion(plan.match.name, before, plan.nodes, plan.value_info))
        moved += [
            (plan.match.name, node, before) for node in _early_readers(graph, plan.match, before) if node not in gone
        ]
    changes = Changes(removed, tuple(inserted), tuple(moved), () if pins is None else pins.retyped)
    return changes if order is None else _renumbered(changes, order)


def _renumbered(changes: Changes, order: Sequence[int]) -> Changes:
    """The same changes in the numbers of a file that is out of order: nothing needs to move there."""
    places = (*order, len(order))
    return replace(
        changes,
        removed=tuple((site, tuple(sorted(order[node] for node in nodes))) for site, nodes in changes.removed),
        inserted=tuple(replace(insertion, before=places[insertion.before]) for insertion in changes.inserted),
        moved=(),
    )


def _removed(graph: Graph, plans: Sequence[Plan]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The dead nodes by site.

    Some die only because several sites go (exporters share constants and shape arithmetic between layers): they count
    to the first site.
    """
    own = {node: plan.match.name for plan in reversed(plans) for node in plan.match.nodes}
    joint = region.dead_nodes(
        graph,
        [role.value for plan in plans for role in plan.match.results()],
        [role.value for plan in plans for role in plan.match.operands()],
    )
    first = plans[0].match.name
    shared = [node for node in joint if node not in own]
    by_site: dict[str, list[int]] = {plan.match.name: list(plan.match.nodes) for plan in plans}
    by_site[first] += shared
    return tuple((name, tuple(sorted(nodes))) for name, nodes in by_site.items())


def _place(graph: Graph, match: Match) -> int:
    """The node in front of which the new ones go: the first one that wrote an output, or the first after all operands."""
    last = max(graph.producer[role.value] for role in match.operands())
    first = min(graph.producer[role.value] for role in match.results())
    return max(first, last + 1)


def _early_readers(graph: Graph, match: Match, before: int) -> list[int]:
    """Nodes that read an output of the site, directly or not, and stand in front of where it is now computed."""
    results = {role.value for role in match.results()}
    early: list[int] = []
    for node in range(min(graph.producer[value] for value in results), before):
        if any(value in results for value in graph.reads(node)):
            results.update(graph.node_outputs[node])
            early.append(node)
    return early
