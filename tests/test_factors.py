"""Constant factors that hide a term from every draw, and products along tokens that no draw but one shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import graphs
from deltafuse import draws
from deltafuse.factors import faintest, size
from spelled import series


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def codes(model, folder: Path) -> list[str]:
    return graphs.codes(graphs.fuse(graphs.save(model, folder), folder / "fused.onnx", target="ort"))


@pytest.mark.parametrize(
    ("tail", "factor"),
    [
        ("w = Mul(o, faint)\n x = Add(o, w)\n out = Unsqueeze(x, time)", 1e-13 / 4),
        ("w = Mul(o, small)\n x = Mul(w, small)\n z = Add(o, x)\n out = Unsqueeze(z, time)", 1e-8 / 4),
        ("w = Div(o, large)\n x = Add(o, w)\n out = Unsqueeze(x, time)", 1e-13 / 4),
        ("w = Mul(o, large)\n x = Div(w, large)\n out = Unsqueeze(x, time)", 1e13 / 4),
    ],
)
def test_a_term_next_to_nothing_is_refused(tmp_path: Path, tail: str, factor: float) -> None:
    constants = "float faint = {1e-13}, float small = {1e-4}, float large = {1e13}, float scale = {0.25}>"
    model = graphs.step(("float scale = {0.25}>", constants), ("out = Unsqueeze(o, time)", tail))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "fused.onnx", target="ort")
    assert graphs.codes(report) == ["far-factor"]
    assert report.sites[0].reason.args["factor"] == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(("squarings", "code"), [(3, "not-the-rule"), (12, "high-power")])
def test_a_high_power_is_refused(tmp_path: Path, squarings: int, code: str) -> None:
    powers = "".join(f"p{i + 1} = Mul(p{i}, p{i})\n  " for i in range(squarings))
    tail = f"p0 = Mul(b1, e1)\n  {powers}w = Mul(o, p{squarings})\n  x = Add(o, w)\n  out = Unsqueeze(x, time)"
    assert codes(graphs.step(("out = Unsqueeze(o, time)", tail)), tmp_path) == [code]


def test_a_factor_that_is_used_again_counts_once() -> None:
    scale = frozenset({(1, 2, 0.25)})
    assert size(scale | scale) == 0.25
    assert size(scale | {(1, 3, 0.5)}) == 0.125
    assert faintest([scale, frozenset()]) == scale


def test_a_scale_of_keys_at_each_step_is_none(tmp_path: Path) -> None:
    # The state then holds more and more powers of one small constant.
    model = graphs.step(
        ("float scale = {0.25}>", "float scale = {0.25}, float less = {0.03}>"),
        ("k1 = Unsqueeze(k0, last)", "k_less = Mul(k0, less)\n k1 = Unsqueeze(k_less, last)"),
    )
    assert codes(model, tmp_path) == [""]


def chunk(tokens: int, terms: int) -> str:
    """The rule over one chunk of tokens, 2 heads, key size 8, value size 4, its inverse by a power series."""
    return f"""
    <ir_version: 8, opset_import: ["" : 17]>
    chunk (float[1,{tokens},2,8] query, float[1,{tokens},2,8] key, float[1,{tokens},2,4] value, float[1,{tokens},2] g,
           float[1,{tokens},2] beta) => (float[1,{tokens},2,4] out)
    <int64 two = {{2}}, int64[1] last = {{-1}}, int64[1] row = {{-2}}, float half = {{0.5}}, int64 below = {{-1}},
     int64 diag = {{0}}>
    {{
    q = Transpose<perm = [0, 2, 1, 3]>(query)
    k = Transpose<perm = [0, 2, 1, 3]>(key)
    v = Transpose<perm = [0, 2, 1, 3]>(value)
    gt = Transpose<perm = [0, 2, 1]>(g)
    bt = Transpose<perm = [0, 2, 1]>(beta)
    {series(terms)}
    out = Transpose<perm = [0, 2, 1, 3]>(os)
    }}
    """


@pytest.mark.parametrize("tokens", [16, 48])
def test_an_inverse_without_its_last_power_is_another_rule(tmp_path: Path, tokens: int) -> None:
    assert codes(graphs.parse(chunk(tokens, tokens - 1)), tmp_path) == [""]
    assert codes(graphs.parse(chunk(tokens, tokens - 2)), tmp_path) == ["not-equal"]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("key_dim", [1, 2, 16])
def test_each_token_takes_back_the_one_before(channels: bool, key_dim: int) -> None:
    sizes = {"B": 2, "T": 40, "N": 2, "H": 4, "K": key_dim, "V": 3}
    drawn = draws.draw(draws.CHAIN, sizes, 3, normed=False, channels=channels)
    key = np.repeat(drawn.key, 2, axis=2)
    decay = np.exp(drawn.g.mean(axis=-1) if channels else drawn.g)
    took = drawn.beta[:, 1:] * (key[:, 1:] * key[:, :-1]).sum(axis=-1) * decay[:, 1:]
    low, high = (0.5, 2.0) if channels else (1.0 - 1e-12, 1.1 + 1e-12)
    assert np.all((took >= low) & (took <= high))
    assert np.linalg.norm(drawn.key, axis=-1) == pytest.approx(1.0)
    cosine = (drawn.query * drawn.key[:1, :1, :1]).sum(axis=-1)
    assert cosine / np.linalg.norm(drawn.query, axis=-1) == pytest.approx(1.0)
