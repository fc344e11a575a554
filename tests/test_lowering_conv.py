"""The plain form of CausalConvWithState against onnxruntime's kernel and onnx's own evaluator."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import graphs
from deltafuse.errors import UserError
from deltafuse.lowering_conv import is_causal_conv, lower_conv, runtime_has_conv
from deltafuse.probe_double import to_double

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def convolution(
    tokens: int,
    width: int,
    ports: str = "xwbp",
    dtype: int = FLOAT,
    domain: str = "com.microsoft",
    **attributes: object,
) -> onnx.ModelProto:
    sizes = {"x": (2, 6, tokens), "w": (6, 1, width), "b": (6,), "p": (2, 6, width - 1)}
    names = [port if port in ports else "" for port in "xwbp"]
    node = helper.make_node("CausalConvWithState", names, ["y", "s"], "conv", domain=domain, **attributes)
    ends = [helper.make_tensor_value_info(name, dtype, sizes[name]) for name in names if name]
    results = [helper.make_tensor_value_info(name, dtype, None) for name in "ys"]
    opsets = [helper.make_opsetid("", 17 if domain else 27)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    graph = helper.make_graph([node], "g", ends, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in model.graph.input}
    kind = np.float32 if model.graph.input[0].type.tensor_type.elem_type == FLOAT else np.float16
    return {name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}


def lowered(model: onnx.ModelProto, dtype: int = FLOAT) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:], copy.opset_import[:]
    copy.graph.node.extend(lower_conv(model.graph.node[0], dtype))
    copy.opset_import.append(helper.make_opsetid("", 17))
    return copy


SIZES = [(9, 4), (1, 4), (2, 4), (3, 4), (5, 1), (5, 2), (11, 9)]
CASES = list(itertools.product(SIZES, ("xw", "xwb", "xwp", "xwbp"), ("none", "silu", "swish")))


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_the_kernel_gives_the_same(domain: str) -> None:
    assert runtime_has_conv(domain)
    for ((tokens, width), ports, activation), dtype in itertools.product(CASES, (FLOAT, HALF)):
        model = convolution(tokens, width, ports, dtype, domain, activation=activation)
        given = feeds(model)
        wanted = graphs.session(model).run(None, given)
        found = graphs.session(lowered(model, dtype)).run(None, given)
        bar = 1e-5 if dtype == FLOAT else 1e-2
        for a, b in zip(found, wanted, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a, b, rtol=bar, atol=bar)


def test_onnx_s_own_evaluator_gives_the_same() -> None:
    for (tokens, width), ports, activation in CASES:
        model = convolution(tokens, width, ports, domain="", activation=activation)
        given = feeds(model)
        wanted = ReferenceEvaluator(model).run(None, given)
        found = graphs.session(lowered(model)).run(None, given)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_in_double_it_has_all_digits() -> None:
    model = convolution(5, 4, activation="silu")
    given = {name: array.astype(np.float64) for name, array in feeds(model).items()}
    y, state = graphs.session(to_double(model)).run(None, given)
    joined = np.concatenate([given["p"], given["x"]], -1)
    wanted = sum(joined[:, :, i : i + 5] * given["w"][:, 0, i, None] for i in range(4)) + given["b"][:, None]
    np.testing.assert_allclose(y, wanted / (1 + np.exp(-wanted)), rtol=1e-13)
    assert np.array_equal(state, joined[:, :, -3:])


def test_no_tokens_leave_the_state() -> None:
    model = lowered(convolution(0, 4))
    given = feeds(model)
    y, state = graphs.session(model).run(None, given)
    assert y.shape == (2, 6, 0)
    assert np.array_equal(state, given["p"])


@pytest.mark.parametrize(
    "attributes",
    [{"activation": "relu"}, {"ndim": 2}, {"dilation": 2}, {"state_window": 1}, {"channels_last": 1}],
)
def test_what_the_two_operators_do_not_have_in_common_is_refused(attributes: dict[str, object]) -> None:
    with pytest.raises(UserError, match="no plain form") as caught:
        lower_conv(convolution(5, 4, **attributes).graph.node[0])
    assert caught.value.code == "conv-malformed"


def test_an_operand_that_is_missing_is_refused() -> None:
    with pytest.raises(UserError, match="weight is missing"):
        lower_conv(helper.make_node("CausalConvWithState", ["x"], ["y", "s"]))


def test_operators_of_that_name_in_other_domains_are_others() -> None:
    assert is_causal_conv("CausalConvWithState", "com.microsoft")
    assert is_causal_conv("CausalConvWithState", "")
    assert not is_causal_conv("CausalConvWithState", "my.domain")
    assert not is_causal_conv("Conv", "")
    assert not runtime_has_conv("no.such.domain")
