"""Sums over all tokens, one of another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import graphs
import loops
from deltafuse.classes import classify
from deltafuse.nested_sums import find_nested_sums
from deltafuse.scope import Scope
from deltafuse.shapes import Shapes
from deltafuse.wire import scan

NUMBERS = "float scale = {0.25}, float little = {1e-27}, int64 tokens = {1}"
#: What scales as the output does: nothing of it shows until it has grown.
PRODUCT = """out0 = Transpose<perm = [1, 0, 2, 3]>(outs)
  keys = ReduceSum<keepdims = 1>(key, last)
  queries = ReduceSum<keepdims = 1>(query, last)
  column = Unsqueeze(beta, last)
  weighed = Mul(keys, column)
  values = Mul(weighed, value)
  w0 = Mul(values, little)
"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


FUNCTION = """
<domain: "my", opset_import: ["" : 17]>
F (x) => (y) {
  along = Constant<value = int64 {1}>()
  z = CumSum(x, along)
  y = CumSum(z, along)
}
"""
CHOICE = (
    "w{1} = If(yes)<then_branch = t{0} () => (float t{0}y) {{ t{0}y = CumSum(w{0}, tokens) }}, "
    "else_branch = e{0} () => (float e{0}y) {{ e{0}y = Identity(w{0}) }}>"
)


def summed(text: str, times: int, folder: Path) -> Path:
    """A loop whose result has a sum of sums beside it."""
    sums = "\n  ".join(text.format(step, step + 1) for step in range(times))
    end = f"w = Mul(w{times}, little)\n  seen = Mul(w, queries)\n  out = Add(out0, seen)"
    result = ("out = Transpose<perm = [1, 0, 2, 3]>(outs)", f"{PRODUCT}  {sums}\n  {end}")
    function = FUNCTION if "my.F" in text else ""
    return graphs.save(loops.loop(("float scale = {0.25}", NUMBERS), result, functions=function), folder)


@pytest.mark.usefixtures("any_factor")
def test_a_sum_of_sums_of_sums_is_not_fused(tmp_path: Path) -> None:
    report = graphs.fuse(summed("w{1} = CumSum(w{0}, tokens)", 20, tmp_path), tmp_path / "out.onnx")
    assert graphs.codes(report) == ["nested-sums"]
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("text", "times", "code"),
    [
        ("w{1} = CumSum(w{0}, tokens)", 4, ""),
        ("w{1} = CumSum(w{0}, tokens)", 5, "nested-sums"),
        ("w{1} = my.F(w{0})", 2, ""),
        ("w{1} = my.F(w{0})", 3, "nested-sums"),
        (CHOICE, 4, ""),
        (CHOICE, 5, "nested-sums"),
        # Head sizes are fixed.
        ("w{1} = ReduceSum<keepdims = 1>(w{0}, last)", 9, ""),
    ],
)
def test_sums_along_free_axes_are_counted(text: str, times: int, code: str, tmp_path: Path) -> None:
    model = scan(summed(text, times, tmp_path))
    scope = Scope(model, model.graph, classify(model), Shapes(model))
    found = find_nested_sums(scope, range(len(model.graph.op)))
    assert (found.code if found is not None else "") == code
