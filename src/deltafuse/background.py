"""Work in Python that goes on while the proof waits for its worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import copy_context
from threading import Thread
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

#: Seconds after which a thread that computes lets another one go on. Python's own 5 ms would be added to each of the
#: many short waits for a pipe.
_TURN = 1e-4


class Task(Generic[T]):
    """A call in a thread of its own; to be used in a ``with`` statement, which waits for its end. One at a time.

    Where the block is interrupted (by the user, or at the end of its time) the thread is left to itself: what it finds
    is of no use any more.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._outcome: list[T] = []
        self._error: list[BaseException] = []
        self._usual = sys.getswitchinterval()
        # What the run may still take is known there too.
        self._thread = Thread(target=copy_context().run, args=(self._run,), daemon=True)

    def __enter__(self) -> Task[T]:
        sys.setswitchinterval(_TURN)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None or isinstance(error, Exception):
                self._thread.join()
        finally:
            sys.setswitchinterval(self._usual)

    def _run(self) -> None:
        try:
            self._outcome.append(self._call())
        except BaseException as error:
            self._error.append(error)

    def result(self) -> T:
        """What the call gave; waits for its end, and raises what it raised."""
        self._thread.join()
        if self._error:
            raise self._error[0]
        return self._outcome[0]


class Background:
    """Steps that are done one after the other in a thread until there are none or it is told to stop or to give up."""

    def __init__(self, steps: Iterator[object]) -> None:
        self._steps = steps
        self._stopped = False
        self._running = ExitStack()
        self._task = self._running.enter_context(Task(self._run))

    def _run(self) -> None:
        while not self._stopped and next(self._steps, self) is not self:
            continue

    def stop(self) -> None:
        """Lets the step that is being done come to its end and waits for that; raises what it raised."""
        self.drop()
        self._task.result()

    def drop(self, error: BaseException | None = None) -> None:
        """The same for steps that are of no use any more: raises nothing, and waits unless `error` is an interrupt."""
        self._stopped = True
        self._running.__exit__(None if error is None else type(error), error, None)
