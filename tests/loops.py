"""The rule as a Loop in ONNX text, for edits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

import graphs

#: 4 heads, key size 5, value size 3, scale 0.25; batch and tokens are free.
LOOP = """
<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
loop (float[B,T,4,5] query, float[B,T,4,5] key, float[B,T,4,3] value, float[B,T,4] g, float[B,T,4] beta,
      float[B,4,5,3] state) => (float[B,T,4,3] out, float[B,4,5,3] final_state)
<int64[1] last = {-1}, int64[1] row = {-2}, float scale = {0.25}, bool yes = {1}, int64 one = {1}>
{
  shape = Shape(query)
  trips = Gather<axis = 0>(shape, one)
  final_state, outs = Loop(trips, yes, state)<body = b (int64 i, bool c, float[b,h,d,e] s)
      => (bool c2, float[b,h,d,e] s9, float[b,h,e] o) {
    c2 = Identity(c)
    q0 = Gather<axis = 1>(query, i)
    k0 = Gather<axis = 1>(key, i)
    v0 = Gather<axis = 1>(value, i)
    g0 = Gather<axis = 1>(g, i)
    b0 = Gather<axis = 1>(beta, i)
    e0 = Exp(g0)
    e1 = Unsqueeze(e0, last)
    e2 = Unsqueeze(e1, last)
    decayed = Mul(s, e2)
    k1 = Unsqueeze(k0, last)
    product = Mul(decayed, k1)
    known = ReduceSum<keepdims = 0>(product, row)
    missing = Sub(v0, known)
    b1 = Unsqueeze(b0, last)
    delta = Mul(missing, b1)
    delta_row = Unsqueeze(delta, row)
    update = Mul(k1, delta_row)
    s9 = Add(decayed, update)
    q1 = Mul(q0, scale)
    q2 = Unsqueeze(q1, last)
    read = Mul(s9, q2)
    o = ReduceSum<keepdims = 0>(read, row)
  }>
  out = Transpose<perm = [1, 0, 2, 3]>(outs)
}
"""


def loop(*edits: tuple[str, str], functions: str = "") -> onnx.ModelProto:
    """`LOOP` with pieces of its text replaced (each must occur), and with functions behind it."""
    text = LOOP
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return graphs.parse(text + functions)


def feeds(batch: int, tokens: int, seed: int = 0) -> Mapping[str, graphs.Array]:
    """Operands of `LOOP` in double."""
    rng = np.random.default_rng(seed)
    key = rng.standard_normal((batch, tokens, 4, 5))
    return {
        "query": rng.standard_normal((batch, tokens, 4, 5)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.standard_normal((batch, tokens, 4, 3)),
        "g": -rng.uniform(0, 0.1, (batch, tokens, 4)),
        "beta": rng.uniform(0, 1, (batch, tokens, 4)),
        "state": rng.standard_normal((batch, 4, 5, 3)),
    }
