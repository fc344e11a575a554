"""What looks like an ordinary pattern and is not it, or may not be replaced: each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import graphs
from deltafuse import patterns
from deltafuse.expressions import Expression
from deltafuse.match import SiteReport

_NORM = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 4, 6] a) => (float[n, 4, 6] b)
<float[6] s = {1.0, 2.0, 3.0, -1.0, 0.5, 0.1}, float eps = {0.00001}, float two = {2.0}>
{
  x = Neg(a)
  m = ReduceMean<axes = [-1]>(x)
  d = Sub(x, m)
  p = Pow(d, two)
  v = ReduceMean<axes = [-1]>(p)
  e = Add(v, eps)
  r = Sqrt(e)
  q = Div(d, r)
  b = Mul(q, s)
}"""
_CLAMP = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 2] a, float[n, 2] c) => (float[n, 2] b) <float lo = {-1.0}, float hi = {2.0}>
{
  x = Neg(a)
  m = Max(x, lo)
  b = Min(m, hi)
}"""
_COPY = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 2] a, bool c) => (float[n, 2] b)
{
  x = Neg(a)
  i = Identity(x)
  b = Relu(i)
}"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def sites(text: str, rule: str, folder: Path, *edits: tuple[str, str]) -> tuple[SiteReport, ...]:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    report = graphs.fuse(graphs.save(graphs.parse(text), folder), folder / "fused.onnx", rules=(rule,))
    assert (folder / "fused.onnx").exists() == any(site.status == "fused" for site in report.sites)
    return report.sites


Edits = tuple[tuple[str, str], ...]


@pytest.mark.parametrize("text", [_NORM, _CLAMP, _COPY], ids=["norm", "clamp", "copy"])
def test_as_they_are_they_match(text: str, tmp_path: Path) -> None:
    rule = {_NORM: "layer_norm", _CLAMP: "min_max_clip", _COPY: "identity"}[text]
    assert [site.status for site in sites(text, rule, tmp_path)] == ["fused"]


@pytest.mark.parametrize(
    ("code", "edits"),
    [
        ("layer-norm-axes", (("axes = [-1]", "axes = [1]"),)),
        ("layer-norm-axes", (("axes = [-1]", "axes = [0]"),)),
        ("layer-norm-axes", (("v = ReduceMean<axes = [-1]>", "v = ReduceMean<axes = [1, 2]>"),)),
        ("layer-norm-axes", (("m = ReduceMean<axes = [-1]>", "m = ReduceMean<axes = [1]>"),)),
        ("layer-norm-axes", (("e = Add(v, eps)", "e = Add(v, v)"),)),
        ("layer-norm-axes", (("r = Sqrt(e)", "r = Mul(e, two)"),)),
        ("layer-norm-eps-outside", (("e = Add(v, eps)\n  r = Sqrt(e)", "e = Sqrt(v)\n  r = Add(e, eps)"),)),
        ("layer-norm-unbiased", (("float two", "float six = {6.0}, float five = {5.0}, float two"),
                                 ("e = Add(v, eps)", "u = Mul(v, six)\n  w = Div(u, five)\n  e = Add(w, eps)"))),
        ("layer-norm-size", (("float[n, 4, 6]", "float[n, 4, k]"), ("b = Mul(q, s)", "b = Relu(q)"))),
        ("layer-norm-size", (("float[n, 4, 6]", "float[n, 4, k]"),)),
        ("layer-norm-scale", (("float[n, 4, 6]", "float[n, 4, k]"), ("float[6] s = {1.0, 2.0, 3.0, -1.0, 0.5, 0.1}",
                                                                    "float[4, 1] s = {1.0, 2.0, 3.0, 4.0}"))),
        ("layer-norm-eps", (("float two = {2.0}", "float two = {2.0}, float tiny = {0.0000000003}"),
                            ("e = Add(v, eps)", "f = Add(v, eps)\n  e = Add(f, tiny)"))),
        ("expression-constant", (("m = ReduceMean", "c = Add(two, eps)\n  m = ReduceMean"),
                                 ("e = Add(v, eps)", "e = Add(v, c)"))),
        ("expression-dtype", (("float", "double"),)),
        ("expression-opset", (('"" : 17', '"" : 16'),)),
        ("inner-value-used", (("=> (float[n, 4, 6] b)", "=> (float[n, 4, 6] b, float[n, 4, 1] r)"),)),
        ("inner-value-used", (("=> (float[n, 4, 6] b)", "=> (float[n, 4, 6] b, float[n, 4, 6] o)"),
                              ("b = Mul(q, s)", "b = Mul(q, s)\n  o = Relu(d)"))),
        ("layer-norm-axes", (("q = Div(d, r)", "q = Div(p, r)"),)),
    ],
)  # fmt: skip
def test_no_layer_norm(code: str, edits: Edits, tmp_path: Path) -> None:
    found = sites(_NORM, "layer_norm", tmp_path, *edits)
    assert [site.reason.code for site in found] == [code]
    assert found[0].reason.text


@pytest.mark.parametrize(
    ("code", "edits"),
    [
        ("clip-crossed", (("lo = {-1.0}", "lo = {3.0}"),)),
        ("clip-per-channel", (("float lo = {-1.0}", "float[2] lo = {-1.0, -2.0}"),)),
        ("clip-per-channel", (("float hi = {2.0}", "float[1, 2] hi = {1.0, 2.0}"),)),
        ("expression-dtype", (("float", "int64"), ("{-1.0}", "{-1}"), ("{2.0}", "{2}"))),
        ("expression-opset", (('"" : 17', '"" : 10'),)),
        ("expression-differs", (("float lo = {-1.0}", "float[1, 1, 1] lo = {-1.0}"),
                                ("=> (float[n, 2] b)", "=> (float[1, n, 2] b)"))),
        ("inner-value-used", (("=> (float[n, 2] b)", "=> (float[n, 2] b, float[n, 2] m)"),)),
    ],
)  # fmt: skip
def test_no_clip(code: str, edits: Edits, tmp_path: Path) -> None:
    assert [site.reason.code for site in sites(_CLAMP, "min_max_clip", tmp_path, *edits)] == [code]


@pytest.mark.parametrize(
    "edits",
    [
        (("m = Max(x, lo)", "m = Max(x, c)"),),
        (("m = Max(x, lo)", "m = Max(x, c, lo)"),),
        (("m = Max(x, lo)", "m = Relu(x)"),),
        (("float lo = {-1.0}, ", ""), ("float[n, 2] c)", "float[n, 2] c, float lo)")),
    ],
    ids=["two values", "two values and a bound", "another operator", "a bound that is an input"],
)
def test_not_even_like_a_clip(edits: Edits, tmp_path: Path) -> None:
    assert sites(_CLAMP, "min_max_clip", tmp_path, *edits) == ()


def test_a_bound_that_may_be_overridden_is_no_constant(tmp_path: Path) -> None:
    model = graphs.parse(_CLAMP)
    model.graph.input.append(helper.make_tensor_value_info("lo", TensorProto.FLOAT, []))
    assert graphs.fuse(graphs.save(model, tmp_path), rules=("min_max_clip",)).sites == ()


@pytest.mark.parametrize(
    ("code", "edits"),
    [
        ("identity-output", (("=> (float[n, 2] b)", "=> (float[n, 2] b, float[n, 2] i)"),)),
        ("identity-input", (("x = Neg(a)\n  i = Identity(x)", "i = Identity(a)"),)),
        ("identity-captured", (("b = Relu(i)", """b = If (c) <then_branch = yes () => (float[n, 2] u) { u = Abs(i) },
                                 else_branch = no () => (float[n, 2] w) { w = Neg(i) }>"""),)),
    ],
)  # fmt: skip
def test_no_copy_to_take_out(code: str, edits: Edits, tmp_path: Path) -> None:
    (site,) = sites(_COPY, "identity", tmp_path, *edits)
    assert (site.status, site.reason.code) == ("near-miss", code)


def test_a_size_that_is_one_somewhere_is_no_reason_to_differ(tmp_path: Path) -> None:
    # All free axes are run at one too: what is only right for more, or only for one, is not taken.
    edits = (("float[n, 4, 6]", "float[n, t, 6]"), ("m = ReduceMean<axes = [-1]>", "m = ReduceMean<axes = [1, 2]>"))
    (site,) = sites(_NORM, "layer_norm", tmp_path, *edits)
    assert site.reason.code == "layer-norm-axes"


@pytest.mark.parametrize("pattern", [entry.pattern for entry in patterns.loaded() if entry.kind == "expression"])
def test_texts_of_all_codes_say_something(pattern: Expression) -> None:
    assert all(len(text) > 30 for text in pattern.texts.values())


def test_rank_is_what_the_graph_says_and_nothing_is_taken_for_the_last_axis(tmp_path: Path) -> None:
    # Axis 2 is the last of three and not of four.
    third = (("axes = [-1]", "axes = [2]"),)
    assert [site.status for site in sites(_NORM, "layer_norm", tmp_path, *third)] == ["fused"]
    (norm,) = [n for n in onnx.load(tmp_path / "fused.onnx").graph.node if n.op_type == "LayerNormalization"]
    assert {a.name: a.i for a in norm.attribute}["axis"] == -1
    (tmp_path / "fused.onnx").unlink()
    four = (*third, ("float[n, 4, 6]", "float[n, 4, 6, 6]"))
    assert [site.reason.code for site in sites(_NORM, "layer_norm", tmp_path, *four)] == ["layer-norm-axes"]


@pytest.mark.parametrize(
    "made",
    [
        "wide = Cast<to = 11>(h)\n  hi = Cast<to = 1>(wide)\n  m = Max(x, lo)",
        "half = Cast<to = 10>(h)\n  hi = Cast<to = 1>(half)\n  m = Max(x, lo)",
        "hi = Mul(h, h)\n  m = Max(x, lo)",
    ],
    ids=["double", "float16", "product"],
)
def test_a_bound_that_is_rounded_on_its_way_is_not_taken_for_what_it_was(made: str, tmp_path: Path) -> None:
    edits = (("float hi = {2.0}", "float h = {0.1}"), ("m = Max(x, lo)", made))
    (site,) = sites(_CLAMP, "min_max_clip", tmp_path, *edits)
    assert (site.status, site.reason.code) == ("near-miss", "expression-constant")


def test_a_bound_that_keeps_its_digits_is_taken(tmp_path: Path) -> None:
    made = "hi = Cast<to = 1>(h)\n  m = Max(x, lo)"
    edits = (("float hi = {2.0}", "int64 h = {2}"), ("m = Max(x, lo)", made))
    assert [site.status for site in sites(_CLAMP, "min_max_clip", tmp_path, *edits)] == ["fused"]
