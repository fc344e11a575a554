"""Scalings that a rule does not feel, and what they show: terms that no draw of common size does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphs
from degrees import TERMS, Term, of_beta, power
from deltafuse import patterns
from deltafuse.draws import DRAWS, FAR, Array, Operands, draw
from deltafuse.scalings import felt, growth, scaling

SIZES = {"B": 2, "T": 9, "N": 2, "H": 4, "K": 5, "V": 3}
SPREAD = [how for how in DRAWS if how.spread]
RULES = [rule for rule in patterns.load() if isinstance(rule.name, str) and hasattr(rule, "recurrence")]


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def run(rule: patterns.Pattern, given: Operands) -> tuple[Array, Array]:
    query, key = (np.repeat(x, 2, axis=2) for x in (given.query, given.key))
    return rule.recurrence(query, key, given.value, given.g, given.beta, given.state)


@pytest.mark.parametrize("corner", range(4))
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_does_not_feel_a_scaling_in_any_bit(rule: patterns.Pattern, corner: int) -> None:
    how = replace(DRAWS[0], spread=FAR, corner=corner)
    operands = draw(how, SIZES, 3, normed=False, channels=rule.decay == "channel")
    scaled = scaling(how, SIZES, ())
    out, final = run(rule, scaled.of_site(operands))
    wanted = run(rule, scaled.of_rule(operands))
    assert np.array_equal(scaled.out(out), wanted[0])
    assert np.array_equal(scaled.final(final), wanted[1])
    assert np.abs(out).max() > 1e60 * np.abs(out).min()


def test_what_a_norm_stands_before_is_made_large_only_and_left_to_the_norm() -> None:
    how = replace(DRAWS[0], spread=FAR)
    operands = draw(how, SIZES, 3, normed=True)
    scaled = scaling(how, SIZES, ("query", "key"))
    site, rule = scaled.of_site(operands), scaled.of_rule(operands)
    for role in ("query", "key"):
        assert set(np.unique(getattr(scaled, role))) == {0, FAR}
        assert np.array_equal(getattr(site, role), getattr(rule, role))
    assert np.array_equal(site.beta, operands.beta)
    assert np.array_equal(scaled.out(operands.value), np.ldexp(operands.value, -scaled.value))


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("heads", [1, 4])
def test_every_mixture_of_large_and_small_occurs(tokens: int, heads: int) -> None:
    sizes = {**SIZES, "B": 1, "T": tokens, "N": heads, "H": heads}
    found = [scaling(how, sizes, ()) for how in SPREAD]
    signs = {(int(q), int(k)) for one in found for q, k in zip(one.query.flat, one.key.flat, strict=True)}
    assert signs == {(a, b) for a in (FAR, -FAR) for b in (FAR, -FAR)}
    assert all({FAR, -FAR} == set(one.value.flat) for one in found)


def test_shipped_rules_feel_neither_scaling_and_another_rule_is_asked() -> None:
    for rule in RULES:
        assert felt(rule.recurrence, channels=rule.decay == "channel") == frozenset()

    def squared(query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
        return graphs.pattern().recurrence(query * query, key, value, g, beta, state)

    def twice(query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
        return graphs.pattern().recurrence(query, key, value, g, beta * beta, state)

    assert felt(squared, channels=False) == {"query"}
    assert felt(twice, channels=False) == {"key"}
    left = scaling(SPREAD[0], SIZES, (), ("key",))
    assert not left.key.any()
    assert left.query.any()


def test_a_rule_grows_with_one_beta_as_it_is_told() -> None:
    (how,) = [how for how in DRAWS if how.surge]
    out, _ = run(graphs.pattern(), draw(how, SIZES, 3, normed=False))
    rows = np.abs(np.ldexp(out, -growth(how, SIZES))).max(axis=3)
    assert 1e-3 < rows.min() < rows.max() < 1e3
    assert np.abs(out).max() > 1e3 * 2.0 ** (FAR - 20)


# One step of the rule, with a term that is nothing at common sizes.


def fused(model: onnx.ModelProto, folder: Path) -> tuple[int, list[str]]:
    report = graphs.fuse(graphs.save(model, folder), folder / "out.onnx", target="ort")
    return report.exit, graphs.codes(report)


@pytest.mark.usefixtures("any_factor")
@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.__name__)
def test_a_term_that_no_common_size_shows_refuses_the_site(term: Term, tmp_path: Path) -> None:
    # The beta that makes up for a small key is so large that its square is no number.
    code = "higher-degree" if term is of_beta else "not-equal"
    assert fused(graphs.step(*term(2, "1e-30")), tmp_path) == (3, [code])


@pytest.mark.usefixtures("any_factor")
@pytest.mark.parametrize("term", TERMS[:4], ids=lambda term: term.__name__)
def test_a_high_power_overflows_where_the_rule_does_not(term: Term, tmp_path: Path) -> None:
    assert fused(graphs.step(*term(16, "1e-20")), tmp_path) == (3, ["higher-degree"])


@pytest.mark.usefixtures("any_factor")
@pytest.mark.parametrize("operand", ["v0", "known"])
def test_an_overflow_does_not_hide_a_smaller_power(operand: str, tmp_path: Path) -> None:
    # Nothing times a high power is no number where the power is none, and then plain values show no third power.
    terms = (
        f"a2 = Mul({operand}, {operand})\n  a3 = Mul(a2, {operand})\n  a6 = Mul(a3, a3)\n  a12 = Mul(a6, a6)\n"
        "  nothing = Constant<value = float {0}>()\n  az = Mul(a12, nothing)\n"
        "  little = Constant<value = float {2e-15}>()\n  ac = Mul(a3, little)\n"
        "  m0 = Sub(v0, known)\n  m1 = Add(m0, ac)\n  missing = Add(m1, az)"
    )
    assert fused(graphs.step(("missing = Sub(v0, known)", terms)), tmp_path) == (3, ["higher-degree"])


def test_a_term_of_another_degree_in_front_of_the_rule_stays_there(tmp_path: Path) -> None:
    edits = [("q1 = Mul(q0, scale)", power("q0", "w", 16, "1e-15", "last") + "\n  qw = Mul(q0, w)\n"
              "  q1 = Mul(qw, scale)")]  # fmt: skip
    model = graphs.step(*edits)
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx", target="ort")
    assert report.exit == 0
    fused = onnx.load(tmp_path / "out.onnx")
    feeds = graphs.wide_feeds(model, 3)
    assert graphs.difference(graphs.lowered_double(fused, report), graphs.double(model), feeds) < 1e-9
