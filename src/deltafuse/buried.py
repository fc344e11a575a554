"""Rules that lie inside a subgraph, with their preparation or more around them: seen from outside.

For a target that takes control flow they are searched as graphs of their own, see `deltafuse.searching`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from deltafuse.bodies import CONTROL, LOOPS, Body, bodies, has_body, with_bodies
from deltafuse.finder import Finder
from deltafuse.graph import Graph
from deltafuse.patterns import Pattern
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.wire import Model

TEXTS.update(
    {
        "inside-body": "what may be a delta rule lies inside {node} ({op}), where only targets ort and onnx take "
        "fused nodes (If, Loop and Scan); take --target ort or onnx, else export the branch, unroll the loop or "
        "inline it",
        "inside-call": "what may be a delta rule lies inside {node}, a call of the function {op} that is not taken "
        "apart here; inline it with onnx.inliner",
        "inside-unproven": "what may be a delta rule lies inside {node} ({op}), and the search of its bodies, each on "
        "its own, found none; export the branch, unroll the loop or inline it",
    }
)


def buried(model: Model, kinds: bytearray, pattern: Pattern, seen: Collection[int]) -> Iterator[tuple[int, Reason]]:
    """The nodes of the main graph that may hold the rule in a subgraph and belong to no candidate.

    Args:
        model: the scanned file.
        kinds: of the main graph's values.
        pattern: the rule.
        seen: nodes of candidates.
    """
    graph = model.graph
    if pattern.decay == "none":
        # Two contractions in a body say too little.
        return
    for node in with_bodies(model, graph):
        if node not in seen and holds(model, graph, kinds, node, pattern):
            sparse = _sparse(graph, node)
            yield node, _reason(graph, node) if sparse is None else sparse


def deeper(model: Model, kinds: bytearray, pattern: Pattern, core: Collection[int]) -> Reason | None:
    """That a candidate that is not the rule as it stands holds one further inside, None where it does not.

    A Loop or Scan whose own body is a step is no such thing: it was tried as what it is.
    """
    graph = model.graph
    for node in core:
        if not has_body(model, graph, node) or pattern.decay == "none":
            continue
        if graph.standard[node] in LOOPS:
            inside = any(_nested(body, pattern) for body in bodies(model, graph, kinds, node))
        else:
            inside = holds(model, graph, kinds, node, pattern)
        if inside:
            return _reason(graph, node)
    return None


def holds(model: Model, graph: Graph, kinds: bytearray, node: int, pattern: Pattern) -> bool:
    """Whether what may be the rule lies in a subgraph of a node, or in one inside that."""
    return any(_is_rule(body, pattern) or _nested(body, pattern) for body in bodies(model, graph, kinds, node))


def _nested(body: Body, pattern: Pattern) -> bool:
    inner = body.graph
    return any(
        holds(body.model, inner, body.kinds, node, pattern) for node in with_bodies(body.model, inner)
    )


def _is_rule(body: Body, pattern: Pattern) -> bool:
    """Whether a candidate is found in a body as if it were a main graph."""
    scope = replace(body.model, graph=body.graph, declarations=())
    vars(scope)["local_functions"] = body.model.local_functions
    return next(Finder(scope, body.kinds, Shapes(scope), pattern).find(), None) is not None


def _sparse(graph: Graph, node: int) -> Reason | None:
    """A sparse tensor among what a node reads: it is taken for a weight, and no rule is looked for behind those."""
    for value in graph.reads(node):
        writer = graph.producer[value]
        head = graph.initializers.get(value) or (graph.constant_head(writer) if writer >= 0 else None)
        if head is not None and head.form == "sparse":
            return Reason("sparse-constant", {"value": graph.name(value)})
    return None


def _reason(graph: Graph, node: int) -> Reason:
    name = graph.label(node)
    code = "inside-body" if graph.standard[node] in CONTROL else "inside-call"
    return Reason(code, {"node": name, "op": graph.op[node]})
