"""Comparisons that the worker makes by itself: a site's results and the rule's meet where the site is run.

So the operands of a draw, megabytes often, never leave the worker; what goes to and fro is a step and its error. It is
the same `Trial` that compares there and here: where one cannot be sent (the rule is no function of a pattern file), or
the worker does not answer, it compares here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from deltafuse.bench import Bench
from deltafuse.patterns import file_of, load_file
from deltafuse.probe import Cut
from deltafuse.reasons import Reason
from deltafuse.trial import Question, Trial
from deltafuse.worker import AnyArray, Session, Worker, shown

#: Runs of a cut take most of the time of a proof, and each is one thread's.
_AT_ONCE = 2

#: What the worker's child calls, see `deltafuse.worker_main`.
Run = Callable[[int, dict[str, AnyArray], tuple[str, ...]], "tuple[AnyArray, ...]"]


@dataclass(frozen=True)
class There:
    """A trial that the worker holds too."""

    worker: Worker
    session: Session

    def answer(self, question: Question) -> float | Reason | None:
        """As `Trial.answer`; None where it must be found here."""
        answer = self.worker.ask("answer", self.session.key, question)
        if isinstance(answer, Reason):
            return answer if answer.code in ("worker-timeout", "worker-died") else None
        return answer if isinstance(answer, (float, Reason)) else None

    def foresee(self, questions: Sequence[Question]) -> None:
        """Lets the worker begin with what is likely to be asked for next, several at once."""
        self.worker.ask("foresee", self.session.key, tuple(questions))


def there_too(worker: Worker, trial: Trial) -> Trial:
    """The same trial, held by the worker too where it can be sent there."""
    source = file_of(trial.recurrence)
    if source is None:
        return trial
    bench, assignment = trial.bench, trial.explained.assignment
    # What a norm looks like in the file is not asked for there.
    norms = {value: replace(norm, nodes=(), initializers=()) for value, norm in assignment.norms.items()}
    explained = replace(trial.explained, assignment=replace(assignment, norms=norms))
    parts = (bench.session, bench.names, (bench.cut.inputs, bench.cut.outputs), bench.shapes, bench.sizes)
    held: object = None
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        sent = pickle.dumps((parts, trial.recurrence, explained, trial.out, trial.final, trial.binding))
        held = worker.ask("hold", bench.session.key, str(source), sent)
    return replace(trial, there=There(worker, bench.session)) if held is True else trial


class _Here:
    """Runs sessions of this process as a `Worker` does those of its child."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(
        self,
        session: Session,
        feeds: Mapping[str, AnyArray],
        outputs: tuple[str, ...] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> tuple[AnyArray, ...] | Reason:
        used, wanted = {name: feeds[name] for name in session.inputs}, session.outputs if outputs is None else outputs
        if meanwhile is not None:
            meanwhile()
        try:
            return self._run(session.key, used, wanted)
        except Exception as error:
            return Reason("cut-does-not-run", {"error": shown(error)})


@dataclass(frozen=True)
class _Begun:
    """A question that was foreseen."""

    session: int
    question: Question
    answer: Future[float | Reason]


class Held:
    """The trials that this process, the worker's child, holds for another: by session.

    What is foreseen is answered ahead of its time by `_AT_ONCE` threads; all else by the one that asks.
    """

    def __init__(self, run: Run) -> None:
        self._here = _Here(run)
        self._trials: dict[int, Trial] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._begun: list[_Begun] = []

    def hold(self, session: int, source: str, trial: bytes) -> bool:
        """Takes a trial; its recurrence is one of the pattern file `source`."""
        self.drop(session)
        load_file(Path(source))
        parts, recurrence, *rest = pickle.loads(trial)
        of, names, (inputs, outputs), shapes, sizes = parts
        bench = Bench(self._here, of, names, Cut(onnx.ModelProto(), inputs, outputs, ()), shapes, sizes)
        self._trials[session] = Trial(bench, recurrence, *rest)
        return True

    def foresee(self, session: int, questions: Sequence[Question]) -> None:
        """Begins with what is likely to be asked for, and leaves off what was not begun and is no longer likely."""
        trial = self._trials[session]
        self._begun = [
            begun for begun in self._begun
            if (begun.session == session and begun.question in questions) or not begun.answer.cancel()
        ]  # fmt: skip
        known = [begun.question for begun in self._begun if begun.session == session]
        for question in questions:
            if question not in known:
                self._begun.append(_Begun(session, question, self._pool.submit(trial.answer, question)))

    def answer(self, session: int, question: Question) -> float | Reason:
        """See `There.answer`."""
        trial = self._trials[session]
        for begun in self._begun:
            if begun.session == session and begun.question == question:
                return begun.answer.result()
        return trial.answer(question)

    def drop(self, session: int) -> None:
        """Forgets the trial of a session, and what was begun of it."""
        self._trials.pop(session, None)
        for begun in self._begun:
            if begun.session == session:
                begun.answer.cancel()
        self._begun = [begun for begun in self._begun if begun.session != session]
