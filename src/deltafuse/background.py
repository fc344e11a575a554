"""Work in Python that goes on while the proof waits for its worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")

#: Seconds after which a thread that computes lets another one go on. Python's own 5 ms would be added to each of the
#: many short waits for a pipe.
_TURN = 1e-4


class Task(Generic[T]):
    """A call in a thread of its own; one at a time."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._outcome: list[T] = []
        self._error: list[BaseException] = []
        self._usual = sys.getswitchinterval()
        sys.setswitchinterval(_TURN)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._call())
        except BaseException as error:
            self._error.append(error)

    def result(self) -> T:
        """Waits for the end of the call; raises what it raised."""
        self._thread.join()
        sys.setswitchinterval(self._usual)
        if self._error:
            raise self._error[0]
        return self._outcome[0]


class Background:
    """Steps that are done one after the other in a thread until there are none or it is told to stop."""

    def __init__(self, steps: Iterator[object]) -> None:
        self._steps = steps
        self._stopped = False
        self._task = Task(self._run)

    def _run(self) -> None:
        while not self._stopped and next(self._steps, self) is not self:
            continue

    def stop(self) -> None:
        """Lets the step that is being done come to its end and waits for that; raises what it raised."""
        self._stopped = True
        self._task.result()
