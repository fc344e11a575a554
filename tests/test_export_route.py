"""The fused node against what export-time symbolic code writes: one module, exported twice by TorchScript."""

from __future__ import annotations

import warnings

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from deltafuse import pipeline
from deltafuse.lowering import fused_type
from deltafuse.options import FuseOptions, SilentProgress

CGDR, RGDR = "ChunkGatedDeltaRule", "RecurrentGatedDeltaRule"
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 32
INPUTS = ("query", "key", "value", "beta", "state", "g")
COMMON = ["query", "key", "value", "beta"]


def attributes(op, scale):
    """The contract's attributes, as ``graph.op`` takes them."""
    chunk = op == CGDR
    optional = ["g"] if chunk else ["g", "gk", "num_accepted_tokens"]
    ports = [*COMMON, "initial_state", "actual_seq_lengths", "g"]
    if not chunk:
        ports = [*COMMON, "state", "actual_seq_lengths", "ssm_state_indices", *optional]
    found = {
        "type_s": op,
        "input_names_s": ports,
        "optional_input_names_s": optional,
        "input_index_i": [0, 1, 2, 3, 4, 5, 6] if chunk else [0, 1, 2, 3, 4, 5, 6, 7, 9],
        "output_names_s": ["out", "final_state" if chunk else "state"],
        "output_num_i": 2,
        "scale_value_f": scale,
        "dtype_i": 10,
    }
    if not chunk:
        found |= {"output_types_i": [42, 42], "outputs_shape_s": "3,-1,4,32,4,-1,4,32,16,"}
    return found


def custom_rule(op):
    """The rule as a function that exports itself as the Custom node."""

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *operands):
            return operands[2].clone(), operands[4].clone()

        @staticmethod
        def symbolic(g, *operands):
            out, state = g.op("Custom", *operands, outputs=2, **attributes(op, KEY_DIM**-0.5))
            out.setType(operands[2].type())
            state.setType(operands[4].type())
            return out, state

    def rule(query, key, value, beta, state, g):
        tokens = query.shape[1]
        operands = [x.reshape(-1, *x.shape[2:]).half() for x in (query, key, value, beta)]
        operands.append(state.transpose(-1, -2).half())
        operands.append(torch.tensor([tokens], dtype=torch.int32))
        g = g.reshape(-1, VALUE_HEADS)
        if op == CGDR:
            operands.append(g)
        else:
            operands += [torch.zeros(tokens, dtype=torch.int32), g, torch.ones(1, dtype=torch.int32)]
        out, last = Rule.apply(*operands)
        return out.reshape(1, tokens, VALUE_HEADS, VALUE_DIM).float(), last.transpose(-1, -2).float()

    return rule


def written_out_rule(query, key, value, beta, state, g):
    """The rule, token by token."""
    query, key = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for x in (query, key))
    query = query * KEY_DIM**-0.5
    steps = []
    for t in range(query.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        read = (state * key[:, t, :, :, None]).sum(-2)
        delta = (value[:, t] - read) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * delta[:, :, None, :]
        steps.append((state * query[:, t, :, :, None]).sum(-2))
    return torch.stack(steps, dim=1), state


class Layer(torch.nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, query, key, value, beta, state, g):
        out, last = self.rule(query, key, value, torch.sigmoid(beta), state, -torch.nn.functional.softplus(g))
        return torch.tanh(out), last


def export(rule, tokens, path):
    shapes = {
        "query": (1, tokens, KEY_HEADS, KEY_DIM),
        "key": (1, tokens, KEY_HEADS, KEY_DIM),
        "value": (1, tokens, VALUE_HEADS, VALUE_DIM),
        "beta": (1, tokens, VALUE_HEADS),
        "state": (1, VALUE_HEADS, KEY_DIM, VALUE_DIM),
        "g": (1, tokens, VALUE_HEADS),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Layer(rule), tuple(torch.rand(shape) for shape in shapes.values()), str(path), dynamo=False,
            input_names=list(shapes), output_names=["out", "last"], opset_version=17,
        )  # fmt: skip
    return path


def only_custom(model):
    (node,) = (node for node in model.graph.node if node.op_type == "Custom")
    return node


@pytest.fixture(scope="module", params=[(CGDR, 12), (RGDR, 1), (RGDR, 3)], ids=lambda case: f"{case[0]}-{case[1]}")
def both(request, tmp_path_factory):
    """The model that fuse makes of the written-out rule, and the one whose exporter wrote the node."""
    op, tokens = request.param
    folder = tmp_path_factory.mktemp("route")
    unfused = export(written_out_rule, tokens, folder / "unfused.onnx")
    report = pipeline.fuse(FuseOptions(model=unfused, output=folder / "fused.onnx"), SilentProgress())
    assert report.exit == 0
    exported = onnx.load(export(custom_rule(op), tokens, folder / "exported.onnx"))
    return onnx.load(folder / "fused.onnx"), exported


def test_operator_and_domain(both):
    ours, theirs = map(only_custom, both)
    assert fused_type(ours) == fused_type(theirs) != ""
    assert (ours.op_type, ours.domain) == (theirs.op_type, theirs.domain) == ("Custom", "")


def test_every_attribute_and_its_kind(both):
    ours, theirs = ({a.name: (a.type, helper.get_attribute_value(a)) for a in only_custom(m).attribute} for m in both)
    assert ours == theirs


def test_input_order(both):
    ours, theirs = ([root(model, name) for name in only_custom(model).input] for model in both)
    kernel = fused_type(only_custom(both[0]))
    # The lengths are computed from the query here and a constant there: both are right.
    assert ours[:5] == theirs[:5] == ["query", "key", "value", "beta", "state"]
    g = 6 if kernel == CGDR else 7
    assert ours[g] == theirs[g] == "g"
    assert len(ours) == len(theirs)


def test_input_and_output_types(both):
    ours, theirs = ([element_type(model, name) for name in only_custom(model).input] for model in both)
    assert ours == theirs
    assert set(ours) == {TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT32}
    fused, exported = both
    declared = {info.name: info.type.tensor_type.elem_type for info in fused.graph.value_info}
    assert [declared[name] for name in only_custom(fused).output] == [TensorProto.FLOAT16] * 2
    # There, the results' type shows in what reads them: no Cast but to float32.
    for name in only_custom(exported).output:
        assert {node.op_type for node in exported.graph.node if name in node.input} <= {"Reshape", "Transpose", "Cast"}


def producer(model, value):
    return next((node for node in model.graph.node if value in node.output), None)


def root(model, value):
    """The graph input that a value is computed from, "" for a constant."""
    node = producer(model, value)
    if node is None:
        return value if value in INPUTS else ""
    return root(model, node.input[0]) if node.input else ""


def element_type(model, value):
    """Element type by following Cast, Constant, Shape and what keeps a type."""
    known = {info.name: info.type.tensor_type.elem_type for info in model.graph.input}
    known |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    node = producer(model, value)
    if value in known or node is None:
        return known[value]
    found = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Cast":
        return found["to"].i
    if node.op_type == "Constant":
        return found["value"].t.data_type
    return TensorProto.INT64 if node.op_type == "Shape" else element_type(model, node.input[0])
