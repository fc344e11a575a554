"""Graphs of a real size: real layers, for prefill exported once each and repeated; weights in a file of holes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import torch
from onnx import TensorProto, helper
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35

from qwen_dims import DIMS, NARROW
from qwen_models import (
    DECODE_AXES,
    DECODE_INPUTS,
    OUTPUTS,
    PREFILL_AXES,
    PREFILL_INPUTS,
    Decode,
    Sizes,
    TensorCache,
    build,
    causal_mask,
    decode_inputs,
    exporting,
    torchscript,
)

TRACED_TOKENS = 32
OPSET = 17
ALIGNMENT = 4096
WEIGHTS = "weights.bin"
HIDDEN_AXES = {0: "batch", 1: "seq_len"}


@dataclass(frozen=True)
class Piece:
    """A part of the model, exported: names of its inputs and outputs are those of the call."""

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Head(nn.Module):
    """Embedding, mask and rotary embedding."""

    def __init__(self, model: qwen35.Qwen3_5ForCausalLM) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = model.model.embed_tokens, model.model.rotary_emb

    def forward(self, input_ids, attention_mask, position_ids):
        """Gives hidden states, the causal mask, cosines and sines."""
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(hidden, position_ids[1:])
        return hidden, causal_mask(attention_mask, input_ids.shape[1], hidden.dtype), cos, sin


class Linear(nn.Module):
    """One linear attention layer."""

    def __init__(self, model: qwen35.Qwen3_5ForCausalLM) -> None:
        super().__init__()
        self.layer = model.model.layers[0]

    def forward(self, hidden):
        """Gives hidden states, the convolution's and the recurrent state."""
        cache = TensorCache()
        out = self.layer(hidden, position_embeddings=None, cache=cache)
        return out, cache.conv[0], cache.recurrent[0]


class Full(nn.Module):
    """One softmax attention layer."""

    def __init__(self, model: qwen35.Qwen3_5ForCausalLM) -> None:
        super().__init__()
        self.layer = model.model.layers[1]

    def forward(self, hidden, mask, cos, sin):
        """Gives hidden states, keys and values."""
        cache = TensorCache()
        out = self.layer(hidden, position_embeddings=(cos, sin), attention_mask=mask, cache=cache)
        return out, *cache.kv[1]


class Tail(nn.Module):
    """Last norm and the head of the language model."""

    def __init__(self, model: qwen35.Qwen3_5ForCausalLM) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, hidden):
        """Gives logits."""
        return self.lm_head(self.norm(hidden))


def export_piece(
    module: nn.Module, arguments: Sequence[torch.Tensor], inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[Piece, tuple[torch.Tensor, ...]]:
    """Exports a part of the model, and what it gives."""
    symbols = {**PREFILL_AXES, "hidden": HIDDEN_AXES}
    with TemporaryDirectory() as folder, exporting(qwen35), contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "piece.onnx"
        results = module(*arguments)
        axes = {name: symbols[name] for name in inputs if name in symbols}
        torchscript(module, tuple(arguments), path, inputs=list(inputs), outputs=list(outputs), opset=OPSET, axes=axes)
        piece = Piece(onnx.load(path), tuple(inputs), tuple(outputs))
    return piece, results if isinstance(results, tuple) else (results,)


def pieces(dims: dict[str, int]) -> dict[str, Piece]:
    """The four parts, in float16."""
    sizes = Sizes(**dims, layers=("linear_attention", "full_attention"))
    model = build(sizes).half()
    ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.int64)
    positions = torch.arange(TRACED_TOKENS).expand(4, 1, -1).contiguous()
    given = (ids, torch.ones_like(ids), positions)
    head, (hidden, mask, cos, sin) = export_piece(Head(model), given, PREFILL_INPUTS, ("hidden", "mask", "cos", "sin"))
    linear, _ = export_piece(Linear(model), (hidden,), ("hidden",), ("next", "conv", "recurrent"))
    names = ("hidden", "mask", "cos", "sin")
    full, _ = export_piece(Full(model), (hidden, mask, cos, sin), names, ("next", "keys", "values"))
    tail, _ = export_piece(Tail(model), (hidden,), ("hidden",), ("logits",))
    return {"head": head, "linear": linear, "full": full, "tail": tail}


class Assembly:
    """A graph under construction; weights are given a place in a file that is never filled."""

    def __init__(self) -> None:
        self.graph = onnx.GraphProto(name="main_graph")
        self.size = 0

    def add(self, piece: Piece, prefix: str, names: dict[str, str]) -> None:
        """Adds a copy of a part: values in ``names`` are joined to the rest, all others get the prefix."""
        renamed = dict(names)
        for tensor in piece.model.graph.initializer:
            renamed[tensor.name] = f"{prefix}.{tensor.name}"
            self.graph.initializer.append(self.placed(tensor, renamed[tensor.name]))
        for source in piece.model.graph.node:
            node = self.graph.node.add()
            node.CopyFrom(source)
            node.name = f"/{prefix}{source.name.removeprefix('/layer')}"
            for value in source.output:
                renamed.setdefault(value, f"/{prefix}{value.removeprefix('/layer')}")
            node.output[:] = [renamed[value] for value in source.output]
            node.input[:] = [renamed[value] if value else "" for value in source.input]

    def placed(self, tensor: TensorProto, name: str) -> TensorProto:
        """The same tensor with its bytes in the file of holes."""
        length = len(tensor.raw_data)
        outside = TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
        outside.data_location = TensorProto.EXTERNAL
        for key, value in (("location", WEIGHTS), ("offset", self.size), ("length", length)):
            outside.external_data.add(key=key, value=str(value))
        self.size += -(-length // ALIGNMENT) * ALIGNMENT
        return outside

    def stack(self, values: Sequence[str], name: str) -> None:
        """Stacks values along a new first axis, as TorchScript writes it."""
        axis = f"/{name}/axis"
        self.graph.node.append(helper.make_node("Constant", [], [axis], name=axis, value_ints=[0]))
        wide = [f"{value}/unsqueezed" for value in values]
        for value, result in zip(values, wide, strict=True):
            self.graph.node.append(helper.make_node("Unsqueeze", [value, axis], [result], name=result))
        self.graph.node.append(helper.make_node("Concat", wide, [name], name=f"/{name}/Concat", axis=0))


def layer_kinds(linear: int) -> Iterator[str]:
    """``linear`` linear layers; every fourth layer is of the other kind."""
    for index in range(linear):
        yield "linear"
        if index % 3 == 2:
            yield "full"


def assemble(parts: dict[str, Piece], linear: int, dims: dict[str, int]) -> Assembly:
    """Strings the layers together."""
    built = Assembly()
    held: dict[str, list[str]] = {name: [] for name in ("conv", "recurrent", "kv")}
    built.add(parts["head"], "model/head", {name: name for name in (*PREFILL_INPUTS, *parts["head"].outputs)})
    hidden = "hidden"
    for index, kind in enumerate(layer_kinds(linear)):
        prefix, part = f"model/layers.{index}", parts[kind]
        names = {name: f"/{prefix}/{name}" for name in part.outputs}
        built.add(part, prefix, {"mask": "mask", "cos": "cos", "sin": "sin", **names, "hidden": hidden})
        hidden = names["next"]
        for store, output in (("conv", "conv"), ("recurrent", "recurrent"), ("kv", "keys"), ("kv", "values")):
            held[store] += [names[output]] if output in names else []
    built.add(parts["tail"], "model/tail", {"hidden": hidden, "logits": "logits"})
    outputs = {"conv": "present_conv_states", "recurrent": "present_recurrent_states", "kv": "present_kv_cache"}
    for store, name in outputs.items():
        built.stack(held[store], name)
    declare(built.graph, {store: len(values) for store, values in held.items()}, dims)
    return built


def declare(graph: onnx.GraphProto, counts: dict[str, int], dims: dict[str, int]) -> None:
    """Declares inputs and outputs."""
    width = 2 * dims["key_heads"] * dims["key_dim"] + dims["value_heads"] * dims["value_dim"]
    state = [dims["value_heads"], dims["key_dim"], dims["value_dim"]]
    whole, half, single = TensorProto.INT64, TensorProto.FLOAT16, TensorProto.FLOAT
    shapes: dict[str, tuple[int, list[int | str]]] = {
        "input_ids": (whole, ["batch", "seq_len"]),
        "attention_mask": (whole, ["batch", "seq_len"]),
        "position_ids": (whole, [4, "batch", "seq_len"]),
        "logits": (half, ["batch", "seq_len", dims["vocab"]]),
        "present_conv_states": (half, [counts["conv"], "batch", width, 4]),
        "present_recurrent_states": (single, [counts["recurrent"], "batch", *state]),
        "present_kv_cache": (half, [counts["kv"], "batch", dims["kv_heads"], "seq_len", dims["head_dim"]]),
    }
    for name, (dtype, shape) in shapes.items():
        place = graph.input if name in PREFILL_INPUTS else graph.output
        place.append(helper.make_tensor_value_info(name, dtype, shape))


def write_big_prefill(path: Path, linear: int, dims: dict[str, int] = DIMS) -> None:
    """Writes the model and, beside it, its weights: a file of that size without contents."""
    write(assemble(pieces(dims), linear, dims), path)


def write_big_decode(path: Path, linear: int) -> None:
    """Writes the graph of one token in the same way, exported as a whole.

    The dims of the rule are real; the widths around it, which add nothing to the graph, are small.
    """
    layers = tuple(f"{kind}_attention" for kind in layer_kinds(linear))
    sizes = Sizes(**NARROW, layers=layers)
    model = build(sizes).half()
    with TemporaryDirectory() as folder, exporting(qwen35), contextlib.redirect_stdout(io.StringIO()):
        whole = Path(folder) / "decode.onnx"
        arguments = decode_inputs(sizes, 1, 8, torch.float16)
        names = {"inputs": DECODE_INPUTS, "outputs": OUTPUTS}
        torchscript(Decode(model), arguments, whole, **names, opset=OPSET, axes=DECODE_AXES)
        exported = onnx.load(whole)
    built = Assembly()
    built.graph.CopyFrom(exported.graph)
    del built.graph.initializer[:]
    built.graph.initializer.extend(built.placed(tensor, tensor.name) for tensor in exported.graph.initializer)
    write(built, path)


def write(built: Assembly, path: Path) -> None:
    """Writes a graph, and a file of holes for its weights."""
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(built.graph, opset_imports=opsets, ir_version=8, producer_name="pytorch")
    with (path.parent / WEIGHTS).open("wb") as weights:
        weights.truncate(built.size)
    path.write_bytes(model.SerializeToString())
