"""What a loop's steps make of sizes, positions and places, beyond those that are tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import graphs
import loops
from deltafuse.classes import classify
from deltafuse.guards import find_guard
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes

NUMBERS = (
    "int64 far = {2000}, int64[1] far_row = {2000}, int64 axis = {1}, int64 first = {0}, float unit = {1}, "
    "float little = {0.0005}, float rate = {1.05}, float start = {1e-33}, int64 none = {0}, int64 down = {-1}, "
    "int64 twenty = {20}, int64 three = {3}, int64[8] pads = {0, 100, 0, 0, 0, 0, 0, 0}, int64[1] back = {-100}, "
    "int64[1] begin = {0}, int64[1] time = {1}, int64[8] no_pads = {0, 0, 0, 0, 0, 0, 0, 0}, float scale = {0.25}"
)
DELTA = "delta = Mul(missing, b1)"
#: A factor on the delta.
SCALED = "plain = Mul(missing, b1)\n    delta = Mul(plain, factor)"
#: One while a size is below 2000.
GATED = f"low = Less(size, far)\n    factor = Cast<to = 1>(low)\n    {SCALED}"
POWERS = "\n    ".join(f"p{i + 1} = Mul(p{i}, p{i})" for i in range(6))


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def outcome(model: onnx.ModelProto, folder: Path) -> tuple[int, list[str]]:
    report = graphs.fuse(graphs.save(model, folder), folder / "out.onnx")
    assert (folder / "out.onnx").exists() == (report.exit == 0)
    return report.exit, graphs.codes(report)


def changed(*edits: tuple[str, str], functions: str = "") -> onnx.ModelProto:
    return loops.loop(("float scale = {0.25}", NUMBERS), *edits, functions=functions)


FUNCTION = """
<domain: "my", opset_import: ["" : 17]>
F (x, w) => (y) {
  i = Identity(w)
  s = Shape(i)
  one = Constant<value = int64 {1}>()
  far = Constant<value = int64 {2000}>()
  size = Gather(s, one)
  low = Less(size, far)
  factor = Cast<to = 1>(low)
  y = Mul(x, factor)
}
"""


@pytest.mark.parametrize(
    "made",
    [
        # Of tokens, and of the batch.
        f"same = Identity(value)\n    sizes = Shape(same)\n    size = Gather(sizes, axis)\n    {GATED}",
        f"sizes = Shape(missing)\n    size = Gather(sizes, first)\n    {GATED}",
        "plain = Mul(missing, b1)\n    factor = If(c)<then_branch = t () => (float x) { sizes = Shape(value)\n"
        "    size = Gather(sizes, axis)\n    low = Less(size, far)\n    x = Cast<to = 1>(low) }, else_branch = e ()"
        " => (float z) { z = Identity(unit) }>\n    delta = Mul(plain, factor)",
        "plain = Mul(missing, b1)\n    delta = my.F(plain, value)",
    ],
)
def test_a_size_inside_a_body_is_no_settled_one(made: str, tmp_path: Path) -> None:
    model = changed((DELTA, made), functions=FUNCTION if "my.F" in made else "")
    assert outcome(model, tmp_path) == (3, ["position-gate"])


@pytest.mark.parametrize(
    "made",
    [
        "sizes = Shape(missing)\n    plain = Mul(missing, b1)\n    delta = Reshape(plain, sizes)",
        # As exporters write an Expand: a -1 in its shape is looked for.
        "sizes = Shape(missing)\n    rank = Shape(sizes)\n    ones = ConstantOfShape<value = int64[1] {1}>(rank)\n"
        "    less = Mul(ones, down)\n    free = Equal(sizes, less)\n    wanted = Where(free, ones, sizes)\n"
        "    b9 = Expand(b1, wanted)\n    delta = Mul(missing, b9)",
        # The number of axes is settled.
        "sizes = Shape(missing)\n    rank = Size(sizes)\n    low = Less(rank, far)\n    factor = Cast<to = 1>(low)\n"
        f"    {SCALED}",
    ],
)
def test_sizes_inside_a_body_lay_out(made: str, tmp_path: Path) -> None:
    assert outcome(changed((DELTA, made)), tmp_path) == (0, [""])


#: As torch's squeeze is exported: an axis of one goes, else all stays.
SQUEEZED = """wide = MatMul(q2, s9)
    sizes = Shape(wide)
    size = Gather(sizes, minus)
    single = Equal(size, one)
    o = If(single)<then_branch = t () => (float x) { x = Squeeze(wide, row) },
        else_branch = e () => (float z) { z = Identity(wide) }>"""


def squeezing(*edits: tuple[str, str]) -> onnx.ModelProto:
    """`loops.LOOP` whose output of a step is squeezed."""
    text = SQUEEZED
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return changed(
        ("float scale", "int64 minus = {-2}, float scale"),
        ("q2 = Unsqueeze(q1, last)\n    read = Mul(s9, q2)", "q2 = Unsqueeze(q1, row)"),
        ("o = ReduceSum<keepdims = 0>(read, row)", text),
    )


def test_an_axis_that_goes_where_it_is_one_does_no_harm(tmp_path: Path) -> None:
    assert outcome(squeezing(), tmp_path) == (0, [""])


@pytest.mark.parametrize(
    "edits",
    [
        # Another size is asked for, another comparison; something else is done where it is not one, or beside it.
        [("sizes = Shape(wide)", "sizes = Shape(value)"), ("Equal(size, one)", "Less(size, far)")],
        [("Equal(size, one)", "Less(size, far)")],
        [("z = Identity(wide)", "z = Neg(wide)")],
        [("x = Squeeze(wide, row)", "other = Identity(s)\n      x = Squeeze(wide, row)")],
    ],
)
def test_another_choice_by_a_size_in_a_body_refuses(edits: list[tuple[str, str]], tmp_path: Path) -> None:
    assert outcome(squeezing(*edits), tmp_path) == (3, ["position-gate"])


def test_an_axis_of_a_factor_that_goes_from_some_size_on_refuses(tmp_path: Path) -> None:
    # One row for each head becomes one column for each: of one sequence, with as many heads as value columns.
    made = (
        "sizes = Shape(value)\n    size = Gather(sizes, axis)\n    low = Less(size, far)\n"
        "    b9 = If(low)<then_branch = t () => (float x) { x = Identity(b1) },"
        " else_branch = e () => (float z) { z = Squeeze(b1, last) }>\n    delta = Mul(missing, b9)"
    )
    square = [(f"float[B,T,4,3] {name}", f"float[B,T,4,4] {name}") for name in ("value", "out")]
    square += [(f"float[B,4,5,3] {name}", f"float[B,4,5,4] {name}") for name in ("state)", "final_state")]
    assert outcome(changed(*square, (DELTA, made)), tmp_path) == (3, ["position-gate"])


def carrying(start: str, kind: str, step: str, made: str) -> onnx.ModelProto:
    """`loops.LOOP` with one more carried value, ``n``."""
    return changed(
        (
            "final_state, outs = Loop(trips, yes, state)",
            f"final_state, last_n, outs = Loop(trips, yes, state, {start})",
        ),
        ("float[b,h,d,e] s)", f"float[b,h,d,e] s, {kind} n)"),
        ("float[b,h,d,e] s9, float", f"float[b,h,d,e] s9, {kind} n9, float"),
        (DELTA, f"{step}\n    {made}"),
    )


@pytest.mark.parametrize(
    ("start", "kind", "step", "made"),
    [
        # A division of whole numbers, rounded down.
        ("none", "int64", "n9 = Sub(n, down)",
         f"d = Div(n, far)\n    f = Cast<to = 1>(d)\n    factor = Add(f, unit)\n    {SCALED}"),
        ("none", "int64", "n9 = Sub(n, down)",
         f"f = Cast<to = 1>(n)\n    p0 = Mul(f, little)\n    {POWERS}\n    factor = Add(p6, unit)\n    {SCALED}"),
        ("start", "float", "n9 = Mul(n, rate)", f"factor = Add(n, unit)\n    {SCALED}"),
    ],
)  # fmt: skip
def test_what_grows_from_step_to_step_and_is_no_data_refuses(
    start: str, kind: str, step: str, made: str, tmp_path: Path
) -> None:
    assert outcome(carrying(start, kind, step, made), tmp_path) == (3, ["position-gate"])


@pytest.mark.parametrize(
    ("start", "step", "made"),
    [
        ("unit", "n9 = Identity(n)", "plain = Mul(missing, b1)\n    delta = Mul(plain, n)"),
        ("start", "n9 = Mul(n, rate)", DELTA),
    ],
)
def test_what_is_carried_unchanged_or_not_used_does_no_harm(start: str, step: str, made: str, tmp_path: Path) -> None:
    assert outcome(carrying(start, "float", step, made), tmp_path) == (0, [""])


BEHIND = """
<ir_version: 8, opset_import: ["" : 18]>
behind (float[N,4] x, int64 steps) => (float y)
<int64 none = {0}, int64 one = {1}, int64 far = {2000}, bool on = {1}, float unit = {1}>
{
  count, kept, state = Loop(steps, on, none, unit, x)<body = b (int64 i, bool c, int64 n, float u, float s)
      => (bool c2, int64 n9, float u9, float s9) {
    c2 = Identity(c)
    n9 = Add(n, one)
    u9 = Identity(u)
    s9 = Neg(s)
  }>
  many = Div(count, far)
  factor = Cast<to = 1>(many)
  y = Mul(state, FACTOR)
}
"""


@pytest.mark.parametrize(("factor", "code"), [("factor", "position-gate"), ("state", "")])
def test_what_a_loop_has_counted_is_no_data(factor: str, code: str, tmp_path: Path) -> None:
    model = graphs.scanned(graphs.parse(BEHIND.replace("FACTOR", factor)), tmp_path)
    graph = model.graph
    scope = Scope(model, graph, classify(model), Shapes(model))
    found = find_guard(scope, range(len(graph.op)), [graph.find("x")], (), ())
    assert ("" if found is None else found.code) == code


def shifting(trips: str, pads: str, ends: str) -> str:
    """The values of all tokens, shifted in each step of an inner loop."""
    return (
        f"sure = Constant<value = bool {{1}}>()\n    moved = Loop({trips}, sure, value)<body = inner"
        " (int64 j, bool m, float[p,r,w,z] x) =>"
        f" (bool m2, float[p,r,w,z] x9) {{ m2 = Identity(m)\n    y = Pad(x, {pads})\n    x9 = {ends} }}>\n"
        "    v9 = Gather<axis = 1>(moved, i)\n"
    )


def test_reads_that_move_on_from_step_to_step_refuse(tmp_path: Path) -> None:
    """Each step reads 100 tokens back, 20 steps 2,000."""
    made = f"{shifting('twenty', 'pads', 'Slice(y, begin, back, time)')}    v8 = Add(missing, v9)\n"
    model = changed((DELTA, f"{made}    delta = Mul(v8, b1)"))
    assert outcome(model, tmp_path) == (3, ["position-gate"])


def test_a_loop_that_reads_in_place_does_no_harm(tmp_path: Path) -> None:
    made = shifting("three", "no_pads", "Identity(y)")
    model = changed(("v0 = Gather<axis = 1>(value, i)", f"{made}    v0 = Identity(v9)"))
    assert outcome(model, tmp_path) == (0, [""])


STEPS = """
<ir_version: 8, opset_import: ["" : 18]>
steps (float[N,4] x, int64 count) => (float y)
<bool on = {1}, int64[1] first = {0}, int64[1] hundred = {100}, int64[1] end = {9223372036854775807}>
{
  y, other = Loop(count, on, x, x)<body = b (int64 i, bool c, float s, float t) => (bool c2, float s9, float t9) {
    c2 = Identity(c)
    BODY
  }>
}
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        # From around and once through what is carried: as far in each step.
        ("far = Slice(x, hundred, end, first)\n    s9 = Add(s, far)\n    t9 = Neg(t)", ""),
        ("far = Slice(x, hundred, end, first)\n    t9 = Neg(far)\n    s9 = Slice(t, hundred, end, first)", ""),
        ("s9 = Slice(s, hundred, end, first)\n    t9 = Neg(t)", "position-gate"),
        # Through one and the other in turn.
        ("s9 = Neg(t)\n    t9 = Slice(s, hundred, end, first)", "position-gate"),
    ],
)
def test_moves_add_up_where_steps_make_them_again(body: str, code: str, tmp_path: Path) -> None:
    model = graphs.scanned(graphs.parse(STEPS.replace("BODY", body)), tmp_path)
    graph = model.graph
    scope = Scope(model, graph, classify(model), Shapes(model))
    found = find_guard(scope, range(len(graph.op)), [graph.find("x")], (), ())
    assert ("" if found is None else found.code) == code
