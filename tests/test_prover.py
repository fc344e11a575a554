"""From a candidate to a proof, or to the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import graphs
from deltafuse import prover
from deltafuse.agreement import BAR
from deltafuse.classes import classify
from deltafuse.draws import DRAWS
from deltafuse.prover import Proven, prove
from deltafuse.reasons import TEXTS, Reason
from deltafuse.region import convex
from deltafuse.shapes import Shapes
from deltafuse.worker import Worker
from exports import export


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


def proof(model: onnx.ModelProto, worker: Worker, folder: Path) -> tuple[Proven | Reason, dict[int, str]]:
    scanned = graphs.scanned(model, folder)
    (candidate,) = graphs.candidates(scanned)
    names = {value: scanned.graph.name(value) for value in range(len(scanned.graph.value_names))}
    found = prove(scanned, classify(scanned), Shapes(scanned), graphs.pattern(), worker, candidate)
    return found, names


def test_a_step_is_proven_in_its_roles(worker: Worker, tmp_path: Path) -> None:
    found, names = proof(graphs.step(), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert {role: names[value] for role, value in found.assignment.values.items()} == {
        role: role for role in ("query", "key", "value", "g", "beta", "state")
    }
    assert (names[found.out], names[found.final_state]) == ("out", "final_state")
    assert (found.out_layout, found.final_layout) == ("BTHV", "BHKV")
    assert found.max_error <= BAR
    assert found.draws == len(DRAWS)
    assert (found.validity.low, found.validity.high) == (1, 1)
    assert found.assignment.scale == pytest.approx(0.25, rel=1e-14)


@pytest.mark.parametrize(
    ("edits", "scale"),
    [
        ([("scale = {0.25}", "scale = {-3}")], -3.0),
        ([("Mul(q0, scale)", "Div(q0, scale)")], 4.0),
        ([("Mul(q0, scale)", "Identity(q0)")], 1.0),
        ([("  out = Unsqueeze(o, time)", "  o1 = Mul(o, scale)\n  out = Unsqueeze(o1, time)")], 0.0625),
    ],
)
def test_the_scale_is_what_the_arithmetic_gives(edits, scale: float, worker: Worker, tmp_path: Path) -> None:
    found, _ = proof(graphs.step(*edits), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert found.assignment.scale == pytest.approx(scale, rel=1e-12)


def test_a_factor_on_the_key_is_left_in_front(worker: Worker, tmp_path: Path) -> None:
    found, names = proof(
        graphs.step(("k1 = Unsqueeze(k0, last)", "k9 = Mul(k0, scale)\n  k1 = Unsqueeze(k9, last)")), worker, tmp_path
    )
    assert isinstance(found, Proven), found
    assert names[found.assignment.values["key"]] in ("k9", "k1")
    # The query's factor may be left in front with it.
    inside = names[found.assignment.values["query"]] in ("query", "q0")
    assert found.assignment.scale == pytest.approx(0.25 if inside else 1.0, rel=1e-12)


def test_what_is_behind_the_rule_is_not_taken_for_its_output(worker: Worker, tmp_path: Path) -> None:
    edits = [("  out = Unsqueeze(o, time)", "  o9 = Unsqueeze(o, time)\n  n = Mul(o9, o9)\n  out = Add(o9, n)")]
    found, names = proof(graphs.step(*edits), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert names[found.out] in ("o", "o9")


def test_the_last_value_that_is_still_the_output_is_taken(worker: Worker, tmp_path: Path) -> None:
    edits = [
        (
            "  out = Unsqueeze(o, time)",
            "  o9 = Unsqueeze(o, time)\n  t = Transpose<perm = [0, 2, 1, 3]>(o9)\n  out = Cast<to = 10>(t)",
        )
    ]
    found, names = proof(graphs.step(*edits), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert (names[found.out], found.out_layout) == ("out", "BHTV")


def test_a_state_that_nothing_reads_is_no_result(worker: Worker, tmp_path: Path) -> None:
    found, _ = proof(graphs.step((", float[1,4,5,3] final_state)", ")")), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert (found.final_state, found.final_layout) == (None, "")


def test_a_final_state_that_is_changed_inside_is_not_dropped(worker: Worker, tmp_path: Path) -> None:
    # What is read outside is the final state plus one: it is computed from the final state, which stays.
    edits = [("final_state = Add(decayed, update)", "after = Add(decayed, update)\n  final_state = Add(after, one)"),
             ("Mul(final_state, q2)", "Mul(after, q2)"), ("float scale", "float one = {1}, float scale")]  # fmt: skip
    found, names = proof(graphs.step(*edits), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert names[found.final_state] == "after"


@pytest.mark.parametrize(
    ("name", "low", "high"), [("chunk_dy20_dynBT", 17, 32), ("rec_ts17_dynBT", 1, 1), ("chunk_ts17_dynBT", 33, 48)]
)
def test_a_free_token_axis_gets_its_range(name: str, low: int, high: int, worker: Worker, tmp_path: Path) -> None:
    found, _ = proof(onnx.load(export(name).path), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert (found.validity.low, found.validity.high) == (low, high)
    assert found.trial.binding.tokens == high
    assert {low, high} <= set(found.validity.tried)


def test_a_trial_is_equal_on_fresh_draws_and_at_other_sizes(worker: Worker, tmp_path: Path) -> None:
    found, _ = proof(onnx.load(export("chunk_dy20_dynBT").path), worker, tmp_path)
    assert isinstance(found, Proven), found
    for tokens, batch in ((17, 1), (32, 2), (20, 3)):
        binding = found.trial.binding.at(tokens, batch)
        assert binding is not None
        for seed, how in enumerate(DRAWS, 50):
            assert found.trial.error(binding, how, seed) <= BAR
    beyond = found.trial.binding.at(40, 1)
    assert beyond is not None
    error = found.trial.error(beyond, DRAWS[0], 0)
    assert isinstance(error, Reason) or error > 1e-6
    few = found.trial.few_tokens()
    assert (few.tokens, few.batch) == (17, 1)


def test_every_column_is_compared_once(worker: Worker, tmp_path: Path) -> None:
    found, _ = proof(graphs.step(), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert found.trial.error(found.trial.binding, DRAWS[0], 9, full=True) <= BAR


def taken_apart(up: int, down: int) -> onnx.ModelProto:
    """A step whose decay is exp(up g) exp(-down g): exp(g), as long as both are numbers."""
    return graphs.step(
        (
            "e0 = Exp(g0)",
            "up = Mul(g0, more)\n  down = Mul(g0, less)\n  eu = Exp(up)\n  ed = Exp(down)\n  e0 = Mul(eu, ed)",
        ),
        ("float scale", f"float more = {{{up}}}, float less = {{{-down}}}, float scale"),
    )


def test_arithmetic_that_overflows_is_told(worker: Worker, tmp_path: Path) -> None:
    found, _ = proof(taken_apart(5, 4), worker, tmp_path)
    assert isinstance(found, Proven), found
    assert found.draws == len(DRAWS)
    (plunge,) = [replace(how, plunge=-200.0) for how in DRAWS if how.plunge]
    told = found.trial.error(found.trial.binding, plunge, 3)
    assert isinstance(told, Reason)
    assert (told.code, told.args) == ("overflows", {"draw": plunge.name})
    assert plunge.name in told.text


def test_a_decay_of_high_powers_is_refused_even_where_they_cancel(worker: Worker, tmp_path: Path) -> None:
    found, _ = proof(taken_apart(9, 8), worker, tmp_path)
    assert isinstance(found, Reason)
    assert found.code == "higher-degree"


def test_a_proof_of_nothing_is_no_proof(worker: Worker, tmp_path: Path) -> None:
    # The output is always zero: any rule would do.
    edits = [("scale = {0.25}", "scale = {0}"), (", float[1,4,5,3] final_state)", ")")]
    found, _ = proof(graphs.step(*edits), worker, tmp_path)
    if isinstance(found, Proven):
        # Then the zero is left in front of the rule, and the query is proven to matter.
        ran = [found.trial.draw(found.trial.binding, DRAWS[0], seed)[0].query for seed in (1, 2)]
        assert not np.array_equal(*ran)
    else:
        assert found.code == "not-the-rule"


CONVEX = """
<ir_version: 8, opset_import: ["" : 17]>
convex (float[2] x, float[2] z, bool on) => (float[2] y, float[2] w) {
  out = Neg(x)
  final = Exp(x)
  a = Neg(out)
  b = Add(a, z)
  c = If(on)<then_branch = t () => (float[2] p) { p = Identity(final) },
             else_branch = e () => (float[2] q) { q = Identity(z) }>
  y = Identity(b)
  w = Identity(c)
}"""


@pytest.mark.parametrize(
    ("roots", "expected"),
    [(["x", "z"], True), (["x", "out"], False), (["a"], False), (["b", "x"], False), (["z"], True), (["c"], False)],
)
def test_a_root_computed_from_a_result_is_not_convex(roots: list[str], expected: bool, tmp_path: Path) -> None:
    graph = graphs.scanned(graphs.parse(CONVEX), tmp_path).graph
    assert convex(graph, [graph.find(name) for name in roots], graph.find("out"), graph.find("final")) is expected


def test_without_a_final_state_only_the_output_counts(tmp_path: Path) -> None:
    graph = graphs.scanned(graphs.parse(CONVEX), tmp_path).graph
    assert convex(graph, [graph.find("c")], graph.find("out"), None)
    assert not convex(graph, [graph.find("b")], graph.find("out"), None)


def test_a_branch_between_a_result_and_an_operand_is_not_convex(tmp_path: Path) -> None:
    branches = "a () => (float[1,4,5] t) { t = Identity(s1) }, else_branch = b () => (float[1,4,5] e) { e = Neg(s1) }"
    chosen = f"If(always)<then_branch = {branches}>"
    query = (
        "  s0 = ReduceSum<keepdims = 0>(final_state, last)\n  s1 = Sigmoid(s0)\n"
        f"  s2 = {chosen}\n  s3 = Sigmoid(s2)\n  q1 = Mul(s3, scale)"
    )
    model = graphs.step(("  q1 = Mul(q0, scale)", query), ("float scale", "bool always = {1}, float scale"))
    with graphs.one_worker():
        report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (4, ["not-convex"])


def test_every_refusal_has_a_text() -> None:
    assert {"inner-value-used", "not-convex", "no-output", "output-in-parts"} == prover.REFUSALS
    assert set(TEXTS) >= prover.REFUSALS


def stranger(op: str, domain: str, value: str, *, inside: bool) -> onnx.ModelProto:
    """A step with an operator that does not run in double: behind a result, or among the rule's own."""

    def make(source: str, result: str) -> graphs.Nodes:
        return [helper.make_node(op, [source], [result], domain=domain)], []

    model = graphs.step()
    if inside:
        model = graphs.insert(model, value, make)
    else:
        model.graph.node.extend(make(value, "behind")[0])
        model.graph.output.add().CopyFrom(helper.make_tensor_value_info("behind", TensorProto.FLOAT, None))
    model.opset_import.extend([helper.make_opsetid(domain, 1)] if domain else [])
    return model


@pytest.mark.parametrize(("op", "domain"), [("Magic", "my.own"), ("Softsign", ""), ("MeanVarianceNormalization", "")])
def test_what_cannot_be_run_stops_a_proof_only_inside(op: str, domain: str, tmp_path: Path) -> None:
    for result in ("out", "final_state"):
        behind = graphs.save(stranger(op, domain, result, inside=False), tmp_path)
        fused = tmp_path / "fused.onnx"
        assert graphs.fuse(behind, fused).exit == 0
        (kept,) = [node for node in onnx.load(fused).graph.node if node.op_type == op]
        assert list(kept.input) == [result]
    inside = graphs.save(stranger(op, domain, "delta", inside=True), tmp_path)
    assert graphs.codes(graphs.fuse(inside)) == ["unsupported-operator"]
