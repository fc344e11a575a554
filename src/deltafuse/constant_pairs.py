"""Which numbers occur in a constant whose shape follows free sizes, in its own types and without their rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from deltafuse.constant_types import TRUTHS

Array = npt.NDArray[np.float64]

#: Float types and how far apart their numbers are, relative to a number.
STEPS: dict[int, float] = {TensorProto.FLOAT: 2.0**-23, TensorProto.FLOAT16: 2.0**-10, TensorProto.BFLOAT16: 2.0**-7}
#: Float types: what both of them hold, any one does.
NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
#: How many steps of the narrowest type on its way a constant may be off.
_STEPS_OFF = 4
#: More different numbers than that, or more of them to be tried with each other, are not followed.
_MOST, _MOST_TRIED = 256, 1 << 16
_WHOLE = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})
#: Float types that hold sizes and positions as they are.
_WIDE = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE})

#: Operators that move numbers of their first operand, or take some.
MOVES = frozenset({
    "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Tile", "Slice", "Gather",
    "GatherND", "GatherElements", "Split", "SplitToSequence", "SequenceAt", "ConcatFromSequence", "ReduceMax",
    "ReduceMin",
})  # fmt: skip
#: Operators whose result has the numbers of some operands (of all, where none are named), and those that add zeros.
JOINS: Mapping[str, tuple[int, ...] | None] = {
    "Concat": None, "Where": (1, 2), "ScatterND": (0, 2), "ScatterElements": (0, 2), "Pad": (0, 2), "Trilu": (0,),
    "SequenceConstruct": None, "SequenceInsert": (0, 1),
}  # fmt: skip
FILLS = frozenset({"Trilu", "Pad"})
_ZERO, _TRUE_OR_FALSE = np.zeros(1), np.arange(2.0)
#: Operators whose numbers are known, whatever they read.
_FIXED: Mapping[str, Array] = {"SequenceEmpty": np.zeros(0), "EyeLike": _TRUE_OR_FALSE}
#: Operators that keep sizes and positions whole numbers of that kind.
_COUNTING = frozenset({"Cast", "Add", "Sub", "Neg", "Min", "Max", "Floor", "Ceil"})

_ELEMENTWISE: Mapping[str, np.ufunc] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Min": np.minimum,
    "Max": np.maximum, "Neg": np.negative, "Abs": np.abs, "Exp": np.exp, "Log": np.log, "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal, "Floor": np.floor, "Ceil": np.ceil, "Round": np.rint, "Sign": np.sign,
    "Tanh": np.tanh, "Sin": np.sin, "Cos": np.cos, "Cast": np.positive,
    "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal,
    "Equal": np.equal, "Not": np.logical_not, "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
    "IsNaN": np.isnan, "IsInf": np.isinf,
}  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """The numbers of one constant.

    Attributes:
        own, exact: each number in the types of the model and without rounding; None where they are not followed.
        step: of the narrowest type on their way.
        safe: whether what is not followed is the same in both all the same.
        counts: whether these are sizes or positions, which the guards look at.
    """

    own: Array | None = None
    exact: Array | None = None
    step: float = 0.0
    safe: bool = True
    counts: bool = False

    def apart(self) -> npt.NDArray[np.bool_]:
        """Which of the numbers are not the same; none where they are not followed."""
        if self.own is None or self.exact is None:
            return np.zeros(0, np.bool_)
        return differ(self.own, self.exact, self.step)

    @property
    def fine(self) -> bool:
        """Whether all numbers are the same in both."""
        return self.safe and not self.apart().any()

    @property
    def whole(self) -> bool:
        """Whether these are whole numbers, the same in both."""
        if self.own is None or self.exact is None:
            return self.counts
        return bool(np.array_equal(self.own, self.exact) and np.array_equal(self.own, np.rint(self.own)))


#: Not followed, and perhaps not the same.
LOST = Pairs(safe=False)
_COUNTS = Pairs(counts=True)


def differ(own: npt.NDArray[Any], exact: npt.NDArray[Any], step: float) -> npt.NDArray[np.bool_]:
    """Where numbers are apart by more than a few steps."""
    with np.errstate(invalid="ignore"):
        return ~np.isclose(own, exact, rtol=_STEPS_OFF * step, atol=0.0, equal_nan=True)


def rounded_to(numbers: npt.NDArray[Any], dtype: int) -> Array:
    """Numbers as an element type holds them."""
    if dtype not in STEPS:
        return np.asarray(numbers, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(numbers).astype(helper.tensor_dtype_to_np_dtype(dtype)).astype(np.float64)


def reckons(attributes: Iterable[AttributeProto]) -> bool:
    """Whether an operator that joins numbers makes others: as a scatter may, and a Pad of older opsets."""
    said = {attribute.name: attribute for attribute in attributes}
    return ("reduction" in said and said["reduction"].s != b"none") or ("value" in said and said["value"].f != 0.0)


def holds(dtype: int, numbers: Sequence[float]) -> bool:
    """Whether an element type holds numbers as they are."""
    array = np.array(numbers, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        kept = array.astype(helper.tensor_dtype_to_np_dtype(dtype)).astype(np.float64)
    return bool(np.array_equal(kept, array, equal_nan=True))


def held(tensor: TensorProto) -> Pairs:
    """The numbers of a tensor of the file."""
    return _numbers(numpy_helper.to_array(tensor))


def _numbers(array: npt.NDArray[Any]) -> Pairs:
    if array.dtype.kind in "OSU":
        return Pairs()
    flat = np.unique(array.astype(np.float64).ravel())
    # A table as it stands is the same in both.
    return Pairs(flat, flat) if flat.size <= _MOST else Pairs()


def made(node: NodeProto, given: Sequence[Pairs | None], dtype: int, *, exact: bool) -> Pairs:
    """The numbers that a node makes.

    Args:
        node: any.
        given: what it reads; None for an operand that is left out.
        dtype: element type of what it makes, 0 where it is not known.
        exact: whether the operator makes or moves numbers and changes none.
    """
    op = "" if node.domain not in ("", "ai.onnx") else node.op_type
    read = [pairs for pairs in given if pairs is not None]
    if op in ("Constant", "ConstantOfShape"):
        return _said(op, node) if all(pairs.fine for pairs in read) else LOST
    if op in _FIXED:
        return _numbers(_FIXED[op])
    if op in MOVES and read:
        return read[0] if all(pairs.fine for pairs in read[1:]) else LOST
    if op in JOINS and not reckons(node.attribute):
        return _joined(op, given)
    found = _elementwise(op, node, given, dtype) if op in _ELEMENTWISE and None not in given else None
    if found is not None:
        return found
    if not all(pairs.fine for pairs in read):
        return LOST
    if op in TRUTHS:
        return _numbers(_TRUE_OR_FALSE)
    counts = op in _COUNTING and dtype in _WIDE | _WHOLE and all(pairs.whole for pairs in read)
    return Pairs(safe=counts or exact or dtype not in (*STEPS, 0), counts=counts or dtype in _WHOLE)


def _said(op: str, node: NodeProto) -> Pairs:
    """The numbers that an attribute holds."""
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        return _numbers(numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.array(value))
    return _numbers(_ZERO) if op == "ConstantOfShape" else LOST


def _joined(op: str, given: Sequence[Pairs | None]) -> Pairs:
    places = JOINS[op] or range(len(given))
    parts = [pairs for place in places if place < len(given) and (pairs := given[place]) is not None]
    if op in FILLS:
        parts.append(_numbers(_ZERO))
    others = [pairs for place, pairs in enumerate(given) if pairs is not None and place not in places]
    if not all(pairs.fine for pairs in others):
        return LOST
    own = [pairs.own for pairs in parts if pairs.own is not None]
    exact = [pairs.exact for pairs in parts if pairs.exact is not None]
    if len(own) < len(parts):
        return Pairs(safe=all(pairs.fine for pairs in parts), counts=all(pairs.whole for pairs in parts))
    return _few(np.concatenate(own), np.concatenate(exact), max(pairs.step for pairs in parts))


def _few(own: Array, exact: Array, step: float) -> Pairs:
    pairs = np.unique(np.stack([own, exact]), axis=1)
    if pairs.shape[1] > _MOST:
        return Pairs(safe=step == 0.0)
    return Pairs(pairs[0], pairs[1], step)


def _elementwise(op: str, node: NodeProto, given: Sequence[Pairs | None], dtype: int) -> Pairs | None:
    """Each number with each; None where they are not followed."""
    read, act = [pairs for pairs in given if pairs is not None], _ELEMENTWISE[op]
    own = [pairs.own for pairs in read if pairs.own is not None]
    exact = [pairs.exact for pairs in read if pairs.exact is not None]
    many = np.prod([side.size for side in own], dtype=np.float64) > _MOST_TRIED
    known = dtype in (*STEPS, *_WHOLE, TensorProto.DOUBLE) and not (op == "IsInf" and node.attribute)
    if not known or many or not len(own) == len(read) == act.nin:
        return None
    step = max(STEPS.get(dtype, 0.0), *(pairs.step for pairs in read))
    first, second = (_kept(_applied(act, side), dtype) for side in (own, exact))
    return _few(rounded_to(first, dtype), second, step)


def _applied(act: np.ufunc, sides: Sequence[Array]) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(act(*np.ix_(*sides)), np.float64).ravel()


def _kept(numbers: Array, dtype: int) -> Array:
    """What no float type keeps of a number is cut off."""
    if dtype == TensorProto.BOOL:
        return (numbers != 0).astype(np.float64)
    return np.trunc(numbers) if dtype in _WHOLE else numbers


def unknown(dtype: int) -> Pairs:
    """What is known of a value that nothing is known of but its type: the number of a loop's step, a size."""
    return _COUNTS if dtype in _WIDE | _WHOLE else LOST
