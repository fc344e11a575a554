"""Tables of any graph, for people: tensors, nodes, operators."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from typing import TextIO

from deltafuse.probing import Listing, NodeRow, TensorRow
from deltafuse.tables import columns
from deltafuse.tables_fit import packed
from deltafuse.wording import number

TENSOR_COLUMNS = ("tensor", "dtype", "shape", "bytes", "written by", "readers", "external data")
NODE_COLUMNS = ("node", "operator", "name", "inputs", "outputs", "shapes")


def print_listing(listing: Listing, out: TextIO) -> None:
    """The tables of ``inspect --tensors --nodes --op``: plain text, since a graph may have 200,000 rows.

    On a terminal that is too narrow for a table each row is a block, its name first.
    """
    room = shutil.get_terminal_size().columns if out.isatty() else None
    tables: list[tuple[Sequence[str], list[tuple[str, ...]]]] = []
    if listing.tensors:
        tables.append((TENSOR_COLUMNS, [_tensor_row(row) for row in listing.tensors]))
    if listing.nodes:
        tables.append((NODE_COLUMNS, [_node_row(row) for row in listing.nodes]))
    if listing.ops:
        tables.append((("operator", "count"), [(op, str(count)) for op, count in listing.ops.items()]))
    for headings, rows in tables:
        out.writelines(f"{line}\n" for line in _lines(headings, rows, room))
        out.write("\n")
    out.writelines(f"note: {note}\n" for note in listing.notes)
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in listing.opsets.items())
    counts = [f"{number(len(rows), name)} listed" for name, rows in _rows(listing)]
    total = f"{number(listing.node_count, 'node')} in the main graph"
    out.write(f"{'; '.join([total, *counts])}; opset {opsets}\n")


def _lines(headings: Sequence[str], rows: list[tuple[str, ...]], room: int | None) -> Iterator[str]:
    """A table, or blocks where its lines would be longer than there is room for."""
    longest = sum(max(map(len, cells)) + 2 for cells in zip(headings, *rows, strict=True)) - 2
    if room is None or longest <= room:
        yield from columns(headings, rows)
        return
    for first, *cells in rows:
        yield first if headings[0] != "node" else f"node {first}"
        facts = [f"{heading} {cell}" for heading, cell in zip(headings[1:], cells, strict=True) if cell]
        for line in packed(list(map(len, facts)), room - 2):
            yield f"  {'  '.join(facts[at] for at in line)}"


def _rows(listing: Listing) -> Iterator[tuple[str, Sequence[object]]]:
    if listing.tensors is not None:
        yield "tensor", listing.tensors
    if listing.nodes is not None:
        yield "node", listing.nodes


def _tensor_row(row: TensorRow) -> tuple[str, ...]:
    shape = _shape(row.shape)
    written = row.kind if row.producer is None else f"node {row.producer} {row.producer_op}"
    where = "" if row.location is None else f"{row.location} at {row.offset}"
    size = "" if row.bytes is None else str(row.bytes)
    readers = f"{row.consumers} + output" if row.output else str(row.consumers)
    return row.name, row.dtype or "?", shape, size, written, readers, where


def _shape(shape: tuple[int | str | None, ...] | None) -> str:
    return "?" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _node_row(row: NodeRow) -> tuple[str, ...]:
    op = f"{row.domain}.{row.op}" if row.domain else row.op
    shapes = ", ".join(map(_shape, row.shapes or ()))
    return str(row.index), op, row.name, ", ".join(row.inputs), ", ".join(row.outputs), shapes
