"""Cutting a part out of a model and making it run in double."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphs
from deltafuse.probe import Cut, backward_slice, cut_model, to_double
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes


def cut(model: onnx.ModelProto, folder: Path, inputs: list[str], outputs: list[str]) -> Cut | Reason:
    scanned = graphs.scanned(model, folder)
    find = scanned.graph.find
    return cut_model(scanned, Shapes(scanned), [find(name) for name in inputs], [find(name) for name in outputs])


def test_a_slice_is_what_lies_between(tmp_path: Path) -> None:
    scanned = graphs.scanned(graphs.step(), tmp_path)
    graph = scanned.graph
    nodes, loose = backward_slice(graph, [graph.find("decayed"), graph.find("k1")], [graph.find("known")])
    assert [graph.name(graph.node_outputs[node][0]) for node in nodes] == ["product", "known"]
    assert [graph.name(value) for value in loose] == ["row"]


def test_a_slice_ends_at_graph_inputs_and_tells_them(tmp_path: Path) -> None:
    graph = graphs.scanned(graphs.step(), tmp_path).graph
    nodes, loose = backward_slice(graph, [], [graph.find("e0")])
    assert [graph.name(graph.node_outputs[node][0]) for node in nodes] == ["g0", "e0"]
    assert sorted(graph.name(value) for value in loose) == ["g", "time"]


def test_a_slice_follows_what_branches_read(tmp_path: Path) -> None:
    model = graphs.parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        branches (float[2] x, bool choice) => (float[2] y) {
          a = Neg(x)
          y = If(choice)<then_branch = t () => (float[2] p) { p = Identity(a) },
                         else_branch = e () => (float[2] q) { q = Identity(x) }>
        }"""
    )
    graph = graphs.scanned(model, tmp_path).graph
    nodes, loose = backward_slice(graph, [graph.find("x")], [graph.find("y")])
    assert [graph.op[node] for node in nodes] == ["Neg", "If"]
    assert [graph.name(value) for value in loose] == ["choice"]


def test_a_cut_runs_on_its_own(tmp_path: Path) -> None:
    made = cut(graphs.step(), tmp_path, ["state", "g"], ["decayed"])
    assert isinstance(made, Cut)
    assert [info.name for info in made.model.graph.input] == ["state", "g"]
    assert made.model.opset_import[0].version == 17
    state, g = np.ones((1, 4, 5, 3), np.float32), np.full((1, 1, 4), np.log(0.5), np.float32)
    (decayed,) = graphs.session(made.model).run(None, {"state": state, "g": g})
    assert np.allclose(decayed, 0.5)


def test_a_cut_that_needs_more_is_open(tmp_path: Path) -> None:
    made = cut(graphs.step(), tmp_path, ["state"], ["decayed"])
    assert isinstance(made, Reason)
    assert (made.code, made.args) == ("cut-open", {"value": "g"})
    assert "g" in made.text


def test_a_cut_at_a_value_of_unknown_type_is_refused(tmp_path: Path) -> None:
    model = graphs.step(("v0 = Squeeze(value, time)", "v9 = Mystery(value)\n  v0 = Squeeze(v9, time)"))
    next(node for node in model.graph.node if node.op_type == "Mystery").domain = "somewhere.else"
    model.opset_import.append(helper.make_opsetid("somewhere.else", 1))
    made = cut(model, tmp_path, ["v9"], ["v0"])
    assert isinstance(made, Reason)
    assert (made.code, made.args) == ("cut-type-unknown", {"value": "v9"})
    assert made.text


def external(model: onnx.ModelProto, name: str, location: str) -> bytes:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    raw = numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    shape, kind = list(tensor.dims), tensor.data_type
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.data_location = name, kind, TensorProto.EXTERNAL
    tensor.dims.extend(shape)
    tensor.external_data.add(key="location", value=location)
    return raw


def test_a_small_constant_outside_the_file_comes_along(tmp_path: Path) -> None:
    model = graphs.step()
    (tmp_path / "row.bin").write_bytes(external(model, "row", "row.bin"))
    made = cut(model, tmp_path, ["product"], ["known"])
    assert isinstance(made, Cut)
    (row,) = made.model.graph.initializer
    assert numpy_helper.to_array(row).tolist() == [-2]
    assert row.data_location == TensorProto.DEFAULT


def test_a_large_constant_outside_the_file_is_not_read(tmp_path: Path) -> None:
    model = graphs.parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        large (float[1024,1024] x) => (float y) { y = Add(x, w) }"""
    )
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1024, 1024], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="nowhere.bin")
    model.graph.initializer.append(tensor)
    made = cut(model, tmp_path, ["x"], ["y"])
    assert isinstance(made, Reason)
    assert made.code == "constant-too-large"


def test_a_missing_constant_is_told(tmp_path: Path) -> None:
    model = graphs.step()
    external(model, "row", "gone.bin")
    made = cut(model, tmp_path, ["product"], ["known"])
    assert isinstance(made, Reason)
    assert made.code == "external-data-missing"


EVERYTHING = """
<ir_version: 8, opset_import: ["" : 17]>
everything (float[2] x, float16[2] h, bool on, int64[1] n) => (float y, float16 z, float[n] s)
<float[2] w = {0.1, 0.2}>
{
  c = Constant<value = float[2] {0.1, 0.3}>()
  f = Constant<value_float = 0.1>()
  l = Constant<value_floats = [0.1, 0.2]>()
  a = Add(x, w)
  b = Mul(a, c)
  d = Mul(b, f)
  e = Mul(d, l)
  i = Cast<to = 7>(e)
  g = Cast<to = 10>(e)
  k = Cast<to = 16>(g)
  m = Cast<to = 1>(k)
  y = If(on)<then_branch = t () => (float p) { v = Constant<value_float = 0.7>()
                                              p = Mul(m, v) },
             else_branch = o () => (float q) { q = Identity(m) }>
  z = Identity(h)
  s = ConstantOfShape<value = float[1] {0.1}>(n)
}
"""


def test_every_float_becomes_a_double_and_nothing_else(tmp_path: Path) -> None:
    model = graphs.parse(EVERYTHING)
    before = model.SerializeToString()
    result = to_double(model)
    assert isinstance(result, onnx.ModelProto)
    assert model.SerializeToString() == before
    one = graphs.session(result)
    assert [i.type for i in one.get_inputs()] == ["tensor(double)", "tensor(double)", "tensor(bool)", "tensor(int64)"]
    x = np.array([1.0, 2.0]) + 1e-10
    feeds = {"x": x, "h": x, "on": np.array(True), "n": np.array([2])}
    y, z, s = one.run(None, feeds)
    single = np.float32(0.1).astype(np.float64)
    w, c = np.float32([0.1, 0.2]).astype(np.float64), np.float32([0.1, 0.3]).astype(np.float64)
    assert np.allclose(y, (x + w) * c * single * w * float(np.float32(0.7)), rtol=1e-15)
    assert np.array_equal(z, x)
    assert np.array_equal(s, [single, single])


def test_constants_keep_the_value_that_their_type_gave_them() -> None:
    model = graphs.step()
    next(tensor for tensor in model.graph.initializer if tensor.name == "scale").CopyFrom(
        numpy_helper.from_array(np.array(0.1, np.float16), "scale")
    )
    result = to_double(model)
    found = next(tensor for tensor in result.graph.initializer if tensor.name == "scale")
    assert numpy_helper.to_array(found) == np.float64(np.float16(0.1))


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"])
def test_quantised_arithmetic_has_no_double(op: str) -> None:
    node = helper.make_node(op, ["x", "s"], ["y"])
    info = helper.make_tensor_value_info
    graph = helper.make_graph([node], "q", [info("x", 1, [2]), info("s", 1, [])], [info("y", 1, [2])])
    found = to_double(helper.make_model(graph))
    assert isinstance(found, Reason)
    assert (found.code, found.args) == ("no-double-kernel", {"op": op})
    assert op in found.text


def test_quantised_arithmetic_in_a_branch_has_no_double_either() -> None:
    model = graphs.parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        branches (float[2] x, float s, bool on) => (uint8 y) {
          y = If(on)<then_branch = t () => (uint8 p) { p = QuantizeLinear(x, s) },
                     else_branch = e () => (uint8 q) { q = Cast<to = 2>(x) }>
        }"""
    )
    found = to_double(model)
    assert isinstance(found, Reason)
    assert found.code == "no-double-kernel"


def test_onnxruntime_s_own_product_is_written_out() -> None:
    info = helper.make_tensor_value_info
    node = helper.make_node("FusedMatMul", ["a", "b"], ["y"], domain="com.microsoft", transA=1, transB=1, alpha=0.5)
    graph = helper.make_graph([node], "p", [info("a", 1, [2, 3, 4]), info("b", 1, [2, 5, 3])], [info("y", 1, None)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    result = to_double(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    assert isinstance(result, onnx.ModelProto)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 5, 3))
    (y,) = graphs.session(result).run(None, {"a": a, "b": b})
    assert np.allclose(y, 0.5 * a.swapaxes(1, 2) @ b.swapaxes(1, 2), rtol=1e-14)
