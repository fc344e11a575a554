"""Which numbers occur in a constant, however it is made: a mask has two, whatever its shape follows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from deltafuse.constant_pairs import NARROW, holds, reckons
from deltafuse.dtypes import REAL
from deltafuse.scope import Scope
from deltafuse.shape_rules_contents import filling

Numbers = frozenset[float]

#: More different numbers than that are a table, not a mask.
_MOST = 8
#: Operators between a value and the constants that it is made of.
_DEEPEST = 64
_TRUTHS: Numbers = frozenset({0.0, 1.0})
_TRUE_OR_FALSE = frozenset({
    "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Xor", "EyeLike", "IsInf", "IsNaN",
})  # fmt: skip
_MOVES = frozenset({
    "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Tile", "Slice", "Gather",
    "GatherND", "GatherElements", "Split",
})  # fmt: skip
#: Operators whose result has the numbers of some operands, and zeros.
_JOINS = {"Concat": None, "Where": (1, 2), "ScatterND": (0, 2), "ScatterElements": (0, 2), "Pad": (0, 2), "Trilu": (0,)}
_ZEROS = frozenset({"Trilu", "Pad"})
_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul,
}  # fmt: skip


@dataclass(frozen=True)
class ConstantNumbers:
    """The constants of one scope.

    Attributes:
        scope: that they lie in.
    """

    scope: Scope
    _known: dict[int, Numbers | None] = field(default_factory=dict[int, "Numbers | None"])

    def of(self, value: int, depth: int = 0) -> Numbers | None:
        """The numbers that may occur in a value that holds no data; None where they are not known, or many."""
        if value not in self._known:
            found = None if depth > _DEEPEST else self._found(value, depth)
            self._known[value] = None if found is None or len(found) > _MOST else found
        return self._known[value]

    def are_zeros(self, value: int) -> bool:
        """Whether a constant is zero all over."""
        numbers = self.of(value)
        return numbers is not None and numbers <= {0.0}

    def _found(self, value: int, depth: int) -> Numbers | None:
        graph = self.scope.graph
        node = graph.producer[value]
        array = self.scope.constant(value)
        if array is not None:
            return frozenset(distinct(array.astype(np.float64)).tolist()[: _MOST + 1])
        outer = self.scope.outer(value)
        if outer and self.scope.around is not None:
            return ConstantNumbers(self.scope.around).of(outer, depth + 1)
        return None if node < 0 else self._made(node, depth + 1)

    def _made(self, node: int, depth: int) -> Numbers | None:
        graph = self.scope.graph
        op, inputs = graph.standard[node], graph.node_inputs[node]
        if op in _TRUE_OR_FALSE:
            return _TRUTHS
        if op == "ConstantOfShape":
            item = filling(self.scope.model, graph, node)
            return frozenset({float(item)}) if isinstance(item, (int, float)) else None
        if op in _MOVES:
            return self.of(inputs[0], depth)
        if op == "SequenceEmpty":
            return frozenset()
        if op in ("Cast", "CastLike"):
            source = self.of(inputs[0], depth)
            return source if source is not None and source <= _TRUTHS | self._minus(node, source) else None
        if op in _JOINS:
            if reckons(graph.attributes(node).values()):
                return None
            places = _JOINS[op]
            parts = inputs if places is None else [inputs[place] for place in places if place < len(inputs)]
            joined = self._union(parts, depth)
            return joined if joined is None or op not in _ZEROS else joined | {0.0}
        if op == "Neg":
            given = self.of(inputs[0], depth)
            return None if given is None else frozenset(-number for number in given)
        return self._computed(op, node, inputs, depth) if op in _ARITHMETIC else None

    def _computed(self, op: str, node: int, inputs: Sequence[int], depth: int) -> Numbers | None:
        left, right = (self.of(value, depth) for value in inputs)
        if left is None or right is None:
            return None
        found = [_ARITHMETIC[op](*pair) for pair in product(left, right)]
        dtype = self.scope.dtype(self.scope.graph.node_outputs[node][0])
        # What rounds has other numbers in the model than in a proof in double.
        return frozenset(found) if all(holds(kind, found) for kind in ([dtype] if dtype else NARROW)) else None

    def _minus(self, node: int, source: Numbers) -> Numbers:
        """Those of some negative numbers that a type holds, or makes as little as."""
        graph = self.scope.graph
        given = graph.attributes(node).get("to")
        wanted = self.scope.dtype(graph.node_inputs[node][1]) if given is None else given.i
        return frozenset(number for number in source if number in (-1.0, -np.inf)) if wanted in REAL else frozenset()

    def _union(self, values: Iterable[int], depth: int) -> Numbers | None:
        found: set[float] = set()
        for value in values:
            numbers = self.of(value, depth) if value else frozenset[float]()
            if numbers is None:
                return None
            found |= numbers
        return frozenset(found)


def distinct(array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """As `numpy.unique`, whose first call imports all that there is on masked arrays."""
    values = np.sort(array, axis=None)
    nans = np.count_nonzero(np.isnan(values))
    values = values[: len(values) - nans + 1] if nans else values
    return values[np.concatenate([[True], values[1:] != values[:-1]])] if len(values) else values
