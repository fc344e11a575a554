"""The fuzzer: real exports with fields changed end in an answer, and what goes wrong is seen."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import deltafuse.rollback  # noqa: F401 - replaced in parts below
import fuzz
from deltafuse import found
from exports import export
from fuzz_mutations import mutate

CASES = 300


def test_three_hundred_mutants_go_through() -> None:
    command = [sys.executable, fuzz.__file__, "--cases", str(CASES), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = json.loads(run.stdout)
    assert (run.returncode, summary["failures"]) == (0, [])
    assert summary["cases"] == CASES == sum(summary["outcomes"].values())
    assert summary["outcomes"]["fused"] > CASES // 10
    assert len(summary["mutations"]) > 30


def test_the_same_seed_makes_the_same_mutants() -> None:
    model = onnx.load(export("rec_ts14").path)
    before = model.SerializeToString()
    first, again = (mutate(model, random.Random(7)) for _ in range(2))
    assert first == again
    assert first[0] != before
    assert model.SerializeToString() == before
    assert mutate(model, random.Random(8)) != first


@pytest.mark.parametrize(
    ("name", "error", "kind"),
    [
        ("checked", IndexError("no such item"), "fuse exit 2"),
        ("checked", fuzz.HangError(), "fuse exit HangError"),
        ("in_order", RecursionError(), "fuse exit 2"),
    ],
)
def test_a_crash_and_a_hang_are_failures(monkeypatch, capsys, name: str, error: BaseException, kind: str) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(found, name, fail)
    monkeypatch.setattr(fuzz, "mutate", lambda model, _: (model.SerializeToString(), ["nothing: at all"]))
    summary = fuzz.fuzz(2, 0, [export("rec_ts14").path])
    assert len(summary.failures) == summary.cases == 2
    assert {failure.kind[: len(kind)] for failure in summary.failures} == {kind}
    assert {failure.source for failure in summary.failures} == {"rec_ts14"}


def test_a_file_that_does_not_come_back_is_a_failure(monkeypatch, tmp_path: Path) -> None:
    undoing = sys.modules["deltafuse.rollback"]
    monkeypatch.setattr(undoing, "_check", lambda *_: None)
    monkeypatch.setattr(undoing, "undo_edits", lambda body, record, out, progress: out.write(b"something else"))
    monkeypatch.setattr(fuzz, "mutate", lambda model, _: (model.SerializeToString(), ["nothing: at all"]))
    (failure,) = fuzz.fuzz(1, 0, [export("rec_ts14").path], tmp_path).failures
    assert failure.kind.startswith("rollback")
    assert (tmp_path / "0-0.onnx").exists()


def test_small_exports_of_both_folders_are_mutated() -> None:
    found = fuzz.models()
    assert {path.parent.name for path in found} == {"fixtures", "zoo"}
    assert all(path.stat().st_size <= fuzz.LARGEST for path in found)
    assert len(found) > 50
