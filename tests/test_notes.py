"""What is said of a site although it is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import graphs
import loops
from deltafuse.draws import DRAWS
from deltafuse.match import Proof, Validity
from deltafuse.notes import Notes, _Behind
from deltafuse.verify import verify
from exports import export
from hand_match import Site, match

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
masked (float[b,t] attention_mask, float[b,t] x, float[b,t] position) => (float y, float z) {
  m = Mul(x, attention_mask)
  s = Shape(attention_mask)
  n = Reshape(x, s)
  y = Neg(m)
  z = Neg(n)
}"""


def notes(tmp_path: Path, behind: str, **changes: object) -> tuple[str, ...]:
    """The notes on a site whose key is one value of a small model and all else another."""
    model = graphs.scanned(graphs.parse(TEXT), tmp_path)
    found = match(Site(state_layout="BHKV", **changes))
    other = model.graph.find("x")
    roles = {name: replace(getattr(found, name), value=other) for name in ("query", "value", "g", "beta")}
    found = replace(
        found, **roles, key=replace(found.key, value=model.graph.find(behind)), proof=Proof(0.0, len(DRAWS))
    )
    return Notes(model).of(found)


def test_a_mask_that_the_state_ignores_is_told(tmp_path: Path) -> None:
    (note,) = notes(tmp_path, "n")
    assert note.startswith("state_ignores_mask: ")
    assert "attention_mask" in note


def test_a_mask_that_reaches_an_operand_is_not(tmp_path: Path) -> None:
    assert notes(tmp_path, "m") == ()


def test_only_its_numbers_count_not_its_shape(tmp_path: Path) -> None:
    assert len(notes(tmp_path, "n")) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(data=st.data())
def test_what_depends_on_a_value_is_found_in_any_order(data: st.DataObject, tmp_path: Path) -> None:
    names, wanted = ["start", "other"], {"start"}
    nodes: list[onnx.NodeProto] = []
    for number in range(data.draw(st.integers(1, 12))):
        sources = data.draw(st.lists(st.sampled_from([*names, ""]), min_size=1, max_size=3))
        op, name = data.draw(st.sampled_from(["Sum", "Sum", "Sum", "Shape"])), f"v{number}"
        nodes.append(helper.make_node(op, sources if op == "Sum" else [names[-1]], [name]))
        if op == "Sum" and not wanted.isdisjoint(sources):
            wanted.add(name)
        names.append(name)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in names[:2]]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in names[2:]]
    graph = graphs.scanned(helper.make_model(helper.make_graph(nodes, "dag", inputs, outputs)), tmp_path).graph
    behind = _Behind(graph, graph.find("start"))
    for name in data.draw(st.permutations(names)):
        assert behind.holds(graph.find(name)) == (name in wanted)


def test_one_token_or_no_final_state_need_no_mask(tmp_path: Path) -> None:
    assert notes(tmp_path, "n", tokens=1) == ()
    assert notes(tmp_path, "n", final_layout=None) == ()


def said(tokens: int | str, valid: Validity | None, tmp_path: Path) -> tuple[str, ...]:
    model = graphs.scanned(graphs.step(), tmp_path)
    found = replace(match(Site(tokens=tokens)), valid_tokens=valid, proof=Proof(0.0, len(DRAWS)))
    return Notes(model).of(found)


@pytest.mark.parametrize(
    ("valid", "expected"),
    [
        (Validity(1, 64, None, "wrong", (1, 64, 65)), ("1 to 64 tokens", "silently wrong above")),
        (Validity(65, 128, "fails", "wrong", ()), ("65 to 128 tokens", "fails below and is silently wrong above")),
        (Validity(1, 1, None, "wrong", ()), ("1 token", "silently wrong above")),
        (Validity(17, 1024, "fails", None, ()), ("17 to 1024 tokens", "fails below")),
    ],
)
def test_the_valid_range_is_told(valid: Validity, expected: tuple[str, str], tmp_path: Path) -> None:
    (note,) = said("seq_len", valid, tmp_path)
    assert note.startswith("valid_tokens: ")
    assert all(text in note for text in expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "the fused node is fixed to it"),
        ({"pin": False}, "the fused node is right beyond"),
        ({"target": "ort"}, "the fused node is right beyond"),
        ({"target": "onnx"}, "the fused node is right beyond"),
    ],
)
def test_a_fused_node_is_fixed_to_the_valid_size_where_that_is_pinned(options, says: str, tmp_path: Path) -> None:
    report = graphs.fuse(export("full_decode_ts17").path, tmp_path / "out.onnx", **options)
    told = [note for site in report.sites for note in site.notes if note.startswith("valid_tokens: ")]
    assert len(told) == 3
    assert all(note.endswith(says) for note in told)


@pytest.mark.parametrize(
    ("tokens", "valid"),
    [("seq_len", Validity(1, 1024, None, None, ())), ("seq_len", None), (40, Validity(40, 40, None, "wrong", ()))],
)
def test_a_range_without_ends_is_not_told(tokens: int | str, valid: Validity | None, tmp_path: Path) -> None:
    assert said(tokens, valid, tmp_path) == ()


def test_a_draw_that_overflowed_is_told(tmp_path: Path) -> None:
    model = graphs.scanned(graphs.step(), tmp_path)
    found = replace(match(Site()), proof=Proof(0.0, len(DRAWS) - 1))
    (note,) = Notes(model).of(found)
    assert note.startswith("overflows: ")


def test_a_real_prefill_says_both() -> None:
    with graphs.one_worker():
        report = graphs.fuse(export("full_prefill_ts17").path)
    for site in report.sites:
        assert {"valid_tokens", "state_ignores_mask"} <= {note.split(":")[0] for note in site.notes}


def apart(tmp_path: Path, **options: object) -> list[str]:
    """The notes on a loop whose state has a batch size of its own."""
    model = loops.loop(("float[B,4,5,3] state", "float[S,4,5,3] state"))
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx", **options)
    assert report.exit == 0
    return [note for site in report.sites for note in site.notes if note.startswith("sizes_taken_as_equal")]


def test_sizes_that_are_declared_apart_and_taken_as_equal_are_told(tmp_path: Path) -> None:
    (note,) = apart(tmp_path, target="ort")
    assert "the batch axis is declared as B (query, key, value, g, beta), S (state)" in note
    # Both are one in the output.
    with graphs.one_worker():
        assert apart(tmp_path) == []


def test_a_batch_of_one_beside_a_free_one_is_refused(tmp_path: Path) -> None:
    with graphs.one_worker():
        for operand in ("float[B,4,5,3] state", "float[B,T,4,3] value", "float[B,T,4] beta"):
            model = loops.loop((operand, operand.replace("[B", "[1")))
            report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx", target="ort")
            assert graphs.codes(report) == ["batch-one-only"], operand


@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_a_double_model_is_told_to_lose_precision(target: str, tmp_path: Path) -> None:
    double = graphs.to_double(graphs.step())
    assert isinstance(double, onnx.ModelProto)
    model, output = graphs.save(double, tmp_path), tmp_path / "out.onnx"
    strict = graphs.fuse(model, output, target=target, strict=True)
    assert (strict.exit, output.exists()) == (4, False)
    report = graphs.fuse(model, output, target=target)
    assert [site.notes for site in report.sites] == [
        ("float32_boundary: query, key, value, g, beta, state, out, final_state rounded to float32",)
    ]
    checked = verify(model, output)
    assert (report.exit, checked.exit, [site.verdict for site in checked.sites]) == (0, 0, ["equal"])
