"""Edits by byte range."""

from __future__ import annotations

import io
import random
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from deltafuse import edits, wire
from deltafuse.edits import Changes, Edit, Insertion
from deltafuse.errors import InternalError
from deltafuse.nesting import levels
from wire_forms import FORMS, Form, changed, random_changes, step_model, write

_PLAIN = {"plain": None, **FORMS}


def _apply(scanned: wire.Model, made: tuple[Edit, ...]) -> bytes:
    out = io.BytesIO()
    edits.apply(scanned.data, made, out)
    return out.getvalue()


def _parsed(raw: bytes) -> onnx.ModelProto:
    model = onnx.ModelProto.FromString(raw)
    model.DiscardUnknownFields()
    return model


def _node(scanned: wire.Model, value: str) -> int:
    found = scanned.graph.find(value)
    assert found is not None
    return scanned.graph.producer[found]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), form=st.sampled_from(list(_PLAIN)))
def test_edits_do_what_protobuf_does(tmp_path: Path, seed: int, form: str) -> None:
    model = step_model()
    scanned = write(tmp_path / "m.onnx", model, _PLAIN[form])
    changes = random_changes(scanned, random.Random(seed))
    raw = _apply(scanned, edits.build(scanned, changes))
    assert _parsed(raw) == changed(model, scanned, changes)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), form=st.sampled_from(list(_PLAIN)))
def test_nodes_that_stay_keep_their_bytes(tmp_path: Path, seed: int, form: str) -> None:
    scanned = write(tmp_path / "m.onnx", step_model(), _PLAIN[form])
    changes = random_changes(scanned, random.Random(seed))
    (tmp_path / "new.onnx").write_bytes(_apply(scanned, edits.build(scanned, changes)))
    after = wire.scan(tmp_path / "new.onnx")
    gone = {node for _, nodes in changes.removed for node in nodes}
    before_bytes = [bytes(scanned.data[s:e]) for node, (s, e) in enumerate(scanned.graph.spans) if node not in gone]
    new = {name for insertion in changes.inserted for node in insertion.nodes for name in node.output}
    after_bytes = [
        bytes(after.data[s:e])
        for node, (s, e) in enumerate(after.graph.spans)
        if not any(after.graph.name(value) in new for value in after.graph.node_outputs[node])
    ]
    assert sorted(after_bytes) == sorted(before_bytes)


@pytest.mark.parametrize("form", _PLAIN)
def test_what_begins_inside_a_node_is_no_edit_of_the_graph_around_it(tmp_path: Path, form: str) -> None:
    scanned = write(tmp_path / "m.onnx", step_model(), _PLAIN[form])
    places = range(len(scanned.data) + 1)
    found = levels(scanned, [Edit(place, place, b"", "", "nodes") for place in places])
    assert [(level.part, [edit.start for edit in level.edits]) for level in found] == [
        (part, [place for place in range(part.start, part.end + 1) if not _inside_a_node(scanned, place)])
        for part in scanned.graph_parts
    ]


def _inside_a_node(scanned: wire.Model, place: int) -> bool:
    return any(start < place < end for start, end in scanned.graph.spans)


def test_nothing_to_do(tmp_path: Path) -> None:
    scanned = write(tmp_path / "m.onnx", step_model())
    assert edits.build(scanned, Changes()) == ()
    assert _apply(scanned, ()) == bytes(scanned.data)


def test_neighbours_of_one_site_go_in_one_edit(tmp_path: Path) -> None:
    model = step_model()
    model.graph.node.extend([helper.make_node("Neg", ["q"], ["a"]), helper.make_node("Neg", ["a"], ["b"])])
    scanned = write(tmp_path / "m.onnx", model)
    last = len(model.graph.node) - 1
    made = edits.build(scanned, Changes(removed=(("s", (last, last - 1)),)))
    start, end = scanned.graph.spans[last - 1][0], scanned.graph.spans[last][1]
    assert [edit for edit in made if edit.kind != "size"] == [Edit(start, end, b"", "s", "nodes")]


def test_insertion_between_two_removed_nodes(tmp_path: Path) -> None:
    model = step_model()
    model.graph.node.extend([helper.make_node("Neg", ["q"], ["a"]), helper.make_node("Neg", ["a"], ["b"])])
    scanned = write(tmp_path / "m.onnx", model)
    last = len(model.graph.node) - 1
    new = helper.make_node("Abs", ["q"], ["c"])
    raw = _apply(
        scanned,
        edits.build(scanned, Changes(removed=(("s", (last - 1, last)),), inserted=(Insertion("s", last, (new,)),))),
    )
    assert list(_parsed(raw).graph.node[-2:]) == [model.graph.node[last - 2], new]


def test_stale_value_info_goes_and_that_of_written_values_stays(tmp_path: Path) -> None:
    model = step_model()
    scanned = write(tmp_path / "m.onnx", model)
    inner = tuple(_node(scanned, name) for name in ("memory", "read", "error"))
    error = helper.make_node("Identity", ["v"], ["error"])
    changes = Changes(removed=(("s", inner),), inserted=(Insertion("s", inner[0], (error,)),))
    after = _parsed(_apply(scanned, edits.build(scanned, changes)))
    expected = [info for info in model.graph.value_info if info.name != "memory"]
    assert [info.name for info in expected] == ["decay", "decay4", "decayed", "k4"]
    assert list(after.graph.value_info) == expected


def test_value_declared_twice_is_retyped_everywhere(tmp_path: Path) -> None:
    model = step_model()
    model.graph.value_info.append(model.graph.output[0])
    scanned = write(tmp_path / "m.onnx", model)
    info = helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 2, 3])
    out = scanned.graph.find("out")
    assert out is not None
    after = _parsed(_apply(scanned, edits.build(scanned, Changes(retyped=((out, info),)))))
    assert (after.graph.output[0], after.graph.value_info[-1]) == (info, info)


@pytest.mark.parametrize("form", _PLAIN)
def test_opset_imports_are_added_or_raised(tmp_path: Path, form: str) -> None:
    scanned = write(tmp_path / "m.onnx", step_model(), _PLAIN[form])
    changes = Changes(opsets=(("", 27), ("com.example", 1), ("com.microsoft", 1)))
    after = _parsed(_apply(scanned, edits.build(scanned, changes)))
    assert sorted((item.domain, item.version) for item in after.opset_import) == [
        ("", 27),
        ("com.example", 1),
        ("com.microsoft", 1),
    ]


def test_a_graph_without_nodes_takes_some(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    scanned = write(tmp_path / "m.onnx", helper.make_model(helper.make_graph([], "g", [x], [x])))
    node = helper.make_node("Neg", ["x"], ["y"])
    info = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    raw = _apply(scanned, edits.build(scanned, Changes(inserted=(Insertion("s", 0, (node,), (info,)),))))
    assert list(_parsed(raw).graph.node) == [node]
    assert list(_parsed(raw).graph.value_info) == [info]


def test_model_fields_may_follow_a_graph_that_ends_the_file(tmp_path: Path) -> None:
    model = step_model()
    # falling field numbers: opset imports, graph, ir_version; then the graph alone at the end
    head = onnx.ModelProto()
    head.CopyFrom(model)
    head.ClearField("graph")
    tail = onnx.ModelProto(graph=model.graph)
    (tmp_path / "m.onnx").write_bytes(head.SerializeToString() + tail.SerializeToString())
    scanned = wire.scan(tmp_path / "m.onnx")
    assert scanned.graph_parts[0].end == len(scanned.data)
    node = helper.make_node("Neg", ["q"], ["y"])
    changes = Changes(inserted=(Insertion("s", len(model.graph.node), (node,)),), opsets=(("com.new", 3),))
    made = edits.build(scanned, changes, [edits.append_metadata(scanned, "key", "value")])
    after = _parsed(_apply(scanned, made))
    assert after.graph.node[-1] == node
    assert after.opset_import[-1].domain == "com.new"
    assert after.metadata_props[-1] == onnx.StringStringEntryProto(key="key", value="value")


def test_removed_value_that_is_read_is_our_bug(tmp_path: Path) -> None:
    scanned = write(tmp_path / "m.onnx", step_model())
    with pytest.raises(InternalError, match=r"site s: decayed is removed, but it is read by the nodes"):
        edits.build(scanned, Changes(removed=(("s", (_node(scanned, "decayed"),)),)))
    with pytest.raises(InternalError, match=r"site s: out is removed, but it is the graph's output"):
        edits.build(scanned, Changes(removed=(("s", (_node(scanned, "out"),)),)))


def test_value_that_a_subgraph_reads_is_not_removed(tmp_path: Path) -> None:
    model = step_model()
    model.graph.node.insert(0, helper.make_node("Relu", ["g"], ["inner"]))
    model.graph.node[-1].attribute[0].g.node[0].input[0] = "inner"
    scanned = write(tmp_path / "m.onnx", model)
    with pytest.raises(InternalError, match="inner is removed"):
        edits.build(scanned, Changes(removed=(("s", (0,)),)))


def test_overlapping_edits_are_our_bug(tmp_path: Path) -> None:
    model = step_model()
    model.graph.node.append(helper.make_node("Neg", ["q"], ["unread"]))
    scanned = write(tmp_path / "m.onnx", model)
    node = _node(scanned, "unread")
    with pytest.raises(InternalError, match="overlap"):
        edits.build(scanned, Changes(removed=(("a", (node,)), ("b", (node,)))))


def test_undeclared_value_is_not_retyped(tmp_path: Path) -> None:
    scanned = write(tmp_path / "m.onnx", step_model())
    seen = scanned.graph.find("seen")
    assert seen is not None
    with pytest.raises(InternalError, match="nothing declares it"):
        edits.build(scanned, Changes(retyped=((seen, helper.make_tensor_value_info("seen", 1, [1])),)))


def test_apply_reports_progress(tmp_path: Path) -> None:
    scanned = write(tmp_path / "m.onnx", step_model())
    seen: list[tuple[int, int]] = []
    edits.apply(scanned.data, (), io.BytesIO(), lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(scanned.data), len(scanned.data))


def test_split_graph_gets_the_length_of_the_edited_part_only(tmp_path: Path) -> None:
    model = step_model()
    scanned = write(tmp_path / "m.onnx", model, Form(split=True))
    node = helper.make_node("Neg", ["q"], ["y"])
    made = edits.build(scanned, Changes(inserted=(Insertion("s", 0, (node,)),)))
    assert [edit.kind for edit in made] == ["size", "nodes"]
    assert list(_parsed(_apply(scanned, made)).graph.node) == [node, *model.graph.node]
