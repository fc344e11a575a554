"""The child of `deltafuse.worker`: reads requests on stdin, answers on stdout, runs them on onnxruntime.

onnxruntime is used without optimisation and with one thread, so that what runs is what was cut.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, cast

from deltafuse.allocator import keep_memory
from deltafuse.worker import AnyArray, Source, read_message, shown, write_message

if TYPE_CHECKING:
    from deltafuse.comparing import Held
    from deltafuse.first_nodes import Reading

_TRIALS = "deltafuse.comparing"


class _Sessions:
    def __init__(self) -> None:
        self._open: dict[int, Any] = {}

    @cached_property
    def _ort(self) -> Any:
        # Imported here: the import takes most of the child's start, and the memory limit is set before it.
        import onnxruntime

        return onnxruntime

    def load(self, key: int, model: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
        options = self._ort.SessionOptions()
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # Each run has other sizes: what is planned for those of the last one is of no use.
        options.enable_mem_pattern = False
        session = self._ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._open[key] = session
        return tuple(i.name for i in session.get_inputs()), tuple(o.name for o in session.get_outputs())

    def run(self, key: int, feeds: dict[str, AnyArray], outputs: tuple[str, ...]) -> tuple[AnyArray, ...]:
        if key not in self._open:
            raise LookupError("its session is gone; load it again")
        return tuple(self._open[key].run(list(outputs), feeds))

    def unload(self, key: int) -> None:
        self._open.pop(key, None)
        if "trials" in vars(self):
            self.trials.drop(key)

    @cached_property
    def trials(self) -> Held:
        # Only proofs need it: the import takes as long as that of onnxruntime.
        from deltafuse.comparing import Held

        return Held(self.run)

    def hold(self, key: int, source: str, trial: bytes) -> bool:
        return self.trials.hold(key, source, trial)

    def foresee(self, *asked: Any) -> None:
        self.trials.foresee(*asked)

    def answer(self, *asked: Any) -> object:
        return self.trials.answer(*asked)


def _reading(model: str) -> Reading:
    from deltafuse.first_nodes import Reading

    return Reading(Path(model))


def _make_ready(reading: Reading | None, modules: Sequence[str]) -> None:
    """What the child does until it is asked for something, and while the first cuts are loaded and run."""
    if reading is not None:
        reading.read()
    for module in modules:
        import_module(module)


def _serve(source: Source, sink: IO[bytes], *, compares: bool, model: str | None) -> None:
    sessions, reading = _Sessions(), None if model is None else _reading(model)
    modules = ("onnxruntime", _TRIALS) if compares else ("onnxruntime",)
    Thread(target=_make_ready, args=(reading, modules), daemon=True).start()
    verbs: dict[str, tuple[Callable[..., object], str]] = {
        "rest": (lambda: None if reading is None else reading.rest(), "cut-does-not-run"),
        "first_nodes": (lambda: None if reading is None else reading.columns(), "cut-does-not-run"),
        "load": (sessions.load, "cut-does-not-load"),
        "run": (sessions.run, "cut-does-not-run"),
        "unload": (sessions.unload, "cut-does-not-run"),
        "hold": (sessions.hold, "cut-does-not-run"),
        "foresee": (sessions.foresee, "cut-does-not-run"),
        "answer": (sessions.answer, "cut-does-not-run"),
    }
    while True:
        try:
            verb, *arguments = cast("tuple[str, ...]", read_message(source))
        except EOFError:
            return
        call, failure = verbs[verb]
        try:
            answer: tuple[str, object] = ("ok", call(*arguments))
        except Exception as error:
            answer = (failure, shown(error))
        write_message(sink, answer)


def main() -> None:
    """Serves until stdin ends, within the memory (bytes of address space) given as the first argument.

    With a second one it makes ready for comparisons, with a third one it reads the first nodes of that model.
    """
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    keep_memory()
    # Kernels that print must not disturb the protocol: stdout becomes stderr for everything else.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(cast("Source", sys.stdin.buffer), sink, compares=len(sys.argv) > 2, model=dict(enumerate(sys.argv)).get(3))
    # Nobody waits for what was begun ahead of its time.
    os._exit(0)


if __name__ == "__main__":
    main()
