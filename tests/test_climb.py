"""Climbing towards the inputs: what is passed and where it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphs
from deltafuse.classes import classify
from deltafuse.climb import Climber
from deltafuse.shapes import Shapes

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
climb (float[2,6,4,5] x, float[2,6,4] g, float[2,6,4] other, int64[1] ids, bool[2,6,4] choice) => (float y)
<float[5] w = {{1, 2, 3, 4, 5}}, float half = {{0.5}}, int64[1] one = {{1}}, int64[1] two = {{2}},
 int64[1] last = {{-1}}, int64[1] zero = {{0}}>
{{
  {body}
}}
"""


def climber(body: str, folder: Path):
    model = graphs.scanned(graphs.parse(TEXT.format(body=body)), folder)
    made = Climber(model.graph, classify(model), Shapes(model), graphs.pattern().fence)
    return model.graph, made


@pytest.mark.parametrize(
    ("body", "roots"),
    [
        ("y = Transpose<perm = [0, 2, 1]>(g)", {"g"}),
        ("a = CumSum(g, one)\n  b = Unsqueeze(a, last)\n  c = Unsqueeze(a, two)\n  y = Sub(b, c)", {"g"}),
        ("a = Neg(g)\n  y = Mul(a, half)", {"g"}),
        ("a = Softplus(g)\n  n = Neg(a)\n  y = Squeeze(n, last)", {"n"}),
        ("a = Sigmoid(g)\n  y = Add(a, a)", {"a"}),
        ("y = Add(g, other)", {"g", "other"}),
        ("y = Mul(g, other)", {"y"}),
        # The sign in front of a fenced value is part of how a decay is made.
        ("a = Softplus(g)\n  y = Neg(a)", {"y"}),
        ("a = Softplus(g)\n  n = Neg(a)\n  y = Mul(n, half)", {"y"}),
        ("a = Softplus(g)\n  b = Unsqueeze(a, last)\n  y = Mul(b, half)", {"a"}),
        # An activation with a threshold ends in a choice by data.
        ("a = Softplus(g)\n  b = Where(choice, g, a)\n  y = Neg(b)", {"y"}),
        ("a = Where(choice, g, other)\n  y = Cast<to = 1>(a)", {"a"}),
        ("a = Gather<axis = 1>(g, ids)\n  y = Unsqueeze(a, last)", {"a"}),
        ("a = Gather<axis = 1>(g, one)\n  y = Unsqueeze(a, last)", {"g"}),
    ],
)
def test_a_log_decay_is_reached_through_linear_rearrangements(body: str, roots: set[str], tmp_path: Path) -> None:
    graph, made = climber(body, tmp_path)
    found = made.decay_roots(graph.find("y"))
    assert {graph.name(value) for value in found} == roots
    assert made.decay_roots(graph.find("y")) is found


@pytest.mark.parametrize(
    ("body", "roots"),
    [
        ("y = Transpose<perm = [0, 2, 1, 3]>(x)", {"x"}),
        ("a = Mul(x, x)\n  b = ReduceSum(a, last)\n  c = Sqrt(b)\n  y = Div(x, c)", {"x"}),
        ("a = Unsqueeze(other, last)\n  y = Mul(x, a)", {"x", "other"}),
        ("s = Sigmoid(x)\n  a = Mul(x, s)\n  y = Neg(a)", {"a"}),
        ("s = Sigmoid(x)\n  c = Cast<to = 1>(s)\n  a = Mul(c, x)\n  y = Neg(a)", {"a"}),
        ("a = Tanh(x)\n  y = Mul(a, half)", {"a"}),
        ("a = Mul(x, w)\n  y = Mul(a, half)", {"a"}),
        ("a = Abs(x)\n  y = Neg(a)", {"a"}),
        # A sigmoid that is written out ends a climb like one that is not.
        ("n = Neg(x)\n  e = Exp(n)\n  a = Add(e, half)\n  b = Reciprocal(a)\n  y = Neg(b)", {"b"}),
        ("n = Neg(x)\n  e = Exp(n)\n  a = Add(e, half)\n  b = Div(x, a)\n  y = Neg(b)", {"b"}),
        # Time is parted inside the rule, features and the batch are parted outside of it.
        ("a = Slice(x, zero, two, one)\n  y = Neg(a)", {"x"}),
        ("a, y = Split<axis = 1>(x)", {"x"}),
        ("a, y = Split<axis = 3>(x)", {"y"}),
        ("y = Gather<axis = 0>(x, zero)", {"y"}),
        ("y = Gather<axis = 1>(x, ids)", {"y"}),
    ],
)
def test_an_operand_is_reached_through_its_preparation(body: str, roots: set[str], tmp_path: Path) -> None:
    graph, made = climber(body, tmp_path)
    found = made.roots([graph.find("y")], graph.find("g"))
    assert graph.name(found[0]) == "g"
    assert {graph.name(value) for value in found[1:]} == roots


def test_a_climb_ends_at_the_log_decay(tmp_path: Path) -> None:
    graph, made = climber("a = Neg(g)\n  b = Unsqueeze(a, last)\n  y = Mul(x, b)", tmp_path)
    assert [graph.name(v) for v in made.roots([graph.find("y")], graph.find("a"))] == ["a", "x"]


def test_an_axis_of_one_may_be_taken_apart(tmp_path: Path) -> None:
    body = "a = Unsqueeze(x, zero)\n  y = Gather<axis = 0>(a, zero)"
    graph, made = climber(body, tmp_path)
    assert [graph.name(v) for v in made.roots([graph.find("y")], graph.find("g"))] == ["g", "x"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("a, b = Split<axis = 2>(g)\n  y = Exp(a)\n  z = Neg(b)", "a"),
        ("s = Unsqueeze(g, last)\n  a, b = Split<axis = 2>(s)\n  y = Exp(a)\n  z = Neg(b)", "a"),
        # Time that is parted is no packing: each part leads to an exponential.
        ("a, b = Split<axis = 1>(g)\n  z = Exp(b)\n  y = Exp(a)", "g"),
        ("a = Neg(g)\n  y = Exp(a)", "g"),
    ],
)
def test_a_packed_log_decay_is_the_part_that_is_read(body: str, found: str, tmp_path: Path) -> None:
    graph, made = climber(body, tmp_path)
    exponents = [graph.node_inputs[node][0] for node, op in enumerate(graph.op) if op == "Exp"]
    assert graph.name(made.part(graph.find("g"), exponents)) == found
    assert {graph.name(root) for value in exponents for root in made.decay_roots(value)} == {found}
