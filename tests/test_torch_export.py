"""Both ways to a fused file give the same nodes: export and fuse, or export with deltafuse.torch."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

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
from doc_blocks import blocks
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
        self.rate = torch.nn.Parameter(torch.linspace(-3, -1, VALUE_HEADS), requires_grad=False)

    def forward(self, query, key, value, g, beta, state=None):
        out, last = self.rule(
            query, key, value, -self.rate.exp() * torch.nn.functional.softplus(g), torch.sigmoid(beta),
            initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=self.normalise,
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
    given[1] = torch.nn.functional.normalize(given[1], dim=-1)
    given = [tensor if index in (3, 5) else tensor.to(dtype) for index, tensor in enumerate(given)]
    return tuple(given if state else given[:5])


def export(layer, given, path, exporter, *, axes=(), table=None, optimize=False, outputs=2):
    """By either exporter; ``axes`` are dynamic: 0 the batch, 1 the tokens."""
    names = NAMES[: len(given)]
    named = {name: {axis: f"axis{axis}" for axis in axes if not axis or name != "state"} for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            torch.onnx.export(
                layer, given, str(path), dynamo=False, input_names=names, output_names=["out", "last"][:outputs],
                opset_version=18, dynamic_axes=named if axes else None,
            )  # fmt: skip
            return path
        sizes = {f"axis{axis}": torch.export.Dim(f"axis{axis}", min=2, max=4000) for axis in axes}
        shapes = [{axis: sizes[name] for axis, name in dims.items()} for dims in named.values()]
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


@functools.cache
def written_out(form, exporter, asked, axes, normalise):
    """What an exporter makes of the written-out rule; once for all targets."""
    with exporting(qwen35), TemporaryDirectory() as folder:
        layer = Layer(form, THEIRS[form], normalise=normalise)
        return export(layer, arguments(*asked), Path(folder) / "model.onnx", exporter, axes=axes).read_bytes()


def both(form, exporter, target, folder, asked, *, axes=(), normalise=True, op=None):
    """The file that fuse makes of the written-out rule, and the one that is exported with the nodes in it."""
    (folder / "unfused.onnx").write_bytes(written_out(form, exporter, asked, axes, normalise))
    report = deltafuse.fuse(folder / "unfused.onnx", folder / "fused.onnx", target=target, op=op)
    assert report.exit == 0, report
    layer = Layer(form, OURS[form], normalise=normalise)
    with deltafuse.torch.use_custom_gated_delta_rule(layer, target, op) as table:
        export(layer, arguments(*asked), folder / "exported.onnx", exporter, axes=axes, table=table)
    return folder / "fused.onnx", folder / "exported.onnx"


def described(node):
    return {a.name: (a.type, onnx.helper.get_attribute_value(a)) for a in node.attribute}


def assert_same_nodes(first, second):
    """Fused nodes with the same domain, type, attributes and operands; graph outputs computed alike."""
    models = [onnx.load(path) for path in (first, second)]
    values = [expressions(model) for model in models]
    nodes = [fused(model) for model in models]
    assert len(nodes[0]) == len(nodes[1]) > 0
    for one, other in zip(*nodes, strict=True):
        assert (one.op_type, one.domain) == (other.op_type, other.domain)
        assert described(one) == described(other)
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
        half = given[0].dtype == torch.float16
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


ROUTES = [(case, "torchscript") for case in CASES]
ROUTES += [(case, "dynamo") for case in ("chunk-dynamic", "recurrent", "recurrent-no-state", "recurrent-half")]


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
@pytest.mark.parametrize(("case", "exporter"), ROUTES)
def test_both_routes_give_the_same_nodes(case, target, exporter, tmp_path):
    form, tokens, state, normalise, axes, dtype = CASES[case]
    asked = tokens, 1, state, dtype
    files = both(form, exporter, target, tmp_path, asked, axes=axes, normalise=normalise)
    assert_same_nodes(*files)
    check_runs(files[1], Layer(form, OURS[form], normalise=normalise), arguments(*asked), tmp_path)


def test_force_the_operator(tmp_path):
    files = both("recurrent", "torchscript", "ascend-310p", tmp_path, (1,), op="cgdr")
    assert_same_nodes(*files)
    (node,) = fused(onnx.load(files[1]))
    assert described(node)["type"][1] == b"ChunkGatedDeltaRule"


def test_a_batch_of_any_size(tmp_path):
    files = both("recurrent", "torchscript", "ort", tmp_path, (1, 3), axes=(0,))
    assert_same_nodes(*files)
    for batch in (1, 5):
        check_runs(files[1], Layer("recurrent", OURS["recurrent"]), arguments(1, batch=batch), tmp_path)


def test_optimized_by_the_exporter(tmp_path):
    given, layer = arguments(12), Layer("chunk", OURS["chunk"])
    path = tmp_path / "exported.onnx"
    with deltafuse.torch.use_custom_gated_delta_rule(layer) as table:
        export(layer, given, path, "dynamo", table=table, optimize=True)
    check_runs(path, layer, given, tmp_path)
    declared = {value.name: value.type.tensor_type.elem_type for value in onnx.load(path).graph.value_info}
    (node,) = fused(onnx.load(path))
    assert [declared[name] for name in node.output] == [onnx.TensorProto.FLOAT16] * 2


def test_a_table_without_the_context(tmp_path):
    given, layer = arguments(12), Layer("chunk", OURS["chunk"])
    table = deltafuse.torch.translations("ort")
    path = export(layer, given, tmp_path / "exported.onnx", "dynamo", table=table)
    assert [node.op_type for node in fused(onnx.load(path))] == ["LinearAttention"]


def test_the_scale_is_the_calls(tmp_path):
    layer = Layer("recurrent", functools.partial(OURS["recurrent"], scale=0.3))
    path = tmp_path / "exported.onnx"
    with deltafuse.torch.use_custom_gated_delta_rule(layer):
        export(layer, arguments(1), path, "torchscript")
    (node,) = fused(onnx.load(path))
    assert described(node)["scale_value"][1] == np.float32(0.3)
    check_runs(path, layer, arguments(1), tmp_path)


def test_a_final_state_that_is_not_asked_for(tmp_path):
    layer = Layer("chunk", OURS["chunk"])
    layer.forward = lambda *given: layer.rule(*given[:5])[0]
    with deltafuse.torch.use_custom_gated_delta_rule(layer):
        export(layer, arguments(12, state=False), tmp_path / "exported.onnx", "torchscript", outputs=1)
    assert len(onnx.load(tmp_path / "exported.onnx").graph.output) == 1


#: code, what the message says, target, operator, form, arguments, dynamic axes
REFUSED = {
    "batch": ("static-batch", "takes one sequence", "ascend-310p", None, "chunk", arguments(12, batch=2), ()),
    "dynamic": ("static-batch", "dynamic axes", "ascend-310p", None, "chunk", arguments(12, batch=3), (0,)),
    "tokens": ("rgdr-tokens", "between 1 and 8, here it is 9", "ascend-310p", "rgdr", "recurrent", arguments(9), ()),
    "bfloat16": ("bf16-boundary", "bfloat16", "ascend-310p", None, "chunk", arguments(3, dtype=torch.bfloat16), ()),
    "opset": ("opset-below", "27 or newer", "onnx", None, "chunk", arguments(12), ()),
    "operator": ("option", "no operator 'cgdr'", "ort", "cgdr", "chunk", arguments(12), ()),
}


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_target_cannot_take(case, exporter, tmp_path):
    code, text, target, op, form, given, axes = REFUSED[case]
    layer = Layer(form, OURS[form])
    with (
        pytest.raises(UserError, match=text) as raised,
        deltafuse.torch.use_custom_gated_delta_rule(layer, target, op) as table,
    ):
        export(layer, given, tmp_path / "exported.onnx", exporter, axes=axes, table=table)
    assert raised.value.code == code


def test_a_batch_that_was_traced_as_one_but_is_dynamic(tmp_path):
    layer = Layer("recurrent", OURS["recurrent"])
    with pytest.raises(UserError, match="may be") as raised, deltafuse.torch.use_custom_gated_delta_rule(layer):
        export(layer, arguments(3), tmp_path / "exported.onnx", "torchscript", axes=(0,))
    assert raised.value.code == "static-batch"


def test_a_table_alone_names_the_limit_as_the_cause(tmp_path):
    layer, table = Layer("chunk", OURS["chunk"]), deltafuse.torch.translations("ascend-310p")
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        export(layer, arguments(12, batch=2), tmp_path / "exported.onnx", "dynamo", table=table)
    causes, error = [], raised.value
    while error is not None:
        causes.append(error)
        error = error.__cause__
    assert [cause.code for cause in causes if isinstance(cause, UserError)] == ["static-batch"]


def test_no_size_of_a_dynamic_axis_goes_into_the_file(tmp_path):
    layer = Layer("recurrent", OURS["recurrent"])
    with deltafuse.torch.use_custom_gated_delta_rule(layer):
        path = export(layer, arguments(3), tmp_path / "exported.onnx", "torchscript", axes=(1,))
    (node,) = fused(onnx.load(path))
    assert described(node)["type"][1] == b"ChunkGatedDeltaRule"
    for tokens in (1, 3, 70):
        check_runs(path, layer, arguments(tokens), tmp_path)


def test_the_examples_of_the_documentation(tmp_path, monkeypatch):
    first, own = (block.text for block in blocks("docs/export-time.md", "python"))
    assert (first.count("torch.onnx.export("), own.count("torch.onnx.export(")) == (2, 2)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(first, {"model": Layer("chunk", OURS["chunk"]), "args": arguments(12)})
        exec(own, {})
    assert [node.op_type for node in fused(onnx.load("prefill.onnx"))] == ["LinearAttention"]
    assert [node.op_type for node in fused(onnx.load("own-ort.onnx"))] == ["LinearAttention"]
    (node,) = fused(onnx.load("own-ascend.onnx"))
    assert described(node)["type"][1] == b"ChunkGatedDeltaRule"
