"""Ordinary patterns of a user's own, and what the framework says of patterns and proposals that are not right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphs
from deltafuse import patterns
from deltafuse.errors import UserError
from deltafuse.match import FuseReport
from deltafuse.reasons import TEXTS
from deltafuse.rollback import rollback
from own_patterns import CAUSAL_CONV, RECIPROCAL
from test_expressions import same

_MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 4] a, float[n, 4] c) => (float[n, 4] b) <float one = {1.0}>
{
  x = Add(a, c)
  y = Div(one, x)
  b = Mul(y, a)
}"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def own(folder: Path, text: str, *edits: tuple[str, str]) -> Path:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    folder = folder / "mine"
    folder.mkdir()
    (folder / "own.py").write_text(text)
    return folder


def fused(folder: Path, *edits: tuple[str, str], model: str = _MODEL, **options: object) -> FuseReport:
    path = graphs.save(graphs.parse(model), folder)
    chosen = {"rules": ("inverse",), "patterns": (own(folder, RECIPROCAL, *edits),)} | options
    return graphs.fuse(path, folder / "fused.onnx", **chosen)


def test_a_user_s_ordinary_pattern_fuses(tmp_path: Path) -> None:
    report = fused(tmp_path)
    assert [(site.name, site.status, site.op) for site in report.sites] == [("inverse.0", "fused", "Reciprocal")]
    graph = onnx.load(tmp_path / "fused.onnx").graph
    assert [node.op_type for node in graph.node] == ["Add", "Reciprocal", "Mul"]
    assert {item.key: item.value for item in graph.node[1].metadata_props}["deltafuse.rule"] == "inverse"
    same(tmp_path / "model.onnx", tmp_path / "fused.onnx")
    rollback(tmp_path / "fused.onnx", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_its_examples_hold(tmp_path: Path) -> None:
    (pattern,) = patterns.load([own(tmp_path, RECIPROCAL)], ["inverse"])
    for number, example in enumerate(pattern.examples):
        model = graphs.save(graphs.parse(example.text), tmp_path, f"{number}.onnx")
        report = graphs.fuse(model, rules=("inverse",), patterns=(tmp_path / "mine",))
        assert sum(site.status == "fused" for site in report.sites) == example.sites


def test_it_may_be_on_by_default(tmp_path: Path) -> None:
    report = fused(tmp_path, ("    examples =", "    default = True\n    examples ="), rules=())
    assert [site.status for site in report.sites] == ["fused"]


def test_and_is_not_looked_for_otherwise(tmp_path: Path) -> None:
    assert fused(tmp_path, rules=()).sites == ()


def test_the_command_takes_the_folder_and_lists_it(fuse, tmp_path: Path) -> None:
    folder, model = own(tmp_path, RECIPROCAL), graphs.save(graphs.parse(_MODEL), tmp_path)
    out = tmp_path / "out.onnx"
    done = fuse(model, "-o", out, "--patterns", folder, "--json", "--rules", "inverse", "min_max_clip")
    (site,) = done.document["sites"]
    assert (done.exit, site["rule"], site["op"], site["status"]) == (0, "inverse", "Reciprocal", "fused")
    assert "inverse.0" in fuse("inspect", model, "--patterns", folder, "--rules", "inverse").out
    assert ["inverse", "expression", "off"] in [
        line.split()[:3] for line in fuse("patterns", "--patterns", folder).out.splitlines()
    ]
    assert fuse("verify", model, out).exit == 0


@pytest.mark.parametrize(
    ("code", "edits"),
    [
        ("expression-differs", [("1.0 / operands", "2.0 / operands")]),
        ("expression-operators", [('{"Div": (1, 1)}', '{"Div": (2, 2)}'), ("for region in view.regions(anchor, "
                                  "self.operators):", 'for region in view.regions(anchor, {"Div": (1, 1)}):')]),
        ("expression-roles", [('{"x": region.source}, {"y": region', '{"x": region.result}, {"y": region')]),
        ("expression-roles", [('{"x": region.source}, {"y"', '{}, {"y"')]),
        ("expression-idle", [('"Div": (1, 1)', '"Div": (0, 1), "Sub": (0, 1)'), ('{"Div"})', '{"Sub"})'),
                             ("1.0 / operands", "0.0 * operands")]),
    ],
)  # fmt: skip
def test_a_proposal_that_is_not_right_is_a_near_miss(code: str, edits: list[tuple[str, str]], tmp_path: Path) -> None:
    model = _MODEL.replace("Div(one, x)", "Sub(x, x)") if code == "expression-idle" else _MODEL
    (site,) = fused(tmp_path, *edits, model=model).sites
    assert (site.status, site.reason.code) == ("near-miss", code)
    assert site.reason.text
    assert not (tmp_path / "fused.onnx").exists()


_ANY = (
    """for region in view.regions(anchor, self.operators):
            yield Proposal({"x": region.source}, {"y": region.result})""",
    'yield Proposal({"x": view.inputs(anchor)[1]}, {"y": view.outputs(anchor)[0]})',
)


def test_a_weight_that_is_computed_inside_is_no_constant(tmp_path: Path) -> None:
    model = _MODEL.replace("<float one = {1.0}>", "<float[4] w = {1.0, 2.0, 3.0, 4.0}>")
    model = model.replace("y = Div", "one = Neg(w)\n  y = Div")
    (site,) = fused(tmp_path, _ANY, model=model).sites
    assert site.reason.code == "expression-inside"


def test_sizes_are_computed_inside_only_where_the_pattern_has_them(tmp_path: Path) -> None:
    model = _MODEL.replace("<float one = {1.0}>", "<int64 at = {1}>")
    model = model.replace(
        "y = Div", "shape = Shape(x)\n  four = Gather(shape, at)\n  one = Cast<to = 1>(four)\n  y = Div"
    )
    edits = (_ANY, ("1.0 / operands", '(operands["x"].shape[1] * 1.0) / operands'))
    dynamic = model.replace("[n, 4]", "[n, k]")
    (site,) = fused(tmp_path, *edits, model=dynamic).sites
    assert site.reason.code == "expression-inside"
    sized = ("    examples =", '    shape_operators = frozenset({"Shape", "Gather", "Cast"})\n    examples =')
    bad = (*edits, sized)
    folder = tmp_path / "more"
    folder.mkdir()
    # What is right inside must be right where it is written, too: this emission forgets the size.
    with pytest.raises(UserError, match="differ"):
        fused(folder, *bad, model=dynamic)


def test_types_that_differ_are_refused_where_the_operator_has_one(tmp_path: Path) -> None:
    model = _MODEL.replace("b = Mul(y, a)", "z = Cast<to = 1>(y)\n  b = Mul(z, a)").replace("<float one", "<double one")
    model = model.replace("x = Add(a, c)", "w = Add(a, c)\n  x = Cast<to = 11>(w)")
    edits = ('operators = {"Div": (1, 1)}', 'operators = {"Div": (1, 1), "Cast": (1, 1)}')
    (site,) = fused(tmp_path, edits, model=model, rules=("inverse",)).sites
    assert site.reason.code == "expression-types"


def test_a_bound_that_no_size_reaches_proves_nothing(tmp_path: Path) -> None:
    model = _MODEL.replace("<float one = {1.0}>", "<float one = {1.0}, int64[1] zero = {0}, int64[1] most = {1000}>")
    model = model.replace("y = Div(one, x)", "s = Slice(x, zero, most, zero)\n  y = Div(one, s)")
    edit = ('operators = {"Div": (1, 1)}', 'operators = {"Div": (1, 1), "Slice": (1, 1)}')
    (site,) = fused(tmp_path, edit, model=model).sites
    assert (site.status, site.reason.code) == ("near-miss", "expression-bound")
    (tmp_path / "few").mkdir()
    # Three rows are tried, and more: the reference is seen not to cut them off.
    (site,) = fused(tmp_path / "few", edit, model=model.replace("{1000}", "{3}")).sites
    assert (site.status, site.reason.code) == ("near-miss", "expression-differs")


def test_axes_without_elements_prove_nothing(tmp_path: Path) -> None:
    (site,) = fused(tmp_path, model=_MODEL.replace("[n, 4]", "[n, 0]")).sites
    assert site.reason.code == "expression-empty"


@pytest.mark.parametrize(
    "edit",
    [
        ('"Reciprocal", "reciprocal", (', '"Neg", "neg", ('),
        ('outputs=(place.outputs["y"].name,)', 'outputs=("elsewhere",)'),
        ('"Reciprocal", "reciprocal", (', '"NoSuchOperator", "no", ('),
        ('(place.roles["x"].name,), outputs', '(place.roles["x"].name,), {"to": 1}, outputs'),
    ],
)
def test_an_emission_that_is_not_equal_is_the_file_s_fault(edit: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"emit: .*see docs/patterns\.md") as error:
        fused(tmp_path, edit)
    assert error.value.code == "bad-pattern"
    assert not (tmp_path / "fused.onnx").exists()


def test_an_emission_that_differs_between_sites_of_one_class_is_proven_each(tmp_path: Path) -> None:
    two = _MODEL.replace("b = Mul(y, a)", "u = Mul(y, a)\n  v = Add(u, c)\n  w = Div(one, v)\n  b = Mul(w, a)")
    report = fused(tmp_path, model=two)
    assert [(site.name, site.status) for site in report.sites] == [("inverse.0", "fused"), ("inverse.1", "fused")]
    assert {site.match.class_key for site in report.sites} == {report.sites[0].match.class_key}
    second = ('emitter.node("Reciprocal", ', 'emitter.node("Neg" if place.roles["x"].name == "v" else "Reciprocal", ')
    (tmp_path / "second").mkdir()
    with pytest.raises(UserError, match=r"emit: the nodes emitted for inverse\.1 "):
        fused(tmp_path / "second", second, model=two)


@pytest.mark.parametrize(("name", "where"), [("t", "inverse.0"), ("a", "the file")])
def test_names_that_are_there_already_are_the_file_s_fault(name: str, where: str, tmp_path: Path) -> None:
    two = _MODEL.replace("b = Mul(y, a)", "v = Add(y, c)\n  w = Div(one, v)\n  b = Mul(w, a)")
    clash = ('emitter.node("Reciprocal", "reciprocal", (place.roles["x"].name,), ',
             f'emitter.node("Identity", "copy", (place.roles["x"].name,), outputs=("{name}",))\n        '
             f'emitter.node("Reciprocal", "reciprocal", ("{name}",), ')  # fmt: skip
    with pytest.raises(UserError, match=rf"emit: .* write {name}, which {where} has already: have new values") as error:
        fused(tmp_path, clash, model=two)
    assert error.value.code == "bad-pattern"
    assert str(error.value).endswith("mend emit, see docs/patterns.md")
    assert not (tmp_path / "fused.onnx").exists()


def test_an_emission_of_another_type_is_the_file_s_fault(tmp_path: Path) -> None:
    model = _MODEL.replace("b = Mul(y, a)", "z = Cast<to = 1>(y)\n  b = Mul(z, a)").replace("float one", "float16 one")
    model = model.replace("x = Add(a, c)", "w = Add(a, c)\n  x = Cast<to = 10>(w)").replace("{1.0}", "{15360}")
    other = ('emitter.node("Reciprocal", "reciprocal", (place.roles["x"].name,), ',
             'inner = emitter.node("Reciprocal", "r", (place.roles["x"].name,))\n        '
             'emitter.node("Cast", "cast", (inner,), {"to": 1}, ')  # fmt: skip
    with pytest.raises(UserError, match="element type"):
        fused(tmp_path, other, model=model)


def test_a_pattern_that_lacks_a_part_is_the_user_s_to_mend(tmp_path: Path) -> None:
    for number, edit in enumerate([('    roles = ("x",)\n', ""), ("def reference", "def elsewhere")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(UserError) as error:
            fused(folder, edit)
        assert error.value.code == "bad-pattern"


_CONV = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 6, t] a, float[n, 6, 3] past) => (float[n, 6, t] b, float[n, 6, 3] present)
<int64[1] from = {-3}, int64[1] end = {2147483647}, int64[1] axis = {2}>
{
  x = Neg(a)
  joined = Concat<axis = -1>(past, x)
  y = Conv<group = 6, kernel_shape = [4]>(joined, w, bias)
  present = Slice(joined, from, end, axis)
  b = Relu(y)
}"""


def conv(folder: Path, target: str) -> FuseReport:
    model = graphs.parse(_CONV)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (6, 1, 4)), ("bias", (6,))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    path = graphs.save(model, folder)
    mine = (own(folder, CAUSAL_CONV),)
    return graphs.fuse(path, folder / "fused.onnx", rules=("causal_conv",), patterns=mine, target=target)


def test_several_roles_two_outputs_and_an_operator_of_the_target(tmp_path: Path) -> None:
    report = conv(tmp_path, "ort")
    (site,) = report.sites
    assert (report.exit, site.status, site.op) == (0, "fused", "CausalConvWithState")
    assert {name: role.name for name, role in site.match.roles.items()} == {
        "x": "x", "past_state": "past", "weight": "w", "bias": "bias",
    }  # fmt: skip
    assert site.match.proof.emitted_error < 1e-12
    model = onnx.load(tmp_path / "fused.onnx")
    assert [node.op_type for node in model.graph.node] == ["Neg", "CausalConvWithState", "Relu"]
    assert {entry.domain: entry.version for entry in model.opset_import}["com.microsoft"] == 1
    rollback(tmp_path / "fused.onnx", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_another_target_refuses_it(tmp_path: Path) -> None:
    report = conv(tmp_path, "ascend-310p")
    assert (report.exit, graphs.codes(report)) == (4, ["conv-target"])
    del TEXTS["conv-target"]
