"""Find where a rule could be: anchors, the cone behind them, and the roots it is computed from.

Nothing here knows numbers: a candidate is a part of the graph that is worth proving.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from deltafuse.bodies import LOOPS, bodies, has_body, is_call
from deltafuse.classes import Kind
from deltafuse.climb import Climber, DecayClimber
from deltafuse.dims import Dim
from deltafuse.graph import Graph
from deltafuse.patterns import Pattern
from deltafuse.probe import backward_slice
from deltafuse.shapes import Shapes
from deltafuse.wire import Model

_JOINED = -2
_FREE = -1

_SCOPE = re.compile(r"(layers?[._]\d+)(?=[._/]|$)")


@dataclass(frozen=True)
class Candidate:
    """A part of the graph that may be the rule.

    Attributes:
        name: from the exporter's scopes where there are any (``layers.3``), else ``site.N``.
        g: value that all anchors climb to.
        roots: data values that the core is computed from, `g` first.
        sizes: results of Shape and Size nodes that the site uses, and what they hold. They are inputs of its cut:
            exporters let one layer read the shapes of another's inner values.
        core: nodes that depend on an anchor, ascending.
        nodes: `core` and all that lies between it and the roots, constants and shape arithmetic too, ascending.
        frontier: values of the core that something outside reads, or that are graph outputs.
    """

    name: str
    g: int
    roots: tuple[int, ...]
    sizes: tuple[tuple[int, tuple[Dim, ...]], ...]
    core: tuple[int, ...]
    nodes: tuple[int, ...]
    frontier: tuple[int, ...]


class Finder:
    """Finds the candidates of one pattern in one graph."""

    def __init__(self, model: Model, kinds: bytearray, shapes: Shapes, pattern: Pattern) -> None:
        graph = model.graph
        self._model = model
        self._graph = graph
        self._kinds = kinds
        self._shapes = shapes
        self._pattern = pattern
        self._climber = Climber(graph, kinds, shapes, pattern.fence)

    def find(self) -> Iterator[Candidate]:
        """Candidates in the order of their first anchor.

        They come one by one, so that what a proof tells of a site's outputs (their shapes) is known for the next one.
        """
        anchors = self._anchors()
        if not anchors:
            return
        sites: dict[int, int] = {}
        for g in anchors.values():
            sites.setdefault(g, len(sites))
        colours = self._colour({node: sites[g] for node, g in anchors.items()})
        cores: list[list[int]] = [[] for _ in sites]
        for node, colour in enumerate(colours):
            if colour >= 0:
                cores[colour].append(node)
        likely = [(g, core) for g, core in zip(sites, cores, strict=True) if self._contracts(core)]
        names = [self._fresh(name) for name in _names(self._graph, [core for _, core in likely])]
        for name, (g, core) in zip(names, likely, strict=True):
            candidate = self._candidate(name, g, core)
            if candidate is not None:
                yield candidate

    def _fresh(self, name: str) -> str:
        """A site's name under which nothing stands in the file yet: an earlier fuse may have left some."""
        mapped, tried, count = self._model.mapped, name, 1
        if not self._emitted_before:
            return name
        while mapped.find(f"{tried}/{self._pattern.name}".encode()) >= 0:
            count += 1
            tried = f"{name}.{count}"
        return tried

    @cached_property
    def _emitted_before(self) -> bool:
        return self._model.mapped.find(f"/{self._pattern.name}".encode()) >= 0

    def _contracts(self, core: list[int]) -> bool:
        graph = self._graph
        return any(graph.op[node] in self._pattern.contractions or has_body(self._model, graph, node) for node in core)

    def anchors_seen(self) -> int:
        """How many operators were looked at as a possible start of the rule."""
        kinds, graph = self._kinds, self._graph
        return sum(
            op in self._pattern.anchors and kinds[graph.node_outputs[node][0]] == Kind.DATA
            for node, op in enumerate(graph.op)
        )

    def _anchors(self) -> dict[int, int]:
        graph = self._graph
        anchors: dict[int, int] = {}
        for node, op in enumerate(graph.op):
            if op in LOOPS or is_call(self._model, graph, node):
                roots = self._inner_decay(self._model, graph, self._kinds, node)
            elif self._is_anchor(graph, self._kinds, node):
                roots = set(self._climber.decay_roots(graph.node_inputs[node][0]))
            else:
                continue
            if len(roots) == 1:
                anchors[node] = roots.pop()
        return anchors

    def _is_anchor(self, graph: Graph, kinds: bytearray, node: int) -> bool:
        if graph.op[node] not in self._pattern.anchors or kinds[graph.node_outputs[node][0]] != Kind.DATA:
            return False
        return not _activation(graph, kinds, node)

    def _inner_decay(self, model: Model, graph: Graph, kinds: bytearray, node: int) -> set[int]:
        """The values around a loop or call that the anchors in its body climb to."""
        found: set[int] = set()
        for body in bodies(model, graph, kinds, node):
            climber = DecayClimber(body.graph, body.kinds, self._pattern.fence)
            for inner, op in enumerate(body.graph.op):
                if op in LOOPS or is_call(body.model, body.graph, inner):
                    reached = self._inner_decay(body.model, body.graph, body.kinds, inner)
                elif self._is_anchor(body.graph, body.kinds, inner):
                    reached = set(climber.decay_roots(body.graph.node_inputs[inner][0]))
                else:
                    continue
                reached = {root for value in reached for root in climber.decay_roots(value)}
                found.update(body.outside(graph, value) for value in reached)
        found.discard(0)
        if graph is not self._graph:
            return found
        return {root for value in found for root in self._climber.decay_roots(value)}

    def _colour(self, anchors: dict[int, int]) -> list[int]:
        """Colour of each node: the site whose anchors it depends on, `_FREE`, or `_JOINED` where sites meet."""
        graph, kinds, fence = self._graph, self._kinds, self._pattern.fence
        value_colours = [_FREE] * len(graph.value_names)
        colours = [_FREE] * len(graph.op)
        for node in range(min(anchors), len(graph.op)):
            colour = _FREE
            read = graph.reads(node)
            for value in read:
                seen = value_colours[value]
                if seen != _FREE:
                    colour = seen if colour in (_FREE, seen) else _JOINED
            if colour == _FREE:
                colour = anchors.get(node, _FREE)
            if colour < 0 or graph.op[node] in fence:
                continue
            if any(kinds[value] == Kind.WEIGHT for value in read):
                continue
            outputs = graph.node_outputs[node]
            if kinds[outputs[0]] != Kind.DATA:
                continue
            colours[node] = colour
            for value in outputs:
                value_colours[value] = colour
        return colours

    def _candidate(self, name: str, g: int, core: list[int]) -> Candidate | None:
        graph, kinds = self._graph, self._kinds
        inside = {value for node in core for value in graph.node_outputs[node]}
        entries = {
            value for node in core for value in graph.reads(node) if value not in inside and kinds[value] == Kind.DATA
        }
        roots = self._climber.roots(sorted(entries), g)
        if len(roots) < self._pattern.least_roots:
            return None
        members = set(core)
        frontier = [value for value in sorted(inside) if self._read_outside(value, members)]
        sizes, nodes = self._close(roots, frontier)
        return Candidate(name, g, tuple(roots), tuple(sizes.items()), tuple(core), tuple(nodes), tuple(frontier))

    def _read_outside(self, value: int, members: set[int]) -> bool:
        graph, kinds = self._graph, self._kinds
        if value in graph.outputs:
            return True
        return any(
            node not in members and kinds[graph.node_outputs[node][0]] == Kind.DATA for node in graph.consumers[value]
        )

    def _close(self, roots: list[int], frontier: list[int]) -> tuple[dict[int, tuple[Dim, ...]], list[int]]:
        """The shapes of data that are read between roots and frontier, and the nodes between all these.

        A shape that is not known is no end: what it is the shape of must then lie inside.
        """
        graph, known = self._graph, self._shape_results
        nodes, _ = backward_slice(graph, known.union(roots), frontier)
        read = dict.fromkeys(value for node in nodes for value in graph.node_inputs[node] if value in known)
        contents = {result: self._shapes.contents(result) for result in read}
        unknown = [result for result, found in contents.items() if found is None or None in found.ravel().tolist()]
        if unknown:
            known.difference_update(unknown)
            return self._close(roots, frontier)
        return {result: tuple(found.ravel().tolist()) for result, found in contents.items() if found is not None}, nodes

    @cached_property
    def _shape_results(self) -> set[int]:
        """Results of Shape nodes on data."""
        graph, kinds = self._graph, self._kinds
        return {
            graph.node_outputs[node][0]
            for node, op in enumerate(graph.op)
            if op == "Shape" and kinds[graph.node_inputs[node][0]] == Kind.DATA
        }


def _activation(graph: Graph, kinds: bytearray, node: int) -> bool:
    """An exponential inside a written-out softplus or sigmoid: Exp, Add(1), then Log, Reciprocal or Div."""
    for add in graph.consumers[graph.node_outputs[node][0]]:
        if graph.op[add] != "Add" or not any(kinds[v] == Kind.CONSTANT for v in graph.node_inputs[add]):
            continue
        after = graph.consumers[graph.node_outputs[add][0]]
        if any(graph.op[reader] in ("Log", "Reciprocal", "Div") for reader in after):
            return True
    return False


def _names(graph: Graph, cores: Sequence[list[int]]) -> list[str]:
    """Names from the exporter's scopes where each site has its own, else ``site.N``."""
    scopes = [_scope(graph, core[0]) for core in cores]
    if all(scopes) and len(set(scopes)) == len(scopes):
        return scopes
    return [f"site.{index}" for index in range(len(cores))]


def _scope(graph: Graph, first: int) -> str:
    """The layer that the exporter's names or metadata put a core's first node in, or ""."""
    node = graph.node(first)
    texts = [
        node.name,
        *node.output,
        *(prop.value for prop in node.metadata_props if "scope" in prop.key or "namespace" in prop.key),
    ]
    for text in texts:
        found = _SCOPE.search(text)
        if found:
            return found.group(1).replace("_", ".")
    return ""
