"""The gated delta rule (Gated DeltaNet; Qwen3-Next, Qwen3.5, Olmo-Hybrid), one decay per value head.

    S   <- S * exp(g_t)                     decay
    d_t  = beta_t * (v_t - S^T k_t)         what the state does not yet predict
    S   <- S + k_t d_t^T
    o_t  = S^T q_t                          q reads the updated state

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024; the same recurrence is what
`torch_recurrent_gated_delta_rule` of Hugging Face transformers computes.
"""

from functools import partial
from typing import Literal

import numpy as np

from deltafuse.draws import Array
from deltafuse.patterns import Decay, Pattern, Recurrence


def recurrence(query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The rule. Shapes: see `deltafuse.patterns.Pattern.recurrence`."""
    out = np.empty_like(value)
    for t in range(value.shape[1]):
        k, q = key[:, t], query[:, t]
        state = state * np.exp(g[:, t, :, None, None])
        delta = beta[:, t, :, None] * (value[:, t] - np.einsum("bhkv,bhk->bhv", state, k))
        state += k[..., None] * delta[:, :, None, :]
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q)
    return out, state


def variant(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array,
    *, sign: float = 1.0, decays: Literal["first", "never", "last"] = "first",
    corrected_by: Literal["decayed", "undecayed", "transposed", "nothing"] = "decayed", kept: bool = True,
    scaled: Literal["both", "value", "erased", "twice"] = "both", implicit: bool = False,
    seen: Literal["updated", "decayed", "undecayed"] = "updated", erase: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """What is often meant or made by mistake, by one keyword each; without any it is the rule.

    Args:
        query: as of the rule, like key, value, g, beta and state.
        key: see query.
        value: see query.
        g: see query.
        beta: see query.
        state: see query.
        sign: of the log decay.
        decays: when the state does.
        corrected_by: the state that the delta takes away.
        kept: whether the decayed state is updated, not the one before.
        scaled: what beta is applied to, the value and what is taken away.
        implicit: whether a token corrects itself.
        seen: the state that the output reads.
        erase: what the delta is read with in place of the key.
    """
    out = np.empty_like(value)
    for t in range(value.shape[1]):
        k, q, b = key[:, t, :, :, None], query[:, t, :, :, None], beta[:, t, :, None]
        decay = np.exp(sign * g[:, t, :, None, None])
        decayed = state * decay if decays == "first" else state
        turned = np.swapaxes(decayed, -1, -2)
        known = {"decayed": decayed, "undecayed": state, "transposed": turned, "nothing": 0.0 * state}
        read = (known[corrected_by] * (k if erase is None else erase[:, t, :, :, None])).sum(-2)
        one = np.ones(b.shape)
        added, taken = {"both": (b, b), "value": (b, one), "erased": (one, b), "twice": (b * b, b * b)}[scaled]
        delta = added * value[:, t] - taken * read
        delta = delta / (1.0 + b * (k * k).sum(-2)) if implicit else delta
        undecayed = (decayed if kept else state) + k * delta[:, :, None, :]
        state = undecayed * decay if decays == "last" else undecayed
        out[:, t] = ({"updated": state, "decayed": decayed, "undecayed": undecayed}[seen] * q).sum(-2)
    return out, state


def by_query(query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The delta is read with the query, scaled as is usual."""
    return variant(query, key, value, g, beta, state, erase=query * query.shape[-1] ** -0.5)


_NEIGHBOURS: dict[str, Recurrence] = {
    "decay-sign": partial(variant, sign=-1.0),
    "decay-missing": partial(variant, decays="never"),
    "undecayed-read": partial(variant, corrected_by="undecayed"),
    "undecayed-update": partial(variant, kept=False),
    "no-delta-term": partial(variant, corrected_by="nothing"),
    "read-before-update": partial(variant, seen="decayed"),
    "decay-after-update": partial(variant, decays="last"),
    "decay-after-read": partial(variant, decays="last", seen="undecayed"),
    "beta-value-only": partial(variant, scaled="value"),
    "beta-erase-only": partial(variant, scaled="erased"),
    "beta-twice": partial(variant, scaled="twice"),
    "diagonal-kept": partial(variant, implicit=True),
    "query-corrected": by_query,
}

_TEXTS = {
    "decay-sign": "the state grows by exp(-g) where the rule decays by exp(g); negate g in the model",
    "decay-missing": "the state does not decay: this is the plain delta rule; look for that one with --rules "
    "delta_rule, or give the model its decay",
    "undecayed-read": "the delta is taken from the state before its decay; read the delta from the state after its "
    "decay, if the gated delta rule is meant",
    "undecayed-update": "the update is added to the state before its decay; add the update to the state after its "
    "decay, if the gated delta rule is meant",
    "no-delta-term": "values are added without the correction S^T k: gated linear attention, not a delta rule; leave "
    "the site as it is, or subtract S^T k from the value, if a delta rule is meant",
    "read-before-update": "the output reads the state before it is updated; read the state after its update in the "
    "model (in chunks: keep the diagonal of the mask of q k^T), if the delta rule is meant",
    "decay-after-update": "the state decays after its update, not before; shift g by one token in the model",
    "decay-after-read": "the state decays after it was updated and read, not before; shift g by one token in the model",
    "beta-value-only": "beta scales the value but not what is taken away for it; multiply what is taken away by beta "
    "too, if the delta rule is meant",
    "beta-erase-only": "beta scales what is taken away but not the value; multiply the value by beta too, if the "
    "delta rule is meant",
    "beta-twice": "beta is applied twice; apply it once, if the delta rule is meant",
    "diagonal-kept": "the mask in front of the inverse, that of k k^T, keeps its diagonal, so that a token corrects "
    "itself; mask the diagonal too in the model: strictly lower triangular",
    "query-corrected": "the delta is read with the query and not with the key; read the delta with the key, if the "
    "delta rule is meant",
}


class _GatedDeltaRule:
    name = "gated_delta_rule"
    formula = """\
S = {state}
for each token t:
    S = S * exp({g}[t]), one number a head
    d = {beta}[t] * ({value}[t] - S^T {key}[t])
    S = S + {key}[t] d^T
    out[t] = {scale} S^T {query}[t], which is row t of {out}
{final_state} = S"""
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
    erasing = (variant, partial(variant, corrected_by="undecayed"))
    transposed = staticmethod(partial(variant, corrected_by="transposed"))
    in_chunks = True


PATTERN: Pattern = _GatedDeltaRule()
