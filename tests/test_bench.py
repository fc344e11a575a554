"""Numbers for symbolic sizes, and running a cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

import graphs
from deltafuse.bench import TOKENS, Bench, bindings, open_bench, solve
from deltafuse.dims import symbol
from deltafuse.probe import cut_model
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.worker import Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


B, T = symbol("batch"), symbol("tokens")


def test_solve_finds_what_an_expression_needs() -> None:
    numbers = solve([(4 * B, 8), (T + 1, 6)], ["batch", "tokens"])
    assert numbers is not None
    assert (numbers["batch"], numbers["tokens"]) == (2, 5)


def test_solve_says_when_there_is_nothing() -> None:
    assert solve([(4 * B, 7)], ["batch"]) is None
    assert solve([(B, 3), (2 * B, 5)], ["batch"]) is None


def test_other_symbols_get_sizes_of_their_own() -> None:
    numbers = solve([(T, 5)], ["tokens", "past", "width"])
    assert numbers is not None
    assert numbers["tokens"] == 5
    assert len({numbers["past"], numbers["width"], 1, 2}) == 4


def test_a_fixed_site_has_one_binding() -> None:
    (only,) = bindings({1: (1, 4, 2), 2: (1, 4, 2, 8)}, {}, 1)
    assert (only.batch, only.tokens, dict(only.numbers)) == (None, None, {})


def test_batch_two_comes_first_and_tokens_in_their_order() -> None:
    found = list(bindings({1: (B, T, 2), 2: (B, T, 2, 8)}, {}, 1))
    assert (found[0].batch, found[0].tokens) == (2, TOKENS[0])
    assert dict(found[0].numbers) == {"batch": 2, "tokens": TOKENS[0]}
    assert {binding.batch for binding in found} == {1, 2}
    assert {binding.tokens for binding in found} >= set(TOKENS)
    assert len({tuple(sorted(binding.numbers.items())) for binding in found}) == len(found)


def test_operands_with_symbols_of_their_own_are_bound_together() -> None:
    first = next(bindings({1: (symbol("s1"), symbol("s2"), 2), 2: (symbol("s3"), symbol("s4"), 2, 8)}, {}, 1))
    assert first.numbers["s1"] == first.numbers["s3"] == 2
    assert first.numbers["s2"] == first.numbers["s4"] == TOKENS[0]


def test_a_binding_moves_to_other_sizes() -> None:
    first = next(bindings({1: (B, 2 * T, 4)}, {}, 1))
    moved = first.at(12, 1)
    assert moved is not None
    assert dict(moved.numbers) == {"batch": 1, "tokens": 6}
    assert (moved.batch, moved.tokens) == (1, 12)
    assert first.at(7, 1) is None


def bench(worker: Worker, folder: Path) -> tuple[Bench, dict[str, int]]:
    model = graphs.scanned(
        graphs.parse(
            """
            <ir_version: 8, opset_import: ["" : 17]>
            cut (float[batch,tokens,3] x, float[2,3] other) => (float[m,n] y) <int64[1] last = {-1}> {
              s = Shape(x)
              a = Neg(x)
              half = Cast<to = 10>(a)
              y = Reshape(half, s)
            }"""
        ),
        folder,
    )
    names = {name: model.graph.find(name) for name in ("x", "s", "a", "y")}
    shapes = Shapes(model)
    cut = cut_model(model, shapes, [names["x"], names["s"]], [names["a"], names["y"]])
    assert not isinstance(cut, Reason)
    by_value = {value: name for name, value in names.items()}
    opened = open_bench(worker, cut, by_value, {names["x"]: (B, T, 3)}, {names["s"]: (T, B, 3)})
    assert not isinstance(opened, Reason)
    return opened, names


def test_a_cut_runs_in_double_with_the_shapes_that_the_binding_gives(worker: Worker, tmp_path: Path) -> None:
    opened, names = bench(worker, tmp_path)
    binding = {"batch": 2, "tokens": 5}
    assert opened.shape(names["x"], binding) == (2, 5, 3)
    x = np.random.default_rng(0).standard_normal((2, 5, 3))
    ran = opened.run({names["x"]: x}, binding)
    assert not isinstance(ran, Reason)
    assert ran[names["y"]].shape == (5, 2, 3)
    # No rounding to half precision is left.
    assert np.array_equal(ran[names["y"]], -x.reshape(5, 2, 3))
    only = opened.run({names["x"]: x}, binding, [names["a"]])
    assert not isinstance(only, Reason)
    assert list(only) == [names["a"]]


def test_sizes_that_do_not_go_together_do_not_run(worker: Worker, tmp_path: Path) -> None:
    opened, names = bench(worker, tmp_path)
    ran = opened.run({names["x"]: np.zeros((2, 5, 3))}, {"batch": 2, "tokens": 4})
    assert isinstance(ran, Reason)
    assert ran.code == "cut-does-not-run"
    assert ran.text


def test_a_root_of_unknown_rank_is_told(tmp_path: Path) -> None:
    model = graphs.step(("v0 = Squeeze(value, time)", "v9 = Mystery(value)\n  v0 = Squeeze(v9, time)"))
    next(node for node in model.graph.node if node.op_type == "Mystery").domain = "somewhere.else"
    model.opset_import.append(helper.make_opsetid("somewhere.else", 1))
    report = graphs.fuse(graphs.save(model, tmp_path))
    assert (report.exit, graphs.codes(report)) == (3, ["dims-unknown"])
    assert "v9" in report.sites[0].reason.text
