"""The README holds: its commands run, its options exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import deltafuse
import export_unfused
from deltafuse import cli
from doc_blocks import ROOT, blocks, run, steps
from exports import export

README = (ROOT / "README.md").read_text()
BLOCKS = [block.text for block in blocks("README.md", "bash")]


def test_there_are_the_blocks_that_are_tested() -> None:
    assert len(BLOCKS) == 5


def test_the_quick_start_and_what_follows_run(tmp_path: Path) -> None:
    quick, more, plans, _, _ = BLOCKS
    commands = steps(quick) + steps(more) + steps(plans)
    assert len(quick.splitlines()) == 1
    assert [command.split()[0] for command in steps(quick)] == ["fuse"] * 4 + ["cmp"]
    done = run(commands, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    demo = tmp_path / "demo"
    assert (demo / "prefill-back.onnx").read_bytes() == (demo / "prefill.onnx").read_bytes()
    assert (demo / "prefill-fused.onnx").read_bytes() != (demo / "prefill.onnx").read_bytes()
    assert list((demo / "sites").glob("*.onnx"))


def test_who_uses_it_reads_of_commands_before_the_work_on_it() -> None:
    headings = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
    assert headings.index("Quick start") + 1 == headings.index("Commands") < headings.index("Work on deltafuse")
    assert README.index('pip install -e ".[dev,docs]"') > README.index("## Work on deltafuse")


def test_ci_calls_exactly_the_lines_for_development() -> None:
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    blocks_of = dict(zip(("newest", "oldest"), (block.splitlines() for block in BLOCKS[3:5]), strict=True))
    assert sum(line.startswith("python3 -m venv") for line in lines) == 2
    for name, block in blocks_of.items():
        made = lines.index(f'python3 -m venv "$folder/{name}"')
        assert lines[made + 2] == f'. "$folder/{name}/bin/activate"'
        assert len(block) == 2
        assert lines[made + 3 : made + 5] == block
    # A call of its own is what `set -e` looks at, the failure of all but the last of the lines it joins is not.
    assert "newest" in lines
    for program in ("pip ", "ruff ", "python -m pytest"):
        assert sum(line.startswith(program) for line in lines) == sum(
            line.startswith(program) for block in blocks_of.values() for line in block
        )


def test_the_oldest_releases_are_those_that_are_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    pinned = re.findall(r"^([a-z-]+)==([0-9.]+)$", (ROOT / "constraints-oldest.txt").read_text(), flags=re.MULTILINE)
    bounds = dict(re.findall(r'"([a-z-]+)>=([0-9.]+)"', declared))
    exact = {"numpy": "1.26.4", "onnx": "1.19.1", "onnxruntime": "1.24.2"}
    assert exact.items() <= dict(pinned).items()
    for name, version in pinned:
        # A bound names as much of a version as matters; onnxruntime's is the last for Python 3.10.
        assert version.startswith(bounds[name]) or name == "onnxruntime"
        assert [int(part) for part in version.split(".")] >= [int(part) for part in bounds[name].split(".")]


def test_what_runs_with_the_oldest_releases_is_there_and_needs_no_torch() -> None:
    files = [ROOT / line for line in (ROOT / "tests/oldest.txt").read_text().splitlines()]
    assert files == sorted(set(files))
    for path in files:
        assert "torch" not in re.findall(r"^(?:import|from) (\w+)", path.read_text(), flags=re.MULTILINE)


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


def test_the_speed_at_512_tokens_is_that_of_the_table() -> None:
    _, _, _, layer, _, _, rule, _ = re.findall(r"^\| 512 (\|.*)$", README, flags=re.MULTILINE)[0].split("|")
    told = " ".join((ROOT / "docs/performance.md").read_text().split())
    assert f"the rule alone ran {rule.strip()} times as fast" in told
    assert f"which is mostly projections that stay, {layer.strip()} times" in told


def test_an_output_that_is_there_is_replaced(tmp_path: Path) -> None:
    model, fused, back = (tmp_path / f"{name}.onnx" for name in ("model", "fused", "back"))
    model.write_bytes(export("rec_ts17_nonorm").path.read_bytes())
    for path in (fused, back):
        path.write_bytes(b"old")
    assert deltafuse.fuse(model, fused).exit == 0
    deltafuse.rollback(fused, back)
    assert back.read_bytes() == model.read_bytes()
    assert fused.read_bytes() != b"old"
    assert "a file of that name, of `fuse` and of\n`rollback` alike, is replaced" in README


def test_exit_codes_are_those_of_the_help() -> None:
    table = re.findall(r"^\| (\d) \|", README, flags=re.MULTILINE)
    assert table == re.findall(r"^  (\d)  ", cli.EXITS, flags=re.MULTILINE) == list("012345")
    (nothing,) = re.findall(r"^\| 3 \| (.*) \|$", README, flags=re.MULTILINE)
    assert f"  3  {nothing}  4  " in " ".join(cli.EXITS.split()).replace(" 3 ", "  3  ").replace(" 4 ", "  4  ")
