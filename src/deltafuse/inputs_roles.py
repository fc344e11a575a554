"""What each input of a model is for, told by what the graph does with it, and by its name where that does not tell."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from deltafuse.classes import Kind
from deltafuse.graph import Graph
from deltafuse.shapes import Shapes
from deltafuse.verify_feeds import Part

Role = Literal["ids", "positions", "mask", "image", "operand", "other"]

#: Operators through which an index or a state is still the same numbers.
_CARRIERS = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand"})
_PARTS = frozenset({"Gather", "Slice", "Split", "Transpose"})
_LOOKUPS = frozenset({"Gather", "GatherBlockQuantized"})
#: What a rotary embedding does with positions before it takes their sine.
_ROTARY = _CARRIERS | _PARTS | {"Mul", "MatMul", "Concat", "Where", "ScatterElements", "ScatterND"}


@dataclass(frozen=True)
class InputRole:
    """One input.

    Attributes:
        role: ``ids`` look rows up in a weight, ``image`` are rows put in place of ids, an ``operand`` of a fused site
            (its state, as a rule) is what `part` says.
        rows: what indices must stay below, 0 where nothing is looked up.
        marks: ids that stand for something else than a row (an image's place).
        part: which operand of a site it is.
    """

    role: Role
    rows: int = 0
    marks: tuple[int, ...] = ()
    part: Part | None = None

    @property
    def label(self) -> str:
        """What to call it in reports."""
        return self.role if self.part is None else self.part.role


def input_roles(shapes: Shapes, kinds: bytearray, parts: Mapping[str, Part]) -> dict[str, InputRole]:
    """Role of each graph input.

    Args:
        shapes: of the file.
        kinds: what each value is, see `deltafuse.classes.classify`.
        parts: value that a fused site reads -> which operand of it.
    """
    graph = shapes.graph
    operands: dict[int, Part] = {}
    for name, part in parts.items():
        operands.setdefault(source_of(graph, name), part)
    found: dict[str, InputRole] = {}
    for value in graph.inputs:
        part = operands.get(value)
        found[graph.name(value)] = _role(shapes, kinds, value) if part is None else InputRole("operand", part=part)
    marked = any(role.marks for role in found.values())
    return {name: _image(shapes, name, role) if marked else role for name, role in found.items()}


def _role(shapes: Shapes, kinds: bytearray, value: int) -> InputRole:
    graph = shapes.graph
    name = graph.name(value).lower()
    if shapes.dtype(value) not in (6, 7):
        return InputRole("mask" if "mask" in name or shapes.dtype(value) == 9 else "other")
    same = _followed(graph, value, _CARRIERS)
    rows = min(_rows(shapes, kinds, same), default=0)
    if "position" in name or (not rows and _turns(graph, value)):
        return InputRole("positions", rows)
    if rows:
        return InputRole("ids", rows, tuple(sorted(set(_marks(shapes, same)))))
    return InputRole("mask")


def _image(shapes: Shapes, name: str, role: InputRole) -> InputRole:
    """Rows that a model with marked ids reads are those of its images: a matrix with a free first axis."""
    shape = shapes.shape(shapes.graph.find(name) or 0)
    if role.role == "other" and shape is not None and len(shape) == 2 and isinstance(shape[1], int):
        return InputRole("image")
    return role


def source_of(graph: Graph, name: str) -> int:
    """The value that another is a part of."""
    value = graph.find(name) or 0
    while (node := graph.producer[value]) >= 0 and graph.standard[node] in _CARRIERS | _PARTS:
        value = graph.node_inputs[node][0]
    return value


def _followed(graph: Graph, value: int, through: Collection[str]) -> set[int]:
    """The value and what the given operators make of it."""
    reached, stack = {value}, [value]
    while stack:
        for node in graph.consumers[stack.pop()]:
            if graph.standard[node] in through:
                new = [other for other in graph.node_outputs[node] if other and other not in reached]
                reached.update(new)
                stack += new
    return reached


def _rows(shapes: Shapes, kinds: bytearray, indices: Collection[int]) -> Iterator[int]:
    graph = shapes.graph
    for node in sorted({node for value in indices for node in graph.consumers[value]}):
        inputs = graph.node_inputs[node]
        if graph.standard[node] not in _LOOKUPS or inputs[1] not in indices or kinds[inputs[0]] != Kind.WEIGHT:
            continue
        axis = graph.attributes(node).get("axis")
        table, at = shapes.shape(inputs[0]), 0 if axis is None else axis.i
        size = table[at] if table is not None and -len(table) <= at < len(table) else None
        if isinstance(size, int):
            yield size


def _marks(shapes: Shapes, ids: Collection[int]) -> Iterator[int]:
    """Ids that the graph compares with: the place of an image."""
    graph = shapes.graph
    for node in sorted({node for value in ids for node in graph.consumers[value]}):
        if graph.standard[node] != "Equal":
            continue
        for other in graph.node_inputs[node]:
            contents = None if other in ids else shapes.contents(other)
            if contents is not None and contents.size == 1 and isinstance(contents.item(), int):
                yield contents.item()


def _turns(graph: Graph, value: int) -> bool:
    """Whether sines are taken of multiples of the value."""
    reached = _followed(graph, value, _ROTARY)
    return any(graph.standard[node] in ("Sin", "Cos") for other in reached for node in graph.consumers[other])
