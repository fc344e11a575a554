"""Dominators and dead nodes against their definitions on random graphs."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import graphs
from deltafuse import classes, region
from deltafuse.graph import Graph
from deltafuse.wire import scan

TOP = -1
Dag = list[list[int]]


@st.composite
def dags(draw: st.DrawFn, largest: int = 9) -> Dag:
    """For each value the values before it that it is computed from (none: from outside)."""
    count = draw(st.integers(1, largest))
    return [sorted(draw(st.sets(st.integers(0, value - 1), max_size=3))) if value else [] for value in range(count)]


def reaches_top_without(dag: Dag, value: int, removed: int) -> bool:
    """Whether something reaches a value from outside although one value is taken away."""
    if value == removed:
        return False
    return not dag[value] or any(reaches_top_without(dag, source, removed) for source in dag[value])


@given(dags())
def test_a_chain_is_every_dominator_nearest_first(dag: Dag) -> None:
    tree = region._Tree()
    for value, sources in enumerate(dag):
        tree.add(value, sources)
    for value in range(len(dag)):
        dominators = [other for other in range(len(dag)) if not reaches_top_without(dag, value, other)]
        # In a chain the nearer one is computed later.
        assert tree.chain(value) == sorted(dominators, reverse=True)
        assert value in tree


def graph_of(dag: Dag, outputs: set[int], folder: Path) -> Graph:
    """A graph of one operator for each value; value n is called vn and written by node n."""
    nodes = [
        helper.make_node("Sum", [f"v{source}" for source in sources] or ["x"], [f"v{value}"])
        for value, sources in enumerate(dag)
    ]
    infos = [helper.make_tensor_value_info(f"v{value}", TensorProto.FLOAT, [1]) for value in sorted(outputs)]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])]
    model = helper.make_model(helper.make_graph(nodes, "dag", given, infos))
    return scan(graphs.save(model, folder)).graph


def needed(dag: Dag, outputs: set[int], replaced: set[int], kept: set[int]) -> set[int]:
    """Mark and sweep: what is left when the replaced values come from elsewhere."""
    behind = set(replaced)
    for value in reversed(range(len(dag))):
        if value in behind:
            behind.update(dag[value])
    # Only what computed the replaced values may go; of that, what is read or kept stays.
    marked = {value for value in range(len(dag)) if value not in behind}
    marked |= {value for value in behind if (value in outputs or value in kept) and value not in replaced}
    for value in reversed(range(len(dag))):
        if value in marked:
            marked.update(source for source in dag[value] if source not in replaced)
    return marked


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(dag=dags(), data=st.data())
def test_dead_nodes_are_what_a_mark_and_sweep_leaves_out(dag: Dag, data: st.DataObject, tmp_path: Path) -> None:
    every = st.integers(0, len(dag) - 1)
    outputs = data.draw(st.sets(every, min_size=1, max_size=3))
    replaced = data.draw(st.sets(every, min_size=1, max_size=3))
    kept = data.draw(st.sets(every, max_size=2)) - replaced
    graph = graph_of(dag, outputs, tmp_path)

    def ids(values: set[int]) -> list[int]:
        found = [graph.find(f"v{value}") for value in values]
        return [value for value in found if value is not None]

    dead = region.dead_nodes(graph, ids(replaced), ids(kept))
    assert list(dead) == [value for value in range(len(dag)) if value not in needed(dag, outputs, replaced, kept)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=120)
@given(data=st.data())
def test_a_node_is_dead_where_none_of_its_results_is_needed_and_one_was(data: st.DataObject, tmp_path: Path) -> None:
    made = ["x"]
    nodes: list[onnx.NodeProto] = []
    for number in range(data.draw(st.integers(1, 12))):
        sources = data.draw(st.lists(st.sampled_from([*made, ""]), max_size=3))
        results = data.draw(st.sampled_from([[f"v{number}"], [f"v{number}", f"w{number}"], ["", f"w{number}"]]))
        nodes.append(helper.make_node("Sum", sources, results))
        made += filter(None, results)
    some = st.sets(st.sampled_from(made[1:]), max_size=3)
    replaced, outputs = data.draw(some), data.draw(some)
    kept = data.draw(some) - replaced
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in sorted(outputs)]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])]
    graph = graphs.scanned(helper.make_model(helper.make_graph(nodes, "dag", given, infos)), tmp_path).graph
    expected = set[int]()
    for _ in nodes:
        read = {name for node, one in enumerate(nodes) if node not in expected for name in one.input}
        freed = {name for node in expected for name in nodes[node].input} | replaced
        needed = (read | outputs | kept) - replaced
        expected |= {
            node
            for node, one in enumerate(nodes)
            if needed.isdisjoint(filter(None, one.output)) and not (freed - {""}).isdisjoint(one.output)
        }
    dead = region.dead_nodes(graph, [graph.find(name) for name in replaced], [graph.find(name) for name in kept])
    assert list(dead) == sorted(expected)


def test_a_value_that_a_branch_reads_is_not_dead(tmp_path: Path) -> None:
    model = graphs.parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        branches (float[2] x, bool choice) => (float[2] y, float[2] z) {
          a = Neg(x)
          b = Exp(a)
          y = Neg(b)
          z = If(choice)<then_branch = t () => (float[2] p) { p = Identity(a) },
                         else_branch = e () => (float[2] q) { q = Identity(x) }>
        }"""
    )
    graph = graphs.scanned(model, tmp_path).graph
    dead = region.dead_nodes(graph, [graph.find("y")], [graph.find("x")])
    assert [graph.op[node] for node in dead] == ["Exp", "Neg"]
    assert graph.find("a") not in {value for node in dead for value in graph.node_outputs[node]}


def step_candidate(tmp_path: Path, *outputs: str):
    model = graphs.scanned(graphs.step(outputs=outputs), tmp_path)
    (candidate,) = graphs.candidates(model)
    return model, candidate


def test_exits_lead_from_each_reader_outside_to_where_the_core_begins(tmp_path: Path) -> None:
    model, candidate = step_candidate(tmp_path)
    graph = model.graph
    chains = {graph.name(v): [graph.name(x) for x in chain] for v, chain in region.exits(graph, candidate).items()}
    assert set(chains) == {"out", "final_state"}
    assert chains["out"][:3] == ["out", "o", "read"]
    assert chains["out"][3] == "final_state"
    assert chains["final_state"][0] == "final_state"
    assert chains["final_state"] == chains["out"][3:]


@pytest.mark.parametrize(
    ("root", "chain"),
    [
        ("query", ["query", "q0", "q1", "q2"]),
        ("beta", ["beta", "b0", "b1"]),
        ("value", ["value", "v0"]),
        ("key", ["key", "k0", "k1"]),
    ],
)  # fmt: skip
def test_a_role_chain_ends_where_the_core_begins(root: str, chain: list[str], tmp_path: Path) -> None:
    model, candidate = step_candidate(tmp_path)
    kinds = classes.classify(model)
    found = region.role_chain(model.graph, kinds, candidate, model.graph.find(root))
    assert [model.graph.name(value) for value in found] == chain
