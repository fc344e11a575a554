"""Tiny Qwen3.5 models with random weights, wrapped so that states go in and come out as plain tensors."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

CONV_WIDTH = 4

PREFILL_INPUTS = ["input_ids", "attention_mask", "position_ids"]
DECODE_INPUTS = [*PREFILL_INPUTS, "past_conv_states", "past_recurrent_states", "past_kv_cache"]
OUTPUTS = ["logits", "present_conv_states", "present_recurrent_states", "present_kv_cache"]

PREFILL_AXES: dict[str, dict[int, str]] = {
    "input_ids": {0: "batch", 1: "seq_len"},
    "attention_mask": {0: "batch", 1: "seq_len"},
    "position_ids": {1: "batch", 2: "seq_len"},
    "logits": {0: "batch", 1: "seq_len"},
    "present_conv_states": {1: "batch"},
    "present_recurrent_states": {1: "batch"},
    "present_kv_cache": {1: "batch", 3: "seq_len"},
}
DECODE_AXES: dict[str, dict[int, str]] = {
    "input_ids": {0: "batch", 1: "step"},
    "attention_mask": {0: "batch", 1: "total_seq_len"},
    "position_ids": {1: "batch", 2: "step"},
    "past_conv_states": {1: "batch"},
    "past_recurrent_states": {1: "batch"},
    "past_kv_cache": {1: "batch", 3: "past_seq_len"},
    "logits": {0: "batch", 1: "step"},
    "present_conv_states": {1: "batch"},
    "present_recurrent_states": {1: "batch"},
    "present_kv_cache": {1: "batch", 3: "total_seq_len"},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model; the defaults are tiny."""

    hidden: int = 32
    vocab: int = 64
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 16
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    intermediate: int = 48
    layers: tuple[str, ...] = ("linear_attention",) * 3 + ("full_attention",)

    def config(self) -> Qwen3_5TextConfig:
        """The configuration transformers knows them by."""
        return Qwen3_5TextConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=len(self.layers),
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=1024,
            linear_conv_kernel_dim=CONV_WIDTH,
            linear_num_key_heads=self.key_heads,
            linear_num_value_heads=self.value_heads,
            linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim,
            layer_types=list(self.layers),
            attn_implementation="eager",
        )


def build(sizes: Sizes, seed: int = 0) -> qwen35.Qwen3_5ForCausalLM:
    """A model whose gates decay slowly and whose layers all matter: with the default weights no fault would show."""
    torch.manual_seed(seed)
    model = qwen35.Qwen3_5ForCausalLM(sizes.config()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3.0, -1.5)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-1.0, 0.0)
            elif name.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 1.0)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.7 * parameter[0].numel() ** -0.5)
    return model.requires_grad_(requires_grad=False)


@contextlib.contextmanager
def exporting(module: ModuleType, chunk_size: int | None = None) -> Iterator[None]:
    """Makes a module of transformers take the path it keeps for exporters, and chunks of ``chunk_size``.

    transformers asks `is_torchdynamo_exporting` whether the triangular solver may be used; the TorchScript exporter has
    no such operator either, but is not asked for. The rows are then written out one by one.
    """
    replaced: dict[str, object] = {"is_torchdynamo_exporting": lambda: True}
    if chunk_size is not None:
        rule = module.torch_chunk_gated_delta_rule
        replaced["torch_chunk_gated_delta_rule"] = functools.partial(rule, chunk_size=chunk_size)
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class TensorCache:
    """What the layers ask of a cache, kept as plain tensors that are replaced, never written into."""

    def __init__(
        self,
        conv: dict[int, torch.Tensor] | None = None,
        recurrent: dict[int, torch.Tensor] | None = None,
        kv: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        self.conv = dict(conv or {})
        self.recurrent = dict(recurrent or {})
        self.kv = dict(kv or {})

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Last columns that went into the convolution, [B, C, k], or None at the start."""
        return self.conv.get(layer)

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """State of the rule, [B, Hv, Dk, Dv], or None at the start."""
        return self.recurrent.get(layer)

    def is_recording_past(self, layer: int) -> bool:
        """Only the last columns are kept."""
        return False

    def update_conv_state(self, columns: torch.Tensor, layer: int, conv_kernel_size: int) -> torch.Tensor:
        """Keeps the last ``conv_kernel_size`` columns; gives back all that the convolution is to see."""
        before = self.conv.get(layer)
        seen = columns if before is None else torch.cat([before, columns], dim=-1)
        padded = nn.functional.pad(seen, (conv_kernel_size, 0)) if before is None else seen
        self.conv[layer] = padded[..., -conv_kernel_size:]
        return seen

    def update_recurrent_state(self, state: torch.Tensor, layer: int) -> None:
        """Takes the rule's final state."""
        self.recurrent[layer] = state

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: Mapping[str, object] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values, [B, heads, T, D]."""
        if layer in self.kv:
            past_key, past_value = self.kv[layer]
            key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        self.kv[layer] = (key, value)
        return key, value


def causal_mask(attention_mask: torch.Tensor, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, tokens, total] from a padding mask [B, total]."""
    total = attention_mask.shape[1]
    column = torch.arange(total, device=attention_mask.device)
    row = column[total - tokens :]
    allowed = (column[None, :] <= row[:, None])[None, None] & (attention_mask[:, None, None, :] > 0)
    return torch.where(allowed, 0.0, -30000.0).to(dtype)


class Stacked(nn.Module):
    """A causal language model whose states are stacked over the layers of one kind.

    conv states are [L, B, C, k], recurrent states float32 [L, B, Hv, Dk, Dv], the key-value
    cache [2 L, B, heads, T, D].
    """

    def __init__(self, model: qwen35.Qwen3_5ForCausalLM) -> None:
        super().__init__()
        self.model = model.model
        self.lm_head = model.lm_head
        kinds = model.config.layer_types
        self.linear = [index for index, kind in enumerate(kinds) if kind == "linear_attention"]
        self.full = [index for index, kind in enumerate(kinds) if kind != "linear_attention"]

    def run(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, cache: TensorCache
    ) -> tuple[torch.Tensor, ...]:
        """One step of the model, the states of ``cache`` before it, stacked states after it."""
        mask = causal_mask(attention_mask, input_ids.shape[1], self.lm_head.weight.dtype)
        hidden = self.model(
            input_ids=input_ids,
            attention_mask={"full_attention": mask, "linear_attention": None},
            position_ids=position_ids,
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        return (
            self.lm_head(hidden),
            torch.stack([cache.conv[index] for index in self.linear]),
            torch.stack([cache.recurrent[index] for index in self.linear]),
            torch.stack([tensor for index in self.full for tensor in cache.kv[index]]),
        )


class Prefill(Stacked):
    """The first step: no states before it."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gives logits [B, T, vocab] and the stacked states."""
        return self.run(input_ids, attention_mask, position_ids, TensorCache())


class Decode(Stacked):
    """A later step: stacked states in and out."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_conv_states: torch.Tensor,
        past_recurrent_states: torch.Tensor,
        past_kv_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Gives logits [B, step, vocab] and the stacked states."""
        cache = TensorCache(
            # The one-token convolution writes into the state it is given.
            conv={layer: past_conv_states[index].clone() for index, layer in enumerate(self.linear)},
            recurrent={layer: past_recurrent_states[index] for index, layer in enumerate(self.linear)},
            kv={layer: (past_kv_cache[2 * i], past_kv_cache[2 * i + 1]) for i, layer in enumerate(self.full)},
        )
        return self.run(input_ids, attention_mask, position_ids, cache)


def prefill_inputs(sizes: Sizes, batch: int, tokens: int, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Token ids, a mask of ones, positions [4, B, T]."""
    torch.manual_seed(seed)
    input_ids = torch.randint(0, sizes.vocab, (batch, tokens))
    return input_ids, torch.ones_like(input_ids), torch.arange(tokens).expand(4, batch, tokens).contiguous()


def decode_inputs(sizes: Sizes, batch: int, past: int, dtype: torch.dtype, seed: int = 2) -> tuple[torch.Tensor, ...]:
    """One token after ``past`` others, with states of a size that real ones have."""
    torch.manual_seed(seed)
    linear = sum(kind == "linear_attention" for kind in sizes.layers)
    full = len(sizes.layers) - linear
    channels = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
    return (
        torch.randint(0, sizes.vocab, (batch, 1)),
        torch.ones(batch, past + 1, dtype=torch.int64),
        torch.full((4, batch, 1), past),
        torch.randn(linear, batch, channels, CONV_WIDTH).to(dtype),
        0.3 * torch.randn(linear, batch, sizes.value_heads, sizes.key_dim, sizes.value_dim),
        torch.randn(2 * full, batch, sizes.kv_heads, past, sizes.head_dim).to(dtype),
    )


def torchscript(
    module: nn.Module,
    arguments: tuple[torch.Tensor, ...],
    path: Path,
    *,
    inputs: list[str],
    outputs: list[str],
    opset: int,
    axes: dict[str, dict[int, str]] | None = None,
) -> None:
    """`torch.onnx.export` as it was before torch.export; its tracer warnings are of no interest here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            arguments,
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=inputs,
            output_names=outputs,
            dynamic_axes=axes or {},
        )
