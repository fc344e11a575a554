"""Sums over all tokens, one of another: each grows with the tokens, many of them as a high power of their number.

A rule sums its log decays and the products of tokens with each other. A number that is too small for any trial and
summed up over and over outgrows the rule where no trial goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deltafuse.bodies import Body, bodies, has_body
from deltafuse.contractions import CONTRACTIONS, contracted
from deltafuse.reasons import TEXTS, Reason
from deltafuse.scope import SHAPES, Scope
from deltafuse.shape_bodies import engines

TEXTS.update(
    {
        "nested-sums": "the operator {op} ({node}) is one of more sums over all tokens, each of the one before, than a "
        "rule has: what they make of many tokens is not tried; write the rule in chunks or as a loop",
    }
)

#: Most sums along a free axis that lie one behind the other.
_MOST = 4
_SUMS = CONTRACTIONS | {"CumSum", "ReduceSum", "ReduceMean", "ReduceSumSquare", "Inverse"}


def find_nested_sums(scope: Scope, nodes: Sequence[int]) -> Reason | None:
    """Looks for more sums along free axes, one of another, than a rule has.

    Args:
        scope: where the nodes are.
        nodes: a site's nodes, ascending.

    Returns:
        A Reason that names the first that is one too many, None where there is none.
    """
    found = _search(scope, nodes, {})
    return found if isinstance(found, Reason) else None


def _search(scope: Scope, nodes: Sequence[int], before: Mapping[int, int]) -> dict[int, int] | Reason:
    """How many sums lie behind each value."""
    graph, depth = scope.graph, dict(before)
    for node in nodes:
        op, read = graph.standard[node], graph.reads(node)
        if op in SHAPES:
            continue
        if has_body(scope.model, graph, node):
            found = _inside(scope, node, depth)
            if isinstance(found, Reason):
                return found
            depth |= found
            continue
        count = max((depth.get(value, 0) for value in read), default=0)
        count += (op in _SUMS or graph.op[node] in CONTRACTIONS) and contracted(scope, graph.op[node], node)
        if count > _MOST:
            return Reason("nested-sums", {"op": graph.op[node], "node": graph.label(node)})
        depth.update(dict.fromkeys(graph.node_outputs[node], count) if count else {})
    return depth


def _inside(scope: Scope, node: int, depth: Mapping[int, int]) -> dict[int, int] | Reason:
    """The same of what comes out of subgraphs."""
    graph = scope.graph
    first, outputs = (1 if graph.standard[node] == "Loop" else 0), graph.node_outputs[node]
    found: dict[int, int] = {}
    for body, engine in zip(bodies(scope.model, graph, scope.kinds, node), engines(scope.engine, node), strict=False):
        inner = _body(Scope(body.model, body.graph, body.kinds, None, scope, body, engine), body, depth)
        if isinstance(inner, Reason):
            return inner
        for value, result in zip(outputs, body.graph.outputs[first:], strict=False):
            found[value] = max(found.get(value, 0), inner.get(result, 0))
    return found


def _body(within: Scope, body: Body, depth: Mapping[int, int]) -> dict[int, int] | Reason:
    """Goes through a body until no step hands on more sums than it was given."""
    start = {value: depth[outer] for value, outer in within.outers().items() if outer in depth}
    while True:
        inner = _search(within, range(len(body.graph.op)), start)
        if isinstance(inner, Reason):
            return inner
        ends = {value: inner.get(after, 0) for value, after in body.carried.items()}
        more = {value: count for value, count in ends.items() if count > start.get(value, 0)}
        if not more:
            return inner
        start |= more
