"""The proof worker: a child process that runs models on onnxruntime under time and memory limits.

A kernel that hangs or crashes takes the child down and nothing else: the run becomes a `Reason`. The child is started
early, so that its imports overlap the scan.
"""

from __future__ import annotations

import pickle
import select
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import RawIOBase
from types import TracebackType
from typing import IO, Protocol, cast

import numpy as np
import numpy.typing as npt

from deltafuse import children
from deltafuse.children import MEMORY, Child
from deltafuse.limits import share
from deltafuse.reasons import TEXTS, Reason

TEXTS.update(
    {
        "worker-timeout": "running the cut graph took longer than {seconds:.1f} s; "
        "raise --timeout if the machine is slow",
        "worker-died": "onnxruntime crashed or ran out of memory on the cut graph (exit status {status}), so that the "
        "site was left as it is; free memory and try again, or look whether onnxruntime runs the whole model",
        "cut-does-not-load": "onnxruntime cannot load the cut graph: {error}; load the whole model in onnxruntime: "
        "where that fails too, export it again, else update onnxruntime",
        "cut-does-not-run": "onnxruntime cannot run the cut graph: {error}; run the whole model in onnxruntime: where "
        "that fails too, export it again, else report the model",
    }
)

AnyArray = npt.NDArray[np.generic]

#: bytes of the pickle, number of arrays behind it
_HEADER = struct.Struct("<QQ")


class Source(Protocol):
    """What is read from: a file, or a pipe with a time limit."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Reads at least one byte; 0 where the stream ends."""
        ...


def read_message(stream: Source) -> object:
    """Reads one message; raises EOFError where the stream ends."""
    size, count = _HEADER.unpack(_read(stream, _HEADER.size))
    lengths = struct.unpack(f"<{count}Q", _read(stream, 8 * count))
    payload = _read(stream, size)
    # Each array takes the bytes that were read for it as its own.
    return pickle.loads(payload, buffers=[_read(stream, length) for length in lengths])


def write_message(stream: IO[bytes], message: object) -> None:
    """Writes one message: a header, a pickle, and behind it the arrays as they are."""
    arrays: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    raw = [array.raw() for array in arrays]
    head = _HEADER.pack(len(payload), len(raw)) + struct.pack(f"<{len(raw)}Q", *(view.nbytes for view in raw))
    for piece in (memoryview(head + payload), *raw):
        left = piece
        while left:  # a raw pipe may take a part of it
            left = left[stream.write(left) :]
    stream.flush()


def shown(error: Exception) -> str:
    """An error of a kernel in one line."""
    return str(error).splitlines()[0][:400] if str(error) else type(error).__name__


def _read(stream: Source, size: int) -> memoryview:
    # not a bytearray: that would be filled with zeros first
    view, done = np.empty(size, np.uint8).data, 0
    while done < size:
        count = stream.readinto(view[done:])
        if not count:
            raise EOFError
        done += count
    return view


@dataclass(frozen=True)
class Session:
    """A model that a worker has loaded.

    Attributes:
        key: the worker's number for it; no two of one worker have the same.
        inputs: names of its inputs.
        outputs: names of its outputs.
    """

    key: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Worker:
    """Runs models in a child process.

    Args:
        seconds: limit of each call; the child is killed beyond it, and beyond its share of what a whole run may take.
        memory: address space limit of the child in bytes.
        compares: the child is going to be asked for comparisons, and makes ready for them at once.
        child: that was started already with the same limit; told to end with the worker; who started it waits.
        idle: is called once, while the child loads the first model.

    A child that was killed is replaced at the next `load`; sessions of the old one answer with a `Reason`.
    """

    def __init__(
        self,
        seconds: float = 120.0,
        memory: int = MEMORY,
        *,
        compares: bool = False,
        child: Child | None = None,
        idle: Callable[[], object] | None = None,
    ) -> None:
        self.seconds = seconds
        self._idle = idle
        self._memory = memory
        self._compares = compares
        self._given = child
        self._child = self._start() if child is None else child
        self._loaded = 0  # in all
        self._gone = 0  # of these, by earlier children

    def __enter__(self) -> Worker:  # noqa: PYI034 - typing has Self from 3.11 on only
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, model: bytes, meanwhile: Callable[[], object] | None = None) -> Session | Reason:
        """Opens a session on a serialised ModelProto, all optimisations off; `meanwhile` is called while that goes on.

        A child that was killed is replaced first.
        """
        if self._child.poll() is not None:
            self.close()
            self._child = self._start()
            self._gone = self._loaded
        self._loaded += 1
        if meanwhile is None:
            meanwhile, self._idle = self._idle, None
        answer = self._ask(("load", self._loaded, model), meanwhile)
        if isinstance(answer, Reason):
            return answer
        inputs, outputs = cast("tuple[tuple[str, ...], tuple[str, ...]]", answer)
        return Session(self._loaded, inputs, outputs)

    def has(self, session: Session) -> bool:
        """Whether a session is one of the present child's; those of an earlier one are gone with it."""
        return session.key > self._gone

    def run(
        self,
        session: Session,
        feeds: Mapping[str, AnyArray],
        outputs: tuple[str, ...] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> tuple[AnyArray, ...] | Reason:
        """Runs a session; the outputs asked for (default: all), in order.

        Args:
            session: what to run.
            feeds: name of each input -> its array.
            outputs: names of those wanted.
            meanwhile: is called while the child computes.
        """
        wanted = session.outputs if outputs is None else outputs
        used = {name: feeds[name] for name in session.inputs}
        answer = self._ask(("run", session.key, used, wanted), meanwhile)
        return answer if isinstance(answer, Reason) else cast("tuple[AnyArray, ...]", answer)

    def has_answered(self) -> bool:
        """Whether the answer to a question has begun to come, or never will; for what is done meanwhile."""
        return bool(select.select([cast("IO[bytes]", self._child.stdout)], [], [], 0)[0])

    def unload(self, session: Session) -> None:
        """Frees a session."""
        self._ask(("unload", session.key))

    def ask(self, verb: str, *arguments: object, meanwhile: Callable[[], object] | None = None) -> object:
        """Asks for something else that the child knows, see `deltafuse.worker_main`; its answer, or a Reason."""
        return self._ask((verb, *arguments), meanwhile)

    def close(self) -> None:
        """Ends the child."""
        if self._child is self._given:
            self._child.kill()
        else:
            children.end(self._child)

    def _start(self) -> Child:
        return children.start(self._memory, compares=self._compares)

    def _ask(self, message: tuple[object, ...], meanwhile: Callable[[], object] | None = None) -> object:
        seconds = share(self.seconds)
        stdin, stdout = cast("IO[bytes]", self._child.stdin), cast("IO[bytes]", self._child.stdout)
        try:
            write_message(stdin, message)
            if meanwhile is not None:
                meanwhile()
            status, answer = cast("tuple[str, object]", read_message(_Timed(stdout, seconds)))
        except TimeoutError:
            self._kill()
            return Reason("worker-timeout", {"seconds": seconds})
        except (EOFError, BrokenPipeError):
            self._kill()
            return Reason("worker-died", {"status": self._child.returncode})
        except BaseException:
            # An answer that was not read would be taken for that to the next question.
            self._kill()
            raise
        if status == "ok":
            return answer
        return Reason(status, {"error": str(answer)})

    def _kill(self) -> None:
        self._child.kill()
        self._child.wait()


class _Timed:
    """A raw pipe that is read until a deadline."""

    def __init__(self, stream: IO[bytes], seconds: float) -> None:
        self._stream = cast("RawIOBase", stream)
        self._deadline = time.monotonic() + seconds

    def readinto(self, buffer: memoryview, /) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0 or not select.select([self._stream], [], [], left)[0]:
            raise TimeoutError
        return self._stream.readinto(buffer)
