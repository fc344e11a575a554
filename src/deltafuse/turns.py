"""One writer at a time in a folder, and what a writer that was killed left there is cleared away by the next."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from deltafuse.files import unwritable

__all__ = ["turn", "workspace"]

_PREFIX = ".deltafuse-"


@contextmanager
def turn(folder: Path) -> Generator[bool]:
    """Waits until no other process of ours writes into a folder, and has the others wait for the block.

    Two runs on one output then come one after the other, each with its data and its record. The lock is the kernel's
    and ends with the process, however that ends. Where a file system has no locks nothing is waited for, and the block
    is given False.
    """
    descriptor = _locked(folder, wait=True)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def workspace(folder: Path, name: str = "") -> Generator[Path]:
    """A folder in `folder` for files on their way, gone when the block ends.

    Those that killed processes left are removed: nobody holds a lock on them.

    Args:
        folder: where it is made.
        name: what the files are for; only folders of the same name are looked at.

    Raises:
        UserError: ``output-not-writable``.
    """
    prefix = f"{_PREFIX}{name[:100]}-" if name else _PREFIX
    try:
        with turn(folder):
            _clear(folder, prefix)
            path = Path(mkdtemp(prefix=prefix, dir=folder))
            descriptor = _locked(path, wait=False)
    except OSError as error:
        raise unwritable(folder / name, error) from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _clear(folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        if path.name.startswith(prefix) and path.is_dir() and not path.is_symlink():
            descriptor = _locked(path, wait=False)
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def _locked(folder: Path, *, wait: bool) -> int | None:
    """A lock on a folder, None where another process holds it or there are no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    return None
