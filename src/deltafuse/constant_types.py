"""Element types of what nodes make, in subgraphs too, where onnx tells none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import AttributeProto, NodeProto, TensorProto

#: Operators that ask, and answer true or false.
TRUTHS = frozenset({
    "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Xor", "IsInf", "IsNaN",
})  # fmt: skip
#: Operators whose result has another type than their first operand: the place of the one that has it.
_TYPED_AS = {"Where": 1, "CastLike": 1, "OneHot": 2}
_POSITIONS = frozenset({"NonZero", "ArgMax", "ArgMin", "Shape", "Size"})
_NUMBERS = {
    "value_float": TensorProto.FLOAT, "value_floats": TensorProto.FLOAT, "value_int": TensorProto.INT64,
    "value_ints": TensorProto.INT64,
}  # fmt: skip


def made_type(node: NodeProto, given: Sequence[int]) -> int:
    """Element type of what a node makes, 0 where it is not known.

    Args:
        node: any.
        given: the types of what it reads.
    """
    op, attributes = node.op_type, {attribute.name: attribute for attribute in node.attribute}
    if op in TRUTHS:
        return TensorProto.BOOL
    if op in _POSITIONS:
        return TensorProto.INT64
    said = _said(attributes)
    if said:
        return said
    if op in ("ConstantOfShape", "SequenceEmpty"):
        return TensorProto.FLOAT
    place = _TYPED_AS.get(op, 0)
    return given[place] if place < len(given) else 0


def _said(attributes: Mapping[str, AttributeProto]) -> int:
    """The element type that attributes say."""
    for name in ("to", "dtype"):
        if name in attributes:
            return attributes[name].i
    if "value" in attributes and attributes["value"].type == AttributeProto.TENSOR:
        return attributes["value"].t.data_type
    return next((dtype for name, dtype in _NUMBERS.items() if name in attributes), 0)
