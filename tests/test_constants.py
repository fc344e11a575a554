"""What a site computes from constants: in its own types it must be what it is in double."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import graphs
import loops
from deltafuse.classes import classify
from deltafuse.constants import rounded, rounded_constant
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
