"""What each value is: constant, shape, weight or data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphs
from deltafuse.classes import Kind, classify


def kinds(model: onnx.ModelProto, folder: Path) -> dict[str, Kind]:
    scanned = graphs.scanned(model, folder)
    found = classify(scanned)
    return {scanned.graph.name(value): Kind(kind) for value, kind in enumerate(found) if kind}


def one(nodes: str, *constants: TensorProto) -> onnx.ModelProto:
    model = graphs.parse(
        f"""
        <ir_version: 8, opset_import: ["" : 17]>
        values (float[2,4] x, int64[2] ids, bool[1] flag) => (float y) {{
          {nodes}
        }}"""
    )
    model.graph.initializer.extend(constants)
    return model


def test_inputs_are_data_of_whatever_type(tmp_path: Path) -> None:
    found = kinds(one("y = Identity(x)"), tmp_path)
    assert [found[name] for name in ("x", "ids", "flag", "y")] == [Kind.DATA] * 4


def test_a_shape_is_no_data_and_what_is_computed_from_it_neither(tmp_path: Path) -> None:
    found = kinds(
        one(
            "s = Shape(x)\n n = Size(x)\n zero = Constant<value_ints = [0]>()\n d = Gather(s, zero)\n t = Mul(d, d)\n"
            "m = Mul(t, n)\n y = Reshape(x, m)"
        ),
        tmp_path,
    )
    assert [found[name] for name in "sndtm"] == [Kind.SHAPE] * 5
    assert found["zero"] == Kind.CONSTANT
    assert found["y"] == Kind.DATA


def test_the_shape_of_a_constant_is_a_constant(tmp_path: Path) -> None:
    found = kinds(one("c = Constant<value_ints = [1, 2]>()\n s = Shape(c)\n y = Identity(x)"), tmp_path)
    assert found["s"] == Kind.CONSTANT


@pytest.mark.parametrize(
    "before", ["left = Abs(x)", "left = Shape(x)", "left = Constant<value = float[2,4] {1, 2, 3, 4, 5, 6, 7, 8}>()"]
)
def test_a_result_that_is_left_out_says_nothing_of_an_input_that_is(before: str, tmp_path: Path) -> None:
    model = one(f"{before}\n one = Constant<value_float = 1.0>()\n c = Clip(one, left, one)\n y = Identity(x)")
    model.graph.node[0].output[0] = model.graph.node[2].input[1] = ""
    found = kinds(model, tmp_path)
    assert found["c"] == Kind.CONSTANT


MASK = np.triu(np.ones((4, 4), np.float32), 1)
RANDOM = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.float32(0.25), Kind.CONSTANT),
        (np.ones(1, np.float32), Kind.CONSTANT),
        (np.arange(64), Kind.CONSTANT),
        (MASK > 0, Kind.CONSTANT),
        (MASK, Kind.CONSTANT),
        (np.eye(4, dtype=np.float32), Kind.CONSTANT),
        (np.eye(4, dtype=np.float16), Kind.CONSTANT),
        (np.zeros((1, 2, 4, 4), np.float32), Kind.CONSTANT),
        (np.where(MASK > 0, -np.inf, 0).astype(np.float32), Kind.CONSTANT),
        (RANDOM, Kind.WEIGHT),
        (np.float32([0.1, 0.2, 0.3, 0.4]), Kind.WEIGHT),
        # A bias of zeros or a norm's scale of ones is a weight all the same.
        (np.zeros(4, np.float32), Kind.WEIGHT),
        (np.ones((1, 4), np.float32), Kind.WEIGHT),
    ],
)
def test_an_added_array_is_a_weight_unless_it_is_structural(array: np.ndarray, kind: Kind, tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.asarray(array), "c")
    assert kinds(one("f = CastLike(c, x)\n y = Add(x, f)", tensor), tmp_path)["f"] == kind


@pytest.mark.parametrize("holder", ["initializer", "constant node"])
def test_it_makes_no_difference_where_an_array_is_kept(holder: str, tmp_path: Path) -> None:
    for array, kind in ((MASK, Kind.CONSTANT), (RANDOM, Kind.WEIGHT)):
        model = one("y = Mul(x, c)", *([numpy_helper.from_array(array, "c")] if holder == "initializer" else []))
        if holder == "constant node":
            model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(array)))
        assert kinds(model, tmp_path)["c"] == kind


@pytest.mark.parametrize("op", ["Gemm", "Gather", "Conv"])
def test_operators_that_take_weights_make_an_array_one(op: str, tmp_path: Path) -> None:
    nodes = {"Gemm": "y = Gemm(x, c)", "Gather": "y = Gather(c, ids)", "Conv": "y = Conv(x, c)"}[op]
    assert kinds(one(nodes, numpy_helper.from_array(np.zeros((4, 4), np.float32), "c")), tmp_path)["c"] == Kind.WEIGHT


def test_a_product_with_an_oblong_array_is_a_projection(tmp_path: Path) -> None:
    zeros = numpy_helper.from_array(np.zeros((4, 8), np.float32), "c")
    square = numpy_helper.from_array(MASK, "c")
    assert kinds(one("y = MatMul(x, c)", zeros), tmp_path)["c"] == Kind.WEIGHT
    assert kinds(one("y = MatMul(x, c)", square), tmp_path)["c"] == Kind.CONSTANT


def test_what_is_computed_from_a_weight_alone_is_a_weight(tmp_path: Path) -> None:
    found = kinds(one("t = Transpose(c)\n n = Neg(t)\n y = Mul(x, n)", numpy_helper.from_array(RANDOM, "c")), tmp_path)
    assert [found[name] for name in "ctn"] == [Kind.WEIGHT] * 3
    assert found["y"] == Kind.DATA


def test_a_mask_that_is_moved_first_is_settled_by_who_reads_it(tmp_path: Path) -> None:
    model = one("t = Transpose(c)\n u = Cast<to = 1>(t)\n y = Mul(x, u)", numpy_helper.from_array(MASK, "c"))
    assert kinds(model, tmp_path)["u"] == Kind.CONSTANT


def test_a_large_array_is_not_looked_at(tmp_path: Path) -> None:
    zeros = numpy_helper.from_array(np.zeros((1024, 1024), np.float32), "c")
    assert kinds(one("y = Add(x, c)", zeros), tmp_path)["c"] == Kind.WEIGHT


@pytest.mark.parametrize(("corner", "kind"), [(0.0, Kind.CONSTANT), (1.0, Kind.WEIGHT)])
def test_of_large_arrays_only_a_zero_state_is_structural(corner: float, kind: Kind, tmp_path: Path) -> None:
    # A static export of 32 heads of 128 by 128 holds a state of 2 MiB.
    state = np.zeros((1, 32, 128, 128), np.float32)
    state[0, 0, 0, 0] = corner
    assert kinds(one("y = Mul(x, c)", numpy_helper.from_array(state, "c")), tmp_path)["c"] == kind


def test_an_array_outside_the_file_is_read_where_it_may_be_structural(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(MASK, "c")
    (tmp_path / "mask.bin").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="mask.bin")
    model = one("y = Mul(x, c)", tensor)
    assert kinds(model, tmp_path)["c"] == Kind.CONSTANT
    (tmp_path / "mask.bin").unlink()
    assert kinds(model, tmp_path)["c"] == Kind.WEIGHT


def test_a_branch_that_reads_data_makes_data(tmp_path: Path) -> None:
    model = one(
        "always = Constant<value_int = 1>()\n b = Cast<to = 9>(always)\n"
        "y = If(b)<then_branch = t () => (float p) { p = Neg(x) }, else_branch = e () => (float q) { q = Identity(x) }>"
    )
    assert kinds(model, tmp_path)["y"] == Kind.DATA
