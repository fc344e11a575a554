"""Comparisons that the worker makes by itself: a site's results and the rule's meet where the site is run.

So the operands of a draw, megabytes often, never leave the worker; what goes to and fro is a step and its error. It is
the same `Trial` that compares there and here: where one cannot be sent (the rule is no function of a pattern file), or
the worker does not answer, it compares here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from deltafuse.background import Task
from deltafuse.bench import Bench
from deltafuse.patterns import file_of, load_file
from deltafuse.probe import Cut
from deltafuse.reasons import Reason
from deltafuse.trial import Ahead, Step, Trial
from deltafuse.worker import AnyArray, Session, Worker, shown

#: What the worker's child calls, see `deltafuse.worker_main`.
Run = Callable[[int, dict[str, AnyArray], tuple[str, ...]], "tuple[AnyArray, ...]"]


@dataclass(frozen=True)
class There:
    """A trial that the worker holds too."""

    worker: Worker
    session: Session

    def error(self, step: Step, then: Step | None, *, full: bool) -> float | Reason | None:
        """As `Trial.error`, for a step that is even; None where it must be compared here.

        Args:
            step: what to compare.
            then: what will be asked for next, if that is known.
            full: see `Trial.error`.
        """
        answer = self.worker.ask("compare", self.session.key, step, then, full)
        if isinstance(answer, Reason):
            return answer if answer.code in ("worker-timeout", "worker-died") else None
        return answer if isinstance(answer, (float, Reason)) else None


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
        with Task(lambda: self._run(session.key, used, wanted)) as task:
            if meanwhile is not None:
                meanwhile()
        try:
            return task.result()
        except Exception as error:
            return Reason("cut-does-not-run", {"error": shown(error)})


class Held:
    """The trials that this process, the worker's child, holds for another: by session."""

    def __init__(self, run: Run) -> None:
        self._here = _Here(run)
        self._trials: dict[int, Ahead] = {}

    def hold(self, session: int, source: str, trial: bytes) -> bool:
        """Takes a trial; its recurrence is one of the pattern file `source`."""
        load_file(Path(source))
        parts, recurrence, *rest = pickle.loads(trial)
        of, names, (inputs, outputs), shapes, sizes = parts
        bench = Bench(self._here, of, names, Cut(onnx.ModelProto(), inputs, outputs, ()), shapes, sizes)
        self._trials[session] = Ahead(Trial(bench, recurrence, *rest), ())
        return True

    def compare(self, session: int, step: Step, then: Step | None, full: bool) -> float | Reason:
        """See `There.error`."""
        ahead = self._trials[session]
        ahead.expect(() if then is None else (then,))
        return ahead.error(step, full=full)

    def drop(self, session: int) -> None:
        """Forgets the trial of a session."""
        self._trials.pop(session, None)
