"""Constants that say where data is read along a free axis: far ones act beyond the sizes that are tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from deltafuse.dims import Dim
from deltafuse.scope import Scope
from deltafuse.size_flow import Sizes

#: Farthest place that constants may lead to, one after the other: more tokens than that are tried.
FARTHEST = 512
#: Exporters write such a number for "to the end".
_END = 2**31 - 1


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

    def goes_far(self, node: int, data: Sequence[int]) -> bool:
        """Whether a node reads data so far away that trials do not show it; notes how far it goes.

        Args:
            node: that data reaches.
            data: positions of its operands that are data.
        """
        graph, scope = self.scope.graph, self.scope
        inputs, outputs = graph.node_inputs[node], graph.node_outputs[node]
        held = [inputs[position] for position in data]
        if scope.shapes is None and self.whole.isdisjoint(held):
            return False
        total = max((self.reached.get(value, 0) for value in held), default=0)
        moved = [abs(number) for number in self._offsets(node) if abs(number) < _END]
        total += max(moved, default=0)
        if total > FARTHEST or self._is_bounded(outputs):
            return True
        if total:
            self.reached.update(dict.fromkeys(outputs, total))
        if scope.shapes is None:
            # Also what is read for one step may have free axes still.
            self.whole.update(outputs)
        return False

    def _is_bounded(self, outputs: Sequence[int]) -> bool:
        """Whether a size of a result is a bound or a remainder: another for sizes that are not tried."""
        shapes = self.scope.shapes
        if shapes is None:
            return False
        return any(self.sizes.chunk(dim) == 0 for value in outputs for dim in shapes.shape(value) or ())

    def _offsets(self, node: int) -> Iterator[int]:
        graph = self.scope.graph
        op, inputs = graph.standard[node], graph.node_inputs[node]
        attributes = graph.attributes(node) if op in ("Gather", "GatherElements", "ScatterElements", "Split") else {}
        axis = attributes["axis"].i if "axis" in attributes else 0
        shape = self._shape(inputs[0])
        second = inputs[1] if len(inputs) > 1 else 0
        if op == "Slice":
            yield from self._slice(inputs, shape)
        elif op == "Pad":
            yield from self._pad(inputs, shape)
        elif any(_free(shape, axis) for axis in self._axes(op, shape, axis)):
            yield from self._numbers(second)

    @staticmethod
    def _axes(op: str, shape: Sequence[Dim] | None, axis: int) -> Sequence[int]:
        """The axes along which the second operand of an operator says where it reads."""
        if op in ("Gather", "GatherElements", "ScatterElements", "Split"):
            return (axis,)
        if op in ("GatherND", "ScatterND", "SequenceAt"):
            return range(len(shape or (0,)))
        return (-1, -2) if op == "Trilu" else ()

    def _slice(self, inputs: Sequence[int], shape: Sequence[Dim] | None) -> Iterator[int]:
        starts, ends, axes, steps = (list(self._numbers(value)) for value in (*inputs[1:], 0, 0)[:4])
        for index in range(max(len(starts), len(ends))):
            axis = int(axes[index]) if index < len(axes) else (index if not inputs[3:] else None)
            if _free(shape, axis):
                yield from (some[index] for some in (starts, ends) if index < len(some))
                if index < len(steps) and abs(steps[index]) != 1:
                    yield FARTHEST + 1

    def _pad(self, inputs: Sequence[int], shape: Sequence[Dim] | None) -> Iterator[int]:
        amounts = list(self._numbers(inputs[1]))
        rank = len(amounts) // 2
        for index, amount in enumerate(amounts):
            if len(inputs) > 3 or _free(shape, index % max(rank, 1)):
                yield amount

    def _numbers(self, value: int) -> Iterator[int]:
        """The constants in a value; those that sizes say are looked at elsewhere."""
        if not value:
            return
        contents = self.scope.contents(value)
        array = self.scope.constant(value) if contents is None else contents
        if array is not None:
            items = cast("list[object]", cast("npt.NDArray[np.object_]", array).ravel().tolist())
            yield from (int(item) if isinstance(item, (int, float)) else 0 for item in items)

    def _shape(self, value: int) -> Sequence[Dim] | None:
        return None if self.scope.shapes is None else self.scope.shapes.shape(value)


def _free(shape: Sequence[Dim] | None, axis: int | None) -> bool:
    if shape is None or axis is None or not -len(shape) <= axis < len(shape):
        return True
    return not isinstance(shape[axis], int)
