"""What is known of sizes inside the subgraphs of a node."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

from deltafuse.bodies import is_call
from deltafuse.shape_op import Engine, Op
from deltafuse.shape_rules_control import body_engines


def engines(around: Engine | None, node: int) -> Iterator[Engine | None]:
    """An engine for each subgraph of a node, in the order of `deltafuse.bodies.bodies`; None where nothing is known.

    Args:
        around: knows the scope that the node lies in.
        node: an If, a Loop, a Scan or the call of a function.
    """
    if around is None:
        return repeat(None)
    # An engine is told what is settled when it is made, and stays.
    for value in around.graph.reads(node):
        for ask in (around.shape, around.contents, around.dtype):
            ask(value)
    if is_call(around.model, around.graph, node):
        return repeat(around.call(node))
    # No subgraph goes unlooked at, whatever is known.
    return chain(body_engines(Op(around, node)), repeat(None))
