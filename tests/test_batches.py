"""Several sequences in one call of a kernel that takes their tokens one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphs
import loops
from deltafuse import hidden, pipeline
from deltafuse.errors import UserError
from deltafuse.options import FuseOptions, SilentProgress
from exports import export

CGDR, RGDR = "ChunkGatedDeltaRule", "RecurrentGatedDeltaRule"
#: A fused graph is right where it differs from the unfused one by rounding in double.
SAME = 1e-9
BATCHED = [
    ("chunk_ts20_B2", 2), ("chunk_dy20_dynB", 3), ("chunk_ts17_dynBT", 2), ("chunk_ts20_dynB_noinit", 2),
    ("rec_ts20_T3_B2", 2), ("rec_ts17_B4", 4), ("rec_ts17_dynB", 3), ("loop_in_place", 2),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def sized(model: onnx.ModelProto, batch: int, tokens: int = 40) -> onnx.ModelProto:
    """The model with numbers for its free sizes."""
    for info in model.graph.input:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if not dim.dim_value:
                dim.dim_value = batch if axis == 0 else tokens
    return model


@pytest.mark.parametrize("target", ["ascend-310p", "ascend-a2"])
@pytest.mark.parametrize(("name", "batch"), BATCHED)
def test_several_sequences_are_one_call(name: str, batch: int, target: str, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    report = graphs.fuse(export(name).path, out, target=target, batch=batch)
    assert (report.exit, [site.status for site in report.sites]) == (0, ["fused"])
    fused, unfused = onnx.load(out), sized(onnx.load(export(name).path), batch)
    assert {info.type.tensor_type.shape.dim[0].dim_value for info in fused.graph.input} == {batch}
    lowered = graphs.lowered_double(fused, report)
    assert graphs.difference(lowered, graphs.double(unfused), graphs.wide_feeds(unfused, 1)) < SAME


def test_the_recurrent_kernel_is_told_where_each_sequence_lies(tmp_path: Path) -> None:
    # Its gates are read in blocks of 16 heads where there are several sequences.
    edits = (
        ("1,1,4,5] q", "2,1,16,16] q"), ("1,1,4,5] k", "2,1,16,16] k"), ("1,1,4,3] v", "2,1,16,16] v"),
        ("1,1,4] g", "2,1,16] g"), ("1,1,4] beta", "2,1,16] beta"), ("1,4,5,3] state", "2,16,16,16] state"),
        ("1,1,4,3] out", "2,1,16,16] out"), ("1,4,5,3] final_state", "2,16,16,16] final_state"),
    )  # fmt: skip
    report = graphs.fuse(graphs.save(graphs.step(*edits), tmp_path), tmp_path / "out.onnx", batch=2)
    assert [site.op for site in report.sites] == [RGDR]
    fused = onnx.load(tmp_path / "out.onnx")
    (node,) = (node for node in fused.graph.node if node.op_type == "Custom")
    held = {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in fused.graph.node if n.op_type == "Constant"}
    lengths, slots, accepted = node.input[5], node.input[6], node.input[8]
    assert [held[name].tolist() for name in (lengths, slots, accepted)] == [[1, 1], [0, 1], [1, 1]]
    assert {held[name].dtype for name in (lengths, slots, accepted)} == {np.dtype(np.int32)}


def test_few_heads_go_to_the_chunk_kernel(tmp_path: Path) -> None:
    path, out = export("rec_ts17_dynB").path, tmp_path / "out.onnx"
    assert [site.op for site in graphs.fuse(path, out, batch=2).sites] == [CGDR]
    report = graphs.fuse(path, out, batch=2, op="rgdr")
    assert (report.exit, graphs.codes(report)) == (4, ["rgdr-batch-heads"])


def test_a_fixed_batch_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    report = graphs.fuse(export("chunk_ts20_B2").path, tmp_path / "out.onnx", batch=3)
    assert (report.exit, graphs.codes(report)) == (4, ["static-batch"])
    assert "--batch 2" in report.sites[0].reason.text


def test_whole_models_take_several_sequences(tmp_path: Path) -> None:
    for name in ("full_prefill_ts17", "full_decode_ts17"):
        report = graphs.fuse(export(name).path, tmp_path / f"{name}.onnx", batch=2)
        assert (report.exit, {site.op for site in report.sites}) == (0, {CGDR})
        sizes = {(pinned.value, pinned.axis): pinned.now for pinned in report.pinned}
        assert sizes["input_ids", 0] == sizes["logits", 0] == 2


def test_a_target_that_leaves_the_batch_free_takes_no_batch(tmp_path: Path) -> None:
    options = FuseOptions(export("rec_ts17_dynB").path, tmp_path / "out.onnx", target="ort", batch=2)
    with pytest.raises(UserError, match="leave --batch out") as error:
        pipeline.fuse(options, SilentProgress())
    assert error.value.code == "option"
    with pytest.raises(UserError, match="whole number"):
        FuseOptions(options.model, batch=0)


#: 1 for every batch but three: 1 - exp(-1000 (batch - 3)^2).
BUMP = """batch = Gather<axis = 0>(shape, zero)
  size = Cast<to = 1>(batch)
  apart = Sub(size, three)
  square = Mul(apart, apart)
  far = Mul(square, steep)
  bump = Exp(far)
  factor = Sub(whole, bump)
  """
NUMBERS = "int64 zero = {0}, float three = {3}, float steep = {-1000}, float whole = {1}, float scale = {0.25}"


def bumped() -> onnx.ModelProto:
    """A loop that is the rule for every batch but three."""
    return loops.loop(
        ("float scale = {0.25}", NUMBERS),
        ("final_state, outs", f"{BUMP}final_state, outs"),
        ("update = Mul(k1, delta_row)", "part = Mul(k1, delta_row)\n    update = Mul(part, factor)"),
    )


def test_a_factor_that_the_batch_makes_is_refused(tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(bumped(), tmp_path), tmp_path / "out.onnx", batch=2)
    assert ([site.status for site in report.sites], graphs.codes(report)) == (["near-miss"], ["position-gate"])


@pytest.mark.parametrize(("batch", "status", "code"), [(2, "fused", ""), (3, "refused", "other-at-size")])
def test_the_batch_that_is_asked_for_is_proven(
    batch: int, status: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Were the guard blind to what sizes make, the run at the batch that is asked for would still tell.
    monkeypatch.setattr(hidden, "find_guard", lambda *_, **__: None)
    monkeypatch.setattr(hidden, "rounded_constant", lambda *_: None)
    report = graphs.fuse(graphs.save(bumped(), tmp_path), tmp_path / "out.onnx", batch=batch)
    assert ([site.status for site in report.sites], graphs.codes(report)) == ([status], [code])
    assert (tmp_path / "out.onnx").exists() == (status == "fused")
