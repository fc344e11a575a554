"""Sequences of tensors between the nodes of a rule, whose element types nothing declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest

import graphs
import loops
from deltafuse.shapes import Shapes


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


#: Operators that put `raw` into a sequence and take it out again as `back`.
CHAINS = {
    "empty": "s0 = SequenceEmpty()\n s1 = SequenceInsert(s0, raw)\n back = ConcatFromSequence<axis = 0>(s1)",
    "typed": "s0 = SequenceEmpty<dtype = 1>()\n s1 = SequenceInsert(s0, raw)\n back = ConcatFromSequence<axis = 0>(s1)",
    "constructed": "s1 = SequenceConstruct(raw)\n back = ConcatFromSequence<axis = 0>(s1)",
    "split": "s1 = SplitToSequence<axis = 1>(raw)\n back = ConcatFromSequence<axis = 1>(s1)",
    "read": "nought = Constant<value = int64 {0}>()\n s1 = SequenceConstruct(raw)\n back = SequenceAt(s1, nought)",
}
FINAL = "final_state = Add(decayed, update)"
UPDATE = "update = Mul(k1, delta_row)"


def put(edit: str, chain: str) -> tuple[str, str]:
    """A chain between a node and those that read it."""
    name = edit.split(" ")[0]
    return edit, f"{edit.replace(name, 'raw', 1)}\n {chain.replace('back', name)}"


def untyped(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose outputs have no type: nothing tells that of what is in a sequence."""
    for info in model.graph.output:
        info.ClearField("type")
    return model


def called(chain: str) -> onnx.ModelProto:
    function = f'<domain: "my", opset_import: ["" : 17]> Chain (raw) => (back) {{ {chain} }}'
    text = graphs.STEP.replace(FINAL, "raw = Add(decayed, update)\n final_state = my.Chain(raw)")
    return graphs.parse(text.replace('opset_import: ["" : 17]', 'opset_import: ["" : 17, "my" : 1]') + function)


PLACES: dict[str, Callable[[str], onnx.ModelProto]] = {
    "final state": lambda chain: graphs.step(put(FINAL, chain)),
    "update": lambda chain: graphs.step(put(UPDATE, chain)),
    "function": called,
}


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_sequence_without_a_type_is_fused(chain: str, place: str, target: str, tmp_path: Path) -> None:
    model = graphs.save(untyped(PLACES[place](CHAINS[chain])), tmp_path)
    report = graphs.fuse(model, tmp_path / "out.onnx", target=target)
    assert (report.exit, graphs.codes(report)) == (0, [""])
    for site in report.sites:
        assert site.match is not None
        assert all(role.dtype == onnx.TensorProto.FLOAT for role in (*site.match.operands(), *site.match.results()))


@pytest.mark.parametrize("chain", CHAINS)
def test_a_state_of_unknown_size_in_a_loop_is_refused(chain: str, tmp_path: Path) -> None:
    """Nothing tells the sizes of what is in a sequence: the state could hold more than the rule's."""
    model = graphs.save(untyped(loops.loop(put(UPDATE, CHAINS[chain]))), tmp_path)
    report = graphs.fuse(model, tmp_path / "out.onnx", target="ort")
    assert (report.exit, graphs.codes(report)) == (3, ["further-memory"])


def test_outputs_that_a_loop_collects_in_a_sequence_are_fused(tmp_path: Path) -> None:
    model = untyped(
        loops.loop(
            ("final_state, outs = Loop(trips, yes, state)", "s0 = SequenceEmpty()\n final_state, outs = "
             "Loop(trips, yes, state, s0)"),
            ("float[b,h,d,e] s)", "float[b,h,d,e] s, seq(float) before)"),
            ("float[b,h,e] o)", "seq(float) after)"),
            ("o = ReduceSum<keepdims = 0>(read, row)", "o = ReduceSum<keepdims = 0>(read, row)\n "
             "after = SequenceInsert(before, o)"),
            ("out = Transpose<perm = [1, 0, 2, 3]>(outs)", "out = ConcatFromSequence<axis = 1, new_axis = 1>(outs)"),
        )
    )  # fmt: skip
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (0, [""])
    fused = graphs.lowered_double(onnx.load(tmp_path / "out.onnx"), report)
    assert graphs.difference(fused, graphs.double(model), loops.feeds(1, 5)) < 1e-12


def test_an_operand_of_unknown_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Shapes.dtype
    hidden = "final_state"

    def dtype(shapes: Shapes, value: int) -> int | None:
        return None if shapes.graph.name(value) == hidden else known(shapes, value)

    monkeypatch.setattr(Shapes, "dtype", dtype)
    report = graphs.fuse(graphs.save(graphs.step(), tmp_path), tmp_path / "out.onnx")
    assert (report.exit, graphs.codes(report)) == (4, ["cut-type-unknown"])
    (site,) = report.sites
    assert site.reason is not None
    assert site.reason.args == {"value": hidden}
