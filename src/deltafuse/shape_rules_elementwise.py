"""Shape rules of operators that work element by element, or keep the shape of their first input."""

from __future__ import annotations

from deltafuse.shape_op import Op, Outputs, PartialShape, ShapeRule

_KEEP = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BitwiseNot",
    "Cast",
    "CastLike",
    "Ceil",
    "Celu",
    "Clip",
    "Cos",
    "Cosh",
    "CumSum",
    "DequantizeLinear",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Hardmax",
    "Identity",
    "InstanceNormalization",
    "GroupNormalization",
    "IsInf",
    "IsNaN",
    "LRN",
    "LeakyRelu",
    "Log",
    "LogSoftmax",
    "LpNormalization",
    "MeanVarianceNormalization",
    "Mish",
    "Neg",
    "Not",
    "PRelu",
    "QuantizeLinear",
    "RMSNormalization",
    "RandomNormalLike",
    "RandomUniformLike",
    "Reciprocal",
    "Relu",
    "ReverseSequence",
    "RotaryEmbedding",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Scatter",
    "Selu",
    "Shrink",
    "Sigmoid",
    "Sign",
    "SimplifiedLayerNormalization",
    "Sin",
    "Sinh",
    "Softmax",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Swish",
    "Tan",
    "Tanh",
    "TensorScatter",
    "ThresholdedRelu",
    "Trilu",
    "EyeLike",
    "Bernoulli",
]

_BROADCAST = [
    "Add",
    "And",
    "BitShift",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Div",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Max",
    "Mean",
    "Min",
    "Mod",
    "Mul",
    "Or",
    "Pow",
    "Sub",
    "Sum",
    "Where",
    "Xor",
]


def _keep(op: Op) -> PartialShape | None:
    return op.shape(0)


def _broadcast(op: Op) -> PartialShape | None:
    shapes = [op.shape(i) for i in range(len(op.inputs)) if op.has(i)]
    known = [shape for shape in shapes if shape is not None]
    return op.broadcast(known) if len(known) == len(shapes) else None


def _keep_both(op: Op) -> Outputs:
    return Outputs((op.shape(0), op.shape(0)))


def _layer_normalization(op: Op) -> Outputs | None:
    shape = op.shape(0)
    if shape is None:
        return None
    axis = op.axis("axis", -1, len(shape))
    if axis is None:
        return None
    statistics = [*shape[:axis], *[1] * (len(shape) - axis)]
    return Outputs((shape, statistics, statistics))


def _dynamic_quantize(op: Op) -> Outputs:
    return Outputs((op.shape(0), (), ()))


RULES: dict[str, ShapeRule] = {
    **dict.fromkeys(_KEEP, ShapeRule(_keep, shapes=(0,))),
    **dict.fromkeys(_BROADCAST, ShapeRule(_broadcast, shapes=None)),
    "BatchNormalization": ShapeRule(_keep, shapes=(0,)),
    "Dropout": ShapeRule(_keep_both, shapes=(0,)),
    "DynamicQuantizeLinear": ShapeRule(_dynamic_quantize, shapes=(0,)),
    "LayerNormalization": ShapeRule(_layer_normalization, shapes=(0,)),
}
