"""A norm and an output gate that follow the rule without a weight between, as simplifiers leave them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import graphs
from deltafuse.bench import TOKENS, bindings
from deltafuse.dims import symbol


@pytest.fixture(scope="module", autouse=True)
def worker():
    with graphs.one_worker() as one:
        yield one


GATED = (
    "out = Unsqueeze(o, time)",
    "square = Mul(o, o)\n  mean = ReduceMean<axes = [-1]>(square)\n  eps = Constant<value = float {1e-6}>()\n  "
    "above = Add(mean, eps)\n  root = Sqrt(above)\n  normed = Div(o, root)\n  gated = Mul(normed, z)\n  "
    "out = Unsqueeze(gated, time)",
)
INPUT = ("float[1,4,5,3] state)", "float[1,4,5,3] state, float[1,4,3] z)")
#: Without a state there are six roots, as many as a rule has operands: the gate could be one of them.
STATELESS = (
    ("float[1,4,5,3] state)", "float[1,4,3] z)"),
    ("decayed = Mul(state, e2)", "dims = Constant<value_ints = [1, 4, 5, 3]>()\n  state = ConstantOfShape(dims)\n  "
     "decayed = Mul(state, e2)"),
)  # fmt: skip


@pytest.mark.parametrize("edits", [(INPUT,), STATELESS], ids=["state", "stateless"])
def test_an_output_gate_is_no_operand(edits: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    model = graphs.step(GATED, *edits)
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "out.onnx")
    (site,) = report.sites
    assert (report.exit, site.status) == (0, "fused")
    fused = onnx.load(tmp_path / "out.onnx")
    assert {"Div", "Mul"} <= {node.op_type for node in fused.graph.node}
    feeds = graphs.wide_feeds(model, 1)
    assert graphs.difference(graphs.lowered_double(fused, report), graphs.double(model), feeds) < 1e-12


def test_the_sizes_of_an_operand_may_follow_from_those_of_the_gate() -> None:
    """The output gate has batch, tokens and heads in one axis."""
    batch, tokens = symbol("batch"), symbol("tokens")
    first = next(bindings({1: (batch, tokens, 4), 2: (4 * batch * tokens, 16)}, {}, 1))
    assert dict(first.numbers) == {"batch": 2, "tokens": TOKENS[0]}
