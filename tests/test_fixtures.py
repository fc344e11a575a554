"""The fixtures are what their maker makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from exports import FOLDER, Export, export, exports
from tolerances import assert_close

SCRIPT = Path(__file__).parents[1] / "scripts/make_zoo.py"
DEMO = Path(__file__).parents[1] / "src/deltafuse/demo_models"


def make(*arguments: object) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_every_fixture_has_a_maker() -> None:
    names = make("--list").split()
    stored = sorted(path.stem for path in FOLDER.glob("*.onnx"))
    assert sorted(set(names) & set(stored)) == stored == [one.name for one in exports()]


def test_one_can_be_remade(tmp_path: Path) -> None:
    make("--only", "rec_ts14", "--out", tmp_path)
    stored = export("rec_ts14")
    assert onnx.load(tmp_path / "rec_ts14.onnx") == onnx.load(stored.path)
    with np.load(tmp_path / "rec_ts14.npz") as arrays:
        assert {name for name in arrays.files if not name.startswith("out")} == set(stored.inputs)
        assert all(np.array_equal(arrays[name], array) for name, array in stored.inputs.items())
        assert_close(arrays["out0"], stored.expected[0], "float32")


@pytest.mark.parametrize("one", exports(), ids=lambda one: one.name)
def test_onnxruntime_meets_what_torch_gave(one: Export) -> None:
    session = ort.InferenceSession(str(one.path), providers=["CPUExecutionProvider"])
    results = session.run(None, one.inputs)
    assert [output.name for output in session.get_outputs()] == one.truth["outputs"]
    for got, want in zip(results, one.expected, strict=True):
        assert_close(got, want, one.truth["dtype"])


@pytest.mark.parametrize(("demo", "fixture"), [("prefill", "full_prefill_ts17"), ("decode", "full_decode_ts17")])
def test_the_demo_ships_two_of_them(demo: str, fixture: str) -> None:
    for suffix in (".onnx", ".npz"):
        assert (DEMO / f"{demo}{suffix}").read_bytes() == (FOLDER / f"{fixture}{suffix}").read_bytes()
