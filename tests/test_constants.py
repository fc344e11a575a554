"""What a site computes from constants: in its own types it must be what it is in double."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import graphs
import loops
from deltafuse.bodies import bodies
from deltafuse.classes import classify
from deltafuse.constant_numbers import ConstantNumbers, distinct
from deltafuse.constants import rounded, rounded_constant
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes


@pytest.fixture(scope="module", autouse=True)
def worker():
    with graphs.one_worker() as one:
        yield one


def number(name: str, value: float, kind: str = "float") -> str:
    return f"{name} = Constant<value = {kind} {{{value}}}>()\n  "


HALF, SINGLE, BRAIN = 10, 1, 16


def through(kind: int, value: float, less: float) -> str:
    """`fac`: a number that went through a type, less another."""
    cast = f"h = Cast<to = {kind}>(a)\n  f = Cast<to = 1>(h)\n  fac = Sub(f, d)"
    return number("a", value) + number("d", less) + cast


#: `fac`: 1 in double, another number in the types of the model.
LOST = {
    "half": through(HALF, 2049.0, 2048.0),
    "half_up": through(HALF, 4098.0, 4097.0),
    "brain": through(BRAIN, 257.0, 256.0),
    "single": number("a", 16777216.0) + number("n", 1.0) + "f = Add(a, n)\n  fac = Sub(f, a)",
    "from_double": number("a", 16777217.0, "double")
    + number("d", 16777216.0)
    + "f = Cast<to = 1>(a)\n  fac = Sub(f, d)",
    "overflow": number("a", 1e30) + "f = Mul(a, a)\n  r = Reciprocal(f)\n  p = Mul(r, f)\n  fac = Identity(p)",
    "underflow": number("a", 2.0**-100)
    + number("r", 2.0**100)
    + "f = Mul(a, a)\n  p = Mul(f, r)\n  p2 = Mul(p, r)\n  p3 = CastLike(p2, r)\n  fac = Unsqueeze(p3, last)",
    "if": number("a", 16777216.0)
    + number("n", 1.0)
    + "f = Add(a, n)\n  on = Constant<value = bool {1}>()\n  "
    + "fac = If(on)<then_branch = t () => (float x) { x = Sub(f, a) }, "
    + "else_branch = e () => (float z) { z = Sub(f, a) }>",
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("looping", [False, True])
def test_a_constant_that_its_type_changes_is_refused(name: str, looping: bool, tmp_path: Path) -> None:
    edit = ("update = Mul(k1, delta_row)", f"{LOST[name]}\n  whole = Mul(k1, delta_row)\n  update = Mul(whole, fac)")
    model = loops.loop(edit) if looping else graphs.step(edit)
    report = graphs.fuse(graphs.save(model, tmp_path))
    assert (report.exit, graphs.codes(report)) == (3, ["constant-rounds"])


def rounded_half(name: str) -> str:
    return f"hh = Cast<to = 10>({name})\n  ff = Cast<to = 1>(hh)\n  fac = Sub(ff, dd)"


A, D = number("aa", 2049.0), number("dd", 2048.0)
#: The same in shapes that follow free sizes; `update0` is data of such a shape, `sh` its shape.
LOOSE = {
    "filled": f"{D}cc = ConstantOfShape<value = float[1] {{2049}}>(sh)\n  " + rounded_half("cc"),
    "expanded": f"{A}{D}cc = Expand(aa, sh)\n  " + rounded_half("cc"),
    "expanded_half": f"{A}{D}h0 = Cast<to = 10>(aa)\n  hh = Expand(h0, sh)\n  ff = Cast<to = 1>(hh)\n  "
    "fac = Sub(ff, dd)",
    "cast_like": f"{A}{D}tt = Cast<to = 10>(update0)\n  hh = CastLike(aa, tt)\n  ff = Cast<to = 1>(hh)\n  "
    "fac = Sub(ff, dd)",
    "loose_cast_like": f"{A}{D}cc = Expand(aa, sh)\n  tt = Cast<to = 10>(update0)\n  hh = CastLike(cc, tt)\n  "
    "ff = Cast<to = 1>(hh)\n  fac = Sub(ff, dd)",
    "compared": f"{A}{number('dd', 2048.5)}cc = Expand(aa, sh)\n  hh = Cast<to = 10>(cc)\n  ff = Cast<to = 1>(hh)\n  "
    "more = Greater(ff, dd)\n  fac = Cast<to = 1>(more)",
    "joined": f"{A}{D}cc = Expand(aa, sh)\n  zz = ConstantOfShape(sh)\n  both = Concat<axis = 2>(cc, zz)\n  "
    + rounded_half("both").replace("fac", "fac2")
    + "".join(f"\n  n{count} = Constant<value = int64[1] {{{count}}}>()" for count in (0, 2, 5))
    + "\n  fac = Slice(fac2, n0, n5, n2)",
    "chosen": f"{A}{D}cc = Expand(aa, sh)\n  zz = ConstantOfShape<value = float[1] {{2049}}>(sh)\n  "
    "on = ConstantOfShape<value = bool[1] {1}>(sh)\n  either = Where(on, cc, zz)\n  " + rounded_half("either"),
    "added": f"{number('aa', 16777216.0)}one1 = ConstantOfShape<value = float[1] {{1}}>(sh)\n  "
    "ff = Add(one1, aa)\n  fac = Sub(ff, aa)",
    "minimum": f"{A}{D}cc = Expand(aa, sh)\n  most = Min(cc, aa)\n  " + rounded_half("most"),
}


def fused_with(factor: str, *, looping: bool, tmp_path: Path) -> list[str]:
    """Codes of the rule whose update is multiplied by `fac`, in a model of free batch size."""
    text = f"update0 = Mul(k1, delta_row)\n  sh = Shape(update0)\n  {factor}\n  update = Mul(update0, fac)"
    edit = ("update = Mul(k1, delta_row)", text)
    model = loops.loop(edit) if looping else graphs.step(edit)
    for info in () if looping else (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "B"
    return graphs.codes(graphs.fuse(graphs.save(model, tmp_path)))


@pytest.mark.parametrize("name", LOOSE)
@pytest.mark.parametrize("looping", [False, True])
def test_a_constant_of_free_shape_that_its_type_changes_is_refused(name: str, looping: bool, tmp_path: Path) -> None:
    assert fused_with(LOOSE[name], looping=looping, tmp_path=tmp_path) == ["constant-rounds"]


@pytest.mark.parametrize("looping", [False, True])
@pytest.mark.parametrize(
    "factor",
    [
        "cc = ConstantOfShape<value = float[1] {1}>(sh)\n  hh = Cast<to = 10>(cc)\n  fac = Cast<to = 1>(hh)",
        f"{number('aa', 0.0)}cc = Expand(aa, sh)\n  hh = Cast<to = 10>(cc)\n  ee = Exp(hh)\n  fac = Cast<to = 1>(ee)",
        f"{A}cc = Expand(aa, sh)\n  more = GreaterOrEqual(cc, aa)\n  fac = Cast<to = 1>(more)",
    ],
)
def test_a_constant_of_free_shape_that_is_what_it_is_passes(factor: str, looping: bool, tmp_path: Path) -> None:
    assert fused_with(factor, looping=looping, tmp_path=tmp_path) == [""]


@pytest.mark.parametrize("looping", [False, True])
def test_a_constant_whose_numbers_cannot_be_told_is_refused(looping: bool, tmp_path: Path) -> None:
    factor = f"{number('aa', 9.0)}{number('bb', 4.0)}cc = Expand(aa, sh)\n  fac = Mod<fmod = 1>(cc, bb)"
    assert fused_with(factor, looping=looping, tmp_path=tmp_path) == ["constant-unfollowed"]


#: A body that reads `x`, with a 2049 in `c` whose shape follows x, and its edits: what comes after is to be refused.
BODIES = {
    "branch": "e = If(on)<then_branch = t () => (float p) { p = Identity(c) }, "
    "else_branch = f () => (float q) { q = Neg(c) }>",
    "empty_branch": "e = If(on)<then_branch = t () => (float p) { p = Neg(c) }, else_branch = f () => (float c) {}>",
    "scanned": "e = Scan<num_scan_inputs = 1, body = b (float p) => (float q) { q = Identity(p) }>(c)",
    "scan_state": "s, e = Scan<num_scan_inputs = 1, body = b (float r, float p) => (float r2, float q) "
    "{ r2 = Identity(r)\n q = Mul(r, p) }>(one, c)",
    "loop": "e = Loop(n, on)<body = b (int64 i, bool k) => (bool k2, float q) { k2 = Identity(k)\n q = Identity(c) }>",
    "sequence": "s0 = SequenceEmpty()\n s = SequenceInsert(s0, c)\n e = ConcatFromSequence<axis = 0>(s)",
    "inside": "e = Loop(n, on, x)<body = b (int64 i, bool k, float p) => (bool k2, float p2, float q) "
    "{ k2 = Identity(k)\n h0 = Cast<to = 10>(c)\n f0 = Cast<to = 1>(h0)\n g0 = Sub(f0, d)\n p2 = Mul(p, g0)\n "
    "q = Identity(c) }>",
}


def followed(text: str) -> tuple[str, object, object] | None:
    """What is said of a factor of free shape that is 2049 in float16, less 2048."""
    head = """<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y)
      <float d = {2048.0}, float a = {2049.0}, int64 n = {3}, float one = {1}> {
      s1 = Shape(x)\n c = Expand(a, s1)\n s2 = Squeeze(s1)\n on = Less(n, s2)\n """
    tail = "\n h = Cast<to = 10>(e)\n f = Cast<to = 1>(h)\n fac = Sub(f, d)\n y = Mul(x, fac) }"
    model = graphs.parse(head + text + tail)
    with graphs.one_worker() as worker:
        reason = rounded(worker, model, lambda _: None)
    return None if reason is None else (reason.code, reason.args.get("own"), reason.args.get("exact"))


@pytest.mark.parametrize("name", BODIES)
def test_what_comes_out_of_a_body_is_followed(name: str) -> None:
    assert followed(BODIES[name]) == ("constant-rounds", 0.0, 1.0)


def test_what_a_loop_carries_unchanged_is_followed(tmp_path: Path) -> None:
    """2049 is carried through the loop, and rounded in its body."""
    body = f"{D}{rounded_half('cc')}\n  cc9 = Identity(cc)\n  whole = Mul(k1, delta_row)\n  update = Mul(whole, fac)"
    model = loops.loop(
        ("final_state, outs = Loop(trips, yes, state)", "many = Constant<value = float {2049.0}>()\n  "
         "final_state, rest, outs = Loop(trips, yes, state, many)"),
        ("float[b,h,d,e] s)", "float[b,h,d,e] s, float cc)"),
        ("float[b,h,d,e] s9,", "float[b,h,d,e] s9, float cc9,"),
        ("update = Mul(k1, delta_row)", body),
    )
    assert graphs.codes(graphs.fuse(graphs.save(model, tmp_path))) == ["constant-rounds"]


def test_the_reason_says_what_the_constant_is(tmp_path: Path) -> None:
    edit = ("update = Mul(k1, delta_row)", f"{LOST['half']}\n  whole = Mul(k1, delta_row)\n  update = Mul(whole, fac)")
    (site,) = graphs.fuse(graphs.save(graphs.step(edit), tmp_path)).sites
    assert site.reason is not None
    assert site.reason.text.startswith("the constant fac is 0.0 in the types of the model and 1.0 without")


@pytest.mark.parametrize("kind", [SINGLE, HALF, BRAIN])
@pytest.mark.parametrize("where", ["constant", "size", "loop"])
def test_a_scale_is_computed_as_usual(kind: int, where: str, tmp_path: Path) -> None:
    """1 / sqrt(5), rounded to its type at each step, by a constant or by the size of the key."""
    size = "sh = Shape<start = -1>(key)\n  n = Squeeze(sh)\n  " if where == "size" else number("n", 5.0)
    compute = f"{size}w = Cast<to = {kind}>(n)\n  r = Sqrt(w)\n  t = Reciprocal(r)\n  f = Cast<to = 1>(t)\n  "
    edit = ("q1 = Mul(q0, scale)", f"{compute}q1 = Mul(q0, f)")
    model = loops.loop(edit) if where == "loop" else graphs.step(edit)
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert report.exit == 0, report
    fused = graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report)
    feeds = loops.feeds(1, 3) if where == "loop" else graphs.wide_feeds(model, 1)
    assert graphs.difference(fused, graphs.double(model), feeds) < 1e-12


def test_a_size_that_its_type_does_not_hold_is_refused(tmp_path: Path) -> None:
    """2049 features are 2048 in float16, which shows where 2048 are taken away."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2,2049] x) => (float[2,2049] y) {
      s = Shape<start = 1>(x)
      h = Cast<to = 10>(s)
      d = Constant<value = float {2048.0}>()
      f = Cast<to = 1>(h)
      fac = Sub(f, d)
      y = Mul(x, fac)
    }"""
    scanned = graphs.scanned(graphs.parse(text), tmp_path)
    graph, shapes = scanned.graph, Shapes(scanned)
    ends = [graph.find("x") or 0], [graph.find("y") or 0]
    with graphs.one_worker() as worker:
        reason = rounded_constant(worker, scanned, classify(scanned), shapes, *ends)
    assert reason is not None
    assert (reason.code, reason.args["own"], reason.args["exact"]) == ("constant-rounds", 0.0, 1.0)


def test_a_function_is_looked_into() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[2] x) => (float[2] y) {
      n = Constant<value = float {2049.0}>()
      y = my.Fun(x, n)
    }
    <domain: "my", opset_import: ["" : 17]> Fun (a, b) => (c) {
      h = Cast<to = 10>(b)
      d = Constant<value = float {2048.0}>()
      f = Cast<to = 1>(h)
      fac = Sub(f, d)
      c = Mul(a, fac)
    }"""
    with graphs.one_worker() as worker:
        reason = rounded(worker, graphs.parse(text), lambda _: None)
    assert reason is not None
    assert (reason.code, reason.args["own"], reason.args["exact"]) == ("constant-rounds", 0.0, 1.0)


@pytest.mark.parametrize("body", ["y = Mul(x, n)", "m = Neg(n)\n  y = Mul(x, m)", "z = Mul(x, x)\n y = Neg(z)"])
def test_what_is_exact_is_no_matter(body: str) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) <float n = {{0.1}}> {{ {body} }}'
    with graphs.one_worker() as worker:
        assert rounded(worker, graphs.parse(text), lambda _: None) is None


def numbers(text: str, kind: int, tmp_path: Path) -> frozenset[float] | None:
    """The numbers in `z`, which is made of `a`, 2048 of a type, and `b`, 1 of it, in a model or in a branch."""
    head = """<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) {
      s = Shape(x)
      """
    model = graphs.parse(f"{head}{text}\n y = Identity(x) }}")
    for name, number in (("a", 2048.0), ("b", 1.0)):
        model.graph.initializer.append(helper.make_tensor(name, kind, [1], [number]))
    scanned = graphs.scanned(model, tmp_path)
    scope = Scope(scanned, scanned.graph, classify(scanned), Shapes(scanned))
    value, graph = scanned.graph.find("z"), scanned.graph
    if value is not None:
        return ConstantNumbers(scope).of(value)
    node = next(node for node, op in enumerate(graph.op) if op == "If")
    body = next(iter(bodies(scanned, graph, scope.kinds, node)))
    inner = Scope(body.model, body.graph, body.kinds, None, scope, body)
    return ConstantNumbers(inner).of(body.graph.find("z") or 0)


@pytest.mark.parametrize("steps", ["m = Add(a, b)\n z = Sub(m, a)", "m = Sub(b, a)\n z = Add(a, m)",
                                   "c = Expand(a, s)\n m = Add(c, b)\n z = Sub(m, a)"])  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_the_numbers_of_a_mask_are_those_that_its_type_holds(steps: str, inside: bool, tmp_path: Path) -> None:
    """2048 and 1 less 2048."""
    branches = f"<then_branch = t () => (float[N] u) {{ {steps}\n u = Identity(z) }}, "
    text = f"n = Squeeze(s)\n k = Less(n, n)\n w = If(k){branches}else_branch = e () => (float[N] v) {{ v = Neg(x) }}>"
    found = [numbers(text if inside else steps, kind, tmp_path) for kind in (SINGLE, HALF, BRAIN)]
    # 1 less 2048 is a number of float16; with bfloat16 it is -2048.
    assert found == [{1.0}, {1.0} if "Sub(b" in steps else None, None]


def test_what_a_scatter_puts_in_place_is_told(tmp_path: Path) -> None:
    index = "i = Constant<value = int64[1,1] {0}>()\n "
    assert numbers(f'{index}z = ScatterND<reduction = "none">(a, i, b)', SINGLE, tmp_path) == {1.0, 2048.0}


@pytest.mark.parametrize(
    "made",
    [
        'z = ScatterND<reduction = "add">(a, i, b)',
        'j = Constant<value = int64[1] {0}>()\n z = ScatterElements<reduction = "mul">(a, j, b)',
    ],
)
def test_what_a_scatter_adds_up_is_not_told(made: str, tmp_path: Path) -> None:
    assert numbers(f"i = Constant<value = int64[1,1] {{0}}>()\n {made}", SINGLE, tmp_path) is None


@pytest.mark.parametrize(
    "values", [[], [[0.0, 1.0], [1.0, 0.0]], [-0.0, 0.0, 2.0], [np.nan, 1.0, np.nan, -1.0], [np.inf, -np.inf, np.nan]]
)
def test_the_numbers_of_a_constant_are_those_that_numpy_finds(values: Any) -> None:
    array = np.array(values, np.float64)
    np.testing.assert_array_equal(distinct(array), np.unique(array))
