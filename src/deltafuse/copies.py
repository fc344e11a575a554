"""Copies of large files: blocks shared where the file system can, holes kept, nothing of it in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from deltafuse.errors import UserError
from deltafuse.files import atomic, unwritable
from deltafuse.options import ExternalData

__all__ = ["copy_file", "same_content"]

#: linux/fs.h: share the extents of a whole file, copy on write
_FICLONE = 0x40049409
_CHUNK = 16 << 20


def same_content(source: Path, target: Path) -> bool:
    """Whether two files hold the same; holes are not read."""
    ours, theirs = source.stat(), target.stat()
    if ours.st_size != theirs.st_size:
        return False
    # No two files are written in the same nanosecond; whole seconds are what archives restore.
    if ours.st_mtime_ns == theirs.st_mtime_ns and ours.st_mtime_ns % 10**9:
        return True
    with source.open("rb", buffering=0) as left, target.open("rb", buffering=0) as right:
        for file in (left, right):  # what is a hole in both is equal
            for start, end in _extents(file.fileno(), ours.st_size):
                for position in range(start, end, _CHUNK):
                    size = min(_CHUNK, end - position)
                    if os.pread(left.fileno(), size, position) != os.pread(right.fileno(), size, position):
                        return False
    return True


def copy_file(
    source: Path, target: Path, how: ExternalData | None = None, progress: Callable[[int], None] | None = None
) -> None:
    """Copies a file with its time stamps, its folder made if need be.

    Args:
        source: the file.
        target: the path of the copy.
        how: ``copy``: byte by byte; ``reflink``: blocks shared; None: shared where the file system can.
        progress: is called with the bytes that are done.

    Raises:
        UserError: ``no-reflink``, ``unreadable``, ``external-data-changed``, and what `deltafuse.files` raises.
    """
    _make_folder(target)
    _copy(source, target, progress or (lambda _: None), how)


def _make_folder(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(target, error) from None


def _copy(source: Path, target: Path, progress: Callable[[int], None], how: ExternalData | None) -> None:
    if not os.access(source, os.R_OK):
        raise UserError("unreadable", f"the external data file {source} cannot be read: check its permissions")
    with source.open("rb", buffering=0) as reader, atomic(target, [source]) as writer:
        size = os.fstat(reader.fileno()).st_size
        shared = how != "copy" and _reflink(reader.fileno(), writer.fileno())
        if how == "reflink" and not shared:
            raise UserError(
                "no-reflink",
                f"{target} cannot share its blocks with {source} on this file system: give --external-data copy, or "
                "write the output into the model's folder",
            )
        if not shared:
            os.ftruncate(writer.fileno(), size)
            for start, end in _extents(reader.fileno(), size):
                _copy_range(reader.fileno(), writer.fileno(), start, end, progress)
        progress(size)
        status = os.fstat(reader.fileno())
        # the same time stamp tells the next run that the copy is up to date
        os.utime(writer.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def _reflink(reader: int, writer: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError:
        return False
    return True


def _extents(reader: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that hold data; a sparse file has holes between them."""
    position = 0
    while position < size:
        try:
            start = os.lseek(reader, position, os.SEEK_DATA)
            stop = os.lseek(reader, start, os.SEEK_HOLE)
        except (OSError, AttributeError) as error:
            # ENXIO: nothing but a hole up to the end. Anything else: holes cannot be asked for here
            start, stop = (size if getattr(error, "errno", None) == errno.ENXIO else position), size
        yield start, stop
        position = stop


def _copy_range(reader: int, writer: int, start: int, end: int, progress: Callable[[int], None]) -> None:
    while start < end:
        size = min(_CHUNK, end - start)
        try:
            count = os.copy_file_range(reader, writer, size, start, start)
        except (OSError, AttributeError):
            count = os.pwrite(writer, os.pread(reader, size, start), start)
        if not count:
            raise UserError("external-data-changed", "an external data file shrank while it was copied: run again")
        start += count
        progress(start)
