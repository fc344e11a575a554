"""The bodies of If, Loop and Scan as models of their own, for all that is done with a main graph.

Byte ranges stay those of the file, so that edits of a body are edits of the file. What a body takes from the graph
around it is told in two ways: constants, weights and arithmetic on sizes come along as nodes and initializers of the
graph around, which are read and never changed; all other values are inputs, with the types and sizes known outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from deltafuse.bodies import CONTROL, body_attributes
from deltafuse.classes import Kind, classify, classify_scope
from deltafuse.graph import Graph
from deltafuse.ordering import in_order, is_sorted
from deltafuse.protobuf import LENGTH, fields
from deltafuse.reasons import TEXTS, Reason
from deltafuse.scanner import Scanner
from deltafuse.shape_bodies import engines
from deltafuse.shapes import Shapes
from deltafuse.subgraphs import free_names
from deltafuse.tensors import TensorHead
from deltafuse.wire import Model, Part

__all__ = ["FUSED", "Enclosed", "enter", "every", "fused_bodies", "held_bodies", "mentions"]

TEXTS["body-malformed"] = (
    "what may be a delta rule lies inside {node} ({op}), whose body cannot be looked at on its own ({fault}); "
    "export the model again, or move the rule out of the body"
)

#: What a body with a fused node mentions.
FUSED = ("GatedDelta", "LinearAttention", "CausalConvWithState")

@dataclass(frozen=True)
class Enclosed:
    """A scope with what is known of its values: the main graph, or a body.

    Attributes:
        model: the file with the scope's graph in place of the main one. `model.place` tells which body it is.
        around: the scope that the body lies in, None for the main graph.
        node: the node of that which holds the body, -1 for the main graph.
        kinds: of its values, see `deltafuse.classes`.
        shapes: its engine.
    """

    model: Model
    around: Enclosed | None
    node: int
    kinds: bytearray
    shapes: Shapes

    @classmethod
    def main(cls, model: Model) -> Enclosed:
        """The main graph."""
        return cls(model, None, -1, classify(model), Shapes(model))


def every(scope: Enclosed, wanted: Callable[[Enclosed, int], bool]) -> Iterator[Enclosed | Reason]:
    """The bodies of wanted nodes of a scope, and the bodies of wanted nodes in these; or why they cannot be entered.

    Args:
        scope: where to start; it is not among what is found.
        wanted: tells whether the bodies of a node are to be entered.
    """
    for node in held_bodies(scope.model.graph):
        if not wanted(scope, node):
            continue
        found = enter(scope, node)
        if isinstance(found, Reason):
            yield found
            continue
        for body in found:
            yield body
            yield from every(body, wanted)


def mentions(model: Model, node: int, words: Iterable[str]) -> bool:
    """Whether any of some words stands in a node or in its bodies: a quick look in front of a thorough one."""
    return any(model.mapped.find(word.encode(), *model.graph.spans[node]) >= 0 for word in words)


def fused_bodies(model: Model) -> Iterator[Enclosed | Reason]:
    """The bodies of a file that may hold fused nodes, see `every`."""
    if any(mentions(model, node, FUSED) for node in held_bodies(model.graph)):
        main = Enclosed.main(in_order(model)[0])
        yield from every(main, lambda around, node: mentions(around.model, node, FUSED))


def held_bodies(graph: Graph) -> list[int]:
    """The nodes of a scope itself that hold the body of an If, Loop or Scan."""
    return [node for node in graph.nodes_with(CONTROL) if graph.standard[node] in CONTROL and node >= graph.outer]


def enter(around: Enclosed, node: int) -> tuple[Enclosed, ...] | Reason:
    """The bodies of an If, Loop or Scan.

    Args:
        around: the scope that the node is part of, in topological order.
        node: in its graph.

    Returns:
        One for each body, in the file's order; ``body-malformed`` where one cannot be taken for itself.
    """
    found: list[Enclosed] = []
    for name, span in body_attributes(around.model.graph, node):
        body = _Reader(around, node, name, span).read()
        if isinstance(body, Reason):
            return body
        found.append(body)
    return tuple(found)


class _Reader:
    """Reads one body."""

    def __init__(self, around: Enclosed, node: int, name: str, span: tuple[int, int]) -> None:
        self._around = around
        self._graph = around.model.graph
        self._node = node
        self._name = name
        self._parts = tuple(
            Part(field, start, end)
            for number, wire, _, start, end, field in fields(around.model.data, *span)
            if number == 6 and wire == LENGTH
        )

    def read(self) -> Enclosed | Reason:
        around = self._around.model
        nodes, heads, values = self._taken()
        scanner = Scanner(around.data)
        for node in nodes:
            scanner.graph(*self._graph.spans[node])
        for part in self._parts:
            scanner.graph(part.start, part.end)
        for head in heads:
            scanner.add_constant(head)
        graph = scanner.finish()
        graph.outer = len(nodes)
        graph.captured = tuple(value for name in values if (value := graph.find(name)) is not None)
        # A default of an input would be no constant.
        given = [d.value for d in scanner.declarations if d.number == 11 and d.value in graph.initializers]
        twice = graph.name(given[0]) if given else _given_twice(graph, scanner.constants)
        fault = self._fault(graph, twice)
        if fault:
            args = {"node": self._graph.label(self._node), "op": self._graph.op[self._node], "fault": fault}
            return Reason("body-malformed", args)
        graph.inputs = [*graph.inputs, *graph.captured]
        model = replace(
            around,
            graph=graph,
            graph_parts=self._parts,
            declarations=tuple(scanner.declarations),
            constants=tuple(scanner.constants),
            place="/".join(filter(None, (around.place, self._graph.label(self._node), self._name))),
        )
        if model.functions:
            # Decoded once for all scopes of a file.
            vars(model)["local_functions"] = around.local_functions
        return Enclosed(model, self._around, self._node, self._kinds(model), self._shapes(model))

    def _kinds(self, model: Model) -> bytearray:
        """Kinds of its values: all that it is given is data, but what weights and step numbers make are weights.

        The weights of layer i in a loop over layers lie in one tensor as a rule, or are scanned. A step number itself
        is data: a rule that changes with it is none.
        """
        graph, outer = model.graph, self._around.kinds
        given = dict.fromkeys(graph.inputs, Kind.DATA)
        kinds = classify_scope(model, graph, given)
        numbers: dict[int, Kind] = {}
        if self._graph.standard[self._node] == "Loop":
            numbers = {graph.inputs[0]: Kind.SHAPE}
        elif self._graph.standard[self._node] == "Scan":
            sources = zip(graph.inputs, self._graph.node_inputs[self._node], strict=False)
            states = len(self._graph.node_inputs[self._node]) - self._scanned()
            scanned = [*sources][states:]
            numbers = {value: Kind.WEIGHT for value, source in scanned if outer[source] == Kind.WEIGHT}
        if numbers:
            stepped = classify_scope(model, graph, given | numbers)
            for value, kind in enumerate(stepped):
                if kind == Kind.WEIGHT:
                    kinds[value] = kind
        return kinds

    def _scanned(self) -> int:
        attribute = self._graph.attributes(self._node).get("num_scan_inputs")
        return 0 if attribute is None else attribute.i

    def _taken(self) -> tuple[list[int], list[TensorHead], list[str]]:
        """What the body takes from around: nodes, constants, and the names of all other values."""
        graph, kinds = self._graph, self._around.kinds
        nodes: set[int] = set()
        heads: dict[int, TensorHead] = {}
        values: dict[int, None] = {}
        names = free_names(graph.data, [(part.start, part.end) for part in self._parts])
        stack = [value for name in names if (value := graph.find(name.decode()))]
        seen = {0}
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            writer = graph.producer[value]
            if kinds[value] in (Kind.DATA, 0) or (writer < 0 and value not in graph.initializers):
                values[value] = None
            elif writer < 0:
                heads[value] = graph.initializers[value]
            else:
                nodes.add(writer)
                stack += graph.reads(writer)
        return sorted(nodes), list(heads.values()), [graph.name(value) for value in sorted(values)]

    def _fault(self, graph: Graph, twice: str) -> str:
        """Why the body cannot be taken for itself, with what to do; "" where it can."""
        if twice:
            return f"{twice!r} is given more than once, or outside too; give it another name inside"
        if not is_sorted(graph):
            return "its nodes are out of order; sort them, as the standard asks"
        ends = graph.spans.ends
        if len(ends) > graph.outer and ends[-1] == self._parts[-1].end:
            # Nothing could be put behind its last node that is not behind the node around it too.
            return "a node is the last thing in it; save the file again with onnx.save, which writes nodes first"
        return ""

    def _shapes(self, model: Model) -> Shapes:
        """What is known of its inputs; what runs inside tells nothing of what is outside."""
        outer, graph = self._around.shapes, model.graph
        engine = next(engines(outer, self._node))
        shapes = Shapes(model)
        shapes.names = outer.names.copy()
        shapes.unions = outer.unions.copy(shapes.names.rank)
        for value in graph.inputs:
            if value in graph.captured:
                source = self._graph.find(graph.name(value)) or 0
                shapes.define(value, outer.shape(source), outer.dtype(source), outer.contents(source))
                continue
            declared = shapes.shape(value), shapes.dtype(value)
            inside = None if engine is None else engine.graph.find(graph.name(value))
            if engine is not None and inside is not None:
                found, dtype = engine.known_shape(inside), engine.known_dtype(inside) or declared[1]
                shape = declared[0] if found is None else found
                shapes.names.add_inputs(shape or ())
                shapes.define(value, shape, dtype)
        return shapes


def _given_twice(graph: Graph, constants: Iterable[TensorHead]) -> str:
    """A name that two nodes, inputs or constants give, "" where each has one source."""
    sources = np.bincount(graph.writing.flat, minlength=len(graph.value_names))
    named = [graph.find(head.name) or 0 for head in constants]
    np.add.at(sources, np.array([*graph.inputs, *graph.captured, *named], np.int64), 1)
    sources[0] = 1
    twice = np.flatnonzero(sources > 1)
    return graph.name(int(twice[0])) if len(twice) else ""
