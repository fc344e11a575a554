"""What the worker compares by itself is what is compared here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest

import graphs
from deltafuse.classes import classify
from deltafuse.comparing import Held, there_too
from deltafuse.draws import DRAWS, LEAPS
from deltafuse.patterns import load_file
from deltafuse.prover import Proven, prove
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.trial import Beyond, Step, Trial
from deltafuse.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(compares=True) as one:
        yield one


@pytest.fixture
def trial(worker: Worker, tmp_path: Path) -> Trial:
    scanned = graphs.scanned(graphs.step(), tmp_path)
    (candidate,) = graphs.candidates(scanned)
    found = prove(scanned, classify(scanned), Shapes(scanned), graphs.pattern(), worker, candidate)
    assert isinstance(found, Proven), found
    assert found.trial.there is not None
    return found.trial


def test_errors_are_those_of_a_comparison_here(trial: Trial) -> None:
    here = replace(trial, there=None)
    for seed, how in enumerate((*DRAWS, *LEAPS)):
        for full in (True, False):
            told = trial.error(trial.binding, how, seed, full=full)
            assert told == here.error(trial.binding, how, seed, full=full)
            assert isinstance(told, float)
            assert told < 1e-8
    steps = [Step(trial.binding, how, seed) for seed, how in enumerate(DRAWS)]
    ahead, alone = (one.ahead([step.even for step in steps]) for one in (trial, here))
    assert [ahead.error(step) for step in steps] == [alone.error(step) for step in steps]


def test_what_was_foreseen_is_answered_as_what_was_not(trial: Trial) -> None:
    here = replace(trial, there=None)
    steps = [Step(trial.binding, how, seed) for seed, how in enumerate(DRAWS)]
    trial.foresee([*steps, Beyond(trial.binding, 1, single=False)])
    # In another order, one twice, and one that is in no draw.
    asked = [*reversed(steps), steps[0], Step(trial.binding, DRAWS[0], 77)]
    told, alone = (
        [one.error(step.binding, step.even.how, step.seed) for step in asked] for one in (trial, here)
    )
    assert told == alone
    # No token is a later one.
    assert trial.goes_on(Beyond(trial.binding, 1, single=False)) is here.goes_on(
        Beyond(trial.binding, 1, single=False)
    ) is False


def test_what_is_no_longer_likely_is_left_off() -> None:
    begun, go_on = Event(), Event()
    ran: list[object] = []

    class Slow:
        """Stands for a trial whose answers take as long as is wanted."""

        def answer(self, question: object) -> float:
            ran.append(question)
            begun.set()
            assert go_on.wait(60)
            return 1.0

    held = Held(lambda *_: ())
    held._trials[1] = cast("Trial", Slow())
    first, *others = [cast("Any", number) for number in range(6)]
    held.foresee(1, [first])
    assert begun.wait(60)
    held.foresee(1, [first, *others])
    held.foresee(1, others[-1:])
    go_on.set()
    assert [held.answer(1, one) for one in (first, others[-1])] == [1.0, 1.0]
    held._pool.shutdown()
    # What runs is not stopped; two run at once.
    assert set(ran) <= {first, others[0], others[-1]}
    assert len(ran) == len(set(ran))


def test_a_wrong_rule_is_wrong_there_too(trial: Trial, worker: Worker) -> None:
    halved = replace(trial.explained.assignment, scale=trial.explained.assignment.scale / 2)
    other = replace(trial, explained=replace(trial.explained, assignment=halved))
    told = there_too(worker, other).error(trial.binding, DRAWS[0], 0)
    assert isinstance(told, float)
    assert told > 0.1


def test_a_rule_that_is_of_no_pattern_file_is_compared_here(trial: Trial, worker: Worker) -> None:
    def own(*operands: Any) -> Any:
        return trial.recurrence(*operands)

    alone = there_too(worker, replace(trial, recurrence=own, there=None))
    assert alone.there is None
    assert alone.error(trial.binding, DRAWS[0], 0) == trial.error(trial.binding, DRAWS[0], 0)


def test_a_rule_of_an_older_load_of_its_file_is_compared_here(trial: Trial, worker: Worker, tmp_path: Path) -> None:
    file = tmp_path / "gated_delta_rule.py"
    file.write_text(Path(graphs.pattern().recurrence.__code__.co_filename).read_text())
    shipped = graphs.pattern().recurrence
    older, newer = (cast("Any", load_file(file).pattern).recurrence for _ in range(2))
    assert there_too(worker, replace(trial, recurrence=older, there=None)).there is None
    assert there_too(worker, replace(trial, recurrence=newer, there=None)).there is not None
    # A file of the same name elsewhere is another one.
    assert there_too(worker, replace(trial, recurrence=shipped, there=None)).there is not None


def test_a_rule_that_raises_raises_here(worker: Worker, trial: Trial, tmp_path: Path) -> None:
    source = Path(graphs.pattern().recurrence.__code__.co_filename).read_text()
    stumbling = tmp_path / "stumbling_rule.py"
    # Not at the sizes that a file is looked over with when it is read.
    line = "    out = np.empty_like(value)\n"
    stumbling.write_text(
        source.replace(line, f'    if key.shape[-1] > 4:\n        raise LookupError("stumbled")\n{line}', 1)
    )
    rule: Any = load_file(stumbling).pattern
    told = there_too(worker, replace(trial, recurrence=rule.recurrence, there=None))
    assert told.there is not None
    with pytest.raises(LookupError, match="stumbled"):
        told.error(trial.binding, DRAWS[0], 0)


def test_a_session_that_is_gone_is_told_as_it_is_here(trial: Trial, worker: Worker) -> None:
    worker.unload(trial.bench.session)
    told = trial.error(trial.binding, DRAWS[0], 0)
    assert isinstance(told, Reason)
    assert told.code == "cut-does-not-run"
    assert told == replace(trial, there=None).error(trial.binding, DRAWS[0], 0)


def test_a_comparison_that_takes_too_long_is_ended(trial: Trial, worker: Worker) -> None:
    worker.seconds = 0.0
    told = trial.error(trial.binding, DRAWS[0], 0)
    assert isinstance(told, Reason)
    assert told.code == "worker-timeout"
