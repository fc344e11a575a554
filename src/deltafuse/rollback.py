"""Undoes a fuse: byte for byte where the file is as fuse wrote it, site by site where it was edited since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

from google.protobuf.message import DecodeError

from deltafuse.edits import Edit, append_metadata, apply
from deltafuse.errors import UserError
from deltafuse.external import carry, undo
from deltafuse.files import adopt, atomic, check_output
from deltafuse.options import ExternalData
from deltafuse.partial import remaining_edits
from deltafuse.patch import Record, damaged, edits_of, encode, to_text, undo_edits
from deltafuse.protobuf import WireError
from deltafuse.record import KEY, Found, Hashing, find, is_of, pointer_text, publish, sidecar_file, sidecar_path
from deltafuse.restore import restore, runnable
from deltafuse.sidecars import replacing
from deltafuse.turns import turn, workspace
from deltafuse.wire import Model, scan
from deltafuse.wording import number

__all__ = ["RollbackReport", "rollback"]

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class RollbackReport:
    """What was undone.

    Attributes:
        output: the restored file.
        mode: ``bytes``: the file was as fuse wrote it, and what was restored is byte for byte as before;
            ``in-place``: it was edited since, the sites were put back one by one and the edits are kept.
        restored, remaining: names of the sites that are, and are not, as before the fuse.
        refused: (site, why) of those that were asked for and could not be put back.
        records: how many records were undone.
        sha256: of the original, where it was checked (mode ``bytes``), else "".
        copied: external data files that were put beside the output.
        notes: for the report, e.g. that an external data file has another size now.
    """

    output: Path
    mode: Literal["bytes", "in-place"]
    restored: tuple[str, ...]
    remaining: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    records: int
    sha256: str
    copied: tuple[Path, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Step:
    """One record undone into a file of its own."""

    path: Path
    record: Record
    restored: tuple[str, ...]
    sha256: str
    refused: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    #: the record of the sites that remain, in a sidecar
    sidecar: bytes = b""


def rollback(
    fused: Path,
    output: Path,
    *,
    sites: Sequence[str] | None = None,
    all_records: bool = False,
    sidecar: Path | None = None,
    progress: Progress | None = None,
    how: ExternalData | None = None,
    allow_outside: bool = False,
) -> RollbackReport:
    """Restores what a file was before the last fuse, or before the first.

    Args:
        fused: the fused file.
        output: where to write the restored one.
        sites: globs of site names (case counts): only these are restored, the record of the others stays.
            Pinned axes stay pinned while any fused site remains.
        all_records: undo every fuse, not only the last.
        sidecar: file with the record, where the fused file neither holds nor names it.
        progress: is called with bytes done and bytes in all.
        how: what becomes of external data, see `deltafuse.options.FuseOptions`.
        allow_outside: see there.

    Raises:
        UserError: ``no-record``, ``record-damaged``, ``record-version``, ``record-mismatch``, ``no-such-site``,
            ``site-changed``, ``bad-options``, and what scanning and writing raise.
    """
    if sites is not None and all_records:
        raise UserError(
            "bad-options", "--sites and --all exclude each other: undo the last fuses first, then the sites"
        )
    check_output(output, [fused, *([sidecar] if sidecar else [])])
    model = scan(fused, allow_outside=allow_outside)
    found = find(model, sidecar)
    chosen = _choose(found.record, sites, fused)
    with workspace(output.parent, output.name) as folder:
        if not found.edited and len(chosen) < len(found.record.sites):
            return _some(model, found, chosen, output, folder, progress, how)
        steps = [_undo(model, found, chosen, folder / "0.onnx", output, progress)]
        while all_records and not steps[-1].refused:
            # sidecars and external data are looked for beside the fused file
            inner = replace(scan(steps[-1].path), path=fused, allow_outside=allow_outside)
            if KEY not in inner.metadata:
                break
            found = find(inner)
            path = folder / f"{len(steps)}.onnx"
            steps.append(_undo(inner, found, found.record.sites, path, output, progress))
        return _finish(model, steps, output, progress, how)


def _choose(record: Record, sites: Sequence[str] | None, fused: Path) -> tuple[str, ...]:
    if sites is None:
        return record.sites
    chosen = tuple(site for site in record.sites if any(fnmatchcase(site, glob) for glob in sites))
    if chosen:
        return chosen
    raise UserError(
        "no-such-site",
        f"no site of the last fuse of {fused} matches {', '.join(sites)}: it has {', '.join(record.sites)}",
    )


def _undo(
    model: Model, found: Found, sites: Sequence[str], path: Path, output: Path, progress: Progress | None
) -> _Step:
    if found.edited:
        return _in_place(model, found, sites, path, output, progress)
    with atomic(path) as file:
        writer = Hashing(file)
        undo_edits(found.body, found.record, writer, progress)
        _check(found.record, writer)
    return _Step(path, found.record, found.record.sites, writer.sha256)


def _check(record: Record, written: Hashing) -> None:
    if (written.sha256, written.size) != (record.original_sha256, record.original_bytes):
        raise UserError(
            "record-damaged", "the rollback record does not give back the original (its sha256 differs): take a backup"
        )


def _in_place(
    model: Model, found: Found, sites: Sequence[str], path: Path, output: Path, progress: Progress | None
) -> _Step:
    try:
        done = restore(model, found.record, sites)
    except (WireError, DecodeError, UnicodeDecodeError) as error:
        # the model has been scanned, so it is the record's messages that are none
        raise damaged(error) from None
    left = tuple(site for site in found.record.sites if site not in done.restored)
    # what was in the file before the fuse comes back: the older record
    older = [e.removed for e in found.record.entries if e.kind == "metadata" and e.removed]
    side = b""
    if left:
        raw = encode(_only(found.record, left))
        text = to_text(raw) if found.mode == "embed" else pointer_text(output)
        side = sidecar_file(raw) if found.mode == "sidecar" else b""
        older = [append_metadata(model, KEY, text).new]
    end = len(model.data)
    edits = [
        *done.edits,
        *(Edit(part.field, part.end, b"", "", "metadata") for part in model.metadata_parts.get(KEY, ())),
        *(Edit(end, end, field, "", "metadata") for field in older),
    ]
    with atomic(path) as file:
        apply(model.data, sorted(edits, key=lambda edit: (edit.start, edit.end)), file, progress)
    return _Step(path, found.record, done.restored, "", done.refused, done.notes, side)


def _only(record: Record, sites: Sequence[str]) -> Record:
    """The record of some of its sites in a file that is no longer as it was written."""
    return replace(
        record,
        fused_sha256="",
        sites=tuple(sites),
        entries=tuple(entry for entry in record.entries if not entry.site or entry.site in sites),
        digests=tuple(digest for digest in record.digests if not digest.site or digest.site in sites),
    )


def _some(
    model: Model,
    found: Found,
    sites: Sequence[str],
    output: Path,
    folder: Path,
    progress: Progress | None,
    how: ExternalData | None,
) -> RollbackReport:
    """Restores some sites of a file that is as it was written: undo all, then do the others again."""
    step = _undo(model, found, sites, folder / "original.onnx", output, None)
    original = replace(scan(step.path), path=model.path, allow_outside=model.allow_outside)
    edits = remaining_edits(original, edits_of(found.record, found.body), sites)
    with atomic(folder / "some.onnx") as file:
        apply(original.data, edits, file)
    if runnable(original) and not runnable(scan(folder / "some.onnx")):
        raise UserError("site-changed", "these sites cannot be restored without the others: restore all of them")
    receipt = publish(original, edits, output, found.mode, progress=progress, how=how)
    remaining = tuple(site for site in found.record.sites if site not in sites)
    notes = (*receipt.notes, *_size_notes(model, found.record))
    return RollbackReport(output, "bytes", tuple(sites), remaining, (), 1, step.sha256, receipt.copied, notes)


def _finish(
    model: Model, steps: Sequence[_Step], output: Path, progress: Progress | None, how: ExternalData | None
) -> RollbackReport:
    """Gives the last step's file its place, and brings the external data there."""
    locations = dict.fromkeys(name for step in steps for name in step.record.external)
    last = steps[-1]
    with turn(output.parent) as alone:
        carried = carry(model, output, progress, also=locations, how=how, alone=alone)
        side = sidecar_path(output)
        try:
            with replacing(side, lambda path: is_of(output, path)) if last.sidecar else nullcontext():
                if last.sidecar:
                    with atomic(side, [model.path]) as file:
                        file.write(last.sidecar)
                adopt(last.path, output)
        except BaseException:
            undo(carried)
            raise
    restored = dict.fromkeys(site for step in steps for site in step.restored)
    remaining = [site for step in steps for site in step.record.sites if site not in step.restored]
    notes = [note for step in steps for note in (*step.notes, *_size_notes(model, step.record))]
    exact = all(step.sha256 for step in steps)
    return RollbackReport(
        output,
        "bytes" if exact else "in-place",
        tuple(restored),
        tuple(remaining),
        tuple(pair for step in steps for pair in step.refused),
        len(steps),
        last.sha256 if exact else "",
        carried.copied,
        (*carried.notes, *dict.fromkeys(notes)),
    )


def _size_notes(model: Model, record: Record) -> list[str]:
    """External data files that are not as large as they were when the model was fused."""
    notes: list[str] = []
    for location, size in record.external.items():
        path = model.path.parent / location.replace("\0", "")
        now = path.stat().st_size if path.is_file() else None
        if size is not None and now is not None and now != size:
            held = number(now, "byte")
            notes.append(f"the external data file {location} has {held}, it had {size} when the model was fused")
    return notes
