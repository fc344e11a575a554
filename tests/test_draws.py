"""Draws have the properties that tell rules apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deltafuse.draws import DRAWS, LEAPS, Draw, draw

SIZES = {"B": 2, "T": 40, "N": 2, "H": 4, "K": 16, "V": 8}


def norms(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1)


@pytest.mark.parametrize("how", DRAWS, ids=lambda how: how.name)
def test_shapes_follow_the_letters(how: Draw) -> None:
    given = draw(how, SIZES, 0, normed=True)
    assert given.query.shape == given.key.shape == (2, 40, 2, 16)
    assert given.value.shape == (2, 40, 4, 8)
    assert given.g.shape == given.beta.shape == (2, 40, 4)
    assert given.state.shape == (2, 4, 16, 8)
    assert {array.dtype for array in vars(given).values()} == {np.dtype(np.float64)}


@pytest.mark.parametrize("how", DRAWS, ids=lambda how: how.name)
def test_decay_fills_its_range(how: Draw) -> None:
    g = draw(how, SIZES, 1, normed=False).g
    low, high = how.decay
    assert low <= g.min() < 0.9 * low
    assert min(0.1 * low, high) < g.max() <= high


@pytest.mark.parametrize("tokens", [100, 640, 4096])
def test_a_lasting_decay_leaves_something_of_the_first_token(tokens: int) -> None:
    (how,) = [how for how in DRAWS if how.lasting and how.surge == 0]
    g = draw(how, {**SIZES, "T": tokens}, 1, normed=False).g
    assert np.exp(g.sum(1)).min() > 1e-5


@pytest.mark.parametrize("key_dim", [2, 4, 16, 128])
@pytest.mark.parametrize("tokens", [3, 100, 640, 4096])
def test_the_first_state_is_still_felt_after_all_tokens(tokens: int, key_dim: int) -> None:
    # Not the decay alone forgets: each step of the delta rule replaces what its key reads.
    (how,) = [how for how in DRAWS if how.lasting and how.surge == 0]
    given = draw(how, {**SIZES, "T": tokens, "K": key_dim, "V": 2}, 1, normed=False)
    left = given.state.astype(np.longdouble)
    keys = np.repeat(given.key, 2, axis=2)
    for t in range(tokens):
        left = left * np.exp(given.g[:, t])[..., None, None]
        read = np.einsum("bhk,bhkv->bhv", keys[:, t], left)
        left = left - np.einsum("bhk,bhv->bhkv", given.beta[:, t, :, None] * keys[:, t], read)
    lost = np.linalg.norm(left, axis=(2, 3)) / np.linalg.norm(given.state, axis=(2, 3))
    assert lost.min() > 1e-9


@pytest.mark.parametrize("how", DRAWS, ids=lambda how: how.name)
def test_beta_fills_its_range(how: Draw) -> None:
    beta = draw(replace(how, surge=0), SIZES, 2, normed=False).beta
    low, high = how.beta
    assert low <= beta.min() < low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) < beta.max() <= high


def test_a_surge_is_one_beta_of_each_head() -> None:
    (how,) = [how for how in DRAWS if how.surge]
    for tokens in (1, 40):
        sizes = {**SIZES, "T": tokens}
        beta, plain = (draw(one, sizes, 2, normed=False).beta for one in (how, replace(how, surge=0)))
        changed = beta != plain
        assert np.array_equal(changed.sum(1), np.ones((2, 4)))
        assert np.array_equal(beta[changed], plain[changed] * 2.0**how.surge)
        assert len({*np.nonzero(changed[0].T)[1]}) == min(tokens, 4)


@pytest.mark.parametrize("how", DRAWS, ids=lambda how: how.name)
def test_values_and_state_have_the_draw_s_scale(how: Draw) -> None:
    given = draw(how, SIZES, 3, normed=False)
    assert np.std(given.value) == pytest.approx(how.scale, rel=0.1)
    assert np.std(given.state) == pytest.approx(how.scale, rel=0.1)


def test_keys_without_a_norm_behind_them_are_unit_vectors() -> None:
    for how in DRAWS:
        assert np.allclose(norms(draw(how, SIZES, 4, normed=False).key), 1)


def test_keys_with_a_norm_behind_them_have_many_norms() -> None:
    for how in DRAWS:
        lengths = norms(draw(how, SIZES, 5, normed=True).key)
        assert 0.5 * how.norm <= lengths.min() < lengths.max() <= 1.5 * how.norm
        assert lengths.max() > 2 * lengths.min()


def test_keys_are_correlated_from_token_to_token() -> None:
    key = draw(DRAWS[0], SIZES, 6, normed=False).key
    assert np.mean((key[:, 1:] * key[:, :-1]).sum(-1)) > 0.5


def test_together_they_cover_what_separates() -> None:
    assert {how.scale for how in DRAWS} >= {1e-60, 1.0, 1e60}
    assert any(how.decay[0] >= -0.1 for how in DRAWS)
    assert any(how.decay[1] > 0 for how in DRAWS)
    assert any(how.plunge <= -90 and how.decay[0] <= -100 for how in DRAWS)
    assert any(how.beta[0] < 0 and how.beta[1] >= 2 for how in DRAWS)
    # Scalings apart go beyond float32, and one row alone has each mixture in one draw or another.
    assert {how.corner for how in DRAWS if how.spread} == {0, 1, 2, 3}
    largest = float(np.finfo(np.float32).max)
    assert min(2.0**how.spread for how in DRAWS if how.spread) > largest
    assert max(2.0**how.surge for how in DRAWS) > largest
    # Norms on both sides of the root of the usual eps.
    assert min(how.norm for how in DRAWS) < 1e-3 < 1 < max(how.norm for how in DRAWS)


def test_the_plunge_is_one_step() -> None:
    (how,) = [how for how in DRAWS if how.plunge]
    g = draw(how, SIZES, 7, normed=False).g
    assert np.all(g[:, 20] == how.plunge)


def test_a_seed_gives_the_same_draw_and_another_seed_another() -> None:
    one, same, other = (draw(DRAWS[0], SIZES, seed, normed=False) for seed in (8, 8, 9))
    for name, array in vars(one).items():
        assert np.array_equal(array, getattr(same, name))
        assert not np.array_equal(array, getattr(other, name))


@pytest.mark.parametrize("channels", [False, True])
def test_the_decay_of_every_token_leaps_up_and_down(channels: bool) -> None:
    """No sum of them leaves the range of one: what the rule makes of them stays a number."""
    sizes = {"B": 2, "T": 7, "N": 1, "H": 3, "K": 4, "V": 2}
    drawn = [draw(how, sizes, 1, normed=False, channels=channels) for how in LEAPS]
    up, down = (one.g for one in drawn[1:])
    assert np.array_equal(up, -down)
    assert set(np.unique(up)) == {-120.0, 120.0}
    assert np.abs(np.cumsum(up, axis=1)).max() == 120.0
    first = drawn[0]
    assert (first.g[:, 0] == 120.0).all()
    assert not first.state.any()
