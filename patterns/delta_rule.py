"""The plain delta rule (DeltaNet): the gated delta rule without decay.

    d_t  = beta_t * (v_t - S^T k_t)         what the state does not yet predict
    S   <- S + k_t d_t^T
    o_t  = S^T q_t                          q reads the updated state

Source: Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", 2021; Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024.
"""

from functools import partial

import numpy as np

from deltafuse.draws import Array
from deltafuse.patterns import Decay, Pattern, Recurrence


def recurrence(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array,
    *, corrected: bool = True, early: bool = False, by_query: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """The rule; the keywords make its neighbours. Shapes: `deltafuse.patterns.Pattern.recurrence`; g is not read."""
    out = np.empty_like(value)
    for t in range(value.shape[1]):
        k, q = key[:, t, :, :, None], query[:, t, :, :, None]
        # A query is scaled as is usual.
        reader = q * query.shape[-1] ** -0.5 if by_query else k
        known = (state * reader).sum(-2) if corrected else 0.0
        delta = beta[:, t, :, None] * (value[:, t] - known)
        seen = state
        state = state + k * delta[:, :, None, :]
        out[:, t] = ((seen if early else state) * q).sum(-2)
    return out, state


_NEIGHBOURS: dict[str, Recurrence] = {
    "no-delta-term": partial(recurrence, corrected=False),
    "read-before-update": partial(recurrence, early=True),
    "query-corrected": partial(recurrence, by_query=True),
}

_TEXTS = {
    "no-delta-term": "values are added without the correction S^T k: gated linear attention, not a delta rule; leave "
    "the site as it is, or subtract S^T k from the value, if a delta rule is meant",
    "read-before-update": "the output reads the state before it is updated; read the state after its update in the "
    "model (in chunks: keep the diagonal of the mask of q k^T), if the delta rule is meant",
    "query-corrected": "the delta is read with the query and not with the key; read the delta with the key, if the "
    "delta rule is meant",
}


class _DeltaRule:
    name = "delta_rule"
    formula = """\
S = {state}
for each token t:
    d = {beta}[t] * ({value}[t] - S^T {key}[t])
    S = S + {key}[t] d^T
    out[t] = {scale} S^T {query}[t], which is row t of {out}
{final_state} = S"""
    decay: Decay = "none"
    anchors = frozenset({"MatMul", "Einsum", "ReduceSum", "FusedMatMul", "Gemm"})
    fence = frozenset({
        "Exp", "Sigmoid", "Softplus", "Softmax", "Tanh", "Erf", "Relu", "Gelu", "QuickGelu", "Silu", "Swish",
        "HardSigmoid", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization",
        "SkipSimplifiedLayerNormalization", "GroupQueryAttention", "Attention", "MultiHeadAttention", "Conv",
        "LogSoftmax", "Log",
    })  # fmt: skip
    contractions = anchors
    least_roots = 4
    neighbours = _NEIGHBOURS
    texts = _TEXTS
    recurrence = staticmethod(recurrence)
    in_chunks = True


PATTERN: Pattern = _DeltaRule()
