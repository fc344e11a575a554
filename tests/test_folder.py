"""``fuse EXPORT_DIR -o OUT_DIR`` and ``fuse inspect DIR``."""

from __future__ import annotations

import onnx
import pytest

from deltafuse import folder, pipeline
from deltafuse.errors import UserError
from deltafuse.folder import exit_of
from deltafuse.folder_tree import check_output_folder, staged
from deltafuse.options import SilentProgress
from deltafuse.reasons import Reason
from exports import export
from folders import DEMO, contents, copy, edit, export_folder, external

CUSTOM = {"prefill": b"ChunkGatedDeltaRule", "decode": b"RecurrentGatedDeltaRule"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_folder(tmp_path_factory.mktemp("folder") / "export")


def kernels(path):
    nodes = onnx.load(path, load_external_data=False).graph.node
    return [{a.name: a.s for a in node.attribute}["type"] for node in nodes if node.op_type == "Custom"]


def axes(path, name):
    graph = onnx.load(path, load_external_data=False).graph
    (value,) = (value for value in (*graph.input, *graph.output) if value.name == name)
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def left_behind(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_layout_stays_and_each_model_is_fused(fuse, exported, tmp_path):
    before = contents(exported)
    done = fuse(exported, "-o", tmp_path / "out")
    assert (done.exit, done.err) == (0, "")
    assert contents(exported) == before
    assert left_behind(tmp_path) == ["out"]
    after = contents(tmp_path / "out")
    assert after.keys() == before.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"prefill/model.onnx", "decode/model.onnx"}
    for part, kernel in CUSTOM.items():
        path = tmp_path / "out" / part / "model.onnx"
        assert kernels(path) == [kernel] * 3
        onnx.load(path)
    assert axes(tmp_path / "out/prefill/model.onnx", "present_recurrent_states") == [3, 1, 4, 16, 16]
    assert axes(tmp_path / "out/decode/model.onnx", "past_recurrent_states") == [3, 1, 4, 16, 16]


def test_the_table(fuse, exported, tmp_path):
    lines = fuse(exported, "-o", tmp_path / "out").out.splitlines()
    assert lines[0].split() == ["model", "outcome", "sites", "operators", "nodes", "before", "after", "pinned"]
    assert [line.split()[:6] for line in lines[1:4]] == [
        ["decode/model.onnx", "fused", "3", "of", "3", "3"],
        ["prefill/model.onnx", "fused", "3", "of", "3", "3"],
        ["vision/model.onnx", "copied", "0", "of", "0", "1"],
    ]
    assert "prefill/model.onnx and decode/model.onnx: 3 of 3 states fit" in lines
    assert lines[-1].startswith(f"3 models: 2 fused, 1 copied; wrote {tmp_path / 'out'} for ascend-310p")


def test_the_document(fuse, exported, tmp_path):
    done = fuse(exported, "-o", tmp_path / "out", "--json", "--target", "ort")
    assert (done.exit, done.err) == (0, "")
    found = done.document
    assert (found["schema"], found["exit"], found["error"], found["target"]) == (1, 0, None, "ort")
    assert (found["source"], found["output"]) == (str(exported), str(tmp_path / "out"))
    models = {model["path"]: model for model in found["models"]}
    assert {path: model["outcome"] for path, model in models.items()} == {
        "decode/model.onnx": "fused",
        "prefill/model.onnx": "fused",
        "vision/model.onnx": "copied",
    }
    assert models["prefill/model.onnx"]["output"] == str(tmp_path / "out/prefill/model.onnx")
    assert [site["op"] for site in models["decode/model.onnx"]["sites"]] == [
        *["LinearAttention"] * 3,
        *["CausalConvWithState"] * 3,
    ]
    (pair,) = found["pairs"]
    assert (pair["prefill"], pair["decode"], pair["fits"]) == ("prefill/model.onnx", "decode/model.onnx", True)
    assert {state["input"]: state["output"] for state in pair["states"]} == {
        f"past_{name}": f"present_{name}" for name in ("conv_states", "recurrent_states", "kv_cache")
    }
    assert found["copied"] == ["vision/model.onnx", "config.json", *(f"{part}/weights.bin" for part in
                                                                     ("decode", "prefill", "vision"))]  # fmt: skip


def test_a_dry_run_says_the_same_and_writes_nothing(fuse, exported, tmp_path):
    done = fuse(exported, "-o", tmp_path / "out", "--dry-run", "--json")
    assert (done.exit, done.document["output"]) == (0, None)
    assert [model["outcome"] for model in done.document["models"]] == ["match", "match", "no site"]
    assert done.document["models"][0]["sites"][0]["status"] == "fused"
    assert done.document["pairs"][0]["fits"]
    assert left_behind(tmp_path) == []
    assert fuse(exported, "--dry-run").exit == 0


def test_inspect_writes_nothing(fuse, exported, tmp_path):
    done = fuse("inspect", exported, "--json", "--extract", tmp_path / "sites")
    assert (done.exit, done.document["output"]) == (0, None)
    assert [model["outcome"] for model in done.document["models"]] == ["match", "match", "no site"]
    assert {site["status"] for model in done.document["models"] for site in model["sites"]} == {"match"}
    assert sorted(path.name for path in (tmp_path / "sites").iterdir()) == ["decode", "prefill"]
    refused = fuse("inspect", exported, "--tensors")
    assert (refused.exit, "of one model" in refused.err) == (1, True)


@pytest.mark.parametrize(("form", "part"), [("chunk", "prefill"), ("recurrent", "decode")])
def test_the_switches_fuse_one_of_both(fuse, exported, tmp_path, form, part):
    done = fuse(exported, "-o", tmp_path / "out", "--form", form, "--json")
    assert done.exit == 0
    fused = [model["path"] for model in done.document["models"] if model["outcome"] == "fused"]
    assert fused == [f"{part}/model.onnx"]
    before, after = contents(exported), contents(tmp_path / "out")
    assert [name for name in before if before[name] != after[name]] == fused


def test_pins_go_where_the_axis_is(fuse, exported, tmp_path):
    done = fuse(exported, "-o", tmp_path / "out", "--pin", "seq_len=20", "--json")
    assert done.exit == 0
    assert axes(tmp_path / "out/prefill/model.onnx", "input_ids") == [1, 20]
    assert axes(tmp_path / "out/decode/model.onnx", "input_ids") == [1, 1]
    refused = fuse(exported, "-o", tmp_path / "other", "--pin", "sequence=20", "--json")
    assert (refused.exit, refused.document["error"]["code"]) == (1, "pin-unknown-symbol")


def test_names_of_sites_need_not_be_in_every_model(fuse, exported, tmp_path):
    source = copy(exported, tmp_path / "in")
    (source / "other").mkdir()
    (source / "other/model.onnx").write_bytes(export("chunk_dy18").path.read_bytes())
    done = fuse(source, "-o", tmp_path / "out", "--sites", "layers.1", "--json")
    assert done.exit == 0
    assert len(kernels(tmp_path / "out/prefill/model.onnx")) == 1
    assert contents(tmp_path / "out")["other/model.onnx"] == contents(source)["other/model.onnx"]
    (left,) = (model for model in done.document["models"] if model["path"] == "other/model.onnx")
    assert (left["outcome"], left["sites"][0]["reason"]["code"]) == ("copied", "left-out")
    given = ("--sites", "layers.1", "--sites", "site.*", "--skip-sites", "layers.0")
    assert fuse(source, "-o", tmp_path / "both", *given).exit == 0
    parts = ("prefill", "decode", "other")
    assert [len(kernels(tmp_path / "both" / part / "model.onnx")) for part in parts] == [1, 1, 1]
    refused = fuse(source, "-o", tmp_path / "more", "--sites", "layers.9", "--json")
    assert (refused.exit, refused.document["error"]["code"]) == (1, "site-unknown")


@pytest.fixture
def with_a_refusal(exported, tmp_path):
    """A folder one of whose models has a site that the target cannot take."""
    source = copy(exported, tmp_path / "in")
    (source / "other").mkdir()
    (source / "other/model.onnx").write_bytes(export("rec_ts17_B4").path.read_bytes())
    return source


def test_one_refusal_and_nothing_is_written(fuse, with_a_refusal, tmp_path):
    done = fuse(with_a_refusal, "-o", tmp_path / "out", "--json")
    assert (done.exit, done.document["output"]) == (4, None)
    assert {model["path"]: model["outcome"] for model in done.document["models"]} == {
        "decode/model.onnx": "match",
        "other/model.onnx": "refused",
        "prefill/model.onnx": "match",
        "vision/model.onnx": "no site",
    }
    assert done.document["models"][1]["sites"][0]["reason"]["code"] == "static-batch"
    assert done.document["notes"] == [
        "nothing was written: other/model.onnx cannot be fused; give --keep-going to write decode/model.onnx, "
        "prefill/model.onnx all the same"
    ]
    assert left_behind(tmp_path) == ["in"]


def test_keep_going_writes_the_others(fuse, with_a_refusal, tmp_path):
    done = fuse(with_a_refusal, "-o", tmp_path / "out", "--keep-going", "--json")
    assert done.exit == 0
    assert [model["outcome"] for model in done.document["models"]] == ["fused", "refused", "fused", "copied"]
    assert contents(tmp_path / "out")["other/model.onnx"] == contents(with_a_refusal)["other/model.onnx"]
    assert len(kernels(tmp_path / "out/decode/model.onnx")) == 3


@pytest.mark.parametrize(
    ("exits", "fits", "near", "plain", "kept"),
    [
        ((0,), True, False, 0, 0), ((0, 3), True, False, 0, 0), ((3, 3), True, False, 3, 3),
        ((0, 4), True, False, 4, 0), ((3, 4), True, False, 4, 4), ((0, 3), False, False, 4, 0),
        ((0, 3, 4), False, False, 4, 0), ((3,), False, False, 3, 3), ((0, 1), True, False, 1, 1),
        ((1, 3), True, False, 1, 1), ((1, 4), False, False, 1, 1), ((0, 3), True, True, 4, 0),
        ((3, 3), True, True, 3, 3), ((3, 4), True, True, 4, 4), ((0, 1, 3), True, True, 1, 1),
    ],
)  # fmt: skip
def test_the_exit_of_a_folder_follows_from_those_of_its_models(exits, fits, near, plain, kept):
    assert exit_of(exits, fits=fits, near=near, keep_going=False) == plain
    assert exit_of(exits, fits=fits, near=near, keep_going=True) == kept


@pytest.fixture
def with_a_near_miss(exported, tmp_path):
    """A folder one of whose models has a site that is not the rule, and no other."""
    source = copy(exported, tmp_path / "in")
    for name, model in (("other", "nm_decay_sign"), ("another", "nm_stale_read")):
        (source / name).mkdir()
        (source / name / "model.onnx").write_bytes(export(model).path.read_bytes())
    return source


def test_near_misses_beside_matches_are_told_whichever_model_they_are_in(fuse, with_a_near_miss, tmp_path):
    done = fuse(with_a_near_miss, "-o", tmp_path / "out")
    assert (done.exit, left_behind(tmp_path)) == (4, ["in"])
    lines = done.out.splitlines()
    assert ["other/model.onnx", "near-miss"] in [line.split()[:2] for line in lines]
    assert (
        "note: nothing was written: another/model.onnx, other/model.onnx have near misses alone; give --keep-going to "
        "write decode/model.onnx, prefill/model.onnx all the same, or name what to leave with --skip-sites"
    ) in lines
    # A match is called site.0 too: --skip-sites site.0 would leave it as well.
    (tmp_path / "in" / "prefill" / "model.onnx").write_bytes(export("rec_dy18").path.read_bytes())
    told = fuse(with_a_near_miss, "-o", tmp_path / "out").out
    assert "all the same" in told
    assert "--skip-sites" not in told
    assert any(line.startswith("other/model.onnx: site.0 (decay-sign): the state grows by exp(-g)") for line in lines)
    assert lines[-1].startswith("5 models: 2 near-miss, 2 match, 1 no site; no model written")
    assert fuse("inspect", with_a_near_miss).exit == fuse(with_a_near_miss, "--dry-run").exit == 4


def test_near_misses_that_are_left_out_or_alone_keep_nothing_from_being_written(fuse, with_a_near_miss, tmp_path):
    kept = fuse(with_a_near_miss, "-o", tmp_path / "kept", "--keep-going", "--json")
    assert kept.exit == 0
    assert [model["outcome"] for model in kept.document["models"]] == [
        "near-miss", "fused", "near-miss", "fused", "copied",
    ]  # fmt: skip
    assert contents(tmp_path / "kept")["other/model.onnx"] == contents(with_a_near_miss)["other/model.onnx"]
    for name, chosen in (("skipped", ("--skip-sites", "site.*")), ("named", ("--sites", "layers.*"))):
        assert fuse(with_a_near_miss, "-o", tmp_path / name, *chosen).exit == 0
        assert contents(tmp_path / name) == contents(tmp_path / "kept")
    alone = fuse(with_a_near_miss / "other", "-o", tmp_path / "alone")
    assert (alone.exit, (tmp_path / "alone").exists()) == (3, False)


def test_the_exits_of_a_document_go_together(fuse, with_a_refusal, tmp_path):
    for more, whole in (["--dry-run"], 4), (["--dry-run", "--keep-going"], 0):
        done = fuse(with_a_refusal, "-o", tmp_path / "out", "--json", *more)
        exits = [model["exit"] for model in done.document["models"]]
        fits = all(pair["fits"] for pair in done.document["pairs"])
        assert exits == [0, 4, 0, 3]
        assert done.exit == done.document["exit"] == whole == exit_of(
            exits, fits=fits, near=False, keep_going=len(more) == 2
        )
        assert {model["output"] for model in done.document["models"]} == {None}


def test_no_site_anywhere_is_exit_3(fuse, exported, tmp_path):
    done = fuse(exported / "vision", "-o", tmp_path / "out", "--json")
    assert (done.exit, done.document["output"], left_behind(tmp_path)) == (3, None, [])


def change_dtype(model):
    (state,) = (value for value in model.graph.input if value.name == "past_conv_states")
    state.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    first = next(index for index, node in enumerate(model.graph.node) if "past_conv_states" in node.input)
    for node in model.graph.node:
        node.input[:] = ["past_conv_states_single" if name == "past_conv_states" else name for name in node.input]
    cast = onnx.helper.make_node("Cast", ["past_conv_states"], ["past_conv_states_single"], to=1)
    model.graph.node.insert(first, cast)


def test_models_without_a_partner_of_their_own_are_noted(fuse, tmp_path):
    source = tmp_path / "in"
    for part, names in {"prefill": "xy", "decode": "uv"}.items():
        for name in names:
            external(DEMO / f"{part}.onnx", source / f"{part}_{name}/model.onnx")
    done = fuse("inspect", source)
    notes = [line for line in done.out.splitlines() if line.startswith("note: ")]
    fits = "its states fit decode_u/model.onnx, decode_v/model.onnx alike"
    assert [note.partition(";")[0] for note in notes] == [
        f"note: prefill_{name}/model.onnx has no partner of its own: {fits}" for name in "xy"
    ]
    assert (done.exit, "states fit" in done.out.replace(fits, "")) == (0, False)


@pytest.mark.parametrize(
    ("target", "decode", "noted"),
    [("ascend-310p", "decode.bin", False), ("ascend-310p", "prefill.bin", True), ("ort", "prefill.bin", False)],
)
def test_weights_in_one_file_are_noted_for_ascend(target, decode, noted, fuse, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for part, location in {"prefill": "prefill.bin", "decode": decode}.items():
        model = onnx.load(DEMO / f"{part}.onnx")
        path = source / f"{part}.onnx"
        onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=64)
    done = fuse(source, "-o", tmp_path / "out", "--target", target, "--json")
    assert done.exit == 0
    names = {"models": "decode.onnx and prefill.onnx", "location": "prefill.bin"}
    told = Reason("data-shared", names)
    assert (told.text in done.document["notes"]) == noted
    assert told.fix == "put each model into a folder of its own, with a copy of the file"
    found = fuse("lint", tmp_path / "out/decode.onnx", "--target", target, "--json").document["findings"]
    assert [one["code"] for one in found] == ["shared-data"] * noted


def test_states_that_do_not_fit_are_named(fuse, exported, tmp_path):
    source = copy(exported, tmp_path / "in")
    edit(source / "decode/model.onnx", change_dtype)
    done = fuse(source, "-o", tmp_path / "out")
    assert done.exit == 4
    text = (
        "prefill/model.onnx gives present_conv_states as float and decode/model.onnx takes past_conv_states as float16"
    )
    assert f"pair-dtype: {text}" in done.out
    assert "nothing was written: the states do not fit" in done.out
    assert left_behind(tmp_path) == ["in"]
    kept = fuse(source, "-o", tmp_path / "out", "--keep-going", "--json")
    assert (kept.exit, kept.document["pairs"][0]["fits"]) == (0, False)
    assert len(kernels(tmp_path / "out/decode/model.onnx")) == 3


def test_an_error_names_the_model_and_leaves_nothing(fuse, exported, tmp_path):
    source = copy(exported, tmp_path / "in")
    (source / "vision/model.onnx").write_bytes(b"no model")
    done = fuse(source, "-o", tmp_path / "out", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "not-onnx")
    assert "vision/model.onnx" in done.document["error"]["text"]
    assert left_behind(tmp_path) == ["in"]


@pytest.fixture
def with_broken_files(exported, tmp_path):
    """A folder with a file that is no model, and one that was cut short."""
    source = copy(exported, tmp_path / "in")
    (source / "vision/model.onnx").write_bytes(b"no model")
    (source / "other").mkdir()
    (source / "other/model.onnx").write_bytes((source / "decode/model.onnx").read_bytes()[:5000])
    return source


BROKEN = {"other/model.onnx": "truncated", "vision/model.onnx": "not-onnx"}


def test_a_file_that_is_no_model_is_a_row_and_the_others_are_looked_at(fuse, with_broken_files, tmp_path):
    for arguments in (with_broken_files, "-o", tmp_path / "out"), ("inspect", with_broken_files):
        done = fuse(*arguments)
        assert done.exit == 1
        assert [line.split()[:3] for line in done.out.splitlines()[1:5]] == [
            ["decode/model.onnx", "match", "3"], ["other/model.onnx", "failed:", "truncated"],
            ["prefill/model.onnx", "match", "3"], ["vision/model.onnx", "failed:", "not-onnx"],
        ]  # fmt: skip
        assert done.out.splitlines()[-1].startswith("4 models: 2 match, 2 failed; no model written")
        said = done.err.splitlines()
        assert [line.partition(" is ")[0] for line in said] == [f"fuse: {with_broken_files / name}" for name in BROKEN]
        assert said[0].endswith("copy or export it again")
        assert left_behind(tmp_path) == ["in"]


def test_the_document_has_the_error_of_each_model(fuse, with_broken_files, tmp_path):
    done = fuse(with_broken_files, "-o", tmp_path / "out", "--json")
    models = {model["path"]: model for model in done.document["models"]}
    assert list(models) == sorted(models)
    assert {name: one["error"]["code"] for name, one in models.items() if one["error"]} == BROKEN
    assert [one["exit"] for one in models.values()] == [0, 1, 0, 1]
    assert (done.exit, done.document["exit"], done.document["output"]) == (1, 1, None)
    assert done.document["error"] == models["other/model.onnx"]["error"]
    assert done.document["pairs"][0]["fits"]
    assert done.document["notes"] == [
        "nothing was written: other/model.onnx, vision/model.onnx failed; give --keep-going to write "
        "decode/model.onnx, prefill/model.onnx all the same"
    ]


def test_keep_going_fuses_the_others_and_rollback_gives_all_back(fuse, with_broken_files, tmp_path):
    before = contents(with_broken_files)
    dry = fuse(with_broken_files, "-o", tmp_path / "out", "--keep-going", "--dry-run", "--json")
    assert (dry.exit, left_behind(tmp_path)) == (1, ["in"])
    done = fuse(with_broken_files, "-o", tmp_path / "out", "--keep-going", "--json")
    assert (done.exit, done.document["output"]) == (1, str(tmp_path / "out"))
    assert [model["outcome"] for model in done.document["models"]] == ["fused", "failed", "fused", "failed"]
    assert len(kernels(tmp_path / "out/decode/model.onnx")) == 3
    after = contents(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} == {"decode/model.onnx", "prefill/model.onnx"}
    compared = fuse("verify", with_broken_files, tmp_path / "out", "--level", "site", "--json")
    assert [model["outcome"] for model in compared.document["models"]] == ["equal", "unreadable", "equal", "unreadable"]
    assert compared.exit == 1
    back = fuse("rollback", tmp_path / "out", "-o", tmp_path / "back", "--json")
    assert (back.exit, back.document["error"]) == (0, None)
    assert [model["outcome"] for model in back.document["models"]] == ["restored", "unchanged"] * 2
    assert contents(tmp_path / "back") == before
    told = fuse("rollback", tmp_path / "out", "-o", tmp_path / "again")
    assert (told.exit, told.err) == (0, "")
    assert [line for line in told.out.splitlines() if line.startswith("note")] == [
        f"note, {name}: it is no model that can be read ({code}) and has no trace of a fuse: copied as it is"
        for name, code in BROKEN.items()
    ]


def test_what_was_copied_as_it_was_is_told(fuse, with_broken_files, tmp_path):
    (with_broken_files / "near.onnx").write_bytes(export("nm_decay_sign").path.read_bytes())
    shown = fuse(with_broken_files, "-o", tmp_path / "out", "--keep-going").out.splitlines()[-1]
    told = "5 models: 2 fused, 1 near-miss (copied as it was), 2 failed (copied as they were); wrote "
    assert shown.startswith(told)
    done = fuse(with_broken_files, "-o", tmp_path / "again", "--keep-going", "--json").document
    assert {model["path"]: model["written"] for model in done["models"]} == {
        "decode/model.onnx": "fused", "prefill/model.onnx": "fused", "near.onnx": "copied",
        "other/model.onnx": "copied", "vision/model.onnx": "copied",
    }  # fmt: skip
    assert {name for name in done["copied"] if name.endswith(".onnx")} == {"near.onnx", *BROKEN}
    dry = fuse(with_broken_files, "--dry-run", "--json").document
    assert {model["written"] for model in dry["models"]} == {None}


def test_what_all_models_fail_with_is_the_error_of_the_run(fuse, with_broken_files, tmp_path):
    for arguments, code in ((["--target", "nope"], "unknown-target"), (["--rules", "nope"], "unknown-rule")):
        done = fuse(with_broken_files, "-o", tmp_path / "out", "--keep-going", "--json", *arguments)
        assert (done.exit, done.document["error"]["code"], done.document["sites"]) == (1, code, [])
    done = fuse(with_broken_files / "vision", "-o", tmp_path / "out", "--keep-going", "--json")
    assert (done.exit, done.document["error"]["code"], left_behind(tmp_path)) == (1, "not-onnx", ["in"])
    done = fuse("rollback", with_broken_files / "vision", "-o", tmp_path / "out", "--json")
    assert (done.exit, done.document["error"]["code"], left_behind(tmp_path)) == (1, "not-onnx", ["in"])


def test_missing_weights_leave_nothing(fuse, exported, tmp_path):
    source = copy(exported, tmp_path / "in")
    (source / "prefill/weights.bin").unlink()
    done = fuse(source, "-o", tmp_path / "out", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "external-data-missing")
    assert left_behind(tmp_path) == ["in"]


def test_a_bug_leaves_nothing(exported, tmp_path, monkeypatch):
    def broken(options, progress):
        if options.model.parent.name == "prefill":
            raise RuntimeError("a bug")
        return real(options, progress)

    real = pipeline.fuse
    monkeypatch.setattr(pipeline, "fuse", broken)
    options = folder.FuseOptions(exported, tmp_path / "out")
    with pytest.raises(RuntimeError):
        folder.fuse_folder(options, SilentProgress())
    assert left_behind(tmp_path) == []


def test_outputs_that_cannot_be_used(fuse, exported, tmp_path):
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "a").write_text("a")
    file.write_text("a")
    source = copy(exported, tmp_path / "in")
    before = contents(source)
    cases = {
        full: "output-not-empty",
        file: "output-not-a-folder",
        source: "output-is-input",
        source / "out": "output-is-input",
        tmp_path: "output-is-input",
        tmp_path / "missing/out": "output-folder-missing",
    }
    for output, code in cases.items():
        done = fuse(source, "-o", output, "--json")
        assert (done.exit, done.document["error"]["code"]) == (1, code), output
    assert contents(source) == before
    assert left_behind(tmp_path) == ["file", "full", "in"]


def test_an_empty_folder_may_be_the_output(fuse, exported, tmp_path):
    (tmp_path / "out").mkdir()
    assert fuse(exported, "-o", tmp_path / "out").exit == 0
    assert contents(tmp_path / "out").keys() == contents(exported).keys()


def test_a_parent_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError) as raised:
        check_output_folder(tmp_path / "in", tmp_path / "out")
    assert raised.value.code == "output-not-writable"


def test_folders_without_models_and_with_links(fuse, exported, tmp_path):
    (tmp_path / "empty").mkdir()
    done = fuse(tmp_path / "empty", "-o", tmp_path / "out", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "no-models")
    source = copy(exported, tmp_path / "in")
    (source / "linked").symlink_to(source / "vision")
    done = fuse(source, "-o", tmp_path / "out", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "folder-link")
    (source / "linked").unlink()
    (source / "lost").symlink_to(source / "nothing")
    done = fuse(source, "-o", tmp_path / "out", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "not-a-file")


def test_a_stage_is_gone_unless_it_is_published(tmp_path):
    with staged(tmp_path / "in", tmp_path / "out") as stage:
        (stage.path / "a").write_text("a")
    assert left_behind(tmp_path) == []
