"""What differs between an unfused and a fused file inside the bodies of If, Loop and Scan: found graph by graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx

from deltafuse.boundary import SITE
from deltafuse.enclosed import FUSED, Enclosed, enter, held_bodies, mentions
from deltafuse.fused import fused_nodes
from deltafuse.inputs_roles import source_of
from deltafuse.reasons import Reason
from deltafuse.verify_cut import Pair, Side
from deltafuse.verify_diff import Difference, compare
from deltafuse.verify_feeds import Part
from deltafuse.verify_regions import unlabelled
from deltafuse.wire import Model

_NOTHING = Difference((), ())


@dataclass(frozen=True)
class Compared:
    """The same graph of both files, and what differs in it; bodies of its nodes apart.

    Attributes:
        scope: that of the fused file.
    """

    before: Side
    after: Side
    difference: Difference
    scope: Enclosed

    def given(self, pairs: Iterable[Pair]) -> dict[str, Part]:
        """Value of the main graph that an operand of a site in a body is a part of -> which operand it is."""
        found: dict[str, Part] = {}
        for pair in pairs if self.scope.around is not None else ():
            for item in pair.inputs:
                name = "" if item.part.role in ("shape", "other") else _outside(self.scope, item.name)
                if name:
                    found.setdefault(name, item.part)
        return found


def compare_graphs(unfused: Model, fused: Model) -> tuple[Compared, ...]:
    """Compares two files: the main graph first, then every body that differs and holds what a fuse writes.

    Args:
        unfused: in topological order.
        fused: in topological order.
    """
    return tuple(_compare(Enclosed.main(unfused), Enclosed.main(fused)))


def nothing_fused(compared: tuple[Compared, ...]) -> bool:
    """Whether nothing differs at all."""
    return all(one.difference == _NOTHING for one in compared)


def swapped(compared: tuple[Compared, ...]) -> bool:
    """Whether the first file is the fused one: its main graph holds fused nodes, and that of the second none."""
    graphs = compared[0].before.graph, compared[0].after.graph
    old, new = (bool(fused_nodes(graph, range(len(graph.op)))) for graph in graphs)
    return old and not new


def _compare(before: Enclosed, after: Enclosed) -> Iterator[Compared]:
    pairs: list[tuple[Enclosed, Enclosed]] = []
    entered: set[int] = set()
    for node in held_bodies(after.model.graph):
        bodies = _bodies(before, after, node)
        pairs += bodies
        if bodies and _same(before, after, node):
            entered.add(node)
    old, new = (Side(scope.model, scope.shapes, scope.kinds) for scope in (before, after))
    yield Compared(old, new, compare(before.model, after.model, entered), after)
    for pair in pairs:
        yield from _compare(*pair)


def _bodies(before: Enclosed, after: Enclosed, node: int) -> list[tuple[Enclosed, Enclosed]]:
    """The bodies of a node in both files, where these differ and a fuse wrote into one of them.

    What the node itself reads may differ, too: its bodies are compared all the same.
    """
    graph = after.model.graph
    if not mentions(after.model, node, (*FUSED, SITE)):
        return []
    old = _partner(before, after, node)
    if old < before.model.graph.outer:
        return []
    messages = unlabelled(before.model.graph.node(old)), unlabelled(graph.node(node))
    for message in messages:
        del message.input[:]
    if messages[0] == messages[1] or _without_bodies(messages[0]) != _without_bodies(messages[1]):
        return []
    bodies = enter(before, old), enter(after, node)
    if any(isinstance(some, Reason) for some in bodies):
        return []
    olds, news = (some for some in bodies if not isinstance(some, Reason))
    return list(zip(olds, news, strict=True))


def _partner(before: Enclosed, after: Enclosed, node: int) -> int:
    """The node of the unfused graph that writes what a node of the fused one writes, -1 where there is none."""
    graph = after.model.graph
    names = [graph.name(value) for value in graph.node_outputs[node] if value]
    value = before.model.graph.find(names[0]) if names else None
    return -1 if value is None else before.model.graph.producer[value]


def _same(before: Enclosed, after: Enclosed, node: int) -> bool:
    """Whether a node and its partner differ in their bodies alone."""
    messages = (before.model.graph.node(_partner(before, after, node)), after.model.graph.node(node))
    old, new = (_without_bodies(unlabelled(message)) for message in messages)
    return old == new


def _without_bodies(node: onnx.NodeProto) -> onnx.NodeProto:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            attribute.g.Clear()
    return node


def _outside(scope: Enclosed, name: str) -> str:
    """The value of the main graph that a body's value is a part of, "" where it is none."""
    while scope.around is not None:
        graph, value = scope.model.graph, source_of(scope.model.graph, name)
        if value in graph.captured:
            name = graph.name(value)
        elif value in graph.inputs:
            # Inputs of Loop and Scan stand in the order of their bodies' inputs.
            given = scope.around.model.graph.node_inputs[scope.node]
            at = graph.inputs.index(value)
            name = scope.around.model.graph.name(given[at]) if at < len(given) else ""
        else:
            return ""
        scope = scope.around
    return name
