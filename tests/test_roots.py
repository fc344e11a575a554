"""What a site depends on that no operand of a rule can be, and constants that cannot be read, told by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphs
import loops
from deltafuse.probe import to_double
from deltafuse.reasons import Reason
from deltafuse.roots import odd_root, overridable
from deltafuse.shapes import Shapes

BRANCHES = """v0 = If(flag)<then_branch = yes () => (float[b,h,e] y1) { y1 = Gather<axis = 1>(value, i) },
      else_branch = no () => (float[b,h,e] y2) { y3 = Gather<axis = 1>(value, i)
        y2 = Neg(y3) }>"""


@pytest.fixture(scope="module", autouse=True)
def _worker():
    with graphs.one_worker():
        yield


def reason(model: onnx.ModelProto, folder: Path) -> Reason:
    (site,) = graphs.fuse(graphs.save(model, folder)).sites
    assert site.reason is not None, site
    return site.reason


def test_a_flag_that_chooses_is_told(tmp_path: Path) -> None:
    flag = ("float[B,4,5,3] state)", "float[B,4,5,3] state, bool flag)")
    found = reason(loops.loop(flag, ("v0 = Gather<axis = 1>(value, i)", BRANCHES)), tmp_path)
    assert found.code == "root-type"
    assert "depends on flag (bool)" in found.text
    assert "make the input a constant" in found.text


@pytest.mark.parametrize(
    ("name", "kind", "shape", "code"),
    [
        ("last", TensorProto.INT64, [1], "root-type"),
        ("one", TensorProto.INT64, [], "root-type"),
        ("scale", TensorProto.FLOAT, [], "overridable"),
    ],
)
def test_an_initializer_that_may_be_another_is_told(
    name: str, kind: int, shape: list[int], code: str, tmp_path: Path
) -> None:
    model = loops.loop()
    model.graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    found = reason(model, tmp_path)
    assert (found.code, found.args["value"]) == (code, name)
    assert "take it out of the graph's inputs" in found.text


def test_roots_of_floating_point_are_none_of_it(tmp_path: Path) -> None:
    scanned = graphs.scanned(loops.loop(), tmp_path)
    roots = list(scanned.graph.inputs)
    assert odd_root(scanned.graph, bytearray(len(scanned.graph.value_names)), Shapes(scanned), roots) is None
    assert overridable(scanned.graph, roots) is None


FACTOR = ("missing = Sub(v0, known)", "plain = Sub(v0, known)\n    missing = Mul(plain, ones)")


def sparse(name: str) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.ones(3, np.float32), name)
    indices = numpy_helper.from_array(np.arange(3), f"{name}_indices" if name else "")
    return onnx.SparseTensorProto(values=values, indices=indices, dims=[3])


@pytest.mark.parametrize("node", [False, True])
def test_a_sparse_constant_is_told(node: bool, tmp_path: Path) -> None:
    model = loops.loop(FACTOR)
    if node:
        constant = helper.make_node("Constant", [], ["ones"])
        constant.attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse(""))
        model.graph.node.insert(0, constant)
    else:
        model.graph.sparse_initializer.append(sparse("ones"))
    found = reason(model, tmp_path)
    assert (found.code, found.args["value"]) == ("sparse-constant", "ones")


def test_a_sparse_constant_of_a_cut_has_no_double() -> None:
    constant = helper.make_node("Constant", [], ["ones"])
    constant.attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse(""))
    found = to_double(helper.make_model(onnx.GraphProto(name="g", node=[constant])))
    assert isinstance(found, Reason)
    assert found.code == "sparse-constant"


@pytest.mark.parametrize(("training", "status"), [(0, "fused"), (1, "near-miss")])
def test_a_dropout_that_is_off_is_nothing(training: int, status: str, tmp_path: Path) -> None:
    numbers = f"float ratio = {{0.5}}, bool on = {{{training}}}, float scale = {{0.25}}"
    drop = ("missing = Sub(v0, known)", "plain = Sub(v0, known)\n    missing = Dropout(plain, ratio, on)")
    model = loops.loop(("float scale = {0.25}", numbers), drop)
    (site,) = graphs.fuse(graphs.save(model, tmp_path)).sites
    assert site.status == status


def test_a_dropout_whose_switch_is_given_is_random(tmp_path: Path) -> None:
    drop = ("missing = Sub(v0, known)", "plain = Sub(v0, known)\n    missing = Dropout(plain, ratio, on)")
    model = loops.loop(("float scale = {0.25}", "float ratio = {0.5}, bool on = {0}, float scale = {0.25}"), drop)
    model.graph.input.append(helper.make_tensor_value_info("on", TensorProto.BOOL, []))
    assert reason(model, tmp_path).code == "root-type"
