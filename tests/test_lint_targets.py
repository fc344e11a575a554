"""Which profile ``fuse lint`` holds a file against, and what the fused files of one target have from another's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphs
from deltafuse.lint import lint
from exports import export


@pytest.fixture(scope="module", autouse=True)
def _worker():
    with graphs.one_worker():
        yield


def fused(name: str, output: Path, **options) -> Path:
    assert graphs.fuse(export(name).path, output, **options).exit == 0
    return output


@pytest.mark.parametrize(
    ("target", "boundary"), [("ascend-a2", "bf16"), ("ascend-a2", "fp16"), ("ascend-310p", "fp16")]
)
def test_a_file_is_held_against_the_target_that_its_nodes_fit(target: str, boundary: str, tmp_path: Path) -> None:
    path = fused("chunk_ts17_nonorm", tmp_path / "out.onnx", target=target, boundary=boundary)
    report = lint(path)
    assert (report.exit, report.findings) == (0, ())
    # In half precision the nodes of both are the same.
    assert report.targets == (("ascend-a2",) if boundary == "bf16" else ("ascend-310p",))


def test_a_fault_of_a_file_for_the_second_target_is_told_alone(tmp_path: Path) -> None:
    path = fused("chunk_ts17_nonorm", tmp_path / "out.onnx", target="ascend-a2", boundary="bf16")
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.op_type == "Custom")
    next(one for one in node.attribute if one.name == "scale_value").f = -1.0
    report = lint(graphs.save(model, tmp_path, "edited.onnx"))
    assert report.targets == ("ascend-a2",)
    assert [one.code for one in report.findings] == ["scale"]


@pytest.mark.parametrize(("lengths", "exit_code"), [([1], 0), ([2], 5), ([0], 5)])
def test_constant_lengths_beside_an_axis_that_was_not_pinned(lengths: list[int], exit_code: int, tmp_path) -> None:
    """One token of one sequence, the batch left dynamic: right for a batch of one, which is a note."""
    path = fused("rec_dy20_dynB", tmp_path / "out.onnx", pin=False)
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.op_type == "Custom")
    array = np.array(lengths, np.int32)
    constant = next(one for one in model.graph.node if one.output and one.output[0] == node.input[5])
    constant.attribute[0].t.CopyFrom(numpy_helper.from_array(array))
    report = lint(graphs.save(model, tmp_path, "edited.onnx"), "ascend-310p")
    assert report.exit == exit_code
    assert ("lengths-fixed" in [one.code for one in report.notes]) == (lengths != [0])


BOARD = '''
from dataclasses import replace

from deltafuse.targets import limits
from deltafuse.targets.onnxruntime_contrib import PROFILE as ORT

PROFILE = replace(ORT, name="board", others=(), shared=(*ORT.shared, {limit}))
'''


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ('limits.head_count("A", 4, "a table")', ""),
        ('limits.head_count("A", 3, "a table")', "head-count"),
        ('limits.head_size("A", 8, "a table")', "head-size"),
        ('limits.value_head_size("A", 8, "a table")', "value-head-size"),
        ('limits.rgdr_tokens("A", 8)', "rgdr-tokens"),
        ('limits.per_channel_decay("A", "the board")', ""),
        ('limits.decay_required("A", "the board")', ""),
        ('limits.least_opset("A", 99, 99)', "opset-below"),
    ],
)
def test_linear_attention_is_held_to_the_limits_of_a_profile_in_a_file(limit: str, code: str, tmp_path: Path) -> None:
    """2 key and 4 value heads, of 16 and 24, more than 8 tokens."""
    path = fused("chunk_ts17_nonorm", tmp_path / "out.onnx", target="ort")
    board = tmp_path / "board.py"
    board.write_text(BOARD.format(limit=limit))
    assert [one.code for one in lint(path, str(board)).findings] == [code] * bool(code)


def test_an_operator_that_the_profile_lacks(tmp_path: Path) -> None:
    path = fused("full_decode_ts17", tmp_path / "out.onnx", target="ort")
    board = tmp_path / "board.py"
    board.write_text(BOARD.format(limit=""))
    found = {(one.code, one.found) for one in lint(path, str(board)).findings}
    assert found == {("unknown-type", "CausalConvWithState")}
