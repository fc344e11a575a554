"""Near misses: steps that differ from the rule in one thing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from spelled_steps import Step
from zoo_member import heads

# Each takes query, key [B, H, K], value [B, H, V], decay = exp(g), beta [B, H] and a state [B, H, K, V].


def _read(vector: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return (vector[..., None, :] @ state)[..., 0, :]


def _written(state: torch.Tensor, key: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return state + key[..., :, None] @ delta[..., None, :]


def beta_missing(query, key, value, decay, beta, state):
    """Beta is not used."""
    state = state * decay[..., None, None]
    state = _written(state, key, value - _read(key, state))
    return _read(query, state), state


def beta_value(query, key, value, decay, beta, state):
    """Beta on the value only."""
    state = state * decay[..., None, None]
    state = _written(state, key, value * beta[..., None] - _read(key, state))
    return _read(query, state), state


def beta_erase(query, key, value, decay, beta, state):
    """Beta on what is taken away only."""
    state = state * decay[..., None, None]
    state = _written(state, key, value - _read(key, state) * beta[..., None])
    return _read(query, state), state


def beta_twice(query, key, value, decay, beta, state):
    """Beta on the key and on the delta."""
    state = state * decay[..., None, None]
    delta = (value - _read(key, state)) * beta[..., None]
    state = _written(state, key * beta[..., None], delta)
    return _read(query, state), state


def undecayed_read(query, key, value, decay, beta, state):
    """The delta reads the state before its decay."""
    delta = (value - _read(key, state)) * beta[..., None]
    state = _written(state * decay[..., None, None], key, delta)
    return _read(query, state), state


def undecayed_update(query, key, value, decay, beta, state):
    """The state before its decay is updated."""
    delta = (value - _read(key, state * decay[..., None, None])) * beta[..., None]
    state = _written(state, key, delta)
    return _read(query, state), state


def early_read(query, key, value, decay, beta, state):
    """The output reads the state before its update."""
    state = state * decay[..., None, None]
    return _read(query, state), _written(state, key, (value - _read(key, state)) * beta[..., None])


def decay_after_update(query, key, value, decay, beta, state):
    """The state decays after its update, before it is read."""
    state = _written(state, key, (value - _read(key, state)) * beta[..., None]) * decay[..., None, None]
    return _read(query, state), state


def decay_after_read(query, key, value, decay, beta, state):
    """The state decays after it was read."""
    state = _written(state, key, (value - _read(key, state)) * beta[..., None])
    return _read(query, state), state * decay[..., None, None]


def no_delta(query, key, value, decay, beta, state):
    """Gated linear attention with a scale on its values."""
    state = _written(state * decay[..., None, None], key, value * beta[..., None])
    return _read(query, state), state


def no_delta_no_beta(query, key, value, decay, beta, state):
    """Gated linear attention: RetNet, Mamba-2."""
    state = _written(state * decay[..., None, None], key, value)
    return _read(query, state), state


def transposed(query, key, value, decay, beta, state):
    """The delta reads the state's other axis; K = V."""
    state = state * decay[..., None, None]
    state = _written(state, key, (value - (state @ key[..., None])[..., 0]) * beta[..., None])
    return _read(query, state), state


def squashed(query, key, value, decay, beta, state):
    """The delta goes through a tanh."""
    state = state * decay[..., None, None]
    state = _written(state, key, ((value - _read(key, state)) * beta[..., None]).tanh())
    return _read(query, state), state


def gated_tokens(query, key, value, decay, beta, state):
    """Right, but each token's output is gated by its value."""
    state = state * decay[..., None, None]
    state = _written(state, key, (value - _read(key, state)) * beta[..., None])
    return _read(query, state) * value.sigmoid(), state


def rounded(query, key, value, decay, beta, state):
    """Right for a state that is a multiple of 2^-20."""
    state = torch.round(state * 2.0**20) * 2.0**-20 * decay[..., None, None]
    state = _written(state, key, (value - _read(key, state)) * beta[..., None])
    return _read(query, state), state


def floored(query, key, value, decay, beta, state):
    """A decay of at least 1e-30."""
    state = state * torch.maximum(decay, torch.tensor(1e-30))[..., None, None]
    state = _written(state, key, (value - _read(key, state)) * beta[..., None])
    return _read(query, state), state


#: Reason code -> the steps that are to end with it.
NEAR: Mapping[str, Mapping[str, Step]] = {
    "beta-missing": {"beta_missing": beta_missing},
    "beta-value-only": {"beta_value": beta_value},
    "beta-erase-only": {"beta_erase": beta_erase},
    "beta-twice": {"beta_twice": beta_twice},
    "undecayed-read": {"undecayed_read": undecayed_read},
    "undecayed-update": {"undecayed_update": undecayed_update},
    "read-before-update": {"early_read": early_read},
    "decay-after-update": {"decay_after_update": decay_after_update},
    "decay-after-read": {"decay_after_read": decay_after_read},
    "no-delta-term": {"no_delta": no_delta, "no_delta_no_beta": no_delta_no_beta},
    "activation-inside": {"squashed": squashed},
    "piecewise": {"rounded": rounded, "floored": floored},
}


class Erasing(nn.Module):
    """Steps whose delta is read with another vector than the key.

    Args:
        gated: the vector gates the key (Gated DeltaNet-2), else it is a key of its own (Comba).
    """

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.gated = gated

    def forward(self, query, key, value, g, beta, erase, state):
        """Gives out [B, T, H, V] and the final state."""
        repeat = value.shape[2] // query.shape[2]
        query, key = heads(query, key, repeat)
        erase = erase.repeat_interleave(repeat, dim=2)
        outs = []
        for t in range(query.shape[1]):
            state = state * g[:, t].exp()[..., None, None]
            reader = erase[:, t] * key[:, t] if self.gated else erase[:, t]
            state = _written(state, key[:, t], (value[:, t] - _read(reader, state)) * beta[:, t, :, None])
            outs.append(_read(query[:, t], state))
        return torch.stack(outs, dim=1), state


class Twice(nn.Module):
    """Two updates for each token: keys, values and betas have twice as many tokens."""

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, H, V] and the final state."""
        outs = []
        for t in range(query.shape[1]):
            state = state * g[:, t].exp()[..., None, None]
            for i in (2 * t, 2 * t + 1):
                state = _written(state, key[:, i], (value[:, i] - _read(key[:, i], state)) * beta[:, i, :, None])
            outs.append(_read(query[:, t], state))
        return torch.stack(outs, dim=1), state
