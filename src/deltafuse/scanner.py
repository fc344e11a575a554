"""The scan of a GraphProto: one tight loop over its nodes, a plain walk over all that is rarer."""

from __future__ import annotations

import mmap
from array import array
from dataclasses import dataclass
from functools import cache
from typing import cast

import onnx

from deltafuse.graph import Graph, Runs, Spans
from deltafuse.protobuf import LENGTH, OverrunError, fields, read_field, read_varint
from deltafuse.subgraphs import attribute_graphs, first_text, free_names
from deltafuse.tensors import TensorHead, sparse_head, tensor_head

#: nodes of more bytes than this are walked in place, not copied
_LARGE = 1 << 16
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO, _SPARSE = 1, 5, 11, 12, 13, 15
_NODE_TAG = _NODE << 3 | LENGTH
_GRAPHS = (onnx.defs.OpSchema.AttrType.GRAPH, onnx.defs.OpSchema.AttrType.GRAPHS)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One ValueInfoProto of the graph: field number (11 input, 12 output, 13 value_info), byte range of the field."""

    value: int
    number: int
    start: int
    end: int


class _Ids(dict[bytes, int]):
    """Gives each new name the next number, until it is closed."""

    closed = False

    def __missing__(self, name: bytes) -> int:
        if self.closed:
            raise KeyError(name)
        number = self[name] = len(self)
        return number


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
        self._ids = _Ids({b"": 0})
        self._texts = _Texts()
        self._op: list[str] = []
        self._domain: list[str] = []
        self._inputs: list[tuple[int, ...]] = []
        self._outputs: list[tuple[int, ...]] = []
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

    def finish(self) -> Graph:
        """The graph of all that was read."""
        ids = self._ids
        ids.closed = True
        names = list(ids)
        for name in names:
            if not name.isascii():
                name.decode()  # raises where it is not UTF-8
        constants = {ids[head.name.encode()]: head for head in self.constants if head.name}
        declared = self.declarations
        values = {number: [d.value for d in declared if d.number == number] for number in (_INPUT, _OUTPUT)}
        order = sorted(declared, key=lambda d: -d.number)
        return Graph(
            data=self.data,
            value_names=names,
            value_ids=ids,
            op=self._op,
            domain=self._domain,
            node_inputs=self._inputs,
            node_outputs=self._outputs,
            captures=self._captures,
            spans=Spans(self._starts, self._ends),
            attribute_spans=Runs(Spans(self._attribute_starts, self._attribute_ends), self._attribute_stops),
            inputs=[value for value in values[_INPUT] if value not in constants],
            outputs=values[_OUTPUT],
            initializers=constants,
            type_spans={d.value: read_field(self.data, d.start, d.end)[3:5] for d in order},
        )

    def _nodes(self, position: int, end: int) -> int:  # noqa: C901 - one call a node would double the time
        """Reads nodes until another field comes, returns where that is.

        The common encoding (fields of at most 16 KiB, tags of one byte) is read here, with all that is used bound to
        locals: this loop is most of the time of a scan. Every other legal encoding goes to `_node`.
        """
        source, ids, texts = self._source, self._ids, self._texts
        add_op, add_domain = self._op.append, self._domain.append
        add_inputs, add_outputs = self._inputs.append, self._outputs.append
        add_start, add_end = self._starts.append, self._ends.append
        attributes = self._attribute_starts
        add_from, add_to, add_stop = attributes.append, self._attribute_ends.append, self._attribute_stops.append
        while position < end and source[position] == _NODE_TAG:
            begin = position + 2
            size = source[position + 1]
            if size > 127:
                size, begin = read_varint(source, position + 1)
            stop = begin + size
            if stop > end:
                raise OverrunError("a node goes on beyond the graph")
            if size > _LARGE:
                self._node(position, begin, stop)
                position = stop
                continue
            raw = source[begin:stop]
            inputs: list[int] = []
            outputs: list[int] = []
            op = domain = ""
            mark = len(attributes)
            at = 0
            try:
                while at < size:
                    tag = raw[at]
                    length = raw[at + 1]
                    at += 2
                    if length > 127:
                        high = raw[at]
                        at += 1
                        if high > 127:
                            break
                        length += (high << 7) - 128
                    after = at + length
                    if tag == 0x0A:
                        inputs.append(ids[raw[at:after]])
                    elif tag == 0x12:
                        outputs.append(ids[raw[at:after]])
                    elif tag == 0x22:
                        op = texts[raw[at:after]]
                    elif tag == 0x2A:
                        add_from(begin + at)
                        add_to(begin + after)
                    elif tag == 0x3A:
                        domain = texts[raw[at:after]]
                    elif tag != 0x1A and tag != 0x32 and tag != 0x4A and tag != 0x42:
                        break
                    at = after
            except IndexError:
                at = -1
            if at != size:
                del attributes[mark:], self._attribute_ends[mark:]
                self._node(position, begin, stop)
                position = stop
                continue
            add_op(op)
            add_domain("" if domain == "ai.onnx" else domain)
            add_inputs(tuple(inputs))
            add_outputs(tuple(outputs))
            add_start(position)
            add_end(stop)
            add_stop(len(attributes))
            if domain or _may_hold_graphs(op):
                self._capture()
            position = stop
        return position

    def _node(self, position: int, begin: int, stop: int) -> None:
        """Reads one node, whatever its encoding."""
        texts = {4: "", 7: ""}
        inputs: list[int] = []
        outputs: list[int] = []
        for number, wire, _, start, end, _ in fields(self.data, begin, stop):
            if wire != LENGTH:
                continue
            if number in (1, 2):
                (inputs if number == 1 else outputs).append(self._ids[bytes(self.data[start:end])])
            elif number in texts:
                texts[number] = self._texts[bytes(self.data[start:end])]
            elif number == 5:
                self._attribute_starts.append(start)
                self._attribute_ends.append(end)
        self._op.append(texts[4])
        self._domain.append("" if texts[7] == "ai.onnx" else texts[7])
        self._inputs.append(tuple(inputs))
        self._outputs.append(tuple(outputs))
        self._starts.append(position)
        self._ends.append(stop)
        self._attribute_stops.append(len(self._attribute_starts))
        self._capture()

    def _capture(self) -> None:
        """Notes which values of this scope the subgraphs of the last node read."""
        stops = self._attribute_stops
        names: dict[bytes, None] = {}
        for index in range(stops[-2] if len(stops) > 1 else 0, stops[-1]):
            span = (self._attribute_starts[index], self._attribute_ends[index])
            for graph in attribute_graphs(self.data, *span):
                names.update(free_names(self.data, graph))
        if names:
            self._captures[len(stops) - 1] = tuple(self._ids[name] for name in names)

    def _other(self, position: int, end: int) -> int:
        number, wire, _, start, stop, _ = read_field(self.data, position, end)
        if wire != LENGTH:
            return stop
        if number == _NODE:
            self._node(position, start, stop)
        elif number in (_INPUT, _OUTPUT, _VALUE_INFO):
            value = self._ids[first_text(self.data, start, stop)]
            self.declarations.append(Declaration(value, number, position, stop))
        elif number in (_INITIALIZER, _SPARSE):
            head = (tensor_head if number == _INITIALIZER else sparse_head)(self.data, [(start, stop)])
            self.constants.append(head)
            self._ids[head.name.encode()]
        return stop
