"""Operands that tell rules apart: unit keys correlated in time, slow and fast decay, large and small values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Operands:
    """Operands of the rule in plain axes, float64.

    Attributes:
        query, key: [B, T, N, K], before any norm, N key heads.
        value: [B, T, H, V].
        g: [B, T, H], or [B, T, H, K] where the decay has a value per key channel.
        beta: [B, T, H].
        state: [B, H, K, V].
    """

    query: Array
    key: Array
    value: Array
    g: Array
    beta: Array
    state: Array


@dataclass(frozen=True)
class Draw:
    """How to draw operands.

    Attributes:
        name: for messages.
        decay: lowest and highest g.
        plunge: one step of this log decay in the middle, 0 for none.
        scale: of values and state. The rule is linear in them: what is not shows at extreme ones.
        beta: lowest and highest beta.
        norm: of keys and queries before a norm (used only where the site has one).
        memory: how much of the key before a key keeps.
        lasting: weaken decay and beta on many tokens, so that the first one still counts at the last: each step of
            the delta rule takes a share beta of what the state holds along its key, besides what decays.
        spread: how far rows of query and key, and columns of value and state, are scaled apart where a site is held
            against its rule, as an exponent of two (see `deltafuse.scalings`); this then takes the place of `scale`.
        corner: which of the four mixtures of large and small query and key the first row has.
        surge: by how much the beta of one token of each head grows, as an exponent of two. The rule is linear in it:
            what is not shows.
        leap: the log decay of the tokens of each head, this and its negative in turn, 0 for none. A power of it that
            the rule does not have grows or falls faster than the rule does.
        fresh: let the state start at zero and only the first tokens leap: the rule does not feel it.
        chained: let all keys and queries be of one direction, and each token take back all that the one before has
            written, but little of what came earlier: then a product over all tokens of a chunk is as large as any
            single one, and so is a power of a cosine. `beta` is a factor on what is taken back.
    """

    name: str
    decay: tuple[float, float]
    plunge: float
    scale: float
    beta: tuple[float, float]
    norm: float
    memory: float = 0.8
    lasting: bool = False
    spread: int = 0
    corner: int = 0
    surge: int = 0
    leap: float = 0.0
    fresh: bool = False
    chained: bool = False

    @property
    def mild(self) -> Draw:
        """The same with a decay whose exponentials stay numbers however they are taken apart."""
        return replace(self, decay=_MILD, plunge=0.0, lasting=True)

    @property
    def plain(self) -> Draw:
        """The same with all operands of common size."""
        return replace(self, scale=1.0, spread=0, surge=0)


#: Lowest and highest g of the slowest decay.
_MILD = (-0.1, -0.002)
#: Beyond the range of float32 in both directions, and far enough from that of double for products of a few.
FAR = 140

#: Every site is proven on all of these.
DRAWS = (
    Draw("slow decay", _MILD, 0.0, 1.0, (0.05, 0.95), 1.0, lasting=True),
    Draw("fast decay, large values", (-6.0, -0.1), 0.0, 1e60, (0.0, 1.0), 30.0, spread=FAR, corner=1),
    Draw("plunge, small values", (-100.0, -2.0), -90.0, 1e-60, (0.5, 1.0), 0.02, spread=FAR, corner=2),
    # Keys that forget: beta of 2 on correlated keys makes an inverse by powers too ill-conditioned to tell.
    Draw("any sign of beta, tiny norms", (-3.0, 0.1), 0.0, 1.0, (-1.0, 2.0), 3e-4, memory=0.0, spread=FAR),
    Draw(
        "one large beta", _MILD, 0.0, 1.0, (0.05, 0.95), 1.0, memory=0.0, lasting=True,
        spread=FAR, corner=3, surge=FAR,
    ),
)

#: So far that the fifth power of the decay still is a number, and the rule beside a constant of any float32 is not.
_LEAP = 120.0
#: At few tokens every site that has a log decay is proven on these too.
LEAPS = (
    Draw("a first token that grows", _MILD, 0.0, 1.0, (0.05, 0.95), 1.0, lasting=True, leap=_LEAP, fresh=True),
    Draw("tokens that grow and fall in turn", _MILD, 0.0, 1.0, (0.05, 0.95), 1.0, lasting=True, leap=_LEAP),
    Draw("tokens that fall and grow in turn", _MILD, 0.0, 1.0, (0.05, 0.95), 1.0, lasting=True, leap=-_LEAP),
)

#: Every site is proven on this at a whole chunk: the last power of an inverse that is a series shows in no other draw,
#: nor does a high power of what is less than one in all of them.
CHAIN = Draw("each token takes back the one before", (-2.5, -1.5), 0.0, 1.0, (1.0, 1.1), 30.0, chained=True)

#: Normal numbers of one draw, more than a head has; a prime, so that no two rows, heads or sequences begin at the same.
_ROUND = 262_139

#: Loss over all tokens, as a logarithm, at which the first one still counts: for the decay and for the delta rule each.
_LASTING = 10.0


def draw(how: Draw, sizes: dict[str, int], seed: int, *, normed: bool, channels: bool = False) -> Operands:
    """Draws operands for given sizes (letters as in `deltafuse.layouts`).

    Args:
        how: the kind of operands.
        sizes: of the letters B, T, N, H, K, V.
        seed: of the draw.
        normed: whether the site normalises keys and queries.
        channels: whether the log decay has a value per key channel.
    """
    rng = np.random.default_rng(seed)
    b, t, n, h, k, v = (sizes[letter] for letter in "BTNHKV")
    norm = how.norm if normed else 1.0
    g = rng.uniform(*how.decay, (b, t, h, k) if channels else (b, t, h))
    beta = rng.uniform(*how.beta, (b, t, h))
    if how.lasting:
        g *= min(1.0, _LASTING / (t * -how.decay[0]))
        beta *= min(1.0, _LASTING * k / (t * how.beta[1]))
    if how.plunge:
        g[:, t // 2] = how.plunge
    if how.fresh:
        g[:, 0] = how.leap
    elif how.leap:
        leaps = how.leap * _in_turn(t, h)
        g[:] = leaps[..., None] if channels else leaps
    if how.chained:
        beta *= np.exp(-(g.mean(axis=-1) if channels else g))
    if how.surge:
        beta = np.ldexp(beta, how.surge * (surging(t, h) == np.arange(t)[:, None]))
    query, query_norms = _unit(normal(rng, (b, t, n, k))), norm * rng.uniform(0.5, 1.5, (b, t, n, 1))
    key = _unit(_correlated(rng, (b, t, n, k), how.memory))
    key_norms = norm * rng.uniform(0.5, 1.5, (b, t, n, 1)) if normed else 1.0
    if how.chained:
        query[:] = key[:] = key[:1, :1, :1]
    return Operands(
        query=query * query_norms,
        key=key * key_norms,
        value=normal(rng, (b, t, h, v)) * how.scale,
        g=g,
        beta=beta,
        state=normal(rng, (b, h, k, v)) * (0.0 if how.fresh else how.scale),
    )


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal numbers; those of a large array come round again, at places that have nothing to do with its axes.

    Args:
        rng: where they come from.
        shape: of the array.
    """
    return np.resize(rng.standard_normal(min(math.prod(shape), _ROUND)), shape)


def _in_turn(tokens: int, heads: int) -> npt.NDArray[np.int64]:
    """1 and -1 in turn along the tokens, the other way round from head to head [tokens, heads]."""
    return 1 - 2 * ((np.arange(tokens)[:, None] + np.arange(heads)) % 2)


def surging(tokens: int, heads: int) -> npt.NDArray[np.int64]:
    """The token of each head whose beta grows in a draw with a surge [heads]."""
    return np.arange(heads) * 7 % tokens


def _correlated(rng: np.random.Generator, shape: tuple[int, int, int, int], memory: float) -> Array:
    """Each step keeps most of the step before: a row too few in an inverse then shows."""
    steps = normal(rng, shape)
    for t in range(1, shape[1]):
        steps[:, t] = memory * steps[:, t - 1] + np.sqrt(1 - memory**2) * steps[:, t]
    return steps


def _unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
