"""The scan of a GraphProto: its nodes many at once, all that is rarer in a plain walk."""

from __future__ import annotations

import itertools
import mmap
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np
import onnx

from deltafuse.graph import Graph, Runs, Spans
from deltafuse.lockstep import Fields, split, walk
from deltafuse.protobuf import LENGTH, OverrunError, read_field
from deltafuse.ragged import Numbers, Offsets, Ragged
from deltafuse.subgraphs import attribute_graphs, first_text, free_names
from deltafuse.tensors import TensorHead, sparse_head, tensor_head

#: nodes that are walked at once
_BATCH = 1 << 15
#: bytes of nodes that are copied at most: weights inside nodes are left where they are
_COPIED = 1 << 26
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO, _SPARSE = 1, 5, 11, 12, 13, 15
NODE_TAG = _NODE << 3 | LENGTH
_GRAPHS = (onnx.defs.OpSchema.AttrType.GRAPH, onnx.defs.OpSchema.AttrType.GRAPHS)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One ValueInfoProto of the graph: field number (11 input, 12 output, 13 value_info), byte range of the field."""

    value: int
    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Columns:
    """What a `Scanner` found in some nodes, to be sent to another process.

    Attributes:
        names: of the values, in order of first mention, the empty one first.
        op, domain: of each node.
        inputs, outputs: by batch of nodes, the numbers in `names` of all, and how many each node has.
        captures: node -> the numbers of what its subgraphs read of this scope.
        starts, ends: byte ranges of the nodes, tags included.
        attribute_starts, attribute_ends, attribute_stops: as in `deltafuse.graph.Runs`.
    """

    names: list[bytes]
    op: list[str]
    domain: list[str]
    inputs: list[tuple[Numbers, Offsets]]
    outputs: list[tuple[Numbers, Offsets]]
    captures: dict[int, tuple[int, ...]]
    starts: array[int]
    ends: array[int]
    attribute_starts: array[int]
    attribute_ends: array[int]
    attribute_stops: array[int]


class _Texts(dict[bytes, str]):
    """Decodes each text once, so that equal texts are one object."""

    def __missing__(self, raw: bytes) -> str:
        text = self[raw] = raw.decode()
        return text


@cache
def _may_hold_graphs(op: str) -> bool:
    """Whether nodes of this op_type of ai.onnx may have subgraphs: True too for what the standard does not know."""
    if not onnx.defs.has(op):
        return True
    return any(attribute.type in _GRAPHS for attribute in onnx.defs.get_schema(op).attributes.values())


class Scanner:
    """Fills the columns of a `Graph`; `graph` is called once for each part of a split GraphProto."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        # the mapped file itself: its slices are bytes at once
        self._source = cast("mmap.mmap", data.obj)
        # gives each new name the next number
        self._ids: defaultdict[bytes, int] = defaultdict(itertools.count(1).__next__, {b"": 0})
        self._texts = _Texts()
        self._op: list[str] = []
        self._domain: list[str] = []
        # by batch: values of all nodes, how many each node has
        self._inputs: list[tuple[Numbers, Offsets]] = []
        self._outputs: list[tuple[Numbers, Offsets]] = []
        self._captures: dict[int, tuple[int, ...]] = {}
        self._starts, self._ends = array("q"), array("q")
        self._attribute_starts, self._attribute_ends, self._attribute_stops = array("q"), array("q"), array("q")
        self.declarations: list[Declaration] = []
        self.constants: list[TensorHead] = []

    def graph(self, start: int, end: int) -> None:
        """Reads the GraphProto (or a part of it) in this byte range.

        Raises:
            WireError: the bytes are no graph.
            UnicodeDecodeError: a name is not UTF-8.
        """
        position = start
        while position < end:
            try:
                position = self._nodes(position, end)
            except IndexError:
                raise OverrunError("the data ends inside a node") from None
            if position < end:
                position = self._other(position, end)

    def columns(self) -> Columns:
        """All that was read of nodes."""
        return Columns(
            list(self._ids), self._op, self._domain, self._inputs, self._outputs, self._captures, self._starts,
            self._ends, self._attribute_starts, self._attribute_ends, self._attribute_stops,
        )  # fmt: skip

    def follow(self, first: Columns) -> None:
        """Makes all that was read here what comes behind these nodes in the file: as if it all had been read here."""
        count, before = len(first.op), first.attribute_stops[-1] if first.attribute_stops else 0
        ids = defaultdict(itertools.count(len(first.names)).__next__, zip(first.names, itertools.count()))
        numbers = np.array([ids[name] for name in self._ids], np.int32)
        moved = {node: tuple(numbers[list(values)].tolist()) for node, values in self._captures.items()}
        self._captures = first.captures | {count + node: values for node, values in moved.items()}
        self.declarations = [replace(one, value=int(numbers[one.value])) for one in self.declarations]
        self._inputs, self._outputs = (
            [*ahead, *((numbers[values], counts) for values, counts in own)]
            for ahead, own in ((first.inputs, self._inputs), (first.outputs, self._outputs))
        )
        texts = {text: text for text in (*first.domain, *first.op)}
        self._op, self._domain = (
            [*ahead, *(texts.setdefault(text, text) for text in own)]
            for ahead, own in ((first.op, self._op), (first.domain, self._domain))
        )
        self._starts, self._ends = first.starts + self._starts, first.ends + self._ends
        self._attribute_starts = first.attribute_starts + self._attribute_starts
        self._attribute_ends = first.attribute_ends + self._attribute_ends
        self._attribute_stops = first.attribute_stops + array("q", (np.array(self._attribute_stops) + before).tobytes())
        self._ids = ids

    def add_constant(self, head: TensorHead) -> None:
        """Adds an initializer that lies elsewhere in the file."""
        self.constants.append(head)
        self._ids[head.name.encode()]

    def finish(self) -> Graph:
        """The graph of all that was read."""
        ids = self._ids
        ids.default_factory = None
        names = list(ids)
        if not b"".join(names).isascii():
            for name in names:
                name.decode()  # raises where it is not UTF-8
        constants = {ids[head.name.encode()]: head for head in self.constants if head.name}
        declared = self.declarations
        values = {number: [d.value for d in declared if d.number == number] for number in (_INPUT, _OUTPUT)}
        order = sorted(declared, key=lambda d: -d.number)
        reading, writing = _joined(self._inputs), _joined(self._outputs)
        graph = Graph(
            data=self.data,
            value_names=names,
            value_ids=ids,
            op=self._op,
            domain=self._domain,
            node_inputs=reading.rows(),
            node_outputs=writing.rows(),
            captures=self._captures,
            spans=Spans(self._starts, self._ends),
            attribute_spans=Runs(Spans(self._attribute_starts, self._attribute_ends), self._attribute_stops),
            inputs=[value for value in values[_INPUT] if value not in constants],
            outputs=values[_OUTPUT],
            initializers=constants,
            type_spans={d.value: read_field(self.data, d.start, d.end)[3:5] for d in order},
        )
        # What it would put together again from the lists.
        vars(graph).update(reading=reading, writing=writing)
        return graph

    def _nodes(self, position: int, end: int) -> int:
        """Reads nodes until another field comes, returns where that is."""
        starts, begins, stop = walk(self._source, position, end, NODE_TAG)
        self.nodes(starts, begins, stop)
        return stop

    def nodes(self, starts: array[int], begins: array[int], stop: int) -> None:
        """Reads the nodes that `walk` found; each ends where the next one starts."""
        stops = starts[1:]
        stops.extend([stop] * bool(begins))
        self._starts.extend(starts)
        self._ends.extend(stops)
        for first in range(0, len(begins), _BATCH):
            self._batch(np.array(begins[first : first + _BATCH]), np.array(stops[first : first + _BATCH]))

    def _batch(self, begins: Offsets, stops: Offsets) -> None:
        """Fills the columns of some nodes."""
        found, first, count = split(self._source, begins, stops), len(self._op), len(begins)
        op, domain = (self._last_text(found, number, count) for number in (4, 7))
        self._op += op
        self._domain += ["" if text == "ai.onnx" else text for text in domain]
        is_attribute = found.number == 5
        self._attribute_starts.frombytes(found.start[is_attribute].tobytes())
        self._attribute_ends.frombytes(found.stop[is_attribute].tobytes())
        before = self._attribute_stops[-1] if self._attribute_stops else 0
        counts = np.bincount(found.message[is_attribute], minlength=count)
        self._attribute_stops.frombytes((before + np.cumsum(counts)).tobytes())
        holders = set(filter(_may_hold_graphs, set(op)))
        capturing = (
            [node for node in range(count) if domain[node] or op[node] in holders] if holders or any(domain) else []
        )
        self._values(found, first, count, capturing)

    def _last_text(self, found: Fields, number: int, count: int) -> list[str]:
        """The text in a field of each node; the last one counts, as in protobuf."""
        texts, source, chosen = self._texts, self._source, found.number == number
        result = [""] * count
        nodes, starts, stops = (column[chosen].tolist() for column in (found.message, found.start, found.stop))
        for node, start, stop in zip(nodes, starts, stops, strict=True):
            result[node] = texts[source[start:stop]]
        return result

    def _values(self, found: Fields, first: int, count: int, capturing: Sequence[int]) -> None:
        """Numbers what nodes read and write in order of first mention; subgraphs mention values behind their node."""
        ids, named = self._ids, found.number <= 2
        node, starts, stops = found.message[named], found.start[named], found.stop[named]
        begin, end = (int(starts[0]), int(stops[-1])) if len(starts) else (0, 0)
        source = self._source
        if end - begin < _COPIED:
            # Slices of bytes are made faster than those of a mapped file.
            source, starts, stops = source[begin:end], starts - begin, stops - begin
        starts, stops = starts.tolist(), stops.tolist()
        numbers: list[int] = []
        marks = np.searchsorted(node, np.array(capturing, np.int32), "right").tolist()
        for holder, mark in zip((*capturing, -1), (*marks, len(starts)), strict=True):
            done = len(numbers)
            numbers += [ids[source[a:b]] for a, b in zip(starts[done:mark], stops[done:mark], strict=True)]
            if holder >= 0:
                self._capture(first + holder)
        values, reads = np.array(numbers, np.int32), found.number[named] == 1
        for columns, chosen in ((self._inputs, reads), (self._outputs, ~reads)):
            columns.append((values[chosen], np.bincount(node[chosen], minlength=count)))

    def _capture(self, node: int) -> None:
        """Notes which values of this scope the subgraphs of a node read."""
        stops = self._attribute_stops
        names: dict[bytes, None] = {}
        for index in range(stops[node - 1] if node else 0, stops[node]):
            span = (self._attribute_starts[index], self._attribute_ends[index])
            for graph in attribute_graphs(self.data, *span):
                names.update(free_names(self.data, graph))
        if names:
            self._captures[node] = tuple(self._ids[name] for name in names)

    def _other(self, position: int, end: int) -> int:
        number, wire, _, start, stop, _ = read_field(self.data, position, end)
        if wire != LENGTH:
            return stop
        if number == _NODE:
            self._starts.append(position)
            self._ends.append(stop)
            self._batch(np.array([start]), np.array([stop]))
        elif number in (_INPUT, _OUTPUT, _VALUE_INFO):
            value = self._ids[first_text(self.data, start, stop)]
            self.declarations.append(Declaration(value, number, position, stop))
        elif number in (_INITIALIZER, _SPARSE):
            head = (tensor_head if number == _INITIALIZER else sparse_head)(self.data, [(start, stop)])
            self.add_constant(head)
        return stop


def _joined(batches: Sequence[tuple[Numbers, Offsets]]) -> Ragged:
    flat = [np.zeros(0, np.int32), *(values for values, _ in batches)]
    counts = [np.zeros(0, np.int64), *(counts for _, counts in batches)]
    return Ragged(np.concatenate(flat), np.cumsum(np.concatenate(counts)))
