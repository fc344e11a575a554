"""Constant factors and powers that a value's terms have.

A factor next to nothing hides a term from every draw; and what one makes next to nothing, or next to infinite, and
another one brings back is lost in the model's own types, though not in a proof in double. A high power of numbers below
one, such as cosines, is next to nothing in every draw, too, unless these happen to be close to one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, prod

import numpy as np
import numpy.typing as npt

from deltafuse.constant_numbers import ConstantNumbers
from deltafuse.contractions import CONTRACTIONS
from deltafuse.reasons import TEXTS, Reason
from deltafuse.scope import Scope

TEXTS["far-factor"] = (
    "the operator {op} ({node}) makes a term that is {factor:.0e} times its operands: no trial may show what it is, or "
    "what the model's own type makes of it; take it out of the model"
)

TEXTS["high-power"] = (
    "the operator {op} ({node}) makes a product of {degree:# operand}, number by number, which no way to write the "
    "rule has: no trial may show what it is; take it out of the model"
)

#: Operands that are multiplied number by number: a way to write the rule has a few.
_OPERANDS = 16

#: Lowest and highest: terms with such a factor still are seen where draws differ in 1e-12 of the whole.
_NEAR = (1e-5, 1e5)

#: Constants by the node that brings each in: one that is used again and again, a scale of the keys say, counts once.
Factor = frozenset[tuple[int, int, float]]
_NONE: Factor = frozenset()


@dataclass(frozen=True)
class Factors:
    """The smallest factor of each value of one scope.

    Attributes:
        scope: the scope.
        numbers: those in its constants.
        known: data value -> the factor of its faintest term; not there where it is one.
        degrees: data value -> how many operands are multiplied number by number in a term of it; not there where it is
            one. Sums of products do not count: an inverse has such of all its tokens.
    """

    scope: Scope
    numbers: ConstantNumbers
    known: dict[int, Factor] = field(default_factory=dict[int, Factor])
    degrees: dict[int, int] = field(default_factory=dict[int, int])

    def of(self, value: int) -> Factor:
        """The factor of a value's faintest term."""
        return self.known.get(value, _NONE)

    def note(self, op: str, node: int, data: Collection[int], *, sums: bool, products: bool) -> Reason | None:
        """Notes what a node makes of data, a Reason where that is too small or too large.

        Args:
            op: what the node computes.
            node: the node.
            data: those of its operands that are no constants.
            sums: whether each of its operands brings terms of its own.
            products: whether it multiplies its operands.
        """
        graph = self.scope.graph
        inputs = [value for value in graph.reads(node) if value]
        parts = [self.of(value) for value in inputs if value in data]
        constants = [value for value in inputs if value not in data] if sums or products else []
        parts += [self._of_constant(node, value, divisor=op == "Div" and value == inputs[-1]) for value in constants]
        parts += [self._of_attributes(node)] if products else []
        found = faintest(parts) if sums else _NONE if op == "Exp" else _NONE.union(*parts)
        self.known.update(dict.fromkeys(graph.node_outputs[node], found) if found else {})
        degree = self._degree(op, node, [value for value in inputs if value in data], products=products)
        self.degrees.update(dict.fromkeys(graph.node_outputs[node], degree) if degree > 1 else {})
        if degree > _OPERANDS:
            return Reason("high-power", {"op": graph.op[node], "node": graph.label(node), "degree": degree})
        factor = size(found)
        if _NEAR[0] <= factor <= _NEAR[1]:
            return None
        return Reason("far-factor", {"op": graph.op[node], "node": graph.label(node), "factor": factor})

    def degree(self, value: int) -> int:
        """How many operands are multiplied, number by number, in a term of a value."""
        return self.degrees.get(value, 1)

    def _degree(self, op: str, node: int, data: Sequence[int], *, products: bool) -> int:
        degrees = [self.degree(value) for value in data]
        if op == "Exp" or not degrees:
            return 1
        if op == "Pow":
            return _OPERANDS + 1
        return sum(degrees) if products and self._by_number(op, node, data) else max(degrees)

    def _by_number(self, op: str, node: int, data: Sequence[int]) -> bool:
        """Whether a product has one number of each operand for each of its own, as far as is known."""
        shape = None if self.scope.engine is None else self.scope.engine.shape
        shapes = [None if shape is None else shape(value) for value in (*data, self.scope.graph.node_outputs[node][0])]
        if None in shapes:
            return op not in CONTRACTIONS
        plain = [tuple(dim for dim in found or () if dim != 1) for found in shapes]
        return all(found == plain[-1] for found in plain) and not (op in CONTRACTIONS and (shapes[0] or (1,))[-1] != 1)

    def _of_constant(self, node: int, value: int, *, divisor: bool) -> Factor:
        array = self.scope.constant(value)
        numbers: Iterable[float] | None = self.numbers.of(value) if array is None else _few(array)
        sizes = [abs(number) for number in numbers or () if number and isfinite(number)]
        if not sizes:
            return _NONE
        return self._factor(node, 1 / max(sizes) if divisor else min(sizes))

    def _of_attributes(self, node: int) -> Factor:
        given = [self.scope.graph.attributes(node).get(name) for name in ("alpha", "beta")]
        sizes = [abs(attribute.f) for attribute in given if attribute is not None and attribute.f]
        return self._factor(node, min(sizes)) if sizes else _NONE

    def _factor(self, node: int, number: float) -> Factor:
        return _NONE if number == 1.0 else frozenset({(id(self.scope.graph), node, number)})


def size(factor: Factor) -> float:
    """The product of all constants."""
    return prod(number for _, _, number in factor)


def faintest(factors: Sequence[Factor]) -> Factor:
    """The smallest of some."""
    return min(factors, key=size, default=_NONE)


def _few(array: npt.NDArray[np.generic]) -> list[float]:
    """The smallest and the largest of the numbers that are not zero."""
    sizes = np.abs(array.astype(np.float64)).ravel()
    sizes = sizes[(sizes > 0) & (sizes < inf)]
    return [] if not sizes.size else [float(sizes.min()), float(sizes.max())]
