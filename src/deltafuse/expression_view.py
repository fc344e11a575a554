"""What a pattern for an ordinary expression may ask of the graph when it proposes sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnx import AttributeProto

from deltafuse.classes import Kind
from deltafuse.dims import Dim
from deltafuse.expressions import FLOATS
from deltafuse.graph import Graph
from deltafuse.shapes import Shapes

#: A value that more values lie behind than this many times the size of a site is not followed further.
_WIDTH = 4


@dataclass(frozen=True)
class Region:
    """A part of the graph with one data value in and one out.

    Attributes:
        source: the value that all data comes from.
        result: the value it gives.
        weights: float values of two and more elements that do not depend on the source, in the order of their readers.
        nodes: that data passes through, ascending.
    """

    source: int
    result: int
    weights: tuple[int, ...]
    nodes: tuple[int, ...]


class View:
    """Read-only view of a graph's main scope. Values and nodes are numbers; value 0 is the absent one.

    Attributes:
        graph: its columns, for what has no method here.
    """

    def __init__(self, graph: Graph, kinds: bytearray, shapes: Shapes) -> None:
        self.graph = graph
        self._kinds = kinds
        self._shapes = shapes
        self._outputs = frozenset(graph.outputs)
        self._inputs = frozenset(graph.inputs)
        self._captured = frozenset(value for values in graph.captures.values() for value in values)

    def op(self, node: int) -> str:
        """The op_type, with its domain in front where that is not ai.onnx."""
        domain = self.graph.domain[node]
        return self.graph.op[node] if domain in ("", "ai.onnx") else f"{domain}.{self.graph.op[node]}"

    def inputs(self, node: int) -> tuple[int, ...]:
        """The values that a node reads; 0 stands for one that is left out."""
        return self.graph.node_inputs[node]

    def outputs(self, node: int) -> tuple[int, ...]:
        """The values that a node writes."""
        return self.graph.node_outputs[node]

    def attributes(self, node: int) -> Mapping[str, AttributeProto]:
        """The attributes of a node by name."""
        return self.graph.attributes(node)

    def producer(self, value: int) -> int:
        """The node that writes a value, -1 where none does."""
        return self.graph.producer[value]

    def consumers(self, value: int) -> tuple[int, ...]:
        """The nodes that read a value, in their subgraphs too."""
        return tuple(self.graph.consumers[value])

    def name(self, value: int) -> str:
        """The name of a value."""
        return self.graph.name(value)

    def shape(self, value: int) -> tuple[Dim, ...] | None:
        """Sizes of a value, None where not even their number is known."""
        return self._shapes.shape(value)

    def dtype(self, value: int) -> int | None:
        """Element type of a value."""
        return self._shapes.dtype(value)

    def is_data(self, value: int) -> bool:
        """Whether a value depends on the numbers in a graph input."""
        return self._kinds[value] == Kind.DATA

    def is_constant(self, value: int) -> bool:
        """Whether a value is the same in every run, and no weight."""
        return self._kinds[value] == Kind.CONSTANT

    def is_scalar(self, value: int) -> bool:
        """Whether a value is known to have one element."""
        shape = self.shape(value)
        return shape is not None and all(size == 1 for size in shape)

    def is_weight(self, value: int) -> bool:
        """Whether a value is a weight, or a float constant of several elements."""
        if self._kinds[value] == Kind.WEIGHT:
            return True
        return self.is_constant(value) and not self.is_scalar(value) and self.dtype(value) in FLOATS

    def is_input(self, value: int) -> bool:
        """Whether a value is given from outside when the model runs, or may be."""
        return value in self._inputs or (self.is_data(value) and self.producer(value) < 0)

    def is_output(self, value: int) -> bool:
        """Whether a value is an output of the graph."""
        return value in self._outputs

    def is_captured(self, value: int) -> bool:
        """Whether the body of a loop or a branch reads a value."""
        return value in self._captured

    def regions(self, anchor: int, operators: Mapping[str, tuple[int, int]]) -> Iterator[Region]:
        """Parts of the graph through an anchor that consist of some operators and have one data value in, one out.

        The furthest result comes first, for each the nearest source first.

        Args:
            anchor: a node that the region contains.
            operators: as `deltafuse.expressions.Expression.operators`.
        """
        limit = sum(most for _, most in operators.values())
        for result in self._ahead(anchor, operators, limit):
            for source in self._behind(result, operators, limit):
                region = self._region(source, result, operators, limit)
                if region is not None and anchor in region.nodes and self._counts(region, operators):
                    yield region

    def _ahead(self, anchor: int, operators: Mapping[str, tuple[int, int]], limit: int) -> list[int]:
        """Values computed from an anchor by these operators, last first."""
        reached = dict.fromkeys(value for value in self.outputs(anchor) if value)
        nodes = {anchor}
        pending = list(reached)
        while pending and len(nodes) <= _WIDTH * limit:
            for node in self.consumers(pending.pop(0)):
                if node in nodes or self.op(node) not in operators:
                    continue
                nodes.add(node)
                fresh = [value for value in self.outputs(node) if value and value not in reached]
                reached.update(dict.fromkeys(fresh))
                pending += fresh
        return sorted(reached, key=self.producer, reverse=True)

    def _behind(self, result: int, operators: Mapping[str, tuple[int, int]], limit: int) -> list[int]:
        """Data values that a result is computed from by these operators, nearest first."""
        reached = {result}
        nodes: set[int] = set()
        pending = [result]
        while pending and len(nodes) <= _WIDTH * limit:
            node = self.producer(pending.pop(0))
            if node < 0 or node in nodes or self.op(node) not in operators:
                continue
            nodes.add(node)
            fresh = [value for value in self.inputs(node) if value not in reached and self.is_data(value)]
            reached.update(fresh)
            pending += fresh
        return sorted(reached - {result}, key=lambda value: (self.producer(value), value), reverse=True)

    def _region(self, source: int, result: int, operators: Mapping[str, tuple[int, int]], limit: int) -> Region | None:
        """What lies between two values; None where other data enters or another operator stands between."""
        seen, nodes, pending = {0, source}, set[int](), [result]
        weights: dict[int, int] = {}
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if self.is_weight(value):
                weights[value] = min(node for node in self.consumers(value) if node in nodes)
            elif not self.is_constant(value):
                node = self.producer(value)
                if not self.is_data(value) or node < 0 or self.op(node) not in operators or len(nodes) >= limit:
                    return None
                nodes.add(node)
                pending += self.inputs(node)
        ordered = sorted(weights, key=lambda value: weights[value])
        return Region(source, result, tuple(ordered), tuple(sorted(nodes)))

    def _counts(self, region: Region, operators: Mapping[str, tuple[int, int]]) -> bool:
        return counts_fit([self.op(node) for node in region.nodes], operators)


def counts_fit(ops: list[str], operators: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a site has as many of each operator as its pattern says."""
    within = all(least <= ops.count(op) <= most for op, (least, most) in operators.items())
    return within and all(op in operators for op in ops)
