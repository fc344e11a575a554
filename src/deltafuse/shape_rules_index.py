"""Shape rules of operators that pick elements or make tensors: Slice, Gather, Pad, Range, ConstantOfShape."""

from __future__ import annotations

from collections.abc import Sequence

from deltafuse.dims import Dim, bounds, ceildiv, maximum, minimum
from deltafuse.shape_op import Op, Outputs, PartialShape, ShapeRule
from deltafuse.shape_rules_layout import normalised, target_sizes

#: Ends at least this large mean "to the end": exporters write INT64_MAX, INT32_MAX or their negatives.
_FAR = 1 << 30


def slice_length(size: Dim, start: Dim | None, end: Dim | None, step: Dim | None) -> Dim | None:
    """How many elements ``start:end:step`` leaves of an axis."""
    if start is None or end is None or not isinstance(step, int) or step == 0:
        return None
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(*slice(start, end if step > 0 or end >= -size else None, step).indices(size)))
    if step < 0:
        return size if (start, step) == (-1, -1) and isinstance(end, int) and end < -_FAR else None
    if isinstance(end, int) and end >= _FAR and (bounds(start)[1] < 0 or bounds(start)[0] >= 0):
        left = minimum(size, -start) if bounds(start)[1] < 0 else maximum(size - start, 0)
        return ceildiv(left, step)
    first, last = _clamp(size, start), _clamp(size, end)
    return None if first is None or last is None else ceildiv(maximum(last - first, 0), step)


def _clamp(size: Dim, at: Dim) -> Dim | None:
    if isinstance(at, int) and abs(at) >= _FAR:
        return size if at > 0 else 0
    low, high = bounds(at)
    if high < 0:
        return maximum(size + at, 0)
    return minimum(at, size) if low >= 0 else None


def slice_arguments(op: Op, rank: int) -> dict[int, tuple[Dim | None, Dim | None, Dim | None]] | None:
    """Axis -> start, end, step of a Slice node; None where the axes are not known."""
    starts = op.sizes(1) if op.has(1) else op.attr_ints("starts")
    ends = op.sizes(2) if op.has(2) else op.attr_ints("ends")
    count = next((len(part) for part in (starts, ends) if part is not None), rank)
    axes = op.ints(3, "axes")
    if axes is None:
        if op.has(3):
            return None
        axes = list(range(count))
    steps: Sequence[Dim | None] | None = op.sizes(4) if op.has(4) else [1] * len(axes)
    at = normalised(axes, rank)
    unknown: Sequence[Dim | None] = [None] * len(axes)
    columns = [unknown if part is None else part for part in (starts, ends, steps)]
    if at is None or any(len(column) != len(axes) for column in columns):
        return None
    return dict(zip(at, zip(*columns, strict=True), strict=True))  # pyright: ignore[reportReturnType]


def _slice(op: Op) -> PartialShape | None:
    shape = op.shape(0)
    if shape is None:
        return None
    arguments = slice_arguments(op, len(shape))
    if arguments is None:
        return [None] * len(shape)
    return [slice_length(size, *arguments[axis]) if axis in arguments else size for axis, size in enumerate(shape)]


def _gather(op: Op) -> PartialShape | None:
    data, indices = op.shape(0), op.shape(1)
    if data is None or indices is None:
        return None
    axis = op.axis("axis", 0, len(data))
    return None if axis is None else [*data[:axis], *indices, *data[axis + 1 :]]


def _gather_elements(op: Op) -> PartialShape | None:
    return op.shape(1)


def _gather_nd(op: Op) -> PartialShape | None:
    data, indices = op.shape(0), op.shape(1)
    if data is None or indices is None or not indices or not isinstance(indices[-1], int):
        return None
    return [*indices[:-1], *data[op.attr_int("batch_dims", 0) + indices[-1] :]]


def _pad(op: Op) -> PartialShape | None:
    shape = op.shape(0)
    if shape is None:
        return None
    rank = len(shape)
    pads: Sequence[Dim | None] | None = op.sizes(1) if op.has(1) else op.attr_ints("pads")
    axes = op.ints(3, "axes") if op.has(3) else list(range(rank))
    at = None if axes is None else normalised(axes, rank)
    if pads is None or at is None or len(pads) != 2 * len(at):
        return [None] * rank
    sizes: list[Dim | None] = list(shape)
    for axis, before, after in zip(at, pads, pads[len(at) :], strict=False):
        sizes[axis] = None if before is None or after is None else shape[axis] + before + after
    return sizes


def _range(op: Op) -> PartialShape | None:
    start, limit, delta = ((op.sizes(i) or [None])[0] for i in range(3))
    if start is None or limit is None or not isinstance(delta, int) or delta == 0:
        return [None]
    return [maximum(ceildiv((limit - start) * (1 if delta > 0 else -1), abs(delta)), 0)]


def _constant_of_shape(op: Op) -> PartialShape | None:
    return target_sizes(op, 0)


def _shape(op: Op) -> PartialShape | None:
    shape = op.shape(0)
    return None if shape is None else [len(shape[shape_window(op, len(shape))])]


def shape_window(op: Op, rank: int) -> slice:
    """The axes that a Shape node reports."""
    end = op.attr_int("end", rank)
    return slice(*slice(op.attr_int("start", 0), end).indices(rank)[:2])


def _scalar(op: Op) -> PartialShape:
    return ()


def _one_hot(op: Op) -> PartialShape | None:
    indices, depth = op.shape(0), op.sizes(1)
    if indices is None:
        return None
    axis = op.axis("axis", -1, len(indices) + 1)
    size = depth[0] if depth else None
    return None if axis is None else [*indices[:axis], size, *indices[axis:]]


def _non_zero(op: Op) -> PartialShape | None:
    shape = op.shape(0)
    return [None, None] if shape is None else [len(shape), None]


def _top_k(op: Op) -> Outputs | None:
    shape, count = op.shape(0), op.sizes(1) if op.has(1) else [op.attr_int("k", -1)]
    if shape is None:
        return None
    axis = op.axis("axis", -1, len(shape))
    if axis is None:
        return None
    sizes = [*shape[:axis], count[0] if count else None, *shape[axis + 1 :]]
    return Outputs((sizes, sizes))


def _unknown_vector(op: Op) -> PartialShape:
    return [None]


def _random(op: Op) -> PartialShape | None:
    return op.attr_ints("shape")


RULES: dict[str, ShapeRule] = {
    "ConstantOfShape": ShapeRule(_constant_of_shape, shapes=(0,), contents=(0,)),
    "Compress": ShapeRule(lambda op: _unknown_vector(op) if op.attribute("axis") is None else None),
    "Gather": ShapeRule(_gather, shapes=(0, 1)),
    "GatherElements": ShapeRule(_gather_elements, shapes=(1,)),
    "GatherND": ShapeRule(_gather_nd, shapes=(0, 1)),
    "NonZero": ShapeRule(_non_zero, shapes=(0,)),
    "OneHot": ShapeRule(_one_hot, shapes=(0,), contents=(1,)),
    "Pad": ShapeRule(_pad, shapes=(0,), contents=(1, 3)),
    "RandomNormal": ShapeRule(_random),
    "RandomUniform": ShapeRule(_random),
    "Range": ShapeRule(_range, contents=(0, 1, 2)),
    "Shape": ShapeRule(_shape, shapes=(0,)),
    "Size": ShapeRule(_scalar),
    "Slice": ShapeRule(_slice, shapes=(0,), contents=(1, 2, 3, 4)),
    "TopK": ShapeRule(_top_k, shapes=(0,), contents=(1,)),
}
