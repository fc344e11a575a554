"""The plan file: a dry run writes it, a run does what it says and nothing else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import graphs
from conftest import Outcome
from deltafuse.plan_file import ACTIONS, OPTIONS, SCHEMA
from deltafuse.rollback import rollback
from deltafuse.verify import verify
from exports import export

Fuse = Callable[..., Outcome]
DECODE, PREFILL, FOUR, MERGED = (
    export(name).path for name in ("full_decode_ts17", "full_prefill_ts17", "rec_ts17_B4", "two_sizes_ts17")
)
SITES = ["layers.0", "layers.1", "layers.2"]


def written(fuse: Fuse, folder: Path, model: Path, *options: object) -> tuple[Path, dict[str, Any], int]:
    """The plan of a dry run, as a file and as it stands there, and the exit."""
    path = folder / "plan.json"
    done = fuse(model, "--dry-run", "--plan", path, *options)
    return path, json.loads(path.read_text()), done.exit


def edited(path: Path, plan: dict[str, Any], **sites: dict[str, Any]) -> Path:
    """The plan with some keys of some sites changed; ``layers_0`` stands for ``layers.0``."""
    for entry in plan["sites"]:
        entry.update(sites.get(entry["name"].replace(".", "_"), {}))
    path.write_text(json.dumps(plan))
    return path


def refused(fuse: Fuse, code: str, model: Path, plan: Path, *options: object) -> str:
    output = plan.with_name("refused.onnx")
    done = fuse(model, "--plan", plan, "-o", output, *options, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, code)
    assert not output.exists()
    return done.document["error"]["text"]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (DECODE, ()),
        (PREFILL, ()),
        (DECODE, ("--target", "ort")),
        (DECODE, ("--batch", "2", "--pin", "past_seq_len=5")),
        (DECODE, ("--op", "cgdr", "--sites", "layers.[01]")),
        (MERGED, ("--no-pin", "--skip-sites", "*.0")),
        (PREFILL, ("--form", "chunk", "--target", "onnx", "--rules", "gated_delta_rule")),
    ],
)
def test_an_unedited_plan_gives_the_bytes_of_the_plain_run(
    fuse: Fuse, tmp_path: Path, model: Path, options: tuple[str, ...]
) -> None:
    path, plan, code = written(fuse, tmp_path, model, *options)
    assert code == 0
    plain, planned = tmp_path / "plain.onnx", tmp_path / "planned.onnx"
    assert fuse(model, "-o", plain, *options).exit == 0
    assert fuse(model, "--plan", path, "-o", planned).exit == 0
    assert planned.read_bytes() == plain.read_bytes()
    assert "fuse" in {site["action"] for site in plan["sites"]}


@pytest.mark.parametrize("skipped", [set(some) for n in (1, 2) for some in itertools.combinations(SITES, n)])
def test_skipping_is_skip_sites(fuse: Fuse, tmp_path: Path, skipped: set[str]) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE)
    edited(path, plan, **{name.replace(".", "_"): {"action": "skip"} for name in skipped})
    plain, planned = tmp_path / "plain.onnx", tmp_path / "planned.onnx"
    options = [word for name in skipped for word in ("--skip-sites", name)]
    assert fuse(DECODE, "-o", plain, *options).exit == 0
    done = fuse(DECODE, "--plan", path, "-o", planned, "--json")
    assert planned.read_bytes() == plain.read_bytes()
    notes = {site["name"]: site["status_note"] for site in done.document["sites"]}
    assert {name for name, note in notes.items() if note} == skipped
    assert {notes[name] for name in skipped} == {"left out: the plan skips it, or does not list it"}


def test_a_site_that_is_not_listed_is_left_alone(fuse: Fuse, tmp_path: Path) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE)
    del plan["sites"][1]
    done = fuse(DECODE, "--plan", edited(path, plan), "-o", tmp_path / "out.onnx", "--json")
    assert [site["status"] for site in done.document["sites"]] == ["fused", "match", "fused"]


def test_a_plan_that_skips_all_writes_nothing(fuse: Fuse, tmp_path: Path) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE)
    edited(path, plan, **{name.replace(".", "_"): {"action": "skip"} for name in SITES})
    assert fuse(DECODE, "--plan", path, "-o", tmp_path / "out.onnx").exit == 3
    assert not (tmp_path / "out.onnx").exists()


def test_each_site_may_have_its_operator(fuse: Fuse, tmp_path: Path) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE)
    assert {site["op"] for site in plan["sites"]} == {"RecurrentGatedDeltaRule"}
    edited(path, plan, layers_0={"op": "ChunkGatedDeltaRule"}, layers_1={"op": "cgdr"}, layers_2={"op": None})
    output = tmp_path / "out.onnx"
    done = fuse(DECODE, "--plan", path, "-o", output, "--json")
    assert [site["op"] for site in done.document["sites"]] == [
        "ChunkGatedDeltaRule", "ChunkGatedDeltaRule", "RecurrentGatedDeltaRule",
    ]  # fmt: skip
    assert verify(DECODE, output).exit == 0
    rollback(output, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == DECODE.read_bytes()


def test_targets_that_one_runtime_runs_may_stand_together(fuse: Fuse, tmp_path: Path) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE, "--target", "ort")
    assert {"layers.0", "layers.0.causal_conv"} <= {site["name"] for site in plan["sites"]}
    for entry in plan["sites"]:
        if entry["name"].startswith("layers.1"):
            entry["target"] = "onnx"
    output = tmp_path / "out.onnx"
    done = fuse(DECODE, "--plan", edited(path, plan), "-o", output, "--json")
    assert (done.exit, done.document["target"]) == (0, "onnx, ort")
    model = onnx.load(output)
    found = {(node.op_type, node.domain) for node in model.graph.node if "ttention" in node.op_type}
    assert found == {("LinearAttention", ""), ("LinearAttention", "com.microsoft")}
    assert {(entry.domain, entry.version) for entry in model.opset_import} >= {("", 27), ("com.microsoft", 1)}
    assert verify(DECODE, output).exit == 0
    rollback(output, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == DECODE.read_bytes()


@pytest.mark.parametrize("other", ["ort", "ascend-a2"])
def test_targets_that_no_device_runs_together_are_refused(fuse: Fuse, tmp_path: Path, other: str) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE)
    text = refused(fuse, "plan-targets", DECODE, edited(path, plan, layers_1={"target": other}))
    assert f"layers.1 for {other}" in text
    assert "give all sites one target" in text


def test_all_sites_may_have_another_target(fuse: Fuse, tmp_path: Path) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE)
    edited(path, plan, **{name.replace(".", "_"): {"target": "ascend-a2", "op": None} for name in SITES})
    plain, planned = tmp_path / "plain.onnx", tmp_path / "planned.onnx"
    assert fuse(DECODE, "-o", plain, "--target", "ascend-a2").exit == 0
    assert fuse(DECODE, "--plan", path, "-o", planned).exit == 0
    assert planned.read_bytes() == plain.read_bytes()


def test_what_is_refused_stays_refused_until_it_is_skipped(fuse: Fuse, tmp_path: Path) -> None:
    parts = [onnx.compose.add_prefix(graphs.step(*edits), p) for edits, p in (((), "a."), (BATCH_OF_TWO, "b."))]
    model = graphs.save(onnx.compose.merge_models(*parts, io_map=[]), tmp_path)
    path, plan, code = written(fuse, tmp_path, model)
    assert code == 4
    actions = {site["action"]: site for site in plan["sites"]}
    assert set(actions) == {"fuse", "refused"}
    assert actions["refused"]["reason"]["code"] == "static-batch"
    assert actions["refused"]["reason"]["fix"]
    output, plain = tmp_path / "out.onnx", tmp_path / "plain.onnx"
    assert fuse(model, "--plan", path, "-o", output).exit == 4
    assert not output.exists()
    actions["refused"]["action"] = "skip"
    assert fuse(model, "--plan", edited(path, plan), "-o", output).exit == 0
    assert fuse(model, "-o", plain, "--keep-going").exit == 0
    assert output.read_bytes() == plain.read_bytes()


BATCH_OF_TWO = (("[1,1,4", "[2,1,4"), ("[1,4,5,3]", "[2,4,5,3]"))


def test_a_changed_model_is_refused(fuse: Fuse, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(DECODE.read_bytes())
    path, _, _ = written(fuse, tmp_path, model)
    changed = onnx.load(model)
    changed.doc_string = "changed"
    onnx.save(changed, model)
    told = refused(fuse, "plan-model", model, path)
    assert f"was made of ({model}), or has changed" in told
    assert "--dry-run --plan FILE" in told


@pytest.mark.parametrize(
    ("code", "change", "says"),
    [
        ("plan-version", {"schema": SCHEMA + 1}, "update deltafuse"),
        ("plan-file", {"schema": "1"}, "no plan"),
        ("plan-file", {"model": {}}, "write it again"),
        ("plan-file", {"sites": {}}, "must be a list"),
        ("plan-file", {"options": []}, "must be an object"),
        ("plan-file", {"options": {"colour": 1}}, "it may have target"),
        ("plan-file", {"options": {"batch": "two"}}, "batch cannot be 'two'"),
        ("plan-file", {"options": {"batch": 0}}, "whole number of 1 or more"),
        ("plan-target", {"options": {"target": "abacus"}}, "ascend-310p"),
    ],
)
def test_a_plan_that_cannot_be_applied(
    fuse: Fuse, tmp_path: Path, code: str, change: dict[str, Any], says: str
) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE)
    assert says in refused(fuse, code, DECODE, edited(path, plan | change))


@pytest.mark.parametrize(
    ("code", "change", "says"),
    [
        ("plan-op", {"op": "mlp"}, "give one of RecurrentGatedDeltaRule, ChunkGatedDeltaRule"),
        ("plan-target", {"target": "abacus"}, "layers.1"),
        ("plan-site", {"name": "layers.7"}, "it has: layers.0, layers.1, layers.2"),
        ("plan-file", {"name": "layers.0"}, "listed twice"),
        ("plan-file", {"action": "leave"}, "fuse, skip, refused"),
        ("plan-file", {"acton": "skip"}, "there is no key 'acton'"),
        ("plan-file", {"op": 3}, "are names, or null"),
        ("plan-file", {"name": None}, "an object with a name"),
    ],
)
def test_an_entry_that_cannot_be_applied(
    fuse: Fuse, tmp_path: Path, code: str, change: dict[str, Any], says: str
) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE)
    assert says in refused(fuse, code, DECODE, edited(path, plan, layers_1=change))


def test_an_expression_has_one_operator(fuse: Fuse, tmp_path: Path) -> None:
    path, plan, _ = written(fuse, tmp_path, DECODE, "--target", "ort")
    text = refused(fuse, "plan-op", DECODE, edited(path, plan, layers_1_causal_conv={"op": "Conv"}))
    assert "can become CausalConvWithState" in text


def test_files_that_are_no_plan(fuse: Fuse, tmp_path: Path) -> None:
    assert "--dry-run --plan" in refused(fuse, "plan-file", DECODE, tmp_path / "nowhere.json")
    (tmp_path / "torn.json").write_text('{"schema": 1,')
    assert "is no JSON" in refused(fuse, "plan-file", DECODE, tmp_path / "torn.json")
    path, _, _ = written(fuse, tmp_path, DECODE)
    assert "check the path" in refused(fuse, "missing-file", tmp_path / "no.onnx", path)


@pytest.mark.parametrize(
    "option", [("--sites", "a"), ("--op", "cgdr"), ("--batch", "2"), ("--pin", "a=1"), ("--no-pin",)]
)
def test_options_that_a_plan_holds_are_not_given_beside_it(fuse: Fuse, tmp_path: Path, option: tuple[str, ...]) -> None:
    path, _, _ = written(fuse, tmp_path, DECODE)
    assert f"{option[0]} beside --plan" in refused(fuse, "usage", DECODE, path, *option)


def test_a_plan_is_never_written_over_the_model_nor_of_a_folder(fuse: Fuse, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(DECODE.read_bytes())
    done = fuse(model, "--dry-run", "--plan", model, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "output-is-input")
    assert model.read_bytes() == DECODE.read_bytes()
    assert "path of a model" in fuse(tmp_path, "--dry-run", "--plan", tmp_path / "p.json").err


def test_no_site_no_plan(fuse: Fuse, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    outcome = fuse(export("nm_softmax").path, "--dry-run", "--plan", path)
    assert outcome.exit == 3
    assert "no plan was written: there is nothing to fuse" in " ".join(outcome.out.split())
    assert not path.exists()


def test_what_stands_in_a_plan(fuse: Fuse, tmp_path: Path) -> None:
    _, plan, _ = written(fuse, tmp_path, DECODE)
    assert list(plan) == ["schema", "model", "options", "sites"]
    assert tuple(plan["options"]) == OPTIONS
    assert [site["name"] for site in plan["sites"]] == SITES
    assert {site["action"] for site in plan["sites"]} < set(ACTIONS)
