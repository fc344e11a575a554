"""Graphs that were traced within one chunk: they pad to it, and take out as many tokens as it holds."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphs
from deltafuse.dims import Dim, ceildiv, evaluate, maximum, minimum, straightened, symbol
from spelled import series


@pytest.fixture(scope="module", autouse=True)
def worker():
    with graphs.one_worker() as one:
        yield one


#: Its inverse is a power series, which ends with the chunk. TAKEN cuts the result of the padded tokens to those given.
TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
one (float[1,T,2,4] query, float[1,T,2,4] key, float[1,T,2,3] value, float[1,T,2] g, float[1,T,2] beta)
    => (float[N,M,2,3] out)
<int64 two = {2}, int64[1] last = {-1}, int64[1] row = {-2}, float half = {0.5}, int64 below = {-1},
 int64 diag = {0}, int64[1] none = {0}, int64[1] one = {1}, int64[1] eight = {8}, int64[3] zeros = {0, 0, 0},
 int64[2] zeros2 = {0, 0}, int64[4] vectors = {-1, 8, 2, 4}, int64[4] values = {-1, 8, 2, 3},
 int64[3] gates = {-1, 8, 2}>
{
  tokens = Shape<start = 1, end = 2>(query)
  over = Mod(tokens, eight)
  lacking = Sub(eight, over)
  pad = Mod(lacking, eight)
  pads = Concat<axis = 0>(none, zeros, none, pad, zeros2)
  pads3 = Concat<axis = 0>(zeros, none, pad, none)
  qp = Pad(query, pads)
  kp = Pad(key, pads)
  vp = Pad(value, pads)
  gp = Pad(g, pads3)
  bp = Pad(beta, pads3)
  q8 = Reshape(qp, vectors)
  k8 = Reshape(kp, vectors)
  v8 = Reshape(vp, values)
  g8 = Reshape(gp, gates)
  b8 = Reshape(bp, gates)
  q = Transpose<perm = [0, 2, 1, 3]>(q8)
  k = Transpose<perm = [0, 2, 1, 3]>(k8)
  v = Transpose<perm = [0, 2, 1, 3]>(v8)
  gt = Transpose<perm = [0, 2, 1]>(g8)
  bt = Transpose<perm = [0, 2, 1]>(b8)
  SERIES
  padded = Transpose<perm = [0, 2, 1, 3]>(os)
  TAKEN
}
"""
WHOLE = "out = Slice(padded, none, tokens, one)"


NUMBERS = ("int64[1] eight = {8}", "int64[1] eight = {8}, int64[1] six = {6}, int64[1] twice = {2}")


def traced(taken: str) -> onnx.ModelProto:
    return graphs.parse(TEXT.replace("SERIES", series(7)).replace("TAKEN", taken).replace(*NUMBERS))


def feeds(tokens: int) -> dict[str, graphs.Array]:
    model = traced(WHOLE)
    for info in model.graph.input:
        info.type.tensor_type.shape.dim[1].dim_value = tokens
    return graphs.wide_feeds(model, tokens)


def test_it_is_the_rule_for_the_tokens_of_its_chunk(tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(traced(WHOLE), tmp_path), tmp_path / "out.onnx", target="ort")
    (site,) = report.sites
    assert (report.exit, site.status) == (0, "fused")
    assert site.match is not None
    valid = site.match.valid_tokens
    assert (valid.low, valid.high, valid.above) == (1, 8, "wrong")
    fused = graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report)
    for tokens in (1, 5, 8):
        assert graphs.difference(fused, graphs.double(traced(WHOLE)), feeds(tokens)) < 1e-12


@pytest.mark.parametrize(
    "taken",
    [
        "all = Slice(padded, none, tokens, one)\n  out = Slice(all, none, six, one)",
        "some = Min(tokens, six)\n  out = Slice(padded, none, some, one)",
        "more = Mul(tokens, twice)\n  out = Slice(padded, none, more, one)",
    ],
)
def test_what_takes_other_tokens_than_all_is_refused(taken: str, tmp_path: Path) -> None:
    report = graphs.fuse(graphs.save(traced(taken), tmp_path), tmp_path / "out.onnx", target="ort")
    assert report.exit == 3
    assert not (tmp_path / "out.onnx").exists()


T, B = symbol("T"), symbol("B")
SIZES: tuple[Dim, ...] = (
    minimum(8, T), ceildiv(T, 8), B * ceildiv(T, 8) * minimum(8, T), 8 * ceildiv(T, 8) - T, T // 3, maximum(T, 5) + B,
)  # fmt: skip


@given(st.sampled_from(SIZES), st.integers(1, 8), st.integers(0, 8), st.integers(1, 9))
def test_a_size_is_the_same_where_it_is_straightened(dim: Dim, low: int, more: int, batch: int) -> None:
    high = low + more
    straight = straightened(dim, "T", low, high)
    for tokens in range(low, high + 1):
        at = {"T": tokens, "B": batch}
        assert evaluate(straight, at) == evaluate(dim, at)


def test_within_one_chunk_sizes_are_plain() -> None:
    assert straightened(minimum(8, T), "T", 1, 8) == T
    assert straightened(ceildiv(T, 8), "T", 1, 8) == 1
    assert straightened(4 * B * ceildiv(T, 8) * minimum(8, T), "T", 2, 7) == 4 * B * T
    assert straightened(minimum(8, T), "T", 1, 9) == minimum(8, T)
