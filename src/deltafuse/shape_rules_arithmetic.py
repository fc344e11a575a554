"""Contents of arithmetic on sizes: what a small integer or boolean tensor holds, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import numpy as np
import onnx

from deltafuse.dims import Dim, Expr, bounds, ceildiv, maximum, minimum
from deltafuse.shape_op import MAX_ELEMENTS, Contents, ContentsRule, Op

_TYPE = onnx.TensorProto
_FLOATS = frozenset({_TYPE.FLOAT, _TYPE.FLOAT16, _TYPE.DOUBLE, _TYPE.BFLOAT16})
_NARROW = frozenset({_TYPE.INT8, _TYPE.INT16, _TYPE.UINT8, _TYPE.UINT16, _TYPE.FLOAT16, _TYPE.BFLOAT16})
_WIDTH: dict[int, int] = {
    _TYPE.INT8: 7,
    _TYPE.INT16: 15,
    _TYPE.INT32: 31,
    _TYPE.UINT8: 8,
    _TYPE.UINT16: 16,
    _TYPE.UINT32: 32,
}


@dataclass(frozen=True)
class Ratio:
    """A quotient of sizes computed in floating point, on its way to a Floor, Ceil or Cast."""

    over: Dim
    under: Dim


def box(item: object) -> Contents:
    """An object array, also of a single element."""
    return cast("Contents", np.asarray(item, dtype=object))


def apply(function: Callable[..., object], *operands: Contents) -> Contents | None:
    """Applies `function` to elements, with broadcasting; an unknown operand makes an unknown element."""
    if math.prod(np.broadcast_shapes(*(operand.shape for operand in operands))) > MAX_ELEMENTS:
        return None

    def known(*items: object) -> object:
        return None if any(item is None for item in items) else function(*items)

    lifted = cast("Callable[..., object]", np.frompyfunc(known, len(operands), 1))
    return box(lifted(*operands))


def _elementwise(function: Callable[..., object]) -> ContentsRule:
    def run(op: Op) -> Contents | None:
        operands = [op.contents(i) for i in range(len(op.inputs))]
        if any(operand is None for operand in operands):
            return None
        return reduce_pairs(function, cast("list[Contents]", operands))

    return ContentsRule(run, contents=None)


def reduce_pairs(function: Callable[..., object], operands: Sequence[Contents]) -> Contents | None:
    """One operand: the function of it; two and more: folded from the left."""
    if len(operands) == 1:
        return apply(function, operands[0])
    total: Contents | None = operands[0]
    for operand in operands[1:]:
        total = None if total is None else apply(function, total, operand)
    return total


def _whole(item: object) -> Any:
    """A float with an integral value as an int, beside an expression (floats stay beside floats)."""
    return int(item) if isinstance(item, float) and item.is_integer() else item


def exact(function: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """Arithmetic that stays within sizes: no Ratio, no fractional number beside an expression."""

    def run(a: object, b: object) -> object:
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            return None
        if isinstance(a, Expr) or isinstance(b, Expr):
            a, b = _whole(a), _whole(b)
            if isinstance(a, float) or isinstance(b, float):
                return None
        return function(a, b)

    return run


def _divide_int(a: Dim, b: Dim) -> Dim | None:
    if isinstance(a, int) and isinstance(b, int):
        return None if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)
    return a // b if bounds(a)[0] >= 0 and bounds(b)[0] > 0 else None


def _divide_float(a: Any, b: Any) -> object:
    a, b = _whole(a), _whole(b)
    if isinstance(a, float) or isinstance(b, float):
        return None if b == 0 or isinstance(a, Expr) or isinstance(b, Expr) else a / b
    return None if b == 0 else Ratio(a, b)


def _divide(op: Op) -> Contents | None:
    a, b, dtype = op.contents(0), op.contents(1), op.dtype(0)
    if a is None or b is None or dtype is None:
        return None
    return apply(_divide_float if dtype in _FLOATS else exact(_divide_int), a, b)


def _mod(op: Op) -> Contents | None:
    a, b, truncates = op.contents(0), op.contents(1), op.attr_int("fmod", 0)
    if a is None or b is None:
        return None

    def run(x: Dim, y: Dim) -> Dim | None:
        unlike = isinstance(x, float) or isinstance(y, float) or y == 0 or (truncates and bounds(x)[0] < 0)
        return None if unlike else x % y

    return apply(exact(run), a, b)


def _less(a: Any, b: Any) -> bool | None:
    low, high = _difference(a, b)
    return True if high < 0 else False if low >= 0 else None


def _at_most(a: Any, b: Any) -> bool | None:
    low, high = _difference(a, b)
    return True if high <= 0 else False if low > 0 else None


def _equal(a: Any, b: Any) -> bool | None:
    low, high = _difference(a, b)
    return True if low == high == 0 else False if low > 0 or high < 0 else None


def _difference(a: Any, b: Any) -> tuple[float, float]:
    if isinstance(a, float) or isinstance(b, float):
        return a - b, a - b
    return bounds(a - b)


def _rounded(direction: Callable[[Dim, Dim], Dim], plain: Callable[[float], int]) -> Callable[[object], object]:
    def run(item: object) -> object:
        if isinstance(item, Ratio):
            return direction(item.over, item.under)
        return float(plain(item)) if isinstance(item, float) and math.isfinite(item) else item

    return run


def _floor_div(a: Dim, b: Dim) -> Dim:
    return a // b


def _absolute(item: Any) -> object:
    if isinstance(item, (int, float)):
        return abs(item)
    return item if isinstance(item, Expr) and bounds(item)[0] >= 0 else None


def _sign(item: Any) -> object:
    if isinstance(item, (int, float)):
        return (item > 0) - (item < 0)
    return 1 if isinstance(item, Expr) and bounds(item)[0] > 0 else None


def _negative(item: Any) -> object:
    return None if isinstance(item, Ratio) else -item


def cast_to(dtype: int) -> Callable[[object], object]:
    """The conversion of one element that Cast makes."""

    def run(item: Any) -> object:
        if dtype in _NARROW and isinstance(item, (Expr, Ratio)):
            # Large ones would wrap around or lose their last digits.
            return None
        if dtype == _TYPE.BOOL:
            return _truth(item)
        if dtype in _FLOATS:
            return float(item) if isinstance(item, int) else item
        size = _integer(item)
        limit = _WIDTH.get(dtype, 63)
        return None if isinstance(size, int) and not -(1 << limit) <= size < 1 << limit else size

    return run


def _integer(item: Any) -> Dim | None:
    if isinstance(item, Ratio):
        return item.over // item.under if bounds(item.over)[0] >= 0 and bounds(item.under)[0] > 0 else None
    if isinstance(item, float):
        return int(item) if math.isfinite(item) else None
    return item if isinstance(item, Expr) else int(item)


def _truth(item: Any) -> bool | None:
    if isinstance(item, Ratio):
        return None
    if isinstance(item, Expr):
        return True if bounds(item)[0] > 0 else None
    return bool(item)


def _cast(op: Op) -> Contents | None:
    data, to = op.contents(0), op.attr_int("to", 0) if op.type == "Cast" else op.dtype(1)
    return None if data is None or to is None else apply(cast_to(to), data)


def _where(op: Op) -> Contents | None:
    condition, a, b = op.contents(0), op.contents(1), op.contents(2)
    if condition is None or a is None or b is None:
        return None

    def pick(known: object, yes: object, no: object) -> object:
        if known is None:
            return yes if yes == no else None
        return yes if known else no

    lifted = cast("Callable[..., object]", np.frompyfunc(pick, 3, 1))
    size = math.prod(np.broadcast_shapes(condition.shape, a.shape, b.shape))
    return box(lifted(condition, a, b)) if size <= MAX_ELEMENTS else None


def _not(a: bool) -> bool:
    return not a


def _and(a: bool, b: bool) -> bool:
    return a and b


def _or(a: bool, b: bool) -> bool:
    return a or b


def _flip(function: Callable[[Any, Any], bool | None]) -> Callable[[Any, Any], bool | None]:
    return lambda a, b: function(b, a)


RULES: dict[str, ContentsRule] = {
    "Abs": _elementwise(_absolute),
    "Add": _elementwise(exact(lambda a, b: a + b)),
    "And": _elementwise(_and),
    "Cast": ContentsRule(_cast, contents=(0,)),
    "CastLike": ContentsRule(_cast, contents=(0,), dtypes=(1,)),
    "Ceil": _elementwise(_rounded(ceildiv, math.ceil)),
    "Div": ContentsRule(_divide, contents=(0, 1), dtypes=(0,)),
    "Equal": _elementwise(exact(_equal)),
    "Floor": _elementwise(_rounded(_floor_div, math.floor)),
    "Greater": _elementwise(exact(_flip(_less))),
    "GreaterOrEqual": _elementwise(exact(_flip(_at_most))),
    "Less": _elementwise(exact(_less)),
    "LessOrEqual": _elementwise(exact(_at_most)),
    "Max": _elementwise(exact(lambda a, b: max(a, b) if isinstance(a, float) else maximum(a, b))),
    "Min": _elementwise(exact(lambda a, b: min(a, b) if isinstance(a, float) else minimum(a, b))),
    "Mod": ContentsRule(_mod, contents=(0, 1)),
    "Mul": _elementwise(exact(lambda a, b: a * b)),
    "Neg": _elementwise(_negative),
    "Not": _elementwise(_not),
    "Or": _elementwise(_or),
    "Sign": _elementwise(_sign),
    "Sub": _elementwise(exact(lambda a, b: a - b)),
    "Where": ContentsRule(_where, contents=(0, 1, 2)),
}

#: How ReduceSum, ReduceProd, ReduceMax and ReduceMin fold elements.
FOLDS: dict[str, Callable[[Any, Any], object]] = {
    "ReduceSum": exact(lambda a, b: a + b),
    "ReduceProd": exact(lambda a, b: a * b),
    "ReduceMax": exact(lambda a, b: max(a, b) if isinstance(a, float) else maximum(a, b)),
    "ReduceMin": exact(lambda a, b: min(a, b) if isinstance(a, float) else minimum(a, b)),
}


def fold(name: str, items: Sequence[object]) -> object:
    """The reduction of a list of elements, None where one is not known."""
    if not items:
        return None
    return reduce(lambda a, b: None if a is None or b is None else FOLDS[name](a, b), items)
