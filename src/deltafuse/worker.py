"""The proof worker: a child process that runs models on onnxruntime under time and memory limits.

A kernel that hangs or crashes takes the child down and nothing else: the run becomes a `Reason`. The child is started
early, so that its imports overlap the scan.
"""

from __future__ import annotations

import fcntl
import pickle
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from deltafuse.reasons import TEXTS, Reason

TEXTS.update(
    {
        "worker-timeout": "running the cut graph took longer than {seconds:.0f} s; "
        "raise --timeout if the machine is slow",
        "worker-died": "onnxruntime crashed or ran out of memory on the cut graph (exit status {status}); "
        "the site was left as it is",
        "cut-does-not-load": "onnxruntime cannot load the cut graph: {error}",
        "cut-does-not-run": "onnxruntime cannot run the cut graph: {error}",
    }
)

AnyArray = npt.NDArray[np.generic]

_HEADER = struct.Struct("<Q")


def read_message(stream: IO[bytes]) -> object:
    """Reads one length-prefixed pickle; raises EOFError where the stream ends."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    return pickle.loads(stream.read(_HEADER.unpack(header)[0]))


def write_message(stream: IO[bytes], message: object) -> None:
    """Writes one length-prefixed pickle."""
    payload = pickle.dumps(message, protocol=5)
    stream.write(_HEADER.pack(len(payload)))
    stream.write(payload)
    stream.flush()


@dataclass(frozen=True)
class Session:
    """A model that a worker has loaded.

    Attributes:
        key: the worker's number for it.
        inputs: names of its inputs.
        outputs: names of its outputs.
    """

    key: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Worker:
    """Runs models in a child process.

    Args:
        seconds: limit of each call; the child is killed beyond it.
        memory: address space limit of the child in bytes.

    A child that was killed is replaced at the next `load`; sessions of the old one answer with a `Reason`.
    """

    def __init__(self, seconds: float = 120.0, memory: int = 16 << 30) -> None:
        self.seconds = seconds
        self._memory = memory
        self._child = self._start()

    def __enter__(self) -> Worker:  # noqa: PYI034 - typing has Self from 3.11 on only
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, model: bytes) -> Session | Reason:
        """Opens a session on a serialised ModelProto, all optimisations off."""
        if self._child.poll() is not None:
            self.close()
            self._child = self._start()
        answer = self._ask(("load", model))
        if isinstance(answer, Reason):
            return answer
        key, inputs, outputs = cast("tuple[int, tuple[str, ...], tuple[str, ...]]", answer)
        return Session(key, inputs, outputs)

    def run(
        self, session: Session, feeds: Mapping[str, AnyArray], outputs: tuple[str, ...] | None = None
    ) -> tuple[AnyArray, ...] | Reason:
        """Runs a session; the outputs asked for (default: all), in order."""
        wanted = session.outputs if outputs is None else outputs
        used = {name: feeds[name] for name in session.inputs}
        answer = self._ask(("run", session.key, used, wanted))
        return answer if isinstance(answer, Reason) else cast("tuple[AnyArray, ...]", answer)

    def unload(self, session: Session) -> None:
        """Frees a session."""
        self._ask(("unload", session.key))

    def close(self) -> None:
        """Ends the child."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "deltafuse.worker_main", str(self._memory)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for pipe in (child.stdin, child.stdout):
            _widen(cast("IO[bytes]", pipe))
        return child

    def _ask(self, message: tuple[object, ...]) -> object:
        stdin, stdout = cast("IO[bytes]", self._child.stdin), cast("IO[bytes]", self._child.stdout)
        try:
            write_message(cast("IO[bytes]", _Whole(stdin)), message)
            status, answer = cast("tuple[str, object]", pickle.loads(self._receive(stdout)))
        except TimeoutError:
            self._kill()
            return Reason("worker-timeout", {"seconds": self.seconds})
        except (EOFError, BrokenPipeError):
            self._kill()
            return Reason("worker-died", {"status": self._child.returncode})
        if status == "ok":
            return answer
        return Reason(status, {"error": str(answer)})

    def _kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def _receive(self, stream: IO[bytes]) -> bytes:
        deadline = time.monotonic() + self.seconds
        (size,) = _HEADER.unpack(_read_exactly(stream, _HEADER.size, deadline))
        return _read_exactly(stream, size, deadline)


def _widen(pipe: IO[bytes]) -> None:
    """Operands are megabytes: a wide pipe saves most switches between the two processes (Linux only)."""
    request = getattr(fcntl, "F_SETPIPE_SZ", None)
    if request is not None:
        with suppress(OSError):
            fcntl.fcntl(pipe, request, 1 << 20)


class _Whole:
    """A raw pipe whose writes are never partial."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._stream.write(view) :]

    def flush(self) -> None:
        self._stream.flush()


def _read_exactly(stream: IO[bytes], size: int, deadline: float) -> bytes:
    buffer = bytearray()
    while len(buffer) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            raise TimeoutError
        piece = stream.read(min(size - len(buffer), 1 << 20))
        if not piece:
            raise EOFError
        buffer += piece
    return bytes(buffer)
