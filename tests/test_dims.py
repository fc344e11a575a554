"""Symbolic sizes: arithmetic laws, the text form, bounds."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafuse.dims import (
    Dim,
    Expr,
    bounds,
    ceildiv,
    evaluate,
    is_clamped,
    maximum,
    minimum,
    parse,
    substitute,
    symbol,
    symbol_name,
    symbols,
    weight,
)

NAMES = ("a", "batch", "s17")
A, B, S = map(symbol, NAMES)

leaves = st.one_of(st.integers(-20, 20), st.sampled_from([A, B, S]))


def _combine(children: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
    pairs = st.tuples(children, children)
    return st.one_of(
        pairs.map(lambda p: p[0] + p[1]),
        pairs.map(lambda p: p[0] - p[1]),
        pairs.map(lambda p: p[0] * p[1]),
        pairs.map(lambda p: minimum(*p)),
        pairs.map(lambda p: maximum(*p)),
        st.tuples(children, st.integers(1, 17)).map(lambda p: p[0] // p[1]),
        st.tuples(children, st.integers(1, 17)).map(lambda p: p[0] % p[1]),
    )


dims = st.recursive(leaves, _combine, max_leaves=6)
bindings = st.fixed_dictionaries({name: st.integers(1, 40) for name in NAMES})


@given(dims, dims, bindings)
def test_operators_agree_with_integers(x: Dim, y: Dim, binding: dict[str, int]) -> None:
    a, b = evaluate(x, binding), evaluate(y, binding)
    assert evaluate(x + y, binding) == a + b
    assert evaluate(x - y, binding) == a - b
    assert evaluate(x * y, binding) == a * b
    assert evaluate(minimum(x, y), binding) == min(a, b)
    assert evaluate(maximum(x, y), binding) == max(a, b)


@given(dims, st.one_of(st.integers(1, 20), st.sampled_from([A, B, 4 * S, A * B])), bindings)
def test_division_agrees_with_integers(x: Dim, y: Dim, binding: dict[str, int]) -> None:
    a, b = evaluate(x, binding), evaluate(y, binding)
    assert evaluate(x // y, binding) == a // b
    assert evaluate(x % y, binding) == a % b
    assert evaluate(ceildiv(x, y), binding) == -(-a // b)


@given(dims, dims, dims)
def test_ring_laws_hold_as_equality_of_forms(x: Dim, y: Dim, z: Dim) -> None:
    assert x + y == y + x
    assert x * y == y * x
    assert (x + y) + z == x + (y + z)
    assert x * (y + z) == x * y + x * z
    assert x - x == 0
    assert hash(x + y) == hash(y + x)


@given(dims, bindings)
def test_text_reads_back_as_the_same_size(x: Dim, binding: dict[str, int]) -> None:
    again = parse(str(x)) if isinstance(x, Expr) or x >= 0 else x
    assert evaluate(again, binding) == evaluate(x, binding)


@given(dims, dims, bindings)
def test_substitution_commutes_with_evaluation(x: Dim, inner: Dim, binding: dict[str, int]) -> None:
    value = evaluate(inner, binding)
    direct = evaluate(substitute(x, {"a": inner}), binding)
    assert direct == evaluate(x, {**binding, "a": value})


@given(dims, bindings)
def test_bounds_hold(x: Dim, binding: dict[str, int]) -> None:
    low, high = bounds(x)
    assert low <= evaluate(x, binding) <= high


@pytest.mark.parametrize(
    ("dim", "wanted"),
    [
        ((A - B) // 2, (-inf, inf)),
        ((-A - 3) // 2, (-inf, -2)),
        ((A + 4) // A, (0, inf)),
        ((A + 6) // 3, (2, inf)),
    ],
)
def test_bounds_of_a_floor(dim: Dim, wanted: tuple[float, float]) -> None:
    assert bounds(dim) == wanted


@given(dims, st.integers(1, 9))
def test_exact_division_is_seen(x: Dim, n: int) -> None:
    assert (x * n) // n == x
    assert (x * n * B) // (n * B) == x


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        ("batch", B),
        ("128", 128),
        ("4*s17", 4 * S),
        ("a*s17 + 1", A * S + 1),
        ("a * 4", 4 * A),
        ("Min(8, a)", minimum(8, A)),
        ("Max(1, a - 3)", maximum(1, A - 3)),
        ("floor(a/2)", A // 2),
        ("ceiling(a/2)", ceildiv(A, 2)),
        ("-floor(-a/2)", ceildiv(A, 2)),
        ("(a//2)", A // 2),
        ("FloorDiv(a, 4)", A // 4),
        ("Mod(a, 4)", A % 4),
        ("a % 4", A % 4),
        ("CeilToInt(IntTrueDiv(a, 16))", ceildiv(A, 16)),
        ("a**2", A * A),
        ("4*a/2", 2 * A),
    ],
)
def test_dim_params_are_read(text: str, dim: Dim) -> None:
    assert parse(text) == dim


@pytest.mark.parametrize(
    "text", ["total-length", "a/2", "f(a)", "a b", "Loop:x", "a if b else c", "1.5*a", "a//0", "?"]
)
def test_other_texts_are_one_symbol(text: str) -> None:
    assert parse(text) == symbol(text)
    assert str(parse(text)) == text


def test_padded_lengths_have_one_form() -> None:
    chunks = ceildiv(A, 16)
    assert 16 * chunks == A + (-A) % 16
    assert 16 * chunks == A + (16 - A % 16) % 16
    assert chunks == (A + (-A) % 16) // 16
    assert chunks == (A + 15) // 16


def test_known_bounds_simplify() -> None:
    assert minimum(A + 3, 4) == 4
    assert maximum(A, 1) == A
    assert minimum(A, 3) != 3
    assert (A % 16) // 16 == 0
    assert (16 * B + A % 16) // 16 == B


def test_questions_about_a_size() -> None:
    dim = 4 * S * A + minimum(B, 3)
    assert symbols(dim) == {"s17", "a", "batch"}
    assert symbol_name(S) == "s17"
    assert [symbol_name(x) for x in (2 * S, S + 1, 7)] == [None, None, None]
    assert is_clamped(dim)
    assert not is_clamped(A // 2)
    assert weight(dim) > weight(A) > 0


def test_a_missing_symbol_is_an_error() -> None:
    with pytest.raises(KeyError, match="s17"):
        evaluate(A + S, {"a": 1})
