"""deltafuse.torch in whole models: what is replaced and given back, and that both routes agree there too."""

from __future__ import annotations

import functools
import logging
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.olmo_hybrid import OlmoHybridConfig, OlmoHybridForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35

import deltafuse
import deltafuse.torch
from deltafuse import UserError
from deltafuse.lint import lint
from deltafuse.torch import rule
from expressions import expressions, fused
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

SIZES = Sizes(layers=("linear_attention", "full_attention", "linear_attention"))
FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
#: wrapper, its inputs, their names, axes that are dynamic (not the batch, and not the step)
PARTS = {
    "prefill": (Prefill, prefill_inputs(SIZES, 1, 12), PREFILL_INPUTS, PREFILL_AXES),
    "decode": (Decode, decode_inputs(SIZES, 1, 5, torch.float32), DECODE_INPUTS, DECODE_AXES),
}


@pytest.fixture(scope="module")
def model():
    return build(SIZES)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """The file that a part is exported to, with fused nodes for a target or, without one, as it is; each once."""
    folder = tmp_path_factory.mktemp("exported")

    def of(part, target=None):
        path = folder / f"{part}.{target}.onnx"
        if not path.exists():
            how = exporting(qwen35, chunk_size=8)
            with how if target is None else deltafuse.torch.use_custom_gated_delta_rule(model, target):
                export(model, part, path)
        return path

    return of


def export(model, part, path):
    wrapper, given, names, axes = PARTS[part]
    kept = {name: {i: axis for i, axis in dims.items() if axis not in ("batch", "step")} for name, dims in axes.items()}
    torchscript(wrapper(model).eval(), given, path, inputs=names, outputs=OUTPUTS, opset=18, axes=kept)
    return path


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
@pytest.mark.parametrize("part", PARTS)
def test_both_routes_give_the_same_nodes_in_a_model(exported, part, target, tmp_path):
    # The convolution in front of the rule is no part of the export-time route.
    report = deltafuse.fuse(exported(part), tmp_path / "fused.onnx", target=target, rules=["gated_delta_rule"])
    assert report.exit == 0
    models = [onnx.load(path) for path in (tmp_path / "fused.onnx", exported(part, target))]
    # The model has a Reshape of its own in front of the rule. With packed heads it is one of the two that are needed,
    # and fuse starts before it.
    values = [expressions(one, views="ignored" if target == "ort" else "merged") for one in models]
    nodes = [fused(one) for one in models]
    assert len(nodes[0]) == len(nodes[1]) == 2
    for one, other in zip(*nodes, strict=True):
        assert (one.op_type, one.domain) == (other.op_type, other.domain)
        assert {a.name: a for a in one.attribute} == {a.name: a for a in other.attribute}
    # Behind the first layer the routes differ: there the source's own layout of the result is still in the graph.
    operands = [[found[name] for name in node[0].input] for found, node in zip(values, nodes, strict=True)]
    assert operands[0] == operands[1]


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
@pytest.mark.parametrize("part", PARTS)
def test_a_model_runs_as_it_does_in_torch(model, exported, part, target, tmp_path):
    path = exported(part, target)
    report = lint(path)
    assert (report.nodes, report.findings) == (2, ())
    deltafuse.lower(path, tmp_path / "lowered.onnx", rounding=False, linear_attention="always")
    session = onnxruntime.InferenceSession(tmp_path / "lowered.onnx")
    wrapper, _, names, _ = PARTS[part]
    other = {
        "prefill": lambda: prefill_inputs(SIZES, 1, 70),
        "decode": lambda: decode_inputs(SIZES, 1, 9, torch.float32),
    }
    for given in (PARTS[part][1], other[part]()):
        found = session.run(None, dict(zip(names, (tensor.numpy() for tensor in given), strict=True)))
        for one, two in zip(found, wrapper(model).eval()(*given), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


def test_decode_takes_the_operator_for_few_tokens(model, tmp_path):
    path = tmp_path / "exported.onnx"
    with deltafuse.torch.use_custom_gated_delta_rule(model):
        export(model, "decode", path)
    kinds = [{a.name: a.s for a in node.attribute}["type"] for node in fused(onnx.load(path))]
    assert kinds == [b"RecurrentGatedDeltaRule"] * 2


def test_a_model_by_way_of_torch_export(model, tmp_path):
    wrapper, given, names, axes = PARTS["decode"]
    free = torch.export.Dim.DYNAMIC
    kept = [
        dict.fromkeys((i for i, axis in axes[name].items() if axis not in ("batch", "step")), free) for name in names
    ]
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    path, module = tmp_path / "exported.onnx", wrapper(model).eval()
    with deltafuse.torch.use_custom_gated_delta_rule(model) as table, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, given, str(path), dynamo=True, custom_translation_table=table, dynamic_shapes=tuple(kept),
            input_names=names, output_names=OUTPUTS, opset_version=18, verbose=False, external_data=False,
        )  # fmt: skip
    report = lint(path)
    assert (report.nodes, report.findings) == (2, ())
    lowered = deltafuse.lower(path, tmp_path / "lowered.onnx", rounding=False)
    assert [node.op for node in lowered.lowered] == ["RecurrentGatedDeltaRule"] * 2
    session = onnxruntime.InferenceSession(tmp_path / "lowered.onnx")
    later = decode_inputs(SIZES, 1, 9, torch.float32)
    found = session.run(None, dict(zip(names, (tensor.numpy() for tensor in later), strict=True)))
    for one, two in zip(found, module(*later), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "attn_implementation": "eager",
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
FAMILIES = {
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**COMMON, **EXPERTS, head_dim=16, shared_expert_intermediate_size=16)
    ),
    "olmo_hybrid": lambda: OlmoHybridForCausalLM(
        OlmoHybridConfig(**COMMON, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_call_the_functions_too(family, monkeypatch):
    torch.manual_seed(0)
    other = FAMILIES[family]().eval()
    ids = torch.randint(0, 64, (2, 70))
    called = []
    real = rule.symbolic.compute
    monkeypatch.setattr(rule.symbolic, "compute", lambda call, given: called.append(call.form) or real(call, given))
    with torch.no_grad():
        before = other(ids).logits
        with deltafuse.torch.use_custom_gated_delta_rule(other):
            assert (other(ids).logits - before).abs().max() < 1e-5 * before.abs().max()
    assert called == ["chunk"]


def test_functions_are_given_back(model):
    before = [getattr(qwen35, name) for name in FUNCTIONS]
    with deltafuse.torch.use_custom_gated_delta_rule(model):
        assert qwen35.torch_chunk_gated_delta_rule is deltafuse.torch.chunk_gated_delta_rule
        assert qwen35.torch_recurrent_gated_delta_rule is deltafuse.torch.recurrent_gated_delta_rule
    assert [getattr(qwen35, name) for name in FUNCTIONS] == before


def test_functions_are_given_back_after_an_error(model):
    before = [getattr(qwen35, name) for name in FUNCTIONS]
    with pytest.raises(ZeroDivisionError), deltafuse.torch.use_custom_gated_delta_rule(model):
        _ = 1 / 0
    assert [getattr(qwen35, name) for name in FUNCTIONS] == before


def chunk_gated_delta_rule(*given, **more):
    """Stands for the function of a package of kernels."""
    raise AssertionError("it was to be replaced")


def other_function(*given):
    return given


class Older(nn.Module):
    """Layers of older releases hold their functions themselves."""

    recurrent = staticmethod(qwen35.torch_recurrent_gated_delta_rule)

    def __init__(self):
        super().__init__()
        self.chunk_gated_delta_rule = chunk_gated_delta_rule
        self.rule = functools.partial(chunk_gated_delta_rule, scale=0.25)
        self.other = other_function


def test_functions_are_found_wherever_they_are_held():
    first, second = Older(), Older()
    model = nn.ModuleList([first, second])
    held = Older.__dict__["recurrent"]
    with deltafuse.torch.use_custom_gated_delta_rule(model):
        for layer in (first, second):
            assert layer.chunk_gated_delta_rule is deltafuse.torch.chunk_gated_delta_rule
            assert layer.rule.func is deltafuse.torch.chunk_gated_delta_rule
            assert layer.rule.keywords == {"scale": 0.25}
            assert layer.recurrent is deltafuse.torch.recurrent_gated_delta_rule
            assert layer.other is other_function
        assert globals()["chunk_gated_delta_rule"] is deltafuse.torch.chunk_gated_delta_rule
    assert Older.__dict__["recurrent"] is held
    assert first.chunk_gated_delta_rule is second.chunk_gated_delta_rule is globals()["chunk_gated_delta_rule"]
    with pytest.raises(AssertionError, match="was to be replaced"):
        first.rule()


def test_a_model_without_the_functions():
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="no layer of Linear calls") as raised:
        deltafuse.torch.use_custom_gated_delta_rule(model).__enter__()
    assert raised.value.code == "no-rule-function"


def test_an_unknown_target(model):
    with pytest.raises(UserError, match="there is no target named 'nvidia'") as raised:
        deltafuse.torch.use_custom_gated_delta_rule(model, "nvidia").__enter__()
    assert raised.value.code == "unknown-target"
    with pytest.raises(UserError, match="there is no target named 'nvidia'"):
        deltafuse.torch.translations("nvidia")


def test_an_option_that_the_target_does_not_take(model):
    before = [getattr(qwen35, name) for name in FUNCTIONS]
    for options in ({"allow_bf16_to_fp16": True}, {"op": "rgdr"}, {"signature": "8-input"}):
        with pytest.raises(UserError, match="target ort has no ") as raised:
            deltafuse.torch.use_custom_gated_delta_rule(model, "ort", **options).__enter__()
        assert raised.value.code == "option"
    with pytest.raises(UserError, match="takes no bf16; give --boundary fp16"):
        deltafuse.torch.translations(boundary="bf16")
    assert [getattr(qwen35, name) for name in FUNCTIONS] == before
