"""A rule inside a function, among other nodes: the call is put in place, and undone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
from onnx import helper

import graphs
from deltafuse import verify
from deltafuse.ahead import Lookahead
from deltafuse.prover import Outlook
from deltafuse.rollback import rollback

SAME = 1e-12


@pytest.fixture(scope="module", autouse=True)
def _worker():
    with graphs.one_worker():
        yield


def calling(calls: int = 1, *, outer: int = 0, opset: int = 17, extra: bool = True) -> onnx.ModelProto:
    """A step between a Tanh of the query and one of the output, as a function.

    Args:
        calls: how many of them, each with inputs of its own.
        outer: functions around the function.
        opset: that the function asks for.
        extra: the Tanhs.
    """
    step = graphs.step()
    nodes = list(step.graph.node)
    if extra:
        for node in nodes:
            node.input[:] = ["turned" if name == "query" else name for name in node.input]
            node.output[:] = ["raw" if name == "out" else name for name in node.output]
        nodes = [helper.make_node("Tanh", ["query"], ["turned"]), *nodes, helper.make_node("Tanh", ["raw"], ["out"])]
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in step.graph.initializer]
    inputs, outputs = ([info.name for info in some] for some in (step.graph.input, step.graph.output))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    functions = [helper.make_function("local", "Layer0", inputs, outputs, [*constants, *nodes], imports)]
    for depth in range(outer):
        inner = helper.make_node(f"Layer{depth}", inputs, outputs, domain="local", name=f"inner{depth}")
        functions.append(helper.make_function("local", f"Layer{depth + 1}", inputs, outputs, [inner], imports))
    graph = onnx.GraphProto(name="calls")
    for index in range(calls):
        suffix = str(index) if index else ""
        given, written = [name + suffix for name in inputs], [f"{name}{index}" for name in outputs]
        graph.node.append(helper.make_node(f"Layer{outer}", given, written, domain="local", name=f"layer{index}"))
        for infos, likes, names in ((graph.input, step.graph.input, given), (graph.output, step.graph.output, written)):
            for name, like in zip(names, likes, strict=True):
                infos.add().CopyFrom(like)
                infos[-1].name = name
    top = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, functions=functions, opset_imports=top, ir_version=8)


def same(model: onnx.ModelProto, fused: Path, report) -> float:
    lowered = graphs.lowered_double(onnx.load(fused), report)
    plain = onnx.inliner.inline_local_functions(model)
    return graphs.difference(lowered, graphs.double(plain), graphs.wide_feeds(model, 1))


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
@pytest.mark.parametrize("outer", [0, 1, 3])
def test_a_rule_among_other_nodes_of_a_function_is_fused(tmp_path: Path, target: str, outer: int) -> None:
    model = calling(2, outer=outer)
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused, target=target)
    assert [site.status for site in report.sites] == ["fused", "fused"]
    assert report.nodes_before == 2
    assert report.nodes_after == len(onnx.load(fused).graph.node)
    assert any(note.startswith("inlined: ") and f"Layer{outer}" in note for note in report.notes)
    assert same(model, fused, report) < SAME
    checked = verify(path, fused)
    assert checked.exit == 0
    back = tmp_path / "back.onnx"
    rollback(fused, back)
    assert back.read_bytes() == path.read_bytes()
    again = graphs.fuse(fused, tmp_path / "again.onnx", target=target)
    assert [site.status for site in again.sites] == []


def test_layers_that_were_put_in_place_share_a_proof_whether_they_are_found_ahead_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ahead, after = graphs.save(calling(3), tmp_path), tmp_path / "ahead.onnx", tmp_path / "after.onnx"
    report = graphs.fuse(path, ahead, record="none")
    monkeypatch.setattr(Lookahead, "expect", Outlook.expect)
    plain = graphs.fuse(path, after, record="none")
    assert report.sites == plain.sites
    proofs = [site.match.proof for site in report.sites if site.match is not None]
    assert [proof.shared_with for proof in proofs] == [None, "site.0", "site.0"]
    assert ahead.read_bytes() == after.read_bytes()


def test_one_site_of_two_calls_goes_back_with_its_call(tmp_path: Path) -> None:
    model = calling(2)
    path, fused, back = graphs.save(model, tmp_path), tmp_path / "fused.onnx", tmp_path / "back.onnx"
    report = graphs.fuse(path, fused)
    first = report.sites[0].name
    rollback(fused, back, sites=[first])
    kinds = [node.op_type for node in onnx.load(back).graph.node]
    assert kinds.count("Layer0") == 1
    assert kinds.count("Custom") == 1
    assert same(model, back, report) < SAME


def test_a_call_that_is_the_rule_alone_is_replaced_whole(tmp_path: Path) -> None:
    path = graphs.save(calling(extra=False), tmp_path)
    report = graphs.fuse(path, tmp_path / "fused.onnx")
    assert [site.match.form for site in report.sites if site.match] == ["function"]
    assert not any(note.startswith("inlined") for note in report.notes)


def test_a_function_of_another_opset_is_left_alone(tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(calling(opset=16), tmp_path), tmp_path / "fused.onnx")
    assert graphs.codes(report) == ["inside-call"]


def test_names_of_the_function_do_not_meet_names_of_the_file(tmp_path: Path) -> None:
    model = calling()
    # The file has values of the names that the function's would get.
    model.graph.node.insert(0, helper.make_node("Neg", ["query"], ["turned__1/0.0"]))
    model.graph.node.insert(1, helper.make_node("Neg", ["query"], ["turned"]))
    for name in ("turned__1/0.0", "turned"):
        model.graph.output.add().CopyFrom(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 1, 4, 5]))
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused)
    assert report.exit == 0
    assert same(model, fused, report) < SAME


def test_a_skipped_site_leaves_its_call_in_place(tmp_path: Path) -> None:
    model = calling(2)
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    skipped = graphs.fuse(path).sites[0].name
    report = graphs.fuse(path, fused, skip_sites=(skipped,))
    assert same(model, fused, report) < SAME
    back = tmp_path / "back.onnx"
    rollback(fused, back)
    assert back.read_bytes() == path.read_bytes()


def test_external_data_of_the_file_is_found(tmp_path: Path) -> None:
    model = calling()
    weight = helper.make_tensor("weight", onnx.TensorProto.FLOAT, [4, 5], np.ones(20, np.float32))
    model.graph.initializer.append(weight)
    model.graph.node.insert(0, helper.make_node("Mul", ["query", "weight"], ["scaled"]))
    model.graph.node[1].input[0] = "scaled"
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    report = graphs.fuse(path, tmp_path / "fused.onnx")
    assert report.exit == 0
    assert same(model, tmp_path / "fused.onnx", report) < SAME


@pytest.mark.parametrize("fault", ["twice", "missing"])
def test_a_function_without_meaning_is_left_alone(fault: str, tmp_path: Path) -> None:
    model = calling()
    (function,) = model.functions
    last = function.node[-1]
    if fault == "twice":
        function.node.append(helper.make_node("Neg", list(last.input), list(last.output)))
    else:
        last.output[0] = "elsewhere"
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "fused.onnx")
    assert graphs.codes(report) == ["unsupported-operator"]
    assert not (tmp_path / "fused.onnx").exists()


def test_defaults_of_a_function_hold_and_its_nodes_have_names_of_their_own(tmp_path: Path) -> None:
    model = calling(2)
    (function,) = model.functions
    (turn,) = [node for node in function.node if node.op_type == "Tanh" and node.input[0] == "query"]
    turn.op_type, turn.name = "Softmax", "turn"
    turn.attribute.append(onnx.AttributeProto(name="axis", ref_attr_name="axis", type=onnx.AttributeProto.INT))
    function.attribute_proto.append(helper.make_attribute("axis", 2))
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused)
    assert [site.status for site in report.sites] == ["fused", "fused"]
    written = onnx.load(fused)
    assert [node.attribute[0].i for node in written.graph.node if node.op_type == "Softmax"] == [2, 2]
    names = [node.name for node in written.graph.node if node.name]
    assert len(names) == len(set(names))
    lowered = graphs.lowered_double(written, report)
    assert graphs.difference(lowered, graphs.double(model), graphs.wide_feeds(model, 1)) < SAME


def test_a_call_whose_body_gives_back_what_it_takes_stays(tmp_path: Path) -> None:
    model = calling(1)
    (function,) = model.functions
    flag = helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, [])
    count = helper.make_tensor_value_info("count", onnx.TensorProto.INT64, [])
    kept = helper.make_tensor_value_info("kept", onnx.TensorProto.FLOAT, None)
    made = helper.make_tensor_value_info("made", onnx.TensorProto.FLOAT, None)
    body = helper.make_graph([helper.make_node("Tanh", ["kept"], ["made"])], "body", [count, flag, kept], [flag, made])
    (turn,) = [node for node in function.node if node.op_type == "Tanh" and node.input[0] == "query"]
    at = list(function.node).index(turn)
    del function.node[at]
    trips = helper.make_node("Constant", [], ["trips"], value=helper.make_tensor("t", onnx.TensorProto.INT64, [], [1]))
    yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("y", onnx.TensorProto.BOOL, [], [True]))
    loop = helper.make_node("Loop", ["trips", "yes", "query"], ["turned"], body=body)
    for node in (loop, yes, trips):
        function.node.insert(at, node)
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "fused.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["inside-call"])
