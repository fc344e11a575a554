"""A delta rule in chunks with one part of a chunk's arithmetic wrong: what exports of chunks are by mistake.

The tokens of a chunk are computed at once. With S the state before it, G the log decay added up from its first token
on, and D[i, j] = exp(G[i] - G[j]) for j <= i, else 0, it is

    L   = beta * (k k^T) D, without the diagonal
    new = (I + L)^-1 (beta v - beta (exp(G) k) S)
    out = (exp(G) q) S + ((q k^T) D) new
    S  <- exp(G[C]) S + (exp(G[C] - G) k)^T new
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deltafuse.draws import Array
from deltafuse.reasons import TEXTS

TEXTS.update(
    {
        "diagonal-kept": "the mask in front of the inverse, that of k k^T, keeps its diagonal, so that a token "
        "corrects itself; mask the diagonal too in the model: strictly lower triangular",
        "masks-exchanged": "the mask of k k^T keeps its diagonal and that of q k^T drops it, so that a token corrects "
        "itself and does not read itself; exchange the two masks in the model",
        "inverse-sign": "inside of a chunk the correction is added where it is to be taken away: the inverse is that "
        "of I - L; negate k k^T in front of the inverse in the model",
        "inverse-missing": "inside of a chunk a token is corrected by what the tokens before it would have written "
        "alone: I - L stands where the inverse of I + L belongs; invert I + L in the model",
        "inverse-short": "the last of each {tokens:# token} is not corrected by the others: the triangular inverse of "
        "a chunk lacks a row; give the inverse as many rows as the chunk has tokens",
        "identity-missing": "the identity is missing in the triangular inverse of a chunk, so that values are written "
        "by way of later tokens alone; add the identity to the inverse in the model",
        "decay-turned": "the decay between two tokens of a chunk is turned around, exp(G[j] - G[i]) for j <= i; "
        "subtract the log decay of the earlier token from that of the later one in the model",
        "decay-across": "the log decay is added up from chunk to chunk and not from token to token: the cumulative sum "
        "runs along another axis; add it up along the tokens of a chunk",
        "undecayed-correction": "what is taken away for the state before a chunk is read from that state without its "
        "decay; multiply the keys that read it by exp of the log decay added up in the chunk",
        "uncorrected-write": "what a chunk writes into the state is not corrected by the state before the chunk; "
        "write the values that the output reads, if the delta rule is meant",
        "chunk-decay": "from chunk to chunk the state decays by the first token and not by all tokens of the chunk; "
        "take the log decay added up to the last token of the chunk in the model",
        "key-read": "the output reads the state before a chunk with the key and not with the query; read that state "
        "with the scaled query in the model",
    }
)

Inverse = Callable[[Array], Array]


def _identity(lower: Array) -> Array:
    return np.eye(lower.shape[-1])


def _inverse(lower: Array) -> Array:
    return _with_diagonal(np.tril(lower, -1))


def _with_diagonal(lower: Array) -> Array:
    try:
        return np.asarray(np.linalg.inv(_identity(lower) + lower), np.float64)
    except np.linalg.LinAlgError:
        # Nothing is equal to what is no number.
        return np.full_like(lower, np.nan)


def _substituted(lower: Array) -> Array:
    """Rows that are substituted one after the other below a diagonal that nothing divides by."""
    return _inverse(lower) @ (_identity(lower) * (1.0 - lower))


def _first_order(lower: Array) -> Array:
    return _identity(lower) - np.tril(lower, -1)


@dataclass(frozen=True)
class Fault:
    """What is wrong; without anything it is the rule.

    Attributes:
        inverse: what stands for the inverse of I + L, given L with its diagonal.
        short: whether the last row of the inverse is that of I - L: it was not substituted.
        reads_itself: whether the mask of q k^T keeps its diagonal.
        turned: whether D is exp(G[j] - G[i]).
        across: whether G is added up from chunk to chunk, each token of a chunk for itself.
        undecayed: whether new takes away what is read from S without its decay.
        uncorrected: whether what S gets is new before anything is taken away for S.
        early: whether S decays by the first token alone.
        by_key: whether out reads S with the key, which is not scaled.
    """

    inverse: Inverse = _inverse
    short: bool = False
    reads_itself: bool = True
    turned: bool = False
    across: bool = False
    undecayed: bool = False
    uncorrected: bool = False
    early: bool = False
    by_key: bool = False

    @property
    def of_decay(self) -> bool:
        """Whether nothing is wrong where nothing decays."""
        return self.turned or self.across or self.undecayed or self.early


#: Reason code -> what is wrong; a code may stand for more than one way to go wrong.
FAULTS: tuple[tuple[str, Fault], ...] = (
    ("diagonal-kept", Fault(_substituted)),
    ("masks-exchanged", Fault(_substituted, reads_itself=False)),
    ("masks-exchanged", Fault(_with_diagonal, reads_itself=False)),
    ("inverse-sign", Fault(lambda lower: _inverse(-lower))),
    ("inverse-missing", Fault(_first_order)),
    ("inverse-short", Fault(short=True)),
    ("identity-missing", Fault(lambda lower: _inverse(lower) - _identity(lower))),
    ("decay-turned", Fault(turned=True)),
    ("decay-across", Fault(across=True)),
    ("undecayed-correction", Fault(undecayed=True)),
    ("uncorrected-write", Fault(uncorrected=True)),
    ("chunk-decay", Fault(early=True)),
    ("key-read", Fault(by_key=True)),
)


def chunked(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array, *, size: int, fault: Fault
) -> tuple[Array, Array]:
    """A recurrence in chunks; shapes: see `deltafuse.patterns.Pattern.recurrence`.

    Args:
        query: as of a recurrence, like key, value, g, beta and state.
        key: see query.
        value: see query.
        g: see query; of any decay.
        beta: see query.
        state: see query.
        size: of a chunk.
        fault: what is wrong.
    """
    operands = _by_head(query, key, value, g, beta)
    outs: list[Array] = []
    total = np.zeros_like(operands[3][:, :, :1])
    for start in range(0, value.shape[1], size):
        q, k, v, decay, scale = (x[:, :, start : start + size] for x in operands)
        total = _total(decay, fault) + (total[:, :, : decay.shape[2]] if fault.across else 0.0)
        out, state = _Chunk.of(q, k, v, total, scale, fault).run(state, fault, whole=decay.shape[2] == size)
        outs.append(out)
    return np.moveaxis(np.concatenate(outs, axis=2), 2, 1), state


def beginnings(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array, *, faults: Sequence[Fault]
) -> tuple[Array, Array]:
    """What each fault gives within its first chunk, all of them at once: out [fault, B, T, H, V], and the state before.

    Args:
        query: as of `chunked`, like key, value, g, beta and state; a chunk has more tokens than these.
        key: see query.
        value: see query.
        g: see query.
        beta: see query.
        state: see query.
        faults: what is wrong.
    """
    q, k, v, decay, scale = _by_head(query, key, value, g, beta)
    known: dict[tuple[bool, bool], _Chunk] = {}
    outs: list[Array] = []
    for fault in faults:
        same = (fault.turned, fault.across)
        if same not in known:
            known[same] = _Chunk.of(q, k, v, _total(decay, fault), scale, fault)
        outs.append(known[same].run(state, fault, whole=False)[0])
    return np.moveaxis(np.stack(outs), 3, 2), state


def _by_head(*operands: Array) -> list[Array]:
    """Operands [B, T, H, ...] as [B, H, T, X]: one number a head is a row of one."""
    return [np.swapaxes(x if x.ndim > 3 else x[..., None], 1, 2) for x in operands]


def _total(decay: Array, fault: Fault) -> Array:
    return decay if fault.across else decay.cumsum(axis=2)


@dataclass(frozen=True)
class _Chunk:
    """A chunk as far as no fault in what follows matters: [B, H, C, X] each.

    Attributes:
        query, key, value, beta: operands; a row of beta is one number.
        total: G, one number a row, or one a key channel.
        lower, scores: L with its diagonal, and (q k^T) D.
    """

    query: Array
    key: Array
    value: Array
    beta: Array
    total: Array
    lower: Array
    scores: Array

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, total: Array, beta: Array, fault: Fault) -> _Chunk:
        """Works out all products of two tokens."""
        apart = _apart(total, fault.turned)
        return cls(q, k, v, beta, total, beta * _products(k, k, apart), _products(q, k, apart))

    def run(self, state: Array, fault: Fault, *, whole: bool) -> tuple[Array, Array]:
        """The output, and the state after the chunk.

        Args:
            state: before it.
            fault: what is wrong.
            whole: whether the last token is the last of the chunk.
        """
        key, total = self.key, self.total
        grown, end = np.exp(total), total[:, :, -1:]
        inverse = fault.inverse(self.lower)
        if fault.short and whole:
            inverse[..., -1:, :] = _first_order(self.lower)[..., -1:, :]
        known = inverse @ (self.beta * key * (1.0 if fault.undecayed else grown)) @ state
        plain = inverse @ (self.beta * self.value)
        scores = self.scores if fault.reads_itself else np.tril(self.scores, -1)
        asked = key * key.shape[-1] ** 0.5 if fault.by_key else self.query
        out = (asked * grown) @ state + scores @ (plain - known)
        kept = np.exp(total[:, :, :1] if fault.early else end)
        written = plain if fault.uncorrected else plain - known
        return out, state * np.swapaxes(kept, -1, -2) + np.swapaxes(key * np.exp(end - total), -1, -2) @ written


def _apart(total: Array, turned: bool) -> Array:
    """D [B, H, C, C, 1], or [B, H, C, C, K] of channels."""
    gap = total[:, :, :, None] - total[:, :, None, :]
    later = np.triu(np.ones(gap.shape[2:4], np.bool_), 1)[..., None]
    return np.exp(np.where(later, -np.inf, -gap if turned else gap))


def _products(a: Array, b: Array, apart: Array) -> Array:
    if apart.shape[-1] == 1:
        return (a @ np.swapaxes(b, -1, -2)) * apart[..., 0]
    return np.einsum("bhik,bhjk,bhijk->bhij", a, b, apart)
