"""Shape rules of the operators that onnxruntime's optimiser and exporters for it put in (domain ``com.microsoft``)."""

from __future__ import annotations

from deltafuse.shape_op import Op, Outputs, PartialShape, ShapeRule
from deltafuse.shape_rules_linear import multiply

_KEEP = ["BiasGelu", "BiasSplitGelu", "FastGelu", "Gelu", "Inverse", "QuickGelu", "RotaryEmbedding"]
_SKIP = ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"]


def _keep(op: Op) -> PartialShape | None:
    return op.shape(0)


def _skip_normalization(op: Op) -> Outputs:
    return Outputs((op.shape(0), None, None, op.shape(0)))


def _fused_matmul(op: Op) -> PartialShape | None:
    a, b = op.shape(0), op.shape(1)
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    if op.attr_int("transBatchA", 0) or op.attr_int("transBatchB", 0):
        return None
    a = (*a[:-2], a[-1], a[-2]) if op.attr_int("transA", 0) else a
    b = (*b[:-2], b[-1], b[-2]) if op.attr_int("transB", 0) else b
    return multiply(op, a, b)


def _matmul_nbits(op: Op) -> PartialShape | None:
    shape = op.shape(0)
    return None if shape is None else [*shape[:-1], op.attr_int("N", 0) or None]


def _grouped_attention(op: Op) -> Outputs | None:
    query, past = op.shape(0), op.shape(3)
    if query is None or len(query) != 3:
        return None
    heads, kv_heads = op.attr_int("num_heads", 0), op.attr_int("kv_num_heads", 0)
    packed = not op.has(1)
    total = heads + 2 * kv_heads if packed else heads
    head_size = query[2] // total if total else None
    hidden = None if head_size is None else head_size * heads
    cache = None if past is None or len(past) != 4 else [past[0], past[1], None, past[3]]
    return Outputs(([*query[:2], hidden], cache, cache))


def _multi_head_attention(op: Op) -> PartialShape | None:
    query, value = op.shape(0), op.shape(2)
    if query is None or value is None or len(query) != 3 or len(value) != 3:
        return None
    return [*query[:2], value[2]]


def _linear_attention(op: Op) -> Outputs | None:
    query, value, heads = op.shape(0), op.shape(2), op.attr_int("kv_num_heads", 0)
    if query is None or value is None or not heads:
        return None
    key, groups = op.shape(1), op.attr_int("q_num_heads", heads)
    repeats = max(1, groups // heads)
    # fewer key heads than value heads are legal here: the key's own width does not tell its head size
    depth = None if key is None else query[-1] // groups
    return Outputs(([*value[:2], value[2] * repeats], [value[0], heads, depth, value[2] // heads]))


def _causal_conv(op: Op) -> Outputs | None:
    data, kernel = op.shape(0), op.shape(1)
    if data is None or kernel is None or len(data) != 3 or len(kernel) != 3:
        return None
    return Outputs((data, [data[0], data[1], kernel[2] - 1]))


RULES: dict[str, ShapeRule] = {
    **{f"com.microsoft:{name}": ShapeRule(_keep, shapes=(0,)) for name in _KEEP},
    **{f"com.microsoft:{name}": ShapeRule(_skip_normalization, shapes=(0,)) for name in _SKIP},
    "com.microsoft:FusedMatMul": ShapeRule(_fused_matmul, shapes=(0, 1)),
    "com.microsoft:GroupQueryAttention": ShapeRule(_grouped_attention, shapes=(0, 3)),
    "com.microsoft:MatMulNBits": ShapeRule(_matmul_nbits, shapes=(0,)),
    "com.microsoft:MultiHeadAttention": ShapeRule(_multi_head_attention, shapes=(0, 2)),
    **dict.fromkeys(
        ("LinearAttention", "com.microsoft:LinearAttention"), ShapeRule(_linear_attention, shapes=(0, 1, 2))
    ),
    **dict.fromkeys(
        ("CausalConvWithState", "com.microsoft:CausalConvWithState"), ShapeRule(_causal_conv, shapes=(0, 1))
    ),
}
