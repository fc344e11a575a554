"""The first nodes of a file that another process reads: what is found is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import onnx
import pytest
from onnx import helper

from deltafuse import children, first_nodes, wire
from deltafuse.errors import UserError
from deltafuse.first_nodes import Elsewhere, Reading
from deltafuse.graph import Graph
from deltafuse.mapping import Identity
from deltafuse.scanner import Columns
from deltafuse.worker import Worker
from wire_forms import FORMS, Form, encode, step_model, write


class Beside:
    """Reads ahead in this process, and notes whether that was of use."""

    def __init__(self, path: Path) -> None:
        self._reading, self.used = Reading(path), False
        self._reading.read()

    def rest(self, identity: Identity) -> int | None:
        found = self._reading.rest()
        return found[1] if found is not None and found[0] == identity else None

    def columns(self, meanwhile: Callable[[], object]) -> Columns | None:
        self.used = True
        meanwhile()
        return self._reading.columns()


class Gone(Beside):
    """Has read, but what was read does not come."""

    def columns(self, meanwhile: Callable[[], object]) -> Columns | None:
        super().columns(meanwhile)
        return None


def told(model: wire.Model) -> list[object]:
    graph = model.graph
    columns: list[object] = [getattr(graph, field.name) for field in fields(Graph) if not field.name.startswith("_")]
    columns[columns.index(graph.spans)] = list(graph.spans)
    columns[columns.index(graph.attribute_spans)] = list(graph.attribute_spans)
    return [*columns, graph.reading.flat.tolist(), graph.writing.flat.tolist(), model.declarations, model.constants]


def saved(folder: Path, form: Form | None = None) -> Path:
    path = folder / "m.onnx"
    write(path, step_model(), form)
    return path


@pytest.mark.parametrize("form", [None, *FORMS.values()], ids=["plain", *FORMS])
def test_a_scan_is_the_same_wherever_the_nodes_are_parted(
    form: Form | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, form)
    wanted = wire.scan(path)
    count = len(wanted.graph.op)
    used = 0
    for first in range(1, count):
        monkeypatch.setattr(first_nodes, "_SHARE", (first + 0.5) / count)
        beside = Beside(path)
        assert told(wire.scan(path, ahead=beside)) == told(wanted)
        used += beside.used
    # Where a tag is longer than it need be, or another field comes between, fewer nodes lie behind each other.
    assert used == count - 1 if form is None else used >= 0


def test_equal_operators_are_one_text(tmp_path: Path) -> None:
    graph = wire.scan(path := saved(tmp_path), ahead=Beside(path)).graph
    assert len({id(op) for op in graph.op}) == len(set(graph.op))


def test_what_does_not_come_is_read_here(tmp_path: Path) -> None:
    path = saved(tmp_path)
    gone = Gone(path)
    assert told(wire.scan(path, ahead=gone)) == told(wire.scan(path))
    assert gone.used


@pytest.mark.parametrize("change", ["replaced", "written again", "longer"])
def test_a_file_that_has_changed_is_read_here(change: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    beside = Beside(path)
    raw = bytearray(path.read_bytes())
    if change == "longer":
        path.write_bytes(bytes(raw) + onnx.ModelProto(domain="d").SerializeToString())
    elif change == "replaced":
        (tmp_path / "other").write_bytes(raw)
        (tmp_path / "other").replace(path)
    else:
        path.write_bytes(raw.replace(b"decay", b"decoy"))
        os.utime(path, ns=(0, 0))
    assert told(wire.scan(path, ahead=beside)) == told(wire.scan(path))
    assert not beside.used


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "no graph", "missing", "folder"])
def test_who_reads_all_says_what_is_wrong(damage: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    raw = path.read_bytes()
    if damage == "folder":
        path = tmp_path
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": raw[: len(raw) // 2], "empty": b"", "text": b"{}", "no graph": b"\x08\x0a"}[damage])
    beside = Beside(path)
    with pytest.raises(UserError) as here:
        wire.scan(path)
    with pytest.raises(UserError) as there:
        wire.scan(path, ahead=beside)
    assert (there.value.code, str(there.value)) == (here.value.code, str(here.value))


def test_a_fault_in_a_node_is_told_as_before(tmp_path: Path) -> None:
    model = step_model()
    raw = bytearray(encode(model, Form()))
    first, last = (raw.index(node.op_type.encode()) for node in (model.graph.node[0], model.graph.node[-1]))
    for place in (first, last):
        path = tmp_path / f"{place}.onnx"
        path.write_bytes(bytes(raw[:place]) + b"\xff" + bytes(raw[place + 1 :]))
        with pytest.raises(UserError) as here:
            wire.scan(path)
        with pytest.raises(UserError) as there:
            wire.scan(path, ahead=Beside(path))
        assert (there.value.code, str(there.value)) == ("not-onnx", str(here.value))


def test_small_files_are_not_asked_for(tmp_path: Path) -> None:
    class Silent:
        def ask(self, *_: object) -> None:
            raise AssertionError

    assert Elsewhere(Silent()).rest(wire.mapped(saved(tmp_path))[1]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "told"), [(children.LARGE - 1, 4), (children.LARGE, 5), (None, 4)])
def test_the_child_is_told_of_large_files(
    size: int | None, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    if size is not None:
        path.write_bytes(b"")
        os.truncate(path, size)
    asked: list[list[str]] = []
    started = subprocess.Popen

    def popen(command: list[str], **streams: int) -> subprocess.Popen[bytes]:
        asked.append(command)
        return started([sys.executable, "-c", ""], stdin=streams["stdin"], stdout=streams["stdout"])

    monkeypatch.setattr(children.subprocess, "Popen", popen)
    with children.early(str(path)):
        assert asked[0][4:] == ["compares", str(path)][: told - 3]


def large(path: Path) -> Path:
    nodes = [helper.make_node("Neg", [f"{'v' * 60}{i}"], [f"{'v' * 60}{i + 1}"], f"n{i}") for i in range(32_000)]
    graph = helper.make_graph(nodes, "g", [], [])
    onnx.save(helper.make_model(graph), path)
    assert path.stat().st_size > children.LARGE
    return path


@pytest.mark.parametrize("given", ["the model", "no model", "another"])
def test_the_child_of_a_worker_reads(given: str, tmp_path: Path) -> None:
    path = large(tmp_path / "m.onnx")
    other = {"the model": path, "no model": None, "another": tmp_path / "none.onnx"}[given]
    child = children.start(compares=True, model=None if other is None else str(other))
    try:
        with Worker(compares=True, child=child) as worker:
            ahead = Elsewhere(worker)
            begin = ahead.rest(wire.mapped(path)[1])
            assert (begin is not None) == (given == "the model")
            assert told(wire.scan(path, ahead=ahead)) == told(wire.scan(path))
            # What was read is handed out once, and the child serves on.
            assert ahead.columns(lambda: None) is None
            relu = helper.make_graph(
                [helper.make_node("Relu", ["x"], ["y"])], "g",
                [helper.make_tensor_value_info("x", 1, [1])], [helper.make_tensor_value_info("y", 1, [1])],
            )  # fmt: skip
            model = helper.make_model(relu, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])
            assert worker.load(model.SerializeToString())
    finally:
        children.end(child)


def test_a_child_that_dies_is_done_without(tmp_path: Path) -> None:
    path = large(tmp_path / "m.onnx")
    child = children.start(compares=True, model=str(path))
    try:
        with Worker(compares=True, child=child) as worker:
            ahead = Elsewhere(worker)
            assert ahead.rest(wire.mapped(path)[1]) is not None
            child.kill()
            assert told(wire.scan(path, ahead=ahead)) == told(wire.scan(path))
    finally:
        children.end(child)
