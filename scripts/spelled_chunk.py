"""The rule in chunks, written out by hand, each part of it in several ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from zoo_member import heads


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product as MatMul."""
    return a @ b


def einsum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product as Einsum."""
    return torch.einsum("...ij,...jk->...ik", a, b)


def summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product as Mul and ReduceSum."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


PRODUCTS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": product, "einsum": einsum, "summed": summed,
}  # fmt: skip


def by_cumsum(g: torch.Tensor) -> torch.Tensor:
    """The log decay [..., C] added up."""
    return g.cumsum(-1)


def by_triangle(g: torch.Tensor) -> torch.Tensor:
    """The same by a product with a triangle of ones."""
    return (torch.ones(g.shape[-1], g.shape[-1]).tril() @ g[..., None])[..., 0]


def by_masked_sum(g: torch.Tensor) -> torch.Tensor:
    """The same by a masked sum."""
    return (g[..., None, :] * torch.ones(g.shape[-1], g.shape[-1]).tril()).sum(-1)


SUMS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": by_cumsum, "triangle": by_triangle, "masked": by_masked_sum,
}  # fmt: skip


def of_difference(total: torch.Tensor) -> torch.Tensor:
    """exp(a_i - a_j) for i >= j, else 0: [..., C, C]."""
    return (total[..., :, None] - total[..., None, :]).tril().exp().tril()


def masked_difference(total: torch.Tensor) -> torch.Tensor:
    """The same with minus infinity above the diagonal."""
    future = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()


def of_factors(total: torch.Tensor) -> torch.Tensor:
    """The same as exp(a_i) * exp(-a_j)."""
    return (total.exp()[..., :, None] * (-total).exp()[..., None, :]).tril()


def of_quotient(total: torch.Tensor) -> torch.Tensor:
    """The same as exp(a_i) / exp(a_j)."""
    factor = total.exp()
    return (factor[..., :, None] / factor[..., None, :]).tril()


DECAYS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "difference": of_difference, "masked": masked_difference, "factors": of_factors, "quotient": of_quotient,
}  # fmt: skip

# Each inverts I + lower for a strictly lower triangular matrix [..., C, C].


def rows_in_place(lower: torch.Tensor) -> torch.Tensor:
    """Forward substitution, rows assigned into the matrix."""
    inverse = -lower
    for i in range(1, lower.shape[-1]):
        row = inverse[..., i, :i].clone()
        inverse[..., i, :i] = row + (row[..., None] * inverse[..., :i, :i].clone()).sum(-2)
    return inverse + torch.eye(lower.shape[-1])


def rows_joined(lower: torch.Tensor) -> torch.Tensor:
    """Forward substitution, rows concatenated."""
    size = int(lower.shape[-1])
    eye = torch.eye(size).expand(*lower.shape[:-2], size, size)
    rows = [eye[..., :1, :]]
    for i in range(1, size):
        done = torch.cat(rows, dim=-2)
        rows.append(eye[..., i : i + 1, :] - lower[..., i : i + 1, :i] @ done)
    return torch.cat(rows, dim=-2)


def rows_chosen(lower: torch.Tensor) -> torch.Tensor:
    """Forward substitution, each row chosen by a mask."""
    size = int(lower.shape[-1])
    inverse = torch.eye(size) + 0.0 * lower
    for i in range(1, size):
        row = torch.eye(size)[i] - (lower[..., i, :, None] * inverse).sum(-2)
        inverse = torch.where((torch.arange(size) == i)[:, None], row[..., None, :], inverse)
    return inverse


def rows_divided(lower: torch.Tensor) -> torch.Tensor:
    """Forward substitution for I + lower, a diagonal included."""
    size = int(lower.shape[-1])
    eye = torch.eye(size).expand(*lower.shape[:-2], size, size)
    diagonal = 1.0 + lower.diagonal(dim1=-2, dim2=-1)
    rows = [eye[..., :1, :] / diagonal[..., :1, None]]
    for i in range(1, size):
        row = eye[..., i : i + 1, :] - lower[..., i : i + 1, :i] @ torch.cat(rows, dim=-2)
        rows.append(row / diagonal[..., i : i + 1, None])
    return torch.cat(rows, dim=-2)


def by_doubling(lower: torch.Tensor) -> torch.Tensor:
    """(I - L)(I + L^2)(I + L^4)..."""
    size, power = int(lower.shape[-1]), -lower
    inverse = torch.eye(size) + power
    for _ in range((size - 1).bit_length() - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def by_blocks(lower: torch.Tensor) -> torch.Tensor:
    """Inverses of the two halves, and what joins them."""
    size = int(lower.shape[-1])
    if size == 1:
        return torch.ones_like(lower)
    half = size // 2
    upper_left, lower_right = by_blocks(lower[..., :half, :half]), by_blocks(lower[..., half:, half:])
    corner = -lower_right @ lower[..., half:, :half] @ upper_left
    nothing = torch.zeros_like(lower[..., :half, half:])
    return torch.cat([torch.cat([upper_left, nothing], dim=-1), torch.cat([corner, lower_right], dim=-1)], dim=-2)


def by_operator(lower: torch.Tensor) -> torch.Tensor:
    """An operator for it."""
    return torch.inverse(lower + torch.eye(lower.shape[-1]))


def short_rows(lower: torch.Tensor) -> torch.Tensor:
    """Forward substitution that leaves out the last row."""
    inverse = -lower
    for i in range(1, lower.shape[-1] - 1):
        row = inverse[..., i, :i].clone()
        inverse[..., i, :i] = row + (row[..., None] * inverse[..., :i, :i].clone()).sum(-2)
    return inverse + torch.eye(lower.shape[-1])


def short_doubling(lower: torch.Tensor) -> torch.Tensor:
    """One factor too few."""
    return (torch.eye(lower.shape[-1]) - lower) @ (torch.eye(lower.shape[-1]) + lower @ lower)


INVERSES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": rows_in_place, "joined": rows_joined, "chosen": rows_chosen, "doubling": by_doubling, "blocks": by_blocks,
    "operator": by_operator, "divided": rows_divided, "short-rows": short_rows, "short-doubling": short_doubling,
}  # fmt: skip


class Chunked(nn.Module):
    """The rule in chunks.

    Args:
        size: of a chunk; tokens are padded to a multiple of it.
        fault: what is wrong, "" for nothing: ``diagonal`` (a token does not read itself), ``kept`` (it corrects
            itself), ``last`` (the last chunk's output is dropped), ``decay-sign``, ``beta-value`` (beta on the value
            only), ``beta-key``, ``no-delta``.
    """

    def __init__(
        self,
        size: int = 8,
        *,
        inverse: str = "rows",
        total: str = "cumsum",
        decay: str = "difference",
        contraction: str = "matmul",
        write: str = "stack",
        fault: str = "",
    ) -> None:
        super().__init__()
        self.size, self.write, self.fault = size, write, fault
        self.inverse, self.total, self.decay = INVERSES[inverse], SUMS[total], DECAYS[decay]
        self.dot = PRODUCTS[contraction]

    def chunks(self, x: torch.Tensor, pad: int) -> torch.Tensor:
        """[B, T, H, ...] to [B, H, T / C, C, ...]."""
        x = functional.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, pad))
        return x.reshape(*x.shape[:2], -1, self.size, *x.shape[3:])

    def forward(self, query, key, value, g, beta, state):
        """Gives out [B, T, H, V] and the final state [B, H, K, V]."""
        tokens, fault = query.shape[1], self.fault
        query, key = heads(query, key, value.shape[2] // query.shape[2])
        pad = -tokens % self.size
        query, key, value, g, beta = (self.chunks(x, pad) for x in (query, key, value, g, beta))
        total = self.total(-g if fault == "decay-sign" else g)
        decay = self.decay(total)
        read = key if fault == "beta-value" else key * beta[..., None]
        lower = (self.dot(read, key.transpose(-1, -2)) * decay).tril(0 if fault == "kept" else -1)
        inverse = torch.eye(self.size) + 0.0 * lower if fault == "no-delta" else self.inverse(lower)
        new = self.dot(inverse, value if fault == "beta-key" else value * beta[..., None])
        known = self.dot(inverse, read * total.exp()[..., None])
        scores = (self.dot(query, key.transpose(-1, -2)) * decay).tril(-1 if fault == "diagonal" else 0)
        outs = []
        for i in range(query.shape[2]):
            last = total[:, :, i, -1:]
            fresh = new[:, :, i] if fault == "no-delta" else new[:, :, i] - self.dot(known[:, :, i], state)
            inner = self.dot(query[:, :, i] * total[:, :, i, :, None].exp(), state)
            outs.append(inner + self.dot(scores[:, :, i], fresh))
            kept = (key[:, :, i] * (last - total[:, :, i]).exp()[..., None]).transpose(-1, -2)
            state = state * last.exp()[..., None] + self.dot(kept, fresh)
        if fault == "last":
            outs[-1] = torch.zeros_like(outs[-1])
        return self.joined(outs, value, tokens), state

    def joined(self, outs: list[torch.Tensor], value: torch.Tensor, tokens: int) -> torch.Tensor:
        """Chunks of output [B, H, C, V] in one tensor [B, T, H, V]."""
        if self.write == "stack":
            out = torch.stack(outs, dim=2)
        else:
            out = torch.zeros_like(value)
            for i, part in enumerate(outs):
                out[:, :, i] = part
        return out.flatten(2, 3)[:, :, :tokens].transpose(1, 2)
