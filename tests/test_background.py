"""What goes on in a thread while a proof waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from threading import Event

import pytest

from deltafuse.background import Background, Task


def test_a_task_goes_on_beside_its_caller_and_gives_its_result() -> None:
    begun, may_end = Event(), Event()

    def call() -> int:
        begun.set()
        assert may_end.wait(60)
        return 7

    with Task(call) as task:
        assert begun.wait(60)
        may_end.set()
        assert task.result() == 7


def test_a_task_raises_where_its_result_is_asked_for() -> None:
    with Task(lambda: 1 // 0) as task:
        pass
    with pytest.raises(ZeroDivisionError):
        task.result()


def test_turns_are_short_for_as_long_as_a_task_lasts() -> None:
    usual = sys.getswitchinterval()
    with Task(sys.getswitchinterval) as task:
        assert task.result() < usual
    assert sys.getswitchinterval() == usual


def test_steps_are_done_until_it_is_told_to_stop() -> None:
    done: list[int] = []
    begun = Event()

    def steps() -> Iterator[None]:
        for number in count():
            done.append(number)
            begun.set()
            yield

    running = Background(steps())
    assert begun.wait(60)
    running.stop()
    number = len(done)
    assert done == list(range(number))
    assert sys.getswitchinterval() > 1e-3


def test_an_error_in_a_step_comes_out_at_the_end() -> None:
    def steps() -> Iterator[None]:
        yield
        raise LookupError

    running = Background(steps())
    with pytest.raises(LookupError):
        running.stop()
