"""Mutates real exports field by field, fuses what comes of it and looks that nothing goes wrong.

No traceback, no hang, no output that does not load or roll back where the input loads, no fusion that is not equal to
what it replaced.

    python scripts/fuzz.py --cases 10000 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import onnx

from deltafuse import cli, commands, pipeline
from deltafuse.worker import Session, Worker
from fuzz_mutations import mutate

#: The module; the package has a function of that name.
verifying = importlib.import_module("deltafuse.verify")
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/fixtures", "tests/zoo")
#: Seconds that one command may take, and those that it is told to keep to.
LIMIT, TIMEOUT = 40, 20
#: Models that are larger tell no more and take longer.
LARGEST = 60_000
#: A worker keeps what it has loaded: a new one after that many cases.
FRESH = 40


@dataclass(frozen=True)
class Failure:
    """A case that went wrong.

    Attributes:
        kind: what went wrong, the same for all cases of one cause.
        case: its number; with the seed it is made again.
        source: the model that was mutated.
        changes: what was done to it.
        detail: the last lines of what was said.
    """

    kind: str
    case: int
    source: str
    changes: tuple[str, ...]
    detail: str


@dataclass
class Summary:
    """What a run found."""

    seed: int
    cases: int = 0
    seconds: float = 0.0
    mutations: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    failures: list[Failure] = field(default_factory=list[Failure])


class HangError(BaseException):
    """A command went on beyond its limit."""


class _Kept(Worker):
    """One child for many runs: to start one takes longer than to fuse a small model."""

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Ends the child, as the worker itself asks for where it died."""
        super().close()


class Fuzzer:
    """Runs cases, each of its own seed, in a folder for their files."""

    def __init__(self, sources: Sequence[Path], seed: int, folder: Path, keep: Path | None = None) -> None:
        self.sources = sources
        self.summary = Summary(seed)
        self._folder = folder
        self._keep = keep
        self._worker = _Kept(TIMEOUT)
        self._models: dict[Path, onnx.ModelProto] = {}

    def run(self, case: int) -> None:
        """Makes a mutant, fuses it and looks at what comes of it."""
        if case % FRESH == FRESH - 1:
            self.close()
            self._worker = _Kept(TIMEOUT)
        rng = random.Random(f"{self.summary.seed} {case}")
        source = rng.choice(self.sources)
        content, changes = mutate(self._model(source), rng)
        path = self._folder / "mutant.onnx"
        path.write_bytes(content)
        begin = time.monotonic()
        problems = list(self._problems(path, content, rng.randrange(1 << 30)))
        self.summary.seconds += time.monotonic() - begin
        self.summary.cases += 1
        self.summary.mutations.update(change.split(":")[0] for change in changes)
        for kind, detail in problems:
            self.summary.failures.append(Failure(kind, case, source.stem, tuple(changes), detail))
            if self._keep is not None:
                (self._keep / f"{self.summary.seed}-{case}.onnx").write_bytes(content)

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()

    def _model(self, source: Path) -> onnx.ModelProto:
        if source not in self._models:
            self._models[source] = onnx.load(source)
        return self._models[source]

    def _problems(self, path: Path, content: bytes, seed: int) -> Iterator[tuple[str, str]]:
        fused, back = self._folder / "fused.onnx", self._folder / "back.onnx"
        for left in (fused, back):
            left.unlink(missing_ok=True)
        code, text = self._command(path, "-o", fused, "--keep-going", "--timeout", TIMEOUT)
        self.summary.outcomes[_outcome(code, text)] += 1
        if path.read_bytes() != content:
            yield "the input was changed", text
        if code not in (0, 1, 3, 4):
            yield _kind("fuse", code, text), text
        if code != 0 and fused.exists():
            yield "an output although the exit is not 0", text
        if code == 0:
            yield from self._look(path, fused, back, seed)

    def _look(self, path: Path, fused: Path, back: Path, seed: int) -> Iterator[tuple[str, str]]:
        """At a fused file."""
        code, text = self._command("rollback", fused, "-o", back)
        if code or back.read_bytes() != path.read_bytes():
            yield _kind("rollback", code, text), text
        loads = self._loads(path)
        code, text = self._command("verify", path, fused, "--level", "site", "--seed", seed, "--timeout", TIMEOUT)
        # what no runtime takes, because of a node that no proof needs, cannot be compared either
        if code and (loads or "cut-does-not-load" not in text):
            yield _kind("verify", code, text), text
        if not loads:
            return
        lowered = self._folder / "lowered.onnx"
        code, text = self._command("lower", fused, "-o", lowered)
        if code:
            yield _kind("lower", code, text), text
        elif not self._loads(lowered):
            yield "onnxruntime loads the input and not the output", text

    def _loads(self, path: Path) -> bool:
        session = self._worker.load(path.read_bytes())
        if isinstance(session, Session):
            self._worker.unload(session)
        return isinstance(session, Session)

    def _command(self, *arguments: object) -> tuple[int | str, str]:
        """Exit code, or what was raised, and all that was said."""
        said = io.StringIO()
        own = [(module, module.Worker) for module in (pipeline, verifying)]
        for module, _ in own:
            module.Worker = lambda *_, **__: self._worker  # type: ignore[assignment]
        # Nor does a command start a child ahead of its worker.
        early, commands.early = commands.early, lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
        before = signal.signal(signal.SIGALRM, _hang)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                return cli.main([str(argument) for argument in arguments]), said.getvalue()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return type(error).__name__, f"{said.getvalue()}\n{error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            for module, worker in own:
                module.Worker = worker  # type: ignore[misc]
            commands.early = early


def _hang(*_: object) -> NoReturn:
    raise HangError


def _outcome(code: int | str, text: str) -> str:
    if code != 1:
        return {0: "fused", 3: "no site", 4: "refused"}.get(code, f"exit {code}") if isinstance(code, int) else code
    said = re.sub(r"\S*mutant\.onnx:?|'[^']*'|\d+", "", text.rpartition("fuse: ")[2])
    return f"told: {' '.join(said.split())[:60]}"


def _kind(command: str, code: int | str, text: str) -> str:
    """The command, what it ended with, and for a traceback its last two lines of ours."""
    frames = re.findall(r'File ".*/(\w+\.py)", line (\d+)', text)
    place = " ".join(f"{name}:{line}" for name, line in frames[-1:])
    error = next((line for line in reversed(text.splitlines()) if re.match(r"[\w.]+(Error|Exception)\b", line)), "")
    return " ".join(filter(None, (command, f"exit {code}", place, error[:80])))


def models(glob: str = "*") -> list[Path]:
    """The exports that are mutated."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob(f"{glob}.onnx"))]
    return [path for path in found if path.stat().st_size <= LARGEST]


def fuzz(cases: int, seed: int, sources: Sequence[Path], keep: Path | None = None, first: int = 0) -> Summary:
    """Runs some cases, from the first on."""
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(sources, seed, Path(folder), keep)
        try:
            for case in range(first, first + cases):
                fuzzer.run(case)
                if sys.stderr.isatty():
                    sys.stderr.write(f"\r{case + 1 - first}/{cases}, {len(fuzzer.summary.failures)} failures ")
        finally:
            fuzzer.close()
        return fuzzer.summary


def main() -> int:
    """Runs and prints a summary; 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, metavar="N", help="how many mutants (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first: makes one case again")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the mutations (default: %(default)s)")
    parser.add_argument("--models", default="*", metavar="GLOB", help="names of the exports to mutate")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where to write the mutants that went wrong")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    summary = fuzz(given.cases, given.seed, models(given.models), given.keep, given.first)
    if given.json:
        counts = {"mutations": dict(summary.mutations), "outcomes": dict(summary.outcomes)}
        failures = [asdict(failure) for failure in summary.failures]
        print(json.dumps(vars(summary) | counts | {"failures": failures}))
    else:
        print(f"{summary.cases} cases in {summary.seconds:.0f} s, seed {summary.seed}")
        for title, counts in (("mutations", summary.mutations), ("outcomes", summary.outcomes)):
            print(f"{title}:", *(f"  {count:6} {name}" for name, count in counts.most_common()), sep="\n")
        kinds = Counter(failure.kind for failure in summary.failures)
        print(f"{len(summary.failures)} failures of {len(kinds)} kinds")
        for failure in {one.kind: one for one in reversed(summary.failures)}.values():
            print(f"  {kinds[failure.kind]:4} {failure.kind}: case {failure.case} of {failure.source}", end="")
            print(f" ({'; '.join(failure.changes)})")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
