"""``fuse inspect`` of a file that is fused already: its fused nodes as sites, and what its record tells of them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import bodied
import graphs
from conftest import Outcome
from deltafuse.patch import decode, encode, from_text, to_text
from exports import export

pytestmark = pytest.mark.usefixtures("one_worker")

Fuse = Callable[..., Outcome]
DECODE, PREFILL = (export(name).path for name in ("full_decode_ts17", "full_prefill_ts17"))


def details(page: Path) -> str:
    return (page.read_text().split("<main>")[1]).split("</main>")[0]


@pytest.mark.parametrize("target", ["ascend-310p", "ort", "onnx"])
@pytest.mark.parametrize("model", [DECODE, PREFILL])
def test_sites_are_those_that_were_fused(fuse: Fuse, tmp_path: Path, model: Path, target: str) -> None:
    fused = tmp_path / "fused.onnx"
    made = fuse(model, "-o", fused, "--target", target, "--json").document
    done = fuse("inspect", fused, "--json")
    seen = done.document
    nodes = len(onnx.load(fused).graph.node)
    assert (done.exit, seen["nodes_before"], seen["nodes_after"]) == (3, nodes, nodes)
    # Nodes that a later opset takes in another form are counted as they are written.
    assert made["nodes_after"] == nodes
    found = {site["name"]: site for site in seen["sites"]}
    assert (len(seen["sites"]), set(found)) == (len(made["sites"]), {site["name"] for site in made["sites"]})
    for was in made["sites"]:
        site = found[was["name"]]
        same = ("status", "op", "emitted", "nodes_added", "inside")
        assert {key: site[key] for key in same} == {key: was[key] for key in same}
        held = site["held"]
        assert sum(held["replaced"].values()) == site["nodes"] == was["nodes_removed"]
        roles = was["roles"]
        names = {port["name"]: port for port in (*held["inputs"], *held["outputs"])}
        noted = [note for note in was["notes"] if note.startswith("float16_boundary: ")]
        rounded = noted[0].partition(": ")[2].removesuffix(" rounded to float16").split(", ") if noted else []
        told = [name.replace("initial_state", "state") for name in (one["operand"] for one in held["rounded"])]
        assert sorted(told) == sorted(rounded)
        assert {(one["was"], one["now"]) for one in held["rounded"]} <= {("float32", "float16")}
        if was["form"] != "expression":
            assert {"query", "key", "value", "g", "beta"} <= set(names)
            assert f"{was['scale']:.6g}" in {held["attributes"].get("scale"), held["attributes"].get("scale_value")}
            assert len(roles["query"]["shape"]) >= 3
        assert was["held"] is None
    axes = [{**axis, "why": ""} for axis in made["pinned"]]
    assert sorted(map(str, seen["pinned"])) == sorted(map(str, axes))


def test_shapes_are_those_of_the_node(fuse: Fuse, tmp_path: Path) -> None:
    fuse(DECODE, "-o", tmp_path / "fused.onnx")
    shown = fuse("inspect", tmp_path / "fused.onnx").out
    assert "takes query float16 [1, 2, 16], key float16 [1, 2, 16], value float16 [1, 4, 16], " in shown
    assert "; gives out float16 [1, 4, 16], final_state float16 [1, 4, 16, 16]\n" in shown
    assert ": attributes: scale_value = 0.25\n" in shown
    assert ": rounded: query, key, value, beta, state, out, final_state from float32 to float16\n" in shown
    assert re.search(r": replaced: \d+ nodes: \d+ Constant, ", shown)
    assert "\npinned: batch = 1 in input_ids[0], " in shown
    row = next(line for line in shown.splitlines() if line.startswith("layers.1 "))
    assert row.split()[:3] == ["layers.1", "fused", "RecurrentGatedDeltaRule"]
    detail = fuse("inspect", tmp_path / "fused.onnx", "--site", "layers.1").out.splitlines()
    assert "  node: layers.1/gated_delta_rule/RecurrentGatedDeltaRule" in detail
    assert "  query: layers.1/gated_delta_rule/query/cast float16 [1, 2, 16]" in detail
    assert "  attribute scale_value: 0.25" in detail


def test_the_command_that_is_told_gives_the_original_back(fuse: Fuse, tmp_path: Path) -> None:
    fused = tmp_path / "my fused.onnx"
    fuse(DECODE, "-o", fused)
    (command,) = re.findall(r"note: fused before: `(.*)` gives the file back as it was\n", fuse("inspect", fused).out)
    program, *words = shlex.split(command)
    assert program == "fuse"
    assert fuse(*words).exit == 0
    assert Path(words[-1]).read_bytes() == DECODE.read_bytes()


@pytest.mark.parametrize("where", ["sidecar", "none"])
def test_a_record_beside_the_file_tells_as_much_and_none_tells_nothing(
    fuse: Fuse, tmp_path: Path, where: str
) -> None:
    fused = tmp_path / "fused.onnx"
    made = fuse(DECODE, "-o", fused, "--record", where, "--json").document
    done = fuse("inspect", fused, "--json").document
    removed = [site["nodes_removed"] if where == "sidecar" else 0 for site in made["sites"]]
    assert [sum(site["held"]["replaced"].values()) for site in done["sites"]] == removed
    assert {site["op"] for site in done["sites"]} == {"RecurrentGatedDeltaRule"}
    shown = fuse("inspect", fused).out
    if where == "none":
        assert len(done["sites"]) == 3
        assert "note: what the fused nodes replaced is not known (no-record): " in shown
        row = next(line for line in shown.splitlines() if line.startswith("layers.1/gated_delta_rule"))
        assert row.split()[2:] == ["RecurrentGatedDeltaRule", "1"]
        assert "fuse rollback fused" not in shown


def test_a_file_that_was_edited_since_is_told_as_that(fuse: Fuse, tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    made = fuse(DECODE, "-o", fused, "--json").document
    model = onnx.load(fused)
    model.producer_name = "another"
    (node,) = (node for node in model.graph.node if node.name == "layers.1/gated_delta_rule/RecurrentGatedDeltaRule")
    next(attribute for attribute in node.attribute if attribute.name == "type").s = b"Another"
    onnx.save(model, fused)
    done = fuse("inspect", fused, "--json").document
    ops = {site["name"]: site["op"] for site in done["sites"]}
    assert ops["layers.0"] == ops["layers.2"] == "RecurrentGatedDeltaRule"
    assert ops["layers.1"] != "RecurrentGatedDeltaRule"
    (first, *_) = done["sites"]
    assert sum(first["held"]["replaced"].values()) == made["sites"][0]["nodes_removed"]
    assert any("puts its sites back and keeps what was edited since" in note for note in done["notes"])


@pytest.mark.parametrize("text", ["1 !!!", "9 AAAA", "1 AAAA", ""])
def test_a_record_that_cannot_be_read_is_a_note(fuse: Fuse, tmp_path: Path, text: str) -> None:
    fused = tmp_path / "fused.onnx"
    fuse(DECODE, "-o", fused)
    model = onnx.load(fused)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "deltafuse.record")
    entry.value = text
    onnx.save(model, fused)
    done = fuse("inspect", fused, "--json")
    assert (done.exit, len(done.document["sites"])) == (3, 3)
    notes = done.document["notes"]
    assert any(note.startswith("what the fused nodes replaced is not known (record-") for note in notes)


@pytest.mark.parametrize("kind", ["nodes", "pins"])
def test_a_record_whose_nodes_are_none_is_a_note(fuse: Fuse, tmp_path: Path, kind: str) -> None:
    fused = tmp_path / "fused.onnx"
    fuse(DECODE, "-o", fused)
    model = onnx.load(fused)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "deltafuse.record")
    record = decode(from_text(entry.value))
    entries = tuple(
        one._replace(gone=b"\xff" * len(one.removed)) if one.kind == kind else one for one in record.entries
    )
    entry.value = to_text(encode(replace(record, entries=entries)))
    onnx.save(model, fused)
    done = fuse("inspect", fused, "--json")
    assert (done.exit, [bool(site["held"]["replaced"]) for site in done.document["sites"]]) == (3, [False] * 3)
    assert any("not known (record-damaged): " in note for note in done.document["notes"])


def test_a_fused_node_in_a_body_is_told_with_it(fuse: Fuse, tmp_path: Path) -> None:
    path, fused = graphs.save(bodied.chosen(), tmp_path), tmp_path / "fused.onnx"
    made = fuse(path, "-o", fused, "--target", "ort", "--json").document
    assert made["exit"] == 0
    done = fuse("inspect", fused, "--json").document
    known = [(site["name"], site["inside"], site["op"], site["nodes"]) for site in made["sites"] if site["op"]]
    told = [(site["name"], site["inside"], site["op"]) for site in done["sites"]]
    assert told == [one[:3] for one in known]
    assert all(inside for _, inside, _, _ in known)


def test_sites_that_are_left_stand_beside_those_that_are_fused(fuse: Fuse, tmp_path: Path) -> None:
    part, whole = tmp_path / "part.onnx", tmp_path / "whole.onnx"
    fuse(DECODE, "-o", part, "--sites", "layers.0")
    done = fuse("inspect", part, "--json")
    status = {site["name"]: site["status"] for site in done.document["sites"]}
    assert status == {"layers.0": "fused", "layers.1": "match", "layers.2": "match"}
    assert done.exit == 0
    assert {site["name"] for site in fuse(part, "-o", whole, "--json").document["sites"]} == {"layers.1", "layers.2"}
    # The newest record tells of its own sites; the first node is told by its name.
    held = {site["name"]: bool(site["held"]["replaced"]) for site in fuse("inspect", whole, "--json").document["sites"]}
    assert held == {"layers.1": True, "layers.2": True, "layers.0/gated_delta_rule/RecurrentGatedDeltaRule": False}


def test_the_page_shows_them_and_no_change_of_operators(fuse: Fuse, tmp_path: Path) -> None:
    fused, page = tmp_path / "fused.onnx", tmp_path / "page.html"
    fuse(DECODE, "-o", fused)
    assert fuse("inspect", fused, "--html", page).exit == 3
    shown = details(page)
    assert "Operators before and after" not in shown
    assert "rounded: query, key, value, beta, state, out, final_state from float32 to float16" in shown
    assert "fused before this run" in shown
    lines = json.loads(re.findall(r'<script type="application/json" id="lines">(.*?)</script>', page.read_text())[0])
    assert [(line["name"], line["status"]) for line in lines] == [(f"layers.{n}", "fused") for n in range(3)]
