"""From a checkpoint to a verified pair: what scripts/export_unfused.py writes, and that it can be fused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_5 import modeling_qwen3_5

import export_checkpoint
import export_graphs
import export_unfused
from doc_blocks import ROOT, blocks, steps
from doc_blocks import run as follow
from qwen_models import Sizes, build, exporting, prefill_inputs

SIZES = Sizes()
#: One layer of each kind: torch.export takes many times as long as TorchScript, and as long again for each layer.
SHORT = Sizes(layers=("linear_attention", "full_attention"))
IMAGE = 60
#: Two chunks, as for prompts of 11 to 20 tokens.
SMALL = ("--chunk-size", 10, "--dummy-seq-len", 14)
#: Dynamic axes before and after fusing; positions of a model that sees images have one axis more in front.
PREFILL = {
    "input_ids": ({0: "batch", 1: "seq_len"}, {1: "seq_len"}),
    "attention_mask": ({0: "batch", 1: "seq_len"}, {1: "seq_len"}),
    "position_ids": ({0: "batch", 1: "seq_len"}, {1: "seq_len"}),
    "logits": ({0: "batch", 1: "seq_len"}, {1: "seq_len"}),
    "present_conv_states": ({1: "batch"}, {}),
    "present_recurrent_states": ({1: "batch"}, {}),
    "present_kv_cache": ({1: "batch", 3: "seq_len"}, {3: "seq_len"}),
}
IMAGES = {
    "position_ids": ({1: "batch", 2: "seq_len"}, {2: "seq_len"}),
    "image_embeds": ({0: "num_image_tokens"}, {0: "num_image_tokens"}),
}
DECODE = {
    "input_ids": ({0: "batch", 1: "step"}, {}),
    "attention_mask": ({0: "batch", 1: "total_seq_len"}, {1: "total_seq_len"}),
    "position_ids": ({0: "batch", 1: "step"}, {}),
    "past_conv_states": ({1: "batch"}, {}),
    "past_recurrent_states": ({1: "batch"}, {}),
    "past_kv_cache": ({1: "batch", 3: "past_seq_len"}, {3: "past_seq_len"}),
    "logits": ({0: "batch", 1: "step"}, {}),
    "present_conv_states": ({1: "batch"}, {}),
    "present_recurrent_states": ({1: "batch"}, {}),
    "present_kv_cache": ({1: "batch", 3: "total_seq_len"}, {3: "total_seq_len"}),
}
TABLES = {"prefill": PREFILL, "decode": DECODE}


def export(*arguments):
    """Runs the script in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_unfused.main([str(argument) for argument in arguments])


def axes(path):
    """Dynamic axes of every graph input and output."""
    graph = onnx.load(path, load_external_data=False).graph
    return {
        value.name: {i: dim.dim_param for i, dim in enumerate(value.type.tensor_type.shape.dim) if dim.dim_param}
        for value in (*graph.input, *graph.output)
    }


def fuse_all(fuse, path, sites=3):
    """Fuses, verifies and rolls back a model whose linear layers are all to be fused."""
    fused, back = path.with_name("fused.onnx"), path.with_name("back.onnx")
    done = fuse(path, "-o", fused, "--json")
    assert done.exit == 0, done.out
    assert [site["status"] for site in done.document["sites"]] == ["fused"] * sites
    verdict = fuse("verify", path, fused)
    assert verdict.exit == 0, verdict.out
    assert fuse("rollback", fused, "-o", back).exit == 0
    assert back.read_bytes() == path.read_bytes()
    return fused


def matrix_types(path):
    """Element types of the matrices among a model's weights."""
    return {tensor.data_type for tensor in onnx.load(path).graph.initializer if len(tensor.dims) == 2}


def run(path, feeds):
    """What onnxruntime makes of a model, by output."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    values = session.run(None, {name: np.asarray(value) for name, value in feeds.items()})
    return dict(zip((output.name for output in session.get_outputs()), values, strict=True))


def test_the_road_of_the_documentation(tmp_path):
    export_line, *others = [step for block in blocks("docs/ascend.md", "bash") for step in steps(block.text)]
    # Chunks of the model's own size make a graph of six times as many nodes, all of them alike.
    commands = [" ".join(map(str, (export_line, *SMALL))), *others]
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    # The converter is not to be had here: tests/test_convert_check.py looks at how the script treats one.
    converter = tmp_path / "tools/converter_lite"
    converter.parent.mkdir()
    converter.write_text("#!/usr/bin/env bash\necho CONVERT RESULT SUCCESS:0\n")
    converter.chmod(0o755)
    done = follow(commands, tmp_path, [converter.parent])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("converted")] == [
        "converted: mindir/prefill", "converted: mindir/decode"
    ]
    for component, table in TABLES.items():
        model, fused, back = (
            tmp_path / name / component / "model.onnx" for name in ("qwen", "qwen-fused", "qwen-back")
        )
        assert str(model.relative_to(tmp_path)) in done.stdout
        assert axes(model) == {name: before for name, (before, _) in table.items()}
        assert axes(fused) == {name: after for name, (_, after) in table.items()}
        assert sum(node.op_type == "Custom" for node in onnx.load(fused).graph.node) == 3
        assert back.read_bytes() == model.read_bytes()
        assert matrix_types(model) == {onnx.TensorProto.FLOAT16}


def test_torchscript_exports_in_float32(fuse, tmp_path):
    export("--tiny", "--output-dir", tmp_path, "--dtype", "fp32", "--opset", 17, *SMALL)
    for component, table in TABLES.items():
        path = tmp_path / component / "model.onnx"
        assert axes(path) == {name: before for name, (before, _) in table.items()}
        assert axes(fuse_all(fuse, path)) == {name: after for name, (_, after) in table.items()}
        assert matrix_types(path) == {onnx.TensorProto.FLOAT}
        assert onnx.load(path).opset_import[0].version == 17


def test_dynamo_export_of_a_tiny_prefill(fuse, tmp_path, monkeypatch):
    monkeypatch.setattr(export_checkpoint, "Sizes", lambda: SHORT)
    options = ("--exporter", "dynamo", "--component", "prefill", "--chunk-size", 4, "--dummy-seq-len", 6)
    export("--tiny", "--output-dir", tmp_path, *options)
    assert [path.name for path in tmp_path.iterdir()] == ["prefill"]
    path = tmp_path / "prefill/model.onnx"
    assert axes(path) == {name: before for name, (before, _) in PREFILL.items()}
    assert axes(fuse_all(fuse, path, sites=1)) == {name: after for name, (_, after) in PREFILL.items()}


def test_dynamo_export_of_a_decode_with_its_weights_in_a_file(fuse, tmp_path, monkeypatch):
    monkeypatch.setattr(export_graphs, "LARGE", 0)
    export("--tiny", "--output-dir", tmp_path, "--exporter", "dynamo", "--component", "decode", "--dtype", "fp32")
    path = tmp_path / "decode/model.onnx"
    assert (tmp_path / "decode/model.onnx.data").stat().st_size > 100_000 > path.stat().st_size / 10
    # One token is all that this exporter's graph is for, and it says so.
    steps = {name: {i: dim for i, dim in before.items() if dim != "step"} for name, (before, _) in DECODE.items()}
    assert axes(path) == steps
    assert axes(fuse_all(fuse, path)) == {name: after for name, (_, after) in DECODE.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny models of all families, saved as transformers saves them."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoints")
    text = {key: value for key, value in SIZES.config().to_dict().items() if key not in ("model_type", "architectures")}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": SIZES.hidden}
    tokens = {f"{name}_token_id": IMAGE + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    images = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **tokens))
    images.model.language_model.load_state_dict(build(SIZES).model.state_dict())
    build(SIZES).save_pretrained(folder / "text")
    images.save_pretrained(folder / "images")
    Qwen3NextForCausalLM(Qwen3NextConfig(**text, **experts, shared_expert_intermediate_size=16)).save_pretrained(
        folder / "next"
    )
    return folder


def two_steps(folder, feeds, token):
    """Logits of a prefill, and of the token after it."""
    first = run(folder / "prefill/model.onnx", feeds)
    states = {name.replace("present", "past"): value for name, value in first.items() if name != "logits"}
    mask = np.asarray(feeds["attention_mask"])
    positions = np.asarray(feeds["position_ids"])[..., -1:] + 1
    later = {"input_ids": token, "attention_mask": np.append(mask, [[1]], axis=1), "position_ids": positions}
    return np.concatenate([first["logits"], run(folder / "decode/model.onnx", later | states)["logits"]], axis=1)


@pytest.mark.parametrize("family", ["text", "next"])
def test_a_checkpoint_of_text(fuse, checkpoints, tmp_path, family):
    export("--model-id", checkpoints / family, "--output-dir", tmp_path, "--dtype", "fp32", *SMALL)
    ids, mask, _ = prefill_inputs(SIZES, batch=1, tokens=15)
    # Padding in front is harmless: it leaves no trace in the states.
    mask[:, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    feeds = {"input_ids": ids[:, :14], "attention_mask": mask[:, :14], "position_ids": positions[:, :14]}
    model = AutoModelForCausalLM.from_pretrained(checkpoints / family)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions).logits
    logits = two_steps(tmp_path, feeds, ids[:, 14:])
    np.testing.assert_allclose(logits[:, 3:], expected[:, 3:], atol=2e-5)
    for component, table in TABLES.items():
        path = tmp_path / component / "model.onnx"
        assert axes(path) == {name: before for name, (before, _) in table.items()}
        assert axes(fuse_all(fuse, path)) == {name: after for name, (_, after) in table.items()}


def test_a_checkpoint_that_sees_images(fuse, checkpoints, tmp_path):
    export("--model-id", checkpoints / "images", "--output-dir", tmp_path, "--dtype", "fp32", *SMALL)
    ids, mask, _ = prefill_inputs(SIZES, batch=1, tokens=15)
    ids[ids >= IMAGE] = 1
    ids[:, [2, 3, 4, 9]] = IMAGE
    rows = torch.randn(4, SIZES.hidden)
    positions = torch.arange(15).expand(4, 1, 15).clone()
    positions[1:, :, 2:5] = torch.tensor([[2, 2, 2], [2, 2, 3], [2, 3, 2]])[:, None]
    feeds = {"input_ids": ids[:, :14], "attention_mask": mask[:, :14], "position_ids": positions[..., :14]}
    model = Qwen3_5ForConditionalGeneration.from_pretrained(checkpoints / "images")
    seen = BaseModelOutputWithPooling(pooler_output=(rows[:3], rows[3:]))
    with torch.no_grad():
        encoded = {"image": seen}
        expected = model(ids, attention_mask=mask, position_ids=positions, mm_encoder_outputs=encoded).logits
    logits = two_steps(tmp_path, feeds | {"image_embeds": rows}, ids[:, 14:])
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    tables = {"prefill": PREFILL | IMAGES, "decode": DECODE | {"position_ids": ({1: "batch", 2: "step"}, {})}}
    for component, table in tables.items():
        path = tmp_path / component / "model.onnx"
        assert axes(path) == {name: before for name, (before, _) in table.items()}
        assert axes(fuse_all(fuse, path)) == {name: after for name, (_, after) in table.items()}
        names = [tensor.name for tensor in onnx.load(path).graph.initializer]
        assert not [name for name in names if "visual" in name]


def test_a_prompt_without_images_needs_no_rows():
    hidden = torch.randn(1, 4, 8)
    none = torch.zeros(1, 4, dtype=torch.bool)
    assert torch.equal(export_graphs.with_images(hidden, none, torch.empty(0, 8)), hidden)


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_the_exporter_of_transformers(fuse, tmp_path, decode):
    model = build(SHORT)
    ids, mask, _ = prefill_inputs(SHORT, batch=1, tokens=12)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
    if decode:
        inputs |= {"input_ids": ids[:, 11:], "cache": model(ids[:, :11], use_cache=True).cache}
    with exporting(modeling_qwen3_5, chunk_size=4), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=False, opset_version=20))
    exported.save_pretrained(tmp_path)
    fused = fuse_all(fuse, tmp_path / "model.onnx", sites=1)
    assert not any(axes(fused).values())


def check_message(capsys, *arguments):
    """The message that a call ends with."""
    with pytest.raises(SystemExit) as stop:
        export_unfused.main([str(argument) for argument in arguments])
    return str(stop.value.code) if isinstance(stop.value.code, str) else capsys.readouterr().err


def test_a_folder_that_is_not_there(capsys, tmp_path):
    message = check_message(capsys, "--model-id", tmp_path / "none", "--output-dir", tmp_path)
    assert "none: no such folder" in message
    message = check_message(capsys, "--model-id", tmp_path, "--output-dir", tmp_path)
    assert "no config.json" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "llama"}', "its model_type is 'llama', which is neither Qwen3.5 nor Qwen3-Next"),
        ("{}", "its model_type is None"),
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
    ],
)
def test_a_checkpoint_of_another_model(capsys, tmp_path, config, message):
    (tmp_path / "config.json").write_text(config)
    assert message in check_message(capsys, "--model-id", tmp_path, "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_lacks_weights(capsys, checkpoints, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoints / "text/config.json").read_bytes())
    assert "transformers cannot load it" in check_message(capsys, "--model-id", tmp_path, "--output-dir", tmp_path)
    # One layer more than there are weights for: transformers alone would make some up.
    config = json.loads((checkpoints / "text/config.json").read_text())
    config |= {"num_hidden_layers": 5, "layer_types": [*config["layer_types"], "linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoints / "text/model.safetensors").read_bytes())
    message = check_message(capsys, "--model-id", tmp_path, "--output-dir", tmp_path)
    assert re.search(r"14 weights are missing, model\.layers\.4\.\S+ first", message)


def test_missing_packages(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(export_unfused, "find_spec", lambda name: None if name == "torch" else name)
    message = check_message(capsys, "--tiny", "--output-dir", tmp_path)
    assert message == (
        "export_unfused: torch cannot be imported. Exporting needs the dev extra: pip install -e '.[dev]'"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-dir", "x"], "one of the arguments --model-id --tiny is required"),
        (["--tiny", "--model-id", "x", "--output-dir", "x"], "not allowed with argument --tiny"),
        (["--tiny"], "the following arguments are required: --output-dir"),
        (["--tiny", "--output-dir", "x", "--dummy-seq-len", "1"], "1 is too small: at least 2 is needed"),
        (["--tiny", "--output-dir", "x", "--opset", "21"], "--exporter torchscript writes opsets 14 to 20, not 21"),
        (
            ["--tiny", "--output-dir", "x", "--opset", "17", "--exporter", "dynamo"],
            "--exporter dynamo writes opsets 18 to 23, not 17",
        ),
    ],
)
def test_options_that_cannot_be(capsys, arguments, message):
    assert message in check_message(capsys, *arguments)


def test_help_imports_nothing_heavy():
    code = "import sys, export_unfused; print([n for n in ('torch', 'transformers', 'onnx') if n in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, cwd=ROOT / "scripts").strip() == "[]"
