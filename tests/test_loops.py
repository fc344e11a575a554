"""The rule as a loop: matched where every token is covered, refused where some may not be."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from deltafuse import pipeline
from deltafuse.match import FuseReport
from deltafuse.options import FuseOptions, SilentProgress
from exports import export

pytestmark = pytest.mark.usefixtures("one_worker")


def fuse(path: Path, output: Path) -> FuseReport:
    return pipeline.fuse(FuseOptions(path, output), SilentProgress())


@pytest.mark.parametrize("name", ["loop_list", "loop_in_place"])
def test_a_loop_over_all_tokens_is_the_rule(name: str, tmp_path: Path) -> None:
    report = fuse(export(name).path, tmp_path / "out.onnx")
    (site,) = report.sites
    assert (report.exit, site.status, site.op) == (0, "fused", "ChunkGatedDeltaRule")
    assert site.match is not None
    assert site.match.form == "loop"
    assert site.match.valid_tokens is not None
    assert (site.match.valid_tokens.low, site.match.valid_tokens.above) == (1, None)
    fused = onnx.load(tmp_path / "out.onnx")
    assert "Loop" not in {node.op_type for node in fused.graph.node}


@pytest.mark.parametrize(
    ("name", "code"),
    [("nm_loop_short", "trip-count"), ("nm_loop_gated", "position-gate"), ("nm_loop_clamped", "piecewise")],
)
def test_a_loop_that_may_miss_something_is_refused(name: str, code: str, tmp_path: Path) -> None:
    report = fuse(export(name).path, tmp_path / "out.onnx")
    assert report.exit == 3
    assert [site.reason.code for site in report.sites if site.reason is not None] == [code]
    assert not (tmp_path / "out.onnx").exists()


def early_exit(path: Path) -> Path:
    """Lets the list loop end where its own state says so."""
    model = onnx.load(export("loop_list").path)
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    body = next(attribute.g for attribute in loop.attribute if attribute.name == "body")
    state = body.output[1].name
    producer = next(node for node in body.node if body.output[0].name in node.output)
    producer.output[:] = ["unused_condition"]
    body.node.append(helper.make_node("ReduceMax", [state], ["top"], keepdims=0))
    limit = helper.make_tensor("limit", onnx.TensorProto.FLOAT, [], [1e9])
    body.node.append(helper.make_node("Constant", [], ["limit"], value=limit))
    body.node.append(helper.make_node("Less", ["top", "limit"], [body.output[0].name]))
    onnx.save(model, path)
    return path


def test_a_loop_that_may_end_early_is_refused(tmp_path: Path) -> None:
    report = fuse(early_exit(tmp_path / "early.onnx"), tmp_path / "out.onnx")
    assert report.exit == 3
    assert [site.reason.code for site in report.sites if site.reason is not None] == ["early-exit"]


def reversed_reads(path: Path) -> Path:
    """Reads the keys from the last token to the first."""
    model = onnx.load(export("loop_list").path)
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    body = next(attribute.g for attribute in loop.attribute if attribute.name == "body")
    counter = body.input[0].name
    reads = [node for node in body.node if node.op_type == "Gather" and counter in node.input]
    one = helper.make_tensor("one", onnx.TensorProto.INT64, [], [-1])
    body.node.insert(0, helper.make_node("Constant", [], ["minus_one"], value=one))
    body.node.insert(1, helper.make_node("Sub", ["minus_one", counter], ["from_the_end"]))
    reads[-1].input[1] = "from_the_end"
    onnx.save(model, path)
    return path


def test_a_loop_in_the_wrong_direction_is_refused(tmp_path: Path) -> None:
    report = fuse(reversed_reads(tmp_path / "reversed.onnx"), tmp_path / "out.onnx")
    assert report.exit == 3
    assert [site.reason.code for site in report.sites if site.reason is not None] == ["few-tokens-only"]
