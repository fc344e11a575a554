"""The bars of verify: which row a file is held to, what the user sets, which part failed."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import helper

from deltafuse import pipeline
from deltafuse.errors import UserError
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.shapes import Shapes
from deltafuse.verify_bars import KINDS, Bar, Overrides, bar, bar_of, target_of
from deltafuse.wire import scan
from exports import export

pytestmark = pytest.mark.usefixtures("one_worker")


def fused(tmp_path, name="full_decode_ts17", **options):
    path = tmp_path / "fused.onnx"
    report = pipeline.fuse(FuseOptions(export(name).path, path, **options), SilentProgress())
    assert report.exit == 0
    return path


def found(path, **options) -> tuple[str, str]:
    one = bar_of(Shapes(scan(path)), **options)
    return one.kind, one.target


@pytest.mark.parametrize(
    ("target", "boundary", "wanted"),
    [
        ("ascend-310p", None, ("fp16", "ascend-310p")),
        ("ascend-a2", "bf16", ("bf16", "ascend-a2")),
        ("ort", None, ("reordered", "ort")),
        ("onnx", "fp16", ("fp16", "onnx")),
    ],
)
def test_the_row_follows_from_the_fused_nodes(tmp_path, target, boundary, wanted):
    path = fused(tmp_path, "full_prefill_ts17", target=target, boundary=boundary)
    assert found(path) == wanted
    assert found(path, rounding=False) == ("reordered", "")
    assert target_of(scan(path).graph) == wanted[1]


def test_a_graph_in_half_precision_has_halves_in_its_last_digit_without_rounding_too(tmp_path):
    path = fused(tmp_path, "full_decode_ts17_half")
    assert found(path, rounding=False) == ("fp16", "")


def test_quantised_weights_are_a_kind_of_their_own(tmp_path):
    path = fused(tmp_path)
    model = onnx.load(path)
    node = helper.make_node("DequantizeLinear", ["a", "b"], ["c"])
    model.graph.node.append(node)
    onnx.save(model, path)
    assert found(path) == ("quantised", "ascend-310p")


def test_a_file_without_fused_nodes_has_no_target():
    assert found(export("full_decode_ts17").path) == ("reordered", "")


def test_the_row_of_float16_is_the_exporters():
    one = bar("fp16", "ascend-310p")
    assert (one.cosine, one.nrmse, one.max_abs, one.tokens) == (0.999, 0.02, 1.0, 2)
    assert one.title == "FP16 boundary, ascend-310p"
    assert bar("fp16", "ort").nrmse < one.nrmse
    assert bar("reordered").tokens is None
    assert {bar(kind).kind for kind in KINDS} == set(KINDS)


def test_exact_is_exact():
    assert bar("exact").met(1.0, 0.0, 0.0)
    assert not bar("exact").met(1.0, 0.0, 1e-30)


def test_the_user_sets_other_bars():
    one = bar("fp16", "ascend-310p", Overrides(nrmse=0.5))
    assert (one.nrmse, one.cosine) == (0.5, 0.999)
    assert bar("fp16", overrides=Overrides(0.1, 0.2, 0.3)) == Bar(0.1, 0.2, 0.3, 0.02, 2, "fp16", "")


@pytest.mark.parametrize(
    ("bars", "says"),
    [
        ({"cosine": 2.0}, "cosine 2.0: give a number from 0 to 1"),
        ({"cosine": float("nan")}, "cosine nan"),
        ({"nrmse": -0.1}, "nrmse -0.1: give a number of 0 or more"),
        ({"nrmse": float("nan")}, "nrmse nan"),
        ({"max_abs": float("inf")}, "max_abs inf"),
    ],
)
def test_bars_that_say_nothing_are_refused(bars, says):
    with pytest.raises(UserError, match=re.escape(says)) as error:
        Overrides(**bars)
    assert error.value.code == "usage"


def test_what_failed_is_named():
    one = bar("fp16")
    assert one.failed(1.0, 0.0, 0.0) == ()
    assert one.failed(0.99, 0.03, 2.0) == ("cosine", "nrmse", "max_abs")
    assert one.told(0.99, 0.0, 2.0) == "cosine 0.99 (at least 0.999), largest difference 2 (at most 1)"
    assert one.failed(np.nan, np.nan, np.nan) == ("cosine", "nrmse", "max_abs")
    assert one.unbounded().failed(1.0, 0.0, 1e9) == ()


def test_bars_of_the_command_reach_every_level(fuse, tmp_path):
    path = fused(tmp_path)
    done = fuse("verify", export("full_decode_ts17").path, path, "--max-abs", "1e-9", "--json")
    assert done.exit == 5
    outputs = done.document["network"]["outputs"]
    assert {output["verdict"] for output in outputs} == {"differs"}
    assert outputs[0]["failed"] == ["max_abs"]
    assert "(at most 1e-09)" in outputs[0]["reason"]["text"]
    assert fuse("verify", export("full_decode_ts17").path, path, "--max-abs", "10").exit == 0
