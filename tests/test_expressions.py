"""Patterns for ordinary expressions: each shipped one on its own examples, and sites of several rules side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphs
from deltafuse import patterns, targets
from deltafuse.expressions import Example, Expression
from deltafuse.options import FuseOptions
from deltafuse.report import fuse_document
from deltafuse.rollback import rollback
from deltafuse.verify import verify

SHIPPED = [entry.pattern for entry in patterns.loaded() if isinstance(entry.pattern, Expression)]
#: What only some targets have an operator for.
TARGETS = {"causal_conv": "ort"}
EXAMPLES = [(pattern.name, example) for pattern in SHIPPED for example in pattern.examples]


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def same(before: Path, after: Path, seed: int = 0) -> None:
    """Both models give the same on the same inputs, free axes of 5."""
    sessions = [graphs.session(onnx.load(path)) for path in (before, after)]
    rng = np.random.default_rng(seed)
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16,
             "tensor(int64)": np.int64, "tensor(bool)": np.bool_}  # fmt: skip
    feeds = {}
    for entry in sessions[0].get_inputs():
        shape = [size if isinstance(size, int) else 5 for size in entry.shape]
        feeds[entry.name] = (rng.standard_normal(shape) * 3).astype(kinds[entry.type])
    wanted, found = (session.run(None, feeds) for session in sessions)
    for a, b in zip(found, wanted, strict=True):
        tolerance = 1e-2 if b.dtype == np.float16 else 2e-6
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rule", "example"), EXAMPLES, ids=[f"{rule}: {one.name}" for rule, one in EXAMPLES])
def test_a_shipped_pattern_does_what_its_examples_say(rule: str, example: Example, tmp_path: Path) -> None:
    model, fused = graphs.save(graphs.parse(example.text), tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(model, fused, rules=(rule,), target=TARGETS.get(rule, "ascend-310p"))
    assert [code for code in graphs.codes(report) if code] == ([example.reason] if example.reason else [])
    done = [site for site in report.sites if site.status == "fused"]
    assert len(done) == example.sites
    assert fused.exists() == bool(done)
    if not done:
        assert report.exit in (3, 4)
        return
    assert report.exit == 0
    for site in done:
        assert site.match.proof.max_error <= 1e-12
        assert site.match.proof.emitted_error <= 1e-12
    onnx.checker.check_model(onnx.load(fused), full_check=True)
    same(model, fused)
    rollback(fused, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == model.read_bytes()


@pytest.mark.parametrize("pattern", SHIPPED, ids=lambda pattern: pattern.name)
def test_a_shipped_pattern_is_off_by_default_and_shows_what_it_takes_and_leaves(pattern: Expression) -> None:
    assert not pattern.default
    assert pattern.name not in [rule.name for rule in patterns.load()]
    on = [rule.name for rule in patterns.load(operators=targets.get("ort").ordinary)]
    assert (pattern.name in on) == (pattern.name in TARGETS)
    assert any(example.sites for example in pattern.examples)
    assert any(example.reason for example in pattern.examples)
    assert set(pattern.neighbours) <= set(pattern.texts)


#: A norm, an Identity and a clamp in a row, behind one step of the gated delta rule.
MIXED = (
    ("=> (float[1,1,4,3] out, float[1,4,5,3] final_state)", "=> (float[1,1,4,3] last_out, float[1,4,5,3] final_state)"),
    ("float scale = {0.25}>", "float scale = {0.25}, float low = {-0.5}, float high = {0.5}, float two = {2.0}, "
     "float eps = {0.00001}, float[3] s = {1.0, 2.0, 3.0}>"),
    ("  out = Unsqueeze(o, time)", """  out = Unsqueeze(o, time)
  m = ReduceMean<axes = [-1]>(out)
  d = Sub(out, m)
  p = Pow(d, two)
  var = ReduceMean<axes = [-1]>(p)
  e = Add(var, eps)
  r = Sqrt(e)
  n = Div(d, r)
  w = Mul(n, s)
  i = Identity(w)
  c = Max(i, low)
  last_out = Min(c, high)"""),
)  # fmt: skip
RULES = ("gated_delta_rule", "identity", "layer_norm", "min_max_clip")


def mixed(folder: Path) -> Path:
    return graphs.save(graphs.step(*MIXED), folder)


def test_several_rules_in_one_run_do_not_overlap(tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(model, fused, rules=RULES)
    assert [(site.name, site.status, site.op) for site in report.sites] == [
        ("site.0", "fused", "ChunkGatedDeltaRule"),
        ("min_max_clip.0", "fused", "Clip"),
        ("layer_norm.0", "fused", "LayerNormalization"),
        ("identity.0", "fused", "none"),
    ]
    nodes = [node for site in report.sites[1:] for node in site.match.nodes]
    assert len(nodes) == len(set(nodes)) == 11
    graph = onnx.load(fused).graph
    assert len(graph.node) == report.nodes_after
    # The clamp reads what the Identity copied.
    assert next(node for node in graph.node if node.op_type == "Clip").input[0] == "w"
    rollback(fused, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == model.read_bytes()


def test_without_rules_only_the_default_ones_are_looked_for(tmp_path: Path) -> None:
    assert [site.match.rule for site in graphs.fuse(mixed(tmp_path)).sites] == ["gated_delta_rule"]


def test_the_document_tells_what_was_proven(tmp_path: Path) -> None:
    document = fuse_document(graphs.fuse(mixed(tmp_path), rules=RULES))
    rule, clip, norm, identity = document["sites"]
    assert norm.keys() - rule.keys() == {"parameters"}
    assert (norm["rule"], norm["form"], norm["status"]) == ("layer_norm", "expression", "fused")
    assert norm["roles"]["x"] == {"value": "out", "shape": [1, 1, 4, 3], "dtype": "float32", "layout": ""}
    assert norm["outputs"] == {"y": "w"}
    assert norm["parameters"] == {"axis": -1, "eps": float(np.float32(1e-5))}
    assert norm["dims"] is None
    assert norm["proof"]["draws"] >= 5
    assert norm["proof"]["emitted_error"] < 1e-12
    assert clip["parameters"] == {"low": -0.5, "high": 0.5}
    assert (identity["op"], identity["parameters"]) == ("none", {})


def test_a_near_miss_names_its_rule_and_blocks_nothing(tmp_path: Path) -> None:
    swapped = (
        MIXED[0],
        MIXED[1],
        (MIXED[2][0], MIXED[2][1].replace("var = ReduceMean<axes = [-1]>", "var = ReduceMean")),
    )
    model, fused = graphs.save(graphs.step(*swapped), tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(model, fused, rules=("gated_delta_rule", "layer_norm"))
    assert (report.exit, [site.status for site in report.sites]) == (0, ["fused", "near-miss"])
    near = fuse_document(report)["sites"][1]
    assert (near["rule"], near["form"], near["reason"]["code"]) == ("layer_norm", "expression", "layer-norm-axes")
    assert near["roles"] is None


def test_sites_are_chosen_by_name(tmp_path: Path) -> None:
    report = graphs.fuse(mixed(tmp_path), rules=RULES, sites=("layer_norm.*",))
    assert {site.name: site.status for site in report.sites if site.status == "fused"} == {"layer_norm.0": "fused"}
    assert graphs.codes(report).count("left-out") == 3


def test_some_sites_are_rolled_back_and_the_others_stay(tmp_path: Path) -> None:
    model, fused, some = mixed(tmp_path), tmp_path / "fused.onnx", tmp_path / "some.onnx"
    graphs.fuse(model, fused, rules=RULES)
    for name in ("site.0", "identity.*", "layer_norm.*", "min_max_clip.*"):
        report = rollback(fused, some, sites=[name])
        assert len(report.restored) == 1
        assert len(report.remaining) == 3
        rest = tmp_path / "rest.onnx"
        rollback(some, rest)
        assert rest.read_bytes() == model.read_bytes()


def test_sites_of_an_edited_file_are_rolled_back_in_place(tmp_path: Path) -> None:
    model, fused, edited = mixed(tmp_path), tmp_path / "fused.onnx", tmp_path / "edited.onnx"
    graphs.fuse(model, fused, rules=RULES[1:])
    changed = onnx.load(fused)
    changed.graph.doc_string = "edited"
    onnx.save(changed, edited)
    for name in ("identity.*", "layer_norm.*", "min_max_clip.*"):
        some = tmp_path / "some.onnx"
        assert rollback(edited, some, sites=[name]).mode == "in-place"
        same(model, some)
    rollback(edited, tmp_path / "all.onnx")
    ops = [node.op_type for node in onnx.load(tmp_path / "all.onnx").graph.node]
    assert sorted(ops) == sorted(node.op_type for node in onnx.load(model).graph.node)
    same(model, tmp_path / "all.onnx")


def test_what_is_fused_is_fused_once_and_names_stay_fresh(tmp_path: Path) -> None:
    model, once, twice = mixed(tmp_path), tmp_path / "once.onnx", tmp_path / "twice.onnx"
    graphs.fuse(model, once, rules=("gated_delta_rule", "layer_norm"))
    again = graphs.fuse(once, twice, rules=("gated_delta_rule", "layer_norm"))
    assert (again.exit, again.sites) == (3, ())
    assert any("already-fused" in note for note in again.notes)
    other = graphs.fuse(once, twice, rules=("min_max_clip",))
    assert [(site.name, site.status) for site in other.sites] == [("min_max_clip.0", "fused")]
    rollback(twice, tmp_path / "back.onnx", all_records=True)
    assert (tmp_path / "back.onnx").read_bytes() == model.read_bytes()


def test_a_file_without_any_says_how_many_places_were_looked_at(tmp_path: Path) -> None:
    model = graphs.save(graphs.step(), tmp_path)
    report = graphs.fuse(model, rules=("min_max_clip",))
    assert report.exit == 3
    assert report.notes == ("no site: 0 operators were looked at where an expression could begin, none of them does",)


def test_equal_sites_share_one_proof(tmp_path: Path) -> None:
    text = next(example for rule, example in EXAMPLES if rule == "layer_norm").text
    second = """z = Neg(w1) m2 = ReduceMean<axes = [-1]>(z) d2 = Sub(z, m2) p2 = Pow(d2, two)
        v2 = ReduceMean<axes = [-1]>(p2) e2 = Add(v2, eps) r2 = Sqrt(e2) q2 = Div(d2, r2) w2 = Mul(q2, s)
        b = Add(w2, t)"""
    model = graphs.save(graphs.parse(text.replace("b = Add(w, t)", "w1 = Add(w, t) " + second)), tmp_path)
    report = graphs.fuse(model, tmp_path / "fused.onnx", rules=("layer_norm",))
    assert [site.match.proof.shared_with for site in report.sites] == [None, "layer_norm.0"]
    assert report.sites[0].match.proof.emitted_error == report.sites[1].match.proof.emitted_error
    same(model, tmp_path / "fused.onnx")


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    model = graphs.parse(next(example for rule, example in EXAMPLES if rule == "min_max_clip").text)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    (site,) = graphs.fuse(graphs.save(model, tmp_path), rules=("min_max_clip",)).sites
    assert (site.status, site.reason.code) == ("refused", "expression-unknown")
    assert "number of axes of a" in site.reason.text


def test_extract_writes_each_site_alone(tmp_path: Path) -> None:
    from deltafuse import pipeline
    from deltafuse.options import SilentProgress

    options = FuseOptions(model=mixed(tmp_path), rules=RULES[1:], extract=tmp_path / "sites")
    report = pipeline.inspect(options, SilentProgress())
    names = [Path(file).name for file in report.extracted]
    assert names == ["min_max_clip.0.before.onnx", "min_max_clip.0.after.onnx", "layer_norm.0.before.onnx",
                     "layer_norm.0.after.onnx", "identity.0.before.onnx"]  # fmt: skip
    assert [site.status for site in report.sites] == ["match"] * 3
    for name in ("layer_norm.0", "min_max_clip.0"):
        same(tmp_path / "sites" / f"{name}.before.onnx", tmp_path / "sites" / f"{name}.after.onnx")


def test_a_file_out_of_order_is_fused_as_it_lies(tmp_path: Path) -> None:
    shuffled = graphs.step(*MIXED)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in shuffled.graph.node]
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(reversed(nodes))
    model, fused = graphs.save(shuffled, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(model, fused, rules=RULES[1:])
    assert [site.status for site in report.sites] == ["fused"] * 3
    found = {node.output[0]: node for node in onnx.load(fused).graph.node}
    assert (found["last_out"].op_type, found["last_out"].input[0]) == ("Clip", "w")
    assert (found["w"].op_type, found["w"].input[0]) == ("LayerNormalization", "out")
    rollback(fused, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == model.read_bytes()


@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_other_targets_take_them_beside_their_own_operators(target: str, tmp_path: Path) -> None:
    # A reader of the Identity has another form at a raised opset: it is rewritten for both reasons at once.
    edits = (*MIXED, ("  i = Identity(w)\n  c = Max(i, low)", "  i = Identity(w)\n  rows = ReduceMean<axes = [-1]>(i)\n"
                      "  far = Sub(i, rows)\n  c = Max(far, low)"))  # fmt: skip
    model, fused = graphs.save(graphs.step(*edits), tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(model, fused, rules=RULES, target=target)
    assert [site.status for site in report.sites] == ["fused"] * 4
    graph = onnx.load(fused).graph
    assert next(node for node in graph.node if "rows" in node.output).input[0] == "w"
    assert verify(model, fused, level="site").exit == 0
    rollback(fused, tmp_path / "some.onnx", sites=["identity.*"])
    assert verify(model, tmp_path / "some.onnx", level="site").exit == 0
    rollback(fused, tmp_path / "some.onnx", sites=["site.0"])
    same(model, tmp_path / "some.onnx")
    rollback(fused, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == model.read_bytes()


def test_ordinary_sites_alone_leave_the_opset_as_it_is(tmp_path: Path) -> None:
    model, fused = mixed(tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(model, fused, rules=RULES[1:], target="onnx")
    assert onnx.load(fused).opset_import == onnx.load(model).opset_import


@pytest.mark.parametrize(("low", "told"), [("0.0", True), ("-0.0", True), ("-1.0", False)])
def test_a_clip_at_zero_says_that_the_sign_of_a_zero_may_change(low: str, told: bool, tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] a) => (float[n,4] b) '
    model = graphs.parse(f"{text}<float lo = {{{low}}}, float hi = {{6.0}}> {{ m = Max(a, lo) b = Min(m, hi) }}")
    (site,) = graphs.fuse(graphs.save(model, tmp_path), rules=("min_max_clip",)).sites
    assert site.status == "fused"
    assert any("sign" in note for note in site.notes) == told
