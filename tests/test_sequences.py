"""Sequences have nothing to do with each other, and nothing follows an axis that is neither batch nor tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import graphs
import loops
from deltafuse import hidden
from deltafuse.contractions import summed_axes

FUSED = ([], 0)
#: What edits may use; the sizes are those of the main graph.
NUMBERS = """int64 zero = {0}, int64[1] first = {0}, int64[1] second = {2}, int64[1] end = {9223372036854775807},
 int64[1] before = {-2}, int64[6] ahead = {2, 0, 0, 0, 0, 0}, int64[2] flat = {12, -1}, int64[3] back = {-1, 4, 3},
 float tiny = {1e-30}, int64[1] hundred = {100}, int64[1] axis = {1}, int64 three = {3}, float few = {3},
 float steep = {-1000}, int64[3] lower = {1, 2, 3}, float none = {0}, int64[1] width = {3}, float scale = {0.25}"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def inside(text: str, front: str = "") -> onnx.ModelProto:
    """The loop with more nodes in its body, between the value `raw` [B, 4, 3] and `v0`, and in front of it."""
    read, start = "Gather<axis = 1>(value, i)", "final_state, outs = Loop"
    edits = ((f"v0 = {read}", f"raw = {read}\n{text}"), (start, f"{front}\n{start}"))
    return loops.loop(("float scale = {0.25}", NUMBERS), ('"my" : 1]', '"my" : 1, "com.microsoft" : 1]'), *edits)


def around(text: str, *edits: tuple[str, str]) -> onnx.ModelProto:
    """The loop with more nodes in front, between the input `value` and `given`."""
    start = "final_state, outs = Loop"
    more = (("Gather<axis = 1>(value, i)", "Gather<axis = 1>(given, i)"), (start, f"{text}\n{start}"))
    return loops.loop(("float scale = {0.25}", NUMBERS), *more, *edits)


def outcome(model: onnx.ModelProto, folder: Path) -> tuple[list[str], int]:
    """Reasons and exit of a fuse, for a target that does not look for one step inside the loop instead."""
    report = graphs.fuse(graphs.save(model, folder), folder / "out.onnx")
    return [code for code in graphs.codes(report) if code], report.exit


INSIDE = {
    "a read of the third": "p = Slice(raw, second, end, first)\n w = ReduceSum(p, first)\n v0 = Add(raw, w)",
    "a number of one": "p = Gather<axis = 0>(raw, zero)\n w = Sub(p, raw)\n v0 = Add(raw, w)",
    "the one two before": "p = Pad(raw, ahead)\n w = Slice(p, first, before, first)\n v0 = Add(raw, w)",
    "a sum": "p = ReduceSum(raw, first)\n w = Sub(p, raw)\n m = Mul(w, tiny)\n v0 = Add(raw, m)",
    "a sum of all axes": "p = ReduceSum(raw)\n w = Mul(p, tiny)\n v0 = Add(raw, w)",
    "a running sum": "p = CumSum(raw, zero)\n w = Sub(p, raw)\n m = Mul(w, tiny)\n v0 = Add(raw, m)",
    "an Einsum": 'p = Einsum<equation = "bhe->he">(raw)\n w = Sub(p, raw)\n m = Mul(w, tiny)\n v0 = Add(raw, m)',
    "a product": "p = Transpose<perm = [1, 2, 0]>(raw)\n w = Transpose<perm = [1, 0, 2]>(raw)\n m = MatMul(p, w)\n"
    " y = ReduceSum<keepdims = 0>(m, last)\n z = Mul(y, tiny)\n v0 = Add(raw, z)",
    "onnxruntime's product": "p = Transpose<perm = [1, 0, 2]>(raw)\n"
    " m = com.microsoft.FusedMatMul<transA = 1>(p, p)\n y = ReduceSum<keepdims = 0>(m, row)\n z = Mul(y, tiny)\n"
    " v0 = Add(raw, z)",
    "its product of other batches": "m = com.microsoft.FusedMatMul<transA = 1, transBatchA = 1, transBatchB = 1>"
    "(raw, raw)\n y = ReduceSum<keepdims = 0>(m, row)\n z = Mul(y, tiny)\n v0 = Add(raw, z)",
}
AROUND = {
    "a mask": "n = Gather<axis = 0>(shape, zero)\n r = Range(zero, n, one)\n l = Sub(n, one)\n a = Less(r, l)\n"
    " b = Less(zero, r)\n m = And(a, b)\n u = Unsqueeze(m, lower)\n given = Where(u, none, value)",
    "a band": "n = Slice(shape, first, axis)\n e = Concat<axis = 0>(n, n)\n o = ConstantOfShape(e)\n t = Trilu(o)\n"
    " w = ReduceSum(t, axis)\n u = Unsqueeze(w, lower)\n given = Add(value, u)",
}


@pytest.mark.parametrize("text", INSIDE.values(), ids=INSIDE)
def test_what_mixes_sequences_in_a_body_is_refused(text: str, tmp_path: Path) -> None:
    assert outcome(inside(text), tmp_path) == (["position-gate"], 3)


@pytest.mark.parametrize("text", AROUND.values(), ids=AROUND)
def test_what_tells_sequences_apart_is_refused(text: str, tmp_path: Path) -> None:
    assert outcome(around(text), tmp_path) == (["position-gate"], 3)


ALIKE = {
    "all of them": "v0 = Slice(raw, first, end, first)",
    "a head of each": "p = Slice(raw, first, axis, axis)\n r = Mul(p, none)\n v0 = Add(raw, r)",
    "each by itself": 'v0 = Einsum<equation = "bhe,x->bhe">(raw, unit)',
    "in one row": "r = Reshape(raw, flat)\n v0 = Reshape(r, back)",
}


@pytest.mark.parametrize("text", ALIKE.values(), ids=ALIKE)
def test_what_treats_sequences_alike_is_fused(text: str, tmp_path: Path) -> None:
    text = text.replace("unit", "w")
    model = inside(text)
    model.graph.initializer.append(graphs.constant("w", [1.0]))
    assert outcome(model, tmp_path) == FUSED


#: From another sequence, for one alone nothing: its numbers in another order.
SHUFFLED = "p = Reshape(raw, flat)\n w = Transpose(p)\n m = Reshape(w, back)\n z = Sub(m, raw)\n "


@pytest.mark.usefixtures("any_factor")
@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"{SHUFFLED}y = Mul(z, tiny)\n v0 = Add(raw, y)", "not-equal"),
        (f"{SHUFFLED}x = Mul(z, z)\n y = Mul(x, tiny)\n v0 = Add(raw, y)", "not-equal"),
    ],
)
def test_a_little_of_another_sequence_shows(text: str, code: str, tmp_path: Path) -> None:
    assert outcome(inside(text), tmp_path) == ([code], 3)


def test_four_sequences_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Were the guard blind to masks, the run of four would still tell that those between are others.
    monkeypatch.setattr(hidden, "find_guard", lambda *_, **__: None)
    assert outcome(around(AROUND["a mask"]), tmp_path) == (["not-equal"], 3)


#: 1 for three sequences, else nothing; and what the tokens from the hundredth on sum up to.
BUMP = """n = Gather<axis = 0>(shape, zero)
 size = Cast<to = 1>(n)\n apart = Sub(size, few)\n square = Mul(apart, apart)\n far = Mul(square, steep)
 bump = Exp(far)"""
LATE = """p = Slice(value, hundred, end, axis)\n w = ReduceSum<keepdims = 0>(p, axis)\n m = Mul(w, bump)
 v0 = Add(raw, m)"""


@pytest.mark.parametrize(("batch", "codes"), [(2, []), (3, ["other-at-size"])])
def test_the_batch_that_is_asked_for_is_tried_at_many_tokens(
    batch: int, codes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Something for three sequences and more than a hundred tokens only, and guards that are blind to it.
    monkeypatch.setattr(hidden, "find_guard", lambda *_, **__: None)
    monkeypatch.setattr(hidden, "rounded_constant", lambda *_: None)
    report = graphs.fuse(graphs.save(inside(LATE, BUMP), tmp_path), tmp_path / "out.onnx", batch=batch)
    assert [code for code in graphs.codes(report) if code] == codes


def other_axis(text: str, body: str) -> onnx.ModelProto:
    """The loop with a second free axis P: nodes in front, and in its body between `raw` and `v0`."""
    read, start = "Gather<axis = 1>(value, i)", "final_state, outs = Loop"
    return loops.loop(
        ("float scale = {0.25}", NUMBERS), ("float[B,4,5,3] state)", "float[B,4,5,3] state, float[B,P] past)"),
        ("float[B,4,5,3] final_state)", "float[B,4,5,3] final_state, float[B,P] kept)"),
        (start, f"kept = Neg(past)\n{text}\n{start}"), (f"v0 = {read}", f"raw = {read}\n{body}"),
    )  # fmt: skip


LENGTH = "ps = Shape(past)\n p = Slice(ps, axis, end)\n wide = Concat<axis = 0>(axis, axis, axis, p)"


@pytest.mark.parametrize(
    "body",
    [
        "u = Unsqueeze(raw, last)\n e = Expand(u, wide)\n t = Slice(e, hundred, end, last)\n"
        " w = ReduceSum<keepdims = 0>(t, last)\n v0 = Add(raw, w)",
        "u = Unsqueeze(raw, last)\n e = Expand(u, wide)\n t = Slice(e, first, axis, last)\n"
        " v0 = ReduceSum<keepdims = 0>(t, last)",
    ],
    ids=["far", "none"],
)
def test_what_follows_another_axis_is_refused(body: str, tmp_path: Path) -> None:
    assert outcome(other_axis(LENGTH, body), tmp_path) == (["position-gate"], 3)


def test_another_axis_beside_the_site_does_no_harm(tmp_path: Path) -> None:
    assert outcome(other_axis(LENGTH, "v0 = Identity(raw)"), tmp_path) == FUSED


def test_a_free_head_axis_is_told_as_such(tmp_path: Path) -> None:
    pairs = (("float[B,T,4,3] value", "T,4,V"), ("float[B,4,5,3] state", "4,5,V"), ("float[B,T,4,3] out", "T,4,V"))
    model = loops.loop(*[(old, f"float[B,{sizes}]{old[old.index(']') + 1 :]}") for old, sizes in pairs])
    assert outcome(model, tmp_path)[0] == ["heads-unknown"]


@pytest.mark.parametrize(
    ("equation", "axes"),
    [("bhe,bhf->hef", [[0], [0]]), ("ij,jk", [[1], [0]]), ("b...e->...e", [[0]]), ("...ej,jk->...ek", [[-1], [-2]])],
)
def test_axes_that_an_einsum_sums_up(equation: str, axes: list[list[int]]) -> None:
    summed = [[axis % 2 for axis in operand] for operand in summed_axes(equation)]
    assert summed == [[axis % 2 for axis in operand] for operand in axes]
