"""Sites that are the rule for some sizes only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import graphs
import loops
from deltafuse.coverage import _follows
from deltafuse.dims import parse
from exports import export
from spelled import series

#: One step whose batch is free.
FREE_BATCH = (("[1,1,4", "[b,1,4"), ("[1,4,5,3]", "[b,4,5,3]"))


@pytest.mark.parametrize("text", ["T", "(T + 15)//16", "3"])
def test_a_trip_count_that_follows(text: str) -> None:
    assert _follows(parse(text))


@pytest.mark.parametrize("text", ["T - T//1500", "Min(T, 5000)", "T + 1", "T//16", "T*U"])
def test_a_trip_count_that_does_not(text: str) -> None:
    assert not _follows(parse(text))


def test_a_trip_count_that_is_not_known_does_not_follow() -> None:
    assert not _follows(None)


def test_free_heads_are_refused(tmp_path: Path) -> None:
    model = graphs.step(
        ("float[1,1,4,5] query, float[1,1,4,5] key, float[1,1,4,3] value, float[1,1,4] g, float[1,1,4] beta",
         "float[1,1,h,5] query, float[1,1,h,5] key, float[1,1,h,3] value, float[1,1,h] g, float[1,1,h] beta"),
        ("float[1,4,5,3] state", "float[1,h,5,3] state"),
    )  # fmt: skip
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["heads-unknown"])


def test_a_site_that_needs_a_batch_is_refused(tmp_path: Path) -> None:
    model = graphs.step(
        *FREE_BATCH,
        ("  out = Unsqueeze(o, time)", "  o1 = Expand(o, two)\n  out = Unsqueeze(o1, time)"),
        ("float scale", "int64[3] two = {2,1,1}, float scale"),
    )
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["batch-one-fails"])


def test_batch_and_tokens_on_one_symbol_never_end_in_a_bug(tmp_path: Path) -> None:
    model = onnx.load(export("loop_list").path)
    for info in (*model.graph.input, *model.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in ("batch", "tokens"):
                dim.dim_param = "n"
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert graphs.codes(report) == ["sizes-tied"] or report.exit == 0


def test_a_site_for_one_sequence_is_refused_where_the_batch_stays_free(tmp_path: Path) -> None:
    model = graphs.step(
        *FREE_BATCH,
        ("v0 = Squeeze(value, time)", "vv = Gather<axis = 0>(value, z0)\n  v0 = Squeeze(vv, time)"),
        ("float scale", "int64[1] z0 = {0}, float scale"),
    )
    path = graphs.save(model, tmp_path)
    report = graphs.fuse(path, tmp_path / "ort.onnx", target="ort")
    assert (report.exit, graphs.codes(report)) == (4, ["batch-one-only"])
    assert graphs.fuse(path, tmp_path / "ascend.onnx").exit == 0


def reference_of_few(terms: int) -> onnx.ModelProto:
    """The whole rule without chunks, its inverse by so many terms of a power series: right for so many tokens."""
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    few (float[1,T,2,4] query, float[1,T,2,4] key, float[1,T,2,3] value, float[1,T,2] g, float[1,T,2] beta)
        => (float[1,T,2,3] out)
    <int64 two = {2}, int64[1] last = {-1}, int64[1] row = {-2}, float half = {0.5}, int64 below = {-1},
     int64 diag = {0}>
    {
      q = Transpose<perm = [0, 2, 1, 3]>(query)
      k = Transpose<perm = [0, 2, 1, 3]>(key)
      v = Transpose<perm = [0, 2, 1, 3]>(value)
      gt = Transpose<perm = [0, 2, 1]>(g)
      bt = Transpose<perm = [0, 2, 1]>(beta)
      SERIES
      out = Transpose<perm = [0, 2, 1, 3]>(os)
    }
    """
    return onnx.parser.parse_model(text.replace("SERIES", series(terms)))


@pytest.mark.parametrize(("terms", "code"), [(2, "few-tokens-only"), (3, "nested-sums")])
def test_a_rule_that_agrees_on_few_tokens_is_refused(terms: int, code: str, tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(reference_of_few(terms), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, [code])


def test_a_table_that_is_odd_far_behind_is_refused(tmp_path: Path) -> None:
    model = onnx.load(export("loop_in_place").path)
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    body = next(attribute.g for attribute in loop.attribute if attribute.name == "body")
    table = np.ones((3000, 1, 1, 1), np.float32)
    table[1300] = 0.5
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    state = body.input[2].name
    for node in body.node:
        node.input[:] = ["weighed" if name == state else name for name in node.input]
    body.node.insert(0, helper.make_node("Gather", ["table", body.input[0].name], ["weight"], axis=0))
    body.node.insert(1, helper.make_node("Mul", [state, "weight"], ["weighed"]))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])


def test_two_fuses_never_use_a_name_twice(tmp_path: Path) -> None:
    path = export("two_sizes_ts17").path
    assert graphs.fuse(path, tmp_path / "one.onnx", sites=("*0",)).exit == 0
    assert graphs.fuse(tmp_path / "one.onnx", tmp_path / "two.onnx").exit == 0
    written = [name for node in onnx.load(tmp_path / "two.onnx").graph.node for name in node.output if name]
    assert len(written) == len(set(written))


def test_an_overridable_initializer_is_no_constant(tmp_path: Path) -> None:
    model = graphs.step()
    model.graph.input.append(helper.make_tensor_value_info("scale", onnx.TensorProto.FLOAT, []))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert report.exit == 3


def test_an_operand_that_the_rule_has_not_is_named(tmp_path: Path) -> None:
    # A number on the output is part of its scale at one size, and one everywhere at the others.
    model = loops.loop(
        ("float[B,4,5,3] state)", "float[B,4,5,3] state, float knob)"),
        ("out = Transpose", "raw = Transpose"), ("(outs)", "(outs)\n  out = Mul(raw, knob)"),
    )
    (site,) = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx").sites
    assert (site.status, site.reason.code) == ("near-miss", "further-operand")
    assert "out depends on knob" in site.reason.text
