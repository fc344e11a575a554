"""The script that measures fused against unfused graphs, on tiny ones."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import bench_ort

SCRIPT = Path(bench_ort.__file__)
TINY = {
    "hidden": 32, "vocab": 64, "key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16, "heads": 2,
    "kv_heads": 1, "head_dim": 32, "intermediate": 48,
}  # fmt: skip


def command(keep: Path, *arguments: str) -> list[str]:
    return [str(SCRIPT), "--dims", json.dumps(TINY), "--keep", str(keep), *arguments]


@pytest.fixture
def exported_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script's children do that need torch is done in this process, which has it already."""
    start = subprocess.run

    def run(asked: list[str], **options: object) -> object:
        if asked[:4] != [sys.executable, "-W", "ignore", "-c"]:
            return start(asked, **options)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(sys, "argv", ["-c", *asked[5:]])
            patch.chdir(str(options["cwd"]))
            exec(asked[4], {})
        return subprocess.CompletedProcess(asked, 0)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.mark.usefixtures("exported_here")
def test_a_step_and_a_prefill_beyond_one_chunk_are_measured(
    keep: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--parts", "layer", "--tokens", "1", "10", "--chunk", "8", "--layers", "3")
    measured = ("--runs", "2", "--threads", "1", "--load-runs", "1", "--json")
    monkeypatch.setattr(sys, "argv", command(keep, *sizes, *measured))
    assert bench_ort.main() == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["threads"], result["runs"], result["faults"]) == (1, 2, [])
    assert [(row["part"], row["tokens"]) for row in result["rows"]] == [("layer", 1), ("layer", 10)]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["unfused_ms"] / row["fused_ms"], rel=0.02, abs=0.01)
        assert 0 < row["fused_error"] < 1e-4
        assert 0 < row["unfused_error"] < 1e-4
    assert result["load"]["layers"] == 3
    assert result["load"]["unfused_seconds"] > result["load"]["fused_seconds"] > 0


def test_what_is_kept_is_not_made_again_and_a_wrong_one_is_told(keep: Path) -> None:
    folder = keep / "layer-1"
    made = (folder / "model.onnx").stat().st_mtime_ns
    arrays = dict(np.load(folder / "model.npz"))
    np.savez(folder / "model.npz", **arrays | {"out_out": arrays["out_out"] + 1})
    asked = command(keep, "--parts", "layer", "--tokens", "1", "--runs", "1", "--layers", "0")
    done = subprocess.run([sys.executable, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert (folder / "model.onnx").stat().st_mtime_ns == made
    lines = done.stdout.splitlines()
    assert "2 threads, median of 1 runs" in lines[0]
    assert lines[2].split()[:2] == ["layer", "1"]
    assert lines[3].startswith("layer at 1 tokens: unfused is ")


def test_where_fused_is_slower_is_said() -> None:
    row = {"part": "rule", "tokens": 1, "unfused_ms": 1.0, "fused_ms": 2.0, "ratio": 0.5}
    faster = row | {"tokens": 32, "unfused_ms": 4.0, "ratio": 2.0}
    about = {"onnxruntime": "1", "threads": 2, "runs": 3, "rows": [row, faster], "faults": []}
    _, _, slow, quick = bench_ort.lines_of(about)
    assert slow.endswith("fused is slower")
    assert not quick.endswith("fused is slower")
