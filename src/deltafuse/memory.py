"""What the steps of a loop remember besides the state of the rule.

A step may carry the state, and results that it only puts beside those of the steps before. What else it computes from
step to step is a memory of its own: a number that grows a little each time, or a row that waits for thousands of
steps, is nothing in all trials and another rule beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltafuse.bench import Binding
from deltafuse.bodies import LOOPS, Body, bodies, has_body
from deltafuse.carried import from_data
from deltafuse.classes import Kind
from deltafuse.dims import Dim, evaluate, symbols
from deltafuse.reasons import TEXTS, Reason
from deltafuse.scope import SHAPES, Scope
from deltafuse.shape_bodies import engines
from deltafuse.while_loops import is_brief

TEXTS.update(
    {
        "further-memory": "the loop {node} computes {value} from step to step, which is not the state of the rule and "
        "of its size: what it adds up may show after more steps than are tried; let it carry the state alone, "
        "and put results beside each other without computing with those before",
    }
)

#: Operators that put something beside what a step before has left, and the operands that may be the latter.
_KEEPS: Mapping[str, tuple[int, ...]] = {
    "ScatterND": (0,), "ScatterElements": (0,), "SequenceInsert": (0,), "Concat": (0, 1), "Where": (1, 2),
    "Identity": (0,), "Cast": (0,), "CastLike": (0,),
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """The state that a rule has.

    Attributes:
        elements: of the state, at the sizes of a trial.
        binding: of that trial.
        tokens: symbols of the token axis.
        returned: the final state that the site gives back, 0 where it gives none: trials hold all of it against the
            rule's, its shape too.
    """

    elements: int
    binding: Binding
    tokens: frozenset[str]
    returned: int = 0

    def find_further(self, scope: Scope, nodes: Sequence[int]) -> Reason | None:
        """Looks for a loop of free length that carries anything else from step to step.

        Args:
            scope: where the nodes are.
            nodes: of a site.

        Returns:
            A Reason that names the first such loop and value, None where there is none.
        """
        graph = scope.graph
        for node in nodes:
            if not has_body(scope.model, graph, node):
                continue
            for body, engine in zip(
                bodies(scope.model, graph, scope.kinds, node), engines(scope.engine, node), strict=False
            ):
                within = Scope(body.model, body.graph, body.kinds, None, scope, body, engine)
                ends = graph.standard[node] not in LOOPS or is_brief(scope, node)
                further = 0 if ends else self._further(within, node)
                if further:
                    args = {"node": graph.label(node), "value": body.graph.name(further)}
                    return Reason("further-memory", args)
                found = self.find_further(within, range(len(body.graph.op)))
                if found is not None:
                    return found
        return None

    def _further(self, within: Scope, node: int) -> int:
        """Data that a body carries and that is neither kept nor the state; 0 where there is none."""
        body, around = within.body, within.around
        assert body is not None, "a subgraph takes values from around"
        assert around is not None, "a subgraph lies in a scope"
        data = {value for value, outer in within.outers().items() if around.kinds[outer] == Kind.DATA}
        carried = from_data(body, data)
        changed = (value for value, after in body.carried.items() if body.graph.uncast(after) != value)
        computed = [value for value in changed if value in carried and not _is_kept(body, value)]
        compared = self._compared(around, body, node)
        shapes = {value: _shapes(within, body, value) for value in computed}
        other = (value for value in computed
                 if not all(self._is_as_large(shape, spread=value == compared) for shape in shapes[value]))  # fmt: skip
        return next(other, next(iter(computed[1:]), 0))

    def _compared(self, around: Scope, body: Body, node: int) -> int:
        """What is carried and comes out as the final state itself, 0 where nothing does: trials see its whole shape."""
        graph = around.graph
        if around.shapes is None or not self.returned:
            return 0
        results = dict(zip(body.carried.values(), body.carried, strict=True))
        first = 1 if graph.standard[node] == "Loop" else 0
        pairs = zip(graph.node_outputs[node], body.graph.outputs[first:], strict=False)
        return next((results.get(made, 0) for value, made in pairs if value == graph.uncast(self.returned)), 0)

    def _is_as_large(self, shape: Sequence[Dim] | None, *, spread: bool = False) -> bool:
        numbers = self.binding.numbers
        if shape is None:
            return False
        unknown = [dim for dim in shape if not symbols(dim) <= numbers.keys() - self.tokens]
        known = math.prod(evaluate(dim, numbers) for dim in shape if dim not in unknown)
        if not unknown:
            return known == self.elements
        # A batch that is declared apart from that of the operands, and spread over theirs in the first step.
        told = any(not self.tokens.isdisjoint(symbols(dim)) for dim in unknown)
        return spread and not told and len(unknown) == 1 and known * (self.binding.batch or 0) == self.elements


def _shapes(within: Scope, body: Body, value: int) -> list[Sequence[Dim] | None]:
    """Those of a carried value before and after a step."""
    engine = within.engine
    return [None if engine is None else engine.shape(one) for one in (value, body.carried[value])]


def _is_kept(body: Body, value: int) -> bool:
    """Whether a carried value only has something put beside it, and nothing else of a step follows from it."""
    graph, kept, made = body.graph, {value}, set[int]()
    for node, op in enumerate(graph.standard):
        inputs = graph.node_inputs[node]
        held = [place for place, one in enumerate(inputs) if one in kept]
        others = not made.isdisjoint(graph.reads(node))
        if op in SHAPES or (not others and kept.isdisjoint(graph.reads(node))):
            continue
        keeps = len(held) == 1 and held[0] in _KEEPS.get(op, ()) and not others
        (kept if keeps else made).update(graph.node_outputs[node])
    ends = [result for result in graph.outputs if result in kept or result in made]
    return ends == [body.carried[value]] and ends[0] in kept
