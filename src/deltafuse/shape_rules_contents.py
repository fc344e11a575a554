"""Contents of operators that move elements of small integer and boolean tensors: Shape, Slice, Concat, Expand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import onnx

from deltafuse.dims import Dim
from deltafuse.graph import Graph
from deltafuse.reasons import Reason
from deltafuse.shape_op import MAX_ELEMENTS, Contents, ContentsRule, Op, elements
from deltafuse.shape_rules_arithmetic import FOLDS, box, fold
from deltafuse.shape_rules_index import shape_window, slice_arguments
from deltafuse.shape_rules_layout import normalised, product
from deltafuse.tensors import TensorHead, constant_head, read_tensor
from deltafuse.wire import Model

_FLOATS = ("FLOAT16", "FLOAT", "DOUBLE")
_READABLE = frozenset(
    getattr(onnx.TensorProto, name)
    for name in [
        "BOOL",
        "INT8",
        "INT16",
        "INT32",
        "INT64",
        "UINT8",
        "UINT16",
        "UINT32",
        "UINT64",
        "FLOAT16",
        "FLOAT",
        "DOUBLE",
    ]
)


def _vector(items: Sequence[object]) -> Contents:
    result = np.empty(len(items), dtype=object)
    result[:] = items
    return result


def _plain(op: Op, i: int) -> list[int] | None:
    """Input `i` as plain ints, None where one of them is not known."""
    return op.ints(i, "")


def _shape(op: Op) -> Contents | None:
    shape = op.shape(0)
    return None if shape is None else _vector(shape[shape_window(op, len(shape))])


def _size(op: Op) -> Contents | None:
    shape = op.shape(0)
    total = None if shape is None else product(shape)
    return None if total is None else box(total)


def _keep(op: Op) -> Contents | None:
    return op.contents(0)


def _gather(op: Op) -> Contents | None:
    data, indices, shape = op.contents(0), _plain(op, 1), op.shape(1)
    if data is None or indices is None or shape is None:
        return None
    axis = op.axis("axis", 0, data.ndim)
    at = np.reshape(np.array(indices, dtype=np.int64), cast("tuple[int, ...]", shape))
    return None if axis is None else box(np.take(data, at, axis=axis))


def _slice(op: Op) -> Contents | None:
    data = op.contents(0)
    arguments = None if data is None else slice_arguments(op, data.ndim)
    if data is None or arguments is None:
        return None
    index = [slice(None)] * data.ndim
    for axis, (start, end, step) in arguments.items():
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(step, int) or step == 0:
            return None
        stop = end if step > 0 or end >= -data.shape[axis] else None
        index[axis] = slice(start, stop, step)
    return data[tuple(index)]


def _concat(op: Op) -> Contents | None:
    parts = [op.contents(i) for i in range(len(op.inputs))]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    shapes = [op.shape(i) for i in range(len(op.inputs))]
    filled = [_unknown(shape) if part is None else part for part, shape in zip(parts, shapes, strict=True)]
    if any(part is None for part in filled):
        return None
    return np.concatenate(cast("list[Contents]", filled), axis=op.attr_int("axis", 0))


def _unknown(shape: Sequence[Dim] | None) -> Contents | None:
    """A tensor of unknown elements, so that what is known beside it is not lost."""
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    sizes = cast("Sequence[int]", shape)
    return np.full(sizes, None, dtype=object) if math.prod(sizes) <= MAX_ELEMENTS else None


def _reshape(op: Op) -> Contents | None:
    data, sizes = op.contents(0), _plain(op, 1) if op.has(1) else op.attr_ints("shape")
    if data is None or sizes is None:
        return None
    if not op.attr_int("allowzero", 0):
        sizes = [data.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return np.reshape(data, sizes)


def _squeeze(op: Op) -> Contents | None:
    data, axes = op.contents(0), op.ints(1, "axes")
    if data is None or (axes is None and op.has(1)):
        return None
    return data.squeeze(None if axes is None else tuple(axes))


def _unsqueeze(op: Op) -> Contents | None:
    data, axes = op.contents(0), op.ints(1, "axes")
    at = None if data is None or axes is None else normalised(axes, data.ndim + len(axes))
    return None if data is None or at is None else np.expand_dims(data, tuple(at))


def _transpose(op: Op) -> Contents | None:
    data = op.contents(0)
    return None if data is None else np.transpose(data, op.attr_ints("perm"))


def _flatten(op: Op) -> Contents | None:
    data, axis = op.contents(0), op.attr_int("axis", 1)
    return None if data is None else np.reshape(data, (math.prod(data.shape[:axis]), -1))


def _expand(op: Op) -> Contents | None:
    data, sizes = op.contents(0), _plain(op, 1)
    if data is None or sizes is None:
        return None
    shape = np.broadcast_shapes(data.shape, tuple(sizes))
    return np.broadcast_to(data, shape) if math.prod(shape) <= MAX_ELEMENTS else None


def _tile(op: Op) -> Contents | None:
    data, repeats = op.contents(0), _plain(op, 1)
    if data is None or repeats is None or math.prod(repeats) * data.size > MAX_ELEMENTS:
        return None
    return np.tile(data, repeats)


def _constant_of_shape(op: Op) -> Contents | None:
    sizes = _plain(op, 0)
    if sizes is None or math.prod(sizes) > MAX_ELEMENTS:
        return None
    item = filling(op.engine.model, op.engine.graph, op.index)
    return None if item is None else np.full(sizes, item, dtype=object)


def filling(model: Model, graph: Graph, node: int) -> object:
    """The one number that a ConstantOfShape repeats, None where it cannot be read.

    Some writers put even that into a file beside the model.
    """
    spans = graph.attribute_spans[node]
    head = constant_head(model.data, spans)
    if head is None:
        return None if spans else 0.0
    array = read_tensor(model, head)
    return None if isinstance(array, Reason) or not array.size else cast("object", array.ravel().tolist()[0])


def _range(op: Op) -> Contents | None:
    ends = [_plain(op, i) for i in range(3)]
    if any(end is None for end in ends):
        return None
    start, limit, delta = (cast("list[int]", end)[0] for end in ends)
    count = len(range(start, limit, delta)) if delta else MAX_ELEMENTS + 1
    return _vector(list(range(start, limit, delta))) if count <= MAX_ELEMENTS else None


def _reduce(op: Op) -> Contents | None:
    data, axes = op.contents(0), op.ints(1, "axes")
    if data is None or (axes is None and op.has(1)):
        return None
    if not axes and op.attr_int("noop_with_empty_axes", 0):
        return data
    gone = normalised(axes or range(data.ndim), data.ndim)
    if gone is None:
        return None
    kept = [axis for axis in range(data.ndim) if axis not in gone]
    count = math.prod(data.shape[axis] for axis in kept)
    rows = np.reshape(np.transpose(data, [*kept, *gone]), (count, -1))
    result = _vector([fold(op.type, elements(rows[i])) for i in range(count)])
    full = [1 if axis in gone else size for axis, size in enumerate(data.shape)]
    return np.reshape(result, full if op.attr_int("keepdims", 1) else [data.shape[axis] for axis in kept])


def _scatter_nd(op: Op) -> Contents | None:
    data, indices, updates = op.contents(0), op.contents(1), op.contents(2)
    if data is None or indices is None or updates is None or op.attr_text("reduction", "none") != "none":
        return None
    result = np.array(data)
    for at in itertools.product(*map(range, indices.shape[:-1])):
        result[tuple(cast("list[int]", elements(indices[at])))] = updates[at]
    return result


def _scatter_elements(op: Op) -> Contents | None:
    data, indices, updates = op.contents(0), op.contents(1), op.contents(2)
    if data is None or indices is None or updates is None or op.attr_text("reduction", "none") != "none":
        return None
    result, axis = np.array(data), op.attr_int("axis", 0)
    for at in itertools.product(*map(range, indices.shape)):
        where = list(at)
        where[axis] = cast("int", indices[at])
        result[tuple(where)] = updates[at]
    return result


def _one_hot(op: Op) -> Contents | None:
    indices, depth, values = op.contents(0), _plain(op, 1), op.contents(2)
    if indices is None or depth is None or values is None or depth[0] * indices.size > MAX_ELEMENTS:
        return None
    (off, on), known, count = elements(values), op.ints(0, ""), depth[0]
    axis = op.axis("axis", -1, indices.ndim + 1)
    if axis is None or known is None:
        return None
    grid = _vector([on if item % count == i else off for item in known for i in range(count)])
    return np.moveaxis(np.reshape(grid, (*indices.shape, count)), -1, axis)


def _split(op: Op) -> tuple[Contents, ...] | None:
    data, sizes = op.contents(0), _plain(op, 1) if op.has(1) else op.attr_ints("split")
    if data is None or (sizes is None and op.has(1)):
        return None
    axis, count = op.attr_int("axis", 0), len(op.outputs)
    part = -(-data.shape[axis] // count)
    stops = [part * i for i in range(1, count)] if sizes is None else np.cumsum(sizes)[:-1].tolist()
    return tuple(np.split(data, stops, axis=axis))


def read_small(model: Model, head: TensorHead) -> Contents | None:
    """A constant of the file, None where it is large, no number, or not to be had."""
    if head.dtype not in _READABLE or math.prod(head.dims) > MAX_ELEMENTS:
        return None
    array = read_tensor(model, head)
    return None if isinstance(array, Reason) else cast("Contents", array.astype(object))


RULES: dict[str, ContentsRule] = {
    **dict.fromkeys(FOLDS, ContentsRule(_reduce, contents=(0, 1))),
    "Concat": ContentsRule(_concat, shapes=None, contents=None),
    "ConstantOfShape": ContentsRule(_constant_of_shape, contents=(0,)),
    "Expand": ContentsRule(_expand, contents=(0, 1)),
    "Flatten": ContentsRule(_flatten, contents=(0,)),
    "Gather": ContentsRule(_gather, shapes=(1,), contents=(0, 1)),
    "Identity": ContentsRule(_keep, contents=(0,)),
    "OneHot": ContentsRule(_one_hot, contents=(0, 1, 2)),
    "Range": ContentsRule(_range, contents=(0, 1, 2)),
    "Reshape": ContentsRule(_reshape, contents=(0, 1)),
    "ScatterElements": ContentsRule(_scatter_elements, contents=(0, 1, 2)),
    "ScatterND": ContentsRule(_scatter_nd, contents=(0, 1, 2)),
    "Shape": ContentsRule(_shape, shapes=(0,)),
    "Size": ContentsRule(_size, shapes=(0,)),
    "Slice": ContentsRule(_slice, contents=(0, 1, 2, 3, 4)),
    "Split": ContentsRule(_split, contents=(0, 1)),
    "Squeeze": ContentsRule(_squeeze, contents=(0, 1)),
    "Tile": ContentsRule(_tile, contents=(0, 1)),
    "Transpose": ContentsRule(_transpose, contents=(0,)),
    "Unsqueeze": ContentsRule(_unsqueeze, contents=(0, 1)),
}
