"""A write that is killed, that finds no room, or that is not alone: the old file or the new one, never half of it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import killing
from deltafuse import copies
from deltafuse.errors import UserError
from deltafuse.files import atomic, check_output
from deltafuse.record import find, publish, sidecar_path
from deltafuse.rollback import rollback
from deltafuse.turns import turn, workspace
from deltafuse.wire import scan
from test_weights_outside import FILES, spread


def pair(folder: Path, size: int = 0) -> Path:
    """Two models that differ and share their weights, of some more bytes."""
    source = spread(folder / "in", "old.onnx")
    model = onnx.load(source, load_external_data=False)
    model.doc_string = "newer"
    (folder / "in" / "new.onnx").write_bytes(model.SerializeToString())
    with (folder / "in" / FILES[0]).open("ab") as file:
        file.write(os.urandom(size))
    return folder


def killed(folder: Path, how: str, task: str) -> list[str]:
    command = [sys.executable, killing.__file__, folder, how, task]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_killed_at_fifty_random_moments(tmp_path: Path) -> None:
    found = killed(pair(tmp_path, 2 << 20), "moments", "sidecar")
    assert len(found) == killing.MOMENTS == 50
    assert set(found) <= {"old", "new"}
    assert "old" in found


@pytest.mark.parametrize("task", ["embed", "sidecar", "rollback"])
def test_killed_before_each_call_to_the_file_system(tmp_path: Path, task: str) -> None:
    found = killed(pair(tmp_path), "calls", task)
    assert len(found) > 10
    assert (found[0], found[-1]) == ("old", "new")
    assert found == sorted(found, reverse=True)  # old up to one call, new from then on


_LIMITED = """
import resource, sys
from deltafuse import wire
from deltafuse.cli import main
from deltafuse import record
from pathlib import Path
from typing import Any
folder = Path(sys.argv[1])
model = wire.scan(folder / "in" / "new.onnx")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
from deltafuse.errors import UserError
try:
    record.publish(model, [], folder / "out" / "model.onnx")
except UserError as error:
    print(error.code, error)
"""


@pytest.mark.parametrize("limit", [4096, 200_000])
def test_no_room_is_told_and_nothing_is_left(tmp_path: Path, limit: int) -> None:
    """The kernel refuses to let a file grow: the weights with the first limit, the model with the second."""
    source = pair(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.onnx").write_bytes(b"old")
    if limit > 4096:
        for name in FILES:
            (tmp_path / "in" / name).write_bytes(b"small")
        assert (source / "in" / "new.onnx").stat().st_size > limit
    command = [sys.executable, "-c", _LIMITED, tmp_path, str(limit)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("disk-full no room for")
    assert "free some space" in run.stdout
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["model.onnx"]
    assert (tmp_path / "out" / "model.onnx").read_bytes() == b"old"


def test_a_full_disk_of_temporary_files_is_no_bug(fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("deltafuse.pipeline.find", full)
    source = pair(tmp_path) / "in" / "old.onnx"
    error = fuse(source, "-o", tmp_path / "fused.onnx", "--json").document["error"]
    assert error["code"] == "disk-full"
    assert "TMPDIR" in error["text"]


def test_a_broken_disk_is_told(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic(tmp_path / "out"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(UserError) as caught:
        fail()
    assert caught.value.code == "output-not-writable"
    assert list(tmp_path.iterdir()) == []


def test_where_files_must_have_a_name_nothing_is_left_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafuse.files._nameless", lambda _: None)
    source = pair(tmp_path) / "in" / "old.onnx"
    (tmp_path / "out").mkdir()
    publish(scan(source), [], tmp_path / "out" / "model.onnx")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {"model.onnx", *FILES}

    def shrink(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(copies, "_copy_range", shrink)
    (tmp_path / "again").mkdir()
    with pytest.raises(UserError) as caught:
        publish(scan(source), [], tmp_path / "again" / "model.onnx", how="copy")
    assert caught.value.code == "disk-full"
    assert list((tmp_path / "again").iterdir()) == []


_TOGETHER = """
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from deltafuse import record, wire
folder, name = Path(sys.argv[1]), sys.argv[2]
model = wire.scan(folder / "in" / f"{name}.onnx")
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    record.publish(model, [], folder / "out" / "model.onnx", "sidecar", how="copy")
"""


def test_two_runs_at_once_on_one_output(tmp_path: Path) -> None:
    pair(tmp_path)
    output = tmp_path / "out" / "model.onnx"
    output.parent.mkdir()
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _TOGETHER, tmp_path, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("old", "new")
    ]
    with runs[0], runs[1]:
        for run in runs:
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
        for run in runs:
            assert run.stdin is not None
            run.stdin.write("\n")
            run.stdin.flush()
    assert [run.returncode for run in runs] == [0, 0]
    assert not find(scan(output)).edited
    rollback(output, tmp_path / "out" / "back.onnx")
    sources = [(tmp_path / "in" / f"{name}.onnx").read_bytes() for name in ("old", "new")]
    assert (tmp_path / "out" / "back.onnx").read_bytes() in sources
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"model.onnx", sidecar_path(output).name, "back.onnx", "sub", FILES[0]}


def test_an_output_that_another_run_takes_away_meanwhile_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pair(tmp_path) / "in" / "old.onnx"
    output = tmp_path / "model.onnx"
    output.touch()
    lstat, samefile = Path.lstat, Path.samefile

    def gone(ask: Callable[..., Any]) -> Callable[..., Any]:
        def late(path: Path, *rest: Any) -> Any:
            path.unlink(missing_ok=True)
            return ask(path, *rest)

        return late

    monkeypatch.setattr(Path, "samefile", gone(samefile))
    check_output(output, [source])
    output.touch()
    monkeypatch.setattr(Path, "lstat", gone(lstat))
    check_output(output)
    assert not output.exists()


def test_one_writer_waits_for_the_other(tmp_path: Path) -> None:
    code = "import sys, pathlib, deltafuse.turns as t\nwith t.turn(pathlib.Path(sys.argv[1])): print(1)"
    with turn(tmp_path):
        other = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(1.5)
    assert other.communicate(timeout=30)[0] == "1\n"


def test_what_a_killed_run_left_is_cleared_away_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    (tmp_path / ".deltafuse-model-abc").mkdir()
    (tmp_path / ".deltafuse-model-abc" / "half").write_bytes(b"half")
    (tmp_path / ".deltafuse-other-abc").mkdir()
    with workspace(tmp_path, "model") as first:
        assert {path.name for path in tmp_path.iterdir()} == {first.name, ".deltafuse-other-abc"}
        with workspace(tmp_path, "model") as second:
            assert first.exists()
            assert second != first
    assert [path.name for path in tmp_path.iterdir()] == [".deltafuse-other-abc"]


def test_a_workspace_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, workspace(tmp_path / "absent", "model"):
        pass
    assert caught.value.code == "output-not-writable"
