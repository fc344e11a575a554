"""The gated delta rule (Gated DeltaNet; Qwen3-Next, Qwen3.5, Olmo-Hybrid), one decay per value head.

    S   <- S * exp(g_t)                     decay
    d_t  = beta_t * (v_t - S^T k_t)         what the state does not yet predict
    S   <- S + k_t d_t^T
    o_t  = S^T q_t                          q reads the updated state

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024; the same recurrence is what
`torch_recurrent_gated_delta_rule` of Hugging Face transformers computes.
"""

import numpy as np


def recurrence(
    query, key, value, g, beta, state, *, order="decay", sign=1.0, decayed=True, corrected=True, early=False
):
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


def _variant(**changes):
    def neighbour(query, key, value, g, beta, state):
        return recurrence(query, key, value, g, beta, state, **changes)

    return neighbour


class _GatedDeltaRule:
    name = "gated_delta_rule"
    anchors = frozenset({"Exp"})
    fence = frozenset({
        "Sigmoid", "Softplus", "Softmax", "Tanh", "Erf", "Relu", "Gelu", "QuickGelu", "Silu", "Swish", "HardSigmoid",
        "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization",
        "GroupQueryAttention", "Conv", "LogSoftmax", "Log",
    })  # fmt: skip
    contractions = frozenset({"MatMul", "Einsum", "ReduceSum", "FusedMatMul", "Gemm"})
    least_roots = 4
    neighbours = {
        "decay-sign": _variant(sign=-1.0),
        "decay-missing": _variant(decayed=False),
        "undecayed-read": _variant(order="undecayed"),
        "no-delta-term": _variant(corrected=False),
        "read-before-update": _variant(early=True),
    }
    texts = {
        "decay-sign": "the state grows by exp(-g) where the rule decays by exp(g); negate g in the model",
        "decay-missing": "the state does not decay: this is the plain delta rule",
        "undecayed-read": "the delta is taken from the state before its decay",
        "no-delta-term": "values are added without the correction S^T k: gated linear attention, not a delta rule",
        "read-before-update": "the output reads the state before it is updated",
    }
    recurrence = staticmethod(recurrence)


PATTERN = _GatedDeltaRule()
