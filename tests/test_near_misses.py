"""What must not be fused: near misses, and the rule with a guard that no draw of a proof reaches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import graphs
import guarded
from exports import export, exports

NEAR = {
    "nm_chunk_decay_sign": ["decay-turned"],
    "nm_decay_floor": ["piecewise"],
    "nm_decay_sign": ["decay-sign"],
    "nm_loop_clamped": ["piecewise"],
    "nm_loop_early": ["early-exit"],
    "nm_loop_gated": ["position-gate"],
    "nm_loop_short": ["trip-count"],
    "nm_softmax": [],
    "nm_softmax_exp": [],
    "nm_stale_read": ["read-before-update"],
    "nm_state_clamp": ["piecewise"],
}

#: A fused graph is right where it differs from the unfused one by rounding in double.
SAME = 1e-9


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def test_every_near_miss_is_tried() -> None:
    assert sorted(NEAR) == [one.name for one in exports(expect="no-match")]


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    report = graphs.fuse(export(name).path, tmp_path / "out.onnx", keep_going=True)
    assert report.exit == export(name).truth["exit"] == 3
    assert graphs.codes(report) == NEAR[name]
    assert {site.status for site in report.sites} <= {"near-miss"}
    assert list(tmp_path.iterdir()) == []


# One step in ONNX text, changed.


def refusal(tmp_path: Path, *edits: tuple[str, str], outputs: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    report = graphs.fuse(graphs.save(graphs.step(*edits, outputs=outputs), tmp_path), tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").exists() == (report.exit == 0)
    return report.exit, graphs.codes(report)


def test_the_step_itself_is_fused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (0, [""])


@pytest.mark.parametrize(
    ("code", "edits"),
    [
        ("decay-sign", [("e0 = Exp(g0)", "n0 = Neg(g0)\n  e0 = Exp(n0)")]),
        ("decay-missing", [("Mul(state, e2)", "Mul(state, e3)"), ("  decayed", "  e3 = Div(e2, e2)\n  decayed")]),
        ("no-delta-term", [("Sub(v0, known)", "Identity(v0)")]),
        ("no-delta-term", [("Mul(missing, b1)", "Mul(v0, b1)")]),
        ("undecayed-read", [("Mul(decayed, k1)", "Mul(state, k1)")]),
        ("read-before-update", [("Mul(final_state, q2)", "Mul(decayed, q2)")]),
        ("undecayed-update", [("Add(decayed, update)", "Add(state, update)")]),
    ],
)
def test_a_neighbour_of_the_rule_is_named(code: str, edits: list[tuple[str, str]], tmp_path: Path) -> None:
    assert refusal(tmp_path, *edits) == (3, [code])


def test_a_delta_that_is_read_with_the_query_is_named(tmp_path: Path) -> None:
    # The scale is that of a key size of four.
    sizes = [("[1,1,4,5]", "[1,1,4,4]"), ("[1,4,5,3]", "[1,4,4,3]"), ("scale = {0.25}", "scale = {0.5}")]
    early = "  q1 = Mul(q0, scale)\n  q2 = Unsqueeze(q1, last)\n"
    moved = [(early, ""), ("  product = Mul(decayed, k1)", f"{early}  product = Mul(decayed, q2)")]
    assert refusal(tmp_path, *sizes, *moved) == (3, ["query-corrected"])


@pytest.mark.parametrize("state", ["decayed", "state"])
def test_a_key_of_its_own_to_read_with_is_named_whatever_state_it_reads(state: str, tmp_path: Path) -> None:
    given = ("float[1,1,4] beta,", "float[1,1,4] beta, float[1,1,4,5] p,")
    read = f"p0 = Squeeze(p, time)\n  p1 = Unsqueeze(p0, last)\n  product = Mul({state}, p1)"
    assert refusal(tmp_path, given, ("product = Mul(decayed, k1)", read)) == (3, ["erase-per-channel"])


@pytest.mark.parametrize(
    "edits",
    [
        [("Mul(k1, delta_row)", "Mul(q2, delta_row)"), ("  q1 = Mul(q0, scale)\n  q2 = Unsqueeze(q1, last)\n", ""),
         ("  k1 =", "  q1 = Mul(q0, scale)\n  q2 = Unsqueeze(q1, last)\n  k1 =")],
        [("Add(decayed, update)", "Sub(decayed, update)")],
        [("Sub(v0, known)", "Add(v0, known)")],
        [("delta = Mul(missing, b1)", "d9 = Mul(missing, b1)\n  delta = Mul(d9, e1)")],
    ],
)  # fmt: skip
def test_other_arithmetic_is_not_the_rule(edits: list[tuple[str, str]], tmp_path: Path) -> None:
    assert refusal(tmp_path, *edits) == (3, ["not-the-rule"])


def test_a_value_that_is_missing_at_one_token_is_refused(tmp_path: Path) -> None:
    # Tokens, heads and columns have sizes such that more than one assignment of roles fits, with other head sizes.
    model = onnx.load(export("rec_ts17_T4_noinit").path)
    nodes = {node.output[0]: node for node in model.graph.node}
    first = nodes["/Gather_2_output_0"]
    value, zeros = nodes[first.input[0]], nodes["/Constant_28_output_0"]
    assert list(zeros.attribute[0].t.dims) == [1, 4, 4, 32]
    assert value.op_type == "Cast"
    first.input[0] = zeros.output[0]
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["not-the-rule"])


@pytest.mark.usefixtures("any_factor")
def test_a_difference_below_the_screen_is_still_a_difference(tmp_path: Path) -> None:
    edits = (
        ("decayed = Mul(state, e2)", "e3 = Add(e2, little)\n  decayed = Mul(state, e3)"),
        ("float scale", "float little = {1e-10}, float scale"),
    )
    assert refusal(tmp_path, *edits) == (3, ["not-equal"])


CHANNELS = (("float[1,1,4] g", "float[1,1,4,5] g"), ("e2 = Unsqueeze(e1, last)", "e2 = Identity(e1)"))


def test_a_decay_per_channel_is_a_rule_of_its_own(tmp_path: Path) -> None:
    # Head sizes of 5 and 3 are none of the recurrent kernel's, and the chunk kernel takes no such decay.
    assert refusal(tmp_path, *CHANNELS) == (4, ["per-channel-decay"])


def test_a_decay_per_channel_is_not_the_gated_rule(tmp_path: Path) -> None:
    model = graphs.save(graphs.step(*CHANNELS), tmp_path)
    report = graphs.fuse(model, tmp_path / "out.onnx", rules=("gated_delta_rule",))
    assert (report.exit, graphs.codes(report)) == (3, ["decay-shape"])
    assert "1 x 1 x 4 x 5" in report.sites[0].reason.text


@pytest.mark.parametrize("value", ["e2", "decayed", "product", "known", "missing", "delta", "update"])
def test_an_inner_value_that_is_read_outside_refuses(value: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, outputs=(value,)) == (4, ["inner-value-used"])


@pytest.mark.parametrize("value", ["q0", "k1", "v0", "g0", "b1", "q2", "read"])
def test_a_value_that_can_stay_stays_and_stays_right(value: str, tmp_path: Path) -> None:
    model = graphs.step(outputs=(value,))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""])
    fused = graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report)
    assert graphs.difference(fused, graphs.double(model), graphs.wide_feeds(model, 1)) < SAME


def test_an_output_that_is_computed_twice_refuses(tmp_path: Path) -> None:
    edits = (
        ("  out =", "  read2 = Mul(q2, final_state)\n  o2 = ReduceSum<keepdims = 0>(read2, row)\n  out ="),
        ("=> (float[1,1,4,3] out", "=> (float[1,4,3] o2, float[1,1,4,3] out"),
    )
    assert refusal(tmp_path, *edits) == (4, ["no-output"])


QUERY_FROM_STATE = "  s0 = ReduceSum<keepdims = 0>(final_state, last)\n  s1 = Sigmoid(s0)\n  q1 = Mul(s1, scale)"


def test_an_operand_made_from_the_final_state_is_not_convex(tmp_path: Path) -> None:
    assert refusal(tmp_path, ("  q1 = Mul(q0, scale)", QUERY_FROM_STATE)) == (4, ["not-convex"])


def test_an_operand_made_from_the_final_state_in_a_branch_refuses(tmp_path: Path) -> None:
    branch = "a () => (float[1,4,5] {0}) {{ {0} = ReduceSum<keepdims = 0>(final_state, last) }}"
    chosen = f"If(always)<then_branch = {branch.format('t')}, else_branch = {branch.format('e')}>"
    edits = (
        ("q1 = Mul(q0, scale)", f"s0 = {chosen}\n  q1 = Mul(s0, scale)"),
        ("float scale", "bool always = {1}, float scale"),
    )
    code, (reason,) = refusal(tmp_path, *edits)
    assert code in (3, 4)
    assert reason


# Sizes and flags that the rule does not know.

READ = ("(read, row)", "(r1, row)")
EXTRA = ("float[1,4,5,3] state)", "float[1,4,5,3] state, float[n] extra)")
SIZE = "  size = Shape(extra)\n  factor = Cast<to = 1>(size)\n"


@pytest.mark.parametrize(
    "edits",
    [
        [("  q1 = Mul(q0, scale)", SIZE + "  qx = Mul(q0, factor)\n  q1 = Mul(qx, scale)")],
        [("  o = ", SIZE + "  r1 = Mul(read, factor)\n  o = "), ("(read, row)", "(r1, row)")],
        [("  out = Unsqueeze(o, time)", SIZE + "  o1 = Mul(o, factor)\n  out = Unsqueeze(o1, time)")],
        [("decayed = Mul(state, e2)", SIZE + "  e3 = Mul(e2, factor)\n  decayed = Mul(state, e3)")],
    ],
)  # fmt: skip
def test_a_factor_that_depends_on_another_input_s_size_is_not_baked_in(
    edits: list[tuple[str, str]], tmp_path: Path
) -> None:
    model = graphs.step(EXTRA, *edits)
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    if report.exit:
        assert report.exit in (3, 4)
        assert not (tmp_path / "out.onnx").exists()
        return
    unfused, fused = graphs.double(model), graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report)
    for size in (1, 2, 7, 20):
        rng = np.random.default_rng(size)
        feeds = {i.name: rng.standard_normal(i.shape) for i in unfused.get_inputs() if i.name != "extra"}
        assert graphs.difference(fused, unfused, feeds | {"extra": rng.standard_normal(size)}) < SAME, size


@pytest.mark.parametrize("axis", ["batch", "tokens"])
def test_a_scale_that_depends_on_batch_or_tokens_is_refused(axis: str, tmp_path: Path) -> None:
    if axis == "batch":
        model = graphs.step(
            ("[1,1,4", "[b,1,4"), ("[1,4,5,3]", "[b,4,5,3]"),
            ("  out =", "  n = Shape<start = 0, end = 1>(value)\n  f = Cast<to = 1>(n)\n  o1 = Mul(o, f)\n  out ="),
            ("Unsqueeze(o, time)", "Unsqueeze(o1, time)"),
        )  # fmt: skip
    else:
        model = onnx.load(export("chunk_dy20_dynBT").path)
        nodes = [
            helper.make_node("Shape", ["g"], ["n"], start=1, end=2),
            helper.make_node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["out.raw", "f"], ["out"]),
        ]
        model = graphs.insert(model, "out", lambda *_: (nodes, []))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    if report.exit == 0:
        # The size may be left outside of the site: then nothing but the batch is pinned.
        assert {pin.was for pin in report.pinned if pin.value == "g"} <= {"batch", "b"}
        assert report.sites[0].match.scale == pytest.approx(0.25)
    else:
        assert report.exit in (3, 4)


@pytest.mark.parametrize(
    ("given", "edits"),
    [
        ("int64[1] flag", [("  o = ", "  f = Cast<to = 1>(flag)\n  r1 = Mul(read, f)\n  o = "), READ]),
        ("bool[1] flag", [("decayed = Mul(state, e2)", "e3 = Where(flag, e2, e2)\n  decayed = Mul(state, e3)")]),
        ("bool[1] flag", [("  o = ", "  r1 = Where(flag, read, final_state)\n  o = "), READ]),
        ("int64 flag",
         [("decayed = Mul(state, e2)", 
             "two = Concat<axis = 0>(e2, e2)\n  e3 = Gather(two, flag)\n  decayed = Mul(state, e3)")]),
        ("float flag", [("decayed = Mul(state, e2)", "e3 = Mul(e2, flag)\n  decayed = Mul(state, e3)")]),
        ("float flag", [("  o = ", "  z = Sub(flag, flag)\n  r1 = Add(read, z)\n  o = "), READ]),
    ],
)  # fmt: skip
def test_an_input_that_is_no_operand_refuses(given: str, edits: list[tuple[str, str]], tmp_path: Path) -> None:
    exit_code, reasons = refusal(tmp_path, ("float[1,4,5,3] state)", f"float[1,4,5,3] state, {given})"), *edits)
    assert exit_code in (3, 4)
    assert all(reasons)


@pytest.mark.parametrize("declared", [False, True])
def test_a_foreign_operator_of_a_known_name_is_not_trusted(declared: bool, tmp_path: Path) -> None:
    """What it gives is an operand as it stands, where its sizes are known; it is never looked through."""
    model = graphs.step(("v0 = Squeeze(value, time)", "v9 = Squeeze(value, time)\n  v0 = Identity(v9)"))
    model.opset_import.append(helper.make_opsetid("somewhere.else", 1))
    next(node for node in model.graph.node if node.op_type == "Identity").domain = "somewhere.else"
    if declared:
        model.graph.value_info.append(helper.make_tensor_value_info("v0", onnx.TensorProto.FLOAT, [1, 4, 3]))
    path = graphs.save(model, tmp_path)
    report = graphs.fuse(path, tmp_path / "out.onnx")
    if not declared:
        assert graphs.codes(report) == ["dims-unknown"]
        return
    assert report.exit == 0
    left = onnx.load(tmp_path / "out.onnx").graph.node
    assert [node.op_type for node in left if node.domain == "somewhere.else"] == ["Identity"]
    assert report.sites[0].match is not None
    assert report.sites[0].match.value.name == "v0"


# Guards at every place of real exports.

#: Places in `rec_dy18` -> what no draw reaches there.
STEP_PLACES = {
    **dict.fromkeys(
        ["query", "value", "repeat_interleave", "select_2", "state", "mul_4", "sum_3", "mul_6", "sum_4"], 1e9
    ),
    "select_3": 5.0,
    "exp": 300.0,
    "select_4": 10.0,
}
#: The rule's inner values: a guard there cannot be left in the graph.
INNER = ("exp", "unsqueeze_1", "mul_4", "mul_5", "sum_3", "sub", "mul_6", "mul_7", "mul_8")
#: Places in `chunk_dy18`.
CHUNK_PLACES = {
    "matmul_2": 1e9,
    **dict.fromkeys(["exp", "exp_3"], 300.0),
    **dict.fromkeys(["neg", "unsqueeze"], 10.0),
    "pad_4": 5.0,
}
FEW = ("clip", "where", "relu", "root of square", "norm of one", "exp", "int", "if")


def judge(base: onnx.ModelProto, plain: ort.InferenceSession, place: str, far: float, name: str, folder: Path) -> str:
    """What is wrong with how a model with a guard was treated, "" where nothing is."""
    model = graphs.insert(base, place, guarded.guard(name, far))
    draws = [guarded.beyond(model, seed) for seed in range(2)]
    unfused = graphs.double(model) if name != "quantised" else None
    if name not in guarded.ODD:
        assert max(graphs.difference(plain, unfused, feeds, strict=True) for feeds in draws) > SAME, (place, name)
    out = folder / "out.onnx"
    try:
        report = graphs.fuse(graphs.save(model, folder), out)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if report.exit:
        return "" if report.exit == 3 and not out.exists() else f"exit {report.exit}, {graphs.codes(report)}"
    fused = onnx.load(out)
    out.unlink()
    if unfused is None:
        kept = {node.op_type for node in fused.graph.node}
        return "" if {"QuantizeLinear", "DequantizeLinear"} <= kept else "the guard is gone"
    lowered = graphs.lowered_double(fused, report)
    worst = max(graphs.difference(lowered, unfused, feeds, strict=True) for feeds in draws)
    return "" if worst < SAME else f"fused as if it were not there, differs by {worst:.1e}"


@pytest.mark.parametrize("place", STEP_PLACES)
def test_no_guard_in_a_step_is_fused_away(place: str, tmp_path: Path) -> None:
    base = onnx.load(export("rec_dy18").path)
    plain = graphs.double(base)
    faults = {name: judge(base, plain, place, STEP_PLACES[place], name, tmp_path) for name in guarded.NAMES}
    assert {name: fault for name, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("place", CHUNK_PLACES)
def test_no_guard_in_a_chunk_is_fused_away(place: str, tmp_path: Path) -> None:
    base = onnx.load(export("chunk_dy18").path)
    plain = graphs.double(base)
    faults = {name: judge(base, plain, place, CHUNK_PLACES[place], name, tmp_path) for name in FEW}
    assert {name: fault for name, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("place", INNER)
def test_a_clamp_on_an_inner_value_says_piecewise(place: str, tmp_path: Path) -> None:
    model = graphs.insert(onnx.load(export("rec_dy18").path), place, guarded.guard("clip", 1e9))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, ["piecewise"])
    assert "guard/Clip" in report.sites[0].reason.text


@pytest.mark.parametrize("place", ["state", "mul_4", "sum_3", "mul_6", "final_state", "sum_4"])
def test_a_draw_that_overflows_is_no_excuse(place: str, tmp_path: Path) -> None:
    # Nothing below 100, a difference above it, and no number at all where large values are drawn.
    base = onnx.load(export("rec_dy18").path)
    model = graphs.insert(base, place, guarded.guard("exp", 100.0))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    if report.exit == 0:
        unfused, fused = graphs.double(model), graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report)
        draws = [graphs.wide_feeds(base, seed, large=150.0) for seed in range(4)]
        assert max(graphs.difference(graphs.double(base), unfused, feeds) for feeds in draws) > SAME
        assert max(graphs.difference(fused, unfused, feeds) for feeds in draws) < SAME
    else:
        assert report.exit == 3


@pytest.mark.parametrize("name", ["scale", "row"])
def test_a_constant_that_a_caller_may_override_is_not_baked_in(name: str, tmp_path: Path) -> None:
    model = graphs.step()
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    if report.exit:
        assert report.exit in (3, 4)
        return
    unfused, fused = graphs.double(model), graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report)
    given = {i.name: i for i in (*unfused.get_inputs(), *unfused.get_overridable_initializers())}
    feeds = {n: np.random.default_rng(len(n)).standard_normal(i.shape) for n, i in given.items() if n != name}
    feeds[name] = np.array(0.7) if name == "scale" else np.array([-2])
    for got, want in zip(fused.run(None, feeds), unfused.run(None, feeds), strict=True):
        assert np.allclose(got, want, rtol=1e-9)
