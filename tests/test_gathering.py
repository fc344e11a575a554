"""Outputs that a graph takes token by token: put together, fused, undone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import graphs
from deltafuse import verify
from deltafuse.rollback import rollback

SOURCE = Path(__file__).parent / "zoo" / "parts_gated_tokens.onnx"
SAME = 1e-12


@pytest.fixture(scope="module", autouse=True)
def _worker():
    with graphs.one_worker():
        yield


def gated() -> onnx.ModelProto:
    """Three tokens; the output of each, [B, H, V], is multiplied by the sigmoid of its value."""
    return onnx.load(SOURCE)


def gates(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes that multiply the output of a token, in the order of the tokens."""
    sigmoids = {node.output[0] for node in model.graph.node if node.op_type == "Sigmoid"}
    return [node for node in model.graph.node if not sigmoids.isdisjoint(node.input)]


def constant(model: onnx.ModelProto, name: str, numbers: list[int]) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(numbers, np.int64), name))


def permuted(model: onnx.ModelProto, token: int) -> None:
    """The output of one token is taken as [H, B, V]."""
    gate = gates(model)[token]
    place = list(model.graph.node).index(gate)
    outputs = [f"turned{token}/{number}" for number in range(2)]
    new = [
        helper.make_node("Transpose", [name], [turned], perm=[1, 0, 2])
        for name, turned in zip(gate.input, outputs, strict=True)
    ]
    behind = helper.make_node("Transpose", [f"turned{token}"], [gate.output[0]], perm=[1, 0, 2])
    gate.input[:], gate.output[:] = outputs, [f"turned{token}"]
    for offset, node in enumerate(new):
        model.graph.node.insert(place + offset, node)
    model.graph.node.insert(place + len(new) + 1, behind)


def lone_axis(model: onnx.ModelProto, tokens: Sequence[int] = (0, 1, 2)) -> None:
    """The output of some tokens is taken with an axis of one token, [B, H, 1, V]."""
    constant(model, "axis", [2])
    for gate in [gates(model)[token] for token in tokens]:
        place = list(model.graph.node).index(gate)
        rows = [f"{gate.output[0]}/{number}" for number in range(3)]
        model.graph.node.insert(place, helper.make_node("Unsqueeze", [gate.input[0], "axis"], [rows[0]]))
        model.graph.node.insert(place + 1, helper.make_node("Unsqueeze", [gate.input[1], "axis"], [rows[1]]))
        behind = helper.make_node("Squeeze", [rows[2], "axis"], [gate.output[0]])
        gate.input[:], gate.output[:] = rows[:2], rows[2:]
        model.graph.node.insert(place + 3, behind)


def difference(model: onnx.ModelProto, fused: Path, report) -> float:
    lowered = graphs.lowered_double(onnx.load(fused), report)
    return graphs.difference(lowered, graphs.double(model), graphs.wide_feeds(model, 1))


@pytest.mark.parametrize("target", ["ascend-310p", "ascend-a2", "ort", "onnx"])
def test_tokens_are_taken_out_of_what_the_fused_node_writes(tmp_path: Path, target: str) -> None:
    path, fused, back = SOURCE, tmp_path / "fused.onnx", tmp_path / "back.onnx"
    report = graphs.fuse(path, fused, target=target)
    assert [site.status for site in report.sites] == ["fused"]
    assert any(note.startswith("gathered: site.0 ") for note in report.notes)
    model = onnx.load(fused)
    assert report.nodes_after == len(model.graph.node)
    assert len(gates(model)) == 3
    assert difference(gated(), fused, report) < SAME
    assert verify(path, fused).exit == 0
    rollback(fused, back)
    assert back.read_bytes() == path.read_bytes()


def test_what_took_a_token_early_comes_behind_the_fused_node(tmp_path: Path) -> None:
    report = graphs.fuse(SOURCE, tmp_path / "fused.onnx", target="ort")
    assert report.exit == 0
    model = onnx.load(tmp_path / "fused.onnx")
    known = {info.name for info in (*model.graph.input, *model.graph.initializer)} | {""}
    for node in model.graph.node:
        assert known.issuperset(node.input), node.name
        known.update(node.output)
    ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_an_axis_of_one_token_is_the_one_they_are_put_together_along(tmp_path: Path) -> None:
    model = gated()
    lone_axis(model)
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused, target="ort")
    assert [site.status for site in report.sites] == ["fused"]
    assert difference(model, fused, report) < SAME


def test_nodes_in_any_order_are_put_together_too(tmp_path: Path) -> None:
    model = gated()
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes[::-1])
    path, fused, back = graphs.save(model, tmp_path), tmp_path / "fused.onnx", tmp_path / "back.onnx"
    report = graphs.fuse(path, fused, target="ort")
    assert [site.status for site in report.sites] == ["fused"]
    assert difference(model, fused, report) < SAME
    rollback(fused, back)
    assert back.read_bytes() == path.read_bytes()


def test_a_token_that_is_a_result_of_the_model_stays_one(tmp_path: Path) -> None:
    model = gated()
    token = gates(model)[1].input[0]
    model.graph.output.append(helper.make_tensor_value_info(token, onnx.TensorProto.FLOAT, [1, 4, 32]))
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused, target="ort")
    assert [site.status for site in report.sites] == ["fused"]
    assert [info.name for info in onnx.load(fused).graph.output] == ["out", "final_state", token]
    assert difference(model, fused, report) < SAME


def test_what_turns_a_token_stays_behind_the_fused_node(tmp_path: Path) -> None:
    model = gated()
    permuted(model, 1)
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused, target="ort")
    assert [site.status for site in report.sites] == ["fused"]
    assert difference(model, fused, report) < SAME


def test_tokens_in_different_layouts_are_refused(tmp_path: Path) -> None:
    model = gated()
    lone_axis(model, tokens=[2])
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "fused.onnx")
    assert (report.exit, graphs.codes(report)) == (4, ["output-in-parts"])


def test_a_token_that_the_next_one_depends_on_is_no_part(tmp_path: Path) -> None:
    model = gated()
    first, second = gates(model)[:2]
    second.input[1] = first.output[0]
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "fused.onnx", target="ort")
    assert report.exit == 0
    assert difference(model, tmp_path / "fused.onnx", report) < SAME


def test_a_token_of_another_scale_is_no_part(tmp_path: Path) -> None:
    model = gated()
    token = gates(model)[1].input[0]
    writer = next(node for node in model.graph.node if token in node.output)
    place = list(model.graph.node).index(writer)
    writer.output[0] = "unscaled"
    model.graph.initializer.append(numpy_helper.from_array(np.array(1.001, np.float32), "more"))
    model.graph.node.insert(place + 1, helper.make_node("Mul", ["unscaled", "more"], [token]))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "fused.onnx", target="ort")
    assert [site.status for site in report.sites] == ["fused"]
    assert difference(model, tmp_path / "fused.onnx", report) < SAME


def two() -> onnx.ModelProto:
    """Two such steps with inputs of their own."""
    model = gated()
    other = onnx.compose.add_prefix(gated(), "other/")
    model.graph.node.extend(other.graph.node)
    model.graph.input.extend(other.graph.input)
    model.graph.output.extend(other.graph.output)
    model.graph.initializer.extend(other.graph.initializer)
    return model


def test_a_site_that_is_left_out_keeps_its_tokens(tmp_path: Path) -> None:
    model = two()
    path, fused, back = graphs.save(model, tmp_path), tmp_path / "fused.onnx", tmp_path / "back.onnx"
    report = graphs.fuse(path, fused, target="ort", skip_sites=("site.1",))
    assert [site.status for site in report.sites] == ["fused", "match"]
    assert graphs.codes(report) == ["", "left-out"]
    assert [note.split(" wrote")[0] for note in report.notes if "gathered" in note] == ["gathered: site.0"]
    written = onnx.load(fused)
    assert not any("site.1" in name for node in written.graph.node for name in (node.name, *node.output))
    assert difference(model, fused, report) < SAME
    rollback(fused, back)
    assert back.read_bytes() == path.read_bytes()


def test_one_of_two_goes_back_by_itself(tmp_path: Path) -> None:
    model = two()
    path, fused, part = graphs.save(model, tmp_path), tmp_path / "fused.onnx", tmp_path / "part.onnx"
    assert [site.status for site in graphs.fuse(path, fused, target="ort").sites] == ["fused", "fused"]
    rollback(fused, part, sites=["site.0"])
    written = onnx.load(part)
    assert not any("site.0" in name for node in written.graph.node for name in (node.name, *node.output))
    assert any("site.1" in node.name for node in written.graph.node)
    rollback(part, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["site.0/tokens", "site.0/tokens/1/index", "site.0/tokens/2"])
def test_names_that_the_file_has_are_not_taken(tmp_path: Path, name: str) -> None:
    model = gated()
    constant(model, name, [7])
    model.graph.output.append(helper.make_tensor_value_info("kept", onnx.TensorProto.INT64, [1]))
    model.graph.node.append(helper.make_node("Identity", [name], ["kept"]))
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused, target="ort")
    assert [site.status for site in report.sites] == ["fused"]
    assert difference(model, fused, report) < SAME


def test_a_branch_may_read_a_token(tmp_path: Path) -> None:
    model = gated()
    token = gates(model)[0].input[0]
    body = helper.make_graph(
        [helper.make_node("Neg", [token], ["turned"])], "body", [],
        [helper.make_tensor_value_info("turned", onnx.TensorProto.FLOAT, [1, 4, 32])],
    )  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(helper.make_node("If", ["yes"], ["other"], then_branch=body, else_branch=body))
    model.graph.output.append(helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [1, 4, 32]))
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused, target="ort")
    assert [site.status for site in report.sites] == ["fused"]
    assert difference(model, fused, report) < SAME
