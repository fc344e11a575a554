"""Weights that differ between two files: inside, outside, twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphs
from deltafuse import UserError, verify

FIXTURE = Path(__file__).parent / "fixtures" / "full_decode_ts17.onnx"


@pytest.fixture(scope="module", autouse=True)
def _worker():
    with graphs.one_worker():
        yield


def outside(path: Path) -> None:
    """Saves the model with its weights in a file beside it."""
    onnx.save_model(onnx.load(FIXTURE), path, save_as_external_data=True, location="model.data", size_threshold=64)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose weights lie in a file beside it, and what is fused of it, with a copy of that file."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "out").mkdir()
    outside(folder / "model.onnx")
    report = graphs.fuse(folder / "model.onnx", folder / "out" / "model.onnx", target="ort")
    assert report.exit == 0
    return folder / "model.onnx", folder / "out" / "model.onnx"


def data_of(path: Path) -> Path:
    (found,) = {
        entry.value
        for tensor in onnx.load(path, load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return path.parent / found


def codes(report) -> list[str]:
    return [finding.code for finding in report.findings]


def test_equal_weights_in_another_file_are_equal(pair: tuple[Path, Path]) -> None:
    assert data_of(pair[0]) != data_of(pair[1])
    report = verify(*pair, level="site")
    assert (report.exit, codes(report)) == (0, [])


def test_other_bytes_in_the_copy_are_told(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(pair[1].parent, folder)
    data = data_of(folder / "model.onnx")
    numbers = np.fromfile(data, np.float32)
    numbers[0] += 1
    numbers.tofile(data)
    report = verify(pair[0], folder / "model.onnx", level="site")
    assert (report.exit, codes(report)) == (5, ["changed-initializer"])


def test_weights_that_moved_into_the_file_are_equal(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = onnx.load(pair[1])
    onnx.save(model, tmp_path / "inside.onnx")
    report = verify(pair[0], tmp_path / "inside.onnx", level="site")
    assert (report.exit, codes(report)) == (0, [])
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "model.embed_tokens.weight")
    numbers = numpy_helper.to_array(tensor).copy()
    numbers.flat[-1] += 1
    tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
    report = verify(pair[0], graphs.save(model, tmp_path, "changed.onnx"), level="site")
    assert (report.exit, codes(report)) == (5, ["changed-initializer"])


@pytest.mark.parametrize(("factor", "found"), [(1, []), (2, ["changed-initializer"])])
def test_weights_in_another_field_are_equal(tmp_path: Path, factor: int, found: list[str]) -> None:
    fused = tmp_path / "fused.onnx"
    graphs.fuse(FIXTURE, fused, target="ort")
    model = onnx.load(fused)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "model.embed_tokens.weight")
    numbers = factor * numpy_helper.to_array(tensor)
    tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.FLOAT, numbers.shape, numbers.ravel().tolist()))
    assert tensor.float_data
    report = verify(FIXTURE, graphs.save(model, tmp_path), level="site")
    assert codes(report) == found


def test_weights_that_are_not_there_are_compared_by_their_place(tmp_path: Path) -> None:
    outside(tmp_path / "model.onnx")
    graphs.fuse(tmp_path / "model.onnx", tmp_path / "fused.onnx", target="ort", external_data="keep")
    data_of(tmp_path / "model.onnx").unlink()
    report = verify(tmp_path / "model.onnx", tmp_path / "fused.onnx", level="site")
    assert (report.exit, codes(report)) == (0, [])
    edited = onnx.load(tmp_path / "fused.onnx", load_external_data=False)
    moved = next(tensor for tensor in edited.graph.initializer if tensor.external_data)
    next(entry for entry in moved.external_data if entry.key == "offset").value = "123"
    report = verify(tmp_path / "model.onnx", graphs.save(edited, tmp_path, "edited.onnx"), level="site")
    assert (report.exit, codes(report)) == (5, ["changed-initializer"])


def test_a_second_initializer_of_a_name_is_told(tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    graphs.fuse(FIXTURE, fused, target="ort")
    model = onnx.load(fused)
    first = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    copy = numpy_helper.from_array(numpy_helper.to_array(first) * np.float32(1.002), first.name)
    kept = list(model.graph.initializer)
    del model.graph.initializer[:]
    model.graph.initializer.extend([copy, *kept])
    edited = graphs.save(model, tmp_path)
    report = verify(FIXTURE, edited, level="site")
    assert (report.exit, codes(report)) == (5, ["doubled-initializer"])


def test_a_reproduction_replaces_no_other_file(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    source, fused = folder / "unfused.onnx", folder / "fused.onnx"
    shutil.copy(FIXTURE, source)
    graphs.fuse(source, fused, target="ort")
    before = source.read_bytes(), fused.read_bytes()
    with pytest.raises(UserError, match="is the input itself") as caught:
        verify(source, fused, minimize=folder)
    assert caught.value.code == "output-is-input"
    other = tmp_path / "other"
    other.mkdir()
    (other / "inputs.npz").write_text("mine")
    with pytest.raises(UserError, match="give --minimize a new folder") as caught:
        verify(source, fused, minimize=other)
    assert caught.value.code == "folder-in-use"
    assert (source.read_bytes(), fused.read_bytes()) == before
    assert (other / "inputs.npz").read_text() == "mine"
