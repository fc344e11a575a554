"""A depthwise convolution as sums of products, against onnxruntime's own in float32."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import graphs
from deltafuse.probe_conv import plain_convolution


def convolution(channels: int, weight: tuple[int, ...], **attributes: object) -> onnx.ModelProto:
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    ends = [("x", [2, channels, 9]), ("w", weight), ("b", [weight[0]])]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def drawn(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in model.graph.input}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "attributes",
    [{}, {"pads": [3, 0]}, {"pads": [1, 2], "dilations": [2]}, {"strides": [1], "auto_pad": "VALID"}],
)
def test_it_convolves_in_double(attributes: dict[str, object]) -> None:
    model = convolution(6, (6, 1, 4), group=6, kernel_shape=[4], **attributes)
    feeds = drawn(model)
    (wanted,) = graphs.session(model).run(None, feeds)
    double = {name: array.astype(np.float64) for name, array in feeds.items()}
    (found,) = graphs.double(model).run(None, double)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_channels_that_are_mixed_do_not_run() -> None:
    model = convolution(6, (6, 6, 4), kernel_shape=[4])
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.Fail):
        graphs.double(model).run(None, {name: array.astype(np.float64) for name, array in drawn(model).items()})


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2, 2]},
        {"kernel_shape": [4], "strides": [2]},
        {"kernel_shape": [4], "auto_pad": "SAME_UPPER"},
        {},
    ],
)
def test_another_convolution_is_left_as_it_is(attributes: dict[str, object]) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    assert plain_convolution(node) == [node]


@pytest.mark.parametrize(("sizes", "pads"), [((1, 4), [0, 3, 0, 0]), ((4, 1), [3, 0, 0, 0]), ((1, 4), [0, 1, 0, 2])])
def test_a_kernel_that_is_wide_in_one_of_two_axes(sizes: tuple[int, int], pads: list[int]) -> None:
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], group=6, pads=pads)
    ends = [("x", [2, 6, 9, 1] if sizes[0] > 1 else [2, 6, 1, 9]), ("w", [6, 1, *sizes]), ("b", [6])]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = drawn(model)
    (wanted,) = graphs.session(model).run(None, feeds)
    (found,) = graphs.double(model).run(None, {name: array.astype(np.float64) for name, array in feeds.items()})
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_softplus_has_a_double_form_inside_functions_too() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17, "local" : 1]>
    g (float[7] x) => (float[7] y, float[7] z) { y = Softplus(x)  z = local.Gate(x) }
    <domain: "local", opset_import: ["" : 17]> Gate (x) => (y) { y = Softplus(x) }"""
    x = np.array([-800.0, -40.0, -1.0, 0.0, 1.0, 40.0, 800.0])
    y, z = graphs.double(graphs.parse(text)).run(None, {"x": x})
    np.testing.assert_allclose(y, np.logaddexp(x, 0), rtol=1e-14, atol=1e-16)
    np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize(("op", "domain"), [("QuickGelu", "com.microsoft"), ("Swish", "")])
@pytest.mark.parametrize("alpha", [None, 1.0, 1.5])
def test_gates_of_one_operator_have_a_double_form(op: str, domain: str, alpha: float | None) -> None:
    stated = {} if alpha is None else {"alpha": alpha}
    node = helper.make_node(op, ["x"], ["y"], domain=domain, **stated)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5]) for name in "xy"]
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    x = np.linspace(-3, 3, 5).astype(np.float32)
    (wanted,) = graphs.session(model).run(None, {"x": x})
    (found,) = graphs.double(model).run(None, {"x": x.astype(np.float64)})
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
