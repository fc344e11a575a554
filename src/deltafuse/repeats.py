"""Sizes inside sites that are node for node like one before: the same, without asking for them again.

Shapes follow from operators, attributes, constants and the shapes that a part starts from. So parts that agree in all
these have the same shapes inside, unless something else says what lies there: a declared shape, a value that is read
from elsewhere, an answer with a name of its own (a size that nothing tells is named after its value). Where that may
be, the engine is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from deltafuse.graph import Graph
from deltafuse.shape_op import Contents
from deltafuse.shapes import Shapes
from deltafuse.wiring import Wiring, hashed

Found: TypeAlias = "dict[int, Contents | None]"


class Repeats:
    """Knows the contents of the Shape results of parts of one graph."""

    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        self._graph = graph
        self._shapes = shapes
        self._known: dict[bytes, list[Contents | None]] = {}
        self._is_declared = np.zeros(len(graph.value_names), np.bool_)
        self._is_declared[list(graph.type_spans)] = True

    def contents(self, wiring: Wiring, roots: Sequence[int], nodes: Sequence[int], results: Iterable[int]) -> Found:
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
        key = self._key(wiring, roots, asked)
        before = self._known.get(key)
        if before is not None and self._agrees(wiring, asked, before):
            return dict(zip(asked, before, strict=True))
        known = _known(shapes)
        found: Found = {result: shapes.contents(result) for result in asked}
        if _known(shapes) == known:
            self._known[key] = list(found.values())
        return found

    def _told_otherwise(self, wiring: Wiring, roots: Sequence[int], nodes: Sequence[int], asked: Sequence[int]) -> bool:
        """Whether anything but the nodes and what they start from says what lies inside.

        That is declared shapes, names in subgraphs, values of which the engine was told, and what is read from outside.
        """
        graph = self._graph
        written, _ = graph.writing.take(np.array(nodes, np.int32))
        inside: set[int] = set(written.tolist())
        read = set(wiring.places) - inside - graph.initializers.keys()
        return bool(
            self._is_declared[written].any()
            or not graph.captures.keys().isdisjoint(nodes)
            or not (self._shapes.defined.keys() - set(roots)).isdisjoint(inside)
            or not read <= {0, *roots, *asked}
        )

    def _key(self, wiring: Wiring, roots: Sequence[int], asked: Sequence[int]) -> bytes:
        """The same for parts with the same shapes inside: what they are, start from, and ask of which values."""
        graph, shapes, places = self._graph, self._shapes, wiring.places
        starts = [f"{shapes.dtype(value)} {shapes.shape(value)}".encode() for value in roots]
        questions: list[bytes] = []
        for result in asked:
            node = graph.producer[result]
            source = places.get(graph.node_inputs[node][0], -1)
            start, stop = graph.attribute_spans.whole(node)
            questions.append(b"%d %d" % (places[result], source) + graph.data[start:stop])
        return hashed([wiring.key, *starts, b"asks", *questions])

    def _agrees(self, wiring: Wiring, asked: Sequence[int], before: Sequence[Contents | None]) -> bool:
        """Whether what comes from outside of the part is the same as before."""
        graph = self._graph
        for result, expected in zip(asked, before, strict=True):
            if graph.node_inputs[graph.producer[result]][0] not in wiring.places:
                found = self._shapes.contents(result)
                if found is None or expected is None or found.tolist() != expected.tolist():
                    return False
        return True


def _known(shapes: Shapes) -> tuple[int, ...]:
    """How much is known that is not of one value alone: where it stays the same, questions had no effect on others."""
    return (*shapes.names.counts(), *shapes.unions.counts())
