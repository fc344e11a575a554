"""What goes on in a thread while a proof waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
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


def test_a_task_knows_what_its_caller_knows() -> None:
    known = ContextVar("known", default=0)
    known.set(7)
    with Task(known.get) as task:
        known.set(8)
    assert task.result() == 7


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


def failing(begun: Event) -> Iterator[None]:
    yield
    begun.set()
    raise LookupError


def test_an_error_in_a_step_comes_out_at_the_end() -> None:
    begun = Event()
    running = Background(failing(begun))
    assert begun.wait(60)
    with pytest.raises(LookupError):
        running.stop()


@pytest.mark.parametrize("wait", [True, False])
def test_an_interrupt_does_not_wait_for_what_is_of_no_use_any_more(wait: bool) -> None:
    usual, ended = sys.getswitchinterval(), Event()
    may_end = Event()

    def call() -> None:
        assert may_end.wait(60)
        ended.set()

    def interrupted() -> None:
        with Task(call):
            if wait:
                may_end.set()
                raise LookupError
            raise KeyboardInterrupt

    with pytest.raises(LookupError if wait else KeyboardInterrupt):
        interrupted()
    assert ended.is_set() == wait
    assert sys.getswitchinterval() == usual
    may_end.set()
    assert ended.wait(60)


def test_steps_that_are_of_no_use_any_more_raise_nothing() -> None:
    begun = Event()
    running = Background(failing(begun))
    assert begun.wait(60)
    running.drop()
    with pytest.raises(LookupError):
        running.stop()


def test_steps_end_after_an_interrupt_and_nobody_waits_for_them() -> None:
    done: list[int] = []
    begun, may_go_on = Event(), Event()

    def steps() -> Iterator[None]:
        for number in count():
            done.append(number)
            begun.set()
            assert may_go_on.wait(60)
            yield

    running = Background(steps())
    assert begun.wait(60)
    running.drop(KeyboardInterrupt())
    assert done == [0]
    may_go_on.set()
    running.stop()
    assert done == [0]
