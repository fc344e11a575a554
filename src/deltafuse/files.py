"""Writing files: all of it or nothing, and never over the input."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from deltafuse.errors import UserError

__all__ = ["adopt", "atomic", "check_output", "clear", "unwritable"]

#: What a file is called until it is finished, and how much of its own name is in that.
_TEMPORARY, _NAME = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp", re.DOTALL), 100


def check_output(output: Path, inputs: Iterable[Path] = ()) -> None:
    """Raises where `output` cannot be written, or is one of the `inputs` by whatever path.

    Raises:
        UserError: ``output-is-input``, ``output-is-folder``, ``output-not-a-file``, ``output-folder-missing``,
            ``output-not-writable``.
    """
    folder = output.parent
    try:
        if output.is_dir():
            raise UserError("output-is-folder", f"{output} is a folder: give the path of a file in it")
        if not folder.is_dir():
            raise UserError(
                "output-folder-missing", f"the folder {folder} does not exist: create it (mkdir -p {folder})"
            )
        for path in inputs:
            if output == path or _same(output, path):
                raise UserError("output-is-input", f"{output} is the input itself: give another output path")
        if not _regular(output):
            raise UserError(
                "output-not-a-file",
                f"{output} is a link or a device, which writing would replace: give the path of a file, "
                "or use --dry-run to write nothing",
            )
    except OSError as error:
        raise unwritable(output, error) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise unwritable(output, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _same(output: Path, path: Path) -> bool:
    """Whether both are one file; a file that another run takes away meanwhile is none."""
    with suppress(FileNotFoundError):
        return output.samefile(path)
    return False


def _regular(output: Path) -> bool:
    """Whether a file can take its place: there is a plain one, or none (asked once: another run may be at it)."""
    with suppress(FileNotFoundError):
        return stat.S_ISREG(output.lstat().st_mode)
    return True


@contextmanager
def atomic(output: Path, inputs: Iterable[Path] = ()) -> Generator[BinaryIO]:
    """Opens a file that takes the name of `output` when the block ends without an error.

    Until then `output` is what it was; after an error nothing is left behind. Where the file system can, the file has
    no name at all until it is finished, so that a process that is killed leaves nothing behind either.

    Raises:
        UserError: see `check_output`; ``disk-full``.
    """
    check_output(output, inputs)
    temporary = output.with_name(f".{output.name[:_NAME]}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = _nameless(output.parent)
        named = descriptor is None
        if descriptor is None:
            # not tempfile: its files are readable for their owner alone
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise unwritable(output, error) from None
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not named:
                _name(file.fileno(), temporary)
        os.replace(temporary, output)
        _sync_folder(output.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            raise _unfinished(output, error) from None
        raise


def _unfinished(output: Path, error: OSError) -> UserError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return unwritable(output, error)
    return UserError("disk-full", f"no room for {output} ({error.strerror}): free some space or write elsewhere")


def _nameless(folder: Path) -> int | None:
    """A new file without a name, None where there are none such (a Linux file system has them, or not)."""
    if not os.path.isdir("/proc/self/fd"):  # by which it gets its name
        return None
    with suppress(OSError, AttributeError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
    return None


def _name(descriptor: int, path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # with a folder given, the link is followed and not linked itself
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def adopt(temporary: Path, output: Path) -> None:
    """Gives a finished file of the same file system its name, as `atomic` does at the end."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, output)
    _sync_folder(output.parent)


def clear(outputs: Iterable[Path]) -> None:
    """Removes what processes that were killed while they wrote these files left of them; nobody may be writing them."""
    names: dict[Path, set[str]] = {}
    for output in outputs:
        names.setdefault(output.parent, set()).add(output.name[:_NAME])
    for folder, wanted in names.items():
        for path in folder.iterdir() if folder.is_dir() else ():
            found = _TEMPORARY.fullmatch(path.name)
            if found and found[1] in wanted:
                with suppress(OSError):
                    path.unlink()


def _sync_folder(folder: Path) -> None:
    # the new name itself must reach the disk; where folders cannot be opened (Windows) there is nothing to do
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def unwritable(output: Path, error: OSError) -> UserError:
    """The error to raise where the system refuses to write a file."""
    return UserError(
        "output-not-writable",
        f"{output} cannot be written ({error.strerror or error}): "
        "give a folder you may write to, or change its permissions",
    )


def make_folder(folder: Path) -> None:
    """Makes a folder for files, and those around it.

    Raises:
        UserError: ``output-not-writable``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from None
