"""The record's format: a byte patch from the fused file back to the original, and what in-place restoration needs.

Layout: ``u32`` length of the header, the header (JSON), the removed bytes of all edits one after the other; the whole
compressed with zstd. Offsets are those of the original file.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast, get_args

import zstandard

from deltafuse.edits import Edit, Kind, Writer
from deltafuse.errors import UserError
from deltafuse.wording import number

__all__ = [
    "FORMAT",
    "LIMIT",
    "Digest",
    "Entry",
    "Record",
    "decode",
    "edits_of",
    "encode",
    "from_text",
    "to_text",
    "undo_edits",
]

#: version of the format; readers refuse what is newer
FORMAT = 1
#: bytes that a record may have once decompressed (the nodes of 24 layers at Qwen3.5-4B size have 26 MB)
LIMIT = 512 << 20
_LEVEL = 3
_KINDS = get_args(Kind)
_CHUNK = 8 << 20


class Entry(NamedTuple):
    """One edit, undone by putting the removed bytes in place of `size` bytes.

    Attributes:
        start: offset in the original file.
        gone: the original's bytes; where a record is being made they are a view of the file.
        size: bytes that the fused file has there.
        site: "" for what no single site asked for.
        kind: see `deltafuse.edits.Kind`.
        before: first output of the next node that stayed (removed nodes only).
        after: first output of the last node that stayed, where none comes after the removed ones.
    """

    start: int
    gone: bytes | memoryview
    size: int
    site: str
    kind: str
    before: str = ""
    after: str = ""

    @property
    def removed(self) -> bytes:
        """The original's bytes."""
        return bytes(self.gone)


@dataclass(frozen=True, slots=True)
class Digest:
    """A message of the fused file that must be unchanged to be undone in place.

    Attributes:
        site: "" for what no single site asked for.
        name: first output of a node, or name of a declared value.
        number: field of the graph: 1 node, 11 input, 12 output, 13 value_info.
        digest: of its content, see `deltafuse.record`.
    """

    site: str
    name: str
    number: int
    digest: str


@dataclass(frozen=True)
class Record:
    """What undoes one fuse.

    Attributes:
        original_sha256, original_bytes: of the file before.
        fused_sha256: of the fused file without its record; "" where the file was edited and only in-place
            restoration is left.
        sites: names of the fused sites.
        entries: the edits in the order of the file.
        digests: the inserted nodes and declarations.
        external: location -> bytes of the external data files (None: was missing).
    """

    original_sha256: str
    original_bytes: int
    fused_sha256: str
    sites: tuple[str, ...]
    entries: tuple[Entry, ...]
    digests: tuple[Digest, ...]
    external: dict[str, int | None]


def encode(record: Record) -> bytes:
    """Compresses a record.

    Raises:
        UserError: ``record-too-large``.
    """
    header = {
        "original_sha256": record.original_sha256,
        "original_bytes": record.original_bytes,
        "fused_sha256": record.fused_sha256,
        "sites": record.sites,
        "entries": [[e.start, len(e.gone), e.size, e.site, e.kind, e.before, e.after] for e in record.entries],
        "digests": [list(asdict(digest).values()) for digest in record.digests],
        "external": record.external,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    size = 4 + len(text) + sum(len(entry.gone) for entry in record.entries)
    if size > LIMIT:
        held = number(size, "byte")
        raise UserError("record-too-large", f"the rollback record would have {held}: fuse with --record none")
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=size)
    pieces = [compressor.compress(struct.pack("<I", len(text)) + text)]
    pieces += [compressor.compress(entry.gone) for entry in record.entries]
    return b"".join([*pieces, compressor.flush()])


def decode(raw: bytes) -> Record:
    """Reads a record and checks that it is one; what it says of the file is checked when it is undone.

    Raises:
        UserError: ``record-damaged``.
    """
    try:
        plain = _decompress(raw)
        (length,) = struct.unpack_from("<I", plain)
        header = cast("dict[str, Any]", json.loads(plain[4 : 4 + length]))
        record = Record(
            original_sha256=_text(header["original_sha256"]),
            original_bytes=_number(header["original_bytes"]),
            fused_sha256=_text(header["fused_sha256"]),
            sites=tuple(_text(site) for site in header["sites"]),
            entries=tuple(_entries(header["entries"], memoryview(plain)[4 + length :])),
            digests=tuple(Digest(_text(s), _text(n), _number(f), _text(d)) for s, n, f, d in header["digests"]),
            external={
                _text(name): None if size is None else _number(size) for name, size in header["external"].items()
            },
        )
    except (
        zstandard.ZstdError,
        struct.error,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        raise damaged(error) from None
    return record


def to_text(raw: bytes) -> str:
    """A record as text, for metadata_props (raw bytes there break onnxruntime's reader)."""
    return f"{FORMAT} {base64.b64encode(raw).decode()}"


def from_text(text: str) -> bytes:
    """The inverse of `to_text`.

    Raises:
        UserError: ``record-version``, ``record-damaged``.
    """
    version, _, body = text.partition(" ")
    if version.isdecimal() and int(version[:9]) > FORMAT:
        raise UserError(
            "record-version",
            f"the rollback record has format {version[:9]}, this deltafuse reads up to {FORMAT}: update deltafuse",
        )
    if version != str(FORMAT):
        raise damaged(f"format {version[:9]!r}")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise damaged(error) from None


def undo_edits(
    body: memoryview, record: Record, out: Writer, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes the original of a fused file whose record has been cut out.

    Raises:
        UserError: ``record-damaged``: the edits do not fit the file.
    """
    position = shift = 0
    for entry in record.entries:
        start = entry.start + shift
        if not position <= start <= start + entry.size <= len(body):
            raise damaged(f"an edit at {entry.start} does not fit")
        _copy(body, position, start, out, progress)
        out.write(entry.removed)
        position = start + entry.size
        shift += entry.size - len(entry.removed)
    _copy(body, position, len(body), out, progress)


def edits_of(record: Record, body: memoryview) -> Iterator[Edit]:
    """The edits that made the fused file, their new bytes read from its body."""
    shift = 0
    for entry in record.entries:
        start = entry.start + shift
        new = bytes(body[start : start + entry.size])
        yield Edit(entry.start, entry.start + len(entry.removed), new, entry.site, cast("Kind", entry.kind))
        shift += entry.size - len(entry.removed)


def _copy(body: memoryview, start: int, end: int, out: Writer, progress: Callable[[int, int], None] | None) -> None:
    for position in range(start, end, _CHUNK):
        stop = min(position + _CHUNK, end)
        out.write(body[position:stop])
        if progress:
            progress(stop, len(body))


def _decompress(raw: bytes) -> bytes:
    size = zstandard.frame_content_size(raw)
    if not 0 <= size <= LIMIT:
        raise ValueError(f"it claims {number(size, 'byte')}, at most {LIMIT} are read")
    return zstandard.ZstdDecompressor(max_window_size=LIMIT).decompress(raw, max_output_size=LIMIT)


def _entries(rows: list[list[object]], blob: memoryview) -> Iterator[Entry]:
    at = 0
    for start, removed, size, *texts in rows:
        site, kind, before, after = map(_text, texts)
        if kind not in _KINDS:
            raise ValueError(f"an edit of the kind {kind!r}")
        stop = at + _number(removed)
        yield Entry(_number(start), bytes(blob[at:stop]), _number(size), site, kind, before, after)
        at = stop
    if at != len(blob):
        raise ValueError(f"{number(len(blob), 'removed byte')} where {at} are listed")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{value!r} is no size")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def damaged(error: object) -> UserError:
    """The error to raise where a record is not what it should be."""
    return UserError(
        "record-damaged",
        f"the rollback record is damaged ({error}): take the original file, or give an undamaged record with --sidecar",
    )
