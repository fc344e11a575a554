"""``fuse rollback FUSED_DIR -o DIR`` and ``fuse verify DIR FUSED_DIR``."""

from __future__ import annotations

import onnx
import pytest
from onnx import numpy_helper

from deltafuse.cli import main
from folders import contents, copy, edit, export_folder


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder, and what fuse made of it."""
    root = tmp_path_factory.mktemp("both")
    export_folder(root / "in")
    assert main([str(root / "in"), "-o", str(root / "fused"), "--json"]) == 0
    return root / "in", root / "fused"


def outcomes(done):
    return {model["path"].partition("/")[0]: model["outcome"] for model in done.document["models"]}


def left_behind(folder):
    return sorted(path.name for path in folder.iterdir())


def test_rollback_gives_back_every_byte(fuse, both, tmp_path):
    source, fused = both
    before = contents(fused)
    done = fuse("rollback", fused, "-o", tmp_path / "back", "--json")
    assert (done.exit, done.document["output"]) == (0, str(tmp_path / "back"))
    assert outcomes(done) == {"prefill": "restored", "decode": "restored", "vision": "unchanged"}
    assert done.document["models"][0]["output"] == str(tmp_path / "back/decode/model.onnx")
    assert contents(tmp_path / "back") == contents(source)
    assert contents(fused) == before
    assert left_behind(tmp_path) == ["back"]


def test_rollback_says_what_it_did(fuse, both, tmp_path):
    lines = fuse("rollback", both[1], "-o", tmp_path / "back").out.splitlines()
    assert lines[1].split() == ["decode/model.onnx", "restored", "layers.0,", "layers.1,", "layers.2"]
    assert lines[3].split() == ["vision/model.onnx", "unchanged"]
    assert lines[-1] == f"wrote {tmp_path / 'back'}"


def test_rollback_of_some_sites(fuse, both, tmp_path):
    done = fuse("rollback", both[1], "-o", tmp_path / "back", "--sites", "layers.1", "--json")
    assert done.exit == 0
    assert [model.get("remaining") for model in done.document["models"]] == [["layers.0", "layers.2"]] * 2 + [None]
    refused = fuse("rollback", both[1], "-o", tmp_path / "more", "--sites", "layers.9", "--json")
    assert (refused.exit, refused.document["error"]["code"]) == (1, "no-record")
    assert left_behind(tmp_path) == ["back"]


def test_rollback_with_records_beside_the_models(fuse, both, tmp_path):
    source, _ = both
    assert fuse(source, "-o", tmp_path / "fused", "--record", "sidecar").exit == 0
    assert (tmp_path / "fused/decode/model.onnx.rollback").is_file()
    assert fuse("rollback", tmp_path / "fused", "-o", tmp_path / "back").exit == 0
    assert contents(tmp_path / "back") == contents(source)
    done = fuse("rollback", tmp_path / "fused", "-o", tmp_path / "more", "--sidecar", tmp_path / "x", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "usage")


def test_rollback_needs_the_records(fuse, both, tmp_path):
    source, _ = both
    assert fuse(source, "-o", tmp_path / "fused", "--record", "none").exit == 0
    for folder in (tmp_path / "fused", source):
        done = fuse("rollback", folder, "-o", tmp_path / "back", "--json")
        assert (done.exit, done.document["error"]["code"]) == (1, "no-record")
    assert left_behind(tmp_path) == ["fused"]


def test_verify_compares_each_model(fuse, both):
    done = fuse("verify", *both, "--json")
    assert done.exit == 0
    assert outcomes(done) == {"prefill": "equal", "decode": "equal", "vision": "unchanged"}
    prefill = done.document["models"][1]
    assert [site["verdict"] for site in prefill["sites"]] == ["equal"] * 3
    assert prefill["network"]["verdict"] == "passes"
    lines = fuse("verify", *both, "--level", "site").out.splitlines()
    assert lines[1].split()[:2] == ["decode/model.onnx", "equal"]
    assert lines[-1] == "2 of 2 fused models equal, 1 unchanged, 0 other files differ"
    values = "cosine at least 0.999, NRMSE at most 0.02, largest difference at most 1"
    assert lines[-2] == f"the bar (FP16 boundary, ascend-310p): {values}"


def test_verify_finds_a_wrong_model(fuse, both, tmp_path):
    source, fused = both
    wrong = copy(fused, tmp_path / "wrong")

    def scale(model):
        for node in model.graph.node:
            for entry in node.attribute:
                if entry.name == "scale_value":
                    entry.f *= 2

    edit(wrong / "decode/model.onnx", scale)
    done = fuse("verify", source, wrong, "--level", "site", "--json")
    assert done.exit == 5
    assert outcomes(done) == {"prefill": "equal", "decode": "differs", "vision": "unchanged"}
    shown = fuse("verify", source, wrong, "--level", "site")
    assert (shown.exit, "decode/model.onnx: layers.0, layers.1, layers.2 (" in shown.out) == (5, True)


def test_verify_finds_other_weights(fuse, both, tmp_path):
    source, fused = both
    wrong = copy(fused, tmp_path / "wrong")
    (wrong / "vision/weights.bin").write_bytes(b"\1" * (wrong / "vision/weights.bin").stat().st_size)
    done = fuse("verify", source, wrong, "--level", "site", "--json")
    assert (done.exit, done.document["differing"]) == (5, ["vision/weights.bin"])


@pytest.fixture
def broken(both, tmp_path):
    """The same two folders, with a file in both that is no model, as ``--keep-going`` leaves it."""
    folders = copy(both[0], tmp_path / "in"), copy(both[1], tmp_path / "fused")
    for folder in folders:
        (folder / "broken.onnx").write_bytes((both[0] / "decode/model.onnx").read_bytes()[:5000])
    return folders


def test_what_cannot_be_read_is_no_equal_model(fuse, broken):
    done = fuse("verify", *broken, "--level", "site")
    lines = done.out.splitlines()
    told = "broken.onnx unreadable not compared: truncated; the same file in both folders"
    assert " ".join(lines[1].split()) == told
    assert lines[-1] == "2 of 2 fused models equal, 1 unchanged, 1 unreadable, 0 other files differ"
    assert done.err.startswith(f"fuse: {broken[0] / 'broken.onnx'} is cut short")
    assert done.exit == 1
    document = fuse("verify", *broken, "--level", "site", "--json").document
    models = {model["path"]: model for model in document["models"]}
    assert {name: (one["outcome"], one["same_bytes"]) for name, one in models.items()} == {
        "broken.onnx": ("unreadable", True),
        "decode/model.onnx": ("equal", False),
        "prefill/model.onnx": ("equal", False),
        "vision/model.onnx": ("unchanged", True),
    }
    assert document["exit"] == 1
    assert document["error"] == models["broken.onnx"]["error"]


def test_verify_goes_on_behind_what_cannot_be_compared(fuse, broken):
    unfused, fused = broken
    (fused / "broken.onnx").write_bytes(b"no model")
    done = fuse("verify", unfused, fused, "--level", "site", "--json")
    assert done.exit == 1
    assert [model["outcome"] for model in done.document["models"]] == ["unreadable", "equal", "equal", "unchanged"]
    assert not done.document["models"][0]["same_bytes"]
    # Not fused, and not what it was: it is named, and the others are compared.
    edit(fused / "vision/model.onnx", lambda model: setattr(model.graph, "doc_string", "edited"))
    shown = fuse("verify", unfused, fused, "--level", "site")
    assert shown.exit == 1
    assert shown.out.splitlines()[-1] == "2 of 2 fused models equal, 1 unreadable, 1 failed, 0 other files differ"
    assert "not compared: nothing-fused; not the same file in both folders" in shown.out
    # What differs is the verdict, whatever else could not be compared.
    (fused / "vision/weights.bin").write_bytes(b"1")
    differs = fuse("verify", unfused, fused, "--level", "site", "--json")
    assert (differs.exit, differs.document["error"]) == (5, None)


def test_a_fused_file_that_is_cut_short_is_not_taken_for_one_that_was_copied(fuse, both, tmp_path):
    cut = copy(both[1], tmp_path / "cut")
    path = cut / "decode/model.onnx"
    path.write_bytes(path.read_bytes()[:-100])
    done = fuse("rollback", cut, "-o", tmp_path / "back", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "truncated")
    assert outcomes(done) == {"decode": "failed", "prefill": "restored", "vision": "unchanged"}


def test_what_verify_cannot_compare(fuse, both, tmp_path):
    source, fused = both
    model = source / "decode/model.onnx"
    lacking = copy(fused, tmp_path / "lacking")
    (lacking / "decode/model.onnx").unlink()
    cases = [
        ((source, source), "nothing-fused"),
        ((source, lacking), "folder-mismatch"),
        ((model, fused), "usage"),
        ((source, fused, "--inputs", "x.npz"), "usage"),
    ]
    for arguments, code in cases:
        done = fuse("verify", *arguments, "--json")
        assert (done.exit, done.document["error"]["code"]) == (1, code), arguments


def test_an_edited_model_is_put_back_site_by_site(fuse, both, tmp_path):
    source, fused = both
    edited = copy(fused, tmp_path / "edited")

    def note(model):
        model.graph.doc_string = "edited"

    edit(edited / "prefill/model.onnx", note)
    done = fuse("rollback", edited, "-o", tmp_path / "back", "--json")
    assert done.exit == 0
    assert [model.get("mode") for model in done.document["models"]] == ["bytes", "in-place", None]
    back = onnx.load(tmp_path / "back/prefill/model.onnx")
    assert back.graph.doc_string == "edited"
    assert numpy_helper.to_array(back.graph.initializer[0]).size > 0
    assert len(back.graph.node) == len(onnx.load(source / "prefill/model.onnx").graph.node)
