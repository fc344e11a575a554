"""What a norm's arithmetic is as a formula: the row times a power of its own norm, with one constant beside it.

Draws tell such formulas apart, and show a wrong axis or a row that reads another one: there is one reduction and
nothing that begins to count elsewhere. Of other arithmetic they tell nothing beyond the magnitudes that are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto, numpy_helper

from deltafuse.reasons import TEXTS, Reason

TEXTS.update(
    {
        "norm-mixed": "between {value} and the rule lies arithmetic that is more than the norm of a row and one "
        "constant beside it ({op}), so that the rule is looked for behind it; apply the norm alone to query and key, "
        "if it is to be part of the fused node",
    }
)

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_SAME = 1e-12


@dataclass(frozen=True)
class Form:
    """``factor * x ** power * base ** exponent``, the base a function of the norm |x| of the row.

    Attributes:
        kind: of the base: ``plain`` for |x|^2, ``rsqrt`` for |x|^2 + eps, ``max`` for max(|x|, eps)^2.
    """

    factor: float = 1.0
    power: int = 0
    exponent: float = 0.0
    kind: str = "plain"
    eps: float = 0.0

    @property
    def constant(self) -> bool:
        """Whether it depends on no data."""
        return self.power == 0 and self.exponent == 0.0

    @property
    def row(self) -> bool:
        """Whether it is a number for each row: a power of the base."""
        return self.power == 0 and self.exponent != 0.0


def read_form(
    nodes: Sequence[onnx.NodeProto], initializers: Sequence[TensorProto], where: str
) -> tuple[str, float] | Reason:
    """Reads the arithmetic from ``x`` to ``y`` as a norm.

    Args:
        nodes: in order, layout operators left out.
        initializers: their constants.
        where: the value that is normalised, for messages.

    Returns:
        Kind and eps as in `deltafuse.match.Norm`, or a Reason that names the operator that is no part of one.
    """
    forms = {"x": Form(power=1)}
    for tensor in initializers:
        array = numpy_helper.to_array(tensor)
        if array.size == 1:
            forms[tensor.name] = Form(float(array.item()))
    for node in nodes:
        form = _apply(node, forms)
        if form is None:
            return Reason("norm-mixed", {"value": where, "op": node.op_type})
        forms[node.output[0]] = form
    end = forms["y"]
    if end.power != 1 or end.exponent != -0.5 or abs(end.factor - 1) > _SAME:
        return Reason("norm-unknown", {"value": where, "op": ", ".join(dict.fromkeys(node.op_type for node in nodes))})
    return ("rsqrt" if end.kind == "plain" else end.kind), end.eps


def _apply(node: onnx.NodeProto, forms: Mapping[str, Form]) -> Form | None:
    """The form of a node's result; None where it has none."""
    read = node.input[:1] if node.op_type in _REDUCED else [name for name in node.input if name]
    given = [forms.get(name) for name in read]
    operands = [form for form in given if form is not None]
    if len(operands) < len(given):
        return None
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Cast":
        return operands[0] if attributes["to"].i in _FLOATS else None
    if node.op_type == "Clip" and "min" in attributes:
        operands.append(Form(attributes["min"].f))
    rule = _REDUCED.get(node.op_type) or _ARITHMETIC.get(node.op_type)
    return None if rule is None else rule(operands)


def _product(operands: Sequence[Form]) -> Form | None:
    one, other = operands
    if one.exponent == 0.0 or other.exponent == 0.0:
        base = other if one.exponent == 0.0 else one
    elif (one.kind, one.eps) == (other.kind, other.eps):
        base = one
    else:
        return None
    return replace(
        base, factor=one.factor * other.factor, power=one.power + other.power, exponent=one.exponent + other.exponent
    )


def _raised(form: Form, exponent: float) -> Form | None:
    """A power of a form; whole ones of what may be negative."""
    if form.power and (exponent, form.exponent) != (2.0, 0.0):
        return None
    if form.factor <= 0 and exponent != 2.0:
        return None
    power = 2 * form.power
    return replace(form, factor=form.factor**exponent, power=power, exponent=form.exponent * exponent)


def _power(operands: Sequence[Form]) -> Form | None:
    base, exponent = operands
    return _raised(base, exponent.factor) if exponent.constant else None


def _quotient(operands: Sequence[Form]) -> Form | None:
    over, under = operands
    inverse = _raised(under, -1.0)
    return None if inverse is None else _product((over, inverse))


def _sum(operands: Sequence[Form]) -> Form | None:
    """A constant beside the squares of a row."""
    row, constant = sorted(operands, key=lambda form: form.constant)
    if not constant.constant or not row.row or (row.kind, row.exponent) != ("plain", 1.0) or row.factor <= 0:
        return None
    eps = constant.factor / row.factor
    return None if eps < 0 else replace(row, kind="rsqrt" if eps else "plain", eps=eps)


def _floor(operands: Sequence[Form]) -> Form | None:
    """A constant below a positive power of a row's norm."""
    if len(operands) != 2:
        return None
    row, constant = sorted(operands, key=lambda form: form.constant)
    if not constant.constant or not row.row or row.kind != "plain" or row.exponent <= 0 or row.factor <= 0:
        return None
    if constant.factor <= 0:
        return row
    return replace(row, kind="max", eps=(constant.factor / row.factor) ** (0.5 / row.exponent))


def _squares(operands: Sequence[Form]) -> Form | None:
    """The sum of a row's squares, of the squares themselves."""
    (form,) = operands
    return Form(form.factor, exponent=1.0) if (form.power, form.exponent) == (2, 0.0) else None


def _summed(operands: Sequence[Form], exponent: float) -> Form | None:
    """The sum of a row's squares, of the row, or its root."""
    squared = _raised(operands[0], 2.0)
    total = None if squared is None else _squares([squared])
    return None if total is None else _raised(total, exponent)


_REDUCED: dict[str, Callable[[Sequence[Form]], Form | None]] = {
    "ReduceSum": _squares,
    "ReduceSumSquare": lambda operands: _summed(operands, 1.0),
    "ReduceL2": lambda operands: _summed(operands, 0.5),
}
_ARITHMETIC: dict[str, Callable[[Sequence[Form]], Form | None]] = {
    "Add": _sum,
    "Mul": _product,
    "Div": _quotient,
    "Pow": _power,
    "Sqrt": lambda operands: _raised(operands[0], 0.5),
    "Reciprocal": lambda operands: _raised(operands[0], -1.0),
    "Max": _floor,
    "Clip": _floor,
}
