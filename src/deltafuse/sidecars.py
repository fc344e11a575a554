"""The rollback record in a file of its own, beside the model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from deltafuse.boundary import SITE
from deltafuse.errors import UserError
from deltafuse.fused import fused_nodes
from deltafuse.lowering_conv import is_causal_conv
from deltafuse.patch import FORMAT, LIMIT, from_text
from deltafuse.wire import Model

__all__ = [
    "KEY",
    "SIDECAR",
    "no_record",
    "older",
    "pointer_text",
    "read_sidecar",
    "replacing",
    "sidecar_file",
    "sidecar_path",
]

#: key of the record in metadata_props
KEY = "deltafuse.record"
#: what stands there in place of the record, the file's name follows
SIDECAR = "sidecar "


def sidecar_path(output: Path) -> Path:
    """Where the record of a file goes that does not hold it itself."""
    return output.with_name(output.name + ".rollback")


def older(sidecar: Path) -> Path:
    """Where a record is kept until the file that the new one belongs to has its name."""
    return sidecar.with_name(sidecar.name + ".old")


def sidecar_file(raw: bytes) -> bytes:
    """What that file holds."""
    return f"{KEY} {FORMAT}\n".encode() + raw


def pointer_text(output: Path) -> str:
    """What a file says in place of its record: the name of the sidecar."""
    return SIDECAR + sidecar_path(output).name


@contextmanager
def replacing(sidecar: Path, is_of_output: Callable[[Path], bool]) -> Generator[None]:
    """Keeps the record that is there, for as long as the block writes a new one and then the file that it belongs to.

    Two files cannot be replaced at once: whoever is killed in between leaves both records, and one of them is right.

    Args:
        sidecar: the record's file.
        is_of_output: whether a record is that of the output as it is.
    """
    kept = older(sidecar)
    if kept.exists() and is_of_output(kept):
        os.replace(kept, sidecar)
    if sidecar.exists():
        os.replace(sidecar, kept)
    try:
        yield
    except BaseException:
        sidecar.unlink(missing_ok=True)
        if kept.exists():
            os.replace(kept, sidecar)
        raise
    kept.unlink(missing_ok=True)


def read_sidecar(model: Path, sidecar: Path | None, name: str) -> bytes:
    """Reads the record of a model, compressed.

    Args:
        model: the model's path.
        sidecar: the record's file where the user gives it.
        name: what the model says it is called.

    Raises:
        UserError: ``no-record``, ``record-damaged``, ``record-version``.
    """
    if sidecar is None and (not name or Path(name).name != name):
        raise UserError("no-record", f"{model} names a sidecar outside its folder: give it with --sidecar FILE")
    path = sidecar or model.with_name(name)
    if sidecar is None and not path.exists() and older(path).exists():
        path = older(path)
    try:
        if path.stat().st_size > LIMIT:
            raise UserError("record-damaged", f"{path} is too large for a rollback record: give another --sidecar FILE")
        head, _, raw = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise UserError(
            "no-record",
            f"the rollback record of {model} lies in {path}, which cannot be read ({error.strerror}): "
            "put it there, or give it with --sidecar FILE",
        ) from None
    version = head.removeprefix(KEY.encode() + b" ").decode("ascii", "replace")
    # the same checks of version and form as for a record in the file
    return raw if version == str(FORMAT) else from_text(f"{version} !")


def no_record(model: Model) -> str:
    """What to say of a file without a record: of one that holds nothing fused there is nothing to undo.

    Args:
        model: the file.
    """
    none, graph, beside = f"{model.path} holds no rollback record", model.graph, sidecar_path(model.path)
    calls = fused_nodes(graph, range(len(graph.op))) or any(map(is_causal_conv, graph.op, graph.domain))
    traces = calls or re.search(re.escape(SITE.encode()), model.data)
    if not traces and not beside.exists():
        return (
            f"{none} and no fused node: it is not what fuse wrote, so that there is nothing to roll back; give the "
            "file that `fuse MODEL -o OUT` wrote"
        )
    told = f"{none}, though it holds fused nodes" if traces else none
    return (
        f"{told}: give its record with --sidecar FILE ({beside.name}) if it was fused with --record sidecar; what was "
        "fused with --record none, or by another tool, cannot be rolled back: take the unfused file"
    )
