"""Whole tiny models: stacked states by the TorchScript exporter, one state per layer by transformers' own exporter."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx_ir
import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35

from fixture_files import shorten_traces, write_fixture
from qwen_models import (
    DECODE_AXES,
    DECODE_INPUTS,
    OUTPUTS,
    PREFILL_AXES,
    PREFILL_INPUTS,
    Decode,
    Prefill,
    Sizes,
    build,
    decode_inputs,
    exporting,
    prefill_inputs,
    torchscript,
)

CHUNK = 16
DTYPES = {torch.float32: "float32", torch.float16: "float16"}
TINY = Sizes()
TWO_LAYERS = Sizes(layers=("linear_attention", "full_attention"))


def full_truth(sizes: Sizes, *, kind: str, opset: int, dtype: torch.dtype, **rest: object) -> dict[str, object]:
    """What a test may expect of a whole model."""
    decode = kind == "recurrent"
    return {
        "source": "transformers Qwen3_5ForCausalLM, random weights",
        "exporter": {"kind": "torchscript", "opset": opset},
        "kind": kind,
        "expect": "match",
        "exit": 0,
        "why": "",
        "n_sites": sum(layer == "linear_attention" for layer in sizes.layers),
        "dims": {
            "batch": 1,
            "tokens": 1 if decode else 20,
            "key_heads": sizes.key_heads,
            "value_heads": sizes.value_heads,
            "key_dim": sizes.key_dim,
            "value_dim": sizes.value_dim,
            "chunk_size": None if decode else CHUNK,
        },
        "dynamic_axes": {},
        "dtype": DTYPES[dtype],
        "initial_state": decode,
        "final_state": True,
        "l2norm": "inside",
        "scale": sizes.key_dim**-0.5,
        "roles": None,
        # Traced at 20 tokens, two chunks of 16; decode at one token.
        "valid_tokens": [1, 1] if decode else [17, 32],
        **rest,
    }


def make_prefill(out: Path, *, name: str, opset: int, dtype: torch.dtype, sizes: Sizes = TINY) -> None:
    """A prefill of 20 tokens, batch and tokens dynamic."""
    wrapper = Prefill(build(sizes).to(dtype))
    arguments = prefill_inputs(sizes, batch=1, tokens=20)
    path = out / f"{name}.onnx"
    expected = wrapper(*arguments)
    with exporting(qwen35, CHUNK):
        torchscript(wrapper, arguments, path, inputs=PREFILL_INPUTS, outputs=OUTPUTS, opset=opset, axes=PREFILL_AXES)
    truth = full_truth(sizes, kind="chunk", opset=opset, dtype=dtype, dynamic_axes=PREFILL_AXES)
    write_fixture(path, dict(zip(PREFILL_INPUTS, arguments, strict=True)), expected, truth)


def make_decode(out: Path, *, name: str, opset: int, dtype: torch.dtype) -> None:
    """One token after twelve others, batch, step and lengths dynamic."""
    wrapper = Decode(build(TINY).to(dtype))
    arguments = decode_inputs(TINY, batch=1, past=12, dtype=dtype)
    path = out / f"{name}.onnx"
    expected = wrapper(*arguments)
    with exporting(qwen35):
        torchscript(wrapper, arguments, path, inputs=DECODE_INPUTS, outputs=OUTPUTS, opset=opset, axes=DECODE_AXES)
    truth = full_truth(TINY, kind="recurrent", opset=opset, dtype=dtype, dynamic_axes=DECODE_AXES)
    write_fixture(path, dict(zip(DECODE_INPUTS, arguments, strict=True)), expected, truth)


class TwoSizes(nn.Module):
    """Two linear layers whose heads differ in size: their graphs are the same node for node."""

    def __init__(self) -> None:
        super().__init__()
        linear = ("linear_attention",)
        sizes = [Sizes(key_heads=1, value_heads=2, key_dim=d, value_dim=d, layers=linear) for d in (64, 128)]
        self.layers = nn.ModuleList([build(size, seed).model.layers[0] for seed, size in enumerate(sizes)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, 32] in and out; no rotary embedding in such layers."""
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=None)
        return hidden


def make_two_sizes(out: Path, *, name: str) -> None:
    """Head sizes 64 and 128, nothing dynamic."""
    wrapper = TwoSizes().eval()
    torch.manual_seed(3)
    hidden = torch.randn(1, 12, TINY.hidden)
    path = out / f"{name}.onnx"
    expected = (wrapper(hidden),)
    with exporting(qwen35, chunk_size=8):
        torchscript(wrapper, (hidden,), path, inputs=["hidden"], outputs=["hidden_out"], opset=17)
    sizes = Sizes(key_heads=1, value_heads=2, layers=("linear_attention",) * 2)
    truth = full_truth(sizes, kind="chunk", opset=17, dtype=torch.float32, valid_tokens=None, final_state=False)
    truth["dims"] = [truth["dims"] | {"key_dim": d, "value_dim": d, "tokens": 12, "chunk_size": 8} for d in (64, 128)]
    truth["scale"] = [d**-0.5 for d in (64, 128)]
    write_fixture(path, {"hidden": hidden}, expected, truth)


def leaves(name: str, tensors: dict[str, torch.Tensor], cache: Cache) -> torch.Tensor:
    """What a name of transformers' exporter stands for: ``[input.|output.]cache.layers.N.keys`` or ``...states.0``."""
    if "cache.layers." not in name:
        return tensors[name]
    layer, attribute, *key = name.split("cache.layers.")[1].split(".")
    held = getattr(cache.layers[int(layer)], attribute)
    return held[int(key[0])] if key else held


def make_transformers(out: Path, *, name: str, decode: bool) -> None:
    """The exporter of transformers with every axis dynamic: one state per layer, several symbols for one batch."""
    sizes = TINY if decode else TWO_LAYERS
    model = build(sizes)
    input_ids, mask, _ = prefill_inputs(sizes, batch=2, tokens=17 if decode else 20)
    inputs: dict[str, object] = {"input_ids": input_ids, "attention_mask": mask, "use_cache": True}
    cache = None
    if decode:
        cache = model(input_ids[:, :16], attention_mask=mask[:, :16], use_cache=True).cache
        inputs |= {"input_ids": input_ids[:, 16:], "cache": cache}
    with exporting(qwen35, CHUNK), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = OnnxExporter().export(
            model, copy.deepcopy(inputs), config=OnnxConfig(dynamic=True, opset_version=20)
        )
    path = out / f"{name}.onnx"
    onnx_ir.save(exported.program, str(path))
    shorten_traces(path)
    result = model(**copy.deepcopy(inputs))
    graph = exported.program.graph
    feeds = {value.name: leaves(value.name, inputs, cache) for value in graph.inputs}
    expected = [leaves(value.name, {"logits": result.logits}, result.cache) for value in graph.outputs]
    axes = {value.name: {a: str(dim) for a, dim in enumerate(value.shape) if not is_int(dim)} for value in graph.inputs}
    kind = "recurrent" if decode else "chunk"
    truth = full_truth(sizes, kind=kind, opset=20, dtype=torch.float32, dynamic_axes=axes)
    truth["exporter"] = {"kind": "transformers", "opset": 20}
    truth["dims"] = truth["dims"] | {"batch": 2}
    write_fixture(path, feeds, expected, truth)


def is_int(dim: object) -> bool:
    """Whether a dim of onnx_ir is a number: transformers writes some as symbols that read ``16``."""
    return str(dim).isdecimal()


FULL: dict[str, Callable[[Path], None]] = {
    name: functools.partial(make, name=name, **options)
    for name, make, options in (
        ("full_prefill_ts17", make_prefill, {"opset": 17, "dtype": torch.float32}),
        ("full_prefill_ts17_half", make_prefill, {"opset": 17, "dtype": torch.float16, "sizes": TWO_LAYERS}),
        ("full_decode_ts17", make_decode, {"opset": 17, "dtype": torch.float32}),
        ("full_decode_ts17_half", make_decode, {"opset": 17, "dtype": torch.float16}),
        ("two_sizes_ts17", make_two_sizes, {}),
        ("full_decode_transformers", make_transformers, {"decode": True}),
        ("full_prefill_transformers", make_transformers, {"decode": False}),
    )
}
