"""What operators make of terms."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from deltafuse.constant_numbers import ConstantNumbers
from deltafuse.contractions import CONTRACTIONS, contracted
from deltafuse.factors import Factors
from deltafuse.reasons import TEXTS, Reason
from deltafuse.scope import Scope
from deltafuse.terms import LOGS, Term, together

TEXTS.update(
    {
        "decay-degree": "the operator {op} ({node}) does more with the log decay than to add it up for an exponential: "
        "what it makes of it may be too small for any trial to show; write the decay as exp of sums of it",
        "counts-tokens": "the operator {op} ({node}) adds up, over as many tokens as there are, numbers that need not "
        "follow any operand: such a sum is a count, and steps that no trial reaches may differ; take it out",
    }
)

#: Operators that add or put together: the operands that they do it with, all where it says None.
JOINS: Mapping[str, tuple[int, ...] | None] = {
    "Add": None, "Sub": None, "Sum": None, "Mean": None, "Concat": None, "SequenceConstruct": None,
    "SequenceInsert": (0, 1), "Where": (1, 2), "ScatterND": (0, 2), "ScatterElements": (0, 2), "Pad": (0, 2),
}  # fmt: skip
_SUMS = frozenset({"ReduceSum", "CumSum"})
#: Operators that multiply.
PRODUCTS = CONTRACTIONS | {"Mul", "Div", "Pow", "Reciprocal"}
#: What the log decay may be multiplied by: whole numbers, so that no difference of two is next to nothing.
_FACTORS = frozenset(map(float, range(-16, 17)))
#: An exponential of this or less is zero.
_NOTHING = -1e4


@dataclass(frozen=True)
class TermRules:
    """The terms of one scope.

    Attributes:
        scope: the scope.
        terms: data value -> kind of its terms, as far as they are known.
        whole: in a subgraph, data that has free axes.
        numbers: those in its constants.
        factors: the smallest of each value.
    """

    scope: Scope
    terms: dict[int, Term]
    whole: set[int]
    numbers: ConstantNumbers
    factors: Factors

    def made(self, op: str, node: int, inputs: Sequence[int]) -> Term | Reason:
        """What a node makes of data."""
        if op in JOINS:
            return self._joined(op, node, inputs)
        kinds = [self.terms[value] for value in inputs if value in self.terms]
        if op == "Exp":
            return Term.BARE
        if not LOGS.isdisjoint(kinds):
            summed = kinds == [Term.LOG] and (op in _SUMS or self._keeps_log(op, node, inputs))
            return Term.LOG if summed else self.reason(node, "decay-degree")
        # One factor that holds an operand is enough, but where a Gemm adds something.
        if op in PRODUCTS and min(kinds) <= Term.OPERAND and (op != "Gemm" or len(inputs) < 3):
            return min(kinds)
        if op == "Neg" or (op not in PRODUCTS and op != "Inverse" and max(kinds) <= Term.OPERAND):
            return max(kinds)
        if op not in PRODUCTS - CONTRACTIONS and self._is_count(op, node, kinds):
            return self.reason(node, "counts-tokens")
        return Term.UNIT if kinds == [Term.UNIT] and op in ("Mul", "Div") else Term.BARE

    def reason(self, node: int, code: str) -> Reason:
        """A Reason that names a node."""
        graph = self.scope.graph
        return Reason(code, {"op": graph.op[node], "node": graph.label(node)})

    def _keeps_log(self, op: str, node: int, inputs: Sequence[int]) -> bool:
        """Whether an operator only makes a whole multiple of the log decay, or masks it, or adds it up."""
        if op == "Neg":
            return True
        others = [value for value in inputs if value not in self.terms]
        if op not in PRODUCTS or len(others) != 1 or op == "Pow" or (op == "Div" and inputs[1] in self.terms):
            return False
        numbers, alpha = self.numbers.of(others[0]), self.scope.graph.attributes(node).get("alpha")
        if numbers is None or (alpha is not None and alpha.f != 1.0):
            return False
        return numbers <= (_FACTORS if op != "Div" else {-1.0, 1.0})

    def _joined(self, op: str, node: int, inputs: Sequence[int]) -> Term | Reason:
        places = JOINS[op]
        chosen = inputs if places is None else [inputs[place] for place in places if place < len(inputs)]
        parts = [value for value in chosen if value]
        kinds = {self.terms[value] for value in parts if value in self.terms}
        if kinds != {Term.BARE}:
            kinds |= {self._of_constant(value, kinds) for value in parts if value not in self.terms}
        found = together(kinds)
        if found is None or (found in LOGS and self._weighs(op, inputs, kinds)):
            return self.reason(node, "decay-degree")
        adds = op.startswith("Scatter") and self.scope.graph.attributes(node).get("reduction")
        if adds and adds.s == b"add" and found > Term.OPERAND:
            return self.reason(node, "counts-tokens")
        return found

    def _weighs(self, op: str, inputs: Sequence[int], kinds: Collection[Term]) -> bool:
        """Whether a mean is taken of the log decay, or what masks it is taken away."""
        return op == "Mean" or (op == "Sub" and Term.MASKED in kinds and self.terms.get(inputs[1]) != Term.LOG)

    def _of_constant(self, value: int, beside: Collection[Term]) -> Term:
        """What a constant is in one sum with values of some kinds."""
        numbers = self.numbers.of(value)
        if numbers is None:
            return Term.BARE
        if numbers <= {0.0}:
            return Term.ZERO
        masks = all(number <= _NOTHING for number in numbers - {0.0})
        return Term.MASKED if masks and not LOGS.isdisjoint(beside) else Term.BARE

    def _is_count(self, op: str, node: int, kinds: Sequence[Term]) -> bool:
        """Whether a sum that may hold no operand goes along an axis of free size."""
        inputs = self.scope.graph.node_inputs[node]
        if self.scope.shapes is None and self.whole.isdisjoint(inputs):
            return False
        engine = self.scope.engine
        known = engine is not None and all(engine.shape(value) is not None for value in inputs if value)
        if self.scope.shapes is not None or known:
            return contracted(self.scope, op, node)
        # Where sizes are not known: rows of two operands with each other are what a rule has.
        return not (op in CONTRACTIONS and kinds == [Term.UNIT, Term.UNIT])
