"""Terms that no draw shows: powers of the log decay, and sums of what follows no operand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import graphs
import loops
from deltafuse.classes import classify
from deltafuse.odd_terms import find_odd_term
from deltafuse.reasons import Reason
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes

TEXT = """
<ir_version: 8, opset_import: ["" : 18]>
terms (float[N,4] g, float[N,4] v, float[N,4] unit, int64[N] places, float[4,4] square) => (float y)
<float none = {{0}}, float one = {{1}}, float half = {{0.5}}, float tiny = {{1e-17}}, float minus = {{-1}},
 float two = {{2}}, int64[1] first = {{0}}, int64[1] last = {{-1}}, int64 zero = {{0}}, int64[1] four = {{4}},
 float infinite = {{-inf}}, float low = {{-1e9}}, float far = {{-2000}}, float[4] mask = {{0, -1e9, 0, -1e9}},
 float[4,4] lower = {{1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1}}, bool[4] chosen = {{1, 0, 1, 0}},
 int64[4] pads = {{1, 0, 0, 0}}, int64 three = {{3}}, bool yes = {{1}}>
{{
  shape = Shape(v)
  n = Gather(shape, first)
  ones = ConstantOfShape<value = float[1] {{1.0}}>(n)
  zv = Mul(v, none)
  unity = Add(zv, one)
  eye = EyeLike<dtype = 1>(square)
  norm = Mul(unit, one)
  {body}
}}
"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def look(body: str, folder: Path, *, decays: bool = True) -> Reason | None:
    model = graphs.scanned(graphs.parse(TEXT.format(body=body)), folder)
    graph = model.graph
    scope = Scope(model, graph, classify(model), Shapes(model))
    norm = graph.producer[graph.find("norm")]
    roots = [graph.find(name) for name in ("g", "v", "unit", "square")]
    return find_odd_term(scope, range(len(graph.op)), roots, [norm], decays=decays)


@pytest.mark.parametrize(
    "body",
    [
        "a = CumSum(g, zero)\n b = Sub(a, g)\n e = Exp(b)\n y = Mul(v, e)",
        "a = MatMul(g, lower)\n n = Neg(a)\n e = Exp(n)\n y = Div(v, e)",
        'a = Einsum<equation = "nj,ij->ni">(g, lower)\n e = Exp(a)\n y = Mul(v, e)',
        "a = ReduceSum(g, last)\n e = Exp(a)\n y = Mul(v, e)",
        "a = Mul(g, two)\n b = Div(a, minus)\n e = Exp(b)\n y = Mul(v, e)",
        "a = Where(chosen, g, infinite)\n e = Exp(a)\n y = Mul(v, e)",
        "a = Add(g, mask)\n b = Transpose(a)\n e = Exp(b)\n y = MatMul(e, v)",
        "i = CastLike(infinite, g)\n a = Where(chosen, g, i)\n e = Exp(a)\n y = Mul(v, e)",
        "a = Pad(g, pads)\n e = Exp(a)\n y = Mul(e, e)",
    ],
)
def test_a_log_decay_that_is_added_up_passes(body: str, tmp_path: Path) -> None:
    assert look(body, tmp_path) is None


@pytest.mark.parametrize(
    "body",
    [
        # Little as long as the log decay is.
        "a = Mul(g, g)\n b = Mul(a, tiny)\n c = Mul(b, v)\n y = Add(v, c)",
        "a = Mul(g, tiny)\n y = Exp(a)",
        "a = Div(g, two)\n y = Exp(a)",
        "a = Pow(g, two)\n y = Exp(a)",
        "y = Mul(g, v)",
        "y = Add(g, v)",
        "y = MatMul(square, g)",
        "y = Concat<axis = 0>(g, v)",
        "y = Mean(g, g)",
        "y = ReduceMean(g, last)",
        "y = ReduceSumSquare(g, last)",
        "y = Gemm<alpha = 0.5>(g, lower)",
        "y = Gemm(g, lower, square)",
        # A constant beside it: a position once it is added up.
        "a = Mul(g, none)\n y = Add(a, one)",
        "a = Mul(g, none)\n b = Add(a, far)\n y = Exp(b)",
        "y = Where(chosen, g, one)",
        # What masks it, taken away again.
        "a = Add(g, mask)\n y = CumSum(a, zero)",
        "a = Add(g, mask)\n b = Add(g, low)\n y = Sub(a, b)",
        "y = Sub(g, low)",
        "a = Add(g, mask)\n y = Neg(a)",
        "y = If(yes)<then_branch = t () => (p) { p = Identity(g) }, else_branch = e () => (q) { q = Identity(v) }>",
        "y = Loop(three, yes, g)<body = b (int64 i, bool c, float s) => (bool d, float t)"
        " { d = Identity(c) t = Mul(s, v) }>",
    ],
)
def test_what_else_is_made_of_a_log_decay_refuses(body: str, tmp_path: Path) -> None:
    found = look(body, tmp_path)
    assert found is not None
    assert found.code == "decay-degree"
    assert found.text


def test_the_first_root_of_a_rule_without_decay_is_no_log_decay(tmp_path: Path) -> None:
    assert look("y = Mul(g, v)", tmp_path, decays=False) is None
    assert look("y = Mul(g, v)", tmp_path) is not None


@pytest.mark.parametrize(
    "body",
    [
        "y = ReduceSum(unity, first)",
        "y = ReduceMean(unity, first)",
        "y = ReduceSum(unity)",
        "y = CumSum(unity, zero)",
        "t = Transpose(unity)\n y = MatMul(t, unity)",
        "t = Transpose(unity)\n y = MatMul(t, ones)",
        'y = Einsum<equation = "nd->d">(unity)',
        'y = Einsum<equation = "nd,nd->d">(unity, unity)',
        'y = Einsum<equation = "...nd,...nd->...d">(unity, unity)',
        "e = Exp(g)\n y = ReduceSum(e, first)",
        "k = Mul(norm, norm)\n y = ReduceSum(k)",
        "t = Transpose(norm)\n y = MatMul(t, norm)",
        'y = ScatterElements<reduction = "add">(zv, indices, unity)',
        # A bias that data times zero hides.
        "b = Gemm(zv, lower, one)\n y = ReduceSum(b, first)",
        "y = Loop(n0, yes, zv)<body = b (int64 i, bool c, float s) => (bool d, float t)"
        " { d = Identity(c) t = Add(s, unity) }>",
        "y = Loop(n0, yes, one)<body = b (int64 i, bool c, float s) => (bool d, float t)"
        " { d = Identity(c) z = Identity(zv) t = Add(s, z) }>",
        "y = Loop(n0, yes, none)<body = b (int64 i, bool c, float s) => (bool d, float t)"
        " { d = Identity(c) z = Identity(zv) e = Identity(unity) f = Add(e, z) t = Add(s, f) }>",
        "s, y = Loop(n0, yes, zv)<body = b (int64 i, bool c, float s) => (bool d, float t, float o)"
        " { d = Identity(c) t = Identity(s) o = ReduceSum(unity, first) }>",
    ],
)
def test_what_counts_tokens_refuses(body: str, tmp_path: Path) -> None:
    text = "n0 = Squeeze(n, first)\n indices = Expand(places, shape)\n " + body
    found = look(text, tmp_path)
    assert found is not None
    assert found.code == "counts-tokens"
    assert found.text


@pytest.mark.parametrize(
    "body",
    [
        # Along an axis of fixed size, or with an operand in every term.
        "y = ReduceSum(unity, last)",
        "y = CumSum(v, zero)",
        "t = Transpose(unity)\n y = MatMul(t, v)",
        "t = Transpose(norm)\n y = MatMul(norm, t)",
        'y = Einsum<equation = "...i,...i->...">(unity, unity)',
        "a = Add(square, eye)\n y = MatMul(a, a)",
        "y = Loop(three, yes, unity)<body = b (int64 i, bool c, float s) => (bool d, float t)"
        " { d = Identity(c) p = MatMul(s, square) t = Add(s, p) }>",
        "y = Loop(n0, yes, none)<body = b (int64 i, bool c, float s) => (bool d, float t)"
        " { d = Identity(c) z = Identity(v) e = Exp(g) f = Mul(s, e) t = Add(f, z) }>",
        "l = SequenceEmpty()\n s = Loop(n0, yes, l)<body = b (int64 i, bool c, seq(float) s) => (bool d, seq(float) t)"
        " { d = Identity(c) t = SequenceInsert(s, v) }>\n y = ConcatFromSequence<axis = 0>(s)",
        "y = If(yes)<then_branch = t () => (p) { p = Identity(v) }, else_branch = e () => (q) { q = Mul(v, half) }>",
    ],
)
def test_sums_that_follow_an_operand_pass(body: str, tmp_path: Path) -> None:
    assert look("n0 = Squeeze(n, first)\n " + body, tmp_path) is None


POWERS = "p0 = Mul(count, little)\n    " + "\n    ".join(f"p{i + 1} = Mul(p{i}, p{i})" for i in range(6))
FACTOR = "factor = Add(p6, unit)\n    plain = Mul(missing, b1)\n    delta = Mul(plain, factor)"


@pytest.mark.parametrize(
    ("made", "codes"),
    [
        ("of = Mul(g, nought)\n    ones = Add(of, unit)\n    many = ReduceSum<keepdims = 0>(ones, time)\n"
         "    count = Unsqueeze(many, last)", ["decay-degree"]),
        ("of = Mul(beta, nought)\n    ones = Add(of, unit)\n    many = ReduceSum<keepdims = 0>(ones, time)\n"
         "    count = Unsqueeze(many, last)", ["counts-tokens"]),
        ("of = Mul(g, nought)\n    ones = Exp(of)\n    sums = CumSum(ones, axis)\n"
         "    many = Gather<axis = 1>(sums, i)\n    count = Unsqueeze(many, last)", ["counts-tokens"]),
    ],
)  # fmt: skip
def test_a_factor_that_grows_with_the_tokens_is_not_fused(made: str, codes: list[str], tmp_path: Path) -> None:
    """(t / 2000) ** 64 is nothing for as many tokens as are tried."""
    numbers = "float nought = {0}, float unit = {1}, float little = {0.0005}, int64[1] time = {1}, int64 axis = {1}"
    model = loops.loop(
        ("float scale = {0.25}", f"{numbers}, float scale = {{0.25}}"),
        ("delta = Mul(missing, b1)", f"{made}\n    {POWERS}\n    {FACTOR}"),
    )
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (3, codes)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(("term", "codes"), [("decayed", [""]), ("odd", ["decay-degree"])])
def test_a_square_of_the_log_decay_is_not_fused(term: str, codes: list[str], tmp_path: Path) -> None:
    """v + 1e-17 g^2 v is v unless the log decay is huge."""
    odd = "gg = Mul(g0, g0)\n  gs = Mul(gg, tiny)\n  gu = Unsqueeze(gs, last)\n  gv = Mul(gu, v0)\n  v9 = Add(v0, gv)"
    edits = [("float scale = {0.25}", "float tiny = {1e-17}, float scale = {0.25}"),
             ("missing = Sub(v0, known)", f"{odd}\n  missing = Sub(v9, known)")]  # fmt: skip
    model = graphs.step(*(edits if term == "odd" else ()))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert graphs.codes(report) == codes
    assert (report.exit == 0) == (tmp_path / "out.onnx").exists() == (term == "decayed")


#: Keys of length one outside a loop, and what adds up the squares of all of them inside.
UNIT_KEYS = """squares = Mul(key, key)
  norm_squared = ReduceSum<keepdims = 1>(squares, last)
  above = Add(norm_squared, eps)
  norm = Sqrt(above)
  unit_key = Div(key, norm)
  shape = Shape(query)"""
EACH_TIMES_ITSELF = """many = Einsum<equation = "bthd,bthd->bh">(unit_key, unit_key)
    count = Unsqueeze(many, last)"""


@pytest.mark.parametrize("made", ["", EACH_TIMES_ITSELF])
def test_rows_of_length_one_are_not_counted_inside_a_loop(made: str, tmp_path: Path) -> None:
    counted = [("delta = Mul(missing, b1)", f"{made}\n    {POWERS}\n    {FACTOR}")] if made else []
    model = loops.loop(
        ("float scale = {0.25}", "float scale = {0.25}, float eps = {1e-6}, float little = {1e-4}, float unit = {1}"),
        ("shape = Shape(query)", UNIT_KEYS),
        ("k0 = Gather<axis = 1>(key, i)", "k0 = Gather<axis = 1>(unit_key, i)"),
        *counted,
    )
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert graphs.codes(report) == (["counts-tokens"] if made else [""])


#: A little more of the value where the decay is far from one.
POWER = (
    "many = Mul(g0, factor)\n  power = Exp(many)\n  little = Mul(power, tiny)\n  more = Add(little, one)\n"
    "  share = Unsqueeze(more, last)\n  v1 = Mul(v0, share)\n  missing = Sub(v1, known)"
)


@pytest.mark.parametrize(
    ("factor", "tiny", "code"),
    [(16, 1e-30, "higher-degree"), (3, 1e-38, "not-equal"), (1, 1e-30, "not-equal"), (-1, 1e-38, "not-equal")],
)
@pytest.mark.usefixtures("any_factor")
def test_another_power_of_the_decay_is_not_fused(factor: float, tiny: float, code: str, tmp_path: Path) -> None:
    numbers = f"float scale = {{0.25}}, float factor = {{{factor}}}, float tiny = {{{tiny}}}, float one = {{1}}"
    model = graphs.step(("float scale = {0.25}", numbers), ("missing = Sub(v0, known)", POWER))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert graphs.codes(report) == [code]
    assert not (tmp_path / "out.onnx").exists()
