"""All sites of ordinary expressions: what patterns propose is checked, proven once a class, and never overlaps."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

from deltafuse.expression_guard import Checked, check, outside, staying
from deltafuse.expression_match import ExpressionMatch
from deltafuse.expression_prover import ProvenExpression, prove_expression
from deltafuse.expression_sizes import odd_size
from deltafuse.expression_view import View
from deltafuse.expressions import Expression, Proposal
from deltafuse.finder import layer_of
from deltafuse.match import Proof, Role
from deltafuse.options import Progress
from deltafuse.reasons import Reason
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes
from deltafuse.verify_cut import canonical
from deltafuse.wire import Model
from deltafuse.worker import Worker

#: Reasons that say "it may be the expression, and something forbids to replace it"; all others: it is not.
REFUSALS = frozenset({"expression-unknown", "expression-opset", "inner-value-used", "not-convex"})

#: Reasons that name what keeps a proof from holding for all sizes.
_SIZES = frozenset({"expression-bound", "expression-size"})


@dataclass(frozen=True)
class ExpressionSite:
    """A place that a pattern proposed.

    Attributes:
        outcome: the match, or why there is none.
        proven: what it was proven with, None where it was not.
        nodes: how many nodes were looked at.
    """

    name: str
    pattern: Expression
    outcome: ExpressionMatch | Reason
    proven: ProvenExpression | None
    nodes: int

    @property
    def near_miss(self) -> bool:
        """Whether it is not the expression (or is, and may not be replaced)."""
        refusals = REFUSALS | self.pattern.refusals
        return isinstance(self.outcome, Reason) and self.outcome.code not in refusals


@dataclass(frozen=True)
class ExpressionSites:
    """Every site of every pattern in the order of the patterns and the file, and how many anchors were looked at."""

    sites: tuple[ExpressionSite, ...] = ()
    anchors: int = 0


@dataclass(frozen=True)
class _Attempt:
    """What came of one proposal, or of one anchor.

    Attributes:
        checked: what was run, None where it did not come to that.
        key: equal for proposals with equal cuts.
    """

    anchor: int
    outcome: ProvenExpression | Reason
    checked: Checked | None = None
    key: bytes = b""

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes it is about."""
        return (self.anchor,) if self.checked is None else self.checked.nodes


def find_expressions(
    model: Model,
    kinds: bytearray,
    shapes: Shapes,
    patterns: Sequence[Expression],
    taken: Collection[int],
    worker: Worker,
    progress: Progress,
    names: Collection[str] = (),
) -> ExpressionSites:
    """Finds and proves the sites of some patterns.

    Patterns that may have more operators come first, so that a large expression is not lost to a small one inside it.

    Args:
        model: in topological order.
        kinds: of its values, see `deltafuse.classes`.
        shapes: its engine.
        patterns: what to look for.
        taken: nodes that belong to other sites.
        worker: runs the cuts; it must stay for as long as the result is used.
        progress: told which pattern is looked for.
        names: of sites of other graphs of the file.
    """
    search = _Search(model, kinds, shapes, set(taken), worker, names)
    sites: list[ExpressionSite] = []
    for pattern in sorted(patterns, key=lambda pattern: -sum(most for _, most in pattern.operators.values())):
        progress.note(pattern.name)
        sites += search.sites(pattern)
    return ExpressionSites(tuple(sites), search.anchors)


class _Search:
    """Looks for the sites of one pattern after the other in one graph; a node belongs to one site."""

    def __init__(
        self, model: Model, kinds: bytearray, shapes: Shapes, taken: set[int], worker: Worker, names: Collection[str]
    ) -> None:
        self.anchors = 0
        self._names = names
        self._model = model
        self._kinds = kinds
        self._shapes = shapes
        self._view = View(model.graph, kinds, shapes)
        self._taken = taken
        self._worker = worker
        self._known: dict[bytes, ProvenExpression | Reason] = {}

    def sites(self, pattern: Expression) -> list[ExpressionSite]:
        """Matches, and what came close, in the order of their anchors."""
        found: list[_Attempt] = []
        for anchor in range(self._model.graph.outer, len(self._model.graph.op)):
            if self._view.op(anchor) not in pattern.anchors or anchor in self._taken:
                continue
            self.anchors += 1
            attempt = self._best(pattern, anchor)
            if attempt is None:
                continue
            if attempt.outcome:
                self._taken.update(attempt.nodes)
            found.append(attempt)
        names = Names(self._model, pattern.name, self._names)
        first: dict[bytes, str] = {}
        return [
            self._site(pattern, attempt, names.of((attempt.anchor, *attempt.nodes)), first)
            for attempt in self._told(found)
        ]

    def _told(self, found: Sequence[_Attempt]) -> Iterator[_Attempt]:
        """All matches, and each near miss once: not what is part of a match, nor what another anchor told of."""
        told: set[int] = set()
        said: set[str] = set()
        for attempt in found:
            if isinstance(attempt.outcome, Reason):
                nodes = attempt.nodes
                if not self._taken.isdisjoint(nodes) or not told.isdisjoint(nodes) or attempt.outcome.text in said:
                    continue
                told.update(nodes)
                said.add(attempt.outcome.text)
            yield attempt

    def _best(self, pattern: Expression, anchor: int) -> _Attempt | None:
        """The first proposal that is proven; else one that may not be replaced; else one that came close."""
        attempts: list[_Attempt] = []
        for proposal in pattern.propose(self._view, anchor):
            if isinstance(proposal, Reason):
                attempts.append(_Attempt(anchor, proposal))
                continue
            attempt = self._attempt(pattern, anchor, proposal)
            if attempt is None:
                continue
            if attempt.outcome:
                return attempt
            attempts.append(attempt)
        return min(attempts, key=lambda attempt: _rank(pattern, attempt), default=None)

    def _attempt(self, pattern: Expression, anchor: int, proposal: Proposal) -> _Attempt | None:
        """What comes of one proposal, None where its nodes belong to another site."""
        checked = check(self._model, self._kinds, self._shapes, self._view, pattern, proposal)
        if isinstance(checked, Reason):
            return _Attempt(anchor, checked)
        if not self._taken.isdisjoint(checked.nodes):
            return None
        odd = odd_size(Scope(self._model, self._model.graph, self._kinds, self._shapes), checked, pattern.name)
        if odd is not None:
            return _Attempt(anchor, odd, checked)
        key = self._key(pattern, checked)
        if key not in self._known:
            graph, shapes = self._model.graph, self._shapes
            self._known[key] = prove_expression(self._worker, graph, shapes, pattern, checked)
        proven = self._known[key]
        if isinstance(proven, Reason):
            # What is shared names a value of the first site.
            result = self._view.name(next(iter(proposal.outputs.values())))
            return _Attempt(anchor, Reason(proven.code, {**proven.args, "value": result}), checked, key)
        refused = outside(self._model.graph, pattern, checked)
        return _Attempt(anchor, proven if refused is None else refused, checked, key)

    def _key(self, pattern: Expression, checked: Checked) -> bytes:
        """Equal for proposals that one proof holds for: equal up to names, types and sizes included."""
        proposal, cut, shapes = checked.proposal, checked.cut, self._shapes
        roles = [(role, str(shapes.shape(value)), shapes.dtype(value)) for role, value in proposal.roles.items()]
        names = [self._view.name(value) for value in cut.inputs]
        sizes = [str(dims) for dims in checked.sizes.values()]
        head = f"{pattern.name}{roles}{list(proposal.outputs)}{sizes}".encode()
        return hashlib.sha256(head + canonical(cut.model, names)).digest()

    def _site(self, pattern: Expression, attempt: _Attempt, name: str, first: dict[bytes, str]) -> ExpressionSite:
        proven, checked = attempt.outcome, attempt.checked
        if isinstance(proven, Reason) or checked is None:
            reason = proven if isinstance(proven, Reason) else Reason("not-convex")
            return ExpressionSite(name, pattern, reason, None, len(attempt.nodes))
        shared = first.setdefault(attempt.key, name)
        kept = staying(self._model.graph, checked)
        nodes = tuple(node for node in checked.nodes if node not in kept)
        match = ExpressionMatch(
            name,
            pattern.name,
            {role: self._role(value) for role, value in checked.proposal.roles.items()},
            {role: self._role(value) for role, value in checked.proposal.outputs.items()},
            proven.parameters,
            nodes,
            attempt.key,
            Proof(proven.max_error, proven.draws, None if shared == name else shared),
        )
        return ExpressionSite(name, pattern, match, proven, len(nodes))

    def _role(self, value: int) -> Role:
        return Role(value, self._view.name(value), "", self._shapes.shape(value) or (), self._shapes.dtype(value) or 0)


def _rank(pattern: Expression, attempt: _Attempt) -> int:
    """How much a reason tells: a refusal most, then what it is instead, then a reason of the pattern."""
    code = cast("Reason", attempt.outcome).code
    if code in REFUSALS | pattern.refusals:
        return 0
    if code in pattern.neighbours or code in _SIZES:
        return 1
    return 2 if code in pattern.texts else 3


class Names:
    """Names of one pattern's sites, none of which is taken or was used by an earlier fuse of the file.

    In a layer that the exporter names: ``layers.3.NAME``, then ``layers.3.NAME.1``; elsewhere ``NAME.0``, ``NAME.1``.
    """

    def __init__(self, model: Model, rule: str, taken: Collection[str] = ()) -> None:
        self._model = model
        self._rule = rule
        self._taken = set(taken)

    def of(self, nodes: Sequence[int]) -> str:
        """The name of a site by its nodes, the anchor first."""
        layer = next(filter(None, (layer_of(self._model.graph, node) for node in nodes)), "")
        stem = f"{layer}.{self._rule}" if layer else self._rule
        tried = (stem if layer and not number else f"{stem}.{number}" for number in count())
        name = next(name for name in tried if name not in self._taken and not self._stands(name))
        self._taken.add(name)
        return name

    def _stands(self, name: str) -> bool:
        return self._model.mapped.find(f"{name}/{self._rule}".encode()) >= 0
