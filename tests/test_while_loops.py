"""Loops that count in their condition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphs
import loops

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


@pytest.mark.parametrize(("what", "number", "code"), [("start", 1, "tokens-skipped"), ("step", 2, "early-exit")])
def test_a_counter_that_leaves_tokens_out_is_refused(what: str, number: int, code: str, tmp_path: Path) -> None:
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
    assert outcome(model, tmp_path) == (3, [code])


def test_a_condition_of_another_kind_may_end_it_early(tmp_path: Path) -> None:
    model = onnx.load(MODEL)
    _, body = parts(model)
    writer(body.node, body.output[0].name).op_type = "LessOrEqual"
    exit_code, codes = outcome(model, tmp_path)
    assert exit_code == 3
    assert codes[0] in ("early-exit", "cut-does-not-run", "not-the-rule")


#: Element types of ONNX text that count to any number of tokens, and those that do not.
EXACT, SHORT = ("int64", "int32"), ("float16", "float", "double", "int16", "int8")
COUNT = "t9 = Add(t, t_one)"
READ = ("Gather<axis = 1>(value, i)", "Gather<axis = 1>(value, t)")
#: A factor that is one as long as the counter is not below zero.
ABOVE = (
    "delta = Mul(missing, b1)",
    "plain = Mul(missing, b1)\n    low = Less(t, t_zero)\n    high = Not(low)\n    factor = Cast<to = 1>(high)\n"
    "    delta = Mul(plain, factor)",
)


def counting(carried: str, *edits: tuple[str, str], made: str = COUNT) -> onnx.ModelProto:
    """`loops.LOOP` with a carried counter of some type."""
    return loops.loop(
        ("int64 one = {1}>", f"int64 one = {{1}}, {carried} t0 = {{0}}>"),
        ("final_state, outs = Loop(trips, yes, state)", "final_state, last_t, outs = Loop(trips, yes, state, t0)"),
        ("float[b,h,d,e] s)", f"float[b,h,d,e] s, {carried} t)"),
        (
            "float[b,h,d,e] s9, float[b,h,e] o)",
            f"float[b,h,d,e] s9, {carried} t9, float[b,h,e] o) <{carried} t_one = {{1}}, {carried} t_zero = {{0}}>",
        ),
        ("c2 = Identity(c)", f"c2 = Identity(c)\n    {made}"),
        *edits,
    )


@pytest.mark.parametrize("carried", EXACT)
@pytest.mark.parametrize("edit", [READ, ABOVE], ids=["read", "above"])
def test_a_carried_counter_of_whole_numbers_is_a_position(carried: str, edit: tuple[str, str], tmp_path: Path) -> None:
    assert outcome(counting(carried, edit), tmp_path) == (0, [""])


@pytest.mark.parametrize("carried", SHORT)
def test_a_carried_counter_that_stops_counting_is_none(carried: str, tmp_path: Path) -> None:
    assert outcome(counting(carried, ABOVE), tmp_path) == (3, ["position-gate"])


@pytest.mark.parametrize("narrow", [10, 1, 3])
def test_a_counter_that_is_rounded_on_its_way_is_none(narrow: int, tmp_path: Path) -> None:
    made = f"more = Add(t, t_one)\n    short = Cast<to = {narrow}>(more)\n    t9 = Cast<to = 7>(short)"
    assert outcome(counting("int64", READ, made=made), tmp_path) == (3, ["position-gate"])


def test_a_counter_between_whole_types_is_a_position(tmp_path: Path) -> None:
    made = "more = Add(t, t_one)\n    short = Cast<to = 6>(more)\n    t9 = Cast<to = 7>(short)"
    assert outcome(counting("int64", READ, made=made), tmp_path) == (0, [""])
