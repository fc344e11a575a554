"""The record: what is written with the fused file, and what is refused as a record."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from deltafuse import edits, patch, wire
from deltafuse.edits import Changes, Insertion
from deltafuse.errors import UserError
from deltafuse.record import KEY, Mode, Receipt, find, publish, sidecar_path
from deltafuse.rollback import rollback
from deltafuse.undoing import node_digest
from wire_forms import FORMS, SITES, external_tensor, random_changes, step_model, write

pytestmark = pytest.mark.usefixtures("one_worker")

_PLAIN = {"plain": None, **FORMS}


def _fuse(folder: Path, mode: Mode = "embed", name: str = "fused.onnx", form: str = "plain") -> Receipt:
    scanned = write(folder / "m.onnx", step_model(), _PLAIN[form])
    changes = random_changes(scanned, random.Random(5), moves=False)
    return publish(scanned, edits.build(scanned, changes), folder / name, mode)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("form", _PLAIN)
@pytest.mark.parametrize("mode", ["embed", "sidecar", "none"])
def test_receipt_says_what_was_written(tmp_path: Path, mode: Mode, form: str) -> None:
    receipt = _fuse(tmp_path, mode, form=form)
    written = (tmp_path / "fused.onnx").read_bytes()
    assert receipt.output == tmp_path / "fused.onnx"
    assert receipt.bytes == len(written)
    assert receipt.original_sha256 == _sha256((tmp_path / "m.onnx").read_bytes())
    metadata = onnx.ModelProto.FromString(written).metadata_props
    assert [entry.key for entry in metadata] == (["task"] if mode == "none" else ["task", KEY])
    if mode == "embed":
        assert receipt.record_bytes > len(metadata[-1].value)
        assert receipt.fused_sha256 == _sha256(written[: -receipt.record_bytes])
    elif mode == "sidecar":
        assert metadata[-1].value == "sidecar fused.onnx.rollback"
        assert receipt.sidecar == tmp_path / "fused.onnx.rollback"
        assert receipt.record_bytes == receipt.sidecar.stat().st_size
    else:
        assert (receipt.record_bytes, receipt.sidecar) == (0, None)
        assert receipt.fused_sha256 == _sha256(written)
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "fused.onnx"} | (
        {"fused.onnx.rollback"} if mode == "sidecar" else set()
    )


def test_record_says_what_was_done(tmp_path: Path) -> None:
    np.zeros(16, np.float32).tofile(tmp_path / "step.data")
    receipt = _fuse(tmp_path)
    found = find(wire.scan(tmp_path / "fused.onnx"))
    record = found.record
    assert not found.edited
    assert found.mode == "embed"
    assert set(record.sites) == set(SITES)
    assert record.original_bytes == (tmp_path / "m.onnx").stat().st_size
    assert (record.original_sha256, record.fused_sha256) == (receipt.original_sha256, receipt.fused_sha256)
    assert record.external == {"step.data": 64}
    assert patch.decode(patch.encode(record)) == record
    whole = (tmp_path / "m.onnx").read_bytes()
    for entry in record.entries:
        assert whole[entry.start : entry.start + len(entry.removed)] == entry.removed


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), form=st.sampled_from(list(_PLAIN)))
def test_removed_nodes_are_recorded_with_the_next_one_that_stayed(tmp_path: Path, seed: int, form: str) -> None:
    scanned = write(tmp_path / "m.onnx", step_model(), _PLAIN[form])
    graph, changes = scanned.graph, random_changes(scanned, random.Random(seed))
    gone = {node for _, nodes in changes.removed for node in nodes} | {node for _, node, _ in changes.moved}
    stayed = [
        (start, next(graph.name(value) for value in graph.node_outputs[node] if value))
        for node, (start, _) in enumerate(graph.spans)
        if node not in gone
    ]
    publish(scanned, edits.build(scanned, changes), tmp_path / "fused.onnx")
    for entry in find(wire.scan(tmp_path / "fused.onnx")).record.entries:
        before = after = ""
        if entry.kind == "nodes" and entry.removed:
            end = entry.start + len(entry.removed)
            before = next((name for start, name in stayed if start >= end), "")
            after = "" if before or not stayed else stayed[-1][1]
        assert (entry.before, entry.after) == (before, after)


def test_missing_data_is_recorded_as_missing(tmp_path: Path) -> None:
    receipt = _fuse(tmp_path)
    assert find(wire.scan(tmp_path / "fused.onnx")).record.external == {"step.data": None}
    assert "step.data is missing" in receipt.notes[0]


def test_external_data_goes_along(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    np.zeros(16, np.float32).tofile(tmp_path / "in" / "step.data")
    scanned = write(tmp_path / "in" / "m.onnx", step_model())
    receipt = publish(scanned, (), tmp_path / "out" / "m.onnx")
    assert receipt.copied == (tmp_path / "out" / "step.data",)
    assert (tmp_path / "out" / "step.data").stat().st_size == 64


def test_failure_leaves_neither_file_nor_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    np.zeros(16, np.float32).tofile(tmp_path / "in" / "step.data")
    scanned = write(tmp_path / "in" / "m.onnx", step_model())
    monkeypatch.setattr(patch, "LIMIT", 10)
    for mode in ("embed", "sidecar"):
        assert _code(lambda mode=mode: publish(scanned, (), tmp_path / "out" / "m.onnx", mode)) == "record-too-large"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("mode", ["embed", "sidecar"])
def test_output_may_not_be_the_input(tmp_path: Path, mode: Mode) -> None:
    scanned = write(tmp_path / "m.onnx", step_model())
    assert _code(lambda: publish(scanned, (), tmp_path / "m.onnx", mode)) == "output-is-input"
    copy = write(tmp_path / "a.rollback", step_model())
    assert mode == "embed" or _code(lambda: publish(copy, (), tmp_path / "a", mode)) == "output-is-input"


def test_an_older_record_goes_into_the_new_one(tmp_path: Path) -> None:
    _fuse(tmp_path)
    fused = wire.scan(tmp_path / "fused.onnx")
    publish(fused, (), tmp_path / "twice.onnx")
    publish(fused, (), tmp_path / "kept.onnx", "none")
    twice = wire.scan(tmp_path / "twice.onnx")
    assert len(twice.metadata_parts[KEY]) == 1
    assert twice.metadata[KEY] != fused.metadata[KEY]
    assert (tmp_path / "kept.onnx").read_bytes() == (tmp_path / "fused.onnx").read_bytes()


def test_digest_does_not_mind_names_and_attribute_order() -> None:
    one = helper.make_node("Custom", ["x"], ["y"], name="a", doc_string="d", k=1, z="b")
    two = helper.make_node("Custom", ["x"], ["y"], name="b", k=1, z="b")
    two.attribute.reverse()
    two.metadata_props.add(key="k", value="v")
    assert node_digest(one) == node_digest(two)
    for other in (
        helper.make_node("Custom", ["x"], ["y"], k=2, z="b"),
        helper.make_node("Custom", ["w"], ["y"], k=1, z="b"),
        helper.make_node("Other", ["x"], ["y"], k=1, z="b"),
    ):
        assert node_digest(other) != node_digest(one)


def _code(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return caught.value.code


def test_no_record_names_the_sidecar_option_where_it_may_help(tmp_path: Path) -> None:
    _fuse(tmp_path, "none")
    with pytest.raises(UserError, match="no fused node: it is not what fuse wrote"):
        rollback(tmp_path / "fused.onnx", tmp_path / "back.onnx")
    (tmp_path / "fused.onnx.rollback").write_bytes(b"")
    with pytest.raises(UserError, match=r"--sidecar FILE \(fused\.onnx\.rollback\)") as caught:
        rollback(tmp_path / "fused.onnx", tmp_path / "back.onnx")
    assert caught.value.code == "no-record"
    assert not (tmp_path / "back.onnx").exists()


@pytest.mark.parametrize("name", ["fused.onnx.rollback", "../elsewhere", "/etc/passwd", ""])
def test_sidecar_that_is_not_there_or_elsewhere(tmp_path: Path, name: str) -> None:
    _fuse(tmp_path, "sidecar")
    sidecar_path(tmp_path / "fused.onnx").unlink()
    model = onnx.load(tmp_path / "fused.onnx", load_external_data=False)
    model.metadata_props[-1].value = f"sidecar {name}"
    scanned = write(tmp_path / "fused.onnx", model)
    assert _code(lambda: find(scanned)) == "no-record"
    assert _code(lambda: find(scanned, tmp_path / "absent")) == "no-record"


def test_sidecar_of_unreasonable_size(tmp_path: Path) -> None:
    _fuse(tmp_path, "sidecar")
    with sidecar_path(tmp_path / "fused.onnx").open("wb") as file:
        file.truncate(patch.LIMIT + 1)
    assert _code(lambda: find(wire.scan(tmp_path / "fused.onnx"))) == "record-damaged"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "record-damaged"),
        ("rubbish", "record-damaged"),
        ("1 not base64", "record-damaged"),
        ("1 AAAA", "record-damaged"),
        ("0 AAAA", "record-damaged"),
        ("2 AAAA", "record-version"),
        ("99999999999999999999 AAAA", "record-version"),
    ],
)
def test_texts_that_are_no_record(tmp_path: Path, text: str, code: str) -> None:
    model = step_model()
    model.metadata_props.add(key=KEY, value=text)
    scanned = write(tmp_path / "m.onnx", model)
    assert _code(lambda: find(scanned)) == code
    version, _, rest = text.partition(" ")
    (tmp_path / "side").write_bytes(f"{KEY} {version}\n{rest}".encode())
    assert _code(lambda: find(scanned, tmp_path / "side")) == code


def _pack(header: object, blob: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return zstandard.compress(struct.pack("<I", len(text)) + text + blob)


_HEADER: dict[str, Any] = {
    "original_sha256": "0" * 64,
    "original_bytes": 3,
    "fused_sha256": "0" * 64,
    "sites": ["s"],
    "entries": [[0, 2, 1, "s", "nodes", "", ""]],
    "digests": [["s", "y", 1, "0"]],
    "external": {"w": 1},
}


def test_the_header_of_the_hostile_ones_is_right_otherwise() -> None:
    assert patch.decode(_pack(_HEADER, b"ab")).entries == (patch.Entry(0, b"ab", 1, "s", "nodes"),)


@pytest.mark.parametrize(
    "change",
    [
        {"entries": [[0, 3, 1, "s", "nodes", "", ""]]},
        {"entries": [[0, 1, 1, "s", "nodes", "", ""]]},
        {"entries": [[-1, 2, 1, "s", "nodes", "", ""]]},
        {"entries": [[0, 2, 1.5, "s", "nodes", "", ""]]},
        {"entries": [[0, 2, True, "s", "nodes", "", ""]]},
        {"entries": [[0, 2, 1 << 70, "s", "nodes", "", ""]]},
        {"entries": [[0, 2, 1, None, "nodes", "", ""]]},
        {"entries": [[0, 2]]},
        {"entries": [[0, 2, 1, "s", "rubbish", "", ""]]},
        {"entries": 7},
        {"sites": [1]},
        {"sites": None},
        {"digests": [["s"]]},
        {"external": {"w": "large"}},
        {"external": [1]},
        {"original_sha256": 5},
        {"original_bytes": None},
    ],
    ids=str,
)
def test_hostile_headers(change: dict[str, object]) -> None:
    assert _code(lambda: patch.decode(_pack(_HEADER | change, b"ab"))) == "record-damaged"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no zstd",
        zstandard.compress(b""),
        zstandard.compress(b"\xff\xff\xff\xff"),
        zstandard.compress(struct.pack("<I", 4) + b"nul"),
        zstandard.compress(struct.pack("<I", 4) + b"null"),
        zstandard.compress(struct.pack("<I", 1 << 16) + b"[" * (1 << 16)),
        _pack([]),
        _pack({}),
    ],
    ids=range(9),
)
def test_hostile_bytes(raw: bytes) -> None:
    assert _code(lambda: patch.decode(raw)) == "record-damaged"


def test_decompression_bombs() -> None:
    # a frame that says its size, and one that does not
    compressor = zstandard.ZstdCompressor()
    stream = compressor.compressobj(size=patch.LIMIT + 1)
    chunk = bytes(1 << 20)
    honest = b"".join(
        [stream.compress(chunk) for _ in range(patch.LIMIT >> 20)] + [stream.compress(b"\0"), stream.flush()]
    )
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    assert len(honest) < 1 << 20
    for raw in (honest, silent):
        with pytest.raises(UserError, match="at most") as caught:
            patch.decode(raw)
        assert caught.value.code == "record-damaged"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_records_never_restore_something_else(tmp_path: Path, data: st.DataObject) -> None:
    """Changed bytes, in the header more often than in the blob: refused, or the original comes back."""
    fused, back = tmp_path / "fused.onnx", tmp_path / "back.onnx"
    if not fused.exists():
        _fuse(tmp_path)
    record = find(wire.scan(fused)).record
    plain = bytearray(zstandard.decompress(patch.encode(record)))
    length = struct.unpack_from("<I", plain)[0]
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([length + 3, length + 3, len(plain) - 1]))
        plain[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    side = tmp_path / "side"
    side.write_bytes(f"{KEY} {patch.FORMAT}\n".encode() + zstandard.compress(bytes(plain)))
    back.unlink(missing_ok=True)
    try:
        report = rollback(fused, back, sidecar=side)
    except UserError:
        assert not back.exists()
    else:
        if report.mode == "bytes":
            assert back.read_bytes() == (tmp_path / "m.onnx").read_bytes()


def test_record_of_another_model(tmp_path: Path) -> None:
    _fuse(tmp_path, "sidecar")
    other = helper.make_node("Neg", ["x"], ["y"])
    x = helper.make_tensor_value_info("x", 1, ["n"])
    y = helper.make_tensor_value_info("y", 1, ["n"])
    write(tmp_path / "other.onnx", helper.make_model(helper.make_graph([other], "g", [x], [y])))
    side = sidecar_path(tmp_path / "fused.onnx")
    assert _code(lambda: rollback(tmp_path / "other.onnx", tmp_path / "b.onnx", sidecar=side)) == "record-mismatch"
    assert not (tmp_path / "b.onnx").exists()


def test_a_wrong_sha256_is_not_let_through(tmp_path: Path) -> None:
    _fuse(tmp_path)
    model = onnx.load(tmp_path / "fused.onnx", load_external_data=False)
    record = patch.decode(patch.from_text(model.metadata_props[-1].value))
    changed = patch.Record(**{**vars(record), "original_sha256": "0" * 64})
    side = tmp_path / "side"
    side.write_bytes(f"{KEY} {patch.FORMAT}\n".encode() + patch.encode(changed))
    assert _code(lambda: rollback(tmp_path / "fused.onnx", tmp_path / "b.onnx", sidecar=side)) == "record-damaged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fused.onnx", "m.onnx", "side"]


def test_onnxruntime_and_checker_read_a_file_with_a_record(tmp_path: Path) -> None:
    import onnxruntime

    x = helper.make_tensor_value_info("x", 1, ["n"])
    y = helper.make_tensor_value_info("y", 1, ["n"])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    scanned = write(tmp_path / "m.onnx", model)
    node = helper.make_node("Abs", ["x"], ["y"])
    changes = Changes(removed=(("s", (0,)),), inserted=(Insertion("s", 0, (node,)),))
    publish(scanned, edits.build(scanned, changes), tmp_path / "fused.onnx")
    onnx.checker.check_model(tmp_path / "fused.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "fused.onnx", providers=["CPUExecutionProvider"])
    assert KEY in session.get_modelmeta().custom_metadata_map
    assert session.run(None, {"x": np.array([-2.0], np.float32)})[0].tolist() == [2.0]


def test_external_tensors_outside_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = step_model()
    model.graph.initializer.append(external_tensor("w", (4,), "../w.bin"))
    scanned = write(tmp_path / "m.onnx", model)
    assert _code(lambda: publish(scanned, (), tmp_path / "out.onnx")) == "outside-folder"
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
