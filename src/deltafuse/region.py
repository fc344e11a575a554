"""The shape of a candidate: which values all of its results, or all uses of a root, must pass through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from deltafuse.classes import Kind, sizes_of_data
from deltafuse.expression_match import ExpressionMatch
from deltafuse.finder import Candidate
from deltafuse.graph import Graph
from deltafuse.match import Match
from deltafuse.probe import backward_slice
from deltafuse.ragged import Numbers

_TOP = -1
#: What tells the size of a value.
_SIZED = ("Shape", "Size")


class _Tree:
    """A dominator tree that is built in topological order: the parent of a value is where all its sources meet."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._depth: dict[int, int] = {_TOP: 0}

    def add(self, value: int, sources: Iterable[int]) -> None:
        parent: int | None = None
        for source in sources:
            parent = source if parent is None else self._meet(parent, source)
        self._parent[value] = _TOP if parent is None else parent
        self._depth[value] = self._depth[self._parent[value]] + 1

    def __contains__(self, value: int) -> bool:
        return value in self._parent

    def chain(self, value: int) -> list[int]:
        """The value and its dominators, nearest first."""
        chain: list[int] = []
        while value != _TOP:
            chain.append(value)
            value = self._parent[value]
        return chain

    def _meet(self, a: int, b: int) -> int:
        parent, depth = self._parent, self._depth
        while a != b:
            if depth[a] < depth[b]:
                a, b = b, a
            a = parent[a]
        return a


def exits(graph: Graph, candidate: Candidate) -> dict[int, list[int]]:
    """For each frontier value, the core values that everything it gets from the core goes through, nearest first.

    The rule's output lies on the chain of each value that is computed from it alone.
    """
    tree = _Tree()
    for node in candidate.core:
        read = graph.reads(node)
        sources = [value for value in read if value in tree]
        for value in graph.node_outputs[node]:
            tree.add(value, sources)
    return {value: tree.chain(value) for value in candidate.frontier}


def role_chain(graph: Graph, kinds: bytearray, candidate: Candidate, root: int) -> list[int]:
    """The values that all uses of a root inside a candidate pass through, the root first.

    The chain ends where the root meets another root or the core.
    """
    members = set(candidate.nodes)
    inside, owned, reached, stack = members.difference(candidate.core), {root}, set[int](), [root]
    while stack:
        for node in graph.consumers[stack.pop()]:
            if node not in inside or node in reached:
                continue
            data = [value for value in graph.reads(node) if kinds[value] == Kind.DATA]
            if data and owned.issuperset(data):
                reached.add(node)
                fresh = [v for v in graph.node_outputs[node] if v not in owned and kinds[v] == Kind.DATA]
                owned.update(fresh)
                stack += fresh
    written = (value for node in sorted(reached) for value in graph.node_outputs[node])
    own = [root, *(value for value in written if value in owned and value != root)]
    tree = _Tree()
    for value in reversed(own):
        tree.add(value, _successors(graph, kinds, value, members, owned))
    return tree.chain(root)


def _successors(graph: Graph, kinds: bytearray, value: int, members: set[int], owned: set[int]) -> list[int]:
    """Values computed directly from one; `_TOP` stands for whatever is not the root's own."""
    found: list[int] = []
    for node in graph.consumers[value]:
        outputs = graph.node_outputs[node]
        if node not in members or kinds[outputs[0]] != Kind.DATA:
            continue
        found += [output if output in owned else _TOP for output in outputs]
    return found


def needed_roots(graph: Graph, nodes: Iterable[int], roots: Iterable[int]) -> dict[int, frozenset[int]]:
    """For each value of some nodes, the roots it depends on."""
    needed: dict[int, frozenset[int]] = {root: frozenset({root}) for root in roots}
    for node in nodes:
        found = frozenset[int]().union(*(needed[value] for value in graph.reads(node) if value in needed))
        if found:
            needed.update({value: found for value in graph.node_outputs[node] if value not in needed})
    return needed


def between(graph: Graph, match: Match | ExpressionMatch, kinds: bytearray) -> list[int]:
    """The nodes of a site: what computes its results from its operands, and the Shape nodes that it reads.

    What only comes before an operand, and is asked for its size, is not among them.
    """
    reached, results = {role.value for role in match.operands()}, [role.value for role in match.results()]
    # Before a size of data, nothing belongs to a site; there may be all layers before it.
    sizes = sizes_of_data(graph, kinds, _SIZED)
    nodes, _ = backward_slice(graph, sizes | reached, results)
    read = sizes.difference(reached).intersection(chain.from_iterable(map(graph.reads, nodes)))
    found: list[int] = []
    for node in sorted({*nodes, *map(graph.producer.__getitem__, read)}):
        depends = not reached.isdisjoint(graph.reads(node))
        if depends:
            reached.update(value for value in graph.node_outputs[node] if value)
        if depends or all(kinds[value] != Kind.DATA for value in graph.node_outputs[node] if value):
            found.append(node)
    return found


def looked_at(graph: Graph, candidate: Candidate) -> list[int]:
    """The nodes of a site that is no match, the Shape nodes that it reads among them."""
    return [*(graph.producer[size] for size, _ in candidate.sizes), *candidate.nodes]


def dead_nodes(graph: Graph, replaced: Sequence[int], kept: Sequence[int]) -> Numbers:
    """The nodes that nothing needs once some values come from elsewhere, ascending.

    Args:
        graph: the graph they lie in.
        replaced: values that are computed anew.
        kept: values that the new nodes read.
    """
    captures, reads, writing = graph.captures, graph.node_inputs, graph.writing
    used = np.zeros(len(graph.value_names), np.bool_)
    used[graph.reading.flat] = True
    used[[*replaced, *chain.from_iterable(captures.values())]] = True
    used[0] = False
    # What nothing reads, and no one replaces, was of no use before and stays.
    idle = np.ones(len(graph.op), np.bool_)
    idle[writing.row_numbers()[used[writing.flat]]] = False
    producer = graph.producer.copy()
    for value in replaced:
        producer[value] = -1
    stack = [*np.flatnonzero(idle).tolist(), *map(producer.__getitem__, (*kept, *graph.outputs))]
    stays = bytearray(len(graph.op))
    while stack:
        node = stack.pop()
        if node < 0 or stays[node]:
            continue
        stays[node] = 1
        stack += [producer[value] for value in (reads[node] if node not in captures else graph.reads(node))]
    return np.flatnonzero(np.frombuffer(stays, np.uint8) == 0).astype(np.int32)


def convex(graph: Graph, roots: Sequence[int], out: int, final: int | None) -> bool:
    """Whether no root is computed from an output of the site."""
    last = max((graph.producer[root] for root in roots), default=-1)
    reached = {out} if final is None else {out, final}
    for node in range(min(graph.producer[v] for v in reached) + 1, last + 1):
        if any(value in reached for value in graph.reads(node)):
            reached.update(graph.node_outputs[node])
    return not any(root in reached for root in roots)
