"""The rule token by token, written out by hand in several ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from zoo_member import heads

Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Each takes query, key [B, H, K], value [B, H, V], decay = exp(g), beta [B, H] and a state [B, H, K, V]; it gives the
# output [B, H, V] and the new state.


def summed(query, key, value, decay, beta, state):
    """Mul and ReduceSum."""
    state = state * decay[..., None, None]
    delta = (value - (state * key[..., None]).sum(-2)) * beta[..., None]
    state = state + key[..., None] * delta[..., None, :]
    return (state * query[..., None]).sum(-2), state


def product(query, key, value, decay, beta, state):
    """MatMul."""
    state = state * decay[..., None, None]
    delta = (value - (key[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state = state + key[..., :, None] @ delta[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def einsum(query, key, value, decay, beta, state):
    """Einsum."""
    state = torch.einsum("bhkv,bh->bhkv", state, decay)
    delta = torch.einsum("bhv,bh->bhv", value - torch.einsum("bhk,bhkv->bhv", key, state), beta)
    state = state + torch.einsum("bhk,bhv->bhkv", key, delta)
    return torch.einsum("bhk,bhkv->bhv", query, state), state


def batched(query, key, value, decay, beta, state):
    """Batch and heads as one axis, baddbmm."""
    b, h, k, v = state.shape
    query, key, value = query.reshape(b * h, 1, k), key.reshape(b * h, 1, k), value.reshape(b * h, 1, v)
    state = state.reshape(b * h, k, v) * decay.reshape(b * h, 1, 1)
    delta = torch.baddbmm(value, key, state, alpha=-1.0) * beta.reshape(b * h, 1, 1)
    state = torch.baddbmm(state, key.transpose(1, 2), delta)
    return torch.bmm(query, state).reshape(b, h, v), state.reshape(b, h, k, v)


def value_major(query, key, value, decay, beta, state):
    """A state [B, H, V, K]."""
    state = state * decay[..., None, None]
    delta = (value - (state @ key[..., None])[..., 0]) * beta[..., None]
    state = state + delta[..., :, None] * key[..., None, :]
    return (state @ query[..., None])[..., 0], state


def expanded(query, key, value, decay, beta, state):
    """All multiplied out: S' = a S - k (b a k^T S) + k (b v)."""
    kept = state * decay[..., None, None]
    erased = key[..., None] * (beta[..., None] * (key[..., None, :] @ kept)[..., 0, :])[..., None, :]
    state = kept - erased + (key * beta[..., None])[..., None] * value[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def projected(query, key, value, decay, beta, state):
    """A matrix in front: S' = (I - b k k^T) (a S) + b k v^T."""
    eye = torch.eye(key.shape[-1])
    matrix = eye - beta[..., None, None] * key[..., :, None] * key[..., None, :]
    state = matrix @ (state * decay[..., None, None]) + beta[..., None, None] * key[..., :, None] * value[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def general(query, key, value, decay, beta, state):
    """One head: addmm, which is Gemm."""
    state = state[0, 0] * decay[0, 0]
    delta = torch.addmm(value[0], key[0], state, alpha=-1.0) * beta[0]
    state = torch.addmm(state, key[0].T, delta)
    return (query[0] @ state)[None], state[None, None]


STEPS: Mapping[str, Step] = {
    "summed": summed, "product": product, "einsum": einsum, "batched": batched, "value-major": value_major,
    "expanded": expanded, "projected": projected, "general": general,
}  # fmt: skip


class Stepwise(nn.Module):
    """Some tokens, one after the other.

    Args:
        step: key of `STEPS`, or a function like those.
        write: how outputs are joined: ``stack``, ``assign`` or ``chosen`` (by a mask).
    """

    def __init__(self, step: str | Step = "summed", *, write: str = "stack") -> None:
        super().__init__()
        self.step = STEPS[step] if isinstance(step, str) else step
        self.write = write

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, H, V] and the final state."""
        query, key = heads(query, key, value.shape[2] // query.shape[2])
        outs = []
        for t in range(query.shape[1]):
            out, state = self.step(query[:, t], key[:, t], value[:, t], g[:, t].exp(), beta[:, t], state)
            outs.append(out)
        return self.joined(outs, value), state

    def joined(self, outs: list[torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        """Outputs [B, H, V] in one tensor [B, T, H, V]."""
        if self.write == "stack":
            return torch.stack(outs, dim=1)
        written = torch.zeros_like(value)
        for t, out in enumerate(outs):
            if self.write == "assign":
                written[:, t] = out
            else:
                written = torch.where((torch.arange(value.shape[1]) == t)[:, None, None], out[:, None], written)
        return written


class NoTime(nn.Module):
    """One token without a time axis: [B, H, D]."""

    def __init__(self, step: str = "product") -> None:
        super().__init__()
        self.step = STEPS[step]

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, H, V] and the final state."""
        query, key = (x[:, 0] for x in heads(query[:, None], key[:, None], value.shape[1] // query.shape[1]))
        return self.step(query, key, value, g.exp(), beta, state)


class Packed(nn.Module):
    """Query, key and value are slices of one tensor [B, T, 2 N K + H V], decay and beta of another [B, T, 2 H]."""

    def __init__(self, key_heads: int, value_heads: int, key_dim: int, *, how: str = "split") -> None:
        super().__init__()
        self.sizes, self.how = (key_heads, value_heads, key_dim), how
        self.rule = Stepwise("product")

    def forward(self, mixed, gates, state):
        """Gives out [B, T, H, V] and the final state."""
        n, h, k = self.sizes
        if self.how == "split":
            query, key, value = mixed.split([n * k, n * k, mixed.shape[-1] - 2 * n * k], dim=-1)
            g, beta = gates.chunk(2, dim=-1)
        else:
            query, key, value = mixed[..., : n * k], mixed[..., n * k : 2 * n * k], mixed[..., 2 * n * k :]
            g, beta = gates[..., :h], gates[..., h:]
        query, key, value = (x.unflatten(-1, (count, -1)) for x, count in ((query, n), (key, n), (value, h)))
        return self.rule(query, key, value, g, beta, state)


class Tiled(nn.Module):
    """Value head h reads key head h % N: heads repeated as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.rule = Stepwise("product")

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, H, V] and the final state."""
        repeat = value.shape[2] // query.shape[2]
        query, key = (x.repeat(1, 1, repeat, 1) for x in (query, key))
        return self.rule(query, key, value, g, beta, state)


class Gates(nn.Module):
    """Decay and beta are computed from activations [B, T, H] inside the site: -exp(A) softplus(a + bias), sigmoid(b).

    Args:
        rule: that takes them.
        fixed: the softplus is written out and A and bias are numbers, so that no weight stands between.
    """

    def __init__(self, rule: nn.Module, value_heads: int, *, fixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.rule, self.fixed = rule, fixed
        self.rate, self.bias = nn.Parameter(torch.rand(value_heads) - 3.0), nn.Parameter(torch.rand(value_heads))

    def forward(self, query, key, value, a, b, state):
        """Gives out [B, T, H, V] and the final state."""
        if self.fixed:
            return self.rule(query, key, value, -0.05 * (1.0 + a.exp()).log(), 1.0 / (1.0 + (-b).exp()), state)
        g = -self.rate.exp() * functional.softplus(a + self.bias)
        return self.rule(query, key, value, g, b.sigmoid(), state)
