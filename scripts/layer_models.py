"""One linear attention layer without its MLP, and the rule in it alone, exported for one token count each."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35

from qwen_models import CONV_WIDTH, Sizes, TensorCache, build, exporting, torchscript
from rule_models import Case, Rule, rule_inputs

OPSET = 17
CHUNK = 64
STATES = ("conv", "recurrent")


class Layer(nn.Module):
    """Projections, convolution, rule, norm and output projection; states as plain tensors."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layer = build(sizes).model.layers[0].linear_attn

    def forward(self, hidden, conv=None, recurrent=None):
        """Hidden states [B, T, hidden] in and out, and both states after it."""
        # The one-token convolution writes into the state it is given.
        cache = TensorCache() if conv is None else TensorCache({0: conv.clone()}, {0: recurrent})
        out = self.layer(hidden, cache=cache)
        return out, cache.conv[0], cache.recurrent[0]


def layer_case(sizes: Sizes, tokens: int) -> tuple[nn.Module, dict[str, torch.Tensor], tuple[str, ...]]:
    """The layer, its inputs and the names of its outputs; one token comes after others, more are a beginning."""
    torch.manual_seed(tokens)
    given = {"hidden": torch.randn(1, tokens, sizes.hidden)}
    if tokens == 1:
        channels = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
        given["conv"] = torch.randn(1, channels, CONV_WIDTH)
        given["recurrent"] = 0.3 * torch.randn(1, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    return Layer(sizes), given, ("out", *(f"present_{name}" for name in STATES))


def rule_case(sizes: Sizes, tokens: int) -> tuple[nn.Module, dict[str, torch.Tensor], tuple[str, ...]]:
    """The rule alone in the same way."""
    case = Case(
        name="rule",
        kind="recurrent" if tokens == 1 else "chunk",
        exporter="torchscript",
        opset=OPSET,
        tokens=tokens,
        key_heads=sizes.key_heads,
        value_heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        chunk=CHUNK,
        state=tokens == 1,
    )
    return Rule(case), dict(zip(case.inputs, rule_inputs(case, tokens), strict=True)), case.outputs


CASES = {"layer": layer_case, "rule": rule_case}


def write_layer(
    path: Path, part: str, tokens: int, dims: str, *, dynamic: bool = False, chunk: int | None = None
) -> None:
    """Writes one export and, beside it, its inputs and what torch makes of them.

    Args:
        path: of the model; the arrays go to the same name with ``.npz``.
        part: ``layer`` or ``rule``.
        tokens: how many; 1 is a step of decode.
        dims: fields of `Sizes` as JSON.
        dynamic: whether the token axis is declared free. The unfused graph is right for as many chunks as were traced
            whatever is declared.
        chunk: tokens of a chunk of the layer, None for the model's own.
    """
    sizes = Sizes(**json.loads(dims), layers=("linear_attention",))
    module, given, outputs = CASES[part](sizes, tokens)
    arguments = tuple(given.values())
    with exporting(qwen35, chunk), contextlib.redirect_stdout(io.StringIO()):
        expected = module(*arguments)
        axes = {name: {1: "tokens"} for name in (*given, "out") if "state" not in name} if dynamic else None
        torchscript(module, arguments, path, inputs=list(given), outputs=list(outputs), opset=OPSET, axes=axes)
    arrays = {f"in_{name}": tensor.numpy() for name, tensor in given.items()}
    arrays |= {f"out_{name}": tensor.numpy() for name, tensor in zip(outputs, expected, strict=True)}
    np.savez(path.with_suffix(".npz"), **arrays)
