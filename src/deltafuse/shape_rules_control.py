"""Shape and dtype rules of If, Loop and Scan, from what their bodies declare."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from deltafuse.dims import Dim, parse
from deltafuse.shape_op import DtypeRule, Op, Outputs, PartialShape, ShapeRule


def declared_shape(value: onnx.ValueInfoProto) -> list[Dim | None] | None:
    """The dims that a ValueInfoProto states, None for those it leaves open; None where it states no rank."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type" or not value.type.tensor_type.HasField("shape"):
        return None
    return [declared_dim(dim) for dim in value.type.tensor_type.shape.dim]


def declared_dim(dim: onnx.TensorShapeProto.Dimension) -> Dim | None:
    """One declared size, None where it is open or makes no sense."""
    size: Dim | None = None
    if dim.WhichOneof("value") == "dim_value":
        size = dim.dim_value
    elif dim.dim_param:
        size = parse(dim.dim_param)
    return None if isinstance(size, int) and size < 0 else size


def declared_dtype(value: onnx.ValueInfoProto) -> int | None:
    """The element type that a ValueInfoProto states."""
    return value.type.tensor_type.elem_type or None


def _bodies(op: Op) -> list[Sequence[onnx.ValueInfoProto]]:
    names = ("then_branch", "else_branch") if op.type == "If" else ("body",)
    found = [op.attribute(name) for name in names]
    return [list(attribute.g.output) for attribute in found if attribute is not None]


def _body_shape(op: Op, value: onnx.ValueInfoProto) -> list[Dim | None] | None:
    """What a body declares; names that no graph input has mean nothing outside the body."""
    shape = declared_shape(value)
    if shape is None:
        return None
    return [dim if dim is None or isinstance(dim, int) or op.engine.is_input_dim(dim) else None for dim in shape]


def _if(op: Op) -> Outputs | None:
    bodies = _bodies(op)
    if len(bodies) != 2:
        return None
    return Outputs([_agreed(_body_shape(op, a), _body_shape(op, b)) for a, b in zip(*bodies, strict=False)])


def _agreed(a: PartialShape | None, b: PartialShape | None) -> PartialShape | None:
    if a is None or b is None or len(a) != len(b):
        return None
    return [left if left == right else None for left, right in zip(a, b, strict=True)]


def _loop(op: Op) -> Outputs | None:
    bodies = _bodies(op)
    if not bodies:
        return None
    shapes = [_body_shape(op, value) for value in bodies[0][1:]]
    carried = len(op.inputs) - 2
    stacked = [None if shape is None else [None, *shape] for shape in shapes[carried:]]
    return Outputs([*shapes[:carried], *stacked])


def _scan(op: Op) -> Outputs | None:
    bodies, scans = _bodies(op), op.attr_int("num_scan_inputs", 0)
    states = len(op.inputs) - scans
    first = op.shape(states)
    if not bodies or first is None:
        return None
    inner = [_body_shape(op, value) for value in bodies[0]]
    length = first[(op.attr_ints("scan_input_axes") or [0])[0]]
    axes = op.attr_ints("scan_output_axes") or [0] * (len(inner) - states)
    stacked = [_stack(shape, axis, length) for shape, axis in zip(inner[states:], axes, strict=True)]
    return Outputs([*map(op.shape, range(states)), *stacked])


def _stack(shape: PartialShape | None, axis: int, length: Dim) -> PartialShape | None:
    if shape is None:
        return None
    at = axis + len(shape) + 1 if axis < 0 else axis
    return [*shape[:at], length, *shape[at:]]


def _body_dtypes(op: Op) -> tuple[int | None, ...]:
    bodies = _bodies(op)
    outputs = bodies[0][1:] if bodies and op.type == "Loop" else bodies[0] if bodies else ()
    return tuple(map(declared_dtype, outputs))


RULES: dict[str, ShapeRule] = {
    "If": ShapeRule(_if),
    "Loop": ShapeRule(_loop),
    "Scan": ShapeRule(_scan, shapes=None),
}

DTYPES: dict[str, DtypeRule] = dict.fromkeys(("If", "Loop", "Scan"), DtypeRule(_body_dtypes))
