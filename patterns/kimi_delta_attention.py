"""Kimi Delta Attention: the gated delta rule with one decay per value head and key channel.

    S   <- exp(g_t)[:, None] * S            decay, a number per row of S (key channel)
    d_t  = beta_t * (v_t - S^T k_t)         what the state does not yet predict
    S   <- S + k_t d_t^T
    o_t  = S^T q_t                          q reads the updated state

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
"""

from functools import partial

import numpy as np

from deltafuse.draws import Array
from deltafuse.patterns import Decay, Pattern, Recurrence


def recurrence(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array,
    *, sign: float = 1.0, decayed_read: bool = True, corrected: bool = True, early: bool = False,
    erase: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The rule; the keywords make its neighbours. Shapes: see `deltafuse.patterns.Pattern.recurrence`."""
    out = np.empty_like(value)
    for t in range(value.shape[1]):
        k, q = key[:, t, :, :, None], query[:, t, :, :, None]
        old = state
        state = state * np.exp(sign * g[:, t, :, :, None])
        reader = k if erase is None else erase[:, t, :, :, None]
        known = ((state if decayed_read else old) * reader).sum(-2) if corrected else 0.0
        delta = beta[:, t, :, None] * (value[:, t] - known)
        seen = state
        state = state + k * delta[:, :, None, :]
        out[:, t] = ((seen if early else state) * q).sum(-2)
    return out, state


def by_query(query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The delta is read with the query, scaled as is usual."""
    return recurrence(query, key, value, g, beta, state, erase=query * query.shape[-1] ** -0.5)


_NEIGHBOURS: dict[str, Recurrence] = {
    "decay-sign": partial(recurrence, sign=-1.0),
    "undecayed-read": partial(recurrence, decayed_read=False),
    "no-delta-term": partial(recurrence, corrected=False),
    "read-before-update": partial(recurrence, early=True),
    "query-corrected": by_query,
}

_TEXTS = {
    "decay-sign": "the state grows by exp(-g) where the rule decays by exp(g); negate g in the model",
    "undecayed-read": "the delta is taken from the state before its decay; read the delta from the state after its "
    "decay, if the gated delta rule is meant",
    "no-delta-term": "values are added without the correction S^T k: gated linear attention, not a delta rule; leave "
    "the site as it is, or subtract S^T k from the value, if a delta rule is meant",
    "read-before-update": "the output reads the state before it is updated; read the state after its update in the "
    "model (in chunks: keep the diagonal of the mask of q k^T), if the delta rule is meant",
    "query-corrected": "the delta is read with the query and not with the key; read the delta with the key, if the "
    "delta rule is meant",
}


class _KimiDeltaAttention:
    name = "kimi_delta_attention"
    formula = """\
S = {state}
for each token t:
    S = S * exp({g}[t]), one number a row of S
    d = {beta}[t] * ({value}[t] - S^T {key}[t])
    S = S + {key}[t] d^T
    out[t] = {scale} S^T {query}[t], which is row t of {out}
{final_state} = S"""
    decay: Decay = "channel"
    anchors = frozenset({"Exp"})
    fence = frozenset({
        "Sigmoid", "Softplus", "Softmax", "Tanh", "Erf", "Relu", "Gelu", "QuickGelu", "Silu", "Swish", "HardSigmoid",
        "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization",
        "GroupQueryAttention", "Conv", "LogSoftmax", "Log",
    })  # fmt: skip
    contractions = frozenset({"MatMul", "Einsum", "ReduceSum", "FusedMatMul", "Gemm"})
    least_roots = 4
    neighbours = _NEIGHBOURS
    texts = _TEXTS
    recurrence = staticmethod(recurrence)
    erasing = (recurrence, partial(recurrence, decayed_read=False))
    in_chunks = True


PATTERN: Pattern = _KimiDeltaAttention()
