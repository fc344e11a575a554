"""Terms of a site that no draw would show.

Draws scale query, key, value, beta and state apart, so that a term of another degree in these shows. Three kinds of
terms stay out of their reach: those with a factor next to nothing (`deltafuse.factors`), and two more. The log decay
cannot be scaled, so it may be added up only, and then meets the rest as an exponential. And a sum of terms that hold
none of the operands, such as of ones that are made of data times zero, counts tokens: what it makes beyond the sizes
that are tried does not show.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deltafuse.bodies import LOOPS, Body, bodies, has_body
from deltafuse.constant_numbers import ConstantNumbers
from deltafuse.factors import Factors, faintest
from deltafuse.reasons import Reason
from deltafuse.scope import SHAPES, Scope
from deltafuse.shape_bodies import engines
from deltafuse.term_rules import JOINS, PRODUCTS, TermRules
from deltafuse.terms import Term, together
from deltafuse.while_loops import is_brief

#: Operators whose result is what their first operand is.
_MOVES = frozenset({
    "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Tile", "Identity", "Cast", "CastLike",
    "Slice", "Gather", "GatherND", "GatherElements", "Split", "Trilu", "Dropout", "SequenceAt", "SplitToSequence",
    "ConcatFromSequence",
})  # fmt: skip


def find_odd_term(
    scope: Scope, nodes: Sequence[int], roots: Sequence[int], norms: Collection[int], *, decays: bool = True
) -> Reason | None:
    """Looks for terms that no draw would show.

    Args:
        scope: where the nodes are.
        nodes: a site's nodes, ascending, that `deltafuse.guards.find_guard` lets pass.
        roots: values that vary, the log decay first.
        norms: nodes of norms.
        decays: whether the first root is a log decay.

    Returns:
        A Reason that names the first such node, None where there is none.
    """
    terms = dict.fromkeys(roots, Term.OPERAND)
    if decays:
        terms[roots[0]] = Term.LOG
    numbers = ConstantNumbers(scope)
    return _Search(scope, terms, set(), numbers, Factors(scope, numbers)).search(nodes, norms)


@dataclass(frozen=True)
class _Search(TermRules):
    """Follows the terms through one scope."""

    def search(self, nodes: Sequence[int], norms: Collection[int] = ()) -> Reason | None:
        """Notes what nodes make, up to the first that makes what no draw shows."""
        graph, terms = self.scope.graph, self.terms
        standard, functions = graph.standard, bool(self.scope.model.functions)
        for node in nodes:
            inputs, op = graph.reads(node), standard[node]
            held = [value for value in inputs if value in terms]
            if not held or op in SHAPES:
                continue
            if (op in LOOPS or op == "If" or functions) and has_body(self.scope.model, graph, node):
                reason = self._inside(node)
                if reason is not None:
                    return reason
                continue
            if op in _MOVES and inputs[0] not in terms:
                # Of data it takes the type only.
                continue
            if op in _MOVES:
                found: Term | Reason = terms[inputs[0]]
            else:
                found = Term.UNIT if node in norms else self.made(op, node, inputs)
            if isinstance(found, Reason):
                return found
            # What a norm adds to a row's square is part of the norm.
            sums, products = op in JOINS, op in PRODUCTS
            far = None if node in norms else self.factors.note(op, node, held, sums=sums, products=products)
            if far is not None:
                return far
            terms.update(dict.fromkeys(graph.node_outputs[node], found))
            if self.scope.shapes is None and not self.whole.isdisjoint(held):
                self.whole.update(graph.node_outputs[node])
        return None

    def _inside(self, node: int) -> Reason | None:
        """Follows the terms into subgraphs, and notes what comes out of them."""
        graph = self.scope.graph
        first = 1 if graph.standard[node] == "Loop" else 0
        outputs = graph.node_outputs[node]
        kinds: list[set[Term]] = [set() for _ in outputs]
        held: set[int] = set()
        parts = bodies(self.scope.model, graph, self.scope.kinds, node)
        for body, engine in zip(parts, engines(self.scope.engine, node), strict=False):
            within = Scope(body.model, body.graph, body.kinds, None, self.scope, body, engine)
            inner = self._body(node, body, within)
            if isinstance(inner, Reason):
                return inner
            for value, found, result in zip(outputs, kinds, body.graph.outputs[first:], strict=False):
                found.add(inner.terms.get(result, Term.ZERO if inner.numbers.are_zeros(result) else Term.BARE))
                self.factors.known[value] = faintest([self.factors.of(value), inner.factors.of(result)])
                self.factors.degrees[value] = max(self.factors.degree(value), inner.factors.degree(result))
                held.update({value} if result in inner.terms else ())
        for value, found in zip(outputs, kinds, strict=True):
            if value not in held:
                continue
            kind = together(found)
            if kind is None:
                return self.reason(node, "decay-degree")
            self.terms[value] = kind
        if not self.whole.isdisjoint(graph.reads(node)):
            self.whole.update(outputs)
        return None

    def _body(self, node: int, body: Body, within: Scope) -> _Search | Reason:
        """Goes through a body until what it carries stays what it is."""
        outer, numbers = within.outers(), ConstantNumbers(within)
        terms = {value: self.terms[around] for value, around in outer.items() if around in self.terms}
        whole = {value for value in terms if self.scope.has_free_axes(outer[value], self.whole)}
        noughts = [value for value in body.carried if value not in terms and self.numbers.are_zeros(outer[value])]
        terms.update(dict.fromkeys(noughts, Term.ZERO))
        carried = [(value, after) for value, after in body.carried.items() if body.graph.uncast(after) != value]
        factors = {value: self.factors.of(around) for value, around in outer.items()}
        degrees = {value: self.factors.degree(around) for value, around in outer.items()}
        while True:
            known = Factors(within, numbers, dict(factors), dict(degrees))
            inner = _Search(within, dict(terms), set(whole), numbers, known)
            reason = inner.search(range(len(body.graph.op)))
            if reason is not None:
                return reason
            before = dict(terms), set(whole), dict(factors)
            for value, after in carried:
                if after not in inner.terms:
                    continue
                kind = together((terms.get(value, Term.BARE), inner.terms[after]))
                if kind is None:
                    return self.reason(node, "decay-degree")
                terms[value] = kind
                whole.update({value} if after in inner.whole else ())
                factors[value] = faintest([factors.get(value, frozenset()), inner.factors.of(after)])
            if (terms, whole, factors) == before:
                break
        counts = any(terms.get(value, Term.ZERO) > Term.OPERAND for value, _ in carried)
        return self.reason(node, "counts-tokens") if counts and not is_brief(self.scope, node) else inner
