"""A file mapped into memory, and what is said of one that is no model."""

from __future__ import annotations

import mmap
import os
import stat
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from deltafuse import wording
from deltafuse.errors import UserError
from deltafuse.file_kinds import HEAD, looks_like
from deltafuse.protobuf import WireError

#: Which file it is, and whether it is as it was: device, inode, bytes, time of the last change in ns.
Identity: TypeAlias = "tuple[int, int, int, int]"


def mapped(path: Path) -> tuple[memoryview, Identity]:
    """A file's bytes, read where they are looked at.

    Raises:
        UserError: ``missing-file``, ``not-a-file``, ``unreadable``, ``not-onnx`` (it is empty).
    """
    if path.is_dir():
        inside = sorted(path.glob("*.onnx")) or sorted(path.glob("*/*.onnx"))
        found = ", ".join(one.relative_to(path).as_posix() for one in inside[:5]) or "none"
        raise UserError("not-a-file", f"{path} is a folder: give an .onnx file (in it: {found})")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError("not-a-file", f"{path} is a pipe or a device: write what it gives into a file first")
        with path.open("rb") as file:
            if file.read(1):
                known = os.fstat(file.fileno())
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                return view, (known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns)
    except FileNotFoundError:
        raise UserError("missing-file", f"{path} does not exist: check the path{_near(path)}") from None
    except (OSError, ValueError) as error:
        raise UserError("unreadable", f"{path} cannot be read ({error}): check its permissions") from None
    raise UserError("not-onnx", f"{path} is empty: export or download the model again")


def _near(path: Path) -> str:
    """Files beside it that may be meant."""
    try:
        there = sorted(one.name for one in path.parent.iterdir() if one.suffix == path.suffix and one.is_file())
    except OSError:
        return ""
    near = get_close_matches(path.name, there, 3)
    return f"; did you mean {' or '.join(str(path.with_name(name)) for name in near)}?" if near else ""


def not_onnx(path: Path, error: WireError) -> UserError:
    """Says what a file looks like whose bytes are no model."""
    with path.open("rb") as file:
        kind = looks_like(file.read(HEAD))
    if kind:
        return UserError("not-onnx", f"{path} is not an ONNX model but looks like {kind}")
    return UserError("not-onnx", f"{path} is not an ONNX model ({error}): give a file that onnx.load reads")


def cut_short(path: Path, error: WireError) -> UserError:
    """Says that a model's bytes end too soon."""
    size = wording.number(path.stat().st_size, "byte")
    return UserError("truncated", f"{path} is cut short at {size} ({error}): copy or export it again")
