"""What is known of values that sizes and positions are made into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from onnx import TensorProto

from deltafuse.dims import Dim, bounds
from deltafuse.scope import Scope
from deltafuse.shape_rules_contents import filling
from deltafuse.size_flow import FARTHEST, NEAREST, Flow, FlowKind, Sizes

#: Element types that hold sizes and positions as they are, and the largest factor of a size that they hold with it.
WIDE: Mapping[int, int] = {
    TensorProto.INT64: 1 << 32, TensorProto.INT32: 1 << 12, TensorProto.FLOAT: 1, TensorProto.DOUBLE: 1 << 20,
}  # fmt: skip
WHOLE: frozenset[int] = frozenset({TensorProto.INT64, TensorProto.INT32})
#: Operators whose result has the numbers of their first operand.
_SPREADS = frozenset({
    "Expand", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Tile", "Identity", "Slice", "Gather", "Flatten", "Cast",
})  # fmt: skip
#: Constants that a single position may be compared with: the ends of an axis.
ENDS = frozenset({-1.0, 0.0, 1.0})


@dataclass(frozen=True)
class SizedValues:
    """The values of one scope.

    Attributes:
        scope: that is searched.
        flows: kinds of the values seen so far; what is not among them is the same for all sizes.
        sizes: what is known of the site.
    """

    scope: Scope
    flows: dict[int, Flow]
    sizes: Sizes

    def lays_out(self, value: int) -> bool:
        """Whether a value may say how data is laid out, or how often something is done."""
        flow = self.flows.get(value)
        if flow is None or flow.kind in (FlowKind.PLACE, FlowKind.SPAN, FlowKind.INDEX, FlowKind.FLAT, FlowKind.TABLE):
            return True
        return flow.kind == FlowKind.SIZE and self._is_tame(value)

    def _is_tame(self, value: int) -> bool:
        contents = self.numbers(value)
        if contents is None:
            # Inside a body: made of what is, by whole numbers only.
            return self.scope.shapes is None
        return self.rounds_to({self.sizes.chunk(item) for item in contents})

    def rounds_to(self, chunks: set[int]) -> bool:
        """Notes chunks that sizes are rounded up to; whether one is all there is."""
        self.sizes.chunks |= chunks - {0, 1}
        return 0 not in chunks and len(self.sizes.chunks) < 2

    def numbers(self, value: int) -> list[Dim] | None:
        """The sizes that a value holds, None where they are not known or no whole numbers."""
        contents = self.scope.contents(value)
        items: list[Any] = [] if contents is None else contents.ravel().tolist()
        if contents is None or any(item is None or isinstance(item, float) for item in items):
            return None
        return cast("list[Dim]", items)

    def is_size(self, value: int) -> bool:
        """Whether a value is known to be made of free sizes."""
        return value in self.flows and self.flows[value].kind == FlowKind.SIZE

    def holds(self, value: int, contents: Sequence[Dim]) -> bool:
        """Whether the type of a value holds the sizes in it, whatever they are."""
        most = WIDE.get(self.scope.dtype(value) or 0, 0)
        if most == 0:
            return all(isinstance(item, int) for item in contents) and self.scope.dtype(value) == TensorProto.BOOL
        return all(isinstance(item, int) or all(abs(f) <= most for m, f in item.terms if m) for item in contents)

    def is_table(self, value: int) -> bool:
        """Whether a constant may have different numbers in it: what is read of it then depends on where one looks."""
        array = self.scope.constant(value)
        return array is None or bool((array != array.ravel()[:1]).any())

    def reach_of(self, value: int) -> int | None:
        """Largest absolute number in a constant, spread out or not; 0 for a size; None: not known, or too large."""
        graph, flow = self.scope.graph, self.flows.get(value)
        if flow is not None and flow.kind not in (FlowKind.FLAT, FlowKind.TABLE):
            return 0
        while flow is not None and (node := graph.producer[value]) >= 0 and graph.standard[node] in _SPREADS:
            value = graph.node_inputs[node][0]
        node = graph.producer[value]
        if node >= 0 and graph.standard[node] == "ConstantOfShape":
            item = filling(self.scope.model, graph, node)
            return int(np.ceil(abs(item))) if isinstance(item, (int, float)) and abs(item) <= FARTHEST else None
        contents = self.numbers(value)
        array = self.scope.constant(value) if contents is None else np.array(contents, np.float64)
        most = None if array is None or array.size == 0 else float(np.abs(array).max())
        return None if most is None or not most <= FARTHEST else int(np.ceil(most))

    def is_along_tokens(self, value: int) -> bool:
        """Whether a size, as far as it is known, is made of those of tokens alone."""
        return all(map(self.sizes.along_tokens, self.numbers(value) or ()))

    def moved_by(self, value: int) -> float:
        """By how much constants have moved a value; for a size, how far apart it is from multiples of the tokens."""
        moved = self.flows[value].moved if value in self.flows else 0
        if not self.is_size(value):
            return moved
        return max(map(self.sizes.apart, self.numbers(value) or ()), default=0) or moved

    def moves_inside(self, value: int) -> float:
        """`moved_by` for a size that a body takes from here; what a last chunk lacks counts where it is laid out."""
        sizes = self.numbers(value)
        if sizes is None:
            return self.moved_by(value)
        far = (size for size in sizes if not (bounds(size)[0] >= 0 and bounds(size)[1] < self.sizes.chunk(size)))
        return max(map(self.sizes.apart, far), default=0)

    def is_plain(self, value: int) -> bool:
        """Whether a size is one up to one more or less: a position that is compared with it is at an end."""
        return self.numbers(value) is not None and self._is_tame(value) and self.moved_by(value) <= NEAREST
