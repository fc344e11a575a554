"""What newcomers stumble over: each message says what is meant and what to do."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.console import Console

import deltafuse
import graphs
from conftest import Outcome
from deltafuse import parsers
from deltafuse.errors import UserError
from deltafuse.file_kinds import looks_like
from deltafuse.limits import left, within
from deltafuse.match import Pinned
from deltafuse.next_steps import site_steps
from deltafuse.tables import print_fuse
from deltafuse.tables_pins import pinned_lines
from deltafuse.targets.listing import MARKS
from exports import export

ZOO = Path(__file__).parent / "zoo"

pytestmark = pytest.mark.usefixtures("one_worker")

Fuse = Callable[..., Outcome]
DECODE, PREFILL, BATCHES = (export(name).path for name in ("full_decode_ts17", "full_prefill_ts17", "rec_ts17_dynB"))


# Sites that are left out


@pytest.mark.parametrize(
    ("option", "value", "note"),
    [
        ("--sites", "layers.0", "left out: not among --sites"),
        ("--skip-sites", "layers.[12]", "left out: named by --skip-sites"),
    ],
)
def test_a_site_that_is_left_out_says_so(fuse: Fuse, option: str, value: str, note: str) -> None:
    sites = fuse("inspect", DECODE, option, value, "--json").document["sites"]
    assert [site["status"] for site in sites] == ["match"] * 3
    assert [site["status_note"] for site in sites] == [None, note, note]
    shown = fuse("inspect", DECODE, option, value).out
    assert shown.count("left out  gated_delta_rule") == 2
    assert note in shown
    told = r"1 match, 2 left out; \d+ nodes would become \d+: .* would come; no model written"
    assert re.match(told, shown.splitlines()[-1])


def test_a_form_leaves_out_too(fuse: Fuse) -> None:
    done = fuse("inspect", DECODE, "--form", "chunk", "--json")
    notes = {site["status_note"] for site in done.document["sites"]}
    assert notes == {"left out: written as recurrent, --form asks for another"}


def test_sites_of_a_layer_go_by_its_name(fuse: Fuse, tmp_path: Path) -> None:
    names = [site["name"] for site in fuse("inspect", DECODE, "--target", "ort", "--json").document["sites"]]
    assert len(set(names)) == len(names)
    assert {name for name in names if name.startswith("layers.1")} == {"layers.1", "layers.1.causal_conv"}
    chosen = fuse(DECODE, "-o", tmp_path / "out.onnx", "--target", "ort", "--sites", "layers.1*", "--json").document
    assert {site["name"] for site in chosen["sites"] if site["status"] == "fused"} == {
        "layers.1",
        "layers.1.causal_conv",
    }
    rest = fuse("inspect", tmp_path / "out.onnx", "--target", "ort", "--json").document["sites"]
    status = {name: "fused" if name.startswith("layers.1") else "match" for name in names}
    assert {site["name"]: site["status"] for site in rest} == status


# Several sequences


def test_decode_of_several_sequences_tells_that_it_goes_to_the_chunk_kernel(fuse: Fuse) -> None:
    (site,) = fuse("inspect", BATCHES, "--batch", "2", "--json").document["sites"]
    (note,) = (note for note in site["notes"] if note.startswith("several_sequences: "))
    assert "decode goes to ChunkGatedDeltaRule" in note
    assert "multiple of 16" in note
    (site,) = fuse("inspect", BATCHES, "--json").document["sites"]
    assert [note for note in site["notes"] if note.startswith("several_sequences")] == []


# Pins


@pytest.mark.parametrize("command", [("inspect",), ()])
def test_a_misspelt_symbol_is_told_with_those_there_are(fuse: Fuse, tmp_path: Path, command: tuple[str, ...]) -> None:
    output = () if command else ("-o", tmp_path / "out.onnx")
    done = fuse(*command, PREFILL, *output, "--pin", "seq_length=20", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "pin-unknown-symbol")
    text = done.document["error"]["text"]
    assert "did you mean --pin seq_len=20?" in text
    assert "give one of batch, seq_len" in text
    assert list(tmp_path.iterdir()) == []


def test_a_symbol_that_is_like_none_gets_the_list_alone(fuse: Fuse) -> None:
    said = fuse("inspect", PREFILL, "--pin", "zzz=2").err
    assert "did you mean" not in said
    assert "give one of batch, seq_len" in said


def test_pinned_axes_are_told_by_symbol_and_made_up_ones_counted(fuse: Fuse) -> None:
    shown = [line for line in fuse("inspect", DECODE).out.splitlines() if line.startswith("pinned: ")]
    document = fuse("inspect", DECODE, "--json").document["pinned"]
    why = "static-batch: the target takes a fixed number of sequences"
    assert shown[0].startswith(f"pinned: batch = 1 ({why}) in input_ids[0], ")
    why = "valid_tokens: the unfused graph is the rule for this number of tokens only"
    assert shown[1].startswith(f"pinned: step = 1 ({why}) in input_ids[1], ")
    whys = {"batch": "static-batch", "step": "valid_tokens"}
    assert {axis["was"]: axis["why"] for axis in document if axis["was"] in whys} == whys
    # They always have that size.
    assert {axis["why"] for axis in document if axis["was"] not in whys} == {""}
    assert not any("dim_2" in line for line in shown)
    made_up = [axis for axis in document if "dim" in axis["was"]]
    assert len(made_up) > 1
    assert {axis["kind"] for axis in made_up} == {"output"}
    assert shown[-1].startswith(f"pinned: {len(made_up)} more axes of ")
    assert "--json" in shown[-1]


def test_an_axis_without_a_name_is_told_as_such() -> None:
    axes = [Pinned("x", 0, "?", 1), Pinned("x", 1, "n", 2), Pinned("y", 1, "n", 2, "output")]
    assert list(pinned_lines(axes)) == ["pinned: axes without a name = 1 in x[0]", "pinned: n = 2 in x[1], y[1]"]
    assert list(pinned_lines([])) == []


def test_an_axis_that_was_asked_for_is_told_as_that_and_one_of_no_reason_as_it_is(fuse: Fuse) -> None:
    shown = fuse("inspect", PREFILL, "--pin", "seq_len=20").out
    assert "\npinned: seq_len = 20 (--pin: as asked for) in input_ids[1], " in shown
    assert "\npinned: batch = 1 (static-batch: " in shown
    document = fuse("inspect", PREFILL, "--target", "ort", "--pin", "seq_len=20", "--json").document
    assert {axis["why"] for axis in document["pinned"] if axis["was"] == "seq_len"} == {"--pin"}


def test_why_an_axis_is_fixed_is_a_code_that_is_known(fuse: Fuse) -> None:
    document = fuse("inspect", DECODE, "--pin", "past_seq_len=7", "--json").document
    codes = {axis["why"] for axis in document["pinned"]} - {"--pin", ""}
    assert codes == {"static-batch", "valid_tokens"}
    assert fuse("explain", *codes).exit == 0


# Files that are no model


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"# deltafuse\n\nLinear attention", "a text that begins with '# deltafuse'"),
        (b'{"a": 1}', "JSON"),
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (gzip.compress(b"x", mtime=0), "gzip"),
        (b"GGUF\x03\x00", "GGUF"),
        (b"\x1c\x00\x00\x00TFL3", "a TFLite model"),
        (b'\x10\x00\x00\x00\x00\x00\x00\x00{"a":', "safetensors"),
        (b"\x80\x02}q\x00", "a Python pickle"),
        ("zwölf Tönnchen".encode()[:-1], "a text that begins with 'zwölf Tönnche'"),
    ],
)
def test_what_a_file_looks_like(fuse: Fuse, tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    done = fuse(path, "--dry-run", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "not-onnx")
    assert f"{path} is not an ONNX model but looks like {kind}" in done.document["error"]["text"]


def test_archives_and_arrays(fuse: Fuse, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("data.pkl", "x")
    np.save(tmp_path / "ids.npy", np.arange(3))
    assert "zip archive" in fuse("inspect", tmp_path / "model.pt").err
    assert "array of numpy" in fuse("inspect", tmp_path / "ids.npy").err


def test_bytes_that_tell_nothing_are_not_guessed_at() -> None:
    assert looks_like(bytes(range(128, 256))) == ""
    assert looks_like(b"\x00\x01\x02") == ""


# Options


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--skipsites", "a"], "--skip-sites"),
        (["--kep-going"], "--keep-going"),
        (["--targt=ort"], "--target"),
    ],
)
def test_a_misspelt_option_is_told_which_may_be_meant(fuse: Fuse, arguments: list[str], meant: str) -> None:
    done = fuse(DECODE, "-o", "out.onnx", *arguments)
    assert (done.exit, done.out) == (1, "")
    assert f"(did you mean {meant}?)" in done.err


def test_an_option_that_is_like_none_is_named_alone(fuse: Fuse) -> None:
    said = fuse("inspect", DECODE, "--qqq").err
    assert "there is no option --qqq" in said
    assert "did you mean" not in said


def test_the_two_meanings_of_op_are_told() -> None:
    text = " ".join(parsers.inspect_parser().format_help().split())
    assert "--op has two meanings: cgdr or rgdr is forced" in text


def test_the_marks_of_targets_have_a_legend(fuse: Fuse) -> None:
    last = fuse("targets").out.splitlines()[-1]
    assert all(f"{mark} {what}" in last for mark, what in MARKS.items())
    document = fuse("targets", "--json").document
    used = {limit["mark"] for target in document["targets"] for limit in target["limits"]}
    assert used <= set(document["marks"]) == set("VSA")


# verify


def outside(folder: Path) -> Path:
    """The decode model in a folder of its own, its weights one folder up."""
    path = folder / "models" / "model.onnx"
    path.parent.mkdir()
    onnx.save(onnx.load(DECODE), path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    (folder / "models" / "weights.bin").rename(folder / "weights.bin")
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../weights.bin" if entry.key == "location" else entry.value
    onnx.save(model, path)
    return path


def test_verify_takes_weights_from_outside_where_they_are_allowed(fuse: Fuse, tmp_path: Path) -> None:
    path = outside(tmp_path)
    fused = path.with_name("fused.onnx")
    assert fuse(path, "-o", fused, "--allow-outside").exit == 0
    for more in ((), ("--allow-outside",)):
        done = fuse("verify", path, fused, *more, "--json")
        assert done.exit == 0
        assert [site["verdict"] for site in done.document["sites"]] == ["equal"] * 3
        assert done.document["skipped"]["code"] == "network-data-outside"
        assert "--level site" in done.document["skipped"]["fix"]


def test_a_constant_outside_is_read_by_verify_where_it_is_allowed(fuse: Fuse, tmp_path: Path) -> None:
    model = onnx.load(export("steps_ts17").path)
    folder = tmp_path / "models"
    folder.mkdir()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="c.bin", size_threshold=0,
              convert_attribute=True)  # fmt: skip
    (folder / "c.bin").rename(tmp_path / "c.bin")
    data = (folder / "model.onnx").read_bytes().replace(b"c.bin", b"d.bin")
    assert b"d.bin" in data
    (folder / "model.onnx").write_bytes(data)
    (folder / "d.bin").symlink_to(tmp_path / "c.bin")
    fused = folder / "fused.onnx"
    assert fuse(folder / "model.onnx", "-o", fused, "--allow-outside").exit == 0
    refused = fuse("verify", folder / "model.onnx", fused, "--level", "site", "--json")
    assert (refused.exit, refused.document["error"]["code"]) == (1, "external-data-outside")
    assert "--allow-outside" in refused.document["error"]["text"]
    assert fuse("verify", folder / "model.onnx", fused, "--level", "site", "--allow-outside").exit == 0


def test_the_timeout_of_verify_is_for_the_whole_run(fuse: Fuse, tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    assert fuse(DECODE, "-o", fused).exit == 0
    done = fuse("verify", DECODE, fused, "--timeout", "0.05", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "timeout")
    assert "--level site" in done.document["error"]["text"]


def test_what_is_left_of_a_run_bounds_each_wait() -> None:
    assert left(5.0) == 5.0
    with within(2.0):
        assert 0 < left(5.0) <= 2.0
        assert left(0.5) == 0.5


def test_an_unknown_symbol_of_the_python_interface(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean --pin tokens=4") as caught:
        graphs.fuse(export("chunk_ts17_dynBT").path, tmp_path / "out.onnx", pins=(("tokns", 4),))
    assert caught.value.code == "pin-unknown-symbol"


def test_a_run_that_is_limited_is_not_ended_inside_a_collection() -> None:
    assert gc.isenabled()
    with within(20.0):
        assert not gc.isenabled()
    assert gc.isenabled()


# What is meant by a name, an order, a number


@pytest.mark.parametrize(
    ("words", "option", "command"),
    [
        (("inspect", "--tensors", "MODEL"), "--tensors", "fuse inspect"),
        (("inspect", "--json", "--nodes", "MODEL"), "--nodes", "fuse inspect"),
        (("--rules", "layer_norm", "MODEL", "-o", "x"), "--rules", "fuse"),
    ],
)
def test_an_option_that_took_the_model_for_its_value(
    fuse: Fuse, words: tuple[str, ...], option: str, command: str
) -> None:
    done = fuse(*(DECODE if word == "MODEL" else word for word in words))
    assert done.exit == 1
    assert f"{option} took {DECODE} as its value: put the model first, `{command} {DECODE} {option} ...`" in done.err
    assert "required" not in done.err


def test_a_model_that_is_missing_is_told_as_before(fuse: Fuse) -> None:
    assert "the following arguments are required: MODEL" in fuse("inspect", "--tensors", "x").err
    assert fuse("inspect", DECODE, "--tensors", "model.onnx").exit == 0


def test_a_folder_that_is_named_like_a_command(fuse: Fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = "to fuse what is called demo here, write ./demo"
    assert told not in fuse("demo", "-o", "out").err
    assert fuse("demo", "demo").exit == 0
    said = fuse("demo", "-o", "out").err
    assert "there is no option -o" in said
    assert told in said
    assert fuse("./demo", "-o", "out").exit == 0


def test_an_option_of_another_command_is_told_as_such(fuse: Fuse) -> None:
    said = fuse("inspect", DECODE, "-o", "out.onnx").err
    assert "there is no option -o (`fuse`, `fuse rollback`, `fuse lower` have it); see `fuse inspect --help`" in said
    assert "there is no option --extrac (did you mean --extract?)" in fuse("inspect", DECODE, "--extrac", "sites").err


def test_a_path_with_a_space_that_is_not_quoted(fuse: Fuse) -> None:
    said = fuse("inspect", "my", "model.onnx").err
    assert "unrecognized arguments: model.onnx (a path with a space in it stands in quotes)" in said


@pytest.mark.parametrize("option", ["--site", "--sites", "--skip-sites"])
def test_a_misspelt_site_is_told_with_the_one_that_may_be_meant(fuse: Fuse, option: str) -> None:
    done = fuse("inspect", DECODE, option, "layer.1")
    assert (done.exit, done.out) == (1, "")
    assert "no site is named layer.1; did you mean layers.1? There are layers.0, layers.1, layers.2" in done.err
    assert "named qq; there are layers.0" in fuse("inspect", DECODE, option, "qq").err


def test_a_misspelt_glob_is_told_with_one_that_fits(fuse: Fuse) -> None:
    said = fuse("inspect", DECODE, "--sites", "layer.*").err
    assert "named layer.*; did you mean layers.*? There are layers.0" in said
    assert "named qq*; there are layers.0" in fuse("inspect", DECODE, "--sites", "qq*").err


def test_an_operator_that_no_node_has_is_told_with_those_that_may_be_meant(fuse: Fuse) -> None:
    told = "no node has the operator ReduceMen; did you mean ReduceMean"
    assert f"note: {told}" in fuse("inspect", DECODE, "--op", "ReduceMen").out
    notes = fuse("inspect", DECODE, "--op", "ReduceMen", "--json").document["notes"]
    assert any(note.startswith(told) for note in notes)
    assert "no node has the operator" not in fuse("inspect", DECODE, "--op", "Reduce*").out
    assert "no node has the operator Qq*\n" in fuse("inspect", DECODE, "--op", "Qq*").out


@pytest.mark.parametrize("command", ["lint", "lower"])
def test_a_folder_of_folders_names_the_models_in_them(fuse: Fuse, tmp_path: Path, command: str) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/decode.onnx").write_bytes(b"")
    output = ("-o", tmp_path / "out.onnx") if command == "lower" else ()
    assert "give an .onnx file (in it: one/decode.onnx)" in fuse(command, tmp_path, *output).err


def test_a_place_that_cannot_be_written_to_is_told_with_what_to_do(
    fuse: Fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    told = "give a folder you may write to, or change its permissions"
    assert told in fuse("inspect", DECODE, "--extract", tmp_path / "file/sites").err

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "decode.onnx")

    monkeypatch.setattr("shutil.copyfile", refused)
    done = fuse("demo", tmp_path / "demo", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "output-not-writable")
    assert f"{tmp_path / 'demo'} cannot be written (Permission denied): {told}" in done.err


def test_files_in_the_wrong_order(fuse: Fuse, tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    assert fuse(DECODE, "-o", fused).exit == 0
    done = fuse("verify", fused, DECODE, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "swapped-files")
    assert f"{fused} holds fused nodes and {DECODE} none; give the unfused model first" in done.err


def test_a_lowered_file_is_not_what_verify_looks_at(fuse: Fuse, tmp_path: Path) -> None:
    fused, lowered = tmp_path / "fused.onnx", tmp_path / "lowered.onnx"
    assert fuse(DECODE, "-o", fused).exit == 0
    assert fuse("lower", fused, "-o", lowered).exit == 0
    done = fuse("verify", DECODE, lowered, "--level", "site")
    assert done.exit == 5
    assert f"{lowered} has no fused site: give what fuse wrote" in done.out


def test_a_type_that_differs_is_told_by_its_name(fuse: Fuse, tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    assert fuse(DECODE, "-o", fused).exit == 0
    model = onnx.load(fused)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    onnx.save(model, fused)
    said = fuse("verify", DECODE, fused, "--level", "site").out
    assert ": int64 [" in said
    assert "] became int32 [" in said


def test_a_file_without_fused_nodes_is_told_by_lint(fuse: Fuse, tmp_path: Path) -> None:
    done = fuse("lint", DECODE)
    assert done.exit == 3
    assert f"{DECODE} holds no fused node of any target: give the file that fuse wrote" in done.out
    assert done.out.splitlines()[-1] == "nothing to lint, which is no pass: no fused node, 0 notes"
    fused = tmp_path / "fused.onnx"
    assert fuse(DECODE, "-o", fused).exit == 0
    assert "or with --target the target" in fuse("lint", fused, "--target", "ort").out
    assert "holds no fused node" not in fuse("lint", fused).out


def test_a_dry_run_does_not_say_that_anything_is_fused(fuse: Fuse, tmp_path: Path) -> None:
    done = fuse(DECODE, "--dry-run", "--plan", tmp_path / "plan.json")
    assert re.match(r"3 match; \d+ nodes would become \d+: .* would come; no model written", done.out.splitlines()[-1])
    assert "layers.0  match" in done.out


def test_an_edited_target_of_a_plans_options_that_no_site_has_is_told(fuse: Fuse, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert fuse(DECODE, "--dry-run", "--plan", path).exit == 0
    plan = json.loads(path.read_text())
    plan["options"]["target"] = "ort"
    path.write_text(json.dumps(plan))
    done = fuse(DECODE, "--plan", path, "-o", tmp_path / "one.onnx", "--json").document
    assert (done["exit"], done["target"]) == (0, "ascend-310p")
    assert any("options name target ort, but each site names its own" in note for note in done["notes"])
    for site in plan["sites"]:
        site.update(target=None, op=None)
    path.write_text(json.dumps(plan))
    done = fuse(DECODE, "--plan", path, "-o", tmp_path / "two.onnx", "--json").document
    assert (done["exit"], done["target"], [site["op"] for site in done["sites"][:3]]) == (
        0, "ort", ["LinearAttention"] * 3,
    )  # fmt: skip
    assert not any("the plan's options" in note for note in done["notes"])


def test_a_site_that_a_plan_skips_is_told_where_to_take_it(fuse: Fuse, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert fuse(DECODE, "--dry-run", "--plan", path).exit == 0
    plan = json.loads(path.read_text())
    plan["sites"][1]["action"] = "skip"
    path.write_text(json.dumps(plan))
    shown = fuse(DECODE, "--plan", path, "-o", tmp_path / "out.onnx").out
    assert "fix: change the plan's entry (action fuse) to take the site" in shown


def test_a_folder_says_of_each_model_why_nothing_becomes_of_it(fuse: Fuse, tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    assert fuse(DECODE, "-o", source / "fused.onnx").exit == 0
    (source / "decode.onnx").write_bytes(DECODE.read_bytes())
    (source / "near.onnx").write_bytes(export("nm_decay_sign").path.read_bytes())
    models = fuse("inspect", source, "--json").document["models"]
    outcomes = {model["path"]: model["outcome"] for model in models}
    assert outcomes == {"fused.onnx": "fused already", "decode.onnx": "match", "near.onnx": "near-miss"}
    shown = fuse("inspect", source).out
    assert "batch=1" in shown
    assert "dim_2=" not in shown
    done = fuse(source, "-o", tmp_path / "out", "--json")
    assert (done.exit, {model["path"]: model["outcome"] for model in done.document["models"]}) == (4, outcomes)
    done = fuse(source, "-o", tmp_path / "out", "--keep-going", "--json")
    assert (done.exit, {model["path"]: model["outcome"] for model in done.document["models"]}) == (
        0, {"fused.onnx": "copied", "decode.onnx": "fused", "near.onnx": "near-miss"},
    )  # fmt: skip


def test_a_rollout_of_folders_is_told_how_to_name_the_pair(fuse: Fuse, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    said = fuse("verify", tmp_path / "a", tmp_path / "b", "--rollout", "4").err
    assert "--prefill U F --decode U F" in said


# What is shown of a site


def test_details_end_with_what_holds_for_the_whole_model(fuse: Fuse, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown = fuse("inspect", PREFILL, "--site", "layers.0", "--html", page).out
    assert f"note: the page is {page}\n" in shown
    assert "\npinned: batch = 1 (static-batch: " in shown


# How many nodes a site has


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
def test_a_site_has_one_number_of_nodes_wherever_it_is_told(target: str, fuse: Fuse, tmp_path: Path) -> None:
    given, plan = ("--target", target), tmp_path / "plan.json"
    sites = fuse("inspect", PREFILL, *given, "--json").document["sites"]
    rules = [site for site in sites if site["form"] == "chunk"]
    # Layers that are equal have as many, whatever they share.
    assert len(rules) == 3
    assert {site["nodes"] for site in rules[1:]} == {rules[1]["nodes"]}
    assert fuse(PREFILL, *given, "--dry-run", "--plan", plan).exit == 0
    assert [one["nodes"] for one in json.loads(plan.read_text())["sites"]] == [site["nodes"] for site in sites]
    table = fuse("inspect", PREFILL, *given).out.splitlines()
    fuse("inspect", PREFILL, *given, "--extract", tmp_path / "sites")
    for site in sites:
        own, added = site["nodes"], site["nodes_added"]
        assert any(line.startswith(f"{site['name']} ") and f" {own} to {added} " in line for line in table)
        shown = fuse("inspect", PREFILL, *given, "--site", site["name"]).out
        assert f"  status: match, {own} nodes become {added} with {site['op']}\n" in shown
        graph = onnx.load(tmp_path / "sites" / f"{site['name']}.before.onnx").graph
        more = len(graph.node) - own
        told = f"{site['name']}: {own} nodes from its operands to its results"
        also = f", and {more} nodes that only work out sizes and constants for them" if more else ""
        # What works out sizes for a convolution lies before its operands.
        less = f", without {-more} nodes that work out sizes: inputs here"
        assert graph.doc_string == told + (less if more < 0 else also)
        assert more >= 0 or site["form"] == "expression"
        after = onnx.load(tmp_path / "sites" / f"{site['name']}.after.onnx").graph
        assert len(after.node) == added


def test_what_one_layer_alone_needs_goes_with_it(fuse: Fuse) -> None:
    sites = fuse("inspect", PREFILL, "--json").document["sites"]
    alone = [
        next(one for one in fuse("inspect", PREFILL, "--sites", site["name"], "--json").document["sites"] if one["op"])
        for site in sites
    ]
    for site, single in zip(sites, alone, strict=True):
        assert site["nodes_removed"] >= single["nodes_removed"]
        assert site["nodes_removed"] - single["nodes_removed"] < 0.01 * site["nodes"]


def test_details_of_a_near_miss_say_how_far_it_is(fuse: Fuse) -> None:
    shown = fuse("inspect", export("nm_decay_sign").path, "--site", "*").out
    lines = shown.partition("smallest relative differences over 3 tokens:\n")[2].splitlines()
    assert lines[0].split()[1:2] == ["decay-sign:"]
    assert float(lines[0].split()[0]) < 1e-12
    assert any("gated_delta_rule: the rule itself" in line for line in lines)


def check_next(line: str, folder: Path) -> str:
    """Runs what a line tells to do next, as a shell takes it, and gives what that says."""
    assert line.startswith("next: ")
    program, *arguments = shlex.split(line.removeprefix("next: "))
    assert program == "fuse"
    done = subprocess.run(
        [sys.executable, "-m", "deltafuse", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode in (0, 3, 4), done.stderr) == (True, "")
    return done.stdout


def test_what_is_told_to_do_next_is_a_whole_command(fuse: Fuse, tmp_path: Path) -> None:
    model = tmp_path / "a model.onnx"
    model.write_bytes(export("nm_chunk_decay_sign").path.read_bytes())
    shown = fuse("inspect", model, "--rules", "gated_delta_rule").out
    (line,) = (line for line in shown.splitlines() if "next: " in line)
    assert " --rules gated_delta_rule --site site.0 " in line
    assert "it is the neighbour decay-turned of gated_delta_rule" in check_next(line, tmp_path)
    assert (tmp_path / "a model.html").is_file()
    (line,) = (line for line in fuse("inspect", tmp_path).out.splitlines() if "next: " in line)
    check_next(line.removeprefix(f"{model.name}: "), tmp_path)
    model.write_bytes(DECODE.read_bytes())
    (line,) = (line for line in fuse("lint", model).out.splitlines() if "next: " in line)
    assert "3 fused; " in check_next(line, tmp_path)
    fused = tmp_path / "a model-fused.onnx"
    (line,) = (line for line in fuse("lint", fused, "--target", "ort").out.splitlines() if "next: " in line)
    assert "3 fused nodes against ascend-310p: no findings" in check_next(line, tmp_path)


def test_details_of_what_no_neighbour_fits_say_so_first(fuse: Fuse, tmp_path: Path) -> None:
    shown = fuse("inspect", graphs.save(graphs.step(graphs.UNNAMED), tmp_path), "--site", "site.0").out
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[:2] == ["site.0", "status: near-miss, 23 nodes"]
    assert "`" not in shown
    assert "input 2: query float32 [1, 1, 4, 5]" in lines
    assert "output 1: final_state float32 [1, 4, 5, 3]" in lines
    (at,) = (i for i, line in enumerate(lines) if line.startswith("smallest relative differences"))
    assert lines[at - 1].startswith("no neighbour with the rule's operands fits; the smallest difference is ")
    path = tmp_path / "model.onnx"
    assert lines[-2:] == [f"next: fuse inspect {path} --site site.0 --html model.html", "draws what was looked at"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nm_chunk_decay_sign", "it is the neighbour decay-turned of gated_delta_rule, with a difference of "),
        ("near_own_read_key", "it is what erase-per-channel says; of the rule and the neighbours with its operands "),
        ("near_squashed", "it is what activation-inside says; of the rule and "),
    ],
)
def test_details_of_a_near_miss_do_not_deny_its_name(name: str, said: str, fuse: Fuse) -> None:
    shown = fuse("inspect", ZOO / f"{name}.onnx" if name.startswith("near") else export(name).path, "--site", "*").out
    assert f"  {said}" in shown
    assert "no neighbour" not in shown


def test_a_near_miss_is_told_with_what_to_do_next(fuse: Fuse, tmp_path: Path) -> None:
    path = export("nm_chunk_decay_sign").path
    command = f"next: fuse inspect {path} --site site.0"
    told = f"{command} --html {path.stem}.html\n  tells how far off it is and draws what was looked at\n"
    assert told in fuse("inspect", path).out
    assert "next: " not in fuse("inspect", DECODE).out
    drawn = fuse("inspect", path, "--html", tmp_path / "page.html").out
    assert f"{command}\n  tells how far off it is\n" in drawn
    assert "next: " not in fuse("inspect", path, "--site", "*", "--html", tmp_path / "page.html").out
    shown = fuse("inspect", export("nm_decay_sign").path, "--site", "*").out
    assert "it is the neighbour decay-sign of gated_delta_rule, with a difference of " in shown


@pytest.mark.parametrize("options", [(), ("--target", "ort", "--rules", "gated_delta_rule"), ("--patterns", "my own")])
def test_what_is_to_be_run_next_runs_as_it_stands(
    options: tuple[str, ...], fuse: Fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command, pasted: with paths that need quotes, and those options without which the site is not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my own").mkdir()
    path = Path("my own", "a 'near' $miss.onnx")
    path.write_bytes(export("nm_chunk_decay_sign").path.read_bytes())
    told = fuse("inspect", path, *options).out
    for _ in range(2):
        (command,) = (line.removeprefix("next: ") for line in told.splitlines() if line.startswith("next: "))
        program, *words = shlex.split(command)
        assert program == "fuse"
        assert Path(words[-1]).name == "a 'near' $miss.html"
        done = fuse(*words)
        assert done.exit == fuse("inspect", path, *options).exit
        assert "it is the neighbour decay-turned of gated_delta_rule" in done.out
        assert Path(words[-1]).read_text().startswith("<!DOCTYPE html>")
        Path(words[-1]).unlink()
        told = fuse(*words[:-2]).out


def test_a_command_is_not_folded_on_a_narrow_terminal() -> None:
    report = deltafuse.inspect(export("nm_chunk_decay_sign").path)
    out = io.StringIO()
    print_fuse(report, Console(file=out, width=40, force_terminal=True, color_system=None), tree=True)
    assert f"\n{next(site_steps(report.again, report.model, 'site.0', drawn=False, shown=False))}\n" in out.getvalue()


def test_a_page_of_a_folder_is_refused_with_a_command_that_writes_one_of_each(
    fuse: Fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my models" / "in"
    folder.mkdir(parents=True)
    for name in ("a b.onnx", "c.onnx"):
        shutil.copy(DECODE, folder / name)
    for given in (("inspect", folder.parent), (folder.parent, "-o", tmp_path / "out")):
        said = fuse(*given, "--html", tmp_path / "page.html", "--json")
        assert (said.exit, said.document["error"]["code"]) == (1, "usage")
    program = tmp_path / "bin" / "fuse"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m deltafuse "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    command = said.document["error"]["text"].split("`")[1]
    subprocess.run(["bash", "-c", command], check=True, stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in folder.glob("*.html")) == ["a b.onnx.html", "c.onnx.html"]


def test_a_fixed_number_of_tokens_has_nothing_below_or_above(fuse: Fuse) -> None:
    shown = fuse("inspect", export("rec_ts17_T4_noinit").path, "--site", "*").out
    assert "valid tokens: 4; the number that the file has" in shown


def test_extracting_nothing_is_told(fuse: Fuse, tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    shown = fuse("inspect", export("nm_chunk_decay_sign").path, "--extract", folder).out
    assert f"note: nothing was extracted to {folder}: only sites that could be fused are" in shown
    assert not folder.exists()
    said = fuse("inspect", DECODE, "--extract", folder).out.splitlines()[-1]
    assert f"9 files extracted to {folder} in " in said


def test_lint_of_a_lowered_file_says_so(fuse: Fuse, tmp_path: Path) -> None:
    fused, plain = tmp_path / "fused.onnx", tmp_path / "plain.onnx"
    assert fuse(DECODE, "-o", fused).exit == 0
    assert fuse("lower", fused, "-o", plain).exit == 0
    said = fuse("lint", plain).out
    assert f"{plain} was written by fuse lower and holds no fused node: give the fused file" in said
    assert fuse("lint", plain, "--json").document["lowered"] is True
    assert fuse("lint", fused, "--json").document["lowered"] is False
