"""Where the search for a rule starts: exponentials of one log decay, or contractions of data with data."""

from __future__ import annotations

from collections.abc import Collection

from deltafuse.bodies import LOOPS, bodies, is_call
from deltafuse.classes import Kind
from deltafuse.climb import Climber, DecayClimber
from deltafuse.graph import Graph
from deltafuse.patterns import Pattern
from deltafuse.wire import Model

_NONE = -1
#: Contractions that multiply their operands themselves; a ReduceSum adds up what a Mul made.
_PRODUCTS = frozenset({"MatMul", "Einsum", "FusedMatMul", "Gemm"})


class DecayAnchors:
    """Exponentials of a log decay, outside activations; what a site is known by is that log decay."""

    def __init__(self, model: Model, kinds: bytearray, climber: Climber, pattern: Pattern) -> None:
        self._model = model
        self._kinds = kinds
        self._climber = climber
        self._pattern = pattern

    def seen(self) -> int:
        """How many operators were looked at."""
        kinds, graph = self._kinds, self._model.graph
        return sum(
            kinds[graph.node_outputs[node][0]] == Kind.DATA
            for node in graph.nodes_with(self._pattern.anchors)
            if graph.standard[node]
        )

    def find(self) -> dict[int, int]:
        """Anchor -> the one value its exponent is made of."""
        graph = self._model.graph
        anchors: dict[int, int] = {}
        likely = self._pattern.anchors | LOOPS | _called(self._model)
        for node in graph.nodes_with(likely):
            if graph.standard[node] in LOOPS or is_call(self._model, graph, node):
                roots = self._inner(self._model, graph, self._kinds, node)
            elif self._is_anchor(graph, self._kinds, node):
                roots = set(self._climber.decay_roots(graph.node_inputs[node][0]))
            else:
                continue
            if len(roots) == 1:
                anchors[node] = roots.pop()
        return self._unpacked(anchors)

    def _unpacked(self, anchors: dict[int, int]) -> dict[int, int]:
        """The anchors with the part of a packed value that is the log decay, where it is one part."""
        graph = self._model.graph
        exponents: dict[int, list[int]] = {}
        for node, g in anchors.items():
            read = graph.node_inputs[node][0] if graph.standard[node] in self._pattern.anchors else g
            exponents.setdefault(g, []).append(read)
        parts = {g: self._climber.part(g, read) for g, read in exponents.items() if g not in read}
        return {node: parts.get(g, g) for node, g in anchors.items()}

    def _is_anchor(self, graph: Graph, kinds: bytearray, node: int) -> bool:
        if graph.standard[node] not in self._pattern.anchors or kinds[graph.node_outputs[node][0]] != Kind.DATA:
            return False
        return not _activation(graph, kinds, node)

    def _inner(self, model: Model, graph: Graph, kinds: bytearray, node: int) -> set[int]:
        """The values around a loop or call that the anchors in its body climb to."""
        found: set[int] = set()
        for body in bodies(model, graph, kinds, node):
            climber = DecayClimber(body.graph, body.kinds, self._pattern.fence)
            for inner in range(len(body.graph.op)):
                if body.graph.standard[inner] in LOOPS or is_call(body.model, body.graph, inner):
                    reached = self._inner(body.model, body.graph, body.kinds, inner)
                elif self._is_anchor(body.graph, body.kinds, inner):
                    reached = set(climber.decay_roots(body.graph.node_inputs[inner][0]))
                else:
                    continue
                reached = {root for value in reached for root in climber.decay_roots(value)}
                found.update(body.outside(graph, value) for value in reached)
        found.discard(0)
        if graph is not self._model.graph:
            return found
        return {root for value in found for root in self._climber.decay_roots(value)}


class ContractionAnchors:
    """Contractions of data with data; what a site is known by is the first one that the others hang together with.

    Args:
        taken: nodes of sites that other rules were looked for in.
    """

    def __init__(
        self, model: Model, kinds: bytearray, climber: Climber, pattern: Pattern, taken: Collection[int]
    ) -> None:
        self._model = model
        self._kinds = kinds
        self._climber = climber
        self._pattern = pattern
        self._taken = taken

    def seen(self) -> int:
        """How many operators were looked at."""
        return len(self._nodes())

    def find(self) -> dict[int, int]:
        """Anchor -> number of the group of anchors that it hangs together with."""
        anchors, graph = self._nodes(), self._model.graph
        entries = [_data(graph, self._kinds, node) for node in anchors]
        lengths = self._climber.parted_lengths([value for values in entries for value in values])
        groups = _Groups(len(anchors))
        owner = {value: index for index, node in enumerate(anchors) for value in graph.node_outputs[node]}
        for index, stack in enumerate(entries):
            while stack:
                value = stack.pop()
                if value in owner:
                    groups.join(index, owner[value])
                    continue
                node = graph.producer[value]
                if node >= 0 and self._climber.is_preparation(node, _NONE, lengths):
                    owner[value] = index
                    stack += _data(graph, self._kinds, node)
        return {node: groups.of(index) for index, node in enumerate(anchors)}

    def _nodes(self) -> list[int]:
        graph = self._model.graph
        likely = self._pattern.anchors | LOOPS | _called(self._model)
        return [
            node
            for node in graph.nodes_with(likely)
            if node not in self._taken and self._is_anchor(self._model, graph, self._kinds, node)
        ]

    def _is_anchor(self, model: Model, graph: Graph, kinds: bytearray, node: int) -> bool:
        op = graph.standard[node]
        if op in LOOPS or is_call(model, graph, node):
            return any(
                self._is_anchor(body.model, body.graph, body.kinds, inner)
                for body in bodies(model, graph, kinds, node)
                for inner in range(len(body.graph.op))
            )
        return op in self._pattern.anchors and contracts_data(graph, kinds, node)


def _called(model: Model) -> set[str]:
    """op_types by which a model calls its own functions."""
    return {op for _, op in model.local_functions} if model.functions else set()


def contracts_data(graph: Graph, kinds: bytearray, node: int) -> bool:
    """Whether a node contracts data with other data."""
    op = graph.standard[node]
    if op == "ReduceSum":
        node = graph.producer[graph.node_inputs[node][0]]
        if node < 0 or graph.standard[node] != "Mul":
            return False
    elif op not in _PRODUCTS:
        return False
    return len(set(_data(graph, kinds, node))) > 1


def _data(graph: Graph, kinds: bytearray, node: int) -> list[int]:
    return [value for value in graph.reads(node) if kinds[value] == Kind.DATA]


class _Groups:
    """Disjoint sets of indices."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def of(self, index: int) -> int:
        """What all members of an index's set have in common."""
        while self._parent[index] != index:
            index = self._parent[index]
        return index

    def join(self, one: int, other: int) -> None:
        """Makes two sets one."""
        first, second = sorted((self.of(one), self.of(other)))
        self._parent[second] = first


def _activation(graph: Graph, kinds: bytearray, node: int) -> bool:
    """An exponential inside a written-out softplus or sigmoid: Exp, Add(1), then Log, Reciprocal or Div."""
    for add in graph.consumers[graph.node_outputs[node][0]]:
        if graph.standard[add] != "Add" or not any(kinds[v] == Kind.CONSTANT for v in graph.node_inputs[add]):
            continue
        after = graph.consumers[graph.node_outputs[add][0]]
        if any(graph.standard[reader] in ("Log", "Reciprocal", "Div") for reader in after):
            return True
    return False
