"""External data: every tensor is found, files are copied or left, never linked or loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deltafuse import external, wire
from deltafuse.errors import UserError
from wire_forms import FORMS, external_tensor, step_model, write

_PLAIN = {"plain": None, **FORMS}


def _everywhere() -> onnx.ModelProto:
    """External tensors in every place that may hold one."""

    def tensor(name: str) -> TensorProto:
        return external_tensor(name, (4,), f"{name}.bin", length=16)

    def constant(name: str) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [name], value=tensor(name))

    def sparse(name: str) -> onnx.SparseTensorProto:
        indices = external_tensor(f"{name}_indices", (4,), f"{name}_indices.bin")
        indices.data_type = TensorProto.INT64
        return onnx.SparseTensorProto(values=tensor(name), indices=indices, dims=[9])

    deep = helper.make_graph([constant("deep")], "deep", [], [], [tensor("deep_weight")])
    body = helper.make_graph([helper.make_node("If", ["c"], ["r"], then_branch=deep, else_branch=deep)], "body", [], [])
    body.sparse_initializer.append(sparse("body_sparse"))
    model = step_model()
    model.graph.initializer.append(tensor("weight"))
    model.graph.sparse_initializer.append(sparse("sparse"))
    model.graph.node.extend(
        [
            helper.make_node("Loop", ["", "c"], ["r"], body=body),
            helper.make_node("Many", [], ["m"], domain="com.example", tensors=[tensor("first"), tensor("second")]),
            helper.make_node("Many", [], ["n"], domain="com.example", graphs=[deep]),
            helper.make_node("Constant", [], ["s"], sparse_value=sparse("constant_sparse")),
        ]
    )
    model.functions.append(helper.make_function("com.example", "f", [], ["in_function"], [constant("in_function")], []))
    model.training_info.add(algorithm=helper.make_graph([constant("training")], "t", [], []))
    return model


_LOCATIONS = {
    "weight.bin", "sparse.bin", "sparse_indices.bin", "step.data", "deep.bin", "deep_weight.bin", "body_sparse.bin",
    "body_sparse_indices.bin", "first.bin", "second.bin", "constant_sparse.bin", "constant_sparse_indices.bin",
    "in_function.bin", "training.bin",
}  # fmt: skip


@pytest.mark.parametrize("form", _PLAIN)
def test_every_external_tensor_is_found(tmp_path: Path, form: str) -> None:
    scanned = write(tmp_path / "m.onnx", _everywhere(), _PLAIN[form])
    heads = external.external_tensors(scanned)
    assert {head.external["location"] for head in heads} == _LOCATIONS
    (weight,) = (head for head in heads if head.name == "weight")
    assert weight.external == {"location": "weight.bin", "length": "16"}
    assert set(external.data_files(scanned, ["more.bin"])) == {*_LOCATIONS, "more.bin"}


def test_the_word_location_alone_is_no_external_tensor(tmp_path: Path) -> None:
    model = step_model()
    del model.graph.node[4]
    model.graph.node.append(helper.make_node("Neg", ["q"], ["location"], name="location"))
    scanned = write(tmp_path / "m.onnx", model)
    assert external.external_tensors(scanned) == ()
    assert external.carry(scanned, tmp_path / "out.onnx") == external.Carried({})


def _model(folder: Path, *locations: str) -> wire.Model:
    """A model with one float32[4] at each location, the files written."""
    folder.mkdir(exist_ok=True)
    model = step_model()
    del model.graph.node[4]
    for index, location in enumerate(locations):
        model.graph.initializer.append(external_tensor(f"w{index}", (4,), location))
        path = folder / location
        path.parent.mkdir(parents=True, exist_ok=True)
        np.arange(4, dtype=np.float32).tofile(path)
    return write(folder / "m.onnx", model)


def _code(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return caught.value.code


def test_data_stays_where_it_is_in_the_same_folder(tmp_path: Path) -> None:
    scanned = _model(tmp_path / "in", "a.bin", "sub/b.bin")
    (tmp_path / "alias").symlink_to(tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))
    for folder in ("in", "alias"):
        carried = external.carry(scanned, tmp_path / folder / "out.onnx")
        assert carried == external.Carried({"a.bin": 16, "sub/b.bin": 16})
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_data_is_a_note_in_the_same_folder_and_an_error_elsewhere(tmp_path: Path) -> None:
    scanned = _model(tmp_path / "in", "a.bin", "b.bin")
    (tmp_path / "in" / "b.bin").unlink()
    (tmp_path / "out").mkdir()
    carried = external.carry(scanned, tmp_path / "in" / "out.onnx")
    assert carried.sizes == {"a.bin": 16, "b.bin": None}
    (note,) = carried.notes
    assert "b.bin is missing" in note
    assert _code(lambda: external.carry(scanned, tmp_path / "out" / "m.onnx")) == "external-data-missing"
    assert list((tmp_path / "out").iterdir()) == []


def test_data_is_copied_elsewhere_and_never_linked(tmp_path: Path) -> None:
    scanned = _model(tmp_path / "in", "a.bin", "sub/deeper/b.bin")
    (tmp_path / "in" / "sub" / "alias.bin").symlink_to("deeper/b.bin")
    (tmp_path / "out").mkdir()
    seen: list[tuple[int, int]] = []
    carried = external.carry(
        scanned, tmp_path / "out" / "m.onnx", lambda done, total: seen.append((done, total)), also=["sub/alias.bin"]
    )
    targets = [tmp_path / "out" / name for name in ("a.bin", "sub/deeper/b.bin", "sub/alias.bin")]
    assert list(carried.copied) == targets
    assert seen[-1] == (48, 48)
    for target in targets:
        source = tmp_path / "in" / target.relative_to(tmp_path / "out")
        assert not target.is_symlink()
        assert target.stat().st_nlink == 1
        assert not target.samefile(source)
        assert target.read_bytes() == source.read_bytes()
    assert sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file()) == sorted(targets)


def test_copies_are_not_made_twice(tmp_path: Path) -> None:
    scanned = _model(tmp_path / "in", "a.bin", "b.bin")
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "m.onnx"
    external.carry(scanned, output)
    # same content, another time stamp
    os.utime(tmp_path / "out" / "b.bin", (1, 1))
    assert external.carry(scanned, output).copied == ()


@pytest.mark.parametrize("content", [b"16 other bytes..", b"another length"])
def test_other_data_at_the_target_is_never_overwritten(tmp_path: Path, content: bytes) -> None:
    scanned = _model(tmp_path / "in", "a.bin", "b.bin")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.bin").write_bytes(content)
    assert _code(lambda: external.carry(scanned, tmp_path / "out" / "m.onnx")) == "external-data-differs"
    assert (tmp_path / "out" / "b.bin").read_bytes() == content
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b.bin"]


def test_failed_copies_are_removed_again(tmp_path: Path) -> None:
    scanned = _model(tmp_path / "in", "a.bin", "sub/b.bin")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").touch()
    assert _code(lambda: external.carry(scanned, tmp_path / "out" / "m.onnx")) == "output-not-writable"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sub"]


@pytest.mark.parametrize("location", ["../w.bin", "sub/../../w.bin", "{absolute}", "link.bin", "linked/w.bin"])
def test_locations_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(16))
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    (folder / "linked").symlink_to(tmp_path)
    model = step_model()
    location = location.format(absolute=tmp_path / "w.bin")
    model.graph.initializer.append(external_tensor("w", (4,), location))
    scanned = write(folder / "m.onnx", model)
    for output in (folder / "o.onnx", tmp_path / "out" / "o.onnx"):
        assert _code(lambda output=output: external.carry(scanned, output)) == "outside-folder"


def test_outside_data_on_request(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "blob").write_bytes(bytes(16))
    scanned = replace(_model(tmp_path / "in", str(tmp_path / "absolute.bin")), allow_outside=True)
    (tmp_path / "in" / "link.bin").symlink_to(tmp_path / "store" / "blob")
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "m.onnx"
    carried = external.carry(scanned, output, also=["link.bin"])
    assert carried.copied == (tmp_path / "out" / "link.bin",)
    assert not (tmp_path / "out" / "link.bin").is_symlink()
    assert _code(lambda: external.carry(scanned, output, also=["../x.bin"])) in (
        "outside-folder",
        "external-data-missing",
    )


def test_data_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = _model(tmp_path / "in", "a.bin")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / "in" / "a.bin")
    assert _code(lambda: external.carry(scanned, tmp_path / "out" / "m.onnx")) == "unreadable"


_COPY = """
import json, sys
from pathlib import Path
from deltafuse import external, wire
folder = Path(sys.argv[1])
model = wire.scan(folder / "in" / "m.onnx")
external.carry(model, folder / "out" / "m.onnx")
print(json.dumps(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024))
"""


def test_sparse_data_of_several_gigabytes_stays_sparse_and_out_of_memory(tmp_path: Path) -> None:
    _model(tmp_path / "in", "w.bin")
    size = 5 << 30
    with (tmp_path / "in" / "w.bin").open("wb") as file:
        file.write(b"begin")
        file.seek(3 << 30)
        file.write(b"middle")
        file.truncate(size)
    (tmp_path / "out").mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(wire.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", _COPY, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(run.stdout) < 500
    copy = tmp_path / "out" / "w.bin"
    assert copy.stat().st_size == size
    assert copy.stat().st_blocks * 512 < 100 << 20
    with copy.open("rb") as file:
        assert file.read(6) == b"begin\0"
        file.seek(3 << 30)
        assert file.read(7) == b"middle\0"


def test_copy_where_holes_and_ranges_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    scanned = _model(tmp_path / "in", "a.bin")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "lseek", unknown)
    monkeypatch.setattr(os, "copy_file_range", unknown)
    external.carry(scanned, tmp_path / "out" / "m.onnx")
    assert (tmp_path / "out" / "a.bin").read_bytes() == (tmp_path / "in" / "a.bin").read_bytes()


def test_data_that_shrinks_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = _model(tmp_path / "in", "a.bin")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    assert _code(lambda: external.carry(scanned, tmp_path / "out" / "m.onnx")) == "external-data-changed"
    assert list((tmp_path / "out").iterdir()) == []
