"""Norms are taken over from the source, and proven to be norms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphs
from deltafuse.classes import classify
from deltafuse.norms import norm_model, normalise, prove_norm, take_norm
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.worker import Worker

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16

TEXT = """
<ir_version: 8, opset_import: ["" : {opset}]>
norms ({type}[2,3,4,5] x) => ({type} y)
<{type} eps = {{{eps}}}, {type} one = {{1}}, {type} two = {{2}}, {type} half = {{0.5}},
 {type} small = {{1e-15}}, {type} low = {{-1e6}}, int64[1] last = {{-1}}, int64[1] time = {{1}}>
{{
  {body}
}}
"""

SUM = "m = Mul(x, x)\n s = ReduceSum<keepdims = 1>(m, last)\n "
L2 = "n = ReduceL2<keepdims = 1, axes = [-1]>(x)\n "

#: How exporters and simplifiers write it; all of these are the same norm.
RSQRT = {
    "reciprocal": SUM + "a = Add(s, eps)\n r = Sqrt(a)\n i = Reciprocal(r)\n y = Mul(x, i)",
    "one over": SUM + "a = Add(eps, s)\n r = Sqrt(a)\n i = Div(one, r)\n y = Mul(i, x)",
    "divided": SUM + "a = Add(s, eps)\n r = Sqrt(a)\n y = Div(x, r)",
    "power": "m = Pow(x, two)\n s = ReduceSum<keepdims = 1>(m, last)\n a = Add(s, eps)\n"
    " r = Pow(a, half)\n y = Div(x, r)",
    "squares": "s = ReduceSumSquare<keepdims = 1, axes = [-1]>(x)\n a = Add(s, eps)\n r = Sqrt(a)\n y = Div(x, r)",
    "moved": "t = Transpose<perm = [0, 2, 1, 3]>(x)\n m = Mul(t, t)\n s = ReduceSum<keepdims = 1>(m, last)\n"
    " a = Add(s, eps)\n r = Sqrt(a)\n y = Div(t, r)",
    "cast": "c = Cast<to = 1>(x)\n m = Mul(c, c)\n s = ReduceSum<keepdims = 0>(m, last)\n u = Unsqueeze(s, last)\n"
    " a = Add(u, eps)\n r = Sqrt(a)\n y = Div(c, r)",
}  # fmt: skip
MAXIMUM = {
    "clip": L2 + "f = Clip(n, eps)\n y = Div(x, f)",
    "max": L2 + "f = Max(n, eps)\n y = Div(x, f)",
    "expanded": L2 + "f = Clip(n, eps)\n h = Shape(x)\n e = Expand(f, h)\n y = Div(x, e)",
    "root of max": "s = ReduceSumSquare<keepdims = 1, axes = [-1]>(x)\n f = Max(s, eps)\n r = Sqrt(f)\n y = Div(x, r)",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


def taken(body: str, folder: Path, *, kind: str = "float", eps: str = "1e-06", opset: int = 17):
    text = TEXT.format(body=body, type=kind, eps=eps, opset=opset)
    if kind == "float16":
        # The parser knows no float16 data: the constants are made here.
        start, end = text.index("<float16"), text.index("\n{")
        text = text[:start] + "<int64[1] last = {-1}>" + text[end:]
    model = graphs.parse(text)
    if kind == "float16":
        for name, number in (("eps", float(eps)), ("one", 1), ("two", 2), ("half", 0.5)):
            model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.float16), name))
    scanned = graphs.scanned(model, folder)
    find = scanned.graph.find
    return model, take_norm(scanned, classify(scanned), Shapes(scanned), find("x"), find("y"))


def proven(worker: Worker, body: str, folder: Path, **options):
    _, found = taken(body, folder, **options)
    assert not isinstance(found, Reason), found
    dtype = HALF if options.get("kind") == "float16" else FLOAT
    return prove_norm(worker, found[0], found[1], dtype, options.get("opset", 17), "x")


@pytest.mark.parametrize("how", RSQRT)
def test_a_root_of_squares_plus_eps(how: str, worker: Worker, tmp_path: Path) -> None:
    norm = proven(worker, RSQRT[how], tmp_path)
    assert not isinstance(norm, Reason), norm
    assert norm.kind == "rsqrt"
    assert norm.eps == pytest.approx(float(np.float32(1e-6)), rel=1e-12)


@pytest.mark.parametrize("how", MAXIMUM)
def test_a_norm_with_a_floor(how: str, worker: Worker, tmp_path: Path) -> None:
    norm = proven(worker, MAXIMUM[how], tmp_path, eps="1e-12")
    assert not isinstance(norm, Reason), norm
    assert norm.kind == "max"
    expected = float(np.float32(1e-12)) ** (0.5 if how == "root of max" else 1)
    assert norm.eps == pytest.approx(expected, rel=1e-12)


def test_eps_is_what_the_source_holds(worker: Worker, tmp_path: Path) -> None:
    body = RSQRT["divided"]
    assert proven(worker, body, tmp_path, eps="3e-05").eps == pytest.approx(float(np.float32(3e-5)), rel=1e-12)
    # A subnormal of half precision is not 1e-6.
    assert proven(worker, body, tmp_path, kind="float16").eps == pytest.approx(1.0132789611816406e-06, rel=1e-12)


def test_a_norm_without_eps(worker: Worker, tmp_path: Path) -> None:
    norm = proven(worker, "s = ReduceSumSquare<keepdims = 1, axes = [-1]>(x)\n r = Sqrt(s)\n y = Div(x, r)", tmp_path)
    assert (norm.kind, norm.eps) == ("rsqrt", 0.0)


@pytest.mark.parametrize("opset", [14, 17, 18, 20])
def test_the_copy_keeps_operators_order_and_bytes(opset: int, tmp_path: Path) -> None:
    body = RSQRT["one over"]
    model, found = taken(body, tmp_path, opset=opset)
    nodes, initializers, _ = found
    assert [node.op_type for node in nodes] == [n.op_type for n in model.graph.node]
    assert nodes[0].input[:] == ["x", "x"]
    assert nodes[-1].output[:] == ["y"]
    # Which side a constant stands on is kept too.
    assert nodes[2].input[1] == nodes[1].output[0]
    given = {tensor.name: tensor for tensor in model.graph.initializer}
    copies = [numpy_helper.to_array(tensor).tobytes() for tensor in initializers if tensor.data_type == FLOAT]
    assert sorted(copies) == sorted(numpy_helper.to_array(given[name]).tobytes() for name in ("eps", "one"))


@pytest.mark.parametrize("opset", [17, 18])
def test_a_copy_reduces_the_last_axis_in_its_opset_s_way(opset: int, worker: Worker, tmp_path: Path) -> None:
    axes = "<keepdims = 1, axes = [3]>(x)" if opset == 17 else "<keepdims = 1>(x, three)"
    body = f"s = ReduceSumSquare{axes}\n a = Add(s, eps)\n r = Sqrt(a)\n y = Div(x, r)"
    text = TEXT.format(body=body, type="float", eps="1e-06", opset=opset).replace(
        "int64[1] time", "int64[1] three = {3}, int64[1] time"
    )
    scanned = graphs.scanned(graphs.parse(text), tmp_path)
    find = scanned.graph.find
    nodes, initializers, _ = take_norm(scanned, classify(scanned), Shapes(scanned), find("x"), find("y"))
    norm = prove_norm(worker, nodes, initializers, FLOAT, opset, "x")
    assert not isinstance(norm, Reason)
    model = norm_model(nodes, initializers, FLOAT, opset)
    x = np.random.default_rng(0).standard_normal((6, 7)).astype(np.float32)
    (y,) = graphs.session(model).run(None, {"x": x})
    assert np.allclose(y, normalise(x.astype(np.float64), "rsqrt", 1e-6), rtol=1e-5)


def test_layout_is_left_out_and_the_source_s_nodes_are_named(tmp_path: Path) -> None:
    model, found = taken(RSQRT["moved"], tmp_path)
    nodes, _, source = found
    assert "Transpose" not in {node.op_type for node in nodes}
    assert [model.graph.node[index].op_type for index in source] == [node.op_type for node in nodes]


@pytest.mark.parametrize(
    ("op", "body"),
    [
        ("Relu", "a = Relu(x)\n m = Mul(a, a)\n s = ReduceSum<keepdims = 1>(m, last)\n y = Div(x, s)"),
        ("Sub", "a = Sub(x, one)\n y = Mul(a, x)"),
        ("none", "y = Identity(x)"),
        ("ReduceMean", "m = Mul(x, x)\n s = ReduceMean<keepdims = 1, axes = [-1]>(m)\n r = Sqrt(s)\n y = Div(x, r)"),
        ("Clip", L2 + "f = Clip(n, eps, two)\n y = Div(x, f)"),
        ("a computed constant", SUM + "c = Neg(one)\n a = Add(s, c)\n y = Div(x, a)"),
    ],
)  # fmt: skip
def test_other_arithmetic_is_not_taken(op: str, body: str, tmp_path: Path) -> None:
    _, found = taken(body, tmp_path)
    assert isinstance(found, Reason)
    assert (found.code, found.args["op"]) == ("norm-unknown", op)
    assert op in found.text


@pytest.mark.parametrize(
    "body",
    [
        # Without the root, with another power, twice, with the floor on the wrong side.
        SUM + "a = Add(s, eps)\n y = Div(x, a)",
        SUM + "a = Add(s, eps)\n r = Sqrt(a)\n t = Sqrt(r)\n y = Div(x, t)",
        SUM + "a = Add(s, eps)\n r = Sqrt(a)\n i = Div(two, r)\n y = Mul(x, i)",
        SUM + "r = Sqrt(s)\n a = Add(r, eps)\n y = Div(x, a)",
        SUM + "a = Add(s, eps)\n r = Sqrt(a)\n i = Div(x, r)\n y = Mul(i, i)",
        "m = Mul(x, x)\n y = Mul(m, x)",
    ],
)
def test_what_is_no_norm_is_not_proven(body: str, worker: Worker, tmp_path: Path) -> None:
    norm = proven(worker, body, tmp_path)
    assert isinstance(norm, Reason)
    assert norm.code in ("norm-unknown", "norm-mixed")
    assert "x" in norm.text


#: Each is the norm on rows of common size.
MIXED = {
    "a floor that other rows raise": "t = ReduceSum<keepdims = 1>(s, time)\n c = Mul(t, small)\n r = Sqrt(s)\n"
    " f = Max(r, c, eps)\n y = Div(x, f)",
    "a floor that the row raises": "t = Mul(s, s)\n c = Mul(t, small)\n a = Add(s, eps)\n f = Max(a, c)\n r = Sqrt(f)\n"
    " y = Div(x, r)",
    "a floor that another head raises": "p = Transpose<perm = [0, 2, 1, 3]>(s)\n h = Shape(s)\n t = Reshape(p, h)\n"
    " q = Mul(t, t)\n c = Mul(q, small)\n a = Add(s, eps)\n f = Max(a, c)\n r = Sqrt(f)\n y = Div(x, r)",
    "a polynomial of the row": "t = Mul(s, s)\n c = Mul(t, small)\n b = Add(s, c)\n a = Add(b, eps)\n r = Sqrt(a)\n"
    " y = Div(x, r)",
    "a ceiling made of floors": "a = Add(s, eps)\n r = Sqrt(a)\n i = Reciprocal(r)\n f = Max(i, small)\n y = Mul(x, f)",
    "a floor under the numbers": "l = Max(x, low)\n a = Add(s, eps)\n r = Sqrt(a)\n y = Div(l, r)",
    "a whole number": "a = Add(s, eps)\n r = Sqrt(a)\n i = Cast<to = 7>(r)\n w = Cast<to = 1>(i)\n f = Max(w, r)\n"
    " y = Div(x, f)",
}


@pytest.mark.parametrize("how", MIXED)
def test_what_is_a_norm_of_common_rows_only_is_refused(how: str, worker: Worker, tmp_path: Path) -> None:
    norm = proven(worker, SUM + MIXED[how], tmp_path)
    assert isinstance(norm, Reason)
    assert norm.code == "norm-mixed"
    assert norm.args["op"] in norm.text


def test_a_part_of_a_norm_that_something_else_reads_keeps_its_guard(tmp_path: Path) -> None:
    # What a floor hides of the rows below it must not come back elsewhere.
    body = L2 + "f = Max(n, eps)\n z = Div(x, f)\n d = Sub(f, n)\n y = Add(z, d)"
    scanned = graphs.scanned(graphs.parse(TEXT.format(body=body, type="float", eps="1e-06", opset=17)), tmp_path)
    find = scanned.graph.find
    found = take_norm(scanned, classify(scanned), Shapes(scanned), find("x"), find("z"))
    assert isinstance(found, Reason)
    assert (found.code, found.args["op"]) == ("norm-mixed", "Sub")


def test_a_norm_of_common_rows_only_stays_in_front_of_the_fused_node(tmp_path: Path) -> None:
    # Keys of norm a million: the floor that other heads raise has overtaken the keys' own norms.
    guarded = (
        "  m = Mul(k0, k0)\n  s = ReduceSum<keepdims = 1>(m, last)\n  t = ReduceSum<keepdims = 1>(s, row)\n"
        "  c = Mul(t, small)\n  r = Sqrt(s)\n  f = Max(r, c, eps)\n  kn = Div(k0, f)\n  k1 = Unsqueeze(kn, last)\n"
    )
    constants = ("float scale", "float small = {1e-5}, float eps = {1e-6}, float scale")
    model = graphs.step(("  k1 = Unsqueeze(k0, last)\n", guarded), constants)
    with graphs.one_worker():
        report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx", target="ort")
    assert report.exit == 0
    fused = onnx.load(tmp_path / "out.onnx")
    assert "Max" in {node.op_type for node in fused.graph.node}
    feeds = graphs.wide_feeds(model, 3)
    feeds["key"] *= 1e6
    assert graphs.difference(graphs.lowered_double(fused, report), graphs.double(model), feeds) < 1e-9


def test_constants_on_both_sides_of_the_root_are_one_formula(worker: Worker, tmp_path: Path) -> None:
    # 2 sqrt(0.25 (4 s) + ...) is sqrt(4 s): factors are carried through every operator.
    body = (
        "m = Mul(x, two)\n s = ReduceSumSquare<keepdims = 1, axes = [-1]>(m)\n a = Add(s, eps)\n r = Sqrt(a)\n"
        " h = Mul(r, half)\n i = Reciprocal(h)\n y = Mul(x, i)"
    )
    norm = proven(worker, body, tmp_path)
    assert not isinstance(norm, Reason), norm
    assert norm.kind == "rsqrt"
    assert norm.eps == pytest.approx(float(np.float32(1e-6)) / 4, rel=1e-15)


def test_the_two_formulas_differ_below_eps_and_agree_above() -> None:
    x = np.array([[3.0, 4.0]])
    assert np.allclose(normalise(x, "max", 1e-6), [[0.6, 0.8]])
    assert np.allclose(normalise(x, "rsqrt", 0.0), [[0.6, 0.8]])
    assert np.allclose(normalise(x * 1e-9, "max", 1e-6), x * 1e-3)
    assert np.allclose(normalise(x * 1e-9, "rsqrt", 1e-6), x * 1e-6, rtol=1e-6)


def test_a_norm_in_half_precision_keeps_its_type(tmp_path: Path) -> None:
    _, found = taken(RSQRT["divided"], tmp_path, kind="float16")
    nodes, initializers, _ = found
    assert {t.data_type for t in initializers if t.data_type != TensorProto.INT64} == {HALF}
    model = norm_model(nodes, initializers, HALF, 17)
    x = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float16)
    (y,) = graphs.session(model).run(None, {"x": x})
    assert y.dtype == np.float16


def test_helper_builds_what_the_norm_s_dtype_says() -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    model = norm_model([node], [], HALF, 17)
    assert model.graph.input[0].type.tensor_type.elem_type == HALF
    assert model.opset_import[0].version == 17
