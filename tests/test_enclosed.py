"""Rules inside the bodies of If, Loop and Scan: found, proven, replaced, checked and undone where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as failures

import bodied
import graphs
import loops
import mutants
from deltafuse import api, drafting, patterns, tables, targets, verify
from deltafuse.choosing import of_options
from deltafuse.clock import Clock
from deltafuse.enclosed import Enclosed, enter
from deltafuse.lint import lint
from deltafuse.match import Plan
from deltafuse.memory import Memory
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.planning import plan_site
from deltafuse.probe import Worker
from deltafuse.protobuf import write_field, write_varint
from deltafuse.reasons import Reason
from deltafuse.rollback import rollback
from deltafuse.scope import Scope
from deltafuse.searching import Search
from deltafuse.verify_bars import EXACT
from exports import export, exports

ZOO = Path(__file__).parent / "zoo"
#: Equal up to rounding in double.
SAME = 1e-9
BOTH = ("ort", "onnx")

MODELS = {
    "branch": bodied.chosen,
    "own constants": lambda: bodied.chosen(inside=True),
    "decode steps": bodied.decoding,
    "layers": bodied.layered,
    "scanned rows": bodied.scanning,
}
PLACES = {
    "branch": "choice/then_branch",
    "own constants": "choice/then_branch",
    "decode steps": "decode/body",
    "layers": "layers/body",
    "scanned rows": "steps/body",
}


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def run(model: onnx.ModelProto | Path, feeds: dict[str, Any]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def plain(fused: Path, out: Path) -> onnx.ModelProto:
    """The fused file in plain operators, without rounding."""
    assert api.lower(fused, out, rounding=False, linear_attention="always").exit == 0
    return onnx.load(out)


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("name", MODELS)
def test_a_rule_inside_a_body_is_fused_where_it_is(name: str, target: str, tmp_path: Path) -> None:
    model, out = MODELS[name](), tmp_path / "fused.onnx"
    path = graphs.save(model, tmp_path)
    report = graphs.fuse(path, out, target=target)
    assert (report.exit, graphs.codes(report)) == (0, [""])
    (site,) = report.sites
    assert (site.status, site.op, site.inside) == ("fused", "LinearAttention", PLACES[name])
    assert site.match is not None
    assert site.match.proof.max_error < EXACT
    onnx.checker.check_model(onnx.load(out))
    feeds = bodied.feeds(model)
    for got, want in zip(run(out, feeds), run(model, feeds), strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    done = rollback(out, tmp_path / "back.onnx")
    assert (done.mode, done.restored) == ("bytes", (site.name,))
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_two_oracles_agree_in_double(name: str, tmp_path: Path) -> None:
    """onnxruntime on the lowered form against onnx's own reference evaluator on the unfused one."""
    model, out = MODELS[name](), tmp_path / "fused.onnx"
    assert graphs.fuse(graphs.save(model, tmp_path), out, target="ort").exit == 0
    lowered = graphs.double(plain(out, tmp_path / "plain.onnx"))
    for seed in range(3):
        feeds = bodied.feeds(model, seed)
        wide = {key: value.astype(np.float64) if value.dtype.kind == "f" else value for key, value in feeds.items()}
        got = lowered.run(None, wide)
        want = graphs.double(model).run(None, wide)
        other = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
        for a, b, c in zip(got, want, other, strict=True):
            assert np.abs(a - b).max() <= EXACT * np.abs(b).max()
            # The evaluator puts what a Loop's steps give one behind the other, without an axis for the steps.
            np.testing.assert_allclose(a.reshape(c.shape), c, rtol=2e-4, atol=2e-5 * np.abs(c).max())


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("name", ["nested_if", "nested_loop"])
def test_a_real_export_with_the_rule_in_a_body(name: str, target: str, tmp_path: Path) -> None:
    path, out = ZOO / f"{name}.onnx", tmp_path / "fused.onnx"
    report = graphs.fuse(path, out, target=target)
    assert (report.exit, graphs.codes(report)) == (0, [""])
    places = {"nested_if": "If_92/then_branch", "nested_loop": "Loop_90/body/Loop_92/body"}
    assert report.sites[0].inside == places[name]
    with np.load(path.with_suffix(".npz")) as stored:
        feeds = {info.name: stored[info.name] for info in onnx.load(path).graph.input}
        expected = [stored[f"out{index}"] for index in range(2)]
    for got, want in zip(run(out, feeds), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    checked = verify(path, out)
    assert (checked.exit, [site.verdict for site in checked.sites]) == (0, ["equal"])
    assert checked.network is not None
    assert checked.network.verdict == "passes"
    rollback(out, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


SMALL = [one.name for one in exports() if one.path.stat().st_size < 17_100]


# A Loop with an exponential in it is told of as a whole, one of which nothing is told in a main graph too.
@pytest.mark.parametrize(
    ("name", "op"), [(name, op) for name in SMALL for op in ("If", "Loop") if (name, op) != ("nm_softmax_exp", "Loop")]
)
def test_what_is_judged_in_a_main_graph_is_judged_alike_in_a_body(name: str, op: str, tmp_path: Path) -> None:
    """Real exports, matches and near misses, as a branch and as a body: the same verdicts."""
    source = export(name).path
    plain_report = graphs.fuse(source, None, target="ort")
    path, out = graphs.save(bodied.enclosed(onnx.load(source), op), tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, out, target="ort")
    assert graphs.codes(report) == graphs.codes(plain_report)
    assert [site.status for site in report.sites] == [
        # Nothing is written without an output.
        "fused" if site.status == "fused" and report.exit == 0 else site.status
        for site in plain_report.sites
    ]
    assert report.exit == plain_report.exit
    if report.exit == 0:
        rollback(out, tmp_path / "back.onnx")
        assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()
        assert verify(path, out, level="site").exit == 0


NEAR = {
    "decay-sign": [("e0 = Exp(g0)", "n0 = Neg(g0) e0 = Exp(n0)")],
    "piecewise": [("decayed = Mul(state, e2)", "kept = Mul(state, e2) decayed = Clip(kept, floor)"),
                  ("float scale = {0.25}", "float scale = {0.25}, float floor = {-50.0}")],
    "read-before-update": [("read = Mul(final_state, q2)", "read = Mul(decayed, q2)")],
}  # fmt: skip


@pytest.mark.parametrize("code", NEAR)
@pytest.mark.parametrize("make", [bodied.chosen, bodied.decoding])
def test_near_misses_inside_a_body_stay(make: Any, code: str, tmp_path: Path) -> None:
    path = graphs.save(make(graphs.step(*NEAR[code])), tmp_path)
    report = graphs.fuse(path, tmp_path / "out.onnx", target="ort")
    assert report.exit == 3
    assert not (tmp_path / "out.onnx").exists()
    if make is bodied.chosen:
        assert graphs.codes(report) == [code]
        assert report.sites[0].inside == "choice/then_branch"


def test_a_rule_that_changes_with_the_step_number_is_none(tmp_path: Path) -> None:
    step = graphs.step(("delta = Mul(missing, b1)", "early = Mul(missing, b1) number = Cast<to = 1>(i) "
                        "half = Mul(number, scale) delta = Mul(early, half)"))  # fmt: skip
    report = graphs.fuse(graphs.save(bodied.decoding(step), tmp_path), None, target="ort")
    assert report.exit == 3
    assert {site.status for site in report.sites} == {"near-miss"}


def test_a_target_whose_converter_takes_no_control_flow_leaves_bodies_alone(tmp_path: Path) -> None:
    path = graphs.save(bodied.chosen(), tmp_path)
    for target in ("ascend-310p", "ascend-a2"):
        report = graphs.fuse(path, tmp_path / "out.onnx", target=target)
        assert (report.exit, graphs.codes(report)) == (3, ["inside-body"])
        reason = report.sites[0].reason
        assert reason is not None
        assert "targets ort and onnx" in reason.text
        assert not targets.get(target).control_flow
    assert targets.get("ort").control_flow


def test_what_is_no_rule_inside_is_told_with_what_was_found_inside(tmp_path: Path) -> None:
    model = bodied.chosen()
    (state,) = [info for info in model.graph.input if info.name == "state"]
    model.graph.input.remove(state)
    full = np.full([dim.dim_value for dim in state.type.tensor_type.shape.dim], 0.3, np.float32)
    model.graph.initializer.append(bodied.constant("state", full))
    path = graphs.save(model, tmp_path)
    assert graphs.codes(graphs.fuse(path)) == ["inside-body"]
    for target in ("ort", "onnx"):
        report = graphs.fuse(path, target=target)
        assert (report.exit, graphs.codes(report)) == (3, ["not-the-rule"])
        reason = report.sites[0].reason
        assert reason is not None
        assert "--target" not in reason.text


def test_no_target_is_advised_that_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> list[int]:
        return []

    monkeypatch.setattr(Search, "_likely", nothing)
    report = graphs.fuse(graphs.save(bodied.chosen(), tmp_path), target="ort")
    assert (report.exit, graphs.codes(report)) == (3, ["inside-unproven"])
    reason = report.sites[0].reason
    assert reason is not None
    assert reason.fix == "export the branch, unroll the loop or inline it"


def test_a_site_inside_a_body_is_named_plainly(tmp_path: Path) -> None:
    report = api.inspect(graphs.save(bodied.chosen(), tmp_path), target="ort")
    assert "site.0: it lies inside choice/then_branch" in list(tables.sentences(report))


def test_fusing_twice_changes_nothing(tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    assert graphs.fuse(graphs.save(bodied.layered(), tmp_path), fused, target="ort").exit == 0
    again = graphs.fuse(fused, tmp_path / "again.onnx", target="ort")
    assert again.exit == 3
    assert [note for note in again.notes if note.startswith("already-fused: the model holds fused nodes already (1)")]


def test_a_site_inside_a_body_is_extracted_like_any_other(tmp_path: Path) -> None:
    path = graphs.save(bodied.layered(), tmp_path)
    report = api.inspect(path, target="ort", extract=tmp_path / "sites")
    assert [site.status for site in report.sites] == ["match"]
    before, after, lowered = map(onnx.load, report.extracted)
    assert "LinearAttention" in {node.op_type for node in after.graph.node}
    rng = np.random.default_rng(0)
    feeds = {
        info.name: rng.normal(size=[dim.dim_value for dim in info.type.tensor_type.shape.dim]).astype(np.float32)
        for info in before.graph.input
    }
    for got, want in zip(run(lowered, feeds), run(before, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_rule_in_a_branch_of_a_function_is_fused_where_the_call_was(tmp_path: Path) -> None:
    model = bodied.chosen(inside=True)
    (choice, _), inputs = model.graph.node, [info.name for info in model.graph.input]
    function = helper.make_function("local", "Choose", inputs, ["o", "s"], [choice], [helper.make_opsetid("", 17)])
    call = helper.make_node("Choose", inputs, ["o", "s"], domain="local", name="call")
    model.graph.node[0].CopyFrom(call)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused, target="ort")
    assert (report.exit, graphs.codes(report)) == (0, [""])
    assert report.sites[0].inside.endswith("then_branch")
    feeds = bodied.feeds(model)
    for got, want in zip(run(fused, feeds), run(path, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    rollback(fused, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("among", [False, True])
def test_a_call_inside_a_body_is_fused_where_it_is_the_rule_alone(among: bool, tmp_path: Path) -> None:
    """Calls of functions in which the rule lies among other nodes become their nodes in the main graph only."""
    edits = [("q0 = Squeeze(query, time)", "turned = Tanh(query) q0 = Squeeze(turned, time)"),
             ("out = Unsqueeze(o, time)", "raw = Unsqueeze(o, time) out = Tanh(raw)")]  # fmt: skip
    model = graphs.step(*(edits if among else []))
    names = [[info.name for info in some] for some in (model.graph.input, model.graph.output)]
    nodes = [*(helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer), *model.graph.node]
    function = helper.make_function("local", "Step", *names, nodes, [helper.make_opsetid("", 17)])
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.append(helper.make_node("Step", *names, domain="local", name="call"))
    whole = bodied.enclosed(model, "If")
    whole.functions.append(function)
    whole.opset_import.append(helper.make_opsetid("local", 1))
    report = graphs.fuse(graphs.save(whole, tmp_path), tmp_path / "out.onnx", target="ort")
    assert (report.exit, graphs.codes(report)) == ((3, ["inside-call"]) if among else (0, [""]))


def test_verify_sees_what_is_wrong_inside_a_body(tmp_path: Path) -> None:
    path, fused = graphs.save(bodied.chosen(), tmp_path), tmp_path / "fused.onnx"
    assert graphs.fuse(path, fused, target="ort").exit == 0
    model = onnx.load(fused)
    branch = next(attribute.g for attribute in model.graph.node[0].attribute if attribute.name == "then_branch")
    kernel = next(node for node in branch.node if node.op_type == "LinearAttention")
    next(attribute for attribute in kernel.attribute if attribute.name == "scale").f *= 2
    onnx.save(model, tmp_path / "scaled.onnx")
    found = verify(path, tmp_path / "scaled.onnx", level="site")
    assert (found.exit, [site.verdict for site in found.sites]) == (5, ["differs"])


def test_verify_sees_the_sites_of_a_body_whose_if_reads_another_condition(tmp_path: Path) -> None:
    path, fused = graphs.save(bodied.chosen(), tmp_path), tmp_path / "fused.onnx"
    assert graphs.fuse(path, fused, target="ort").exit == 0
    model = onnx.load(fused)
    held = next(index for index, node in enumerate(model.graph.node) if node.op_type == "If")
    model.graph.node.insert(held, helper.make_node("Not", [model.graph.node[held].input[0]], ["turned"]))
    model.graph.node[held + 1].input[0] = "turned"
    onnx.save(model, tmp_path / "turned.onnx")
    found = verify(path, tmp_path / "turned.onnx", level="site")
    assert (found.exit, [site.verdict for site in found.sites]) == (5, ["equal"])
    assert "changed-outside" in {finding.code for finding in found.findings}
    assert [note for note in found.notes if "no fused site" in note] == []


def test_verify_sees_an_edit_beside_a_site_inside_a_body(tmp_path: Path) -> None:
    path, fused = graphs.save(bodied.decoding(), tmp_path), tmp_path / "fused.onnx"
    assert graphs.fuse(path, fused, target="ort").exit == 0
    model = onnx.load(fused)
    next(node for node in model.graph.node[0].attribute[0].g.node if node.op_type == "Tanh").op_type = "Sigmoid"
    onnx.save(model, tmp_path / "edited.onnx")
    found = verify(path, tmp_path / "edited.onnx", level="site")
    assert found.exit == 5
    assert "differs" in {site.verdict for site in found.sites} or "changed-outside" in {
        finding.code for finding in found.findings
    }


def test_lint_looks_into_bodies(tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    assert graphs.fuse(graphs.save(bodied.decoding(), tmp_path), fused, target="ort").exit == 0
    assert (lint(fused).nodes, lint(fused).exit) == (1, 0)
    model = onnx.load(fused)
    kernel = next(node for node in model.graph.node[0].attribute[0].g.node if node.op_type == "LinearAttention")
    next(attribute for attribute in kernel.attribute if attribute.name == "kv_num_heads").i = 3
    onnx.save(model, tmp_path / "wrong.onnx")
    assert lint(tmp_path / "wrong.onnx").exit == 5


def two(*, inside: bool = True) -> onnx.ModelProto:
    """Two rules in one branch that share constants, and one in the main graph that reads what the If gives."""
    model = bodied.chosen(inside=inside)
    branch = next(attribute.g for attribute in model.graph.node[0].attribute if attribute.name == "then_branch")
    second, third = (bodied.step_nodes(suffix=f".{number}") for number in (2, 3))
    for nodes, number in ((second, 2), (third, 3)):
        names = {"state": f"state.{number}", "g": f"g.{number}"} | ({"value": "y"} if number == 3 else {})
        for node in nodes:
            node.input[:] = [names.get(name, name) for name in node.input]
        model.graph.input.extend([bodied.info(names["state"], (1, 4, 5, 3)), bodied.info(names["g"], (1, 1, 4))])
    sums = [helper.make_node("Add", [name, f"{name}.2"], [f"{name}.both"]) for name in ("out", "final_state")]
    branch.node.extend([*second, *sums])
    branch.output[0].name, branch.output[1].name = "out.both", "final_state.both"
    model.graph.node.extend(third)
    model.graph.output.append(bodied.info("out.3", (1, 1, 4, 3)))
    if inside:
        model.graph.initializer.extend(bodied.constants())
        for tensor in branch.initializer:
            tensor.name = f"{tensor.name}.in"
        for node in branch.node:
            own = {tensor.name for tensor in bodied.constants()}
            node.input[:] = [f"{name}.in" if name in own else name for name in node.input]
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("target", BOTH)
def test_sites_of_several_graphs_go_and_come_back_one_by_one(target: str, inside: bool, tmp_path: Path) -> None:
    path, fused = graphs.save(two(inside=inside), tmp_path), tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused, target=target)
    assert [(site.name, site.status, bool(site.inside)) for site in report.sites] == [
        ("site.0", "fused", False), ("site.1", "fused", True), ("site.2", "fused", True)
    ]  # fmt: skip
    feeds = bodied.feeds(onnx.load(path))
    expected = run(path, feeds)
    assert verify(path, fused).exit == 0
    for name in ("site.0", "site.1", "site.2"):
        part, alone = tmp_path / f"{name}.onnx", tmp_path / f"only.{name}.onnx"
        done = rollback(fused, part, sites=[name])
        assert (done.restored, len(done.remaining)) == ((name,), 2)
        for got, want in zip(run(part, feeds), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert verify(path, part, level="site").exit == 0
        assert graphs.fuse(path, alone, target=target, sites=(name,)).exit == 0
        for got, want in zip(run(alone, feeds), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        rollback(part, tmp_path / "back.onnx")
        assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()
        (tmp_path / "back.onnx").unlink()


def test_in_an_edited_file_sites_inside_bodies_stay_and_say_why(tmp_path: Path) -> None:
    fused, edited = tmp_path / "fused.onnx", tmp_path / "edited.onnx"
    assert graphs.fuse(graphs.save(two(), tmp_path), fused, target="ort").exit == 0
    model = onnx.load(fused)
    model.graph.node.append(helper.make_node("Neg", ["y"], ["mine"]))
    onnx.save(model, edited)
    done = rollback(edited, tmp_path / "back.onnx")
    assert (done.mode, done.restored) == ("in-place", ("site.0",))
    assert dict(done.refused)["site.1"].startswith("it lies inside choice")
    assert run(tmp_path / "back.onnx", bodied.feeds(onnx.load(fused)))[0].shape == (1, 1, 4, 3)


@pytest.mark.parametrize("opset", [13, 17])
def test_all_bodies_follow_a_raised_opset(opset: int, tmp_path: Path) -> None:
    """A reduction in the old form beside the rule, in the other branch and in the main graph."""
    model = bodied.chosen(opset=opset)
    for attribute in model.graph.node[0].attribute:
        first = attribute.g.node[0].output[0] if attribute.name == "else_branch" else "out"
        extra = helper.make_node("ReduceMax", [first], [f"most.{attribute.name}"], axes=[-1])
        attribute.g.node.append(extra)
        attribute.g.output[0].CopyFrom(bodied.info(extra.output[0], (1, 1, 4, 1)))
    model.graph.node.append(helper.make_node("ReduceMin", ["y"], ["least"], axes=[-1]))
    model.graph.output[0].CopyFrom(bodied.info("y", (1, 1, 4, 1)))
    model.graph.output.append(bodied.info("least", (1, 1, 4, 1)))
    path, fused = graphs.save(model, tmp_path), tmp_path / "fused.onnx"
    assert graphs.fuse(path, fused, target="onnx").exit == 0
    onnx.checker.check_model(onnx.load(fused))
    for active in (True, False):
        feeds = bodied.feeds(model, active=np.array(active))
        for got, want in zip(run(fused, feeds), run(path, feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert verify(path, fused).exit == 0
    rollback(fused, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


def malformed(kind: str) -> bytes:
    """A model whose branch means something, but not by itself."""
    model = bodied.chosen(inside=True)
    branch = next(attribute.g for attribute in model.graph.node[0].attribute if attribute.name == "then_branch")
    if kind == "twice":
        branch.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), branch.node[3].output[0]))
    elif kind == "order":
        # The query's own first node; all others are in order.
        branch.node.append(branch.node.pop(0))
    else:
        nodes = b"".join(write_field(1, node.SerializeToString()) for node in branch.node)
        del branch.node[:]
        return written(model, branch.SerializeToString() + nodes)
    return model.SerializeToString()


def written(model: onnx.ModelProto, branch: bytes, *, parts: int = 1, long: bool = False) -> bytes:
    """The model with other bytes for the first branch: in parts, or with lengths written longer than need be."""

    def field(number: int, payload: bytes) -> bytes:
        if not long:
            return write_field(number, payload)
        size = bytearray(write_varint(len(payload)))
        size[-1] |= 0x80
        return write_varint(number << 3 | 2) + bytes(size) + b"\0" + payload

    node, graph = model.graph.node[0], model.graph
    at = next(i for i, attribute in enumerate(node.attribute) if attribute.name == "then_branch")
    pieces = [branch]
    if parts == 2:
        whole = onnx.GraphProto.FromString(branch)
        first = onnx.GraphProto(node=whole.node[:9]).SerializeToString()
        del whole.node[:9]
        pieces = [first, whole.SerializeToString()]
    attribute = field(1, b"then_branch") + b"".join(field(6, piece) for piece in pieces) + b"\xa0\x01\x05"
    others = [write_field(5, one.SerializeToString()) for i, one in enumerate(node.attribute) if i != at]
    del node.attribute[:]
    holder = field(1, node.SerializeToString() + b"".join([*others, field(5, attribute)]))
    del graph.node[0]
    rest, top = graph.SerializeToString(), onnx.ModelProto()
    top.CopyFrom(model)
    top.ClearField("graph")
    return field(7, holder + rest) + top.SerializeToString()


@pytest.mark.parametrize("kind", ["twice", "order", "last"])
def test_a_body_that_cannot_stand_alone_is_left_with_its_reason(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(malformed(kind))
    report = graphs.fuse(path, tmp_path / "out.onnx", target="ort")
    assert (report.exit, graphs.codes(report)) == (3, ["body-malformed"])
    reason = report.sites[0].reason
    assert reason is not None
    says = {"twice": "given more than once", "order": "out of order", "last": "a node is the last thing"}
    assert says[kind] in reason.text


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("target", BOTH)
def test_every_encoding_of_a_body_comes_back_byte_for_byte(
    target: str, parts: int, long: bool, tmp_path: Path
) -> None:
    model = two()
    branch = next(attribute.g for attribute in model.graph.node[0].attribute if attribute.name == "then_branch")
    path, fused, back = (tmp_path / f"{name}.onnx" for name in ("model", "fused", "back"))
    path.write_bytes(written(two(), branch.SerializeToString(), parts=parts, long=long))
    assert onnx.load(path) == model
    assert graphs.fuse(path, fused, target=target).exit == 0
    feeds = bodied.feeds(model)
    for got, want in zip(run(fused, feeds), run(model, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    rollback(fused, back)
    assert back.read_bytes() == path.read_bytes()
    back.unlink()
    rollback(fused, back, sites=["site.1"])
    onnx.checker.check_model(onnx.load(back))
    for got, want in zip(run(back, feeds), run(model, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def prepared(model: onnx.ModelProto, folder: Path) -> tuple[FuseOptions, list[Enclosed], list[list[Plan]]]:
    """What is planned for a model, before the file is looked at as a whole."""
    target = targets.get("ort")
    scanned = graphs.scanned(model, folder)
    options = FuseOptions(model=scanned.path, output=None, target="ort")
    with Worker() as worker:
        search = Search(patterns.load(), Clock(SilentProgress()), worker)
        found = search.bodies(search.graph(Enclosed.main(scanned)))
    graphs_found = list(found.all())
    plans = [[plan_site(options, target, site, 17) for site in one.sites] for one in graphs_found]
    return options, [one.scope for one in graphs_found], [[p for p in some if isinstance(p, Plan)] for some in plans]


def test_no_axis_is_fixed_inside_a_body(tmp_path: Path) -> None:
    options, scopes, plans = prepared(bodied.chosen(), tmp_path)
    (then,) = (index for index, some in enumerate(plans) if some)
    plan = plans[then][0]
    plans[then] = [replace(plan, pins=((plan.match.query.value, 0, 1),))]
    outlined = drafting.outline(of_options(options), scopes, plans)
    changes = outlined[then].changes
    assert isinstance(changes, Reason)
    assert changes.code == "body-pins"
    assert "choice/then_branch" in changes.text


def test_a_site_in_a_node_that_must_move_waits_for_a_second_run(tmp_path: Path) -> None:
    """The If reads the main rule's state, and stands in front of what makes that rule's query."""
    model = bodied.chosen()
    outside = bodied.step_nodes(suffix=".0")
    for node in outside:
        node.input[:] = ["turned" if name == "query" else name for name in node.input]
    for attribute in model.graph.node[0].attribute:
        for node in attribute.g.node:
            node.input[:] = ["mixed" if name == "state" else name for name in node.input]
    choice, tail = model.graph.node
    late = {"q0.0", "q1.0", "q2.0", "read.0", "o.0", "out.0"}
    first = [node for node in outside if node.output[0] not in late]
    turned = helper.make_node("Tanh", ["query"], ["turned"])
    rest = [turned, *(node for node in outside if node.output[0] in late), tail]
    del model.graph.node[:]
    mixed = helper.make_node("MatMul", ["final_state.0", "weight"], ["mixed"])
    weight = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    model.graph.initializer.append(bodied.constant("weight", weight))
    model.graph.node.extend([*first, mixed, choice, *rest])
    model.graph.output.append(bodied.info("out.0", (1, 1, 4, 3)))
    onnx.checker.check_model(model)
    path, half, fused = graphs.save(model, tmp_path), tmp_path / "half.onnx", tmp_path / "fused.onnx"
    report = graphs.fuse(path, half, target="ort")
    assert (report.exit, graphs.codes(report)) == (4, ["", "body-moved"])
    reason = report.sites[1].reason
    assert reason is not None
    assert "lies inside choice" in reason.text
    assert graphs.fuse(path, half, target="ort", sites=("site.0",)).exit == 0
    assert graphs.fuse(half, fused, target="ort").exit == 0
    feeds = bodied.feeds(model)
    for got, want in zip(run(fused, feeds), run(path, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    rollback(fused, tmp_path / "back.onnx", all_records=True)
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


def test_a_file_scans_bodies_where_they_are(tmp_path: Path) -> None:
    model = graphs.scanned(bodied.chosen(), tmp_path)
    main = Enclosed.main(model)
    bodies = enter(main, 0)
    assert not isinstance(bodies, Reason)
    assert [body.model.place for body in bodies] == ["choice/else_branch", "choice/then_branch"]
    graph = bodies[1].model.graph
    assert [graph.name(value) for value in graph.inputs] == [graph.name(value) for value in graph.captured]
    # The constants of the main graph are read where they lie.
    assert {graph.name(value) for value in graph.initializers} == {"time", "last", "row", "scale"}
    assert graph.outer == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["branch", "decode steps", "layers"])
def test_mutants_inside_bodies_are_never_fused_wrongly(name: str, tmp_path: Path) -> None:
    model, out = MODELS[name](), tmp_path / "out.onnx"
    unfused = graphs.double(model)
    feeds = [
        {key: value.astype(np.float64) if value.dtype.kind == "f" else value for key, value in one.items()}
        for one in (bodied.feeds(model, seed) for seed in (1, 2))
    ]
    inside = {name for node in model.graph.node for name in node.output}
    tried, exits = 0, set[int]()
    for done, mutant in islice(mutants.mutants(model, 5, inside, feeds[0]), 400):
        try:
            session = graphs.double(mutant)
            with np.errstate(all="ignore"):
                differs = max(graphs.difference(unfused, session, given) for given in feeds)
        except (failures.Fail, failures.InvalidArgument, failures.InvalidGraph, failures.RuntimeException):
            continue
        except (failures.NotImplemented, ValueError):
            continue
        if not differs > SAME:
            continue
        out.unlink(missing_ok=True)
        report = graphs.fuse(graphs.save(mutant, tmp_path), out, target="ort")
        exits.add(report.exit)
        tried += 1
        if report.exit == 0:
            lowered = graphs.double(plain(out, tmp_path / "plain.onnx"))
            assert max(graphs.difference(lowered, session, given) for given in feeds) < SAME, done
        if tried == 40:
            break
    assert tried == 40
    assert exits == {0, 3} or exits == {0, 3, 4}


@pytest.mark.parametrize("state", ["float[1,4,5,3] state", "float[S,4,5,3] state"])
def test_a_state_that_is_spread_over_sequences_inside_a_body_is_refused(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step has a state of one sequence beside operands of several, which the fused operator does not take."""
    monkeypatch.setattr(Memory, "find_further", refuse_loops)
    report = graphs.fuse(graphs.save(loops.loop(("float[B,4,5,3] state", state)), tmp_path), target="ort")
    assert (report.exit, graphs.codes(report)) == (3, ["further-memory"])


def refuse_loops(_: Memory, scope: Scope, nodes: Sequence[int]) -> Reason | None:
    """As if each loop remembered more than the state, so that the step inside is looked at by itself."""
    found = [node for node in nodes if scope.graph.op[node] == "Loop"]
    return Reason("further-memory", {"node": "", "value": ""}) if found else None
