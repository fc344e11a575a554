"""Scalings that a rule does not feel: a term of another degree, hidden at common sizes, shows at their far ends.

A gated delta rule is linear in each query, and in value and state of each column. A key that is doubled is made up for
by a quarter of its beta and the double of its value. All three hold token by token and head by head, and exactly for
powers of two: what a site adds to the rule for some sizes only, or takes from another row, then outgrows the rule.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from deltafuse.draws import DRAWS, Array, Draw, Operands, draw, surging
from deltafuse.patterns import Recurrence

Exponents = npt.NDArray[np.int64]

_SMALL = {"B": 1, "T": 3, "N": 1, "H": 1, "K": 3, "V": 2}
_SAME = 1e-9


@dataclass(frozen=True)
class Scaling:
    """Powers of two for the operands of a site.

    Attributes:
        query, key: exponents [B, T, N, 1]; zeros for what the rule feels.
        value: exponents [B, 1, H, V], of value and state.
        normed: those of query and key that a norm stands before: of these, the rule sees what the norm makes of them.
    """

    query: Exponents
    key: Exponents
    value: Exponents
    normed: frozenset[str] = frozenset()

    def of_site(self, operands: Operands) -> Operands:
        """What the site is given, in place of some operands."""
        key = self._made_up(operands.beta.shape[2])
        return replace(
            self.of_rule(operands),
            query=_times(operands.query, self.query),
            key=_times(operands.key, self.key),
            value=_times(operands.value, self.value + key[..., None]),
            beta=_times(operands.beta, -2 * key),
            state=_times(operands.state, np.moveaxis(self.value, 1, 2)),
        )

    def of_rule(self, operands: Operands) -> Operands:
        """What gives the rule's result, but for `out` and `final`."""
        query = _times(operands.query, self.query) if "query" in self.normed else operands.query
        key = _times(operands.key, self.key) if "key" in self.normed else operands.key
        return replace(operands, query=query, key=key)

    def out(self, found: Array) -> Array:
        """The rule's output [B, T, H, V] that a site's stands for."""
        repeats = found.shape[2] // self.query.shape[2]
        read = np.repeat(self.query * ("query" not in self.normed), repeats, axis=2)
        return _times(found, -(self.value + read))

    def final(self, found: Array) -> Array:
        """The rule's final state [B, H, K, V] that a site's stands for."""
        return _times(found, -np.moveaxis(self.value, 1, 2))

    def _made_up(self, heads: int) -> Exponents:
        """What beta and value make up for of the keys [B, T, H]."""
        key = np.zeros_like(self.key) if "key" in self.normed else self.key
        return np.repeat(key[..., 0], heads // key.shape[2], axis=2)


def scaling(how: Draw, sizes: dict[str, int], normed: Collection[str], felt: Collection[str] = ()) -> Scaling:
    """The scaling of a draw: every mixture of large and small query, key and value occurs, in one row or another.

    Args:
        how: its `spread` and `corner`.
        sizes: of the letters B, T, N, H, V.
        normed: those of query and key that a norm stands before. They are made large only: as many stay where the
            draw's own norm puts them, beside eps.
        felt: those that the rule feels, which are left alone.
    """
    b, t, n, h, v = (sizes[letter] for letter in "BTNHV")
    places = np.indices((b, t, n, 1)).sum(0)
    columns = np.indices((b, 1, h, v)).sum(0)

    heads = places if "key" in normed else np.broadcast_to(places[:, :1], places.shape)

    def exponents(role: str, bits: Exponents) -> Exponents:
        low = 0 if role in normed else -how.spread
        return np.where(bits & 1, how.spread, low) * (role not in felt)

    return Scaling(
        exponents("query", places ^ how.corner),
        exponents("key", (heads ^ how.corner) >> 1),
        np.where(columns & 1, how.spread, -how.spread),
        frozenset(normed),
    )


def _times(array: Array, exponents: Exponents) -> Array:
    """An array times powers of two, exactly."""
    return array * np.ldexp(1.0, exponents) if np.any(exponents) else array


def growth(how: Draw, sizes: dict[str, int]) -> Exponents:
    """By which exponent of two the rule's output [B, T, H, V] grows from token to token in a draw with a surge."""
    tokens, heads = sizes["T"], sizes["H"]
    reached = np.arange(tokens)[:, None] >= surging(tokens, heads)
    return how.surge * reached[None, :, :, None].astype(np.int64)


@lru_cache(maxsize=64)
def felt(recurrence: Recurrence, *, channels: bool) -> frozenset[str]:
    """Those of query and key whose scaling a rule feels: none for delta rules; a rule of a user may be another one.

    Args:
        recurrence: the rule.
        channels: whether its log decay has a value per key channel.
    """
    how = replace(DRAWS[0], spread=8)
    operands = draw(how, _SMALL, 1, normed=False, channels=channels)
    found: set[str] = set()
    for role, other in (("query", "key"), ("key", "query")):
        tried = scaling(how, _SMALL, (), (other,))
        of_site, of_rule = (_run(recurrence, one(operands)) for one in (tried.of_site, tried.of_rule))
        pairs = ((tried.out(of_site[0]), of_rule[0]), (tried.final(of_site[1]), of_rule[1]))
        if not all(np.allclose(one, two, rtol=_SAME, atol=_SAME * float(np.abs(two).max())) for one, two in pairs):
            found.add(role)
    return frozenset(found)


def _run(recurrence: Recurrence, given: Operands) -> tuple[Array, Array]:
    return recurrence(given.query, given.key, given.value, given.g, given.beta, given.state)
