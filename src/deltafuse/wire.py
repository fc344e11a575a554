"""Reads an ONNX file into columns: one pass over its wire format, nothing is decoded that is not asked for.

Initializer data is skipped by its length, so the pages that hold it are never read.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol, cast

import onnx

from deltafuse.calls import check_calls
from deltafuse.errors import UserError
from deltafuse.functions import bound_nodes, check_names, plain_domain
from deltafuse.graph import Graph
from deltafuse.limits import no_garbage_collection
from deltafuse.mapping import Identity, cut_short, mapped, not_onnx
from deltafuse.messages import decoded
from deltafuse.protobuf import LENGTH, VARINT, NestedError, OverrunError, WireError, fields
from deltafuse.scanner import Columns, Declaration, Scanner
from deltafuse.tensors import TensorHead, read_tensor, text_entry

__all__ = ["Declaration", "Model", "Part", "read_tensor", "scan", "scan_body", "scan_view"]


@dataclass(frozen=True, slots=True)
class Part:
    """One field of the model: where its tag, its payload and what follows it begin."""

    field: int
    start: int
    end: int


@dataclass(frozen=True)
class Model:
    """A scanned file.

    Attributes:
        path: where it was read from; external data is looked for beside it.
        data: the whole file, mapped into memory.
        opset_imports: domain ("" for ai.onnx) -> version.
        metadata: metadata_props of the model.
        producer: producer name and version.
        graph: the main graph.
        functions, training: byte ranges of the FunctionProto and TrainingInfoProto messages.
        graph_parts: every occurrence of the graph field; protobuf merges them.
        opset_parts, metadata_parts: their fields, by domain and key.
        declarations: every ValueInfoProto of the main graph in the file's order.
        constants: heads of the main graph's initializers, in the file's order, repeated names included.
        allow_outside: external data may lie outside the model's folder.
        place: "" for the main graph; the body that `graph`, `graph_parts`, `declarations` and `constants` are of, see
            `deltafuse.enclosed`.
    """

    path: Path
    data: memoryview
    ir_version: int
    opset_imports: dict[str, int]
    metadata: dict[str, str]
    producer: str
    graph: Graph
    functions: tuple[tuple[int, int], ...]
    training: tuple[tuple[int, int], ...]
    graph_parts: tuple[Part, ...]
    opset_parts: dict[str, tuple[Part, ...]]
    metadata_parts: dict[str, tuple[Part, ...]]
    declarations: tuple[Declaration, ...]
    constants: tuple[TensorHead, ...]
    allow_outside: bool = False
    place: str = ""

    @cached_property
    def local_functions(self) -> dict[tuple[str, str], onnx.FunctionProto]:
        """The functions the model defines, decoded, by domain and name; none of a name that has overloads.

        Raises:
            UserError: ``not-onnx``, ``function-recursive``, ``function-too-large``, ``function-hides-operator``.
        """
        found = [decoded(onnx.FunctionProto, bytes(self.data[slice(*span)]), "a function") for span in self.functions]
        check_names(found)
        keys = [(plain_domain(function.domain), function.name) for function in found]
        functions = {key: one for key, one in zip(keys, found, strict=True) if Counter(keys)[key] == 1}
        check_calls(functions)
        return functions

    @property
    def mapped(self) -> mmap.mmap:
        """The mapped file, for searches."""
        return cast("mmap.mmap", self.data.obj)


class Ahead(Protocol):
    """Another process that reads the first nodes of a file, see `deltafuse.first_nodes`."""

    def rest(self, identity: Identity) -> int | None:
        """Where the nodes begin that it leaves; None where it does not read this file."""
        ...

    def columns(self, meanwhile: Callable[[], object]) -> Columns | None:
        """What it read, None where it failed; `meanwhile` is called while it reads."""
        ...


def scan(path: Path, *, allow_outside: bool = False, ahead: Ahead | None = None) -> Model:
    """Reads the structure of an ONNX file.

    Args:
        path: of the file.
        allow_outside: see `Model`.
        ahead: reads its first nodes.

    Raises:
        UserError: ``missing-file``, ``not-a-file``, ``unreadable``, ``not-onnx``, ``truncated``,
            ``nested-too-deep``.
    """
    view, identity = mapped(path)
    begin = None if ahead is None else ahead.rest(identity)
    return _scan(path, view, allow_outside, None if ahead is None or begin is None else (ahead, begin))


def scan_view(path: Path, view: memoryview, *, allow_outside: bool = False) -> Model:
    """Reads the structure of an ONNX file that is mapped into memory, as `scan` does.

    Args:
        path: what messages call it; external data is looked for beside it.
        view: of the mapped file.
        allow_outside: see `Model`.
    """
    return _scan(path, view, allow_outside, None)


def first_graph(view: memoryview) -> tuple[int, int]:
    """Byte range of a model's graph, (0, 0) for none; of the first part of it where it lies in several.

    Raises:
        WireError: the bytes are no model.
    """
    return next(((part.start, part.end) for part in _scan_top(view).graphs), (0, 0))


def _scan(path: Path, view: memoryview, allow_outside: bool, ahead: tuple[Ahead, int] | None) -> Model:
    with no_garbage_collection():
        try:
            top = _scan_top(view)
            return replace(_scan_graphs(path, view, top, ahead), allow_outside=allow_outside)
        except _TruncatedError as error:
            raise cut_short(path, error) from None
        except NestedError as error:
            raise UserError("nested-too-deep", f"{path}: {error}, which no reader takes: export it flatter") from None
        except WireError as error:
            raise not_onnx(path, error) from None
        except UnicodeDecodeError as error:
            text = f"{path}: the name {error.object[:64]!r} is not UTF-8: rename it and save the model again"
            raise UserError("not-onnx", text) from None


def scan_body(model: Model, attribute: tuple[int, int]) -> Graph:
    """Reads the subgraph that an attribute of a node holds (the body of a Loop, a branch of an If), as `scan` does.

    Args:
        model: the model it is part of.
        attribute: byte range of the AttributeProto, one of ``graph.attribute_spans[node]``.
    """
    scanner = Scanner(model.data)
    for number, wire, _, start, end, _ in fields(model.data, *attribute):
        if number == 6 and wire == LENGTH:
            scanner.graph(start, end)
    return scanner.finish()


def scan_function(model: Model, function: onnx.FunctionProto, call: onnx.NodeProto) -> Model:
    """A function's body for one call as a model of its own, whose graph has the function's inputs and outputs."""
    named = [[onnx.ValueInfoProto(name=name) for name in names] for names in (function.input, function.output)]
    graph = onnx.GraphProto(name=function.name, node=bound_nodes(function, call), input=named[0], output=named[1])
    data = memoryview(graph.SerializeToString())
    scanner = Scanner(data)
    scanner.graph(0, len(data))
    scope = replace(model, data=data, graph=scanner.finish())
    # Functions call each other: what is decoded once serves all, and lies in the model's own bytes.
    vars(scope)["local_functions"] = model.local_functions
    return scope


class _TruncatedError(WireError):
    """The file ends inside a field of the model."""


@dataclass
class _ModelFields:
    ir_version: int = 0
    producer: list[str] = field(default_factory=lambda: ["", ""])
    opsets: dict[str, int] = field(default_factory=dict[str, int])
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    functions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    training: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    graphs: list[Part] = field(default_factory=list[Part])
    opset_parts: dict[str, tuple[Part, ...]] = field(default_factory=dict[str, tuple[Part, ...]])
    metadata_parts: dict[str, tuple[Part, ...]] = field(default_factory=dict[str, tuple[Part, ...]])


def _scan_graphs(path: Path, data: memoryview, top: _ModelFields, ahead: tuple[Ahead, int] | None) -> Model:
    if not top.graphs:
        raise WireError("there is no graph in it")
    spans = [(part.start, part.end) for part in top.graphs]
    scanner = None if ahead is None else _read_rest(data, spans, *ahead)
    if scanner is None:
        scanner = _read(data, spans)
    return Model(
        path,
        data,
        top.ir_version,
        top.opsets,
        top.metadata,
        " ".join(filter(None, top.producer)),
        scanner.finish(),
        tuple(top.functions),
        tuple(top.training),
        tuple(top.graphs),
        top.opset_parts,
        top.metadata_parts,
        tuple(scanner.declarations),
        tuple(scanner.constants),
    )


def _read(data: memoryview, spans: Sequence[tuple[int, int]]) -> Scanner:
    scanner = Scanner(data)
    for span in spans:
        scanner.graph(*span)
    return scanner


def _read_rest(data: memoryview, spans: Sequence[tuple[int, int]], ahead: Ahead, begin: int) -> Scanner | None:
    """Reads what is not read ahead, and puts it behind that; None where that failed."""
    read: list[Scanner] = []
    first = ahead.columns(lambda: read.append(_read(data, [(begin, spans[0][1]), *spans[1:]])))
    if first is None:
        return None
    (scanner,) = read
    scanner.follow(first)
    return scanner


def _scan_top(data: memoryview) -> _ModelFields:
    """Reads the fields of the ModelProto, all but what is in the graph."""
    top = _ModelFields()
    try:
        for number, wire, value, start, end, begin in fields(data, 0, len(data)):
            _top_field(top, data, number, wire, value, Part(begin, start, end))
    except OverrunError as error:
        # the length of a random text's first "field" goes beyond its end too
        if top.ir_version or top.graphs or error.number == 7:
            raise _TruncatedError(str(error)) from None
        raise
    return top


def _top_field(top: _ModelFields, data: memoryview, number: int, wire: int, value: int, part: Part) -> None:
    expected = {1: VARINT, 2: LENGTH, 3: LENGTH, 7: LENGTH, 8: LENGTH, 14: LENGTH, 20: LENGTH, 25: LENGTH}.get(
        number, wire
    )
    if wire != expected:
        raise WireError(f"field {number} of the model has wire type {wire}")
    if number == 1:
        top.ir_version = value
    elif number in (2, 3):
        top.producer[number - 2] = bytes(data[part.start : part.end]).decode()
    elif number == 7:
        top.graphs.append(part)
    elif number == 8:
        domain, version = _opset(data, part.start, part.end)
        top.opsets[domain] = version
        top.opset_parts[domain] = (*top.opset_parts.get(domain, ()), part)
    elif number == 14:
        key, text = text_entry(data, part.start, part.end)
        top.metadata[key] = text
        top.metadata_parts[key] = (*top.metadata_parts.get(key, ()), part)
    elif number == 20:
        top.training.append((part.start, part.end))
    elif number == 25:
        top.functions.append((part.start, part.end))


def _opset(data: memoryview, start: int, end: int) -> tuple[str, int]:
    domain, version = "", 0
    for number, _, value, begin, stop, _ in fields(data, start, end):
        if number == 1:
            domain = bytes(data[begin:stop]).decode()
        elif number == 2:
            version = value
    return ("" if domain == "ai.onnx" else domain), version
