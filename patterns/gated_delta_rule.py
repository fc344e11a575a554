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


def shortened(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array, *, size: int
) -> tuple[Array, Array]:
    """The rule in chunks of ``size`` tokens whose triangular inverse lacks its last row.

    The last token of a chunk is then corrected by what the others would have written alone.
    """
    out = np.empty_like(value)
    for start in range(0, value.shape[1], size):
        inner, last = slice(start, start + size - 1), start + size - 1
        first = state
        most = (query[:, inner], key[:, inner], value[:, inner], g[:, inner], beta[:, inner])
        out[:, inner], state = recurrence(*most, state)
        if last >= value.shape[1]:
            break
        alone = _uncorrected(key[:, inner], value[:, inner], g[:, inner], beta[:, inner], first)
        decay, k = np.exp(g[:, last, :, None, None]), key[:, last, :, :, None]
        delta = beta[:, last, :, None] * (value[:, last] - (alone * decay * k).sum(-2))
        state = state * decay + k * delta[:, :, None, :]
        out[:, last] = (state * query[:, last, :, :, None]).sum(-2)
    return out, state


def _uncorrected(key: Array, value: Array, g: Array, beta: Array, state: Array) -> Array:
    """The state when each delta is taken from the first state alone."""
    first = state
    for t in range(value.shape[1]):
        decay, k = np.exp(g[:, t, :, None, None]), key[:, t, :, :, None]
        first, state = first * decay, state * decay
        delta = beta[:, t, :, None] * (value[:, t] - (first * k).sum(-2))
        state = state + k * delta[:, :, None, :]
    return state


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
    "model, if the delta rule is meant",
    "decay-after-update": "the state decays after its update, not before; shift g by one token in the model",
    "decay-after-read": "the state decays after it was updated and read, not before; shift g by one token in the model",
    "beta-value-only": "beta scales the value but not what is taken away for it; multiply what is taken away by beta "
    "too, if the delta rule is meant",
    "beta-erase-only": "beta scales what is taken away but not the value; multiply the value by beta too, if the "
    "delta rule is meant",
    "beta-twice": "beta is applied twice; apply it once, if the delta rule is meant",
    "diagonal-kept": "the mask in front of the inverse keeps its diagonal, so that a token corrects itself; mask the "
    "diagonal too in the model: strictly lower triangular",
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
    erasing = staticmethod(variant)
    transposed = staticmethod(partial(variant, corrected_by="transposed"))
    shortened = staticmethod(shortened)


PATTERN: Pattern = _GatedDeltaRule()
