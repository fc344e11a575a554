"""Subgraphs in the attributes of nodes: where they lie, and what they read of the scope around them."""

from __future__ import annotations

from collections.abc import Iterable

from deltafuse.protobuf import LENGTH, Bytes, NestedError, fields
from deltafuse.tensors import sparse_head, tensor_head

#: How deep subgraphs may lie in each other: each is three messages deeper, and protobuf reads no more than 100.
DEEPEST = 30


def first_text(data: Bytes, start: int, end: int) -> bytes:
    """Field 1 of a message as bytes: the name of a ValueInfoProto (the last one counts, as in protobuf)."""
    name = b""
    for number, wire, _, begin, stop, _ in fields(data, start, end):
        if number == 1 and wire == LENGTH:
            name = bytes(data[begin:stop])
    return name


def attribute_graphs(data: Bytes, start: int, end: int) -> list[list[tuple[int, int]]]:
    """Byte ranges of the subgraphs of one AttributeProto, the parts of a split one together."""
    single: list[tuple[int, int]] = []
    many: list[list[tuple[int, int]]] = []
    for number, wire, _, begin, stop, _ in fields(data, start, end):
        if number == 6 and wire == LENGTH:
            single.append((begin, stop))
        elif number == 11 and wire == LENGTH:
            many.append([(begin, stop)])
    return [single, *many] if single else many


def free_names(data: Bytes, parts: Iterable[tuple[int, int]], depth: int = 1) -> dict[bytes, None]:
    """Names that a subgraph and the subgraphs in it read and do not define, in order of first mention.

    Raises:
        NestedError: subgraphs lie in each other deeper than `DEEPEST`; this one is at `depth`.
    """
    if depth > DEEPEST:
        raise NestedError(f"subgraphs lie in each other more than {DEEPEST} deep")
    read: dict[bytes, None] = {}
    defined: set[bytes] = {b""}
    for start, end in parts:
        for number, wire, _, begin, stop, _ in fields(data, start, end):
            if wire != LENGTH:
                continue
            if number == 1:
                _node_names(data, begin, stop, read, defined, depth)
            elif number == 11:
                defined.add(first_text(data, begin, stop))
            elif number == 12:
                read[first_text(data, begin, stop)] = None
            elif number == 5:
                defined.add(tensor_head(data, [(begin, stop)]).name.encode())
            elif number == 15:
                defined.add(sparse_head(data, [(begin, stop)]).name.encode())
    return {name: None for name in read if name not in defined}


def _node_names(
    data: Bytes, start: int, end: int, read: dict[bytes, None], defined: set[bytes], depth: int
) -> None:
    for number, wire, _, begin, stop, _ in fields(data, start, end):
        if number == 1 and wire == LENGTH:
            read[bytes(data[begin:stop])] = None
        elif number == 2 and wire == LENGTH:
            defined.add(bytes(data[begin:stop]))
        elif number == 5 and wire == LENGTH:
            for graph in attribute_graphs(data, begin, stop):
                read.update(free_names(data, graph, depth + 1))
