"""The command: every exit code, every error a user can make, one JSON document for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from conftest import Outcome
from deltafuse import pipeline
from deltafuse.cli import REPORT_TO, main
from deltafuse.errors import InternalError
from deltafuse.options import FuseOptions
from deltafuse.parsers import PARSERS, plain_parser
from exports import export

Fuse = Callable[..., Outcome]
DECODE, STEPS, FOUR = (export(name).path for name in ("full_decode_ts17", "steps_ts17", "rec_ts17_B4"))


def with_external_data(folder: Path) -> Path:
    """The decode model with its weights in a file beside it."""
    path = folder / "model.onnx"
    onnx.save(onnx.load(DECODE), path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    return path


def test_exit_0_writes_one_node_per_site(fuse: Fuse, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    done = fuse(DECODE, "-o", output)
    assert (done.exit, done.err) == (0, "")
    assert sum(node.op_type == "Custom" for node in onnx.load(output).graph.node) == 3
    assert done.out.splitlines()[-1].startswith("3 fused; ")


def test_json_is_one_document_and_nothing_else(fuse: Fuse, tmp_path: Path) -> None:
    done = fuse(DECODE, "-o", tmp_path / "out.onnx", "--json")
    assert (done.exit, done.err) == (0, "")
    assert done.document["exit"] == 0
    assert done.document["output"] == str(tmp_path / "out.onnx")
    assert [site["status"] for site in done.document["sites"]] == ["fused"] * 3


def test_inspect_writes_nothing_and_calls_sites_matches(fuse: Fuse, tmp_path: Path) -> None:
    done = fuse("inspect", DECODE, "--json")
    assert done.exit == 0
    assert [site["status"] for site in done.document["sites"]] == ["match"] * 3
    assert done.document["output"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(fuse: Fuse, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    done = fuse(STEPS, "-o", output, "--dry-run", "--json")
    assert done.exit == 0
    assert done.document["output"] is None
    assert done.document["sites"][0]["status"] == "fused"
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "MODEL"),
        ([STEPS], "-o OUT"),
        ([STEPS, "-o", "out.onnx", "--no-such-option"], "--no-such-option"),
        ([STEPS, "-o", "out.onnx", "--pin", "seq_len"], "SYMBOL=N"),
        ([STEPS, "-o", "out.onnx", "--pin", "seq_len=0"], "SYMBOL=N"),
        ([STEPS, "-o", "out.onnx", "--timeout", "-1"], "positive number of seconds"),
        ([STEPS, "-o", "out.onnx", "--op", "mlp"], "cgdr"),
        (["inspect"], "fuse inspect --help"),
        (["rollback", STEPS], "--output"),
    ],
)
def test_usage_errors_are_exit_1(fuse: Fuse, arguments: list[object], says: str) -> None:
    done = fuse(*arguments)
    assert (done.exit, done.out) == (1, "")
    assert says in done.err
    assert "Traceback" not in done.err
    document = fuse(*arguments, "--json").document
    assert (document["exit"], document["error"]["code"]) == (1, "usage")


def broken(folder: Path, content: bytes) -> Path:
    path = folder / "broken.onnx"
    path.write_bytes(content)
    return path


def user_error(fuse: Fuse, code: str, *arguments: object) -> str:
    """Asserts exit 1 with this code, the same without and with JSON; gives the message."""
    plain = fuse(*arguments)
    assert (plain.exit, plain.out) == (1, "")
    assert "Traceback" not in plain.err
    document = fuse(*arguments, "--json").document
    assert (document["exit"], document["error"]["code"]) == (1, code)
    assert plain.err == f"fuse: {document['error']['text']}\n"
    return document["error"]["text"]


def test_a_file_that_is_no_model(fuse: Fuse, tmp_path: Path) -> None:
    path = broken(tmp_path, b"this is a letter, not a model\n" * 20)
    assert str(path) in user_error(fuse, "not-onnx", path, "-o", tmp_path / "out.onnx")


def test_a_truncated_file(fuse: Fuse, tmp_path: Path) -> None:
    content = DECODE.read_bytes()
    path = broken(tmp_path, content[: len(content) // 2])
    assert str(path) in user_error(fuse, "truncated", path, "-o", tmp_path / "out.onnx")


def test_a_missing_file(fuse: Fuse, tmp_path: Path) -> None:
    path = tmp_path / "nowhere.onnx"
    assert user_error(fuse, "missing-file", path, "-o", tmp_path / "out.onnx").endswith("check the path")
    near = broken(tmp_path, DECODE.read_bytes()).rename(tmp_path / "nowhere2.onnx")
    told = user_error(fuse, "missing-file", path, "-o", tmp_path / "out.onnx")
    assert told.endswith(f"{path} does not exist: check the path; did you mean {near}?")


def test_output_equal_to_input(fuse: Fuse, tmp_path: Path) -> None:
    path = broken(tmp_path, STEPS.read_bytes())
    link = tmp_path / "link.onnx"
    link.symlink_to(path)
    for output in (path, link):
        user_error(fuse, "output-is-input", path, "-o", output)
    assert path.read_bytes() == STEPS.read_bytes()


def test_a_folder_that_is_not_there_or_not_writable(fuse: Fuse, tmp_path: Path) -> None:
    user_error(fuse, "output-folder-missing", STEPS, "-o", tmp_path / "no" / "out.onnx")
    user_error(fuse, "output-is-folder", STEPS, "-o", tmp_path)
    # A link or a pipe would be replaced by a file.
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path / "link", tmp_path / "pipe", "/dev/null"):
        assert "--dry-run" in user_error(fuse, "output-not-a-file", STEPS, "-o", output)
    # Even root cannot make files there.
    user_error(fuse, "output-not-writable", STEPS, "-o", "/proc/out.onnx")


def test_an_unknown_target_is_told_the_known_ones(fuse: Fuse, tmp_path: Path) -> None:
    text = user_error(fuse, "unknown-target", STEPS, "-o", tmp_path / "out.onnx", "--target", "abacus")
    assert "ascend-310p" in text


def test_an_unknown_rule_and_a_missing_pattern_folder(fuse: Fuse, tmp_path: Path) -> None:
    assert "gated_delta_rule" in user_error(fuse, "unknown-rule", "inspect", STEPS, "--rules", "abacus")
    user_error(fuse, "no-such-folder", "inspect", STEPS, "--patterns", tmp_path / "no")


def test_a_pattern_file_that_defines_none(fuse: Fuse, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "empty.py" in user_error(fuse, "bad-pattern", "patterns", "--patterns", tmp_path)


def test_missing_external_data_is_a_note_where_no_weight_is_read(fuse: Fuse, tmp_path: Path) -> None:
    path = with_external_data(tmp_path)
    (tmp_path / "weights.bin").unlink()
    for arguments in (("inspect", path), (path, "-o", tmp_path / "out.onnx")):
        done = fuse(*arguments, "--json")
        assert done.exit == 0
        assert any("weights.bin" in note for note in done.document["notes"])


def test_missing_external_data_is_an_error_where_it_must_be_copied(fuse: Fuse, tmp_path: Path) -> None:
    path = with_external_data(tmp_path)
    (tmp_path / "weights.bin").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "weights.bin" in user_error(fuse, "external-data-missing", path, "-o", elsewhere / "out.onnx")
    assert list(elsewhere.iterdir()) == []


def test_external_data_is_copied_to_another_folder_and_stays_in_the_same(fuse: Fuse, tmp_path: Path) -> None:
    path = with_external_data(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert fuse(path, "-o", elsewhere / "out.onnx").exit == 0
    copied = elsewhere / "weights.bin"
    assert copied.read_bytes() == (tmp_path / "weights.bin").read_bytes()
    assert (copied.stat().st_nlink, copied.is_symlink()) == (1, False)


@pytest.mark.parametrize("error", [InternalError("emitted nodes differ"), ValueError("no such axis")])
def test_exit_2_has_a_traceback_and_says_where_to_report(
    fuse: Fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    error.add_note("at layers.3, nodes 12 to 40") if sys.version_info >= (3, 11) else None

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "fuse", fail)
    done = fuse(STEPS, "-o", tmp_path / "out.onnx", "--json")
    assert done.exit == 2
    assert (done.document["exit"], done.document["error"]["code"]) == (2, "internal")
    assert str(error) in done.document["error"]["text"]
    assert "Traceback" in done.err
    assert REPORT_TO in done.err
    plain = fuse(STEPS, "-o", tmp_path / "out.onnx")
    assert (plain.exit, plain.out) == (2, "")
    assert "Traceback" in plain.err


@pytest.mark.parametrize("name", ["nm_softmax", "nm_stale_read", "nm_decay_sign", "nm_state_clamp", "nm_decay_floor"])
def test_exit_3_where_nothing_is_the_rule(fuse: Fuse, tmp_path: Path, name: str) -> None:
    output = tmp_path / "out.onnx"
    done = fuse(export(name).path, "-o", output, "--json")
    assert done.exit == done.document["exit"] == 3
    assert done.document["error"] is None
    assert "fused" not in {site["status"] for site in done.document["sites"]}
    assert not output.exists()
    assert fuse(export(name).path, "-o", output).out.splitlines()[-1].endswith("s)")


def test_exit_3_where_the_model_is_fused_already(fuse: Fuse, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    assert fuse(STEPS, "-o", output).exit == 0
    again = fuse(output, "-o", tmp_path / "again.onnx", "--json")
    assert again.exit == 3
    assert any("already-fused" in note for note in again.document["notes"])
    assert not (tmp_path / "again.onnx").exists()


def test_exit_4_where_the_batch_is_four(fuse: Fuse, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    done = fuse(FOUR, "-o", output, "--json")
    assert done.exit == 4
    assert done.document["sites"][0]["reason"]["code"] == "static-batch"
    assert done.document["output"] is None
    assert not output.exists()
    plain = fuse(FOUR, "-o", output)
    assert plain.exit == 4
    reason = done.document["sites"][0]["reason"]
    assert f"({reason['code']}): {reason['text'].removesuffix('; ' + reason['fix'])}\n" in plain.out
    assert f"  fix: {reason['fix']}\n" in plain.out


@pytest.mark.parametrize("name", ["leak_ts17"])
def test_exit_4_where_an_inner_value_is_a_graph_output_too(fuse: Fuse, tmp_path: Path, name: str) -> None:
    done = fuse(export(name).path, "-o", tmp_path / "out.onnx", "--json")
    assert done.exit == 4
    assert done.document["sites"][0]["reason"]["code"] == "inner-value-used"
    assert list(tmp_path.iterdir()) == []


def test_strict_turns_a_note_into_exit_4(fuse: Fuse, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    done = fuse(DECODE, "-o", output, "--strict", "--json")
    assert done.exit == 4
    assert any(site["notes"] for site in done.document["sites"])
    assert not output.exists()


def test_exit_5_where_a_fused_site_differs(fuse: Fuse, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    assert fuse(DECODE, "-o", output).exit == 0
    assert fuse("verify", DECODE, output).exit == 0
    model = onnx.load(output)
    node = next(node for node in model.graph.node if node.op_type == "Custom")
    scale = next(attribute for attribute in node.attribute if attribute.name == "scale_value")
    scale.f *= 1.01
    onnx.save(model, output)
    done = fuse("verify", DECODE, output, "--json")
    assert done.exit == done.document["exit"] == 5
    assert [site["verdict"] for site in done.document["sites"]] == ["differs", "equal", "equal"]


def test_rollback_gives_the_bytes_back(fuse: Fuse, tmp_path: Path) -> None:
    output, back = tmp_path / "out.onnx", tmp_path / "back.onnx"
    assert fuse(DECODE, "-o", output).exit == 0
    done = fuse("rollback", output, "-o", back, "--json")
    assert (done.exit, done.document["mode"], done.document["remaining"]) == (0, "bytes", [])
    assert back.read_bytes() == DECODE.read_bytes()
    assert "byte for byte" in fuse("rollback", output, "-o", tmp_path / "more.onnx").out


def test_rollback_of_some_sites(fuse: Fuse, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    assert fuse(DECODE, "-o", output).exit == 0
    done = fuse("rollback", output, "-o", tmp_path / "back.onnx", "--sites", "layers.1", "--json")
    assert done.document["restored"] == ["layers.1"]
    assert done.document["remaining"] == ["layers.0", "layers.2"]
    said = fuse("rollback", output, "-o", tmp_path / "b", "--sites", "layers.1").out
    assert "still fused: layers.0, layers.2" in said
    assert "the file as it was" not in said
    assert "the file as it was" in fuse("rollback", output, "-o", tmp_path / "c").out


def test_a_missing_record_names_the_sidecar_option(fuse: Fuse, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    assert fuse(STEPS, "-o", output, "--record", "none").exit == 0
    said = user_error(fuse, "no-record", "rollback", output, "-o", tmp_path / "back.onnx")
    assert "though it holds fused nodes: give its record with --sidecar FILE (out.onnx.rollback)" in said


def test_what_was_never_fused_has_nothing_to_roll_back(fuse: Fuse, tmp_path: Path) -> None:
    said = user_error(fuse, "no-record", "rollback", STEPS, "-o", tmp_path / "back.onnx")
    assert f"{STEPS} holds no rollback record and no fused node: it is not what fuse wrote" in said
    assert "there is nothing to roll back; give the file that `fuse MODEL -o OUT` wrote" in said
    assert "sidecar" not in said


def test_sites_are_chosen_by_name(fuse: Fuse, tmp_path: Path) -> None:
    chosen = ("--sites", "layers.[01]", "--skip-sites", "layers.0")
    done = fuse(DECODE, "-o", tmp_path / "out.onnx", *chosen, "--json")
    assert done.exit == 0
    assert [site["status"] for site in done.document["sites"]] == ["match", "fused", "match"]
    assert done.document["sites"][0]["reason"]["code"] == "left-out"


def test_repeated_options_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FuseOptions] = []

    def take(options: FuseOptions, *_: object) -> None:
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "fuse", take)
    sites = ["--sites", "a*", "--site", "b"]
    more = ["--pin", "seq_len=8", "--pin", "a=b=2", "--no-pin", "--op", "cgdr", "--timeout", "2.5"]
    assert main(["m.onnx", "-o", "o.onnx", *sites, *more, "--rules", "r", "--patterns", "p", "--keep-going"]) == 1
    assert seen == [
        FuseOptions(
            model=Path("m.onnx"),
            output=Path("o.onnx"),
            sites=("a*", "b"),
            pins=(("seq_len", 8), ("a=b", 2)),
            pin=False,
            op="cgdr",
            timeout=2.5,
            rules=("r",),
            patterns=(Path("p"),),
            keep_going=True,
        )
    ]


def test_the_demo_writes_both_models_and_says_what_to_try(fuse: Fuse, tmp_path: Path) -> None:
    folder = tmp_path / "a demo"
    done = fuse("demo", folder, "--json")
    names = {"prefill.onnx", "prefill.npz", "decode.onnx", "decode.npz"}
    assert {path.name for path in folder.iterdir()} == names
    assert {Path(file).name for file in done.document["files"]} == names
    assert done.document["commands"][0] == f"fuse inspect '{folder}/prefill.onnx'"
    assert fuse("demo", folder).exit == 0
    (folder / "decode.onnx").write_bytes(b"mine")
    user_error(fuse, "output-exists", "demo", folder)
    assert (folder / "decode.onnx").read_bytes() == b"mine"


def test_the_demo_cannot_be_written_into_a_file(fuse: Fuse, tmp_path: Path) -> None:
    path = broken(tmp_path, b"")
    user_error(fuse, "output", "demo", path)


def test_targets_and_patterns_are_listed(fuse: Fuse) -> None:
    targets = fuse("targets", "--json").document["targets"]
    assert [target["name"] for target in targets] == ["ascend-310p", "ascend-a2", "onnx", "ort"]
    assert {limit["mark"] for limit in targets[0]["limits"]} <= set("VSA")
    assert "static-batch" in {limit["code"] for limit in targets[0]["limits"]}
    assert "static-batch" in fuse("targets").out
    others = [[other["op"] for other in target["others"]] for target in targets]
    assert others == [[], [], ["CausalConvWithState"], ["CausalConvWithState"]]
    assert fuse("targets").out.count("by default: CausalConvWithState") == 2
    lines = [line.split()[:3] for line in fuse("patterns").out.splitlines()]
    assert lines == [
        ["rule", "kind", "default"],
        ["causal_conv", "expression", "onnx,"],
        ["delta_rule", "recurrence", "on"],
        ["gated_delta_rule", "recurrence", "on"],
        ["identity", "expression", "off"],
        ["kimi_delta_attention", "recurrence", "on"],
        ["layer_norm", "expression", "off"],
        ["min_max_clip", "expression", "off"],
    ]
    rows = fuse("patterns", "--json").document["patterns"]
    assert [(row["name"], row["kind"], row["default"], row["targets"]) for row in rows][::2][:2] == [
        ("causal_conv", "expression", False, ["onnx", "ort"]),
        ("gated_delta_rule", "recurrence", True, ["ascend-310p", "ascend-a2", "onnx", "ort"]),
    ]
    assert rows[3]["targets"] == []
    assert all(row["summary"].endswith(".") for row in rows)


@pytest.mark.parametrize(
    ("word", "hint"), [("inpsect", "did you mean `fuse inspect`?"), ("verfy", "`fuse verify`"), ("xyz", "commands are")]
)
def test_a_misspelt_command_is_named(fuse: Fuse, word: str, hint: str) -> None:
    for arguments in ((word,), (word, "a.onnx", "b.onnx")):
        done = fuse(*arguments)
        assert (done.exit, f"{word} is no command and no file" in done.err, hint in done.err) == (1, True, True)


def test_the_version_is_told(fuse: Fuse) -> None:
    assert fuse("--version").out.startswith("deltafuse ")
    assert fuse("--version", "--json").document["exit"] == 0


def test_help_exits_0_and_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("inspect", "verify", "rollback", "demo", "targets", "patterns", "exit codes:"):
        assert word in text


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("command", ["", *PARSERS])
def test_no_line_of_a_help_is_wider_than_80_columns(
    monkeypatch: pytest.MonkeyPatch, command: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    parser = PARSERS[command]() if command else plain_parser()
    assert [line for line in parser.format_help().splitlines() if len(line) > 80] == []


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deltafuse", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def test_a_pipe_gets_plain_text_even_if_colours_are_wanted_elsewhere(tmp_path: Path) -> None:
    done = run(STEPS, "-o", tmp_path / "out.onnx", NO_COLOR="1", COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "gated_delta_rule" in done.stdout.splitlines()[1]


def test_the_process_exits_with_the_code(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere.onnx", "-o", tmp_path / "out.onnx", "--json")
    assert done.returncode == json.loads(done.stdout)["exit"] == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"'{sys.executable}' -m deltafuse inspect '{DECODE}' --json | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")
