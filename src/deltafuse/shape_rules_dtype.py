"""Element types of outputs. An operator with a shape rule and no rule here has the type of its first input."""

from __future__ import annotations

import onnx

from deltafuse.shape_op import DtypeRule, Op

_TYPE = onnx.TensorProto

_BOOL = ["And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"]
_INT64 = ["ArgMax", "ArgMin", "NonZero", "SequenceLength", "Shape", "Size"]
#: A sequence has the element type of its tensors.
_SEQUENCES = ["ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceErase", "SplitToSequence"]
_SECOND = ["CastLike", "DequantizeLinear", "RMSNormalization", "SequenceInsert", "SimplifiedLayerNormalization",
           "Where"]  # fmt: skip


def _attribute_or_first(op: Op) -> int | None:
    return op.attr_int("dtype", 0) or op.dtype(0)


def _constant_of_shape(op: Op) -> int | None:
    value = op.attribute("value")
    return _TYPE.FLOAT if value is None else value.t.data_type


def _first_and_statistics(op: Op) -> tuple[int | None, ...]:
    statistics = op.attr_int("stash_type", _TYPE.FLOAT)
    return (op.dtype(0), statistics, statistics)


def _quantize(op: Op) -> int | None:
    return op.attr_int("output_dtype", 0) or (op.dtype(2) if op.has(2) else _TYPE.UINT8)


def _first_all(op: Op) -> tuple[int | None, ...]:
    return (op.dtype(0),) * len(op.outputs)


FIRST = DtypeRule(lambda op: op.dtype(0), dtypes=(0,))

RULES: dict[str, DtypeRule] = {
    **dict.fromkeys(_BOOL, DtypeRule(lambda op: _TYPE.BOOL)),
    **dict.fromkeys(_INT64, DtypeRule(lambda op: _TYPE.INT64)),
    **dict.fromkeys(_SEQUENCES, FIRST),
    **dict.fromkeys(_SECOND, DtypeRule(lambda op: op.dtype(1), dtypes=(1,))),
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), DtypeRule(lambda op: _TYPE.INT32)),
    **dict.fromkeys(("RandomNormal", "RandomUniform"), DtypeRule(lambda op: op.attr_int("dtype", _TYPE.FLOAT))),
    **dict.fromkeys(
        ("Bernoulli", "EyeLike", "RandomNormalLike", "RandomUniformLike"),
        DtypeRule(_attribute_or_first, dtypes=(0,)),
    ),
    **dict.fromkeys(
        (
            "Split",
            "com.microsoft:GroupQueryAttention",
            "com.microsoft:SkipLayerNormalization",
            "com.microsoft:SkipSimplifiedLayerNormalization",
            "CausalConvWithState",
            "com.microsoft:CausalConvWithState",
        ),
        DtypeRule(_first_all, dtypes=(0,)),
    ),
    "Cast": DtypeRule(lambda op: op.attr_int("to", 0) or None),
    "ConstantOfShape": DtypeRule(_constant_of_shape),
    "Dropout": DtypeRule(lambda op: (op.dtype(0), _TYPE.BOOL), dtypes=(0,)),
    "DynamicQuantizeLinear": DtypeRule(lambda op: (_TYPE.UINT8, _TYPE.FLOAT, _TYPE.UINT8)),
    "LayerNormalization": DtypeRule(_first_and_statistics, dtypes=(0,)),
    "MaxPool": DtypeRule(lambda op: (op.dtype(0), _TYPE.INT64), dtypes=(0,)),
    "OneHot": DtypeRule(lambda op: op.dtype(2), dtypes=(2,)),
    "QuantizeLinear": DtypeRule(_quantize, dtypes=(2,)),
    "SequenceEmpty": DtypeRule(lambda op: op.attr_int("dtype", _TYPE.FLOAT)),
    "TopK": DtypeRule(lambda op: (op.dtype(0), _TYPE.INT64), dtypes=(0,)),
}
