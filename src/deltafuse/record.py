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
from deltafuse.files import atomic, check_output
from deltafuse.patch import FORMAT, LIMIT, Digest, Entry, Record, decode, encode, from_text, to_text
from deltafuse.wire import Model

__all__ = [
    "KEY",
    "Found",
    "Hashing",
    "Mode",
    "Receipt",
    "find",
    "node_digest",
    "pointer_text",
    "publish",
    "sidecar_file",
    "sidecar_path",
    "value_digest",
]

#: key of the record in metadata_props
KEY = "deltafuse.record"
Mode: TypeAlias = Literal["embed", "sidecar", "none"]
_SIDECAR = "sidecar "
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


def sidecar_path(output: Path) -> Path:
    """Where the record of a file goes that does not hold it itself."""
    return output.with_name(output.name + ".rollback")


def sidecar_file(raw: bytes) -> bytes:
    """What that file holds."""
    return f"{KEY} {FORMAT}\n".encode() + raw


def pointer_text(output: Path) -> str:
    """What a file says in place of its record: the name of the sidecar."""
    return _SIDECAR + sidecar_path(output).name


def publish(
    model: Model,
    edits: Sequence[Edit],
    output: Path,
    mode: Mode = "embed",
    *,
    progress: Callable[[int, int], None] | None = None,
    allow_outside: bool = False,
) -> Receipt:
    """Writes the edited file with its record, and sees to the external data; all of it or nothing.

    An older record in the file goes into the new one, so that records stack.

    Args:
        model: the scanned original.
        edits: as `deltafuse.edits.build` gives them.
        output: where to write.
        mode: put the record into metadata_props, into ``<output>.rollback``, or nowhere.
        progress: is called with bytes done and bytes in all, for each external copy and for the file.
        allow_outside: see `deltafuse.external.carry`.

    Raises:
        UserError: what `deltafuse.files` and `deltafuse.external` raise; ``record-too-large``.
    """
    side = sidecar_path(output) if mode == "sidecar" else None
    for path in filter(None, (output, side)):
        check_output(path, [model.path])
    carried = carry(model, output, progress, allow_outside=allow_outside)
    try:
        if mode != "none":
            edits = _without_old_record(model, edits)
        with atomic(output, [model.path]) as file, atomic(side) if side else nullcontext() as side_file:
            body = Hashing(file)
            apply(model.data, edits, body, progress)
            original, fused, raw, entry = _sha256(model.data), body.sha256, b"", b""
            if mode != "none":
                raw = encode(_record(model, edits, original, fused, carried.sizes))
                text = pointer_text(output) if side else to_text(raw)
                entry = append_metadata(model, KEY, text).new
                body.write(entry)
            if side_file:
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
    if sidecar is not None or (text or "").startswith(_SIDECAR):
        raw, mode = _read_sidecar(model, sidecar, (text or "")[len(_SIDECAR) :]), "sidecar"
    elif text is None:
        raise UserError(
            "no-record",
            f"{model.path} holds no rollback record: if it was fused with --record sidecar, give the file with "
            f"--sidecar FILE ({sidecar_path(model.path).name}); a file fused with --record none cannot be rolled back",
        )
    else:
        raw = from_text(text)
    record = decode(raw)
    body = _without(model, KEY)
    return Found(record, body, _sha256(body) != record.fused_sha256, mode)


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
        tuple(digest for edit in edits for digest in _digests(edit)),
        sizes,
    )


def _entries(model: Model, edits: Sequence[Edit]) -> Iterator[Entry]:
    starts = model.graph.spans.starts
    stays = bytearray(b"\1") * len(starts)
    firsts: list[int] = np.searchsorted(np.array(starts), [edit.start for edit in edits]).tolist()
    stops: list[int] = np.searchsorted(np.array(starts), [edit.end for edit in edits]).tolist()
    for edit, first, stop in zip(edits, firsts, stops, strict=True):
        if edit.kind in ("nodes", "moved") and edit.end > edit.start:
            stays[first:stop] = bytes(stop - first)
    for edit, stop in zip(edits, stops, strict=True):
        before = after = ""
        if edit.kind == "nodes" and edit.end > edit.start:
            following = stays.find(1, stop)
            before = _first_output(model, following)
            after = _first_output(model, stays.rfind(1)) if following < 0 else ""
        removed = model.data[edit.start : edit.end]
        yield Entry(edit.start, removed, len(edit.new), edit.site, edit.kind, before, after)


def _first_output(model: Model, node: int) -> str:
    outputs = model.graph.node_outputs[node] if node >= 0 else ()
    return next((model.graph.name(value) for value in outputs if value), "")


def _digests(edit: Edit) -> Iterator[Digest]:
    if edit.kind not in ("nodes", "values", "pins") or not edit.new:
        return
    part = onnx.GraphProto.FromString(edit.new)
    for node in part.node:
        yield Digest(edit.site, next(filter(None, node.output), ""), 1, node_digest(node))
    for number, infos in ((11, part.input), (12, part.output), (13, part.value_info)):
        for info in infos:
            yield Digest(edit.site, info.name, number, value_digest(info))


def _read_sidecar(model: Model, sidecar: Path | None, name: str) -> bytes:
    if sidecar is None and (not name or Path(name).name != name):
        raise UserError("no-record", f"{model.path} names a sidecar outside its folder: give it with --sidecar FILE")
    path = sidecar or model.path.with_name(name)
    try:
        if path.stat().st_size > LIMIT:
            raise UserError("record-damaged", f"{path} is too large for a rollback record: give another --sidecar FILE")
        head, _, raw = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise UserError(
            "no-record",
            f"the rollback record of {model.path} lies in {path}, which cannot be read ({error.strerror}): "
            "put it there, or give it with --sidecar FILE",
        ) from None
    version = head.removeprefix(KEY.encode() + b" ").decode("ascii", "replace")
    # the same checks of version and form as for a record in the file
    return raw if version == str(FORMAT) else from_text(f"{version} !")


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


def _sha256(data: memoryview) -> str:
    digest = hashlib.sha256()
    for position in range(0, len(data), _CHUNK):
        digest.update(data[position : position + _CHUNK])
    return digest.hexdigest()
