"""What a shape rule sees of one node, and the form of a rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import onnx

from deltafuse.dims import Dim, Expr
from deltafuse.graph import Graph
from deltafuse.shape_unions import Unions
from deltafuse.wire import Model

T = TypeVar("T", covariant=True)

#: Sizes as a rule yields them; None is an axis it cannot tell.
PartialShape: TypeAlias = Sequence[Dim | None]
#: A small tensor's elements: int, bool, float, Expr, or None for one that is not known.
Contents: TypeAlias = "npt.NDArray[np.object_]"

#: Contents are followed up to this many elements.
MAX_ELEMENTS = 1024


class Engine(Protocol):
    """What an `Op` asks of `deltafuse.shapes.Shapes`."""

    model: Model
    graph: Graph
    unions: Unions

    def known_shape(self, value: int) -> tuple[Dim, ...] | None:
        """The shape, if it was worked out."""
        ...

    def known_contents(self, value: int) -> Contents | None:
        """The contents, if they were worked out."""
        ...

    def known_dtype(self, value: int) -> int | None:
        """The element type, if it was worked out."""
        ...

    def shape(self, value: int) -> tuple[Dim, ...] | None:
        """The shape, worked out if need be."""
        ...

    def contents(self, value: int) -> Contents | None:
        """The contents, worked out if need be."""
        ...

    def dtype(self, value: int) -> int | None:
        """The element type, worked out if need be."""
        ...

    def define(
        self, value: int, shape: PartialShape | None, dtype: int | None, contents: Contents | None = None
    ) -> None:
        """States what a value is."""
        ...

    def body(self, node: int, name: str) -> Engine | None:
        """An engine for the subgraph in attribute `name`, with what it reads from outside defined."""
        ...

    def call(self, node: int) -> Engine:
        """An engine for the function that a node calls, with what it is given defined."""
        ...

    def is_known(self, dim: Dim) -> bool:
        """Whether `dim` rests on numbers and declared symbols alone."""
        ...

    def is_input_dim(self, dim: Dim) -> bool:
        """Whether `dim` rests on sizes of graph inputs alone."""
        ...


class Op:
    """One node, as a rule sees it. Inputs that are absent or beyond the list have no shape, contents or dtype."""

    __slots__ = ("engine", "index", "inputs", "outputs")

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine = engine
        self.index = index
        self.inputs = engine.graph.node_inputs[index]
        self.outputs = engine.graph.node_outputs[index]

    @property
    def domain(self) -> str:
        """The domain, empty for ai.onnx."""
        return self.engine.graph.domain[self.index]

    @property
    def type(self) -> str:
        """The op_type."""
        return self.engine.graph.op[self.index]

    def has(self, i: int) -> bool:
        """Whether there is an input `i`."""
        return i < len(self.inputs) and self.inputs[i] != 0

    def shape(self, i: int) -> tuple[Dim, ...] | None:
        """The shape of input `i`."""
        # Value 0, the absent one, has none.
        return self.engine.known_shape(self.inputs[i]) if i < len(self.inputs) else None

    def contents(self, i: int) -> Contents | None:
        """The contents of input `i`."""
        return self.engine.known_contents(self.inputs[i]) if i < len(self.inputs) else None

    def dtype(self, i: int) -> int | None:
        """The element type of input `i`."""
        return self.engine.known_dtype(self.inputs[i]) if i < len(self.inputs) else None

    def sizes(self, i: int) -> list[Dim | None] | None:
        """The contents of input `i` as a flat list of sizes."""
        found = self.contents(i)
        return None if found is None else [as_dim(item) for item in elements(found)]

    def ints(self, i: int, name: str) -> list[int] | None:
        """A list of plain ints from input `i`, or from attribute `name` where there is no such input."""
        if not self.has(i):
            return self.attr_ints(name)
        sizes = self.sizes(i)
        return None if sizes is None else plain(sizes)

    def attribute(self, name: str) -> onnx.AttributeProto | None:
        """An attribute, decoded."""
        return self.engine.graph.attributes(self.index).get(name)

    def attr_int(self, name: str, default: int) -> int:
        """An int attribute."""
        attribute = self.attribute(name)
        return default if attribute is None else attribute.i

    def attr_ints(self, name: str) -> list[int] | None:
        """A list of ints, None where there is no such attribute."""
        attribute = self.attribute(name)
        return None if attribute is None else list(attribute.ints)

    def attr_text(self, name: str, default: str) -> str:
        """A string attribute."""
        attribute = self.attribute(name)
        return default if attribute is None else attribute.s.decode(errors="replace")

    def axis(self, name: str, default: int, rank: int) -> int | None:
        """An axis attribute, counted from the front; None where it is out of range."""
        axis = self.attr_int(name, default)
        axis += rank if axis < 0 else 0
        return axis if 0 <= axis < rank else None

    def find(self, dim: Dim) -> Dim:
        """`dim` in canonical symbols."""
        return self.engine.unions.find(dim)

    def same(self, a: Dim | None, b: Dim | None) -> Dim | None:
        """One size for two that the operator needs to be equal."""
        if a is None or b is None:
            return b if a is None else a
        self.engine.unions.unite(a, b, self.index)
        return b if isinstance(b, int) else self.find(a)

    def broadcast(self, shapes: Sequence[PartialShape]) -> list[Dim | None]:
        """The shape that operands broadcast to; sizes of graph inputs that meet are united."""
        rank = max(map(len, shapes), default=0)
        result: list[Dim | None] = [1] * rank
        for shape in shapes:
            offset = rank - len(shape)
            for axis, dim in enumerate(shape, offset):
                result[axis] = self._broadcast_dim(result[axis], dim)
        return result

    def _broadcast_dim(self, a: Dim | None, b: Dim | None) -> Dim | None:
        if a == 1 or b == 1:
            return b if a == 1 else a
        if a is None or b is None:
            return next((dim for dim in (a, b) if isinstance(dim, int)), None)
        a, b = self.find(a), self.find(b)
        if a == b:
            return a
        if isinstance(a, int) and isinstance(b, int):
            return self.same(a, b)
        # a size that no graph input names may be 1 when the model runs, so nothing follows for the other
        doubtful = [dim for dim in (a, b) if isinstance(dim, Expr) and not self.engine.is_input_dim(dim)]
        if not doubtful:
            return self.same(a, b)
        other = b if doubtful[0] is a else a
        return other if isinstance(other, int) else None


@dataclass(frozen=True)
class Outputs:
    """What a shape rule yields for a node with several outputs."""

    shapes: Sequence[PartialShape | None]


@dataclass(frozen=True)
class Rule(Generic[T]):
    """How to get one thing about a node's outputs, and what must be known before.

    Attributes:
        run: the rule.
        shapes, contents, dtypes: input positions whose shape, contents or dtype the rule reads; None is all.
    """

    run: Callable[[Op], T]
    shapes: tuple[int, ...] | None = ()
    contents: tuple[int, ...] | None = ()
    dtypes: tuple[int, ...] | None = ()

    @cached_property
    def needs(self) -> tuple[tuple[int, tuple[int, ...] | None], ...]:
        """The positions as (0 for shapes, 1 for contents, 2 for dtypes; positions), without those of nothing."""
        asked = enumerate((self.shapes, self.contents, self.dtypes))
        return tuple((wanted, positions) for wanted, positions in asked if positions != ())


#: Yields the shape of output 0, or `Outputs`.
ShapeRule: TypeAlias = Rule["PartialShape | Outputs | None"]
#: Yields the contents of output 0, or a tuple for all outputs.
ContentsRule: TypeAlias = Rule["Contents | tuple[Contents | None, ...] | None"]
#: Yields the element type of output 0 and, as further elements, of the next outputs.
DtypeRule: TypeAlias = Rule["int | tuple[int | None, ...] | None"]


def plain(sizes: Sequence[Dim | None]) -> list[int] | None:
    """`sizes` if every one is a number, else None."""
    known = [size for size in sizes if isinstance(size, int)]
    return known if len(known) == len(sizes) else None


def elements(contents: Contents) -> list[object]:
    """All elements in order."""
    return cast("list[object]", np.ravel(contents).tolist())


def as_dim(item: object) -> Dim | None:
    """An element of contents as a size, None where it is not known or no integer."""
    if isinstance(item, (bool, int)):
        return int(item)
    return item if isinstance(item, Expr) else None


def paired(value: int, outputs: Sequence[int], found: object, settled: Collection[int]) -> list[tuple[int, Any]]:
    """Pairs results with a node's outputs; those that a caller defined or that are settled stay."""
    if len(outputs) == 1 and not isinstance(found, tuple):
        return [(value, found)]
    results = list(cast("tuple[object, ...]", found)) if isinstance(found, tuple) else [found]
    if len(outputs) == 1:
        return [(value, results[0] if results else None)]
    results += [None] * (len(outputs) - len(results))
    return [(o, r) for o, r in zip(outputs, results, strict=False) if o and (o == value or o not in settled)]
