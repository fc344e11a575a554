"""Sizes inside sites that are node for node like one before: the same, without asking for them again.

Shapes follow from operators, attributes, constants and the shapes that a part starts from. So parts that agree in all
these have the same shapes inside, unless something else says what lies there: a declared shape, a value that is read
from elsewhere, an answer with a name of its own (a size that nothing tells is named after its value). Where that may
be, the engine is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from deltafuse.graph import Graph
from deltafuse.ragged import Numbers
from deltafuse.shape_op import Contents
from deltafuse.shapes import Shapes
from deltafuse.wiring import Wiring, Wirings, hashed

Found: TypeAlias = "dict[int, Contents | None]"


#: How many nodes may lie between a part and a value of which only the shape is read.
_FEW = 24


@dataclass(frozen=True)
class _Beside:
    """What lies beside a part and only says a shape.

    Attributes:
        made: the questions whose source a few nodes make of values of the part.
        elsewhere: those whose source comes from elsewhere.
        wiring: of these nodes.
    """

    made: tuple[int, ...]
    elsewhere: tuple[int, ...]
    wiring: Wiring


class Repeats:
    """Knows the contents of the Shape results of parts of one graph."""

    def __init__(self, graph: Graph, shapes: Shapes, wirings: Wirings) -> None:
        self._graph = graph
        self._wirings = wirings
        self._shapes = shapes
        self._known: dict[bytes, list[Contents | None]] = {}
        self._is_declared = np.zeros(len(graph.value_names), np.bool_)
        self._is_declared[list(graph.type_spans)] = True
        self._is_constant = np.zeros(len(graph.value_names), np.bool_)
        self._is_constant[list(graph.initializers)] = True
        self._is_inside = np.zeros(len(graph.value_names), np.bool_)
        self._is_met = np.zeros(len(graph.value_names), np.bool_)

    def contents(self, wiring: Wiring, roots: Sequence[int], nodes: Numbers, results: Iterable[int]) -> Found:
        """What results of Shape nodes hold, which some nodes read.

        Args:
            wiring: of the part.
            roots: values that the part starts from.
            nodes: the part.
            results: what is asked for, in an order that follows from the wiring.
        """
        asked, shapes = list(results), self._shapes
        if self._told_otherwise(wiring, roots, nodes, asked):
            return {result: shapes.contents(result) for result in asked}
        beside = self._beside(wiring, self._sources(asked))
        key = self._key(wiring, beside, roots, asked)
        before = self._known.get(key)
        if before is not None and self._agrees(beside, asked, before):
            return dict(zip(asked, before, strict=True))
        known = _known(shapes)
        found: Found = {result: shapes.contents(result) for result in asked}
        if _known(shapes) == known:
            self._known[key] = list(found.values())
        return found

    def _told_otherwise(self, wiring: Wiring, roots: Sequence[int], nodes: Numbers, asked: Sequence[int]) -> bool:
        """Whether anything but the nodes and what they start from says what lies inside.

        That is declared shapes, names in subgraphs, values of which the engine was told, and what is read from outside.
        """
        graph, is_inside = self._graph, self._is_inside
        written, _ = graph.writing.take(nodes)
        is_inside[written] = True
        met = wiring.values[wiring.firsts]
        outer: list[int] = met[~(is_inside[met] | self._is_constant[met])].tolist()
        told = any(is_inside[value] for value in self._shapes.defined.keys() - set(roots))
        is_inside[written] = False
        return bool(
            told
            or self._is_declared[written].any()
            or not graph.captures.keys().isdisjoint(nodes.tolist())
            or not {0, *roots, *asked}.issuperset(outer)
        )

    def _sources(self, asked: Sequence[int]) -> list[int]:
        """What the results are the shapes of."""
        graph = self._graph
        return [graph.node_inputs[graph.producer[result]][0] for result in asked]

    def _beside(self, wiring: Wiring, sources: Sequence[int]) -> _Beside:
        """Looks at the sources that the part does not mention: a few nodes may make them of what it does mention."""
        is_met = self._is_met
        met = wiring.values[wiring.firsts]
        is_met[met] = True
        missing = [(index, source) for index, source in enumerate(sources) if not is_met[source]]
        made: list[int] = []
        inside: set[int] = set()
        for index, source in missing:
            steps = self._steps(source)
            if steps is not None:
                made.append(index)
                inside.update(steps)
        is_met[met] = False
        ends = [sources[index] for index in made]
        outer = self._wirings.of((), sorted(inside), ends)
        return _Beside(tuple(made), tuple(sorted({index for index, _ in missing} - set(made))), outer)

    def _steps(self, source: int) -> set[int] | None:
        """The nodes that make a value of what is mentioned and of constants, None where it takes more than a few."""
        graph, nodes, stack = self._graph, set[int](), [source]
        while stack:
            value = stack.pop()
            if not value or self._is_met[value] or value in graph.initializers:
                continue
            node = graph.producer[value]
            told = self._is_declared[value] or value in self._shapes.defined
            if node < 0 or told or node in graph.captures or len(nodes) > _FEW:
                return None
            nodes.add(node)
            stack += graph.node_inputs[node]
        return nodes

    def _key(self, wiring: Wiring, beside: _Beside, roots: Sequence[int], asked: Sequence[int]) -> bytes:
        """The same for parts with the same shapes inside: what they are, start from, and ask of which values."""
        shapes, sources = self._shapes, self._sources(asked)
        starts = [f"{shapes.dtype(value)} {shapes.shape(value)}".encode() for value in roots]
        outer = beside.wiring.values[beside.wiring.firsts].tolist()
        places = (wiring.places(values).tobytes() for values in (asked, sources, outer))
        attributes = [self._attributes(result) for result in asked]
        made = np.array(beside.made, np.int32).tobytes()
        return hashed([wiring.key, beside.wiring.key, made, *starts, b"asks", *places, *attributes])

    def _attributes(self, result: int) -> memoryview:
        start, stop = self._graph.attribute_spans.whole(self._graph.producer[result])
        return self._graph.data[start:stop]

    def _agrees(self, beside: _Beside, asked: Sequence[int], before: Sequence[Contents | None]) -> bool:
        """Whether what comes from elsewhere is the same as before."""
        for index in beside.elsewhere:
            found, expected = self._shapes.contents(asked[index]), before[index]
            if found is None or expected is None or found.tolist() != expected.tolist():
                return False
        return True


def _known(shapes: Shapes) -> tuple[int, ...]:
    """How much is known that is not of one value alone: where it stays the same, questions had no effect on others."""
    return (*shapes.names.counts(), *shapes.unions.counts())
