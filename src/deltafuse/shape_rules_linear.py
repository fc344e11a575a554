"""Shape rules of contractions, convolutions, pooling and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from deltafuse.dims import Dim, ceildiv, minimum
from deltafuse.shape_op import Op, PartialShape, ShapeRule
from deltafuse.shape_rules_layout import normalised

_REDUCE = [
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
]


def _matmul(op: Op) -> PartialShape | None:
    return multiply(op, op.shape(0), op.shape(1))


def multiply(op: Op, a: PartialShape | None, b: PartialShape | None) -> PartialShape | None:
    """The shape of a matrix product with numpy's rules; the contracted sizes are united."""
    if a is None or b is None or not a or not b:
        return None
    rows, columns = [*a[-2:-1]], [*b[-1:]] if len(b) > 1 else []
    op.same(a[-1], b[-2] if len(b) > 1 else b[0])
    return [*op.broadcast([a[:-2], b[:-2]]), *rows, *columns]


def _gemm(op: Op) -> PartialShape | None:
    a, b = op.shape(0), op.shape(1)
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    a, b = a[:: -1 if op.attr_int("transA", 0) else 1], b[:: -1 if op.attr_int("transB", 0) else 1]
    op.same(a[1], b[0])
    return [a[0], b[1]]


def _einsum(op: Op) -> PartialShape | None:
    text = op.attr_text("equation", "").replace(" ", "")
    left, arrow, right = text.partition("->")
    shapes = [op.shape(i) for i in range(len(op.inputs))]
    terms = left.split(",")
    if any(shape is None for shape in shapes) or len(terms) != len(shapes):
        return None
    known = cast("list[tuple[Dim, ...]]", shapes)
    sizes: dict[str, Dim | None] = {}
    dots = [_einsum_term(op, term, shape, sizes) for term, shape in zip(terms, known, strict=True)]
    if not arrow:
        letters = [letter for letter in left if letter.isalpha()]
        right = "..." * ("..." in left) + "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    head, found, tail = right.partition("...")
    middle = op.broadcast(dots) if found else []
    return [*(sizes.get(letter) for letter in head), *middle, *(sizes.get(letter) for letter in tail)]


def _einsum_term(op: Op, term: str, shape: Sequence[Dim], sizes: dict[str, Dim | None]) -> Sequence[Dim]:
    """Notes the size of each letter, and yields what the dots of one operand stand for."""
    head, _, tail = term.partition("...")
    middle = shape[len(head) : len(shape) - len(tail)]
    named = [*zip(head, shape, strict=False), *zip(reversed(tail), reversed(shape), strict=False)]
    for letter, size in named:
        known = sizes.get(letter)
        sizes[letter] = size if known is None or known == 1 else known if size == 1 else op.same(known, size)
    return middle


def _convolution(op: Op) -> PartialShape | None:
    data, kernel = op.shape(0), op.shape(1)
    if data is None or kernel is None or len(data) != len(kernel):
        return None
    return [data[0], kernel[0], *_windows(op, data[2:], op.attr_ints("kernel_shape") or kernel[2:])]


def _pool(op: Op) -> PartialShape | None:
    data, kernel = op.shape(0), op.attr_ints("kernel_shape")
    return None if data is None or kernel is None else [*data[:2], *_windows(op, data[2:], kernel)]


def _global_pool(op: Op) -> PartialShape | None:
    data = op.shape(0)
    return None if data is None else [*data[:2], *[1] * (len(data) - 2)]


def _windows(op: Op, sizes: Sequence[Dim], kernel: Sequence[Dim]) -> list[Dim | None]:
    count, mode = len(sizes), op.attr_text("auto_pad", "NOTSET")
    strides, dilations = op.attr_ints("strides") or [1] * count, op.attr_ints("dilations") or [1] * count
    pads = op.attr_ints("pads") if mode == "NOTSET" else None
    pads = pads or [0] * (2 * count)
    result: list[Dim | None] = []
    for i, size in enumerate(sizes):
        if mode.startswith("SAME"):
            result.append(ceildiv(size, strides[i]))
            continue
        width = (kernel[i] - 1) * dilations[i] + 1
        space = size + pads[i] + pads[i + count] - width
        if op.attr_int("ceil_mode", 0):
            result.append(_rounded_up(size + pads[i], width - pads[i + count], strides[i], space))
        else:
            result.append(space // strides[i] + 1)
    return result


def _rounded_up(before: Dim, reach: Dim, stride: int, space: Dim) -> Dim:
    """How many windows there are where the last one may reach beyond the end: it starts in front of the end's padding.

    Args:
        before: places up to that padding.
        reach: how far a window reaches beyond the padding.
        stride: of the windows.
        space: places that the first window leaves.
    """
    steps = ceildiv(space, stride) + 1
    return steps if isinstance(reach, int) and reach >= stride else minimum(steps, ceildiv(before, stride))


def _reduce(op: Op) -> PartialShape | None:
    shape, axes = op.shape(0), op.ints(1, "axes")
    if shape is None:
        return None
    keep = op.attr_int("keepdims", 1)
    if not axes and not (axes is None and op.has(1)):
        return shape if op.attr_int("noop_with_empty_axes", 0) else [1] * len(shape) if keep else []
    if axes is None:
        return [None] * len(shape) if keep else None
    return without(shape, axes, bool(keep))


def without(shape: Sequence[Dim], axes: Sequence[int], keep: bool) -> PartialShape | None:
    """`shape` after a reduction over `axes`."""
    gone = normalised(axes, len(shape))
    if gone is None:
        return None
    return [1 if axis in gone else dim for axis, dim in enumerate(shape) if keep or axis not in gone]


def _arg(op: Op) -> PartialShape | None:
    shape = op.shape(0)
    return None if shape is None else without(shape, [op.attr_int("axis", 0)], bool(op.attr_int("keepdims", 1)))


def _attention(op: Op) -> PartialShape | None:
    query, value = op.shape(0), op.shape(2)
    if query is None or value is None or len(query) != len(value):
        return None
    if len(query) == 4:
        return [*query[:3], value[3]]
    heads, kv_heads = op.attr_int("q_num_heads", 0), op.attr_int("kv_num_heads", 0)
    if len(query) != 3 or not heads or not kv_heads:
        return None
    return [*query[:2], value[2] // kv_heads * heads]


RULES: dict[str, ShapeRule] = {
    **dict.fromkeys(_REDUCE, ShapeRule(_reduce, shapes=(0,), contents=(1,))),
    **dict.fromkeys(("ArgMax", "ArgMin"), ShapeRule(_arg, shapes=(0,))),
    **dict.fromkeys(("Conv", "ConvInteger"), ShapeRule(_convolution, shapes=(0, 1))),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), ShapeRule(_pool, shapes=(0,))),
    **dict.fromkeys(("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"), ShapeRule(_global_pool, shapes=(0,))),
    **dict.fromkeys(("MatMul", "MatMulInteger"), ShapeRule(_matmul, shapes=(0, 1))),
    "Attention": ShapeRule(_attention, shapes=(0, 2)),
    "Einsum": ShapeRule(_einsum, shapes=None),
    "Gemm": ShapeRule(_gemm, shapes=(0, 1)),
}
