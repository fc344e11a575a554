"""Shape rules of operators that rearrange elements: Reshape, Transpose, Concat, Split and their kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import cast

from deltafuse.dim_algebra import cancel, mul
from deltafuse.dims import Dim, ceildiv
from deltafuse.shape_op import Op, Outputs, PartialShape, ShapeRule

#: As many axes has no tensor of any runtime.
_MOST_AXES = 1024


def product(dims: Sequence[Dim | None]) -> Dim | None:
    """The product of sizes, None where one of them is not known."""
    if any(dim is None for dim in dims):
        return None
    return reduce(mul, cast("Sequence[Dim]", dims), 1)


def normalised(axes: Sequence[int], rank: int) -> list[int] | None:
    """Axes counted from the front, None where one is out of range or repeated."""
    found = [axis + rank if axis < 0 else axis for axis in axes]
    return found if all(0 <= axis < rank for axis in found) and len(set(found)) == len(found) else None


def target_sizes(op: Op, i: int) -> list[Dim | None] | None:
    """The sizes that input `i` asks for; all unknown where only their number is known."""
    sizes = op.sizes(i)
    if sizes is not None:
        return sizes
    shape = op.shape(i)
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int) or shape[0] > _MOST_AXES:
        return None
    unknown: list[Dim | None] = [None] * shape[0]
    return unknown


def _reshape(op: Op) -> PartialShape | None:
    target: Sequence[Dim | None] | None = target_sizes(op, 1) if op.has(1) else op.attr_ints("shape")
    data = op.shape(0)
    if target is None:
        return None
    sizes = list(target)
    if not op.attr_int("allowzero", 0):
        copied = [(data[i] if data is not None and i < len(data) else None) for i in range(len(sizes))]
        sizes = [copied[i] if size == 0 else size for i, size in enumerate(sizes)]
    holes = [i for i, size in enumerate(sizes) if size is None or size == -1]
    whole = None if data is None else product(data)
    if not holes and data is not None:
        _tie(op, data, cast("Sequence[Dim]", sizes))
    if len(holes) == 1:
        rest = product([size for i, size in enumerate(sizes) if i != holes[0]])
        sizes[holes[0]] = whole // rest if whole is not None and rest is not None and rest != 0 else None
        return sizes
    return [None if size == -1 else size for size in sizes]


def _tie(op: Op, before: Sequence[Dim], after: Sequence[Dim]) -> None:
    """Both have as many elements: what is left when common factors are struck out is equal."""
    a, b = (op.find(reduce(mul, dims, 1)) for dims in (before, after))
    if a not in (b, 0) and b != 0:
        op.same(*cancel(a, b))


def _transpose(op: Op) -> PartialShape | None:
    shape = op.shape(0)
    if shape is None:
        return None
    perm = op.attr_ints("perm")
    if perm is None:
        return shape[::-1]
    return [shape[axis] for axis in perm] if sorted(perm) == list(range(len(shape))) else None


def _squeeze(op: Op) -> PartialShape | None:
    shape, axes = op.shape(0), op.ints(1, "axes")
    if shape is None or (axes is None and op.has(1)):
        return None
    if axes is None:
        return [dim for dim in shape if dim != 1] if all(isinstance(dim, int) for dim in shape) else None
    gone = normalised(axes, len(shape))
    return None if gone is None else [dim for axis, dim in enumerate(shape) if axis not in gone]


def _unsqueeze(op: Op) -> PartialShape | None:
    shape, axes = op.shape(0), op.ints(1, "axes")
    if shape is None or axes is None:
        return None
    rank = len(shape) + len(axes)
    new, old = normalised(axes, rank), iter(shape)
    return None if new is None else [1 if axis in new else next(old) for axis in range(rank)]


def _flatten(op: Op) -> PartialShape | None:
    shape = op.shape(0)
    if shape is None:
        return None
    axis = op.attr_int("axis", 1)
    axis += len(shape) if axis < 0 else 0
    return [product(shape[:axis]), product(shape[axis:])]


def _expand(op: Op) -> PartialShape | None:
    shape, sizes = op.shape(0), target_sizes(op, 1)
    return None if shape is None or sizes is None else op.broadcast([shape, sizes])


def _tile(op: Op) -> PartialShape | None:
    shape, repeats = op.shape(0), op.sizes(1)
    if shape is None:
        return None
    if repeats is None or len(repeats) != len(shape):
        return [None] * len(shape)
    return [product(pair) for pair in zip(shape, repeats, strict=True)]


def _concat(op: Op) -> PartialShape | None:
    shapes = [shape for shape in map(op.shape, range(len(op.inputs))) if shape is not None]
    if not shapes or len({len(shape) for shape in shapes}) != 1:
        return None
    axis = op.axis("axis", 1, len(shapes[0]))
    if axis is None:
        return None
    result: list[Dim | None] = [None] * len(shapes[0])
    for i in range(len(result)):
        if i != axis:
            result[i] = reduce(op.same, (shape[i] for shape in shapes), cast("Dim | None", None))
    if len(shapes) == len(op.inputs):
        result[axis] = sum((shape[axis] for shape in shapes), cast("Dim", 0))
    return result


def _split(op: Op) -> Outputs | None:
    shape, count = op.shape(0), len(op.outputs)
    if shape is None:
        return None
    axis = op.axis("axis", 0, len(shape))
    if axis is None:
        return None
    sizes: Sequence[Dim | None] | None = op.sizes(1) if op.has(1) else op.attr_ints("split")
    if sizes is None and op.has(1):
        sizes = [None] * count
    if sizes is None:
        part = ceildiv(shape[axis], count)
        sizes = [part] * (count - 1) + [shape[axis] - part * (count - 1)]
    if all(size is not None for size in sizes):
        op.same(shape[axis], sum(cast("Sequence[Dim]", sizes), cast("Dim", 0)))
    return Outputs([[*shape[:axis], size, *shape[axis + 1 :]] for size in sizes])


RULES: dict[str, ShapeRule] = {
    "Concat": ShapeRule(_concat, shapes=None),
    "Expand": ShapeRule(_expand, shapes=(0, 1), contents=(1,)),
    "Flatten": ShapeRule(_flatten, shapes=(0,)),
    "Reshape": ShapeRule(_reshape, shapes=(0, 1), contents=(1,)),
    "Split": ShapeRule(_split, shapes=(0,), contents=(1,)),
    "Squeeze": ShapeRule(_squeeze, shapes=(0,), contents=(1,)),
    "Tile": ShapeRule(_tile, shapes=(0,), contents=(1,)),
    "Transpose": ShapeRule(_transpose, shapes=(0,)),
    "Unsqueeze": ShapeRule(_unsqueeze, shapes=(0,), contents=(1,)),
}
