"""Shell completion: what is offered, and the protocol of bash from its script to its answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Outcome
from deltafuse import targets
from deltafuse.completion import FILES, answer, candidates
from deltafuse.completion_scripts import COMPLETE, SHELLS, install, script
from deltafuse.errors import UserError
from deltafuse.parsers import PARSERS, plain_parser
from deltafuse.parsers_types import TARGETS
from deltafuse.patterns import loaded

Fuse = Callable[..., Outcome]


def test_commands_and_models_come_first() -> None:
    assert candidates([], "") == [*PARSERS, FILES]
    assert candidates([], "ro") == ["rollback", FILES]
    assert candidates([], "mo") == [FILES]


def test_options_of_the_plain_form_complete_without_a_command() -> None:
    options = {name for action in plain_parser()._actions for name in action.option_strings}
    assert set(candidates([], "-")) == options
    assert candidates(["model.onnx"], "--skip") == ["--skip-sites"]
    assert candidates(["model.onnx", "-o", "out.onnx"], "--dry") == ["--dry-run"]
    assert candidates(["model.onnx"], "") == [FILES]


@pytest.mark.parametrize("command", PARSERS)
def test_options_of_a_command_complete(command: str) -> None:
    options = {name for action in PARSERS[command]()._actions for name in action.option_strings}
    assert set(candidates([command], "-")) == options
    assert "--json" in options


@pytest.mark.parametrize(
    ("before", "typed", "offered"),
    [
        (["m.onnx", "--op"], "", ["cgdr", "rgdr"]),
        (["m.onnx", "--form"], "c", ["chunk"]),
        (["m.onnx", "--target"], "asc", ["ascend-310p", "ascend-a2", FILES]),
        (["m.onnx", "--target", "="], "o", ["onnx", "ort", FILES]),
        (["m.onnx", "--target"], "=", ["ascend-310p", "ascend-a2", "onnx", "ort", FILES]),
        (["m.onnx"], "--target=o", ["--target=onnx", "--target=ort", FILES]),
        (["m.onnx", "--rules"], "ga", ["gated_delta_rule"]),
        (["m.onnx", "--rules", "causal_conv"], "del", ["delta_rule"]),
        (["m.onnx", "--rules", "causal_conv"], "--ke", ["--keep-going"]),
        (["inspect", "m.onnx", "--extract"], "", [FILES]),
        (["inspect", "m.onnx", "--op"], "", ["cgdr", "rgdr"]),
        (["verify", "--prefill", "u.onnx"], "", [FILES]),
        (["verify", "--level"], "n", ["network"]),
        (["lower", "--rounding"], "", ["on", "off"]),
        (["m.onnx", "--batch"], "", []),
        (["--show-completion"], "z", ["zsh"]),
        (["targets"], "", ["ascend-310p", "ascend-a2", "onnx", "ort", FILES]),
        (["targets"], "or", ["ort", FILES]),
        (["explain"], "pair-n", ["pair-none"]),
        (["explain", "pair-none"], "not-the-", ["not-the-rule"]),
    ],
)
def test_values_of_options_complete(before: list[str], typed: str, offered: list[str]) -> None:
    assert candidates(before, typed) == offered


def test_the_names_that_are_offered_are_those_there_are() -> None:
    assert targets.names() == TARGETS
    assert candidates(["m.onnx", "--rules"], "") == sorted(entry.name for entry in loaded())


def test_an_answer_is_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer({"COMP_WORDS": "fuse\nverify\n--roll", "COMP_CWORD": "2"}) == 0
    assert capsys.readouterr().out == "--rollout\n"
    # An environment that is not as it should be is no reason for a traceback at the prompt.
    assert answer({}) == 0


@pytest.fixture
def bash(tmp_path: Path) -> Callable[[list[str]], list[str]]:
    """What bash offers after its script was read, by its own protocol; `fuse` is on the path."""
    (tmp_path / "fuse").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m deltafuse \"$@\"\n")
    (tmp_path / "fuse").chmod(0o755)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my model.onnx").touch()
    (tmp_path / "script.sh").write_text(script("bash"))

    def offered(words: list[str]) -> list[str]:
        code = (
            'source script.sh; COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); '
            '_fuse_completion fuse; printf "%s\\n" "${COMPREPLY[@]}"; complete -p fuse'
        )
        environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", code, "bash", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        *lines, registered = done.stdout.splitlines()
        assert (registered, done.stderr) == ("complete -F _fuse_completion fuse", "")
        return lines

    return offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["fuse", "insp"], ["inspect"]),
        (["fuse", "models/my"], ["models/my model.onnx"]),
        (["fuse", "models/my model.onnx", "--keep"], ["--keep-going"]),
        (["fuse", "m.onnx", "--target", "=", "or"], ["ort"]),
        (["fuse", "m.onnx", "--form", ""], ["chunk", "recurrent"]),
        (["fuse", "verify", "--level", "s"], ["site"]),
    ],
)
def test_bash_completes(bash: Callable[[list[str]], list[str]], words: list[str], offered: list[str]) -> None:
    assert bash(words) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_that_asks_fuse(fuse: Fuse, shell: str) -> None:
    done = fuse("--show-completion", shell)
    assert (done.exit, done.out) == (0, script(shell))
    for word in (COMPLETE, "COMP_WORDS", "COMP_CWORD", FILES):
        assert word in done.out


@pytest.mark.parametrize("shell", SHELLS)
def test_installing_twice_is_installing_once(tmp_path: Path, shell: str) -> None:
    files = install(shell, tmp_path)
    before = {path: path.read_text() for path in files}
    assert install(shell, tmp_path) == files
    assert {path: path.read_text() for path in files} == before
    assert files[0].read_text() == script(shell)


def test_what_a_startup_file_held_stays(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'")
    path, startup = install("bash", tmp_path)
    assert startup.read_text().splitlines() == ["alias ll='ls -l'", f"source '{path}'"]


def test_the_shell_that_runs_is_the_default(fuse: Fuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert fuse("--show-completion").out == script("fish")
    done = fuse("--install-completion", "--json")
    assert done.document["written"] == [f"{tmp_path}/.config/fish/completions/fuse.fish"]
    monkeypatch.setenv("SHELL", "/bin/ksh")
    assert fuse("--show-completion", "--json").document["error"]["code"] == "shell"
    monkeypatch.delenv("SHELL")
    with pytest.raises(UserError, match="--show-completion bash"):
        script()


def test_completing_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom deltafuse.completion import candidates\ncandidates(['m', '--target'], '')\n"
        "candidates(['m', '--rules'], '')\n"
        "print([name for name in ('numpy', 'onnx', 'onnxruntime', 'rich') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
