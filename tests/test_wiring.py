"""Which parts of a graph are equal up to names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import graphs
from deltafuse.wiring import Wiring, Wirings


def of(model: onnx.ModelProto, folder: Path, roots: Sequence[str], nodes: Sequence[int], ends: Sequence[str]) -> Wiring:
    """The wiring of a part, told by names."""
    scanned = graphs.scanned(model, folder)
    starts, stops = ([scanned.graph.find(name) or 0 for name in names] for names in (roots, ends))
    return Wirings(scanned).of(starts, nodes, stops)


def plain(*nodes: onnx.NodeProto, initializer: Sequence[TensorProto] = ()) -> onnx.ModelProto:
    """Nodes on two inputs `a` and `b`."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "ab"]
    outputs = [onnx.ValueInfoProto(name=node.output[0]) for node in nodes]
    return helper.make_model(helper.make_graph(list(nodes), "plain", inputs, outputs, initializer))


def test_parts_that_differ_in_names_only_are_equal(tmp_path: Path) -> None:
    model = plain(helper.make_node("Neg", ["a"], ["x"]), helper.make_node("Neg", ["b"], ["y"]))
    first, second = of(model, tmp_path, "a", [0], "x"), of(model, tmp_path, "b", [1], "y")
    assert first.key == second.key
    x, y = first.values[first.places([int(first.values[-1])])], int(second.values[-1])
    assert first.counterpart(int(x[0]), second) == y


def test_where_operators_end_counts(tmp_path: Path) -> None:
    chains = [("A B", "C"), ("A", "B C")]
    nodes = [
        helper.make_node(op, [given], [made], domain="own")
        for index, chain in enumerate(chains)
        for op, given, made in ((chain[0], "a", f"m{index}"), (chain[1], f"m{index}", f"x{index}"))
    ]
    first, second = (of(plain(*nodes), tmp_path, "a", [at, at + 1], [f"x{at // 2}"]) for at in (0, 2))
    assert first.key != second.key


def constant(name: str, value: float) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor("", TensorProto.FLOAT, [], [value]))


def add_and_take(given: str, added: str, taken: str, made: str) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    return helper.make_node("Add", [given, added], [f"{made}.m"]), helper.make_node("Sub", [f"{made}.m", taken], [made])


@pytest.mark.parametrize(("taken", "equal"), [(2.0, True), (3.0, False)])
def test_where_a_constant_stands_does_not_count(taken: float, equal: bool, tmp_path: Path) -> None:
    """The first part takes 2 from a node between its own, the second one from a node before all of its own."""
    add, take = add_and_take("a", "one", "two", "x")
    shared = constant("one", 1.0), add, constant("two", 2.0), take
    model = plain(*shared, constant("own", taken), *add_and_take("b", "one", "own", "y"))
    first, second = of(model, tmp_path, "a", [0, 1, 2, 3], "x"), of(model, tmp_path, "b", [0, 4, 5, 6], "y")
    assert (first.key == second.key) == equal


def test_two_readers_of_one_constant_are_told_from_readers_of_two(tmp_path: Path) -> None:
    one, two = constant("one", 1.0), constant("two", 1.0)
    model = plain(one, two, *add_and_take("a", "one", "two", "x"), *add_and_take("b", "one", "one", "y"))
    first, second = of(model, tmp_path, "a", [0, 1, 2, 3], "x"), of(model, tmp_path, "b", [0, 4, 5], "y")
    assert first.key != second.key


@pytest.mark.parametrize(("dtype", "equal"), [(TensorProto.FLOAT, True), (TensorProto.BFLOAT16, False)])
def test_the_type_of_a_constant_counts_where_it_is_read_as_another(dtype: int, equal: bool, tmp_path: Path) -> None:
    """bfloat16 is read as float32."""
    tensors = [helper.make_tensor(name, kind, [2], [0.5, 2.0])
               for name, kind in (("c", TensorProto.FLOAT), ("d", dtype))]  # fmt: skip
    nodes = [helper.make_node("Cast", [name], [f"{name}.x"], to=TensorProto.DOUBLE) for name in "cd"]
    model = plain(*nodes, initializer=tensors)
    first, second = (of(model, tmp_path, (), [at], [f"{name}.x"]) for at, name in enumerate("cd"))
    assert (first.key == second.key) == equal


@pytest.mark.parametrize(("roots", "equal"), [("ab", True), ("ba", False)])
def test_what_a_subgraph_reads_counts(roots: str, equal: bool, tmp_path: Path) -> None:
    """Both branches read `a`: of the first part it is the first root."""
    flag = helper.make_tensor("flag", TensorProto.BOOL, [], [True])
    inner = helper.make_node("Neg", ["a"], ["inner"])
    body = helper.make_graph([inner], "body", [], [onnx.ValueInfoProto(name="inner")])
    nodes = [helper.make_node("If", ["flag"], [name], then_branch=body, else_branch=body) for name in "xy"]
    model = plain(*nodes, initializer=[flag])
    first, second = of(model, tmp_path, "ab", [0], "x"), of(model, tmp_path, roots, [1], "y")
    assert (first.key == second.key) == equal
