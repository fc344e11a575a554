"""Unfused prefill and decode graphs with stacked states, by either exporter of torch."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch.export import Dim

from export_checkpoint import Checkpoint
from qwen_models import Stacked, TensorCache, causal_mask, exporting, torchscript

#: Weights of more bytes go to a file beside the graph: one protobuf message holds less than 2 GiB.
LARGE = 3 << 29

STATES = ("conv_states", "recurrent_states", "kv_cache")
OUTPUTS = ["logits", *(f"present_{state}" for state in STATES)]
PAST = [f"past_{state}" for state in STATES]

Axes = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Export:
    """How to export.

    Attributes:
        exporter: ``torchscript`` or ``dynamo``.
        opset: of ONNX.
        tokens: of a prefill, or before the one of a decode.
        chunk_size: of the written-out rule, None for the model's own.
    """

    exporter: str
    opset: int
    tokens: int
    chunk_size: int | None

    @property
    def batch(self) -> int:
        """Sequences to trace with: torch.export takes a one for a constant, the other traces what a one needs."""
        return 2 if self.exporter == "dynamo" else 1


class Prefill(Stacked):
    """The first step: no states before it. ``image_embeds`` is an input of models that see images."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.model)
        self.image_token = checkpoint.image_token

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        image_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Gives logits [B, T, vocab] and the stacked states."""
        hidden = self.model.embed_tokens(input_ids)
        if image_embeds is not None:
            hidden = with_images(hidden, input_ids == self.image_token, image_embeds)
        return self.step(hidden, attention_mask, attention_mask, position_ids, TensorCache())

    def step(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor,
        linear_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: TensorCache,
    ) -> tuple[torch.Tensor, ...]:
        """The layers on embeddings [B, T, hidden]; ``linear_mask`` [B, T] zeroes padding before linear layers."""
        mask = causal_mask(attention_mask, hidden.shape[1], hidden.dtype)
        last = self.model(
            inputs_embeds=hidden,
            attention_mask={"full_attention": mask, "linear_attention": linear_mask},
            position_ids=position_ids,
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        return (
            self.lm_head(last),
            torch.stack([cache.conv[index] for index in self.linear]),
            torch.stack([cache.recurrent[index] for index in self.linear]),
            torch.stack([tensor for index in self.full for tensor in cache.kv[index]]),
        )


class Decode(Prefill):
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
        hidden = self.model.embed_tokens(input_ids)
        return self.step(hidden, attention_mask, None, position_ids, cache)


def with_images(hidden: torch.Tensor, is_image: torch.Tensor, image_embeds: torch.Tensor) -> torch.Tensor:
    """Embeddings [B, T, hidden] whose image tokens [B, T] are replaced, in order, by rows of ``image_embeds``.

    Row 0 of the table is for all other tokens, so that no image rows at all are fine; too few are an error.
    """
    flat = is_image.reshape(-1).to(torch.int64)
    index = (flat.cumsum(0) * flat).reshape(is_image.shape)
    table = torch.cat([image_embeds.new_zeros(1, image_embeds.shape[1]), image_embeds])
    return torch.where(is_image[..., None], table[index], hidden)


def axes_of(component: str, *, images: bool, exporter: str) -> Axes:
    """The dynamic axes of a graph, in the order of its inputs and then of its outputs.

    The step of a decode is a constant for torch.export, since another rule runs from two tokens on; the TorchScript
    exporter declares what it is told.
    """
    decode = component == "decode"
    step = {"decode": "step", "prefill": "seq_len"}[component]
    total = "total_seq_len" if decode else "seq_len"
    first = 1 if images else 0
    axes: Axes = {
        "input_ids": {0: "batch", 1: step},
        "attention_mask": {0: "batch", 1: total},
        "position_ids": {first: "batch", first + 1: step},
    }
    if decode:
        axes |= dict(zip(PAST, ({1: "batch"}, {1: "batch"}, {1: "batch", 3: "past_seq_len"}), strict=True))
    elif images:
        axes["image_embeds"] = {0: "num_image_tokens"}
    axes["logits"] = {0: "batch", 1: step}
    axes |= dict(zip(OUTPUTS[1:], ({1: "batch"}, {1: "batch"}, {1: "batch", 3: total}), strict=True))
    constant = "step" if exporter == "dynamo" else ""
    return {name: {axis: dim for axis, dim in dims.items() if dim != constant} for name, dims in axes.items()}


def prefill_inputs(checkpoint: Checkpoint, batch: int, tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids, a mask of ones, positions, and three rows of images or none, by the names of the inputs."""
    random = torch.Generator().manual_seed(seed)
    vocab, width = checkpoint.weight.shape
    input_ids = torch.randint(0, vocab, (batch, tokens), generator=random)
    positions = torch.arange(tokens).expand(batch, tokens)
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "position_ids": positions}
    if checkpoint.image_token is not None:
        input_ids[input_ids == checkpoint.image_token] = (checkpoint.image_token + 1) % vocab
        input_ids[0, : min(3, tokens)] = checkpoint.image_token
        rows = torch.randn(3, width, generator=random).to(checkpoint.weight.dtype)
        inputs |= {"position_ids": positions.expand(4, batch, tokens), "image_embeds": rows}
    return {name: tensor.contiguous() for name, tensor in inputs.items()}


def decode_inputs(checkpoint: Checkpoint, batch: int, past: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """One token after a prefill of ``past`` others, with the states that the prefill leaves."""
    before = prefill_inputs(checkpoint, batch, past, seed)
    states = Prefill(checkpoint)(**before)[1:]
    mask, positions = before["attention_mask"], before["position_ids"]
    return {
        "input_ids": before["input_ids"][:, -1:].contiguous(),
        "attention_mask": torch.cat([mask, mask[:, :1]], dim=1),
        "position_ids": positions[..., -1:] + 1,
        **dict(zip(PAST, states, strict=True)),
    }


def export(checkpoint: Checkpoint, component: str, settings: Export, path: Path) -> None:
    """Writes the prefill or the decode graph of a model, its weights beside it where they are large."""
    make, wrap = {"prefill": (prefill_inputs, Prefill), "decode": (decode_inputs, Decode)}[component]
    inputs = make(checkpoint, settings.batch, settings.tokens)
    module = wrap(checkpoint).eval()
    axes = axes_of(component, images=checkpoint.image_token is not None, exporter=settings.exporter)
    outputs = dict(zip(OUTPUTS, module(**inputs), strict=True))
    with exporting(checkpoint.module, settings.chunk_size), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if settings.exporter == "torchscript":
            names = {"inputs": list(inputs), "outputs": OUTPUTS}
            torchscript(module, tuple(inputs.values()), path, opset=settings.opset, axes=axes, **names)
        else:
            dynamo(module, inputs, path, axes=axes, opset=settings.opset, large=checkpoint.nbytes > LARGE)
    declare(path, {name: dims_of(tensor, axes[name]) for name, tensor in (inputs | outputs).items()})


def dynamo(
    module: torch.nn.Module, inputs: dict[str, torch.Tensor], path: Path, *, axes: Axes, opset: int, large: bool
) -> None:
    """`torch.onnx.export` by way of torch.export."""
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    shapes = {name: dict.fromkeys(axes[name], Dim.DYNAMIC) for name in inputs}
    program = torch.export.export(module, args=(), kwargs=inputs, dynamic_shapes=shapes, strict=False)
    names = {"input_names": list(inputs), "output_names": OUTPUTS}
    exported = torch.onnx.export(program, dynamo=True, opset_version=opset, verbose=False, **names)
    exported.save(str(path), external_data=large)


def dims_of(tensor: torch.Tensor, axes: Mapping[int, str]) -> tuple[int | str, ...]:
    """A shape with names for its dynamic axes."""
    return tuple(axes.get(axis, size) for axis, size in enumerate(tensor.shape))


def declare(path: Path, dims: Mapping[str, tuple[int | str, ...]]) -> None:
    """Gives the inputs and outputs of a graph the dims they have, and the symbols of torch.export these names."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    names: dict[str, str] = {}
    for value in graph.input:
        for dim, wanted in zip(value.type.tensor_type.shape.dim, dims[value.name], strict=True):
            if dim.dim_param and isinstance(wanted, str):
                names[dim.dim_param] = wanted
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = renamed(dim.dim_param, names)
    for value in (*graph.input, *graph.output):
        for dim, wanted in zip(value.type.tensor_type.shape.dim, dims[value.name], strict=True):
            dim.CopyFrom(onnx.TensorShapeProto.Dimension(**{key_of(wanted): wanted}))
    path.write_bytes(model.SerializeToString())


def renamed(symbol: str, names: Mapping[str, str]) -> str:
    """A symbol's name, or an expression of symbols with theirs."""
    return names.get(symbol) or re.sub(r"\w+", lambda word: names.get(word[0], word[0]), symbol)


def key_of(dim: int | str) -> str:
    """The field of a dim's message."""
    return "dim_value" if isinstance(dim, int) else "dim_param"
