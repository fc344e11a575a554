"""Loops that count in their condition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphs

MODEL = Path(__file__).parent / "zoo/loop_while.onnx"


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def parts(model: onnx.ModelProto) -> tuple[onnx.NodeProto, onnx.GraphProto]:
    """The loop and its body."""
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    return loop, next(attribute.g for attribute in loop.attribute if attribute.name == "body")


def constant(nodes, name: str, number: int) -> None:
    """Gives a Constant node's one number."""
    node = next(node for node in nodes if name in node.output)
    held = numpy_helper.to_array(node.attribute[0].t)
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.full(held.shape, number, held.dtype)))


def writer(nodes, name: str) -> onnx.NodeProto:
    return next(node for node in nodes if name in node.output)


def outcome(model: onnx.ModelProto, folder: Path) -> tuple[int, list[str]]:
    report = graphs.fuse(graphs.save(model, folder), folder / "out.onnx")
    assert (folder / "out.onnx").exists() == (report.exit == 0)
    return report.exit, graphs.codes(report)


def test_a_condition_that_counts_to_the_tokens_is_fused(tmp_path: Path) -> None:
    assert outcome(onnx.load(MODEL), tmp_path) == (0, [""])


def test_a_trip_count_beside_the_condition_is_not_known_to_come_later(tmp_path: Path) -> None:
    model = onnx.load(MODEL)
    loop, _ = parts(model)
    constant(model.graph.node, loop.input[0], 2000)
    assert outcome(model, tmp_path) == (3, ["trip-count"])


@pytest.mark.parametrize(("what", "number"), [("start", 1), ("step", 2)])
def test_a_counter_that_leaves_tokens_out_is_refused(what: str, number: int, tmp_path: Path) -> None:
    model = onnx.load(MODEL)
    loop, body = parts(model)
    compared = writer(body.node, body.output[0].name)
    add = writer(body.node, compared.input[0])
    if what == "step":
        (name,) = [name for name in add.input if name not in {value.name for value in body.input}]
        constant(body.node, name, number)
    else:
        place = [value.name for value in body.input].index(
            next(n for n in add.input if n in {value.name for value in body.input})
        )
        constant(model.graph.node, loop.input[place], number)
    exit_code, codes = outcome(model, tmp_path)
    assert exit_code == 3
    assert codes[0] in ("early-exit", "not-the-rule", "cut-does-not-run")


def test_a_condition_of_another_kind_may_end_it_early(tmp_path: Path) -> None:
    model = onnx.load(MODEL)
    _, body = parts(model)
    writer(body.node, body.output[0].name).op_type = "LessOrEqual"
    exit_code, codes = outcome(model, tmp_path)
    assert exit_code == 3
    assert codes[0] in ("early-exit", "cut-does-not-run", "not-the-rule")
