"""What sizes and positions may be made into before they meet data."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphs
from deltafuse.classes import classify
from deltafuse.dims import ceildiv, minimum, symbol
from deltafuse.guards import find_guard
from deltafuse.quasi_linear import apart, chunked
from deltafuse.reasons import Reason
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes
from deltafuse.size_flow import Sizes

SIZED = """
<ir_version: 8, opset_import: ["" : 18]>
sized (float[N,4] x, float[M] other, float[C,N,4] blocks) => (float y)
<int64 count = {{37}}, int64 zero = {{0}}, int64 one = {{1}}, int64 two = {{2}}, float half = {{0.5}},
 int64[1] first = {{0}}, int64[1] last = {{-1}}, int64[1] end = {{9223372036854775807}}, int64[1] far = {{2000}},
 int64 c2000 = {{2000}}, float f37 = {{37.0}}, float unit = {{1.0}}, float[1] units = {{1}}, int64[1] c37 = {{37}},
 int64 huge = {{4503599627370496}}, int64[1] c128 = {{128}}, int64[2] zero_four = {{0, 4}}, int64 c64 = {{64}},
 int64[3] table = {{5, 7, 7}}, int64[4] pads = {{0, 0, 2000, 0}}, int64[1] step = {{2000}}>
{{
  shape = Shape(x)
  n = Gather<axis = 0>(shape, zero)
  nf = Cast<to = 1>(n)
  nu = Unsqueeze(n, first)
  r = Range(zero, n, one)
  column = Unsqueeze(r, first)
  row = Unsqueeze(r, last)
  {body}
}}
"""


def look(body: str, folder: Path) -> Reason | None:
    model = graphs.scanned(graphs.parse(SIZED.format(body=body)), folder)
    graph = model.graph
    scope = Scope(model, graph, classify(model), Shapes(model))
    data = [graph.find(name) for name in ("x", "other", "blocks")]
    return find_guard(scope, range(len(graph.op)), data, (), (), known=Sizes())


SPOILED = {
    "a size itself": "y = Mul(x, nf)",
    "one size chosen": "c = Equal(n, count)\n h = Mul(x, half)\n y = Where(c, h, x)",
    "a remainder": "m = Mod(n, count)\n f = Cast<to = 1>(m)\n y = Mul(x, f)",
    "a bound": "m = Min(n, count)\n f = Cast<to = 1>(m)\n y = Mul(x, f)",
    "a quotient": "d = Div(n, count)\n f = Cast<to = 1>(d)\n y = Mul(x, f)",
    "a narrow type": "d = Cast<to = 5>(n)\n f = Cast<to = 1>(d)\n y = Mul(x, f)",
    "half precision": "d = Cast<to = 10>(n)\n f = Cast<to = 1>(d)\n y = Mul(x, f)",
    "rounded": "h = Mul(nf, half)\n i = Cast<to = 7>(h)\n f = Cast<to = 1>(i)\n y = Mul(x, f)",
    "two sizes compared": "q = Mul(n, n)\n m = Mul(n, count)\n c = Less(q, m)\n f = Cast<to = 1>(c)\n y = Mul(x, f)",
    "a read at a bound": "m = Min(n, count)\n y = Gather(x, m)",
    "a read at a remainder": "m = Mod(n, count)\n y = Gather(x, m)",
    "a read to a quotient": "d = Div(n, c2000)\n e = Unsqueeze(d, first)\n y = Slice(x, first, e)",
    # Smooth functions of a size that are equal wherever they are tried.
    "a bell at one size": "d = Sub(nf, f37)\n e = Mul(d, d)\n g = Neg(e)\n s = Exp(g)\n w = Sub(unit, s)\n"
    " y = Mul(x, w)",
    "a sigmoid": "d = Sub(nf, f37)\n w = Sigmoid(d)\n y = Mul(x, w)",
    "a root": "d = Sub(nf, f37)\n e = Mul(d, d)\n w = Sqrt(e)\n y = Mul(x, w)",
    "a norm": "w = ReduceL2<keepdims = 0>(nf)\n y = Mul(x, w)",
    # Masks that act far away, or at one size only.
    "a mask at a number": "c = Less(r, count)\n f = Cast<to = 1>(c)\n y = MatMul(f, x)",
    "a mask of slopes": "d = Mul(row, two)\n e = Sub(d, c2000)\n c = Less(row, e)\n f = Cast<to = 1>(c)\n"
    " y = Mul(x, f)",
    "a far band": "d = Sub(row, column)\n c = Equal(d, count)\n f = Cast<to = 1>(c)\n y = MatMul(f, x)",
    "near the end": "e = Sub(n, count)\n c = Equal(row, e)\n f = Cast<to = 1>(c)\n y = Mul(x, f)",
    "a triangle far off": "s = Concat<axis = 0>(nu, nu)\n o = ConstantOfShape(s)\n t = Trilu(o, c2000)\n"
    " y = MatMul(t, x)",
    "a triangle at a size": "d = Sub(n, c2000)\n s = Concat<axis = 0>(nu, nu)\n o = ConstantOfShape(s)\n"
    " t = Trilu(o, d)\n y = MatMul(t, x)",
    # Gates that are handed on as a shape, a count or a table.
    "a repeat": "d = Div(n, c2000)\n e = Add(d, one)\n f = Unsqueeze(e, first)\n t = Tile(units, f)\n"
    " s = ReduceSum<keepdims = 0>(t)\n y = Mul(x, s)",
    "a repeat of data": "d = Div(n, c2000)\n e = Add(d, one)\n f = Unsqueeze(e, first)\n p = Unsqueeze(one, first)\n"
    " g = Concat<axis = 0>(p, f)\n t = Tile(x, g)\n y = ReduceSum(t, last)",
    "a filled shape": "d = Div(n, c2000)\n e = Unsqueeze(d, first)\n t = ConstantOfShape(e)\n s = Size(t)\n"
    " f = Cast<to = 1>(s)\n y = Mul(x, f)",
    "a table of numbers": "m = Gather(table, n)\n f = Cast<to = 1>(m)\n y = Mul(x, f)",
    "a part of a table": "t = Expand(table, first)\n u = Slice(table, first, nu)\n y = Gather(x, u)",
    "a far step": "s = Range(zero, n, c2000)\n y = Gather(x, s)",
    # Types that do not hold it.
    "unsigned": "a = Sub(n, c2000)\n u = Cast<to = 13>(a)\n f = Cast<to = 1>(u)\n y = Mul(x, f)",
    "an overflow": "a = Mul(n, huge)\n b = Div(a, huge)\n c = Unsqueeze(b, first)\n y = Slice(x, first, c)",
    "a narrow overflow": "a = Cast<to = 6>(n)\n h = Cast<to = 6>(c2000)\n i = Mul(h, h)\n b = Mul(a, i)\n"
    " c = Cast<to = 7>(b)\n d = Unsqueeze(c, first)\n y = Slice(x, first, d)",
    # Data that is read where it has no tokens as yet.
    "far tokens": "s = Slice(x, far, end, first)\n t = ReduceSum(s, first)\n y = Add(x, t)",
    "the first tokens": "y = Slice(x, first, c37, first)",
    "all but far tokens": "s = Neg(far)\n t = Slice(x, s, end, first)\n y = ReduceSum(t, first)",
    "every so many tokens": "t = Slice(x, first, end, first, step)\n y = ReduceSum(t, first)",
    "a far band of data": "s = Neg(c2000)\n y = Trilu<upper = 0>(blocks, s)",
    "a far pad": "p = Pad(x, pads)\n y = Gather(p, c2000)",
    "many near shifts": "\n ".join(f"s{i + 1} = Slice({f's{i}' if i else 'x'}, c128, end, first)" for i in range(9))
    + "\n y = Identity(s9)",
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_choice_by_size_or_position_refuses(kind: str, tmp_path: Path) -> None:
    found = look(SPOILED[kind], tmp_path)
    assert found is not None
    assert found.code == "position-gate"


@pytest.mark.parametrize(
    "body",
    [
        "y = Expand(x, shape)",
        "a = Add(n, one)\n b = Unsqueeze(a, first)\n y = Slice(x, first, b)",
        "c = Equal(shape, shape)\n y = Neg(x)",
        "c = Less(row, column)\n f = Cast<to = 1>(c)\n y = MatMul(f, x)",
        "d = Sub(row, column)\n c = GreaterOrEqual(d, zero)\n f = Cast<to = 1>(c)\n y = MatMul(f, x)",
        "c = Less(row, n)\n f = Cast<to = 1>(c)\n y = Mul(x, f)",
        "s = Concat<axis = 0>(nu, nu)\n o = ConstantOfShape(s)\n t = Trilu(o)\n y = MatMul(t, x)",
        "o = Expand(units, nu)\n t = Mul(o, half)\n e = Exp(t)\n y = Mul(other, e)",
        "y = Gather(x, zero)",
        "y = Gather(x, r)",
        "e = Neg(n)\n m = Mod(e, c64)\n p = Unsqueeze(m, first)\n z = ConstantOfShape(zero_four)\n"
        " q = Concat<axis = 0>(first, first, p, first)\n y = Pad(x, q)",
    ],
)
def test_sizes_as_sizes_pass(body: str, tmp_path: Path) -> None:
    assert look(body, tmp_path) is None


def test_two_sizes_of_chunks_in_one_site_refuse(tmp_path: Path) -> None:
    pad = "e{0} = Neg(n)\n m{0} = Mod(e{0}, {1})\n p{0} = Unsqueeze(m{0}, first)\n"
    pad += " q{0} = Concat<axis = 0>(first, first, p{0}, first)\n y{0} = Pad(x, q{0})\n"
    both = pad.format("a", "c64") + pad.format("b", "two") + "y = Identity(ya)"
    found = look(both, tmp_path)
    assert found is not None
    assert found.code == "position-gate"


def test_what_sizes_are_rounded_to() -> None:
    tokens, batch = symbol("T"), symbol("B")
    pad = (64 - tokens % 64) % 64
    plain = (7, tokens, batch * tokens, 3 - tokens)
    assert [chunked(dim) for dim in plain] == [1, 1, 1, 1]
    whole = tokens + pad
    padded = (whole, pad, ceildiv(tokens, 64), batch * 8 * (whole // 64), whole // 64 * 64 - tokens)
    assert {chunked(dim) for dim in padded} == {64}
    others = (
        tokens // 64, minimum(tokens, 2000), 1 + tokens // 2000, (tokens + 1) // 64 - tokens // 64, tokens * tokens,
        (tokens + 62) // 64, (tokens + batch) // 64, ceildiv(tokens, 64) + ceildiv(tokens, 16),
    )  # fmt: skip
    assert [chunked(dim) for dim in others] == [0] * len(others)


def test_how_far_sizes_are_apart_from_multiples_of_the_tokens() -> None:
    tokens, batch = symbol("T"), symbol("B")
    pad = (64 - tokens % 64) % 64
    found = {
        7: 7, tokens: 0, 3 * tokens - 5: 5, pad: 63, tokens + pad: 63, 2 * pad - 1: 125, ceildiv(tokens, 64): 1,
        batch * tokens: 0, batch * tokens + 4: 4, batch: float("inf"), batch * (tokens + 1): float("inf"),
        minimum(tokens, 2000): float("inf"),
    }  # fmt: skip
    assert {dim: apart(dim, {"T"}) for dim in found} == found
    assert Sizes(same={"S": tokens}, tokens=frozenset({"T"})).apart(tokens - 2 * symbol("S")) == 0
    assert Sizes().apart(batch + tokens) == 0
