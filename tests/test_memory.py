"""What the steps of a loop remember besides the state of the rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import graphs
import loops
from deltafuse.bench import Binding
from deltafuse.classes import classify
from deltafuse.dims import symbol
from deltafuse.memory import Memory
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes

STATE = "final_state, outs = Loop(trips, yes, state)"
TAKEN = "float[b,h,d,e] s)\n      => (bool c2, float[b,h,d,e] s9,"
READ = "read = Mul(s9, q2)"
NUMBERS = (
    "float scale = {0.25}, float little = {1e-30}, float rate = {1.01}, int64[1] first = {0}, int64[1] second = {1}, "
    "int64[1] end = {5001}, int64[4] waiting = {5000, 1, 4, 3}"
)


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def codes(folder: Path, *edits: tuple[str, str]) -> list[str]:
    model = loops.loop(("float scale = {0.25}", NUMBERS), *edits)
    report = graphs.fuse(graphs.save(model, folder), folder / "out.onnx")
    assert (folder / "out.onnx").exists() == (report.exit == 0)
    return graphs.codes(report)


def further(start: str, shape: str, step: str, read: str) -> list[tuple[str, str]]:
    """Edits for a value `z` that is carried beside the state: `start`, `step` to `z9` and what is read of it."""
    return [
        (STATE, f"{start}\n  final_state, last_z, outs = Loop(trips, yes, state, z0)"),
        (TAKEN, f"float[b,h,d,e] s, {shape} z)\n      => (bool c2, float[b,h,d,e] s9, {shape} z9,"),
        (READ, f"{step}\n    {read}"),
    ]


GROWING = further(
    "z0 = Mul(state, little)", "float[b,h,d,e]", "z9 = Mul(z, rate)", "sum = Add(s9, z9)\n    read = Mul(sum, q2)"
)
ONE_SEQUENCE = [(f"float[B,{kind}", f"float[1,{kind}") for kind in ("T,4,5] query", "T,4,5] key", "T,4,3] value")] + [
    ("float[B,T,4] g", "float[1,T,4] g"), ("float[B,T,4] beta", "float[1,T,4] beta"),
    ("float[B,4,5,3] state)", "float[1,4,5,3] state)"),
]  # fmt: skip
WAITING = [
    *ONE_SEQUENCE,
    *further(
        "z0 = ConstantOfShape<value = float[1] {0}>(waiting)",
        "float[5000,1,4,3]",
        "new = Unsqueeze(v0, first)\n    all = Concat<axis = 0>(z, new)\n    z9 = Slice(all, second, end, first)",
        "at = Constant<value = int64 {0}>()\n    oldest = Gather<axis = 0>(all, at)\n    read = Mul(s9, q2)",
    ),
    ("o = ReduceSum<keepdims = 0>(read, row)", "o0 = ReduceSum<keepdims = 0>(read, row)\n    o = Add(o0, oldest)"),
]
@pytest.mark.usefixtures("any_factor")
@pytest.mark.parametrize("edits", [GROWING, WAITING], ids=["growing", "waiting"])
def test_a_loop_that_remembers_more_than_the_state_is_not_fused(edits: list[tuple[str, str]], tmp_path: Path) -> None:
    assert codes(tmp_path, *edits) == ["further-memory"]


def test_results_that_are_put_beside_each_other_pass(tmp_path: Path) -> None:
    edits = [
        (STATE, "turned = Transpose<perm = [1, 0, 2, 3]>(value)\n  sizes = Shape(turned)\n"
                "  z0 = ConstantOfShape<value = float[1] {0}>(sizes)\n"
                "  final_state, outs = Loop(trips, yes, state, z0)"),
        (TAKEN, "float[b,h,d,e] s, float[t,b,h,e] z)\n      => (bool c2, float[b,h,d,e] s9,"),
        ("float[b,h,e] o)", "float[t,b,h,e] z9)"),
        ("o = ReduceSum<keepdims = 0>(read, row)",
         "o = ReduceSum<keepdims = 0>(read, row)\n    at = Unsqueeze(i, first)\n    place = Unsqueeze(at, first)\n"
         "    new = Unsqueeze(o, first)\n    z9 = ScatterND(z, place, new)"),
    ]  # fmt: skip
    assert codes(tmp_path, *edits) == [""]


@pytest.mark.parametrize(("elements", "code"), [(2 * 4 * 5 * 3, ""), (4 * 5 * 3, "further-memory")])
def test_the_state_is_as_large_as_that_of_the_rule(elements: int, code: str, tmp_path: Path) -> None:
    model = graphs.scanned(loops.loop(), tmp_path)
    numbers = {"B": 2, "T": 5}
    memory = Memory(elements, Binding(numbers, 2, 5, (symbol("B"),), (symbol("T"),)), frozenset({"T"}))
    scope = Scope(model, model.graph, classify(model), Shapes(model))
    found = memory.find_further(scope, range(len(model.graph.op)))
    assert (found.code if found is not None else "") == code


@pytest.mark.parametrize(("returned", "code"), [("final_state", ""), ("out", "further-memory"), ("", "further-memory")])
def test_a_state_of_a_batch_of_its_own_is_one_where_it_is_given_back_whole(
    returned: str, code: str, tmp_path: Path
) -> None:
    """A part of what is carried would not show that all of it holds more than the state."""
    model = graphs.scanned(loops.loop(("float[B,4,5,3] state", "float[S,4,5,3] state")), tmp_path)
    at = Binding({"B": 2, "S": 2, "T": 5}, 2, 5, (symbol("B"), symbol("S")), (symbol("T"),))
    memory = Memory(2 * 4 * 5 * 3, at, frozenset({"T"}), model.graph.find(returned) or 0)
    scope = Scope(model, model.graph, classify(model), Shapes(model))
    found = memory.find_further(scope, range(len(model.graph.op)))
    assert (found.code if found is not None else "") == code
