"""What tools make of an export: simplifiers, optimisers, converters to float16, and edits that change no result.

The tools are no dependency of the project: a conversion whose tool is not installed says so.
"""

from __future__ import annotations

import importlib
import random
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper


def tool(name: str, package: str) -> ModuleType:
    """A tool's module.

    Raises:
        SystemExit: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"this member needs {package}: pip install {package} ({error})") from error


def by_onnxsim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Onnxsim."""
    simplified, same = tool("onnxsim", "onnxsim").simplify(model)
    assert same
    return simplified


def by_onnxslim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Onnxslim."""
    return tool("onnxslim", "onnxslim").slim(model)


def by_onnxscript(model: onnx.ModelProto) -> onnx.ModelProto:
    """Onnxscript's optimizer."""
    return tool("onnxscript.optimizer", "onnxscript").optimize(model)


def by_onnxruntime(level: str) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """What onnxruntime saves after its own optimisation."""

    def convert(model: onnx.ModelProto) -> onnx.ModelProto:
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.log_severity_level = 3
        with tempfile.TemporaryDirectory() as folder:
            options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            return onnx.load(options.optimized_model_filepath)

    return convert


def to_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnxconverter-common, all of it in float16."""
    return tool("onnxconverter_common.float16", "onnxconverter-common").convert_float_to_float16(model)


def to_half_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnxconverter-common, inputs and outputs stay float32."""
    convert = tool("onnxconverter_common.float16", "onnxconverter-common").convert_float_to_float16
    return convert(model, keep_io_types=True)


def shuffled(model: onnx.ModelProto) -> onnx.ModelProto:
    """Another topological order, nodes without names, nothing declared of inner values."""
    rng = random.Random(1)
    graph = model.graph
    waiting: list[onnx.NodeProto] = list(graph.node)
    ordered: list[onnx.NodeProto] = []
    known = {"", *(value.name for value in (*graph.input, *graph.initializer))}
    while waiting:
        node = rng.choice([node for node in waiting if known.issuperset(node.input)])
        waiting.remove(node)
        known.update(node.output)
        node.name = ""
        ordered.append(node)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(ordered)
    return model


def between(make: Callable[[str, str, int], list[onnx.NodeProto]]) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """Puts nodes behind each node whose results are float."""

    def convert(model: onnx.ModelProto) -> onnx.ModelProto:
        inferred = onnx.shape_inference.infer_shapes(model).graph
        floats = {value.name for value in inferred.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT}
        nodes: list[onnx.NodeProto] = []
        for node in model.graph.node:
            nodes.append(node)
            for index, name in enumerate(node.output):
                if name in floats:
                    node.output[index] = f"{name}.plain"
                    nodes += make(f"{name}.plain", name, len(nodes))
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        return model

    return convert


def identities(source: str, target: str, number: int) -> list[onnx.NodeProto]:
    """Two Identity nodes."""
    names = [source, f"{target}.same", target]
    return [helper.make_node("Identity", [a], [b], name=f"same.{number}.{b}") for a, b in pairwise(names)]


def casts(source: str, target: str, number: int) -> list[onnx.NodeProto]:
    """A Cast to double and one back."""
    there = helper.make_node("Cast", [source], [f"{target}.wide"], to=TensorProto.DOUBLE, name=f"wide.{number}")
    back = helper.make_node("Cast", [f"{target}.wide"], [target], to=TensorProto.FLOAT, name=f"narrow.{number}")
    return [there, back]


def as_function(model: onnx.ModelProto) -> onnx.ModelProto:
    """The whole graph as one local function that is called."""
    graph = model.graph
    inputs, outputs = [v.name for v in graph.input], [v.name for v in graph.output]
    constants = [
        helper.make_node("Constant", [], [tensor.name], value=tensor, name=f"constant.{tensor.name}")
        for tensor in graph.initializer
    ]
    function = helper.make_function(
        "local", "Rule", inputs, outputs, [*constants, *graph.node], list(model.opset_import)
    )
    call = helper.make_node("Rule", inputs, outputs, domain="local", name="rule")
    around = helper.make_graph([call], "around", list(graph.input), list(graph.output))
    imports = [*model.opset_import, helper.make_opsetid("local", 1)]
    return helper.make_model(around, functions=[function], opset_imports=imports, ir_version=model.ir_version)


CONVERSIONS: Mapping[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "onnxsim": by_onnxsim,
    "onnxslim": by_onnxslim,
    "onnxscript": by_onnxscript,
    "ortbasic": by_onnxruntime("BASIC"),
    "ortextended": by_onnxruntime("EXTENDED"),
    "half": to_half,
    "halfinside": to_half_inside,
    "shuffled": shuffled,
    "identities": between(identities),
    "casts": between(casts),
    "function": as_function,
}

#: Source -> what is made of it. onnxconverter-common makes files that onnxruntime does not load of many others.
CONVERTED: Mapping[str, tuple[str, ...]] = {
    "chunk_dy23_norm_outside": ("onnxsim", "onnxslim", "ortextended", "halfinside", "shuffled"),
    "chunk_ts17_next": ("onnxsim", "onnxslim", "onnxscript", "ortbasic"),
    "chunk_blocks": ("onnxscript", "ortextended", "half", "function"),
    "rec_dy18": ("onnxslim", "half", "casts"),
    "rec_ts17_T4_noinit": ("onnxsim", "ortbasic", "ortextended", "identities", "shuffled"),
    "loop_list": ("onnxsim", "onnxscript", "ortbasic"),
    "scan_dynamo": ("ortextended", "half"),
    "steps_gates": ("onnxslim", "function"),
}
