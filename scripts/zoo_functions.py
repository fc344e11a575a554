"""The rule as ONNX's own LinearAttention: its function body, called as a local function or inlined into the graph."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import torch
from onnx import TensorProto, defs, helper, inliner

from deltafuse.patterns import load
from zoo_member import KEY_DIM, VALUE_DIM, VALUE_HEADS, operands

OPSET = 27
#: The body is written in operators that have not changed since, and onnxruntime releases know these.
RUN_OPSET = 23
_INPUTS = ("query", "key", "value", "state", "g", "beta")


def attention(batch: int | str = 1, tokens: int | str = 5) -> onnx.ModelProto:
    """One LinearAttention node; heads are packed into the last axis."""
    node = helper.make_node(
        "LinearAttention",
        list(_INPUTS),
        ["out", "final_state"],
        name="attention",
        q_num_heads=VALUE_HEADS,
        kv_num_heads=VALUE_HEADS,
        update_rule="gated_delta",
        scale=KEY_DIM**-0.5,
    )
    state = [batch, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    packed = {"query": VALUE_HEADS * KEY_DIM, "key": VALUE_HEADS * KEY_DIM, "value": VALUE_HEADS * VALUE_DIM}
    shapes = {name: [batch, tokens, packed.get(name, VALUE_HEADS)] for name in _INPUTS} | {"state": state}
    results = {"out": [batch, tokens, packed["value"]], "final_state": state}
    given, made = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in some.items()]
        for some in (shapes, results)
    )
    graph = helper.make_graph([node], "attention", given, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def inlined(batch: int | str = 1, tokens: int | str = 5) -> onnx.ModelProto:
    """The body in place of the node."""
    model = inliner.inline_selected_functions(
        attention(batch, tokens), [("", "LinearAttention")], inline_schema_functions=True
    )
    return _at(model, RUN_OPSET)


def called(batch: int | str = 1, tokens: int | str = 5) -> onnx.ModelProto:
    """The body as a local function."""
    model = attention(batch, tokens)
    (node,) = model.graph.node
    types = [value.type.SerializeToString() for value in model.graph.input]
    body = defs.get_schema("LinearAttention", OPSET).get_context_dependent_function(node.SerializeToString(), types)
    function = onnx.FunctionProto.FromString(body)
    function.domain, function.name = "local", "LinearAttention"
    node.domain = "local"
    del node.attribute[:]
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    return _at(model, RUN_OPSET)


def _at(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    for holder in (model, *model.functions):
        for entry in holder.opset_import:
            if entry.domain == "":
                entry.version = opset
    return model


MODELS = {
    "attention_called": called,
    "attention_inlined": inlined,
    "attention_called_dynBT": functools.partial(called, "batch", "tokens"),
    "attention_inlined_dynBT": functools.partial(inlined, "batch", "tokens"),
}


def attention_inputs() -> dict[str, torch.Tensor]:
    """Operands with packed heads, by the names of the inputs."""
    given = operands(5, key_heads=VALUE_HEADS)
    return {name: given[name] if name == "state" else given[name].reshape(1, 5, -1) for name in _INPUTS}


def attention_outputs(inputs: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """What the rule gives for them, in numpy."""
    (rule,) = load(names=["gated_delta_rule"])
    plain = {name: tensor.numpy().astype(np.float64) for name, tensor in inputs.items()}
    for name in ("query", "key", "value"):
        plain[name] = plain[name].reshape(1, 5, VALUE_HEADS, -1)
    out, state = rule.recurrence(**plain)
    return (out * KEY_DIM**-0.5).reshape(1, 5, -1).astype(np.float32), state.astype(np.float32)
