"""Run a pattern's recurrence on operands as a site has them: heads repeated, norms applied, values projected."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from deltafuse.draws import Array, Operands
from deltafuse.match import Norm
from deltafuse.norms import normalise
from deltafuse.patterns import Recurrence

#: Columns of the value axis up to which another layout in memory is faster.
_FEW_COLUMNS = 8


@dataclass(frozen=True)
class Preparation:
    """What lies between the operands and the recurrence.

    Attributes:
        stateless: the state starts at zero whatever the operands say.
    """

    query_norm: Norm | None
    key_norm: Norm | None
    stateless: bool


def run_rule(recurrence: Recurrence, operands: Operands, how: Preparation) -> tuple[Array, Array]:
    """Out [B, T, H, V] and final state [B, H, K, V] for scale 1."""
    repeats = operands.value.shape[2] // operands.query.shape[2]
    query, key = (
        _repeat(x if norm is None else normalise(x, norm.kind, norm.eps), repeats)
        for x, norm in ((operands.query, how.query_norm), (operands.key, how.key_norm))
    )
    state = np.zeros_like(operands.state) if how.stateless else operands.state
    # A decay of the channels brings an axis of its own.
    if not 1 < operands.value.shape[3] <= _FEW_COLUMNS or operands.g.ndim > 3:
        return recurrence(query, key, operands.value, operands.g, operands.beta, state)
    query, key, value = (_laid_out(x, (3, 1, 0, 2)) for x in (query, key, operands.value))
    out, final = recurrence(query, key, value, operands.g, operands.beta, _laid_out(state, (2, 3, 0, 1)))
    return np.ascontiguousarray(out), np.ascontiguousarray(final)


def _laid_out(x: Array, order: tuple[int, int, int, int]) -> Array:
    """The same array with its axes in another order in memory, outermost first.

    Few columns make loops of two steps where they are the innermost axis: with the heads there, the same sums in the
    same order take half the time.
    """
    back = sorted(range(4), key=order.__getitem__)
    return np.transpose(np.ascontiguousarray(np.transpose(x, order)), back)


def project(operands: Operands, matrix: Array) -> Operands:
    """The rule is linear in the value axis of `value` and `state`: fewer columns tell as much."""
    return replace(operands, value=operands.value @ matrix, state=operands.state @ matrix)


def first_tokens(operands: Operands, count: int | None) -> Operands:
    """The rule is causal: a few tokens tell most assignments apart; None for all."""
    return _tokens(operands, slice(count))


def last_tokens(operands: Operands, start: int) -> Operands:
    """Without those before some token: what a rule that begins there is given."""
    return _tokens(operands, slice(start, None))


def _tokens(operands: Operands, taken: slice) -> Operands:
    return replace(
        operands,
        query=operands.query[:, taken], key=operands.key[:, taken], value=operands.value[:, taken],
        g=operands.g[:, taken], beta=operands.beta[:, taken],
    )  # fmt: skip


def _repeat(x: Array, repeats: int) -> Array:
    """Value head h reads key head h // repeats."""
    return x if repeats == 1 else np.repeat(x, repeats, axis=2)


def relative(found: Array, wanted: Array) -> float:
    """Largest difference over the largest wanted number; inf where anything is not finite or all is zero."""
    top = _largest(wanted)
    if found.shape != wanted.shape or not 0.0 < top < np.inf:
        return float("inf")
    with np.errstate(over="ignore", invalid="ignore"):
        gap = _largest(found - wanted)
    return gap / top if gap < np.inf else float("inf")


def _largest(x: Array) -> float:
    """The largest absolute value, without a copy of the array; not a number where one of them is not."""
    return float(np.maximum(x.max(initial=0.0), -x.min(initial=0.0)))
