"""Values that a plan takes out and whose readers read another value instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from deltafuse.expression_match import ExpressionPlan
from deltafuse.graph import Graph
from deltafuse.match import Plan


@dataclass(frozen=True)
class Renaming:
    """Names to read instead of others; chains are followed to their end."""

    names: Mapping[str, str]

    def apply(self, nodes: Iterable[NodeProto]) -> tuple[NodeProto, ...]:
        """The nodes, in copies that read the new names where they read any of the old ones."""
        return tuple(self._renamed(node) for node in nodes)

    def _renamed(self, node: NodeProto) -> NodeProto:
        if self.names.keys().isdisjoint(node.input):
            return node
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [self.names.get(name, name) for name in node.input]
        return copy


def of(plans: Sequence[Plan | ExpressionPlan]) -> Renaming:
    """All aliases of some plans."""
    return resolved({old: new for plan in _aliasing(plans) for old, new in plan.aliases.items()})


def resolved(names: Mapping[str, str]) -> Renaming:
    """A renaming under which no name is left that is to be renamed."""
    ends: dict[str, str] = {}
    for old in names:
        new = old
        while new in names:
            new = names[new]
        ends[old] = new
    return Renaming(ends)


def readers(graph: Graph, plans: Sequence[Plan | ExpressionPlan], gone: Collection[int]) -> dict[int, str]:
    """The nodes that read an alias and stay, and the first site that asks for it."""
    found: dict[int, str] = {}
    for plan in _aliasing(plans):
        for role in plan.match.results():
            if role.name in plan.aliases:
                for node in graph.consumers[role.value]:
                    if node not in gone:
                        found.setdefault(node, plan.match.name)
    return found


def _aliasing(plans: Sequence[Plan | ExpressionPlan]) -> list[ExpressionPlan]:
    return [plan for plan in plans if isinstance(plan, ExpressionPlan) and plan.aliases]
