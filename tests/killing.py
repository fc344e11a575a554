"""Kills a write again and again and looks at what is left: ``python killing.py FOLDER HOW TASK``.

A process of its own, since it forks: each write is a child that is killed, at a random moment or before the nth call
that it makes to the file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deltafuse.record import publish, sidecar_path
from deltafuse.rollback import rollback
from deltafuse.wire import scan

MOMENTS = 50
#: Calls that change what the next process finds.
CALLS = ("open", "link", "replace", "fsync", "copy_file_range", "ftruncate", "utime", "unlink", "mkdir", "rmdir")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Stage:
    """Two models in ``in`` that share their weights; the older one stands in ``out`` when a write begins."""

    def __init__(self, folder: Path, task: str) -> None:
        self.task = task
        self.inputs = folder / "in"
        self.out = folder / "out"
        self.before = {path: digest(path) for path in sorted(self.inputs.rglob("*")) if path.is_file()}
        self.weights = [path.relative_to(self.inputs) for path in self.before if path.suffix == ".data"]
        self.output = self.out / "model.onnx"
        self.old = self.made("old")
        self.new = self.made("new")
        assert self.old != self.new

    def set_up(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        self.write("old", "embed" if self.task == "embed" else "sidecar", self.output)
        if self.task == "rollback":
            self.write("new", "sidecar", self.out / "fused.onnx")
        for name in self.weights:
            (self.out / name).unlink()

    def write(self, name: str, mode: str, output: Path) -> None:
        publish(scan(self.inputs / f"{name}.onnx"), [], output, mode, how="copy")

    def made(self, which: str) -> bytes:
        """What stands at the output before, and after."""
        self.set_up()
        if which == "new":
            self.run()
        return self.output.read_bytes()

    def run(self) -> None:
        if self.task == "rollback":
            shutil.copytree(self.inputs, self.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.onnx"))
            rollback(self.out / "fused.onnx", self.output)
        else:
            self.write("new", self.task, self.output)

    def look(self) -> str:
        """Which of the two stands there; anything else is an error."""
        assert {path: digest(path) for path in self.before} == self.before, "the input was touched"
        found = self.output.read_bytes()
        assert found in (self.old, self.new), "neither the old file nor the new one"
        for name in self.weights:
            copy = self.out / name
            if self.task != "rollback" and copy.exists():
                assert digest(copy) == self.before[self.inputs / name], "half of the weights"
                assert copy.stat().st_nlink == 1
        which = "old" if found == self.old else "new"
        if self.task == "sidecar":
            # The record that is found belongs to the file, and so undoes it.
            back = self.out / "back.onnx"
            for name in self.weights:
                shutil.copy(self.inputs / name, self.out / name)
            rollback(self.output, back)
            assert digest(back) == digest(self.inputs / f"{which}.onnx"), "the record of another file"
        # The next run is not kept from its work by what a killed one left, and clears it away.
        self.run()
        assert self.output.read_bytes() == self.new
        left = {path.name for path in self.out.iterdir() if path.name.startswith(".") or path.suffix == ".old"}
        assert not left, left
        return which

    def child(self, prepare: Callable[[], object]) -> int:
        self.set_up()
        pid = os.fork()
        if pid:
            return pid
        try:
            prepare()
            self.run()
        except BaseException as error:
            sys.stderr.write(repr(error))
            os._exit(1)
        os._exit(0)


def kill_at_moments(stage: Stage) -> list[str]:
    """At random moments of a write."""
    begin = time.perf_counter()
    os.waitpid(stage.child(lambda: None), 0)
    whole = time.perf_counter() - begin
    rng, found = random.Random(0), list[str]()
    for _ in range(MOMENTS):
        pid = stage.child(lambda: None)
        time.sleep(rng.uniform(0, whole))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found.append(stage.look())
    return found


def kill_at_calls(stage: Stage) -> list[str]:
    """Before the nth call to the file system, for each n there is."""
    found: list[str] = []
    while True:
        left = [len(found)]

        def prepare(left: list[int] = left) -> None:
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name), left))

        _, status = os.waitpid(stage.child(prepare), 0)
        found.append(stage.look())
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return found


def counted(call: Callable[..., object], left: list[int]) -> Callable[..., object]:
    def run(*arguments: object, **keywords: object) -> object:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return call(*arguments, **keywords)

    return run


if __name__ == "__main__":
    stage = Stage(Path(sys.argv[1]), sys.argv[3])
    assert stage.task != "sidecar" or sidecar_path(stage.output).exists()
    outcomes = {"moments": kill_at_moments, "calls": kill_at_calls}[sys.argv[2]](stage)
    sys.stdout.write(json.dumps(outcomes))
