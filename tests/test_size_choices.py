"""Branches that a size chooses: looked through where the choice comes round again, refused where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import graphs
from deltafuse.shapes import Shapes
from deltafuse.size_choices import period
from exports import export

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
choice (float[batch,tokens,4] x) => (bool y)
<int64 one = {{1}}, int64 four = {{4}}, int64 zero = {{0}}, int64 three = {{3}}, int64 many = {{2000}}>
{{
  shape = Shape(x)
  t = Gather(shape, one)
  b = Gather(shape, zero)
  {body}
}}
"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("m = Mod(t, four)\n  y = Greater(m, zero)", (4, "tokens")),
        ("m = Mod(t, four)\n  d = Sub(four, m)\n  p = Mod(d, four)\n  g = Greater(p, zero)\n  y = Cast<to = 9>(g)",
         (4, "tokens")),
        ("m = Mod(b, three)\n  y = Equal(m, one)", (3, "batch")),
        ("m = Mod(t, many)\n  y = Equal(m, one)", (0, "")),
        ("y = Greater(t, many)", (0, "")),
        ("y = Less(many, t)", (0, "")),
        ("y = Greater(t, zero)", (1, "tokens")),
        ("y = Equal(t, b)", (0, "")),
        # False for most sizes.
        ("y = Equal(t, many)", (0, "")),
        ("q = Div(t, many)\n  y = Equal(q, one)", (0, "")),
        ("q = Mul(t, t)\n  m = Mul(t, many)\n  y = Less(q, m)", (0, "")),
        # True for all.
        ("d = Add(t, many)\n  y = Greater(d, t)", (1, "tokens")),
    ],
)  # fmt: skip
def test_a_choice_that_comes_round_again_is_known_by_its_period(
    body: str, found: tuple[int, str], tmp_path: Path
) -> None:
    model = graphs.scanned(graphs.parse(TEXT.format(body=body)), tmp_path)
    assert period(model.graph, Shapes(model), model.graph.find("y")) == found


def scaled_where(condition: list[onnx.NodeProto], factor: float) -> onnx.ModelProto:
    """A chunk rule for 17 to 32 tokens with a factor on its log decay where a condition ``c`` on the tokens holds."""
    model = onnx.load(export("chunk_dy20_dynBT").path)

    def branch(name: str, node: onnx.NodeProto) -> onnx.GraphProto:
        result = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
        return helper.make_graph([node], name, [], [result])

    def make(x: str, y: str) -> graphs.Nodes:
        choice = helper.make_node(
            "If", ["c"], [y], name="choice",
            then_branch=branch("then", helper.make_node("Mul", [x, "factor"], ["scaled"])),
            else_branch=branch("else", helper.make_node("Identity", [x], ["same"])),
        )  # fmt: skip
        size = [helper.make_node("Shape", [x], ["s"]), helper.make_node("Gather", ["s", "one"], ["t"])]
        numbers = {"one": 1, "three": 3, "four": 4, "far": 3000}
        constants = [graphs.constant(name, number, np.int64) for name, number in numbers.items()]
        return [*size, *condition, choice], [*constants, graphs.constant("factor", factor)]

    return graphs.insert(model, "g", make)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_each_turn_of_a_choice_is_tried(factor: float, tmp_path: Path) -> None:
    condition = [helper.make_node("Mod", ["t", "four"], ["m"]), helper.make_node("Equal", ["m", "three"], ["c"])]
    report = graphs.fuse(graphs.save(scaled_where(condition, factor), tmp_path), tmp_path / "out.onnx")
    # Where the factor is one the branches are the same; else one turn of four is another rule.
    if factor == 1.0:
        assert (report.exit, graphs.codes(report)) == (0, [""])
    else:
        assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])
        assert not (tmp_path / "out.onnx").exists()


def test_a_choice_beyond_a_size_is_refused(tmp_path: Path) -> None:
    condition = [helper.make_node("Greater", ["t", "far"], ["c"])]
    report = graphs.fuse(graphs.save(scaled_where(condition, 2.0), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["position-gate"])


def prefix(graph: onnx.GraphProto, text: str) -> None:
    """Puts a text before all names, those that branches read from around too."""
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        named.name = text + named.name
    for node in graph.node:
        node.input[:] = [name and text + name for name in node.input]
        node.output[:] = [name and text + name for name in node.output]
        for attribute in node.attribute:
            prefix(attribute.g, text)


@pytest.mark.parametrize("bounds", [(0, 3000), (3000, 0), (0, 0)])
def test_a_choice_is_not_covered_by_the_proof_of_a_layer_with_another_bound(
    bounds: tuple[int, int], tmp_path: Path
) -> None:
    """Both branches are the same, so that no run tells the layers apart; there always are more than 0 tokens."""
    whole = onnx.ModelProto()
    for index, bound in enumerate(bounds):
        part = scaled_where([helper.make_node("Greater", ["t", "far"], ["c"])], 1.0)
        (far,) = (one for one in part.graph.initializer if one.name == "far")
        far.CopyFrom(graphs.constant("far", bound, np.int64))
        prefix(part.graph, f"p{index}/")
        if not index:
            whole.CopyFrom(part)
            continue
        for field in ("node", "input", "output", "value_info", "initializer"):
            getattr(whole.graph, field).extend(getattr(part.graph, field))
    report = graphs.fuse(graphs.save(whole, tmp_path), tmp_path / "out.onnx", keep_going=True)
    assert graphs.codes(report) == ["position-gate" if bound else "" for bound in bounds]
