"""The rollback record in a file of its own, beside the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from deltafuse.errors import UserError
from deltafuse.patch import FORMAT, LIMIT, from_text

__all__ = ["KEY", "SIDECAR", "older", "pointer_text", "read_sidecar", "replacing", "sidecar_file", "sidecar_path"]

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
