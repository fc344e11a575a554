"""The declared types and shapes of sites that are put back in place, and the axes that are no longer pinned."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import onnx

from deltafuse.edits import Edit
from deltafuse.patch import Record
from deltafuse.protobuf import fields, write_field
from deltafuse.undoing import value_digest
from deltafuse.wire import Model

__all__ = ["declared", "undeclare", "unpin"]


def declared(model: Model, record: Record, sites: AbstractSet[str]) -> Iterator[bytes]:
    """The value_info that fusing took out or replaced, where nothing else declares the value since."""
    now = {model.graph.name(d.value) for d in model.declarations}
    ours = {digest.name: digest.digest for digest in record.digests if digest.number == 13 and digest.site in sites}
    for entry in record.entries:
        if entry.site not in sites or entry.kind != "values":
            continue
        for _, _, _, begin, stop, _ in fields(entry.removed, 0, len(entry.removed)):
            payload = entry.removed[begin:stop]
            name = _info_name(payload)
            if name not in now or _digest_now(model, name) == ours.get(name):
                yield payload


def undeclare(model: Model, record: Record, sites: AbstractSet[str], written: AbstractSet[str]) -> Iterator[Edit]:
    """Takes out the value_info that fusing added for values which the original writes too, without declaring them."""
    added = {d.name: d.digest for d in record.digests if d.number == 13 and d.site in sites and d.name in written}
    for entry in record.entries:
        if entry.site in sites and entry.kind == "values":
            for _, _, _, begin, stop, _ in fields(entry.removed, 0, len(entry.removed)):
                added.pop(_info_name(entry.removed[begin:stop]), None)
    for declaration in model.declarations:
        name = model.graph.name(declaration.value)
        if declaration.number == 13 and name in added and _digest_now(model, name) == added[name]:
            yield Edit(declaration.start, declaration.end, b"", "", "values")


def _digest_now(model: Model, name: str) -> str:
    value = model.graph.find(name)
    info = model.graph.value_info(value) if value is not None else None
    return "" if info is None else value_digest(info)


def unpin(model: Model, record: Record) -> tuple[list[Edit], list[str]]:
    """Gives pinned declarations their old dims, but for those that were changed since."""
    pinned = {(digest.number, digest.name): digest.digest for digest in record.digests if not digest.site}
    old: dict[tuple[int, str], bytes] = {}
    for entry in record.entries:
        if entry.kind == "pins":
            for number, _, _, begin, stop, _ in fields(entry.removed, 0, len(entry.removed)):
                old[number, _info_name(entry.removed[begin:stop])] = entry.removed[begin:stop]
    edits: list[Edit] = []
    put_back: set[tuple[int, str]] = set()
    for declaration in model.declarations:
        key = (declaration.number, model.graph.name(declaration.value))
        if key not in old:
            continue
        _, _, _, begin, stop, _ = next(fields(model.data, declaration.start, declaration.end))
        if value_digest(onnx.ValueInfoProto.FromString(bytes(model.data[begin:stop]))) == pinned.get(key):
            edits.append(Edit(declaration.start, declaration.end, write_field(key[0], old[key]), "", "pins"))
            put_back.add(key)
    left = [name for number, name in old if (number, name) not in put_back]
    return edits, [f"the declaration of {name} was changed since, its dims are left as they are" for name in left]


def _info_name(payload: bytes) -> str:
    return onnx.ValueInfoProto.FromString(payload).name
