"""One scope of a model, main graph or subgraph, and what is known of its values."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from deltafuse.bodies import Body
from deltafuse.classes import Kind
from deltafuse.graph import Graph
from deltafuse.reasons import Reason
from deltafuse.shape_op import Engine
from deltafuse.shapes import Shapes
from deltafuse.tensors import read_tensor
from deltafuse.wire import Model

SHAPES = frozenset({"Shape", "Size"})
#: Operators whose result has another type than their first operand.
_RETYPING = frozenset({
    "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN",
    "IsInf", "ArgMax", "ArgMin", "NonZero", "If", "Loop", "Scan", "Where",
})  # fmt: skip
#: Operators whose result has a shape that follows from those of their operands, not from the numbers in them.
_SHAPED_AS = frozenset({
    "Add", "Sub", "Mul", "Div", "Neg", "Mod", "Min", "Max", "Equal", "Less", "Greater", "Not", "And", "Or", "Where",
    "Cast", "Identity", "Unsqueeze", "Squeeze", "Concat", "Gather", "Transpose", "ScatterND",
})  # fmt: skip
#: Operators between a shape and what it follows from.
_DEEPEST = 64


@dataclass(frozen=True)
class Scope:
    """One scope that is searched.

    Attributes:
        model: whose file it is part of.
        shapes: knows the types of the main graph's values; None in a subgraph.
        around, body: the scope that a subgraph lies in, and what it takes from there.
        inside: what data flow tells of the shapes in a subgraph.
    """

    model: Model
    graph: Graph
    kinds: bytearray
    shapes: Shapes | None
    around: Scope | None = None
    body: Body | None = None
    inside: Engine | None = None
    _settled: dict[int, bool] = field(default_factory=dict[int, bool], repr=False)

    @property
    def engine(self) -> Engine | None:
        """What tells of shapes here; an axis of unknown size has a symbol of its own."""
        return self.inside if self.shapes is None else self.shapes

    def is_settled(self, value: int) -> bool:
        """Whether a shape or what was computed from shapes is the same numbers whatever the free sizes are."""
        if self.shapes is None:
            return self._is_settled_shape(self.graph.producer[value])
        contents = self.shapes.contents(value)
        return contents is not None and all(isinstance(item, (int, bool)) for item in contents.ravel().tolist())

    def contents(self, value: int) -> npt.NDArray[np.object_] | None:
        """The numbers of a shape or of what was computed from shapes, as far as they are known."""
        if self.shapes is not None:
            return self.shapes.contents(value)
        outer = self.outer(value)
        return self.around.contents(outer) if outer and self.around is not None else None

    def _is_settled_shape(self, node: int) -> bool:
        """In a subgraph: whether a node asks for the shape of what has the same one whatever the free sizes are."""
        asks = node >= 0 and self.graph.standard[node] in SHAPES
        return asks and self.has_settled_shape(self.graph.node_inputs[node][0])

    def has_settled_shape(self, value: int, depth: int = 0) -> bool:
        """Whether the shape of a value is known to be the same whatever the free sizes are."""
        if value not in self._settled:
            self._settled[value] = depth < _DEEPEST and self._keeps_shape(value, depth + 1)
        return self._settled[value]

    def _keeps_shape(self, value: int, depth: int) -> bool:
        if self.shapes is not None:
            shape = self.shapes.shape(value)
            return shape is not None and all(isinstance(dim, int) for dim in shape)
        assert self.body is not None, "a subgraph has a body"
        if self.kinds[value] == Kind.CONSTANT or value in self.body.counters:
            return True
        # What is carried may grow.
        outer = 0 if value in self.body.carried else self.outer(value)
        if outer and self.around is not None:
            return self.around.has_settled_shape(outer, depth)
        node = self.graph.producer[value]
        op = "" if node < 0 else self.graph.standard[node]
        if op not in _SHAPED_AS:
            return op in SHAPES
        return all(self.has_settled_shape(read, depth) for read in self.graph.node_inputs[node])

    def outer(self, value: int) -> int:
        """The value of the scope around that a value is, 0 where it is computed here."""
        return self.body.outside(self.around.graph, value) if self.around and self.body else 0

    def outers(self) -> dict[int, int]:
        """Each value of a subgraph -> the value of the scope around that it is, 0 where it is computed here."""
        return {value: self.outer(value) for value in range(1, len(self.graph.value_names))}

    def has_free_axes(self, value: int, whole: Container[int]) -> bool:
        """Whether data has axes of free size, or of a size that is not known.

        Args:
            value: the data.
            whole: values that do, in a subgraph.
        """
        if self.shapes is None:
            return value in whole
        return any(not isinstance(dim, int) for dim in self.shapes.shape(value) or ("?",))

    def number(self, value: int) -> float | None:
        """A constant's one number, None where there is none."""
        array = self.constant(value)
        return float(array.ravel()[0]) if array is not None and array.size == 1 else None

    def constant(self, value: int) -> npt.NDArray[np.float64] | None:
        """The numbers of a constant, None where it is computed or not to be read."""
        node = self.graph.producer[value]
        outer = self.outer(value)
        if outer and self.around is not None:
            return self.around.constant(outer)
        head = self.graph.initializers.get(value) or (self.graph.constant_head(node) if node >= 0 else None)
        array = Reason("constant-type") if head is None else read_tensor(self.model, head)
        return None if isinstance(array, Reason) else cast("npt.NDArray[np.float64]", array)

    def dtype(self, value: int) -> int | None:
        """Element type of a value; in a subgraph it is followed to where it comes from."""
        if self.shapes is not None:
            return self.shapes.dtype(value)
        if self.around is None or self.body is None:
            return None
        outer = self.body.outside(self.around.graph, value)
        node = self.graph.producer[value]
        if outer:
            return self.around.dtype(outer)
        if node >= 0 and self.graph.standard[node] in SHAPES:
            return TensorProto.INT64
        if node < 0 or self.graph.standard[node] in _RETYPING:
            return None
        if self.graph.standard[node] == "Constant":
            head = self.graph.constant_head(node)
            return None if head is None else head.dtype
        if not self.graph.node_inputs[node]:
            return None
        if self.graph.standard[node] == "Cast":
            return self.graph.attributes(node)["to"].i
        source = self.graph.node_inputs[node][1 if self.graph.standard[node] == "CastLike" else 0]
        return self.dtype(source)
