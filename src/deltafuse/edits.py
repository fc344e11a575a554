"""Changes to a graph as byte ranges of the file: what is not changed stays byte for byte what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import onnx

from deltafuse.errors import InternalError
from deltafuse.nesting import growths, levels
from deltafuse.protobuf import write_field
from deltafuse.ragged import Numbers
from deltafuse.wire import Declaration, Model

__all__ = ["IN_GRAPH", "Changes", "Edit", "Insertion", "Kind", "Writer", "append_metadata", "apply", "build"]

#: what an edit replaces: whole fields of the graph (nodes; moved nodes; value_info; declarations whose dims were
#: pinned), the length of a graph field, whole fields of the model (opset imports; the record and other metadata)
Kind: TypeAlias = Literal["nodes", "moved", "values", "pins", "size", "opset", "metadata"]
IN_GRAPH = ("nodes", "moved", "values", "pins")
_CHUNK = 8 << 20
#: Bytes from which a piece is written by itself.
_TOGETHER = 1 << 20


class Writer(Protocol):
    """A binary file, as far as writing goes."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Writes all of `data`."""
        ...


class Edit(NamedTuple):
    """Bytes ``start:end`` of the original file become `new`; `site` is "" for what no single site asked for."""

    start: int
    end: int
    new: bytes
    site: str
    kind: Kind


@dataclass(frozen=True)
class Insertion:
    """Nodes that come before a node of the original.

    Attributes:
        site: name of the site.
        before: index of an original node (it may be a removed one), or the number of nodes for the end.
        nodes: in topological order, as messages or their bytes.
        value_info: what is declared of the values they write; replaces what the file declares.
    """

    site: str
    before: int
    nodes: tuple[onnx.NodeProto | bytes, ...]
    value_info: tuple[onnx.ValueInfoProto | bytes, ...] = ()


@dataclass(frozen=True)
class Changes:
    """All that is to be changed in one file. Nodes and values are ids of the scanned graph.

    Attributes:
        removed: (site, nodes) pairs.
        inserted: new nodes.
        moved: (site, node, before): the node goes in front of another (and behind what is inserted there), for the sake
            of that site.
        retyped: (value, declaration): new content of every place that declares the value.
        opsets: (domain, version) of opset imports to add or to set.
    """

    removed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    inserted: tuple[Insertion, ...] = ()
    moved: tuple[tuple[str, int, int], ...] = ()
    retyped: tuple[tuple[int, onnx.ValueInfoProto], ...] = ()
    opsets: tuple[tuple[str, int], ...] = ()


def build(model: Model, changes: Changes, extra: Iterable[Edit] = ()) -> tuple[Edit, ...]:
    """The byte edits that make the changes, in the order of the file, lengths of enclosing messages included.

    value_info of a value that nothing writes any more is removed too.

    Args:
        model: the scanned original.
        changes: what to do.
        extra: further edits (of any kind but ``size``) to put among them.

    Raises:
        InternalError: a removed value is still read, a value to retype is not declared, or two edits overlap.
    """
    return with_sizes(model, [*edits_of(model, changes), *extra])


def edits_of(model: Model, changes: Changes) -> list[Edit]:
    """The edits of one graph in no order, without those of lengths; see `build`."""
    gone = _check_removed(model, changes)
    return [
        *_removals(model, changes),
        *_insertions(model, changes),
        *_moves(model, changes),
        *_values(model, changes, gone),
        *_opsets(model, changes),
    ]


def with_sizes(model: Model, edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Sorts edits and adds those of the lengths of the messages around them."""
    edits = sorted(edits, key=_order)
    for before, after in pairwise(edits):
        if before.end > after.start:
            raise InternalError(
                f"edits overlap: {before.start}:{before.end} ({before.site}), {after.start} ({after.site})"
            )
    found = levels(model, [edit for edit in edits if edit.kind in IN_GRAPH])
    sizes = [Edit(start, end, new, "", "size") for start, end, new in growths(model.data, found)]
    return tuple(sorted([*edits, *sizes], key=_order))


def _order(edit: Edit) -> tuple[int, int, bool]:
    # where the graph ends and a field of the model begins, what belongs to the graph comes first
    return edit.start, edit.end, edit.kind not in IN_GRAPH


def append_metadata(model: Model, key: str, value: str) -> Edit:
    """A metadata_props entry at the end of the file."""
    entry = onnx.StringStringEntryProto(key=key, value=value).SerializeToString()
    return Edit(len(model.data), len(model.data), write_field(14, entry), "", "metadata")


def apply(
    data: memoryview, edits: Sequence[Edit], out: Writer, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes the edited file, in pieces of at most 8 MiB.

    Args:
        data: the original file.
        edits: in the order of the file, as `build` gives them.
        out: where to write.
        progress: is called with bytes read and bytes in all.
    """
    position, held = 0, 0
    pieces: list[bytes | memoryview] = []
    for edit in edits:
        pieces += (data[position : edit.start], edit.new)
        held += edit.start - position + len(edit.new)
        position = edit.end
        if held >= _TOGETHER:
            _write(pieces, out)
            pieces, held = [], 0
    _write(pieces, out)
    _copy(data, position, len(data), out, progress)


def _write(pieces: Sequence[bytes | memoryview], out: Writer) -> None:
    """Writes pieces, small ones together: most are a few bytes between two nodes that go."""
    small: list[bytes | memoryview] = []
    for piece in pieces:
        if len(piece) < _TOGETHER:
            small.append(piece)
            continue
        out.write(b"".join(small))
        small.clear()
        for position in range(0, len(piece), _CHUNK):
            out.write(piece[position : position + _CHUNK])
    out.write(b"".join(small))


def _copy(data: memoryview, start: int, end: int, out: Writer, progress: Callable[[int, int], None] | None) -> None:
    for position in range(start, end, _CHUNK):
        stop = min(position + _CHUNK, end)
        out.write(data[position:stop])
        if progress:
            progress(stop, len(data))


def _bytes(message: onnx.NodeProto | onnx.ValueInfoProto | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _node(message: onnx.NodeProto | bytes) -> onnx.NodeProto:
    return onnx.NodeProto.FromString(message) if isinstance(message, bytes) else message


def _value_info(message: onnx.ValueInfoProto | bytes) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto.FromString(message) if isinstance(message, bytes) else message


def _check_removed(model: Model, changes: Changes) -> dict[int, str]:
    """Declared values that nothing writes any more, and the site that wanted it so; raises where one is still read."""
    graph, stays = model.graph, -1
    taker: Numbers = np.full(len(graph.op), stays, np.int32)
    for index, (_, nodes) in enumerate(changes.removed):
        taker[list(nodes)] = index
    gone: Numbers = np.full(len(graph.value_names), stays, np.int32)
    gone[graph.writing.flat] = taker[graph.writing.row_numbers()]
    written = {name for insertion in changes.inserted for node in insertion.nodes for name in _node(node).output}
    gone[[0, *filter(None, map(graph.find, written))]] = stays
    read = graph.reading.flat[taker[graph.reading.row_numbers()] == stays]
    captured = [value for node, values in graph.captures.items() if taker[node] == stays for value in values]
    held = np.concatenate([read, np.array([*captured, *graph.outputs], np.int32)])
    stuck: list[int] = held[gone[held] != stays].tolist()
    for value in stuck:
        readers = [node for node in graph.consumers[value] if taker[node] == stays]
        where = f"read by the nodes {readers[:5]}" if readers else "the graph's output"
        site = changes.removed[int(gone[value])][0]
        raise InternalError(f"site {site}: {graph.name(value)} is removed, but it is {where}")
    declared = {declaration.value for declaration in model.declarations}
    return {value: changes.removed[int(gone[value])][0] for value in declared if gone[value] != stays}


def _removals(model: Model, changes: Changes) -> Iterator[Edit]:
    starts, ends = (np.array(column) for column in (model.graph.spans.starts, model.graph.spans.ends))
    cuts = [_position(model, insertion.before) for insertion in changes.inserted]
    cuts += [model.graph.spans.starts[before] for _, _, before in changes.moved if before < len(starts)]
    is_cut = np.isin(starts, cuts)
    for site, nodes in changes.removed:
        taken = np.zeros(len(starts), np.bool_)
        taken[list(nodes)] = True
        gone = np.flatnonzero(taken)
        begins, stops = starts[gone], ends[gone]
        parted = (stops[:-1] != begins[1:]) | is_cut[gone[1:]]
        first = np.flatnonzero(np.concatenate([[len(gone) > 0], parted]))
        last = np.flatnonzero(np.concatenate([parted, [len(gone) > 0]]))
        for start, end in zip(begins[first].tolist(), stops[last].tolist(), strict=True):
            yield Edit(start, end, b"", site, "nodes")


def _position(model: Model, before: int) -> int:
    spans = model.graph.spans
    if before < len(spans):
        return spans.starts[before]
    return spans.ends[-1] if len(spans) else model.graph_parts[-1].end


def _insertions(model: Model, changes: Changes) -> Iterator[Edit]:
    for insertion in changes.inserted:
        position = _position(model, insertion.before)
        new = b"".join(write_field(1, _bytes(node)) for node in insertion.nodes)
        if new:
            yield Edit(position, position, new, insertion.site, "nodes")


def _moves(model: Model, changes: Changes) -> Iterator[Edit]:
    for site, node, before in changes.moved:
        start, end = model.graph.spans[node]
        position = _position(model, before)
        yield Edit(position, position, bytes(model.data[start:end]), site, "moved")
        yield Edit(start, end, b"", site, "moved")


def _values(model: Model, changes: Changes, gone: dict[int, str]) -> Iterator[Edit]:
    """Edits of declarations: stale ones out, those of new values in, retyped ones replaced."""
    declared: dict[int, list[Declaration]] = {}
    for declaration in model.declarations:
        declared.setdefault(declaration.value, []).append(declaration)
    new = {_value_info(info).name: (insertion.site, _bytes(info)) for insertion in changes.inserted
           for info in insertion.value_info}  # fmt: skip
    known = {model.graph.find(name): name for name in new}
    for value, site in gone.items():
        yield from (Edit(d.start, d.end, b"", site, "values") for d in declared.get(value, ()) if d.number == 13)
    for value in declared.keys() & known.keys():
        site, payload = new.pop(known[value])
        first, *others = [d for d in declared[value] if d.number == 13] or [None]
        if first is not None:
            yield Edit(first.start, first.end, write_field(13, payload), site, "values")
        yield from (Edit(d.start, d.end, b"", site, "values") for d in others if d is not None)
    end = _declared_end(model)
    yield from (Edit(end, end, write_field(13, payload), site, "values") for site, payload in new.values())
    for value, info in changes.retyped:
        if value in gone or value in known:
            continue
        if value not in declared:
            raise InternalError(f"{model.graph.name(value)} is to be retyped, but nothing declares it")
        for d in declared[value]:
            yield Edit(d.start, d.end, write_field(d.number, info.SerializeToString()), "", "pins")


def _declared_end(model: Model) -> int:
    """Where further value_info goes; in a body to its beginning: its end may be that of the node that holds it."""
    if model.place:
        return model.graph_parts[0].start
    return max((d.end for d in model.declarations if d.number == 13), default=model.graph_parts[-1].end)


def _opsets(model: Model, changes: Changes) -> Iterator[Edit]:
    for domain, version in changes.opsets:
        new = write_field(8, onnx.OperatorSetIdProto(domain=domain, version=version).SerializeToString())
        parts = model.opset_parts.get(domain)
        if parts is None:
            yield Edit(len(model.data), len(model.data), new, "", "opset")
        elif model.opset_imports[domain] != version:
            yield Edit(parts[-1].field, parts[-1].end, new, "", "opset")
