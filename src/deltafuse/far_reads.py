"""Constants that say where data is read along a free axis: far ones act beyond the sizes that are tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import numpy as np
import numpy.typing as npt

from deltafuse.contractions import CONTRACTIONS, summed_axes
from deltafuse.dims import Dim, Expr, bounds, symbols
from deltafuse.scope import Scope
from deltafuse.size_flow import Sizes

#: Farthest place that constants may lead to, one after the other: more tokens than that are tried.
FARTHEST = 512
#: Exporters write such a number for "to the end".
_END = 2**31 - 1
#: Operators that sum up over an axis.
_SUMS = CONTRACTIONS | {"CumSum", "ReduceMean", "ReduceSum", "ReduceSumSquare"}
#: Operators whose attributes say along which axes they read.
_ATTRIBUTED = frozenset({"Gather", "GatherElements", "GatherND", "ScatterElements", "Split"})


@dataclass(frozen=True)
class FarReads:
    """Follows data through one scope.

    Attributes:
        scope: that is searched.
        sizes: what is known of the site.
        reached: data value -> how far constants have moved it along free axes, where they have.
        whole: in a subgraph, data values of the scope around with free axes, and what is made of them.
    """

    scope: Scope
    sizes: Sizes
    reached: dict[int, int] = field(default_factory=dict[int, int])
    whole: set[int] = field(default_factory=set[int])

    def goes_far(self, node: int, data: Sequence[int], moved: int = 0, further: int = 0) -> bool:
        """Whether a node reads data so far away that trials do not show it; notes how far it goes.

        Args:
            node: that data reaches.
            data: positions of its operands that are data.
            moved: by how much constants have moved the positions at which it reads.
            further: the largest of the constants that stand in place of positions.
        """
        graph, scope = self.scope.graph, self.scope
        inputs, outputs = graph.node_inputs[node], graph.node_outputs[node]
        held = [inputs[position] for position in data]
        if scope.shapes is None and self.whole.isdisjoint(held):
            return False
        total = max((self.reached.get(value, 0) for value in held), default=0)
        # What is divided first reads farther than by the number it is divided by: once is enough, twice is too far.
        total += self.offset(node) + further + (2 * moved + 1 if moved else 0)
        if total > FARTHEST or self._is_bounded(node) or self._mixes(node):
            return True
        if total:
            self.reached.update(dict.fromkeys(outputs, total))
            self.sizes.farthest = max(self.sizes.farthest, total)
        if scope.shapes is None:
            # Also what is read for one step may have free axes still.
            self.whole.update(outputs)
        return False

    def offset(self, node: int) -> int:
        """How far constants move what a node reads along free axes, 0 where they do not."""
        return int(min(max(self._offsets(node), default=0), FARTHEST + 1))

    def _is_bounded(self, node: int) -> bool:
        """Whether a size of a result is a bound or a remainder: another for sizes that are not tried.

        What was traced within one chunk pads to it, and takes all tokens out of it again, or as many as it holds: where
        the site is right for no more than these, that is all tokens. What takes a part of all tokens is a bound still.
        """
        shapes, graph = self.scope.shapes, self.scope.graph
        if shapes is None:
            return False
        sizes = [dim for value in graph.node_outputs[node] for dim in shapes.shape(value) or ()]
        found = [dim for dim in sizes if not self._is_steady(dim)]
        if not found or not all(map(self.sizes.is_steady_where_valid, found)):
            return bool(found)
        read = [shapes.shape(value) or () for value in graph.node_inputs[node] if value]
        if graph.standard[node] == "Slice":
            pairs = zip(read[0], sizes, strict=True)
            return any(size in found and not isinstance(dim, int) and dim != size for dim, size in pairs)
        return all(self._is_steady(dim) for shape in read for dim in shape)

    def _is_steady(self, dim: Dim) -> bool:
        return self.sizes.chunk(dim) != 0

    def _mixes(self, node: int) -> bool:
        """Whether a node sums up over sequences: a draw has too few of them to tell every way of doing so."""
        graph = self.scope.graph
        op, inputs = graph.standard[node], graph.node_inputs[node]
        if op not in _SUMS:
            return False
        shapes, attributes = [self._shape(value) for value in inputs], graph.attributes(node)
        if op == "Einsum":
            summed = summed_axes(attributes["equation"].s.decode())
            return any(self._across(shape, axis) for shape, axes in zip(shapes, summed, strict=True) for axis in axes)
        axes = [*attributes["axes"].ints] if "axes" in attributes else []
        if op in CONTRACTIONS:
            batch = any(name in attributes and attributes[name].i for name in ("transBatchA", "transBatchB"))
            # Of batches that change places with rows, any may be summed up.
            axes = [] if batch else [-2 if "transA" in attributes and attributes["transA"].i else -1]
        elif inputs[1:]:
            axes = [_number(item) for item in self._items(inputs[1])]
        return any(self._across(shapes[0], axis) for axis in axes or range(len(shapes[0] or ())))

    def _offsets(self, node: int) -> Iterator[float]:
        graph = self.scope.graph
        op, inputs = graph.standard[node], graph.node_inputs[node]
        shape = self._shape(inputs[0])
        second = inputs[1] if len(inputs) > 1 else 0
        if op == "Slice":
            yield from self._slice(inputs, shape)
        elif op == "Pad":
            yield from self._pad(inputs, shape)
        elif op == "Concat":
            yield self._beside(node)
        else:
            axes = self._indexed(node)
            items = self._items(second) if axes else []
            parts = accumulate(items, _plus) if op == "Split" else items
            yield from (self._place(item, shape, along) for item in parts for along in axes)
            if (items or op == "Trilu") and any(self._across(shape, axis) for axis in axes):
                yield FARTHEST + 1

    def indexes(self, node: int) -> bool:
        """Whether an operand of a node says for each place of its result where along a free axis that is read."""
        return bool(self._indexed(node)) and self.scope.graph.standard[node] not in ("Split", "Trilu")

    def _indexed(self, node: int) -> list[int]:
        """The free axes along which the second operand of a node says where it reads."""
        graph = self.scope.graph
        op, inputs = graph.standard[node], graph.node_inputs[node]
        attributes = graph.attributes(node) if op in _ATTRIBUTED else {}
        shape, second = self._shape(inputs[0]), inputs[1] if len(inputs) > 1 else 0
        depth = () if "batch_dims" in attributes else (self._shape(second) or (None,))[-1:]
        axes = self._axes(op, shape, attributes["axis"].i if "axis" in attributes else 0, depth)
        return [axis for axis in axes if _free(shape, axis)]

    @staticmethod
    def _axes(op: str, shape: Sequence[Dim] | None, axis: int, depth: Sequence[Dim | None]) -> Sequence[int]:
        """The axes along which the second operand of an operator says where it reads.

        Args:
            op: the operator.
            shape: of what it reads.
            axis: its attribute.
            depth: the last size of the second operand, as far as it is known.
        """
        if op in ("Gather", "GatherElements", "ScatterElements", "Split"):
            return (axis,)
        if op in ("GatherND", "ScatterND", "SequenceAt"):
            read = next((size for size in depth if isinstance(size, int) and op != "SequenceAt"), None)
            return range(len(shape or (0,)))[:read]
        return (-1, -2) if op == "Trilu" else ()

    def _slice(self, inputs: Sequence[int], shape: Sequence[Dim] | None) -> Iterator[float]:
        starts, ends, axes, steps = (self._items(value) for value in (*inputs[1:], 0, 0)[:4])
        for index in range(max(len(starts), len(ends))):
            axis = _number(axes[index]) if index < len(axes) else (index if not inputs[3:] else None)
            if not _free(shape, axis):
                continue
            places = [some[index] for some in (starts, ends) if index < len(some)]
            yield from (self._place(bound, shape, axis) for bound in places)
            if index < len(steps) and abs(_number(steps[index])) != 1:
                yield FARTHEST + 1
            if index < len(steps) and _number(steps[index]) < 0:
                # The last comes first.
                yield self._place(-1, shape, axis)
            if self._across(shape, axis) and not all(self._is_end(bound) for bound in places):
                yield FARTHEST + 1

    def _beside(self, node: int) -> float:
        """How many places that are no step's own are put together along a free axis."""
        graph = self.scope.graph
        axis, shapes = graph.attributes(node)["axis"].i, [self._shape(value) for value in graph.node_inputs[node]]
        if self.scope.shapes is None and None in shapes:
            return 0
        if not _free(self._shape(graph.node_outputs[node][0]), axis):
            return 0
        sizes = [shape[axis] for shape in shapes if shape and -len(shape) <= axis < len(shape)]
        fixed = sum(size for size in sizes if isinstance(size, int))
        fixed = fixed if self.scope.shapes is not None or fixed > 1 else 0
        before = [size for size in sizes[:-1] if not isinstance(size, int)]
        return fixed + max((self._place(place, shapes[0], axis) for place in accumulate(before, _plus)), default=0)

    def _pad(self, inputs: Sequence[int], shape: Sequence[Dim] | None) -> Iterator[float]:
        amounts = self._items(inputs[1])
        rank = len(amounts) // 2
        for index, amount in enumerate(amounts):
            axis = index % max(rank, 1)
            if len(inputs) > 3 or _free(shape, axis):
                # What is put behind all moves nothing.
                behind = index >= rank and isinstance(amount, Expr) and bounds(amount)[0] >= 0
                yield 0 if behind else self._place(amount, None if len(inputs) > 3 else shape, axis)
                if len(inputs) < 4 and amount != 0 and self._across(shape, axis):
                    yield FARTHEST + 1

    def _place(self, place: object, shape: Sequence[Dim] | None, axis: int | None) -> float:
        """By how much a place along an axis is apart from a multiple of the tokens; one below zero is from the end."""
        known = shape is not None and axis is not None and -len(shape) <= axis < len(shape)
        size: Dim = shape[axis] if known and shape is not None and axis is not None else 0
        if not isinstance(place, Expr):
            number = _number(place)
            if abs(number) >= _END:
                return 0
            # Where the end is no steady size, the site is right for few tokens.
            steady = number < 0 and isinstance(size, Expr) and self._is_steady(size)
            return abs(number) + (self.sizes.apart(size) if steady else 0)
        tokens = self.sizes.tokens
        if place == size or (known and tokens is not None and tokens.isdisjoint(symbols(size))):
            return 0
        low, high = bounds(place)
        found = self.sizes.apart(place) if high >= 0 else 0
        return max(found, self.sizes.apart(size + place)) if low < 0 else found

    def _across(self, shape: Sequence[Dim] | None, axis: int | None) -> bool:
        """Whether places along a free axis are those of sequences, which have nothing to do with each other."""
        if shape is None or axis is None or not -len(shape) <= axis < len(shape):
            return False
        return not self.sizes.along_tokens(shape[axis])

    def _is_end(self, bound: object) -> bool:
        """Whether a bound of a slice takes whole sequences, wherever a batch ends."""
        if isinstance(bound, Expr):
            return self.sizes.goes_with_batch(bound)
        return isinstance(bound, (int, float)) and (bound == 0 or abs(bound) >= _END)

    def _items(self, value: int) -> list[object]:
        """What a value is known to hold: constants, and sizes, which are looked at elsewhere."""
        contents = self.scope.contents(value) if value else None
        array = self.scope.constant(value) if value and contents is None else contents
        return [] if array is None else cast("npt.NDArray[np.object_]", array).ravel().tolist()

    def _shape(self, value: int) -> Sequence[Dim] | None:
        return None if self.scope.engine is None else self.scope.engine.shape(value)


def _plus(one: object, other: object) -> object:
    return one + other if isinstance(one, (int, Expr)) and isinstance(other, (int, Expr)) else other


def _number(item: object) -> int:
    return int(item) if isinstance(item, (int, float)) else 0


def _free(shape: Sequence[Dim] | None, axis: int | None) -> bool:
    if shape is None or axis is None or not -len(shape) <= axis < len(shape):
        return True
    return not isinstance(shape[axis], int)
