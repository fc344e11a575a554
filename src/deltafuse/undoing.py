"""What undoes edits: the bytes they take away with what stays around them, and how to tell what they put there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from deltafuse.edits import Edit
from deltafuse.patch import Digest, Entry, Record
from deltafuse.ragged import Offsets
from deltafuse.sidecars import KEY
from deltafuse.wire import Model

_CHUNK = 8 << 20


@dataclass(frozen=True)
class Undo:
    """What is known of a record before anything is written.

    Attributes:
        edits: those that are undone, the end of an older record among them.
        original_sha256, original_bytes: of the file before.
        entries: the edits in the order of the file.
        digests: of the inserted nodes and declarations.
    """

    edits: tuple[Edit, ...]
    original_sha256: str
    original_bytes: int
    entries: tuple[Entry, ...]
    digests: tuple[Digest, ...]

    def record(self, fused_sha256: str, external: dict[str, int | None]) -> Record:
        """The record of a file that was written.

        Args:
            fused_sha256: of that file without its record.
            external: location -> bytes of the external data files (None: was missing).
        """
        sites = tuple(dict.fromkeys(edit.site for edit in self.edits if edit.site))
        return Record(
            self.original_sha256, self.original_bytes, fused_sha256, sites, self.entries, self.digests, external
        )


def undo_of(model: Model, edits: Sequence[Edit]) -> Undo:
    """What undoes edits.

    Args:
        model: the scanned original; an older record in it goes into the new one.
        edits: as `deltafuse.edits.build` gives them.
    """
    every = tuple(_without_old_record(model, edits))
    digests = tuple(digest for edit in every if edit.new for digest in _digests(edit))
    return Undo(every, content_digest(model.data), len(model.data), tuple(_entries(model, every)), digests)


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


def content_digest(data: memoryview) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; what a record names its original by."""
    digest = hashlib.sha256()
    for position in range(0, len(data), _CHUNK):
        digest.update(data[position : position + _CHUNK])
    return digest.hexdigest()


def _without_old_record(model: Model, edits: Sequence[Edit]) -> list[Edit]:
    parts = model.metadata_parts.get(KEY, ())
    kept = {edit.start for edit in edits if edit.kind == "metadata"}
    old = [Edit(part.field, part.end, b"", "", "metadata") for part in parts if part.field not in kept]
    return sorted([*edits, *old], key=lambda edit: (edit.start, edit.end))


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
