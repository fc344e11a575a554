"""The gated delta rule (Gated DeltaNet; Qwen3-Next, Qwen3.5, Olmo-Hybrid), one decay per value head.

    S   <- S * exp(g_t)                     decay
    d_t  = beta_t * (v_t - S^T k_t)         what the state does not yet predict
    S   <- S + k_t d_t^T
    o_t  = S^T q_t                          q reads the updated state

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024; the same recurrence is what
`torch_recurrent_gated_delta_rule` of Hugging Face transformers computes.
"""

from functools import partial

import numpy as np

from deltafuse.draws import Array
from deltafuse.patterns import Decay, Pattern, Recurrence


def recurrence(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array,
    *, order: str = "decay", sign: float = 1.0, decayed: bool = True, corrected: bool = True, early: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """The rule; the keywords make its neighbours. Shapes: see `deltafuse.patterns.Pattern.recurrence`."""
    out = np.empty_like(value)
    for t in range(value.shape[1]):
        decay = np.exp(sign * g[:, t, :, None, None]) if decayed else 1.0
        k, q = key[:, t, :, :, None], query[:, t, :, :, None]
        old = state
        state = state * decay
        read = old if order == "undecayed" else state
        known = (read * k).sum(-2) if corrected else 0.0
        delta = beta[:, t, :, None] * (value[:, t] - known)
        seen = state
        state = state + k * delta[:, :, None, :]
        out[:, t] = ((seen if early else state) * q).sum(-2)
    return out, state


_NEIGHBOURS: dict[str, Recurrence] = {
    "decay-sign": partial(recurrence, sign=-1.0),
    "decay-missing": partial(recurrence, decayed=False),
    "undecayed-read": partial(recurrence, order="undecayed"),
    "no-delta-term": partial(recurrence, corrected=False),
    "read-before-update": partial(recurrence, early=True),
}

_TEXTS = {
    "decay-sign": "the state grows by exp(-g) where the rule decays by exp(g); negate g in the model",
    "decay-missing": "the state does not decay: this is the plain delta rule",
    "undecayed-read": "the delta is taken from the state before its decay",
    "no-delta-term": "values are added without the correction S^T k: gated linear attention, not a delta rule",
    "read-before-update": "the output reads the state before it is updated",
}


class _GatedDeltaRule:
    name = "gated_delta_rule"
    decay: Decay = "head"
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


PATTERN: Pattern = _GatedDeltaRule()
