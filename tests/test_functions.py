"""Functions of a model: attributes and what refers to them, shapes through calls, calls in the bodies of loops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, FunctionProto, NodeProto, helper

import graphs
import loops
from deltafuse.bodies import bodies
from deltafuse.classes import classify
from deltafuse.errors import UserError
from deltafuse.functions import bound_nodes, without_references
from deltafuse.guards import find_guard
from deltafuse.probe import to_double
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes

STUB = '\n<domain: "my", opset_import: ["" : 17]> Fun (x) => (y) { y = Identity(x) }'
IMPORTS = ('["" : 17]', '["" : 17, "my" : 1]')
SCALE = ("q1 = Mul(q0, scale)", "q1 = my.Fun(q0)")
INSIDE = ("missing = Sub(v0, known)", "plain = Sub(v0, known)\n  missing = my.Fun(plain)")


@pytest.fixture(scope="module", autouse=True)
def _worker():
    with graphs.one_worker():
        yield


def reference(op: str, name: str, kind: AttributeProto.AttributeType, inputs: list[str], output: str) -> NodeProto:
    """A node whose attribute `name` refers to the function's attribute ``al``."""
    node = helper.make_node(op, inputs, [output])
    node.attribute.add(name=name, type=kind, ref_attr_name="al")
    return node


def function(*nodes: NodeProto, default: float | None = None, name: str = "Fun") -> FunctionProto:
    given = [] if default is None else [helper.make_attribute("al", default)]
    needed = ["al"] if default is None else []
    return helper.make_function("my", name, ["x"], ["y"], nodes, [helper.make_opsetid("", 17)], needed, given)


def calls(model: onnx.ModelProto, made: FunctionProto, attributes: Mapping[str, object]) -> onnx.ModelProto:
    """A model whose calls of ``my.Fun`` have these attributes, with the function as given."""
    del model.functions[:]
    model.functions.append(made)
    scopes = [model.graph, *(attribute.g for node in model.graph.node for attribute in node.attribute)]
    for node in (node for scope in scopes for node in scope.node if node.domain == "my"):
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return model


def stepping(edit: tuple[str, str]) -> onnx.ModelProto:
    text = graphs.STEP
    for old, new in (IMPORTS, edit):
        assert old in text
        text = text.replace(old, new)
    return graphs.parse(text + STUB)


FACTOR = reference("Constant", "value_float", AttributeProto.FLOAT, [], "a")
TIMES = [FACTOR, helper.make_node("Mul", ["x", "a"], ["y"])]
#: x + a * x * x
SQUARE = [
    FACTOR,
    helper.make_node("Mul", ["x", "x"], ["xx"]),
    helper.make_node("Mul", ["xx", "a"], ["t"]),
    helper.make_node("Add", ["x", "t"], ["y"]),
]


@pytest.mark.parametrize(("default", "given"), [(None, {"al": 0.5}), (0.5, {}), (0.0, {"al": 0.5})])
def test_a_square_behind_an_attribute_is_no_rule(
    default: float | None, given: Mapping[str, float], tmp_path: Path
) -> None:
    model = calls(stepping(INSIDE), function(*SQUARE, default=default), given)
    report = graphs.fuse(graphs.save(model, tmp_path))
    assert (report.exit, graphs.codes(report)) == (3, ["not-the-rule"])


@pytest.mark.parametrize(("default", "given"), [(None, {"al": 0.5}), (0.5, {}), (0.25, {"al": 0.5})])
@pytest.mark.parametrize("looping", [False, True])
def test_a_scale_may_be_an_attribute(
    looping: bool, default: float | None, given: Mapping[str, float], tmp_path: Path
) -> None:
    base = loops.loop(SCALE, functions=STUB) if looping else stepping(SCALE)
    model = calls(base, function(*TIMES, default=default), given)
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert report.exit == 0, report
    fused = graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report)
    feeds = loops.feeds(1, 5) if looping else graphs.wide_feeds(model, 1)
    assert graphs.difference(fused, graphs.double(model), feeds) < 1e-12


def test_double_keeps_what_references_refer_to() -> None:
    """The outer function hands its attribute on; the inner one's own default does not hold then."""
    inner = function(*TIMES, default=3.0, name="Inner")
    call = helper.make_node("Inner", ["x"], ["y"], domain="my")
    call.attribute.add(name="al", type=AttributeProto.FLOAT, ref_attr_name="al")
    outer = function(call)
    outer.opset_import.add(domain="my", version=1)
    text = '<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[2] x) => (float[2] y, float[2] z) '
    model = graphs.parse(text + "{ y = my.Fun<al = 0.5>(x) z = my.Fun<al = 2.0>(x) }" + STUB)
    model.functions[0].CopyFrom(outer)
    model.functions.append(inner)
    double = to_double(model)
    assert isinstance(double, onnx.ModelProto)
    x = np.array([1.0, 2.0])
    for found, factor in zip(graphs.session(double).run(None, {"x": x}), (0.5, 2.0), strict=True):
        assert np.array_equal(found, x * factor)
    assert not any(a.ref_attr_name for f in double.functions for node in f.node for a in node.attribute)
    assert any(a.ref_attr_name for f in model.functions for node in f.node for a in node.attribute)


def test_a_model_without_references_stays_as_it_is() -> None:
    model = stepping(INSIDE)
    before = model.SerializeToString()
    without_references(model)
    assert model.SerializeToString() == before


def test_a_cast_to_a_type_by_reference_becomes_one_to_double() -> None:
    """A function of two casts is the identity in double, whatever type it is asked for."""
    cast = reference("Cast", "to", AttributeProto.INT, ["x"], "c")
    back = helper.make_node("Cast", ["c"], ["y"], to=1)
    text = '<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[2] x) => (float[2] y) '
    model = graphs.parse(text + "{ y = my.Fun<al = 10>(x) }" + STUB)
    model.functions[0].CopyFrom(function(cast, back))
    x = np.array([1.0001, 2.00001])
    (found,) = graphs.double(model).run(None, {"x": x})
    assert np.array_equal(found, x)


def test_what_nobody_gives_is_left_out() -> None:
    pad = reference("Softmax", "axis", AttributeProto.INT, ["x"], "y")
    (node,) = bound_nodes(function(pad), helper.make_node("Fun", ["x"], ["y"], domain="my"))
    assert not node.attribute
    (node,) = bound_nodes(function(pad), helper.make_node("Fun", ["x"], ["y"], domain="my", al=0))
    assert (node.attribute[0].name, node.attribute[0].i) == ("axis", 0)


def test_the_power_that_an_attribute_says(tmp_path: Path) -> None:
    """What a call's body is, is what this call makes of it: a cube is smooth, a root is not."""
    power = function(FACTOR, helper.make_node("Pow", ["x", "a"], ["y"]), default=0.5)
    text = '<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[2] x) => (float[2] y, float[2] z) '
    model = graphs.parse(text + "{ y = my.Fun<al = 3.0>(x) z = my.Fun(x) }" + STUB)
    model.functions[0].CopyFrom(power)
    scanned = graphs.scanned(model, tmp_path)
    graph, kinds = scanned.graph, classify(scanned)
    scope = Scope(scanned, graph, kinds, Shapes(scanned))
    found = [find_guard(scope, [node], [graph.find("x") or 0], (), ()) for node in (0, 1)]
    assert found[0] is None
    assert found[1] is not None
    assert (found[1].code, found[1].args["op"]) == ("unsupported-operator", "Pow")
    assert [len(list(bodies(scanned, graph, kinds, node))) for node in (0, 1)] == [1, 1]


def test_shapes_and_types_go_through_calls(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[N,3] x) => (float16[M,K] y, int64[2] z) {
      y, z = my.Two(x)
    }
    <domain: "my", opset_import: ["" : 17]> Two (a) => (b, c) {
      t = Transpose(a)
      b = Cast<to = 10>(t)
      c = Shape(t)
    }"""
    scanned = graphs.scanned(graphs.parse(text), tmp_path)
    shapes, graph = Shapes(scanned), scanned.graph
    y, z = (graph.find(name) or 0 for name in "yz")
    assert [str(dim) for dim in shapes.shape(y) or ()] == ["3", "N"]
    assert (shapes.dtype(y), shapes.dtype(z)) == (onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64)
    contents = shapes.contents(z)
    assert contents is not None
    assert [str(item) for item in contents.ravel()] == ["3", "N"]


@pytest.mark.parametrize(
    ("functions", "code"),
    [
        ({"Fun": "my.Fun"}, "function-recursive"),
        ({"Fun": "my.Other", "Other": "my.Fun"}, "function-recursive"),
        ({"Fun": "my.Other", "Other": "Neg"}, ""),
    ],
)
def test_a_function_that_calls_itself_is_told(functions: Mapping[str, str], code: str, tmp_path: Path) -> None:
    bodies = "".join(
        f'\n<domain: "my", opset_import: ["" : 17, "my" : 1]> {name} (x) => (y) {{ y = {called}(x) }}'
        for name, called in functions.items()
    )
    text = graphs.STEP.replace(*IMPORTS).replace(*SCALE) + bodies
    path = graphs.save(graphs.parse(text), tmp_path)
    if not code:
        assert graphs.fuse(path).exit == 0
        return
    with pytest.raises(UserError, match="calls itself") as error:
        graphs.fuse(path)
    assert error.value.code == code


HIDING = [
    ("", "Mul", "which is the name of an operator of ai.onnx"),
    ("ai.onnx", "Mul", "which is the name of an operator of ai.onnx"),
    ("ai.onnx.ml", "Scaler", "which is the name of an operator of ai.onnx.ml"),
    ("com.microsoft", "FusedMatMul", "in the domain com.microsoft, whose operators onnxruntime defines"),
    ("com.microsoft", "MatMulNBits", "in the domain com.microsoft, whose operators onnxruntime defines"),
    ("com.microsoft.nchwc", "Conv", "in the domain com.microsoft.nchwc, whose operators onnxruntime defines"),
]


@pytest.mark.parametrize(("domain", "name", "why"), HIDING)
def test_a_function_under_the_name_of_an_operator_is_told(domain: str, name: str, why: str, tmp_path: Path) -> None:
    body = f'\n<domain: "{domain}", opset_import: ["" : 17]> {name} (a, b) => (y) {{ y = Add(a, b) }}'
    with pytest.raises(UserError, match="give it another name or domain") as error:
        graphs.fuse(graphs.save(graphs.parse(graphs.STEP + body), tmp_path))
    assert error.value.code == "function-hides-operator"
    assert f"the model defines a function {name}" in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize("domain", ["local", "pkg.onnxscript.torch_lib", "ai.onnxruntime._fusion", "com.example"])
def test_an_operator_s_name_in_another_domain_is_a_function_s_own(domain: str, tmp_path: Path) -> None:
    text = graphs.STEP.replace('["" : 17]', f'["" : 17, "{domain}" : 1]')
    text = text.replace("missing = Sub(v0, known)", f"missing = {domain}.FusedMatMul(v0, known)")
    text += f'\n<domain: "{domain}", opset_import: ["" : 17]> FusedMatMul (a, b) => (y) {{ y = Sub(a, b) }}'
    report = graphs.fuse(graphs.save(graphs.parse(text), tmp_path))
    assert (report.exit, graphs.codes(report)) == (0, [""])
