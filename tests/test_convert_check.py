"""scripts/convert_check.sh: what it runs, what it keeps, and how it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from doc_blocks import ROOT, blocks

SCRIPT = ROOT / "scripts/convert_check.sh"
FAILING = 'echo "[ERROR] For custom, attr of type must be not empty, please set it!"; echo "Convert failed. Ret: -1"'


def converter(folder: Path, body: str) -> None:
    """A program in the place of MindSpore Lite's, which is not to be had here: it says what that one would."""
    path = folder / "converter_lite"
    path.write_text(f'#!/usr/bin/env bash\necho "$0 $*" > {folder}/called\n{body}\n')
    path.chmod(0o755)


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder), "/usr/bin", "/bin"))
    environment = {name: text for name, text in os.environ.items() if name != "CONVERTER_LITE"} | {"PATH": path}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "qwen-fused/prefill/model.onnx"
    path.parent.mkdir(parents=True)
    path.touch()
    return str(path.relative_to(tmp_path))


def test_what_is_run_is_what_the_page_shows(model: str, tmp_path: Path) -> None:
    converter(tmp_path, "echo CONVERT RESULT SUCCESS:0")
    done = check(tmp_path, model, "mindir/prefill")
    assert (done.returncode, done.stdout) == (0, "converted: mindir/prefill\n")
    (shown,) = [block.text for block in blocks("docs/ascend.md") if block.title == "what is run"]
    assert (tmp_path / "called").read_text() == shown.replace("converter_lite", f"{tmp_path}/converter_lite", 1)
    assert "CONVERT RESULT SUCCESS:0" in (tmp_path / "mindir/prefill/convert.log").read_text()


def test_further_options_go_to_the_converter(model: str, tmp_path: Path) -> None:
    converter(tmp_path, "echo CONVERT RESULT SUCCESS:0")
    assert check(tmp_path, model, "out", "--configFile=dims.ini").returncode == 0
    assert (tmp_path / "called").read_text().endswith(" --configFile=dims.ini\n")


@pytest.mark.parametrize("body", [f"{FAILING}; exit 1", FAILING, f"{FAILING}; kill -SEGV $$"])
def test_a_failure_is_shown_and_kept(body: str, model: str, tmp_path: Path) -> None:
    converter(tmp_path, body)
    done = check(tmp_path, model, "out")
    assert done.returncode == 4
    assert "attr of type must be not empty" in done.stderr
    assert "Convert failed. Ret: -1" in (tmp_path / "out/convert.log").read_text()


def test_without_a_converter_nothing_is_run_and_that_is_said(model: str, tmp_path: Path) -> None:
    done = check(tmp_path, model, "out")
    assert (done.returncode, done.stdout) == (3, "")
    assert "there is no converter_lite" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [(), ("model.onnx",), ("nowhere.onnx", "out")])
def test_a_wrong_call_says_so(arguments: tuple[str, ...], tmp_path: Path) -> None:
    converter(tmp_path, "echo CONVERT RESULT SUCCESS:0")
    done = check(tmp_path, *arguments)
    assert done.returncode == 1
    assert ("usage" if len(arguments) < 2 else "does not exist") in done.stderr
