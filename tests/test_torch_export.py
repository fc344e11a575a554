"""Both ways to a fused file give the same nodes: export and fuse, or export with deltafuse.torch."""

from __future__ import annotations

import functools
import logging
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35

import deltafuse
import deltafuse.torch
from deltafuse import UserError
from deltafuse.lint import lint
from expressions import expressions, fused
from qwen_models import exporting

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 32
NAMES = ["query", "key", "value", "g", "beta", "state"]
#: Chunks that make small graphs of the written-out rule; the nodes do not depend on them.
CHUNK = 8


class Layer(torch.nn.Module):
    """One call of the rule with something before it and behind."""

    def __init__(self, form, rule, *, normalise=True):
        super().__init__()
        self.rule = functools.partial(rule, chunk_size=CHUNK) if form == "chunk" else rule
        self.normalise = normalise

    def forward(self, query, key, value, g, beta, state=None):
        out, last = self.rule(
            query, key, value, -torch.nn.functional.softplus(g), torch.sigmoid(beta), initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=self.normalise,
        )  # fmt: skip
        return torch.tanh(out), last


def arguments(tokens, batch=1, state=True, dtype=torch.float32):
    random = torch.Generator().manual_seed(3)
    shapes = [
        (batch, tokens, KEY_HEADS, KEY_DIM), (batch, tokens, KEY_HEADS, KEY_DIM),
        (batch, tokens, VALUE_HEADS, VALUE_DIM), (batch, tokens, VALUE_HEADS), (batch, tokens, VALUE_HEADS),
        (batch, VALUE_HEADS, KEY_DIM, VALUE_DIM),
    ]  # fmt: skip
    given = [torch.rand(shape, generator=random) for shape in shapes]
    given = [tensor if index in (3, 5) else tensor.to(dtype) for index, tensor in enumerate(given)]
    return tuple(given if state else given[:5])


def export(layer, given, path, exporter, *, axes=(), table=None, optimize=False):
    """By either exporter; ``axes`` of the first five operands are dynamic."""
    names, dynamic = NAMES[: len(given)], {axis: f"axis{axis}" for axis in axes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            torch.onnx.export(
                layer, given, str(path), dynamo=False, input_names=names, output_names=["out", "last"],
                opset_version=18, dynamic_axes=dict.fromkeys(names[:5], dynamic) if axes else None,
            )  # fmt: skip
            return path
        sizes = {axis: torch.export.Dim(name, min=2, max=4000) for axis, name in dynamic.items()}
        shapes = ([sizes] * 5 + [{axis: size for axis, size in sizes.items() if not axis}])[: len(given)]
        torch.onnx.export(
            layer, given, str(path), dynamo=True, input_names=names, output_names=["out", "last"], opset_version=18,
            dynamic_shapes=tuple(shapes) if axes else None, custom_translation_table=table, optimize=optimize,
            verbose=False,
        )  # fmt: skip
    return path


@pytest.fixture(autouse=True)
def quiet():
    """Torch logs which of its optional packages are missing."""
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)


OURS = {
    "chunk": deltafuse.torch.chunk_gated_delta_rule,
    "recurrent": deltafuse.torch.recurrent_gated_delta_rule,
}
THEIRS = {"chunk": qwen35.torch_chunk_gated_delta_rule, "recurrent": qwen35.torch_recurrent_gated_delta_rule}


def both(form, exporter, target, folder, given, *, axes=(), normalise=True, op=None):
    """The file that fuse makes of the written-out rule, and the one that is exported with the nodes in it."""
    plain = Layer(form, THEIRS[form], normalise=normalise)
    with exporting(qwen35):
        unfused = export(plain, given, folder / "unfused.onnx", exporter, axes=axes)
    report = deltafuse.fuse(unfused, folder / "fused.onnx", target=target, op=op)
    assert report.exit == 0, report
    layer = Layer(form, OURS[form], normalise=normalise)
    with deltafuse.torch.use_custom_gated_delta_rule(layer, target, op) as table:
        export(layer, given, folder / "exported.onnx", exporter, axes=axes, table=table)
    return folder / "fused.onnx", folder / "exported.onnx"


def assert_same_nodes(first, second):
    """Fused nodes with the same domain, type, attributes and operands; graph outputs computed alike."""
    models = [onnx.load(path) for path in (first, second)]
    values = [expressions(model) for model in models]
    nodes = [fused(model) for model in models]
    assert len(nodes[0]) == len(nodes[1]) > 0
    for one, other in zip(*nodes, strict=True):
        assert (one.op_type, one.domain) == (other.op_type, other.domain)
        described = [{a.name: (a.type, onnx.helper.get_attribute_value(a)) for a in node.attribute} for node in (one, other)]
        assert described[0] == described[1]
        operands = [[found[name] for name in node.input] for found, node in zip(values, (one, other), strict=True)]
        assert operands[0] == operands[1]
    outputs = [[found[value.name] for value in model.graph.output] for found, model in zip(values, models, strict=True)]
    assert outputs[0] == outputs[1]


def check_runs(path, layer, given, folder):
    """Lint finds nothing, and the lowered file computes what eager does."""
    report = lint(path)
    assert (report.nodes, report.findings) == (1, ())
    deltafuse.lower(path, folder / "lowered.onnx", rounding=False, linear_attention="always")
    session = onnxruntime.InferenceSession(folder / "lowered.onnx")
    feeds = dict(zip((value.name for value in session.get_inputs()), given, strict=True))
    found = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    for one, other in zip(found, layer(*given), strict=True):
        assert one.dtype == other.numpy().dtype
        half = one.dtype == np.float16
        np.testing.assert_allclose(one, other, rtol=1e-2 if half else 1e-5, atol=1e-3 if half else 1e-5)


#: form, tokens, state, normalise, axes, type
CASES = {
    "chunk": ("chunk", 12, True, True, (), torch.float32),
    "chunk-dynamic": ("chunk", 12, True, True, (1,), torch.float32),
    "chunk-no-state": ("chunk", 12, False, True, (), torch.float32),
    "chunk-no-norm": ("chunk", 12, True, False, (), torch.float32),
    "recurrent": ("recurrent", 1, True, True, (), torch.float32),
    "recurrent-3": ("recurrent", 3, True, True, (), torch.float32),
    "recurrent-no-state": ("recurrent", 2, False, True, (), torch.float32),
    "recurrent-half": ("recurrent", 1, True, True, (), torch.float16),
}


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
@pytest.mark.parametrize("case", CASES)
def test_both_routes_give_the_same_nodes(case, target, exporter, tmp_path):
    form, tokens, state, normalise, axes, dtype = CASES[case]
    given = arguments(tokens, state=state, dtype=dtype)
    files = both(form, exporter, target, tmp_path, given, axes=axes, normalise=normalise)
    assert_same_nodes(*files)
    check_runs(files[1], Layer(form, OURS[form], normalise=normalise), given, tmp_path)
