"""Which nodes go, where new ones come, and which must move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import helper

import graphs
from deltafuse import classes
from deltafuse.adjusting import Adjustments
from deltafuse.graph import Graph
from deltafuse.match import Dims, Match, Plan, Proof, Role
from deltafuse.region import between
from deltafuse.splice import changes_of, removed_by

#: Two sites whose results are r1 and r2; `shared` is read by both, `both` by both results.
TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
splice (float[2] a, float[2] b) => (float[2] y1, float[2] y2) {
  shared = Neg(a)
  own1 = Exp(shared)
  own2 = Exp(shared)
  r1 = Neg(own1)
  early = Abs(r1)
  late = Sigmoid(b)
  r2 = Add(own2, late)
  y1 = Abs(early)
  y2 = Abs(r2)
}"""


def match(graph: Graph, name: str, operands: list[str], results: list[str], nodes: list[str]) -> Match:
    def role(value: str) -> Role:
        return Role(graph.find(value), value, "BTH", (), 1)

    six = [role(operands[min(index, len(operands) - 1)]) for index in range(5)]
    return Match(
        name, "rule", "chunk", *six, None, role(results[0]), None, None, None, Dims(1, 1, 1, 1, 1, 1), 1.0, None,
        tuple(graph.producer[graph.find(value)] for value in nodes), b"", Proof(0.0, 1),
    )  # fmt: skip


def plan(found: Match) -> Plan:
    node = helper.make_node("Identity", [found.query.name], [found.out.name], name=f"{found.name}/new")
    return Plan(found, "op", (node,), (), ())


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    return graphs.scanned(graphs.parse(TEXT), tmp_path).graph


def names(graph: Graph, nodes) -> list[str]:
    return [graph.name(graph.node_outputs[node][0]) for node in nodes]


def test_a_site_takes_its_dead_nodes_along(graph: Graph) -> None:
    first = plan(match(graph, "one", ["a"], ["r1"], ["shared", "own1", "r1"]))
    ((site, nodes),) = removed_by(graph, [first])
    assert site == "one"
    # What the other site still reads stays.
    assert names(graph, nodes) == ["own1", "r1"]


def test_what_dies_with_the_last_of_several_sites_is_removed_once(graph: Graph) -> None:
    plans = [
        plan(match(graph, "one", ["a"], ["r1"], ["own1", "r1"])),
        plan(match(graph, "two", ["a", "late"], ["r2"], ["own2", "r2"])),
    ]
    removed = dict(removed_by(graph, plans))
    assert names(graph, removed["one"]) == ["shared", "own1", "r1"]
    assert names(graph, removed["two"]) == ["own2", "r2"]


def test_what_no_site_has_goes_with_the_first_that_needs_it(graph: Graph) -> None:
    plans = [
        plan(match(graph, "one", ["a"], ["r1"], ["r1"])),
        plan(match(graph, "two", ["a", "late"], ["r2"], ["r2"])),
    ]
    removed = dict(removed_by(graph, plans))
    # One site is before the other whichever is read first.
    assert names(graph, removed["one"]) == ["shared", "own1", "r1"]
    assert names(graph, removed["two"]) == ["own2", "r2"]


#: A second site whose size is that of what lies inside the first.
SIZED = """
<ir_version: 8, opset_import: ["" : 17]>
sized (float[2] a, float[2] b) => (float[2] r2)
{
  inner = Neg(a)
  shape = Shape(inner)
  size = Identity(shape)
  r2 = Expand(b, size)
}"""


def test_what_lies_behind_a_size_that_a_site_reads_is_not_between(tmp_path: Path) -> None:
    model = graphs.scanned(graphs.parse(SIZED), tmp_path)
    graph, kinds = model.graph, classes.classify(model)
    one = match(graph, "two", ["b"], ["r2"], ["size", "r2"])
    for sizes in ((), (graph.find("shape") or 0,)):
        assert names(graph, between(graph, replace(one, sizes=sizes), kinds)) == ["shape", "size", "r2"]


def test_an_operand_stays(graph: Graph) -> None:
    ((_, nodes),) = removed_by(graph, [plan(match(graph, "one", ["own1"], ["r1"], ["r1"]))])
    assert names(graph, nodes) == ["r1"]


def test_new_nodes_come_where_the_result_was(graph: Graph) -> None:
    one = plan(match(graph, "one", ["a"], ["r1"], ["own1", "r1"]))
    changes = changes_of(graph, [one], removed_by(graph, [one]), Adjustments())
    (insertion,) = changes.inserted
    assert (insertion.site, insertion.before) == ("one", graph.producer[graph.find("r1")])
    assert insertion.nodes == one.nodes
    assert changes.moved == ()
    assert changes.retyped == ()


def test_readers_in_front_of_the_last_operand_move(graph: Graph) -> None:
    one = plan(match(graph, "one", ["a", "late"], ["r1"], ["own1", "r1"]))
    changes = changes_of(graph, [one], removed_by(graph, [one]), Adjustments())
    (insertion,) = changes.inserted
    late = graph.producer[graph.find("late")]
    assert insertion.before == late + 1
    assert changes.moved == (("one", graph.producer[graph.find("early")], late + 1),)


def test_a_chain_of_readers_moves_in_order(tmp_path: Path) -> None:
    text = TEXT.replace("  late = Sigmoid(b)", "  next = Neg(early)\n  other = Neg(b)\n  late = Sigmoid(b)")
    text = text.replace("y1 = Abs(early)", "y1 = Add(early, next)")
    graph = graphs.scanned(graphs.parse(text), tmp_path).graph
    one = plan(match(graph, "one", ["a", "late"], ["r1"], ["own1", "r1"]))
    changes = changes_of(graph, [one], removed_by(graph, [one]), Adjustments())
    assert names(graph, [node for _, node, _ in changes.moved]) == ["early", "next"]
    assert len({before for _, _, before in changes.moved}) == 1


def test_a_branch_that_reads_a_result_moves_too(tmp_path: Path) -> None:
    then = "t () => (float[2] p) { p = Abs(r1) }"
    branch = f"  early = If(on)<then_branch = {then}, else_branch = e () => (float[2] q) {{ q = Abs(a) }}>"
    text = TEXT.replace("  early = Abs(r1)", branch).replace("float[2] b)", "float[2] b, bool on)")
    graph = graphs.scanned(graphs.parse(text), tmp_path).graph
    one = plan(match(graph, "one", ["a", "late"], ["r1"], ["own1", "r1"]))
    changes = changes_of(graph, [one], removed_by(graph, [one]), Adjustments())
    assert names(graph, [node for _, node, _ in changes.moved]) == ["early"]


@pytest.mark.parametrize("order", ["as it was", "reader first"])
def test_the_written_file_is_in_order(order: str, tmp_path: Path) -> None:
    # A state that is read before the query is made: the reader moves, all others keep their places.
    edits = [
        ("  q0 = Squeeze(query, time)\n", ""),
        ("  q1 =", "  early = Mul(final_state, scale)\n  q0 = Sigmoid(raw)\n  q1 ="),
        ("float[1,1,4,5] query", "float[1,4,5] raw"),
    ]
    model = graphs.step(*edits, outputs=["early"])
    if order == "reader first":
        node = next(node for node in model.graph.node if "early" in node.output)
        moved = onnx.NodeProto.FromString(node.SerializeToString())
        model.graph.node.remove(node)
        model.graph.node.insert(0, moved)
    with graphs.one_worker():
        report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""])
    done = onnx.load(tmp_path / "out.onnx").graph
    ours = {node.name for node in done.node if node.name.startswith("site.0/")}
    assert ours
    if order == "as it was":
        known = {"", *(i.name for i in done.input), *(t.name for t in done.initializer)}
        for node in done.node:
            assert known.issuperset(node.input)
            known.update(node.output)
