"""Spellings of the rule: every way of writing a part of it, once."""

from __future__ import annotations

import functools

import torch
from torch import nn

from rule_models import Case
from spelled_chunk import Chunked
from spelled_loops import Cell, Chosen, Looped, Repeated, Scanned
from spelled_steps import Gates, NoTime, Packed, Stepwise, Tiled
from zoo_member import KEY_DIM, KEY_HEADS, VALUE_HEADS, Member, operands

ANY = {
    **{name: {0: "batch", 1: "tokens"} for name in ("query", "key", "value", "g", "beta", "out")},
    **{name: {0: "batch"} for name in ("state", "final_state")},
}  # fmt: skip


def chunk(name: str, why: str, tokens: int = 8, size: int = 4, *, exporter: str = "torchscript", **options) -> Member:
    """A chunk rule of 8 tokens in chunks of 4."""
    build = functools.partial(Chunked, size, **options)
    return Member(name, build, operands(tokens), why, tokens=tokens, chunk=size, exporter=exporter, opset=18)


def steps(name: str, why: str, build, tokens: int = 2, *, exporter: str = "torchscript", **options) -> Member:
    """Some steps."""
    return Member(name, build, operands(tokens, **options), why, tokens=tokens, exporter=exporter, opset=18)


def loop(name: str, why: str, build, **differs) -> Member:
    """A loop over any number of tokens."""
    return Member(name, build, operands(7, batch=2), why, tokens=7, axes=ANY, **differs)


def packed(how: str) -> Member:
    """Query, key and value in one tensor."""
    given = operands(2)
    mixed = torch.cat([given[name].flatten(2) for name in ("query", "key", "value")], dim=-1)
    inputs = {"mixed": mixed, "gates": torch.cat([given["g"], given["beta"]], dim=-1), "state": given["state"]}
    build = functools.partial(Packed, KEY_HEADS, VALUE_HEADS, KEY_DIM, how=how)
    return Member(f"steps_packed_{how}", build, inputs, f"q, k, v are parts of one tensor ({how})", tokens=2)


def gated(name: str, rule: nn.Module, tokens: int, *, fixed: bool, why: str) -> Member:
    """Decay and beta from activations."""
    given = operands(tokens)
    activations = {"a": torch.randn_like(given["g"]), "b": torch.randn_like(given["beta"])}
    inputs = {name: given[name] for name in ("query", "key", "value")} | activations | {"state": given["state"]}
    build = functools.partial(Gates, rule, VALUE_HEADS, fixed=fixed)
    return Member(name, build, inputs, why, tokens=tokens)


def no_time() -> Member:
    """A decode step whose operands have no time axis."""
    given = operands(1)
    inputs = {name: x if name == "state" else x[:, 0] for name, x in given.items()}
    return Member("steps_no_time", NoTime, inputs, "operands [B, H, D]")


def with_extra(name: str, build, extra: dict[str, torch.Tensor], tokens: int, **differs) -> Member:
    """A member with an input that is no operand."""
    return Member(name, build, operands(tokens) | extra, tokens=tokens, **differs)


def traced(name: str, tokens: int, size: int, exporter: str = "torchscript", opset: int = 17) -> Case:
    """The chunk rule of transformers, traced for two chunks of an odd size: its graph is right for two chunks only."""
    options = {"chunk": size, "valid": (size + 1, tokens), "truth": {"codes": [""]}}
    return Case(name, "chunk", exporter, opset, tokens, batch=2, dynamic="BT", **options)


SMALL_CHUNKS = (
    traced("chunk_hf_size_5", 10, 5),
    traced("chunk_hf_size_6", 12, 6),
    traced("chunk_hf_size_10", 20, 10),
    traced("chunk_hf_size_7_dynamo", 14, 7, "dynamo", 20),
)

CHUNKS = (
    chunk("chunk_einsum", "contractions are Einsum", contraction="einsum"),
    chunk("chunk_summed", "contractions are Mul and ReduceSum", contraction="summed"),
    chunk("chunk_triangle", "the decay is added up by a triangle of ones", total="triangle"),
    chunk("chunk_masked_sum", "the decay is added up by a mask and ReduceSum", total="masked"),
    chunk("chunk_factors", "exp(a) * exp(-b) in place of exp(a - b)", decay="factors"),
    chunk("chunk_quotient", "exp(a) / exp(b) in place of exp(a - b)", decay="quotient"),
    chunk("chunk_masked_decay", "minus infinity above the diagonal", decay="masked"),
    chunk("chunk_doubling", "the inverse by powers", inverse="doubling"),
    chunk("chunk_operator", "the inverse by an operator of onnxruntime", inverse="operator", exporter="contrib"),
    chunk("chunk_blocks", "the inverse by blocks", inverse="blocks"),
    chunk("chunk_rows_joined", "rows of the inverse concatenated", inverse="joined"),
    chunk("chunk_rows_chosen", "rows of the inverse put in by Where", inverse="chosen"),
    chunk("chunk_rows_dynamo", "rows by ScatterElements", exporter="dynamo", write="assign"),
    chunk("chunk_rows_scatter", "rows and chunks by ScatterND", write="assign"),
    chunk("chunk_size_5", "an odd chunk size, tokens are no multiple of it", 8, 5, inverse="joined"),
    chunk("chunk_size_128", "large chunks", 130, 128, inverse="joined"),
)

STEPS = (
    steps("steps_product", "contractions are MatMul", functools.partial(Stepwise, "product")),
    steps("steps_einsum", "contractions are Einsum", functools.partial(Stepwise, "einsum")),
    steps("steps_batched", "batch and heads are one axis", functools.partial(Stepwise, "batched")),
    steps("steps_expanded", "the delta is multiplied out", functools.partial(Stepwise, "expanded")),
    steps("steps_projected", "the state is multiplied by I - b k k^T", functools.partial(Stepwise, "projected")),
    steps("steps_assigned", "outputs are assigned", functools.partial(Stepwise, "product", write="assign")),
    steps("steps_chosen", "outputs are put in by Where", functools.partial(Stepwise, "product", write="chosen")),
    steps("steps_dynamo", "the same by torch.export", functools.partial(Stepwise, "product", write="assign"), 3,
          exporter="dynamo"),
    steps("steps_tiled", "heads are tiled, not repeated", Tiled),
    steps("steps_gemm", "one head: Gemm", functools.partial(Stepwise, "general"), key_heads=1, value_heads=1),
    packed("split"),
    packed("slices"),
    no_time(),
    gated("steps_gates", Stepwise("product"), 2, fixed=False, why="softplus and sigmoid with weights before the rule"),
    gated("steps_gates_fixed", Stepwise("product"), 2, fixed=True, why="softplus and sigmoid written out, no weights"),
    gated("chunk_gates", Chunked(4), 8, fixed=False, why="softplus and sigmoid with weights before a chunk rule"),
)  # fmt: skip

LOOPS = (
    loop("loop_joined", "outputs grow by concatenation", functools.partial(Looped, "joined")),
    loop("loop_while", "a while loop", functools.partial(Looped, "while")),
    loop("loop_cell", "both results in one flat tensor", Cell),
    loop("loop_padded", "padding guarded by an If", functools.partial(Looped, "padded")),
    loop("scan_dynamo", "torch's scan", Scanned, exporter="dynamo", opset=20),
    with_extra("nested_loop", Repeated, {"rounds": torch.zeros(3)}, 4, why="the rule inside another loop",
               exit=3, codes=["inside-body"], expect="either"),
    with_extra("nested_if", Chosen, {"active": torch.ones(1, dtype=torch.bool)}, 1, why="the rule inside a branch",
               exit=3, codes=["inside-body"], expect="either"),
)  # fmt: skip


def value_major() -> Member:
    """A state [B, H, V, K]."""
    given = operands(2)
    given["state"] = given["state"].transpose(2, 3).contiguous()
    build = functools.partial(Stepwise, "value-major")
    return Member("steps_value_major", build, given, "a state [B, H, V, K]", tokens=2)


SPELLINGS = (*CHUNKS, *STEPS, value_major(), *LOOPS)
