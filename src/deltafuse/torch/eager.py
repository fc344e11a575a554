"""The gated delta rule in plain torch: what the functions compute where nothing is exported.

Arithmetic is float32 whatever the operands are, as in transformers. Differentiable, for any batch, grouped heads,
with and without an initial state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Torch types this module in part only.
_linalg: Any = torch.linalg
#: Added to the sum of squares under the root of the norm.
EPS = 1e-6


@dataclass(frozen=True)
class Operands:
    """Operands of the rule, head-first and float32, the query scaled, heads repeated.

    Attributes:
        query, key: [B, Nv, T, Dk].
        value: [B, Nv, T, Dv].
        g, beta: [B, Nv, T].
        state: [B, Nv, Dk, Dv].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    scale: float | None,
    normalise: bool,
) -> Operands:
    """Brings operands, token-major as a model has them, into the form that both algorithms work on.

    Args:
        query: [B, T, Nk, Dk].
        key: [B, T, Nk, Dk].
        value: [B, T, Nv, Dv].
        g: [B, T, Nv], in log space.
        beta: [B, T, Nv].
        state: [B, Nv, Dk, Dv], None for zeros.
        scale: factor on the query; None for 1/sqrt(Dk).
        normalise: whether query and key are L2-normalised over Dk first.
    """
    group = value.shape[2] // key.shape[2]
    query, key, value, g, beta = (operand.transpose(1, 2).float() for operand in (query, key, value, g, beta))
    if normalise:
        query, key = unit(query), unit(key)
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    if group > 1:
        query, key = (operand.repeat_interleave(group, dim=1) for operand in (query, key))
    if state is None:
        state = value.new_zeros(value.shape[0], value.shape[1], key.shape[-1], value.shape[-1])
    return Operands(query, key, value, g, beta, state.to(value))


def unit(x: Tensor) -> Tensor:
    """Rows of about unit length: x * rsqrt(sum(x^2) + eps)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def recurrent(operands: Operands) -> tuple[Tensor, Tensor]:
    """The rule token by token.

    Returns:
        Output [B, Nv, T, Dv] and final state [B, Nv, Dk, Dv], float32.
    """
    state, outputs = operands.state, list[Tensor]()
    for token in range(operands.value.shape[2]):
        query, key, value = (operand[:, :, token] for operand in (operands.query, operands.key, operands.value))
        state = state * operands.g[:, :, token, None, None].exp()
        missing = value - torch.einsum("bhk,bhkv->bhv", key, state)
        state = state + key[..., None] * (operands.beta[:, :, token, None] * missing)[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state))
    return (torch.stack(outputs, dim=2) if outputs else torch.zeros_like(operands.value)), state


def chunked(operands: Operands, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The rule chunk by chunk: inside a chunk all tokens at once, by one triangular solve.

    Returns:
        Output [B, Nv, T, Dv] and final state [B, Nv, Dk, Dv], float32.
    """
    state, outputs = operands.state, list[Tensor]()
    tokens = operands.value.shape[2]
    for start in range(0, tokens, chunk_size):
        part = slice(start, min(start + chunk_size, tokens))
        query, key, value = (operand[:, :, part] for operand in (operands.query, operands.key, operands.value))
        total, beta = operands.g[:, :, part].cumsum(-1), operands.beta[:, :, part, None]
        # What a token's write has decayed to when a later token of the chunk reads it; nothing reads ahead.
        ahead = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(ahead, -torch.inf).exp()
        grown = total.exp()[..., None]
        # Row i: what token i writes, given that it subtracts what the tokens before it wrote. The diagonal is not read.
        system = beta * (key @ key.mT) * decay
        wanted = beta * (value - (key * grown) @ state)
        written: Tensor = _linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append((query * grown) @ state + ((query @ key.mT) * decay) @ written)
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * grown[..., -1:, :] + (key * left).mT @ written
    return (torch.cat(outputs, dim=2) if outputs else torch.zeros_like(operands.value)), state
