"""One scope of a model in columns: nodes and values are ints, bytes are decoded where they are needed."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, count
from mmap import mmap
from typing import TypeVar, cast, overload

import numpy as np
import onnx

from deltafuse.errors import UserError
from deltafuse.messages import decoded
from deltafuse.protobuf import fields
from deltafuse.ragged import Numbers, Offsets, Ragged, Readers
from deltafuse.tensors import TensorHead, node_head

__all__ = ["Graph", "Runs", "Spans", "TensorHead"]

_T = TypeVar("_T")
_RUNTIME = "com.microsoft"
#: Attributes of up to so many bytes hold a scalar or a few numbers: there are many, most with the same bytes.
_SHORT = 48
#: How many of them are looked at together: lists of all would take megabytes.
_BATCH = 1 << 14


class _Column(Sequence[_T]):
    """A read-only sequence that makes its items when they are asked for."""

    def _item(self, index: int) -> _T:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | Sequence[_T]:
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._item(index)

    def __iter__(self) -> Iterator[_T]:
        return (self._item(i) for i in range(len(self)))


class Spans(_Column[tuple[int, int]]):
    """Byte ranges in 16 bytes each (a list of tuples takes 136)."""

    def __init__(self, starts: array[int], ends: array[int]) -> None:
        self.starts = starts
        self.ends = ends

    def __len__(self) -> int:
        return len(self.starts)

    def _item(self, index: int) -> tuple[int, int]:
        return self.starts[index], self.ends[index]


class Runs(_Column["tuple[tuple[int, int], ...]"]):
    """Item i is a run of consecutive byte ranges; `stops` says where in `spans` each run ends."""

    def __init__(self, spans: Spans, stops: array[int]) -> None:
        self.spans = spans
        self.stops = stops

    def __len__(self) -> int:
        return len(self.stops)

    def whole(self, index: int) -> tuple[int, int]:
        """From the start of the first range of a run to the end of its last, (0, 0) for an empty run."""
        first, stop = self._range(index)
        return (self.spans.starts[first], self.spans.ends[stop - 1]) if stop > first else (0, 0)

    def wholes(self) -> tuple[Offsets, Offsets]:
        """`whole` of every run: their starts and their ends."""
        stops = np.array(self.stops)
        firsts = np.concatenate([np.zeros(1, np.int64), stops])[:-1]
        empty = firsts == stops
        # One more, for runs that end where there is no further range.
        starts, ends = (np.append(np.array(column), 0) for column in (self.spans.starts, self.spans.ends))
        return np.where(empty, 0, starts[firsts]), np.where(empty, 0, ends[stops - 1])

    def _range(self, index: int) -> tuple[int, int]:
        return (self.stops[index - 1] if index else 0), self.stops[index]

    def _item(self, index: int) -> tuple[tuple[int, int], ...]:
        first, stop = self._range(index)
        return tuple(zip(self.spans.starts[first:stop], self.spans.ends[first:stop], strict=True))


@dataclass
class Graph:
    """The main graph of a model.

    Values are numbered in order of first mention; value 0 is the absent one (the empty name). Node order is the file's.

    Attributes:
        data: the whole file.
        value_names: value id -> name bytes.
        op: node -> op_type (equal op_types are the same object).
        domain: node -> domain ("" for ai.onnx).
        node_inputs, node_outputs: node -> value ids.
        captures: node -> values of this scope that its subgraphs read (nodes with subgraphs only).
        spans: node -> byte range of the whole field in the file, tag included.
        attribute_spans: node -> byte ranges of its AttributeProto messages (payload without tag and length).
        inputs, outputs: value ids of graph inputs (initializers excluded) and outputs.
        initializers: value id -> head.
        type_spans: value id -> byte range of its ValueInfoProto message (inputs, outputs and value_info; where a value
            is declared twice, that of the graph input or output).
        outer: number of first nodes that belong to the graph around a body and are only read.
        captured: inputs of a body that are values of the graph around it.
    """

    data: memoryview
    value_names: list[bytes]
    value_ids: dict[bytes, int]
    op: list[str]
    domain: list[str]
    node_inputs: list[tuple[int, ...]]
    node_outputs: list[tuple[int, ...]]
    captures: dict[int, tuple[int, ...]]
    spans: Spans
    attribute_spans: Runs
    inputs: list[int]
    outputs: list[int]
    initializers: dict[int, TensorHead]
    type_spans: dict[int, tuple[int, int]]
    outer: int = 0
    captured: tuple[int, ...] = ()
    _attributes: dict[int, dict[str, onnx.AttributeProto]] = field(
        default_factory=dict[int, dict[str, onnx.AttributeProto]], repr=False
    )
    _heads: dict[int, TensorHead | None] = field(default_factory=dict[int, "TensorHead | None"], repr=False)

    def name(self, value: int) -> str:
        """The name of a value, "" for value 0."""
        return self.value_names[value].decode()

    def find(self, name: str) -> int | None:
        """The id of a value, None where nothing has that name."""
        return self.value_ids.get(name.encode())

    def reads(self, index: int) -> tuple[int, ...]:
        """The values that a node reads, those that its subgraphs take from this scope too."""
        captured = self.captures.get(index)
        return self.node_inputs[index] if captured is None else (*self.node_inputs[index], *captured)

    def node(self, index: int) -> onnx.NodeProto:
        """Decodes one node."""
        start, end = self._payload(index)
        return decoded(onnx.NodeProto, bytes(self.data[start:end]), f"node {index}")

    def node_name(self, index: int) -> str:
        """The name of one node, without decoding the rest of it."""
        start, end = self._payload(index)
        found = [f for f in fields(self.data, start, end) if f[0] == 3]
        return bytes(self.data[found[-1][3] : found[-1][4]]).decode() if found else ""

    def uncast(self, value: int) -> int:
        """The value that Casts and Identities make another of."""
        while (node := self.producer[value]) >= 0 and self.standard[node] in ("Cast", "Identity"):
            value = self.node_inputs[node][0]
        return value

    def label(self, index: int) -> str:
        """What to call a node in messages: its name, or that of its first output."""
        return self.node_name(index) or next((self.name(value) for value in self.node_outputs[index]), "")

    def attributes(self, index: int) -> dict[str, onnx.AttributeProto]:
        """Decodes the attributes of one node, by name (cached)."""
        known = self._attributes.get(index)
        if known is None:
            decoded = [_attribute(bytes(self.data[start:end])) for start, end in self.attribute_spans[index]]
            known = self._attributes[index] = {attribute.name: attribute for attribute in decoded}
        return known

    def constant_head(self, index: int) -> TensorHead | None:
        """What a Constant node holds, without its data; None where the node is no Constant."""
        if self.standard[index] != "Constant":
            return None
        if index not in self._heads:
            self._heads[index] = node_head(self.data, self.attribute_spans[index])
        return self._heads[index]

    def value_info(self, value: int) -> onnx.ValueInfoProto | None:
        """Decodes what the file declares of a value, None where it says nothing."""
        span = self.type_spans.get(value)
        if span is None:
            return None
        info = decoded(onnx.ValueInfoProto, bytes(self.data[span[0] : span[1]]), f"the type of {self.name(value)}")
        # protobuf gives bytes for a text that is none
        if any(not isinstance(cast("object", dim.dim_param), str) for dim in info.type.tensor_type.shape.dim):
            raise UserError(
                "not-onnx", f"an axis of {self.name(value)} has a name that is not UTF-8: rename it and save it again"
            )
        return info

    @cached_property
    def standard(self) -> list[str]:
        """Node -> its op_type where that is an operator of ai.onnx or onnxruntime's own, "" for all others.

        Operators and functions of other domains may have any name, that of a standard operator too.
        """
        keys = set(zip(self.op, self.domain, strict=True)) if any(self.domain) else set[tuple[str, str]]()
        strange = {key for key in keys if not _is_standard(*key)}
        if not strange:
            return self.op
        return ["" if key in strange else key[0] for key in zip(self.op, self.domain, strict=True)]

    @cached_property
    def attribute_numbers(self) -> tuple[Numbers, list[bytes]]:
        """Node -> a number of its attributes as they are in the file, and what the numbers from 1 on stand for.

        It is 0 for no attributes, and -1 for those of more than 48 bytes: hardly any two of these are equal.
        """
        starts, ends = self.attribute_spans.wholes()
        sizes, source = ends - starts, cast("mmap", self.data.obj)
        short = np.flatnonzero((sizes > 0) & (sizes <= _SHORT))
        known = defaultdict[bytes, int](count(1).__next__)
        numbers = np.where(sizes > _SHORT, -1, 0).astype(np.int32)
        for some in np.array_split(short, 1 + len(short) // _BATCH):
            runs = map(slice, starts[some].tolist(), ends[some].tolist())
            numbers[some] = np.fromiter(map(known.__getitem__, map(source.__getitem__, runs)), np.int32, len(some))
        return numbers, list(known)

    @cached_property
    def constant_nodes(self) -> Numbers:
        """The Constant nodes, ascending."""
        nodes = self._by_op.get("Constant", array("i"))
        return np.array(nodes if self.standard is self.op else [n for n in nodes if self.standard[n]], np.int32)

    def nodes_with(self, ops: Iterable[str]) -> list[int]:
        """The nodes of some op_types, ascending."""
        return sorted(chain.from_iterable(self._by_op.get(op, ()) for op in ops))

    @cached_property
    def _by_op(self) -> dict[str, array[int]]:
        numbers = {op: number for number, op in enumerate(dict.fromkeys(self.op))}
        held = np.fromiter(map(numbers.__getitem__, self.op), np.int32, len(self.op))
        nodes = np.argsort(held, kind="stable").astype(np.int32)
        # What is left behind the last run is empty, and all there is of a graph without nodes.
        runs = np.split(nodes, np.cumsum(np.bincount(held, minlength=len(numbers))))
        return {op: array("i", run.tobytes()) for op, run in zip(numbers, runs[:-1], strict=True)}

    @cached_property
    def reading(self) -> Ragged:
        """`node_inputs` as one array."""
        return Ragged.of(self.node_inputs)

    @cached_property
    def writing(self) -> Ragged:
        """`node_outputs` as one array."""
        return Ragged.of(self.node_outputs)

    @cached_property
    def producers(self) -> Numbers:
        """`producer` as an array."""
        writers = np.full(len(self.value_names), -1, np.int32)
        writers[self.writing.flat] = self.writing.row_numbers()
        writers[0] = -1
        return writers

    @cached_property
    def producer(self) -> list[int]:
        """Value -> node that writes it, or -1."""
        return self.producers.tolist()

    @cached_property
    def consumers(self) -> Sequence[Sequence[int]]:
        """Value -> nodes that read it (captures by subgraphs included), ascending, without repeats."""
        captured = [(node, value) for node, values in self.captures.items() for value in values]
        return Readers(self.reading, len(self.value_names), captured)

    def _payload(self, index: int) -> tuple[int, int]:
        start, end = self.spans[index]
        _, _, _, begin, stop, _ = next(fields(self.data, start, end))
        return begin, stop


def _is_standard(op: str, domain: str) -> bool:
    # What onnxruntime has under a name of ai.onnx may mean something else.
    return not domain or (domain == _RUNTIME and not onnx.defs.has(op))


@lru_cache(maxsize=4096)
def _attribute(message: bytes) -> onnx.AttributeProto:
    # exports repeat a few attributes (axis = 0) tens of thousands of times
    return decoded(onnx.AttributeProto, message, "an attribute of a node")
