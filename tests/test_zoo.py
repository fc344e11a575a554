"""The project's own zoo: every spelling of the rule is fused as what it is, every near miss says what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import graphs
from deltafuse.rollback import rollback
from tolerances import assert_close
from zoo_report import COSINE, NRMSE, compare

ZOO = Path(__file__).parent / "zoo"
SCRIPT = Path(__file__).parents[1] / "scripts/make_zoo.py"
NAMES = sorted(path.stem for path in ZOO.glob("*.onnx"))

#: Reason of each member that is not fused.
REASONS = {
    "near_beta_erase": "beta-erase-only",
    "near_beta_missing": "beta-missing",
    "near_beta_twice": "beta-twice",
    "near_beta_value": "beta-value-only",
    "near_chunk_beta_erase": "beta-erase-only",
    "near_chunk_beta_value": "beta-value-only",
    "near_chunk_decay_sign": "decay-sign",
    "near_chunk_diagonal": "read-before-update",
    "near_chunk_diagonal_kept": "diagonal-kept",
    "near_chunk_last": "tokens-dropped",
    "near_chunk_no_delta": "no-delta-term",
    "near_chunk_short_doubling": "first-tokens-only",
    "near_chunk_short_rows": "inverse-short",
    "near_decay_after_read": "decay-after-read",
    "near_decay_after_update": "decay-after-update",
    "near_early_read": "read-before-update",
    "near_erase_channel": "erase-per-channel",
    "near_floored": "piecewise",
    "near_no_delta": "no-delta-term",
    "near_no_delta_no_beta": "no-delta-term",
    "near_own_read_key": "erase-per-channel",
    "near_rounded": "piecewise",
    "near_squashed": "activation-inside",
    "near_transposed": "transposed-state",
    "near_two_steps": "two-steps",
    "near_undecayed_read": "undecayed-read",
    "near_undecayed_update": "undecayed-update",
    "near_while_short": "trip-count",
    # What lies inside a body is seen and left alone.
    "nested_if": "inside-body",
    "nested_loop": "inside-body",
}


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def truth(name: str) -> dict:
    return json.loads((ZOO / f"{name}.json").read_text())


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path.with_suffix(".npz")) as stored:
        return {name: stored[name] for name in stored.files}


def results(path: Path) -> list[np.ndarray]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = arrays(path)
    return session.run(None, {i.name: given[i.name] for i in session.get_inputs()})


def make(*arguments: object) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_every_member_has_a_reason_or_is_fused() -> None:
    refused = {name: reason for name in NAMES if (reason := truth(name)["codes"][0])}
    assert refused == REASONS


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REASONS])
def test_a_spelling_is_fused_as_what_it_is(name: str, tmp_path: Path) -> None:
    source, fused, back = ZOO / f"{name}.onnx", tmp_path / "fused.onnx", tmp_path / "back.onnx"
    report = graphs.fuse(source, fused)
    assert (report.exit, graphs.codes(report)) == (truth(name)["exit"], truth(name)["codes"]) == (0, [""])
    rollback(fused, back)
    assert back.read_bytes() == source.read_bytes()
    # The comparison looks for the arrays beside the original.
    cosine, nrmse = compare(source, fused)
    assert cosine >= COSINE
    assert nrmse <= NRMSE


@pytest.mark.parametrize("name", REASONS)
def test_what_is_no_spelling_is_left_alone_with_its_reason(name: str, tmp_path: Path) -> None:
    report = graphs.fuse(ZOO / f"{name}.onnx", tmp_path / "fused.onnx")
    assert (report.exit, graphs.codes(report)) == (truth(name)["exit"], [REASONS[name]])
    assert {site.status for site in report.sites} == {"refused" if report.exit == 4 else "near-miss"}
    assert list(tmp_path.iterdir()) == []


def test_every_member_has_a_maker_and_every_maker_its_member() -> None:
    fixtures = {path.stem for path in (ZOO.parent / "fixtures").glob("*.onnx")}
    assert sorted(make("--list").split()) == sorted([*NAMES, *fixtures])


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    make("--out", folder, "--only", "chunk_blocks", "steps_gates")
    return folder


@pytest.mark.parametrize("name", ["chunk_blocks", "steps_gates"])
def test_a_member_can_be_remade(name: str, remade: Path) -> None:
    stored, again = ZOO / f"{name}.onnx", remade / f"{name}.onnx"
    assert onnx.load(again).graph.node == onnx.load(stored).graph.node
    for got, want in zip(results(again), results(stored), strict=True):
        assert_close(got, want, "float32")
    assert arrays(again).keys() == arrays(stored).keys()
    assert json.loads(again.with_suffix(".json").read_text()) == truth(name)
