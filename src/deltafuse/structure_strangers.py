"""What may stand between a fused node and the values that the unfused file has too.

Of what a guard does beyond the numbers that are drawn, draws tell nothing. So the nodes around a fused one are held
against what a fuse writes there: layouts, casts and sizes; the norm of query and key, as a formula; zeros that are made
of data. Nothing else may be there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from deltafuse.boundary import LAYOUT, site_of
from deltafuse.classes import Kind
from deltafuse.graph import Graph
from deltafuse.norm_form import read_form
from deltafuse.norms import take_norm
from deltafuse.reasons import TEXTS, Reason
from deltafuse.tensors import read_tensor
from deltafuse.verify_cut import Side
from deltafuse.verify_regions import SIZES, Region, Walk, reads, rule_of, walk_back

TEXTS["structure-stranger"] = (
    "{node} ({op}) stands between {fused} and the values of the unfused file, where a fuse writes layouts, casts and "
    "the norm of query and key alone, so that what it does to numbers that no draw reaches is not seen; remove it, or "
    "fuse the unfused file again"
)

_MOVES = LAYOUT | {"Cast", "Concat", "Constant"}
#: Arithmetic on sizes: the token count of a sequence, where each begins.
_COUNTS = frozenset({"Mul", "Div"})
#: Operands that may be normalised on the way.
NORMED = ("query", "key")
#: Bytes of the largest zero state that is read.
_LIMIT = 1 << 26


def around(graph: Graph, region: Region, called: Collection[int]) -> set[int]:
    """The nodes of a region that were written around the `called` ones: those of ordinary expressions left out."""
    rules = {rule_of(graph, node) for node in called} | {""}
    return {node for node in region.nodes if node not in called and rule_of(graph, node) in rules}


def find_strangers(
    after: Side, inside: Collection[int], called: Mapping[int, Mapping[str, int]]
) -> Iterator[tuple[int, Reason]]:
    """Nodes that no fuse writes: for each fused node the first of those beside it.

    Args:
        after: the fused file.
        inside: nodes `around` fused ones.
        called: fused node -> operands by port.

    Yields:
        The fused node and what stands there.
    """
    graph = after.graph
    known = {node for ports in called.values() for node in _known(after, inside, ports)}
    left = {node for node in inside if node not in known and not _plain(after, node)}
    if left and after.model.functions:
        # What was inlined of the file's functions stands in the fused file alone.
        ops = {node.op_type for function in after.model.local_functions.values() for node in function.node}
        left = {node for node in left if site_of(graph.node(node)) or graph.op[node] not in ops}
    for node in called:
        beside = sorted(left & _beside(graph, inside, node))
        left.difference_update(beside)
        if beside:
            names = {"node": graph.label(beside[0]), "op": graph.op[beside[0]], "fused": graph.label(node)}
            yield node, Reason("structure-stranger", names)


def _plain(after: Side, node: int) -> bool:
    """Whether a node moves data or works out sizes."""
    graph = after.graph
    op = graph.standard[node]
    if op in _MOVES or op in SIZES:
        return True
    return op in _COUNTS and all(after.kinds[value] <= Kind.SHAPE for value in graph.reads(node))


def _known(after: Side, inside: Collection[int], ports: Mapping[str, int]) -> Iterator[int]:
    """The arithmetic of norms and of zeros on the way to a fused node's operands."""
    graph = after.graph
    for port in NORMED:
        if port in ports:
            yield from norm_nodes(after, walk_back(graph, inside, ports[port]))
    if "state" in ports:
        for node in walk_back(graph, inside, ports["state"]).nodes:
            if graph.standard[node] == "Mul" and any(_is_zero(after, value) for value in graph.node_inputs[node]):
                yield node


def norm_nodes(after: Side, walk: Walk) -> tuple[int, ...]:
    """The nodes of the last value on the way that is a norm of where it starts."""
    graph = after.graph
    starts = [value for value in walk.sources if after.kinds[value] == Kind.DATA]
    for node in reversed(walk.nodes if len(starts) == 1 else ()):
        if _plain(after, node):
            continue
        found = take_norm(after.model, after.kinds, after.shapes, starts[0], graph.node_outputs[node][0])
        if isinstance(found, Reason):
            continue
        nodes, initializers, sources = found
        if not isinstance(read_form(nodes, initializers, graph.name(starts[0])), Reason):
            return sources
    return ()


def _is_zero(after: Side, value: int) -> bool:
    graph = after.graph
    node = graph.producer[value]
    head = graph.initializers.get(value) or (graph.constant_head(node) if node >= 0 else None)
    if head is None:
        return False
    array = read_tensor(after.model, head, _LIMIT)
    return not isinstance(array, Reason) and not np.any(array)


def _beside(graph: Graph, inside: Collection[int], node: int) -> set[int]:
    """Nodes that are connected to a fused one through others inside."""
    found, stack = set[int](), [node]
    while stack:
        for other in _neighbours(graph, stack.pop()):
            if other in inside and other not in found:
                found.add(other)
                stack.append(other)
    return found


def _neighbours(graph: Graph, node: int) -> Iterable[int]:
    yield from (graph.producer[value] for value in reads(graph, node) if value)
    for value in graph.node_outputs[node]:
        yield from graph.consumers[value] if value else ()
