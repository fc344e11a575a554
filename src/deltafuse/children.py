"""Starts the child process of a worker. Light: a command does so before it imports what is heavy."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import IO, cast

from deltafuse.allocator import keep_memory

#: Limit of the child's address space in bytes.
MEMORY = 16 << 30
#: Files of fewer bytes are read sooner than what is read of them is sent.
LARGE = 4 << 20

Child = subprocess.Popen[bytes]


def start(memory: int = MEMORY, *, compares: bool = False, model: str | None = None) -> Child:
    """A child that runs `deltafuse.worker_main`.

    Args:
        memory: limit of its address space in bytes.
        compares: it is going to be asked for comparisons, and makes ready for them at once.
        model: a file whose first nodes it reads before, see `deltafuse.first_nodes`; with `compares` only.
    """
    command = [sys.executable, "-m", "deltafuse.worker_main", str(memory), *(["compares"] if compares else [])]
    command += [] if model is None else [model]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    for pipe in (child.stdin, child.stdout):
        _widen(cast("IO[bytes]", pipe))
    return child


def end(child: Child) -> None:
    """Ends a child, if that did not happen yet."""
    if child.poll() is None:
        child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()


@dataclass(frozen=True)
class Early:
    """What a command begins before its run.

    Attributes:
        child: for the run's worker; reads the first nodes of the model and makes ready for comparisons.
        module: that will be needed after the run; empty for none.
        kept: what a run knew; to take it apart when the run returns would take longer than to end the process.
    """

    child: Child
    module: str = ""
    kept: list[object] = field(default_factory=list[object])

    def idle(self) -> None:
        """To be called while the run waits for its worker."""
        if self.module:
            import_module(self.module)


@contextmanager
def early(model: str, module: str = "") -> Generator[Early]:
    """Starts a child, which is ended with the block; see `Early`."""
    child = start(compares=True, model=model if os.path.isfile(model) and os.path.getsize(model) >= LARGE else None)
    keep_memory()
    try:
        yield Early(child, module)
    finally:
        end(child)


def _widen(pipe: IO[bytes]) -> None:
    """Operands are megabytes: a wide pipe saves most switches between the two processes (Linux only)."""
    request = getattr(fcntl, "F_SETPIPE_SZ", None)
    if request is not None:
        with suppress(OSError):
            fcntl.fcntl(pipe, request, 1 << 20)
