"""Climb from a value towards the graph's inputs, through what a rule's preparation consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltafuse.classes import Kind
from deltafuse.graph import Graph
from deltafuse.shapes import Shapes

#: Operators that move or repeat numbers.
LAYOUT = frozenset({
    "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Tile", "Identity", "Cast", "CastLike", "Pad",
    "Slice", "Gather", "GatherND", "Split", "Concat", "Where", "Trilu", "ScatterND", "ScatterElements", "Dropout", "If",
})  # fmt: skip

#: Operators that a log decay passes on its way to the exponential.
_DECAY = LAYOUT | {"CumSum", "Sub", "Add", "Neg", "Mul", "MatMul", "FusedMatMul", "Einsum", "ReduceSum"}

#: Operators of norms, scales and products of two roots.
_PREPARATION = LAYOUT | {
    "Add", "Sub", "Mul", "Div", "Neg", "Pow", "Sqrt", "Reciprocal", "ReduceSum", "ReduceSumSquare", "ReduceL2",
    "Max", "Clip", "MatMul", "FusedMatMul", "Gemm", "Einsum", "CumSum",
}  # fmt: skip

#: Operators that give a decay its sign and rate.
_SCALING = frozenset({"Neg", "Mul", "Cast", "Identity"})

#: An end that exporters write for "to the end".
_END = 2**31 - 1

#: No value.
_NONE = -1
#: Operators that take a part of one axis.
_PARTS = frozenset({"Slice", "Gather", "Split"})


class DecayClimber:
    """Climbs from exponentials, in one scope.

    Args:
        fence: op_types that end a climb, whatever else holds.
    """

    def __init__(self, graph: Graph, kinds: bytearray, fence: frozenset[str]) -> None:
        self._graph = graph
        self._kinds = kinds
        self._fence = fence
        self._decay_roots: dict[int, tuple[int, ...]] = {}
        self._parted: set[int] = set()

    def decay_roots(self, start: int) -> tuple[int, ...]:
        """The values that an exponent is a linear, causal rearrangement of."""
        known = self._decay_roots
        if start not in known:
            known[start] = tuple(self._climb([start], self._is_decay_step))
        return known[start]

    def part(self, g: int, anchors: Sequence[int]) -> int:
        """The log decay where ``g`` is packed with something else: the only part of it that the anchors read.

        From then on it is where climbs end. Where nothing is packed with it, ``g`` itself.

        Args:
            g: what the anchors' exponents climb to.
            anchors: these exponents.
        """
        passed: set[int] = set()
        self._climb(anchors, self._is_decay_step, seen=passed)
        graph, kinds, value, found = self._graph, self._kinds, g, g
        while True:
            readers = [node for node in graph.consumers[value] if kinds[graph.node_outputs[node][0]] == Kind.DATA]
            results = [result for node in readers for result in graph.node_outputs[node]]
            own = [result for result in results if result in passed]
            if len(own) != 1 or graph.standard[graph.producer[own[0]]] not in LAYOUT:
                break
            value = own[0]
            if len(results) > 1 and all(graph.standard[node] in _PARTS for node in readers):
                found = value
        if found != g:
            self._parted.add(found)
            self._decay_roots.clear()
        return found

    def _climb(
        self, entries: Sequence[int], passes: Callable[[int], bool], stop: int = -1, seen: set[int] | None = None
    ) -> list[int]:
        graph = self._graph
        roots: set[int] = set()
        seen = set() if seen is None else seen
        stack = list(entries)
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            node = graph.producer[value]
            if value == stop or node < 0 or value in self._parted or not passes(node):
                roots.add(value)
                continue
            stack += self._data(node)
        return sorted(roots)

    def _fenced(self, node: int) -> bool:
        graph, kinds = self._graph, self._kinds
        if graph.op[node] in self._fence or (node in graph.captures and graph.standard[node] != "If"):
            return True
        return any(kinds[value] == Kind.WEIGHT for value in graph.reads(node))

    def _is_decay_step(self, node: int) -> bool:
        op = self._graph.standard[node]
        if op not in _DECAY or self._fenced(node):
            return False
        data = self._data(node)
        if op in ("Mul", "MatMul", "FusedMatMul", "Einsum"):
            return len(data) == 1 and not self._makes_decay(node)
        if op == "Neg":
            # A sign that follows a finished decay is a change of the rule.
            return not self._makes_decay(node)
        return not _selects_by_data(op, self._graph.node_inputs[node], self._kinds)

    def _makes_decay(self, node: int) -> bool:
        """Whether a sign or a factor is part of how a decay is made of an activation: a * softplus(x).

        The activation may be written out: then it ends in an operator that no decay passes, such as a choice by data.
        """
        graph = self._graph
        while node >= 0 and not self._fenced(node):
            op, inputs = graph.standard[node], graph.node_inputs[node]
            if op not in _SCALING or not all(self._is_number(value) for value in inputs):
                return _selects_by_data(op, inputs, self._kinds)
            node = graph.producer[self._data(node)[0]]
        return node >= 0

    def _is_number(self, value: int) -> bool:
        """Whether a value is data or one number."""
        graph = self._graph
        if self._kinds[value] == Kind.DATA:
            return True
        node = graph.producer[value]
        head = graph.initializers.get(value) or (graph.constant_head(node) if node >= 0 else None)
        return head is not None and head.elements == 1

    def _data(self, node: int) -> list[int]:
        inputs = self._graph.reads(node)
        if self._graph.standard[node] == "CastLike":
            inputs = inputs[:1]
        return [value for value in inputs if self._kinds[value] == Kind.DATA]


class Climber(DecayClimber):
    """Climbs from whatever enters a rule's core, in the main graph."""

    def __init__(self, graph: Graph, kinds: bytearray, shapes: Shapes, fence: frozenset[str]) -> None:
        super().__init__(graph, kinds, fence)
        self._shapes = shapes

    def roots(self, entries: Sequence[int], g: int) -> list[int]:
        """The values that the entries of a core are prepared from, the log decay `g` first."""
        lengths = frozenset(self._shapes.shape(g) or ())
        found = self._climb(entries, lambda node: self.is_preparation(node, g, lengths), stop=g)
        return [g, *(value for value in found if value != g)]

    def undecayed_roots(self, entries: Sequence[int]) -> list[int]:
        """The same for a rule without decay."""
        lengths = self.parted_lengths(entries)
        return self._climb(entries, lambda node: self.is_preparation(node, _NONE, lengths))

    def parted_lengths(self, entries: Sequence[int]) -> frozenset[object]:
        """Sizes of the inner axes that are taken apart on the way to some entries: tokens and chunks."""
        lengths: set[object] = set()

        def passes(node: int) -> bool:
            graph = self._graph
            if graph.standard[node] in _PARTS:
                shape, axes = self._shapes.shape(graph.node_inputs[node][0]), self._axes(node)
                lengths.update(shape[axis] for axis in axes or () if shape and 0 < axis % len(shape) < len(shape) - 1)
            return graph.standard[node] in _PREPARATION and not self._fenced(node)

        self._climb(entries, passes)
        return frozenset(lengths)

    def is_preparation(self, node: int, g: int, lengths: frozenset[object]) -> bool:
        """Whether a climb goes on through a node.

        Args:
            node: where it has come.
            g: the log decay, -1 where there is none.
            lengths: sizes that an axis of tokens may have.
        """
        op = self._graph.standard[node]
        if op not in _PREPARATION or self._fenced(node) or self._gated(node) or self._squashes(node):
            return False
        if _selects_by_data(op, self._graph.node_inputs[node], self._kinds):
            return False
        if op not in _PARTS or self.decay_roots(self._graph.node_inputs[node][0]) == (g,):
            return True
        return self._parts_time(node, lengths)

    def _gated(self, node: int) -> bool:
        """X * sigmoid(x): an activation, not a product of two roots."""
        graph = self._graph
        if graph.standard[node] != "Mul" or len(graph.node_inputs[node]) != 2:
            return False
        sides = [graph.uncast(value) for value in graph.node_inputs[node]]
        for gate, other in (sides, sides[::-1]):
            source = graph.producer[gate]
            is_sigmoid = source >= 0 and graph.standard[source] == "Sigmoid"
            if is_sigmoid and graph.uncast(graph.node_inputs[source][0]) == other:
                return True
        return False

    def _squashes(self, node: int) -> bool:
        """Whether a quotient is a sigmoid that is written out, or a product with one: x / (1 + exp(y))."""
        graph = self._graph
        if graph.standard[node] not in ("Div", "Reciprocal"):
            return False
        below = graph.producer[graph.uncast(graph.node_inputs[node][-1])]
        if below < 0 or graph.standard[below] != "Add":
            return False
        return any(
            graph.producer[value] >= 0 and graph.standard[graph.producer[value]] == "Exp" for value in self._data(below)
        )

    def _parts_time(self, node: int, lengths: frozenset[object]) -> bool:
        """Whether a Slice, Gather or Split takes parts of a time or chunk axis, not of features, layers or roles."""
        graph = self._graph
        shape = self._shapes.shape(graph.node_inputs[node][0])
        axes = self._axes(node)
        if shape is None or axes is None:
            return False
        for axis in (a % len(shape) for a in axes):
            if shape[axis] == 1:
                continue
            if axis == 0:
                return False
            size, inner = shape[axis], axis < len(shape) - 1
            # Two steps a token are no rule of ours, but are known as what they are.
            double = inner and isinstance(size, int) and size % 2 == 0 and size // 2 in lengths
            if size not in lengths and not double and not (inner and len(shape) >= 4):
                return False
        return True

    def _axes(self, node: int) -> tuple[int, ...] | None:
        graph = self._graph
        if graph.standard[node] in ("Gather", "Split"):
            attribute = graph.attributes(node).get("axis")
            return (attribute.i if attribute is not None else 0,)
        inputs = graph.node_inputs[node]
        read = [self._shapes.contents(value) if value else None for value in inputs[1:]]
        starts, ends, axes, steps = (*read, None, None)[:4]
        if starts is None or ends is None:
            return None
        taken = range(len(starts)) if axes is None else [int(axis) for axis in axes.ravel().tolist()]
        whole = [
            start == 0 and isinstance(end, int) and end >= _END and (steps is None or steps[i] == 1)
            for i, (start, end) in enumerate(zip(starts.ravel().tolist(), ends.ravel().tolist(), strict=True))
        ]
        return tuple(axis for axis, all_of_it in zip(taken, whole, strict=True) if not all_of_it)


def _selects_by_data(op: str, inputs: Sequence[int], kinds: bytearray) -> bool:
    """Whether an operator's choice (condition or index) depends on data: that is never preparation."""
    if op in ("Where", "If"):
        return kinds[inputs[0]] == Kind.DATA
    if op in ("Gather", "GatherND", "ScatterND", "ScatterElements", "Reshape", "Expand", "Tile"):
        return kinds[inputs[1]] == Kind.DATA
    if op in ("Slice", "Pad"):
        return any(kinds[value] == Kind.DATA for value in inputs[1:])
    return False
