"""The rule as Loop, Scan, function or branch: the forms in which one node stands for all tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

from loop_models import scripted_step
from zoo_member import heads


@torch.jit.script
def joined(query, key, value, g, beta, state):
    """Outputs grow by concatenation."""
    outs = torch.zeros_like(value[:, :0])
    for t in range(query.shape[1]):
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        outs = torch.cat([outs, out[:, None]], 1)
    return outs, state


@torch.jit.script
def while_loop(query, key, value, g, beta, state):
    """A while loop with a counter."""
    outs = torch.zeros_like(value)
    t = 0
    while t < query.shape[1]:
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        outs[:, t] = out
        t += 1
    return outs, state


@torch.jit.script
def short_while(query, key, value, g, beta, state):
    """A while loop that ends after 2000 tokens."""
    outs = torch.zeros_like(value)
    t = 0
    while t < min(query.shape[1], 2000):
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        outs[:, t] = out
        t += 1
    return outs, state


@torch.jit.script
def cell(query, key, value, g, beta, state):
    """A recurrent cell that hands both results on in one flat tensor, as a cell with a single output must."""
    outs = torch.zeros_like(value)
    for t in range(query.shape[1]):
        decayed = state * g[:, t].exp()[:, :, None, None]
        missing = value[:, t] - (decayed * key[:, t, :, :, None]).sum(2)
        state = decayed + key[:, t, :, :, None] * (missing * beta[:, t, :, None])[:, :, None]
        outs[:, t] = (state * query[:, t, :, :, None]).sum(2)
    return torch.cat([outs.flatten(), state.flatten()])


@torch.jit.script
def repeated(query, key, value, g, beta, state, rounds: int):
    """The whole rule as the body of another loop: the same tokens ``rounds`` times."""
    outs = torch.zeros_like(value)
    for _ in range(rounds):
        for t in range(query.shape[1]):
            state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
            outs[:, t] = out
    return outs, state


@torch.jit.script
def one_token(query, key, value, g, beta, state):
    """One step."""
    state, out = scripted_step(state, query[:, 0], key[:, 0], value[:, 0], g[:, 0], beta[:, 0])
    return out[:, None], state


@torch.jit.script
def chosen(query, key, value, g, beta, state, active):
    """One step in a branch of an If on data."""
    outs = torch.zeros_like(value)
    if bool(active.any()):
        outs, state = one_token(query, key, value, g, beta, state)
    return outs, state


@torch.jit.script
def padded(x, size: int, axes_behind: int):
    """Tokens [B, T, ...] filled up to a multiple of ``size``, where they are none."""
    missing = (size - x.shape[1] % size) % size
    if missing > 0:
        x = torch.nn.functional.pad(x, [0, 0] * axes_behind + [0, missing])
    return x


@torch.jit.script
def padded_list(query, key, value, g, beta, state):
    """A loop over padded tokens, each pad guarded by an If."""
    tokens = query.shape[1]
    query, key, value = padded(query, 4, 2), padded(key, 4, 2), padded(value, 4, 2)
    g, beta = padded(g, 4, 1), padded(beta, 4, 1)
    outs: list[torch.Tensor] = []
    for t in range(query.shape[1]):
        state, out = scripted_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        outs.append(out)
    return torch.stack(outs, 1)[:, :tokens], state


LOOPS = {"joined": joined, "while": while_loop, "padded": padded_list, "one": one_token, "short-while": short_while}


class Looped(nn.Module):
    """Norm, head repeat and scale around a scripted loop."""

    def __init__(self, loop: str) -> None:
        super().__init__()
        self.loop = LOOPS[loop]

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, H, V] and the final state."""
        query, key = heads(query, key, value.shape[2] // query.shape[2])
        return self.loop(query, key, value, g, beta, state)


class Cell(nn.Module):
    """A scripted cell whose one flat result is taken apart again."""

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, H, V] and the final state."""
        query, key = heads(query, key, value.shape[2] // query.shape[2])
        flat = cell(query, key, value, g, beta, state)
        return flat[: value.numel()].reshape(value.shape), flat[value.numel() :].reshape(state.shape)


class Repeated(nn.Module):
    """The rule inside a loop over something else."""

    def forward(self, query, key, value, g, beta, state, rounds):
        """Gives out [B, T, H, V] and the final state."""
        query, key = heads(query, key, value.shape[2] // query.shape[2])
        return repeated(query, key, value, g, beta, state, rounds.shape[0])


class Chosen(nn.Module):
    """The rule inside a branch."""

    def forward(self, query, key, value, g, beta, state, active):
        """Gives out [B, 1, H, V] and the final state."""
        query, key = heads(query, key, value.shape[2] // query.shape[2])
        return chosen(query, key, value, g, beta, state, active)


class Scanned(nn.Module):
    """torch's own scan over tokens."""

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, H, V] and the final state."""
        query, key = heads(query, key, value.shape[2] // query.shape[2])

        def step(carried: torch.Tensor, at: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v, a, b = at
            carried = carried * a.exp()[..., None, None]
            delta = (v - (k[..., None, :] @ carried)[..., 0, :]) * b[..., None]
            carried = carried + k[..., :, None] @ delta[..., None, :]
            return carried.clone(), (q[..., None, :] @ carried)[..., 0, :]

        per_token = tuple(x.transpose(0, 1) for x in (query, key, value, g, beta))
        state, out = scan(step, state, per_token)
        return out.transpose(0, 1), state
