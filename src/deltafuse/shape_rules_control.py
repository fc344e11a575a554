"""Shape and dtype rules of If, Loop and Scan, from the data flow of their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from deltafuse.dim_algebra import Expr, bounds
from deltafuse.dims import Dim, parse
from deltafuse.graph import Graph
from deltafuse.protobuf import fields
from deltafuse.shape_op import Contents, ContentsRule, DtypeRule, Engine, Op, Outputs, PartialShape, ShapeRule, elements


def declared_shape(value: onnx.ValueInfoProto | None) -> list[Dim | None] | None:
    """The dims that a ValueInfoProto states, None for those it leaves open; None where it states no rank."""
    if value is None or value.type.WhichOneof("value") != "tensor_type":
        return None
    if not value.type.tensor_type.HasField("shape"):
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


def declared_dtype(value: onnx.ValueInfoProto | None) -> int | None:
    """The element type that a ValueInfoProto states."""
    return None if value is None else value.type.tensor_type.elem_type or None


def attribute_span(graph: Graph, node: int, name: str) -> tuple[int, int] | None:
    """The byte range of a node's attribute, found without decoding any."""
    for start, end in graph.attribute_spans[node]:
        names = [
            bytes(graph.data[begin:stop])
            for number, *_, begin, stop, _ in fields(graph.data, start, end)
            if number == 1
        ]
        if names[-1:] == [name.encode()]:
            return start, end
    return None


def _shape_outside(body: Engine, value: int) -> PartialShape | None:
    """The shape of a body's output; what only the body knows means nothing outside."""
    shape = body.shape(value)
    return None if shape is None else [dim if body.is_known(dim) and _is_shared(body, dim) else None for dim in shape]


def _is_shared(body: Engine, dim: Dim) -> bool:
    return isinstance(dim, int) or body.is_input_dim(dim)


def _branches(op: Op) -> list[Engine]:
    """The branches that an If may take: one where its condition is known."""
    condition = op.contents(0)
    known = None if condition is None else elements(condition)[0]
    names = ["then_branch", "else_branch"] if known is None else ["then_branch" if known else "else_branch"]
    found = [op.engine.body(op.index, name) for name in names]
    return [body for body in found if body is not None]


def _if(op: Op) -> Outputs | None:
    found = [[_shape_outside(body, value) for value in body.graph.outputs] for body in _branches(op)]
    missing = _missing(op) if len(found) == 2 else None
    if missing is not None:
        found[1] = [_filled(then, other, missing) for then, other in zip(found[0], found[1], strict=False)]
    return Outputs([_agreed(shapes) for shapes in zip(*found, strict=False)]) if found else None


def _missing(op: Op) -> Dim | None:
    """The size that must be above zero for the first branch: what a guarded pad adds. None where it may be negative."""
    graph, value = op.engine.graph, op.engine.graph.node_inputs[op.index][0]
    while (node := graph.producer[value]) >= 0 and graph.standard[node] in ("Cast", "Identity"):
        value = graph.node_inputs[node][0]
    if node < 0 or graph.standard[node] != "Greater":
        return None
    size, bound = (op.engine.contents(read) for read in graph.node_inputs[node])
    if size is None or bound is None or elements(bound) != [0]:
        return None
    first, *more = elements(size)
    return first if isinstance(first, (int, Expr)) and not more and bounds(first)[0] >= 0 else None


def _filled(then: PartialShape | None, other: PartialShape | None, missing: Dim) -> PartialShape | None:
    """The other branch's shape in terms of the first's: where nothing is missing, both are the same."""
    if then is None or other is None or len(then) != len(other):
        return other
    pairs = zip(then, other, strict=True)
    return [a if a is not None and b is not None and a - b == missing else b for a, b in pairs]


def _if_dtypes(op: Op) -> tuple[int | None, ...]:
    found = [[body.dtype(value) for value in body.graph.outputs] for body in _branches(op)]
    return tuple(types[0] if len(set(types)) == 1 else None for types in zip(*found, strict=False))


def _agreed(shapes: Sequence[PartialShape | None]) -> PartialShape | None:
    """What several shapes have in common."""
    first, *others = shapes
    if first is None or any(other is None or len(other) != len(first) for other in others):
        return None
    known = [shape for shape in shapes if shape is not None]
    return [dims[0] if all(dim == dims[0] for dim in dims) else None for dims in zip(*known, strict=True)]


def _loop_body(op: Op, carried: Sequence[PartialShape | None]) -> Engine | None:
    body = op.engine.body(op.index, "body")
    if body is None or len(body.graph.inputs) != len(carried) + 2:
        return None
    iteration, condition, *values = body.graph.inputs
    body.define(iteration, (), onnx.TensorProto.INT64)
    body.define(condition, (), onnx.TensorProto.BOOL, np.array(True, dtype=object))
    for i, (value, shape) in enumerate(zip(values, carried, strict=True), 2):
        body.define(value, shape, op.dtype(i))
    return body


def _loop_fixpoint(op: Op) -> tuple[Engine, Sequence[PartialShape | None]] | None:
    """The body with carried shapes that an iteration does not change: sizes that it changes are left open."""
    carried: Sequence[PartialShape | None] = [op.shape(i) for i in range(2, len(op.inputs))]
    while True:
        body = _loop_body(op, carried)
        if body is None:
            return None
        after = [_shape_outside(body, value) for value in body.graph.outputs[1 : 1 + len(carried)]]
        kept = [_agreed(pair) for pair in zip(carried, after, strict=True)]
        if all(_same(old, new) for old, new in zip(carried, kept, strict=True)):
            return body, kept
        carried = kept


def _same(a: PartialShape | None, b: PartialShape | None) -> bool:
    return (None if a is None else list(a)) == (None if b is None else list(b))


def _loop(op: Op) -> Outputs | None:
    found = _loop_fixpoint(op)
    if found is None:
        return None
    body, carried = found
    stacked = [_shape_outside(body, value) for value in body.graph.outputs[1 + len(carried) :]]
    count = _trip_count(op, body)
    return Outputs([*carried, *(None if shape is None else [count, *shape] for shape in stacked)])


def _trip_count(op: Op, body: Engine) -> Dim | None:
    """How often a Loop runs, where its condition stays true."""
    limit, goes_on = op.sizes(0), body.contents(body.graph.outputs[0])
    first = op.contents(1) if op.has(1) else np.array(True, dtype=object)
    if not limit or goes_on is None or first is None:
        return None
    return limit[0] if elements(goes_on) == elements(first) == [True] else None


def _loop_dtypes(op: Op) -> tuple[int | None, ...]:
    carried = [op.shape(i) for i in range(2, len(op.inputs))]
    body = _loop_body(op, carried)
    return () if body is None else tuple(body.dtype(value) for value in body.graph.outputs[1:])


def _scan_body(op: Op) -> tuple[Engine, Dim] | None:
    body, count = op.engine.body(op.index, "body"), op.attr_int("num_scan_inputs", 0)
    states = len(op.inputs) - count
    axes = op.attr_ints("scan_input_axes") or [0] * count
    if body is None or len(body.graph.inputs) != len(op.inputs):
        return None
    length: Dim | None = None
    for i, value in enumerate(body.graph.inputs):
        shape = op.shape(i)
        if shape is not None and i >= states:
            at = axes[i - states] % len(shape)
            length, shape = shape[at], (*shape[:at], *shape[at + 1 :])
        body.define(value, shape, op.dtype(i))
    return None if length is None else (body, length)


def _scan(op: Op) -> Outputs | None:
    found = _scan_body(op)
    if found is None:
        return None
    body, length = found
    states = len(op.inputs) - op.attr_int("num_scan_inputs", 0)
    inner = [_shape_outside(body, value) for value in body.graph.outputs[states:]]
    axes = op.attr_ints("scan_output_axes") or [0] * len(inner)
    stacked = [_stack(shape, axis, length) for shape, axis in zip(inner, axes, strict=True)]
    return Outputs([*map(op.shape, range(states)), *stacked])


def _stack(shape: PartialShape | None, axis: int, length: Dim) -> PartialShape | None:
    if shape is None:
        return None
    at = axis + len(shape) + 1 if axis < 0 else axis
    return [*shape[:at], length, *shape[at:]]


def _scan_dtypes(op: Op) -> tuple[int | None, ...]:
    found = _scan_body(op)
    return () if found is None else tuple(found[0].dtype(value) for value in found[0].graph.outputs)


def _call(op: Op) -> Outputs:
    body = op.engine.call(op.index)
    return Outputs([_shape_outside(body, value) for value in body.graph.outputs])


def _call_contents(op: Op) -> tuple[Contents | None, ...]:
    body = op.engine.call(op.index)
    return tuple(_contents_outside(body, value) for value in body.graph.outputs)


def _contents_outside(body: Engine, value: int) -> Contents | None:
    contents = body.contents(value)
    sizes = () if contents is None else [item for item in elements(contents) if isinstance(item, Expr)]
    return contents if all(body.is_known(size) and _is_shared(body, size) for size in sizes) else None


def _call_dtypes(op: Op) -> tuple[int | None, ...]:
    body = op.engine.call(op.index)
    return tuple(body.dtype(value) for value in body.graph.outputs)


def body_engines(op: Op) -> list[Engine | None]:
    """What is known of sizes inside each subgraph of a node, in the order of `deltafuse.bodies.bodies`.

    Args:
        op: an If, a Loop or a Scan whose inputs and captured values were asked for.
    """
    kind = op.engine.graph.standard[op.index]
    if kind == "Loop":
        looped = _loop_fixpoint(op)
        return [None if looped is None else looped[0]]
    if kind == "Scan":
        scanned = _scan_body(op)
        return [None if scanned is None else scanned[0]]
    names = [name for name in op.engine.graph.attributes(op.index) if name in ("then_branch", "else_branch")]
    return [op.engine.body(op.index, name) for name in names]


RULES: dict[str, ShapeRule] = {
    "If": ShapeRule(_if, contents=(0,)),
    "Loop": ShapeRule(_loop, shapes=None, contents=(0, 1), dtypes=None),
    "Scan": ShapeRule(_scan, shapes=None, dtypes=None),
}

DTYPES: dict[str, DtypeRule] = {
    "If": DtypeRule(_if_dtypes, contents=(0,)),
    "Loop": DtypeRule(_loop_dtypes, shapes=None, dtypes=None),
    "Scan": DtypeRule(_scan_dtypes, shapes=None, dtypes=None),
}

#: Of a function that the model defines: for shapes, contents and element types.
CALL_RULES: tuple[ShapeRule, ContentsRule, DtypeRule] = (
    ShapeRule(_call, shapes=None, contents=None, dtypes=None),
    ContentsRule(_call_contents, shapes=None, contents=None, dtypes=None),
    DtypeRule(_call_dtypes, shapes=None, contents=None, dtypes=None),
)
