"""Writes the fused file together with what undoes it, and finds that again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import onnx

from deltafuse.edits import Edit, Writer, append_metadata, apply
from deltafuse.errors import UserError
from deltafuse.external import carry, undo
from deltafuse.files import atomic, check_output, clear
from deltafuse.options import ExternalData
from deltafuse.patch import Digest, Entry, Record, decode, encode, from_text, to_text
from deltafuse.ragged import Offsets
from deltafuse.sidecars import (
    KEY,
    SIDECAR,
    no_record,
    older,
    pointer_text,
    read_sidecar,
    replacing,
    sidecar_file,
    sidecar_path,
)
from deltafuse.turns import turn
from deltafuse.wire import Model, scan

__all__ = [
    "KEY",
    "Found",
    "Hashing",
    "Mode",
    "Receipt",
    "content_digest",
    "find",
    "is_of",
    "node_digest",
    "pointer_text",
    "publish",
    "sidecar_file",
    "sidecar_path",
    "value_digest",
]

Mode: TypeAlias = Literal["embed", "sidecar", "none"]
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Receipt:
    """What was written.

    Attributes:
        output: the fused file, of `bytes` bytes.
        record_bytes: size of the record, compressed and encoded; 0 where none was asked for.
        sidecar: the file with the record, where it is not in the fused file.
        original_sha256, fused_sha256: of the original, and of the fused file without its record.
        copied: external data files that were put beside the output.
        notes: for the report.
    """

    output: Path
    bytes: int
    record_bytes: int
    sidecar: Path | None
    original_sha256: str
    fused_sha256: str
    copied: tuple[Path, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """The last record of a file.

    Attributes:
        record: decoded.
        body: the file without the record.
        edited: the file is not what was recorded: it was changed since.
        mode: where the record lay.
    """

    record: Record
    body: memoryview
    edited: bool
    mode: Mode


class Hashing:
    """A writer that hashes what passes through."""

    def __init__(self, out: Writer) -> None:
        self._out = out
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview, /) -> object:
        """Writes and hashes."""
        self._hash.update(data)
        self.size += len(data)
        return self._out.write(data)

    @property
    def sha256(self) -> str:
        """Of all that was written so far, in hexadecimal."""
        return self._hash.hexdigest()


def publish(
    model: Model,
    edits: Sequence[Edit],
    output: Path,
    mode: Mode = "embed",
    *,
    progress: Callable[[int, int], None] | None = None,
    how: ExternalData | None = None,
) -> Receipt:
    """Writes the edited file with its record, and sees to the external data; all of it or nothing.

    An older record in the file goes into the new one, so that records stack.

    Args:
        model: the scanned original.
        edits: as `deltafuse.edits.build` gives them.
        output: where to write.
        mode: put the record into metadata_props, into ``<output>.rollback``, or nowhere.
        progress: is called with bytes done and bytes in all, for each external copy and for the file.
        how: what becomes of external data, see `deltafuse.options.FuseOptions`.

    Raises:
        UserError: what `deltafuse.files` and `deltafuse.external` raise; ``record-too-large``.
    """
    side = sidecar_path(output) if mode == "sidecar" else None
    for path in filter(None, (output, side)):
        check_output(path, [model.path])
    with turn(output.parent) as alone:
        if alone:
            clear(filter(None, (output, side)))
        carried = carry(model, output, progress, how=how, alone=alone)
        try:
            if mode != "none":
                edits = _without_old_record(model, edits)
            keeping = replacing(side, lambda path: is_of(output, path)) if side else nullcontext()
            with keeping, atomic(output, [model.path]) as file:
                body = Hashing(file)
                apply(model.data, edits, body, progress)
                original, fused, raw, entry = content_digest(model.data), body.sha256, b"", b""
                if mode != "none":
                    raw = encode(_record(model, edits, original, fused, carried.sizes))
                    entry = append_metadata(model, KEY, pointer_text(output) if side else to_text(raw)).new
                    body.write(entry)
                if side:
                    with atomic(side) as side_file:
                        side_file.write(sidecar_file(raw))
        except BaseException:
            undo(carried)
            raise
    record_bytes = len(sidecar_file(raw)) if side else len(entry)
    return Receipt(output, body.size, record_bytes, side, original, fused, carried.copied, carried.notes)


def find(model: Model, sidecar: Path | None = None) -> Found:
    """Finds the last record of a file, in its metadata_props or in a sidecar file.

    Raises:
        UserError: ``no-record``, ``record-damaged``, ``record-version``.
    """
    text = model.metadata.get(KEY)
    mode: Mode = "embed"
    if sidecar is not None or (text or "").startswith(SIDECAR):
        raw, mode = read_sidecar(model.path, sidecar, (text or "")[len(SIDECAR) :]), "sidecar"
    elif text is None:
        raise UserError("no-record", no_record(model))
    else:
        raw = from_text(text)
    body = _without(model, KEY)
    digest, record = content_digest(body), decode(raw)
    kept = older(sidecar_path(model.path))
    if digest != record.fused_sha256 and sidecar is None and mode == "sidecar" and kept.exists():
        # a run was killed between the record and the file that it belongs to
        before = decode(read_sidecar(model.path, kept, ""))
        record = before if before.fused_sha256 == digest else record
    return Found(record, body, digest != record.fused_sha256, mode)


def is_of(output: Path, sidecar: Path) -> bool:
    """Whether a record belongs to the file as it is."""
    try:
        return not find(scan(output), sidecar).edited
    except UserError:
        return False


def node_digest(node: onnx.NodeProto) -> str:
    """Of what a node computes: its name, documentation, metadata and the order of its attributes do not count."""
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    for field in ("name", "doc_string", "metadata_props"):
        plain.ClearField(field)
    attributes = sorted(plain.attribute, key=lambda attribute: attribute.name)
    del plain.attribute[:]
    plain.attribute.extend(attributes)
    return hashlib.sha256(plain.SerializeToString(deterministic=True)).hexdigest()[:24]


def value_digest(info: onnx.ValueInfoProto) -> str:
    """Of the type and shape that are declared."""
    return hashlib.sha256(info.type.SerializeToString(deterministic=True)).hexdigest()[:24]


def _without_old_record(model: Model, edits: Sequence[Edit]) -> list[Edit]:
    parts = model.metadata_parts.get(KEY, ())
    kept = {edit.start for edit in edits if edit.kind == "metadata"}
    old = [Edit(part.field, part.end, b"", "", "metadata") for part in parts if part.field not in kept]
    return sorted([*edits, *old], key=lambda edit: (edit.start, edit.end))


def _record(model: Model, edits: Sequence[Edit], original: str, fused: str, sizes: dict[str, int | None]) -> Record:
    return Record(
        original,
        len(model.data),
        fused,
        tuple(dict.fromkeys(edit.site for edit in edits if edit.site)),
        tuple(_entries(model, edits)),
        tuple(digest for edit in edits if edit.new for digest in _digests(edit)),
        sizes,
    )


def _entries(model: Model, edits: Sequence[Edit]) -> Iterator[Entry]:
    starts, ends = (np.array(column) for column in (model.graph.spans.starts, model.graph.spans.ends))
    begins: Offsets = np.array([edit.start for edit in edits], np.int64)
    stops: Offsets = np.array([edit.end for edit in edits], np.int64)
    first, behind = np.searchsorted(starts, begins), np.searchsorted(starts, stops)
    takes = np.array([edit.kind in ("nodes", "moved") for edit in edits], np.bool_) & (stops > begins)
    # How many edits have begun to take nodes in front of each node, and how many have come to their end.
    begun, ended = (np.bincount(places[takes], minlength=len(starts) + 1) for places in (first, behind))
    staying = np.flatnonzero(np.cumsum(begun - ended)[:-1] == 0)
    following = np.append(staying, -1)[np.searchsorted(staying, behind)]
    last = int(staying[-1]) if len(staying) else -1
    # What lies inside a node has its neighbours there.
    inside = (first == behind) & (behind > 0) & (stops <= np.append(ends, 0)[behind - 1])
    for edit, node, within in zip(edits, following.tolist(), inside.tolist(), strict=True):
        before = after = ""
        if edit.kind == "nodes" and edit.end > edit.start and not within:
            before, after = _first_output(model, node), _first_output(model, last) if node < 0 else ""
        removed = model.data[edit.start : edit.end]
        yield Entry(edit.start, removed, len(edit.new), edit.site, edit.kind, before, after)


def _first_output(model: Model, node: int) -> str:
    outputs = model.graph.node_outputs[node] if node >= 0 else ()
    return model.graph.name(next(filter(None, outputs), 0))


def _digests(edit: Edit) -> Iterator[Digest]:
    if edit.kind not in ("nodes", "values", "pins"):
        return
    part = onnx.GraphProto.FromString(edit.new)
    for node in part.node:
        yield Digest(edit.site, next(filter(None, node.output), ""), 1, node_digest(node))
    for number, infos in ((11, part.input), (12, part.output), (13, part.value_info)):
        for info in infos:
            yield Digest(edit.site, info.name, number, value_digest(info))


def _without(model: Model, key: str) -> memoryview:
    """The file without the metadata_props entries of that key."""
    parts = model.metadata_parts.get(key, ())
    if not parts:
        return model.data
    if len(parts) == 1 and parts[0].end == len(model.data):
        return model.data[: parts[0].field]
    pieces, position = list[memoryview](), 0
    for part in parts:
        pieces.append(model.data[position : part.field])
        position = part.end
    return memoryview(b"".join([*pieces, model.data[position:]]))


def content_digest(data: memoryview) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; what a record names its original by."""
    digest = hashlib.sha256()
    for position in range(0, len(data), _CHUNK):
        digest.update(data[position : position + _CHUNK])
    return digest.hexdigest()
