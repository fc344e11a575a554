"""Where edits lie: in the graph of the model, or in the bodies of nodes, whose enclosing messages grow with them.

A subgraph lies in an attribute of a node of another graph. An edit in it changes the lengths of all these messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, TypeVar

import numpy as np

from deltafuse.graph import Spans
from deltafuse.protobuf import LENGTH, Bytes, fields, read_varint, write_varint
from deltafuse.ragged import Offsets
from deltafuse.wire import Model, Part

__all__ = ["Level", "growths", "levels"]

_NODE, _ATTRIBUTE = 1, 5
_GRAPHS = (6, 11)


class Located(Protocol):
    """An edit, as far as its place and its size go."""

    @property
    def start(self) -> int:
        """Where it begins."""
        ...

    @property
    def end(self) -> int:
        """Where what it replaces ends."""
        ...

    @property
    def new(self) -> bytes:
        """What it puts there."""
        ...


E = TypeVar("E", bound=Located)


@dataclass(frozen=True)
class Level(Generic[E]):
    """One part of a graph that holds edits of its own, or nodes with bodies that do.

    Attributes:
        part: the field of the graph (the length of its payload is what grows).
        edits: of the graph itself, in the order of the file.
        around: the fields between the graph around it and this one, the outermost first: the node, its attribute.
        inner: bodies that hold edits.
    """

    part: Part
    edits: tuple[E, ...]
    around: tuple[Part, ...] = ()
    inner: tuple[Level[E], ...] = ()


def levels(model: Model, edits: Iterable[E]) -> tuple[Level[E], ...]:
    """Sorts edits by the graph that they lie in, one level for each part of the main graph that holds some.

    An edit lies in a node where it begins behind the node's own beginning and in front of its end: what is put between
    two nodes belongs to the graph of both.

    Args:
        model: the file.
        edits: of graphs, in the order of the file.
    """
    edits = tuple(edits)
    starts: Offsets = np.array([edit.start for edit in edits], np.int64)
    holders = _holders(model.graph.spans, starts)
    found: list[Level[E]] = []
    for part in model.graph_parts:
        inside = slice(*np.searchsorted(starts, [part.start, part.end + 1]).tolist())
        held: dict[int, list[E]] = {}
        for node, edit in zip(holders[inside], edits[inside], strict=True):
            held.setdefault(node, []).append(edit)
        if held:
            own = tuple(held.pop(-1, ()))
            bodies = (_of_node(model.data, *model.graph.spans[node], some) for node, some in held.items())
            found.append(Level(part, own, (), tuple(chain.from_iterable(bodies))))
    return tuple(found)


def _holders(spans: Spans, places: Offsets) -> list[int]:
    """The node that each place lies in, -1 for those in none: where a node begins is in front of it."""
    begins, ends = np.array(spans.starts), np.append(np.array(spans.ends), -1)
    order = np.argsort(begins)
    # What begins in front of all nodes is given the last one, which is none.
    nodes = np.append(order, -1)[np.searchsorted(begins[order], places) - 1]
    return np.where(places < ends[nodes], nodes, -1).tolist()


def _of_node(data: Bytes, start: int, end: int, edits: Sequence[E]) -> Iterator[Level[E]]:
    """The bodies of one node (a field) that hold edits."""
    ((_, _, _, begin, stop, field),) = fields(data, start, end)
    node = Part(field, begin, stop)
    for attribute, some in _holding(data, node, (_ATTRIBUTE,), edits):
        for graph, inner in _holding(data, attribute, _GRAPHS, some):
            yield _of_graph(data, graph, (node, attribute), inner)


def _of_graph(data: Bytes, graph: Part, around: tuple[Part, ...], edits: Sequence[E]) -> Level[E]:
    nodes = list(_holding(data, graph, (_NODE,), edits, whole=False))
    deeper = {id(edit) for _, some in nodes for edit in some}
    own = tuple(edit for edit in edits if id(edit) not in deeper)
    inner = (level for node, some in nodes for level in _of_node(data, node.field, node.end, some))
    return Level(graph, own, around, tuple(inner))


def _holding(
    data: Bytes, around: Part, numbers: Sequence[int], edits: Sequence[E], *, whole: bool = True
) -> Iterator[tuple[Part, list[E]]]:
    """The fields of a message that hold edits, with them; what begins where a field does is in it where `whole`."""
    starts = [edit.start for edit in edits]
    for number, wire, _, begin, stop, field in fields(data, around.start, around.end):
        if number in numbers and wire == LENGTH:
            first = bisect_left(starts, field) if whole else bisect_right(starts, field)
            inside = list(edits[first : bisect_left(starts, stop)])
            if inside:
                yield Part(field, begin, stop), inside


def growths(data: Bytes, found: Iterable[Level[E]]) -> Iterator[tuple[int, int, bytes]]:
    """The new lengths of all messages around edits: start and end of the old length, and the new one's bytes."""
    for level in found:
        yield from _growths(data, level)[1]


def _growths(data: Bytes, level: Level[E]) -> tuple[int, list[tuple[int, int, bytes]]]:
    """How much a graph's field grows, and the lengths to change.

    Bodies of one node share the node, and those of one attribute the attribute.
    """
    lengths: list[tuple[int, int, bytes]] = []
    grown = sum(len(edit.new) - (edit.end - edit.start) for edit in level.edits)
    within: dict[Part, int] = {}
    for body in level.inner:
        more, inner = _growths(data, body)
        lengths += inner
        within[body.around[-1]] = within.get(body.around[-1], 0) + more
    for depth in (1, 0):
        outer: dict[Part, int] = {}
        owners = {body.around[1]: body.around[0] for body in level.inner}
        for part, more in within.items():
            more += _length(data, part, more, lengths)
            if depth:
                outer[owners[part]] = outer.get(owners[part], 0) + more
            else:
                grown += more
        within = outer
    return grown + _length(data, level.part, grown, lengths), lengths


def _length(data: Bytes, part: Part, grown: int, lengths: list[tuple[int, int, bytes]]) -> int:
    """Notes the new length of a message that grows, and tells how much more bytes the length itself has."""
    if not grown:
        return 0
    _, after_tag = read_varint(data, part.field)
    size = write_varint(part.end - part.start + grown)
    lengths.append((after_tag, part.start, size))
    return len(size) - (part.start - after_tag)
