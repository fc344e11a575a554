"""What sizes are made into inside a causal convolution: right at every size that is tried, or at every size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import graphs

HEAD = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 2, t] a, float[n, 2, 2] past) => (float[n, 2, t] b, float[n, 2, 2] present)
<float[2, 1, 3] w = {1.0, -2.0, 0.5, 0.25, 3.0, -1.0}, float[2] bias = {0.5, -0.25}, int64[1] from = {-2},
 int64[1] end = {9223372036854775807}, int64[1] axis = {2}, int64[1] twelve = {12}, int64[1] two = {2},
 int64[1] sixty = {60}, int64[1] zero = {0}, int64[1] one = {1}>
{
  x = Neg(a) u = Concat<axis = -1>(past, x) sizes = Shape(u) columns = Slice(sizes, two, end, zero)
  tokens = Sub(columns, two)
"""
PLAIN = "c = Conv<group = 2, kernel_shape = [3]>(u, w, bias) s = Sigmoid(c) y = Mul(c, s) b = Neg(y) }"
STATES = {
    "a quotient of tokens": "q = Div(tokens, twelve) st = Sub(from, q) en = Sub(columns, q)"
    " present = Slice(u, st, en, axis)",
    "a quotient of the batch": "n = Slice(sizes, zero, one, zero) q = Div(n, twelve) st = Sub(from, q)"
    " en = Sub(columns, q) present = Slice(u, st, en, axis)",
    "an end that comes closer": "en = Sub(sixty, tokens) present = Slice(u, from, en, axis)",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def fused(text: str, folder: Path) -> tuple[list[str], list[str], onnx.ModelProto | None]:
    """Statuses and reasons of the sites, and what was written."""
    out = folder / "out.onnx"
    model = graphs.save(graphs.parse(HEAD + text), folder)
    report = graphs.fuse(model, out, rules=("causal_conv",), target="ort")
    return [site.status for site in report.sites], graphs.codes(report), onnx.load(out) if out.exists() else None


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_state_that_later_sizes_move_is_left_where_it_is(state: str, tmp_path: Path) -> None:
    statuses, _, model = fused(f"{state} {PLAIN}", tmp_path)
    assert statuses == ["fused"]
    assert model is not None
    assert [node.op_type for node in model.graph.node if "present" in node.output] == ["Slice"]


def test_columns_that_later_sizes_move_are_no_convolution(tmp_path: Path) -> None:
    text = "q = Div(tokens, twelve) pads = Concat<axis = 0>(zero, zero, q, zero, zero, zero) v = Pad(u, pads)"
    text = f"present = Slice(u, from, end, axis) {text} r = Slice(v, zero, columns, axis) {PLAIN.replace('(u,', '(r,')}"
    assert fused(text, tmp_path) == (["near-miss"], ["expression-size"], None)


@pytest.mark.parametrize(
    "state",
    ["present = Slice(u, tokens, columns, axis)", "st = Sub(columns, two) present = Slice(u, st, end, axis)"],
)
def test_sizes_that_follow_the_tokens_are_taken(state: str, tmp_path: Path) -> None:
    statuses, _, model = fused(f"{state} {PLAIN}", tmp_path)
    assert statuses == ["fused"]
    assert model is not None
    assert [node.op_type for node in model.graph.node if "present" in node.output] == ["CausalConvWithState"]


def test_a_bound_that_is_reached_later_names_itself(tmp_path: Path) -> None:
    text = f"present = Slice(u, from, end, axis) en = Sub(sixty, tokens) r = Slice(u, zero, en, axis) {PLAIN}"
    statuses, codes, _ = fused(text.replace("(u, w", "(r, w"), tmp_path)
    assert (statuses, codes) == (["near-miss"], ["expression-bound"])
