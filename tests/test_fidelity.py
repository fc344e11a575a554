"""What is not part of a fused site stays byte for byte what it was; weights are not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphs
from deltafuse.classes import Kind, classify
from deltafuse.lowering import fused_type, lower_model
from deltafuse.wire import Model, scan
from exports import Export, export, exports
from tolerances import assert_close

DYNAMO = [one for one in exports(exit=0) if one.truth["exporter"]["kind"] in ("dynamo", "transformers")]
BIG = 5 << 30


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def node_bytes(model: Model) -> list[tuple[str, bytes]]:
    """The first output and the bytes of each node, in the file's order."""
    graph = model.graph
    return [
        (graph.name(graph.node_outputs[node][0]), bytes(model.data[slice(*graph.spans[node])]))
        for node in range(len(graph.op))
    ]


@pytest.mark.parametrize("one", DYNAMO, ids=lambda one: one.name)
def test_nodes_outside_are_the_same_bytes_in_the_same_order(one: Export, tmp_path: Path) -> None:
    report = graphs.fuse(one.path, tmp_path / "out.onnx")
    assert report.exit == 0
    before, after = scan(one.path), scan(tmp_path / "out.onnx")
    results = {role.name for site in report.sites for role in site.match.results()}
    starts = tuple(f"{site.name}/" for site in report.sites)
    kept = [(name, data) for name, data in node_bytes(after) if not name.startswith(starts) and name not in results]
    names = {name for name, _ in kept}
    assert kept == [(name, data) for name, data in node_bytes(before) if name in names]
    # What is gone was part of a site, or served sites only (shape arithmetic that no data goes through).
    graph, kinds = before.graph, classify(before)
    inside = {node for site in report.sites for node in site.match.nodes}
    for node, outputs in enumerate(graph.node_outputs):
        if graph.name(outputs[0]) not in names:
            assert node in inside or kinds[outputs[0]] != Kind.DATA, graph.name(outputs[0])
    # There is something to compare: metadata, and nodes outside of the sites of whole models.
    assert any(node.metadata_props for node in onnx.load(one.path).graph.node)
    assert len(kept) > 20 or one.truth["roles"] is not None


@pytest.mark.parametrize("one", DYNAMO, ids=lambda one: one.name)
def test_everything_else_of_the_model_is_kept(one: Export, tmp_path: Path) -> None:
    graphs.fuse(one.path, tmp_path / "out.onnx")
    old, new = onnx.load(one.path), onnx.load(tmp_path / "out.onnx")
    assert list(new.graph.initializer) == list(old.graph.initializer)
    assert new.opset_import == old.opset_import
    assert (new.ir_version, new.producer_name, new.producer_version) == (
        old.ir_version, old.producer_name, old.producer_version,
    )  # fmt: skip
    assert new.graph.name == old.graph.name
    assert [info.name for info in new.graph.input] == [info.name for info in old.graph.input]
    assert [info.name for info in new.graph.output] == [info.name for info in old.graph.output]
    metadata = {prop.key: prop.value for prop in new.metadata_props}
    assert metadata.items() >= {prop.key: prop.value for prop in old.metadata_props}.items()


def test_new_nodes_are_named_after_their_site_and_say_where_they_come_from(tmp_path: Path) -> None:
    report = graphs.fuse(export("rec_dy18").path, tmp_path / "out.onnx")
    site = report.sites[0]
    nodes = [node for node in onnx.load(tmp_path / "out.onnx").graph.node if node.name.startswith(f"{site.name}/")]
    assert [node.op_type for node in nodes if fused_type(node)] == ["Custom"]
    for node in nodes:
        assert node.name.startswith(f"{site.name}/gated_delta_rule")
        assert all(
            name.startswith(f"{site.name}/gated_delta_rule") or name in ("out", "final_state") for name in node.output
        )
    (custom,) = [node for node in nodes if fused_type(node)]
    values = " ".join(f"{prop.key} {prop.value}" for prop in custom.metadata_props)
    assert "gated_delta_rule" in values


def outside(
    model: onnx.ModelProto, tensor: TensorProto, location: str, offset: int | None, length: int | None
) -> bytes:
    """Moves a tensor's bytes out of the file."""
    raw = tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.ClearField("int64_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": offset, "length": length}
    del tensor.external_data[:]
    for key, value in entries.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return raw


def with_weights(folder: Path) -> Path:
    """A tiny model whose weights lie in another file of several GB (a hole)."""
    model = onnx.load(export("full_decode_ts17").path)
    position = 0
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
            size = len(tensor.raw_data)
            outside(model, tensor, "weights.bin", position, size)
            position += BIG // 8
    assert position > 4 * (BIG // 8)
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(position)
    return graphs.save(model, folder)


def test_no_weight_is_read(tmp_path: Path) -> None:
    source = with_weights(tmp_path)
    # Nothing can be read from it, were it tried: the file is not there.
    (tmp_path / "weights.bin").unlink()
    report = graphs.fuse(source, tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""] * 3)
    assert any("weights.bin" in note for note in report.notes)
    old, new = onnx.load(source, load_external_data=False), onnx.load(tmp_path / "out.onnx", load_external_data=False)
    assert list(new.graph.initializer) == list(old.graph.initializer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "out.onnx"]


def test_sparse_weights_stay_sparse_and_beside_the_output(tmp_path: Path) -> None:
    source = with_weights(tmp_path)
    weights = tmp_path / "weights.bin"
    before = weights.stat()
    report = graphs.fuse(source, tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""] * 3)
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_blocks) == (before.st_size, before.st_mtime_ns, before.st_blocks)
    assert after.st_blocks * 512 < 1 << 20 < after.st_size
    assert after.st_nlink == 1


def test_structural_constants_outside_the_file_are_still_seen(tmp_path: Path) -> None:
    model = onnx.load(export("chunk_ts17_nonorm").path)
    moved = []
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type != "Constant" or attribute.type != onnx.AttributeProto.TENSOR or len(attribute.t.dims) < 2:
                continue
            name = f"constant_{len(moved)}"
            # As real exporters write them: a location and nothing else.
            (tmp_path / name).write_bytes(outside(model, attribute.t, name, None, None))
            moved.append((attribute.t.data_type, tuple(attribute.t.dims)))
    assert any(kind == TensorProto.BOOL for kind, _ in moved)
    assert any(kind == TensorProto.FLOAT and len(dims) == 4 for kind, dims in moved)
    one = export("chunk_ts17_nonorm")
    source = graphs.save(model, tmp_path)
    report = graphs.fuse(source, tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""])
    fused = lower_model(onnx.load(tmp_path / "out.onnx"))
    for got, want in zip(graphs.session(fused).run(None, one.inputs), one.expected, strict=True):
        assert_close(got, want, "float16")


@pytest.mark.parametrize("name", ["rec_dy23_T4_noinit", "chunk_dy23_noinit_nofinal"])
def test_structural_initializers_outside_the_file_are_still_seen(name: str, tmp_path: Path) -> None:
    model = onnx.load(export(name).path)
    data = b""
    for tensor in model.graph.initializer:
        if len(tensor.dims) >= 2:
            data += outside(model, tensor, "constants.bin", len(data), len(tensor.raw_data))
    assert data
    (tmp_path / "constants.bin").write_bytes(data)
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""])


def test_a_missing_structural_constant_refuses_and_names_the_file(tmp_path: Path) -> None:
    model = onnx.load(export("chunk_dy23_noinit_nofinal").path)
    size = 0
    for tensor in model.graph.initializer:
        if len(tensor.dims) >= 2:
            size += len(outside(model, tensor, "constants.bin", size, len(tensor.raw_data)))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert report.exit in (3, 4)
    assert not (tmp_path / "out.onnx").exists()
    texts = [*report.notes, *(site.reason.text for site in report.sites)]
    assert any("constants.bin" in text for text in texts)


def test_what_sites_share_is_counted_and_removed_once(tmp_path: Path) -> None:
    # One eye, one zero state and one eps for both layers, as some exporters write them.
    one = export("two_sizes_ts17")
    report = graphs.fuse(one.path, tmp_path / "out.onnx")
    fused = onnx.load(tmp_path / "out.onnx")
    names = [name for node in fused.graph.node for name in node.output]
    assert len(names) == len(set(names))
    known = {"", *(info.name for info in fused.graph.input), *(tensor.name for tensor in fused.graph.initializer)}
    for node in fused.graph.node:
        assert known.issuperset(node.input)
        known.update(node.output)
    assert known.issuperset(info.name for info in fused.graph.output)
    assert report.exit == 0
    arrays = graphs.session(lower_model(fused)).run(None, one.inputs)
    assert all(np.isfinite(array).all() for array in arrays)


def test_imports_of_other_domains_are_kept(tmp_path: Path) -> None:
    model = graphs.step()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert report.exit == 0
    assert onnx.load(tmp_path / "out.onnx").opset_import == model.opset_import
