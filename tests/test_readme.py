"""The README holds: its commands run, its options exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import export_unfused
from deltafuse import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
#: What makes an environment; the one that runs these tests is there already.
SETTING_UP = ("python3 -m venv", ". .venv/bin/activate", "pip install")


def steps(block: str) -> list[str]:
    """The commands of a block, but for those that make an environment."""
    commands = [command for line in block.splitlines() for command in line.split(" && ")]
    return [command for command in commands if not command.startswith(SETTING_UP)]


def test_there_are_the_blocks_that_are_tested() -> None:
    # The last two are run where what they export is looked at: tests/test_export_unfused.py.
    assert len(BLOCKS) == 6


def test_the_quick_start_and_what_follows_run(tmp_path: Path) -> None:
    quick, more, _, plans, *_ = BLOCKS
    commands = steps(quick) + steps(more) + steps(plans)
    assert len(quick.splitlines()) == 1
    assert [command.split()[0] for command in steps(quick)] == ["fuse"] * 4 + ["cmp"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "\n".join(["set -euo pipefail", *commands])
    run = ["bash", "-c", script]
    done = subprocess.run(
        run, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    demo = tmp_path / "demo"
    assert (demo / "prefill-back.onnx").read_bytes() == (demo / "prefill.onnx").read_bytes()
    assert (demo / "prefill-fused.onnx").read_bytes() != (demo / "prefill.onnx").read_bytes()
    assert list((demo / "sites").glob("*.onnx"))


def test_ci_calls_exactly_the_lines_for_development() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    development = BLOCKS[2].splitlines()
    assert len(development) == 2
    assert lines[-len(development) :] == development


def test_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`?(--[a-z][a-z0-9-]+)", README)) - {"--help"}))
def test_options_in_the_text_exist(option: str) -> None:
    parsers = [cli.plain_parser(), export_unfused.parser(), *(make() for make in cli.PARSERS.values())]
    known = {name for parser in parsers for name in re.findall(r"--[a-z][a-z0-9-]+", parser.format_help())}
    assert option in known


def test_every_command_is_in_the_text() -> None:
    for name in cli.PARSERS:
        assert f"`fuse {name}" in README


def test_exit_codes_are_those_of_the_help() -> None:
    table = re.findall(r"^\| (\d) \|", README, flags=re.MULTILINE)
    assert table == re.findall(r"^  (\d)  ", cli.EXITS, flags=re.MULTILINE) == list("012345")
