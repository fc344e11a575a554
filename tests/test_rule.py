"""The recurrence on operands as a site has them."""

from __future__ import annotations

import numpy as np
import pytest

import graphs
from deltafuse.draws import DRAWS, Operands, draw
from deltafuse.match import Norm
from deltafuse.rule import Preparation, first_tokens, project, relative, run_rule

SIZES = {"B": 2, "T": 5, "N": 2, "H": 6, "K": 3, "V": 4}


def operands(seed: int = 0) -> Operands:
    return draw(DRAWS[0], SIZES, seed, normed=False)


def plain(**changes: object) -> Preparation:
    return Preparation(**{"query_norm": None, "key_norm": None, "stateless": False, **changes})


def by_hand(given: Operands, stateless: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The rule written out, one number at a time."""
    b, t, h = given.g.shape
    group = h // given.query.shape[2]
    state = np.zeros_like(given.state) if stateless else given.state.copy()
    out = np.zeros((b, t, h, given.value.shape[-1]))
    for i in range(b):
        for j in range(h):
            s = state[i, j]
            for step in range(t):
                key, query = given.key[i, step, j // group], given.query[i, step, j // group]
                s = s * np.exp(given.g[i, step, j])
                s = s + np.outer(key, given.beta[i, step, j] * (given.value[i, step, j] - key @ s))
                out[i, step, j] = query @ s
            state[i, j] = s
    return out, state


@pytest.mark.parametrize("stateless", [False, True])
def test_the_shipped_recurrence_is_the_rule(stateless: bool) -> None:
    given = operands()
    out, final = run_rule(graphs.pattern().recurrence, given, plain(stateless=stateless))
    want_out, want_final = by_hand(given, stateless)
    assert relative(out, want_out) < 1e-14
    assert relative(final, want_final) < 1e-14


def test_norms_come_before_the_heads_are_repeated() -> None:
    given = operands()
    norm = Norm("rsqrt", 1e-6, 1, (), ())
    out, _ = run_rule(graphs.pattern().recurrence, given, plain(query_norm=norm, key_norm=norm))

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    normed = Operands(unit(given.query), unit(given.key), given.value, given.g, given.beta, given.state)
    assert relative(out, by_hand(normed)[0]) < 1e-14


def test_the_rule_is_linear_in_the_columns_of_value_and_state() -> None:
    given = operands()
    matrix = np.random.default_rng(1).standard_normal((4, 2))
    out, final = run_rule(graphs.pattern().recurrence, given, plain())
    few_out, few_final = run_rule(graphs.pattern().recurrence, project(given, matrix), plain())
    assert relative(few_out, out @ matrix) < 1e-13
    assert relative(few_final, final @ matrix) < 1e-13


def test_the_rule_is_causal() -> None:
    given = operands()
    out, _ = run_rule(graphs.pattern().recurrence, given, plain())
    few, _ = run_rule(graphs.pattern().recurrence, first_tokens(given, 2), plain())
    assert few.shape[1] == 2
    assert np.array_equal(few, out[:, :2])


@pytest.mark.parametrize("name", sorted(graphs.pattern().neighbours))
def test_a_neighbour_differs_from_the_rule_on_every_draw(name: str) -> None:
    neighbour = graphs.pattern().neighbours[name]
    for seed, how in enumerate(DRAWS):
        given = draw(how, SIZES, seed, normed=False)
        with np.errstate(all="ignore"):
            out, final = run_rule(neighbour, given, plain())
        want_out, want_final = run_rule(graphs.pattern().recurrence, given, plain())
        # Where the state has decayed, hardly anything is left to take away: that is the smallest difference there is.
        assert max(relative(out, want_out), relative(final, want_final)) > 1e-4, how.name


def test_relative_is_the_difference_over_the_largest_wanted_number() -> None:
    wanted = np.array([1.0, -4.0])
    assert relative(np.array([1.0, -3.0]), wanted) == 0.25
    assert relative(wanted, wanted) == 0.0


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (np.zeros(3), np.zeros(3)),
        (np.ones(3), np.ones(2)),
        (np.array([np.inf, 1.0]), np.array([np.inf, 1.0])),
        (np.array([np.nan]), np.array([np.nan])),
        (np.array([np.inf]), np.array([1.0])),
    ],
)
def test_nothing_and_infinities_prove_nothing(found: np.ndarray, wanted: np.ndarray) -> None:
    assert relative(found, wanted) == np.inf


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("columns", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("keys", [3, 8, 128])
def test_the_layout_in_memory_does_not_change_a_bit(columns: int, heads: int, keys: int) -> None:
    sizes = {"B": 2, "T": 7, "N": heads, "H": 2 * heads, "K": keys, "V": columns}
    given = draw(DRAWS[1], sizes, 5, normed=False)
    query, key = (np.repeat(x, 2, axis=2) for x in (given.query, given.key))
    wanted = graphs.pattern().recurrence(query, key, given.value, given.g, given.beta, given.state)
    for found, expected in zip(run_rule(graphs.pattern().recurrence, given, plain()), wanted, strict=True):
        assert found.flags.c_contiguous
        assert np.array_equal(found, expected)
