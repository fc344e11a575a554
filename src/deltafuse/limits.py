"""The time that a whole run may take: a limit for everything up to the writing, and for each proof a share of it."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from deltafuse.errors import UserError

__all__ = ["bounded", "left", "no_garbage_collection", "share", "within"]

#: What to do where time ran out.
_FEWER = ", or fewer sites with --sites"

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class _TimeUpError(BaseException):
    """Not an Exception: what handles errors on the way must not take it for one."""


class _Options(Protocol):
    @property
    def timeout(self) -> float: ...


_Given = TypeVar("_Given", bound=_Options)


@contextmanager
def no_garbage_collection() -> Generator[None]:
    """Hundreds of thousands of tuples are made and none is garbage: the collector would walk them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def within(seconds: float, advice: str = _FEWER) -> Generator[None]:
    """Ends the block after that many seconds.

    Only the main thread can be interrupted, and only where no alarm that is set already comes first; elsewhere the
    block is not ended, but `share` bounds what it waits for.

    Args:
        seconds: from now on.
        advice: what helps beside more time.

    Raises:
        UserError: ``timeout``.
    """
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    armed = threading.current_thread() is threading.main_thread() and not 0 < left <= seconds
    begin = time.monotonic()
    token = _deadline.set(begin + seconds)
    before = signal.signal(signal.SIGALRM, _ring) if armed else None
    try:
        if armed:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        # What an alarm raises inside a collection is lost, as is all that is raised there.
        with no_garbage_collection() if armed else nullcontext():
            yield
    except _TimeUpError:
        raise UserError(
            "timeout",
            f"the run took longer than {seconds:g} s and was ended, nothing was written: give it more with --timeout"
            f"{advice}",
        ) from None
    finally:
        if armed:
            # an alarm of the caller's own goes on as if nothing had been
            again = max(left - (time.monotonic() - begin), 1e-3) if left else 0.0
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, again)
        _deadline.reset(token)


def bounded(
    run: Callable[Concatenate[_Given, _Parameters], _Result],
) -> Callable[Concatenate[_Given, _Parameters], _Result]:
    """Has a function, whose first argument are options, end within their ``timeout``."""

    @wraps(run)
    def call(options: _Given, *arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        with within(options.timeout):
            return run(options, *arguments, **keywords)

    return call


def left(seconds: float) -> float:
    """How much of `seconds` is left of the run."""
    deadline = _deadline.get()
    return seconds if deadline is None else min(seconds, max(deadline - time.monotonic(), 0.1))


def share(seconds: float) -> float:
    """How much of `seconds` one of several waits may take: half of what is left of the run at most.

    So a run in which every kernel hangs still comes to its end, with a reason for each.
    """
    deadline = _deadline.get()
    return seconds if deadline is None else min(seconds, max((deadline - time.monotonic()) / 2, 0.1))


def _ring(*_: object) -> NoReturn:
    raise _TimeUpError
