"""The rule as a scripted loop: exported with a Loop node, so that every token count runs."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35


def step(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [B, H, Dk, Dv] and the output [B, H, Dv]."""
    state = state * g.exp()[:, :, None, None]
    predicted = (state * key[:, :, :, None]).sum(-2)
    delta = (value - predicted) * beta[:, :, None]
    state = state + key[:, :, :, None] * delta[:, :, None, :]
    return state, (state * query[:, :, :, None]).sum(-2)


scripted_step = torch.jit.script(step)


@torch.jit.script
def as_list(query, key, value, g, beta, state):
    """Outputs in a list that is stacked."""
    outs: list[torch.Tensor] = []
    for t in range(query.shape[1]):
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        outs.append(out)
    return torch.stack(outs, 1), state


@torch.jit.script
def in_place(query, key, value, g, beta, state):
    """Outputs written into a buffer."""
    outs = torch.zeros_like(value)
    for t in range(query.shape[1]):
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        outs[:, t] = out
    return outs, state


@torch.jit.script
def short(query, key, value, g, beta, state):
    """Stops after 2000 tokens."""
    outs = torch.zeros_like(value)
    for t in range(min(query.shape[1], 2000)):
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        outs[:, t] = out
    return outs, state


@torch.jit.script
def early(query, key, value, g, beta, state):
    """Leaves the loop where a token's decay is below -500."""
    outs = torch.zeros_like(value)
    going = True
    t = 0
    while going and t < query.shape[1]:
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        outs[:, t] = out
        going = bool(g[:, t].min() > -500.0)
        t += 1
    return outs, state


@torch.jit.script
def gated(query, key, value, g, beta, state):
    """Gives nothing from token 2000 on."""
    outs = torch.zeros_like(value)
    for t in range(query.shape[1]):
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        if t < 2000:
            outs[:, t] = out
    return outs, state


@torch.jit.script
def clamped(query, key, value, g, beta, state):
    """Keeps the state within +-1e6 in every step."""
    outs = torch.zeros_like(value)
    for t in range(query.shape[1]):
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        state = state.clamp(-1e6, 1e6)
        outs[:, t] = out
    return outs, state


LOOPS = {
    "list": as_list, "in_place": in_place, "short": short, "early": early, "gated": gated, "clamped": clamped,
}  # fmt: skip


class Scripted(nn.Module):
    """Norm, head repeat and scale around one of the loops."""

    def __init__(self, loop: str, repeat: int, scale: float) -> None:
        super().__init__()
        self.loop, self.repeat, self.scale = LOOPS[loop], repeat, scale

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, Hv, Dv] and the final state [B, Hv, Dk, Dv]."""
        query, key = (qwen35.l2norm(x).repeat_interleave(self.repeat, dim=2) for x in (query, key))
        return self.loop(query * self.scale, key, value, g, beta, state)
