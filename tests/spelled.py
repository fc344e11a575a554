"""Pieces of the rule in ONNX text that several tests put into graphs of their own."""

from __future__ import annotations

_SERIES = """\
sum = CumSum(gt, two)
left = Unsqueeze(sum, last)
right = Unsqueeze(sum, row)
gap = Sub(left, right)
kept = Trilu<upper = 0>(gap, diag)
decay = Exp(kept)
b = Unsqueeze(bt, last)
kb = Mul(k, b)
vb = Mul(v, b)
kt = Transpose<perm = [0, 1, 3, 2]>(k)
kk = MatMul(kb, kt)
kd = Mul(kk, decay)
low = Trilu<upper = 0>(kd, below)
a = Neg(low)
u0 = Identity(vb)
STEPS
qk = MatMul(q, kt)
qd = Mul(qk, decay)
ql = Trilu<upper = 0>(qd, diag)
o = MatMul(ql, uTERMS)
os = Mul(o, half)
"""


def series(terms: int) -> str:
    """The rule within one chunk, its inverse by so many terms of a power series.

    It makes `os` of q, k, v, gt and bt (heads before tokens) and of the numbers two, last, row, half, below and diag.
    """
    steps = "\n".join(f"p{i} = MatMul(a, u{i - 1})\n u{i} = Add(vb, p{i})" for i in range(1, terms + 1))
    return _SERIES.replace("STEPS", steps).replace("TERMS", str(terms))
