"""One member of the zoo: a module, its inputs, how it is exported and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35

Axes = dict[str, dict[int, str]]
#: Sizes of the operands unless a member says otherwise.
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 32


@dataclass(frozen=True)
class Member:
    """A hand-written module to export.

    Attributes:
        name: of the files.
        module: makes the module.
        inputs: name -> tensor, in the order of ``forward``.
        outputs: names of the graph's outputs.
        tokens: the graph is traced at, 1 where there is no such axis.
        why: what is to be seen in it.
        exporter, opset: who writes it; ``contrib`` is TorchScript with onnxruntime's own operators.
        axes: the dynamic ones of inputs and outputs.
        exit, codes: what fusing it for the default target ends with, and the reason codes of its sites.
        expect: ``match``, ``no-match`` or ``either``.
        chunk: size of a chunk, None where the rule is not written in chunks.
        sites: how many rules there are.
    """

    name: str
    module: Callable[[], nn.Module]
    inputs: dict[str, torch.Tensor]
    why: str
    outputs: Sequence[str] = ("out", "final_state")
    tokens: int = 1
    exporter: Literal["torchscript", "dynamo", "contrib"] = "torchscript"
    opset: int = 17
    axes: Axes = field(default_factory=dict)
    exit: int = 0
    codes: Sequence[str] = ("",)
    expect: str = "match"
    chunk: int | None = None
    sites: int = 1

    def replaced(self, **changes: object) -> Member:
        """A copy with other fields."""
        return replace(self, **changes)

    def truth(self) -> dict[str, object]:
        """What a test may expect of it."""
        return {
            "source": "hand-written",
            "exporter": {"kind": self.exporter, "opset": self.opset},
            "expect": self.expect,
            "exit": self.exit,
            "codes": list(self.codes),
            "why": self.why,
            "n_sites": self.sites,
            "dtype": "float32",
            "dynamic_axes": self.axes,
            "tokens": self.tokens,
            "chunk_size": self.chunk,
        }


def operands(
    tokens: int,
    *,
    batch: int = 1,
    key_heads: int = KEY_HEADS,
    value_heads: int = VALUE_HEADS,
    key_dim: int = KEY_DIM,
    value_dim: int = VALUE_DIM,
    seed: int = 5,
) -> dict[str, torch.Tensor]:
    """Operands by role that tell right from wrong: keys alike from token to token, slow decay, norms near 1."""
    torch.manual_seed(seed)
    query = torch.randn(batch, tokens, key_heads, key_dim)
    key = torch.randn(batch, 1, key_heads, key_dim) + 0.5 * torch.randn_like(query)
    return {
        "query": functional.normalize(query, dim=-1),
        "key": functional.normalize(key, dim=-1),
        "value": torch.randn(batch, tokens, value_heads, value_dim),
        "g": -0.1 * torch.rand(batch, tokens, value_heads),
        "beta": torch.rand(batch, tokens, value_heads),
        "state": 0.5 * torch.randn(batch, value_heads, key_dim, value_dim),
    }


def heads(query: torch.Tensor, key: torch.Tensor, repeat: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query (scaled) and key [B, T, N, K], normalised and with each head repeated ``repeat`` times."""
    query, key = (qwen35.l2norm(x).repeat_interleave(repeat, dim=2) for x in (query, key))
    return query * query.shape[-1] ** -0.5, key
