"""Lengths and offsets of sequences, constant or computed: one for each state, and together all tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import graphs
import loops
from deltafuse import verify
from deltafuse.lint import lint
from exports import export


@pytest.fixture(scope="module", autouse=True)
def _worker():
    with graphs.one_worker():
        yield


def fused(folder: Path, model: onnx.ModelProto | None = None, **options) -> tuple[Path, onnx.ModelProto]:
    """An unfused file and what becomes of it."""
    source = export("chunk_ts17_nonorm").path if model is None else graphs.save(model, folder)
    assert graphs.fuse(source, folder / "out.onnx", **options).exit == 0
    return source, onnx.load(folder / "out.onnx")


def constant(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(node.attribute[0].t for node in model.graph.node if node.output and node.output[0].endswith(name))


def codes(path: Path) -> list[str]:
    return [one.code for one in lint(path).findings]


def test_lengths_of_more_sequences_than_there_are_states(tmp_path: Path) -> None:
    """[T] for one sequence becomes [T, T]: the kernel would read behind the end."""
    source, model = fused(tmp_path)
    constant(model, "lengths/1").CopyFrom(numpy_helper.from_array(np.array([2])))
    path = graphs.save(model, tmp_path, "edited.onnx")
    assert codes(path) == ["lengths-count", "lengths"]
    report = verify(source, path)
    assert report.exit == 5
    (site,) = report.structure
    assert [one.code for one in site.findings] == ["structure-profile", "structure-profile"]


def test_lengths_that_are_another_size(tmp_path: Path) -> None:
    """The heads in place of the tokens."""
    source, model = fused(tmp_path)
    slice_ = next(node for node in model.graph.node if node.output[0].endswith("lengths/tokens"))
    slice_.input[1], slice_.input[2] = slice_.input[2], "two"
    at = list(model.graph.node).index(slice_)
    two = helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.array([2])))
    model.graph.node.insert(at, two)
    path = graphs.save(model, tmp_path, "edited.onnx")
    assert codes(path) == ["lengths"]
    assert verify(source, path).exit == 5


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("signature", [None, "8-input"])
def test_what_is_emitted_is_right(batch: int, signature: str | None, tmp_path: Path) -> None:
    options = {} if signature is None else {"signature": signature}
    _, _ = fused(tmp_path, loops.loop(), batch=batch, **options)
    assert codes(tmp_path / "out.onnx") == []


def test_constant_lengths_that_go_back(tmp_path: Path) -> None:
    _, model = fused(tmp_path, loops.loop(), batch=2)
    node = next(node for node in model.graph.node if any(name.endswith("lengths/expand") for name in node.output))
    lengths = numpy_helper.from_array(np.array([9, -1], np.int32))
    node.CopyFrom(helper.make_node("Constant", [], list(node.output), value=lengths))
    path = graphs.save(model, tmp_path, "edited.onnx")
    assert codes(path) == ["lengths"]
