"""Terms of an ordinary expression that are too little for any draw, and constants that all of them feel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphs
from own_patterns import RECIPROCAL
from test_expression_own import own

NORM = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 3, 6] a) => (float[n, 3, 6] z) <float eps = {0.00001}, float two = {2.0}, float tiny = {1e-20}>
{
  x = Neg(a) m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean<axes = [-1]>(p)
  e = Add(v, eps) r = Sqrt(e) q = Div(d, r) xc = Mul(x, tiny) y = Add(q, xc) z = Abs(y)
}"""
CONVOLUTION = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 2, t] a, float[n, 2, 2] past) => (float[n, 2, t] z, float[n, 2, 2] present)
<float[2, 1, 3] w = {1.0, -2.0, 0.5, 0.25, 3.0, -1.0}, float[2] bias = {0.5, -0.25}, int64[1] from = {-2},
 int64[1] end = {9223372036854775807}, int64[1] axis = {2}, float tiny = {1e-21}>
{
  x = Neg(a) u = Concat<axis = -1>(past, x) present = Slice(u, from, end, axis)
  c = Conv<group = 2, kernel_shape = [3]>(u, w, bias) p = Mul(c, c) xc = Mul(p, tiny) y = Add(c, xc) z = Abs(y)
}"""
INVERSE = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 4] a) => (float[n, 4] b) <float one = {1.0}, float[4] w = {1.0, 1.0, 1.0, 1.0}>
{
  x = Neg(a) d = Div(w, x) t = Mul(d, one) b = Abs(t)
}"""
#: The pattern of one over a value, with a product behind it.
PRODUCT = ('"Div": (1, 1)', '"Div": (1, 1), "Mul": (1, 1)')


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


@pytest.mark.parametrize(("text", "rule"), [(NORM, "layer_norm"), (CONVOLUTION, "causal_conv")])
def test_a_term_that_only_large_numbers_show_stays(text: str, rule: str, tmp_path: Path) -> None:
    model = graphs.parse(text)
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx", rules=(rule,), target="ort")
    assert [site.status for site in report.sites] == ["fused"]
    fused = onnx.load(tmp_path / "out.onnx")
    # The sum behind the operator reads its result.
    (node,) = (node for node in fused.graph.node if node.op_type in ("LayerNormalization", "CausalConvWithState"))
    (add,) = (node for node in fused.graph.node if node.op_type == "Add")
    assert node.output[0] == add.input[0]
    assert "tiny" in {name for node in fused.graph.node for name in node.input}


def test_a_constant_that_is_felt_is_no_hindrance(tmp_path: Path) -> None:
    path = graphs.save(graphs.parse(INVERSE), tmp_path)
    report = graphs.fuse(path, None, rules=("inverse",), patterns=(own(tmp_path, RECIPROCAL, PRODUCT),), dry_run=True)
    assert [site.status for site in report.sites] == ["fused"]


def test_a_constant_that_no_draw_feels_is_named(tmp_path: Path) -> None:
    sums = PRODUCT[0], '"Div": (1, 1), "Mul": (1, 1), "Add": (1, 1)'
    text = INVERSE.replace("one = {1.0}", "one = {1e-20}").replace("t = Mul(d, one)", "m = Mul(x, one) t = Add(d, m)")
    path = graphs.save(graphs.parse(text), tmp_path)
    report = graphs.fuse(path, None, rules=("inverse",), patterns=(own(tmp_path, RECIPROCAL, sums),), dry_run=True)
    (site,) = report.sites
    assert (site.status, site.reason.code) == ("near-miss", "expression-idle")
    assert "the constant one" in site.reason.text


@pytest.mark.parametrize(("beside", "status"), [(0.0, "fused"), (1e-20, "near-miss")])
def test_numbers_of_a_constant_are_looked_at_by_their_magnitude(beside: float, status: str, tmp_path: Path) -> None:
    # Each feature times one, and next to nothing of the others; zeros are nothing, whatever they are times.
    numbers = np.where(np.eye(4) == 1, 1.0, beside).ravel().tolist()
    text = INVERSE.replace("float[4] w = {1.0, 1.0, 1.0, 1.0}", f"float[4, 4] w = {{{', '.join(map(str, numbers))}}}")
    text = text.replace("d = Div(w, x) t = Mul(d, one)", "d = MatMul(x, w) t = Div(one, d)")
    rule = (PRODUCT[0], '"Div": (1, 1), "MatMul": (1, 1)')
    path = graphs.save(graphs.parse(text), tmp_path)
    report = graphs.fuse(path, None, rules=("inverse",), patterns=(own(tmp_path, RECIPROCAL, rule),), dry_run=True)
    assert [site.status for site in report.sites] == [status]
