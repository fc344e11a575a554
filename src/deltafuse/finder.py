"""Find where a rule could be: anchors, the cone behind them, and the roots it is computed from.

Nothing here knows numbers: a candidate is a part of the graph that is worth proving.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from deltafuse.anchors import ContractionAnchors, DecayAnchors, contracts_data
from deltafuse.bodies import has_body
from deltafuse.classes import Kind, sizes_of_data
from deltafuse.climb import Climber
from deltafuse.cores import Cores
from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.graph import Graph
from deltafuse.patterns import Pattern
from deltafuse.ragged import Numbers
from deltafuse.repeats import Repeats
from deltafuse.shapes import Shapes
from deltafuse.slices import Slices
from deltafuse.wire import Model
from deltafuse.wiring import Wiring, Wirings

_JOINED = -2
_FREE = -1
#: What a free size is taken for when numbers of elements are compared.
_ANY = 7

_SCOPE = re.compile(r"(layers?[._]\d+)(?=[._/]|$)")


@dataclass(frozen=True)
class Candidate:
    """A part of the graph that may be the rule.

    Attributes:
        name: from the exporter's scopes where there are any (``layers.3``), else ``site.N``.
        roots: data values that the core is computed from, the gate first: the log decay that all anchors climb to, or
            beta of a rule without decay.
        sizes: results of Shape and Size nodes that the site uses, and what they hold. They are inputs of its cut:
            exporters let one layer read the shapes of another's inner values.
        core: nodes that depend on an anchor, ascending.
        nodes: `core` and all that lies between it and the roots, constants and shape arithmetic too, ascending.
        frontier: values of the core that something outside reads, or that are graph outputs.
        wiring: of `nodes` between `roots` and `frontier`.
    """

    name: str
    roots: tuple[int, ...]
    sizes: tuple[tuple[int, tuple[Dim, ...]], ...]
    core: tuple[int, ...]
    nodes: Sequence[int] = field(hash=False)
    frontier: tuple[int, ...]
    wiring: Wiring = field(repr=False, compare=False)


@dataclass(frozen=True)
class Place:
    """A core that is worth a look.

    Attributes:
        name: of the candidate.
        known_by: what its anchors have in common.
        core: its nodes, ascending.
        entries, frontier: the data values that it reads, and those that something outside reads.
    """

    name: str
    known_by: int
    core: tuple[int, ...]
    entries: tuple[int, ...]
    frontier: tuple[int, ...]


class Finder:
    """Finds the candidates of one pattern, or of several with the same anchors and fence, in one graph.

    Args:
        model: in topological order.
        kinds: kind of each value.
        shapes: of the values.
        pattern: what is looked for.
        others: candidates of other patterns: their names are taken, and no search without a decay starts in them.
        taken: names of sites of other graphs of the file.
        wirings: of the graph, where they were made before.
    """

    def __init__(
        self,
        model: Model,
        kinds: bytearray,
        shapes: Shapes,
        pattern: Pattern,
        others: Sequence[Candidate] = (),
        taken: Collection[str] = (),
        wirings: Wirings | None = None,
    ) -> None:
        graph = model.graph
        self._model = model
        self._graph = graph
        self._kinds = kinds
        self._shapes = shapes
        self._pattern = pattern
        self._others = others
        self._taken = taken
        self._climber = Climber(graph, kinds, shapes, pattern.fence)
        self.wirings = Wirings(model) if wirings is None else wirings
        self._repeats = Repeats(graph, shapes, self.wirings)
        self._slices = Slices(graph)
        self._anchors = (
            ContractionAnchors(model, kinds, self._climber, pattern, {node for one in others for node in one.nodes})
            if pattern.decay == "none"
            else DecayAnchors(model, kinds, self._climber, pattern)
        )

    def find(self) -> Iterator[Candidate]:
        """Candidates in the order of their first anchor.

        They come one by one, so that what a proof tells of a site's outputs (their shapes) is known for the next one.
        """
        for place in self.places:
            candidate = self.candidate(place)
            if candidate is not None:
                yield candidate

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The cores of all candidates in the order of their first anchor."""
        anchors = self._anchors.find()
        if not anchors:
            return ()
        sites: dict[int, int] = {}
        for known_by in anchors.values():
            sites.setdefault(known_by, len(sites))
        colours = self._colour({node: sites[known_by] for node, known_by in anchors.items()})
        cores = Cores(self._graph, self._kinds, colours)
        members = {known_by: cores.nodes(colour) for known_by, colour in sites.items()}
        likely = [known_by for known_by, core in members.items() if self._contracts(core)]
        names = _names(self._graph, [members[by] for by in likely], [other.name for other in self._others], self._taken)
        return tuple(
            Place(name, by, *map(tuple, (members[by], cores.entries(sites[by]), cores.frontier(sites[by]))))
            for name, by in zip([self._fresh(name) for name in names], likely, strict=True)
        )

    def candidate(self, place: Place) -> Candidate | None:
        """The candidate that a core is part of, None where too little enters it."""
        roots = self._roots(place.entries, place.known_by)
        if len(roots) < self._pattern.least_roots:
            return None
        sizes, nodes, wiring = self._close(roots, place, self._shape_results)
        outer = (tuple(roots), tuple(sizes.items()))
        return Candidate(place.name, *outer, place.core, array("i", nodes.tobytes()), place.frontier, wiring)

    @property
    def anchors_are(self) -> str:
        """What a search starts from, for people."""
        return "contractions of data with data" if self._pattern.decay == "none" else "exponentials of data"

    def anchors_seen(self) -> int:
        """How many operators were looked at as a possible start of the rule."""
        return self._anchors.seen()

    def _fresh(self, name: str) -> str:
        """A site's name under which nothing stands in the file yet: an earlier fuse may have left some."""
        mapped, tried, count = self._model.mapped, name, 1
        while tried in self._taken or (
            self._emitted_before and mapped.find(f"{tried}/{self._pattern.name}".encode()) >= 0
        ):
            count += 1
            tried = f"{name}.{count}"
        return tried

    @cached_property
    def _emitted_before(self) -> bool:
        return self._model.mapped.find(f"/{self._pattern.name}".encode()) >= 0

    def _contracts(self, core: list[int]) -> bool:
        graph, pattern = self._graph, self._pattern
        if any(has_body(self._model, graph, node) for node in core):
            return True
        if pattern.decay == "none":
            # Attention has one contraction in front of its softmax and one behind it.
            return sum(contracts_data(graph, self._kinds, node) for node in core) > 1
        return any(graph.standard[node] in pattern.contractions for node in core)

    def _colour(self, anchors: dict[int, int]) -> list[int]:
        """Colour of each node: the site whose anchors it depends on, `_FREE`, or `_JOINED` where sites meet."""
        graph, kinds, fence = self._graph, self._kinds, self._pattern.fence
        value_colours = [_FREE] * len(graph.value_names)
        colours, starts = [_FREE] * len(graph.op), [_FREE] * len(graph.op)
        # Nodes that read a coloured value, and the anchors: no others are looked at.
        met = bytearray(len(graph.op))
        for node, site in anchors.items():
            starts[node], met[node] = site, 1
        weight, data, captures, inside = int(Kind.WEIGHT), int(Kind.DATA), graph.captures, bool(self._model.place)
        consumers, node = graph.consumers, -1
        while (node := met.find(1, node + 1)) >= 0:
            colour = _FREE
            read = graph.node_inputs[node] if node not in captures else graph.reads(node)
            for value in read:
                seen = value_colours[value]
                if seen != _FREE:
                    colour = seen if colour in (_FREE, seen) else _JOINED
            if colour == _FREE:
                colour = starts[node]
            if colour < 0 or graph.op[node] in fence or (inside and self._is_placed(node)):
                continue
            outputs = graph.node_outputs[node]
            if kinds[outputs[0]] != data or weight in [kinds[value] for value in read]:
                continue
            colours[node] = colour
            for value in outputs:
                value_colours[value] = colour
                for reader in consumers[value]:
                    met[reader] = 1
        return colours

    def _is_placed(self, node: int) -> bool:
        """Whether a body puts a result where its step number says, among those of other steps or layers."""
        graph = self._graph
        if graph.standard[node] not in ("ScatterND", "ScatterElements", "Gather"):
            return False
        return self._kinds[graph.node_inputs[node][1]] == Kind.DATA

    def _roots(self, entries: Sequence[int], known_by: int) -> list[int]:
        """What a core is made of, the gate first: the log decay, or else beta, the root with the fewest numbers."""
        if self._pattern.decay != "none":
            return self._climber.roots(entries, known_by)
        roots = self._climber.undecayed_roots(entries)
        return sorted(roots, key=self._numbers) if all(self._shapes.shape(root) for root in roots) else roots

    def _numbers(self, root: int) -> int:
        shape = self._shapes.shape(root) or ()
        return prod(evaluate(dim, dict.fromkeys(symbols(dim), _ANY)) for dim in shape)

    def _close(
        self, roots: Sequence[int], place: Place, known: frozenset[int]
    ) -> tuple[dict[int, tuple[Dim, ...]], Numbers, Wiring]:
        """The shapes of data that are read between roots and frontier, and the nodes between all these.

        A shape that is not known is no end: what it is the shape of must then lie inside.
        """
        graph, frontier = self._graph, place.frontier
        nodes = self._slices.of(known, roots, frontier, place.core[0])
        reads, _ = graph.reading.take(nodes)
        mentioned: list[int] = reads.tolist()
        read = dict.fromkeys(value for value in mentioned if value in known)
        wiring = self.wirings.of(roots, nodes, frontier)
        contents = self._repeats.contents(wiring, roots, nodes, read)
        unknown = [result for result, found in contents.items() if found is None or None in found.ravel().tolist()]
        if unknown:
            return self._close(roots, place, known.difference(unknown))
        sizes = {result: tuple(found.ravel().tolist()) for result, found in contents.items() if found is not None}
        return sizes, nodes, wiring

    @cached_property
    def _shape_results(self) -> frozenset[int]:
        """Results of Shape nodes on data."""
        return sizes_of_data(self._graph, self._kinds, ("Shape",))


def _names(
    graph: Graph, cores: Sequence[list[int]], taken: Sequence[str], elsewhere: Collection[str]
) -> list[str]:
    """Names from the exporter's scopes where each site has its own, else ``site.N``."""
    scopes = [layer_of(graph, core[0]) for core in cores]
    if all(scopes) and len({*scopes, *taken}) == len(scopes) + len(taken):
        return scopes
    first = len(taken) + sum(name.startswith("site.") for name in elsewhere)
    return [f"site.{index}" for index in range(first, first + len(cores))]


def layer_of(graph: Graph, number: int) -> str:
    """The layer that the exporter's names or metadata put a node in, e.g. ``layers.3``, or ""."""
    node = graph.node(number)
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
