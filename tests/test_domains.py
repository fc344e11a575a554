"""Operators and functions of other domains under the names of standard operators."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphs

IMPORTS = ('["" : 17]', '["" : 17, "my" : 1]')


@pytest.fixture(scope="module", autouse=True)
def _worker():
    with graphs.one_worker():
        yield


#: 1 where no element is as large as 100, and 0 else.
GUARD = """
<domain: "my", opset_import: ["" : 17]> {name} (x) => (y) {{
  large = Constant<value = float {{100.0}}>()
  sizes = Abs(x)
  most = ReduceMax<keepdims = 0>(sizes)
  small = Less(most, large)
  y = Cast<to = 1>(small)
}}"""

NAMES = ["Shape", "Size", "Constant", "Dropout", "SequenceEmpty", "Transpose", "Identity", "Mul", "Exp", "If", "Cast"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operand", ["query", "beta", "k1"])
def test_a_function_under_a_standard_name_hides_nothing(name: str, operand: str, tmp_path: Path) -> None:
    inserted = f"kept = my.{name}({operand})\n  one = Mul(k1, kept)\n  update = Mul(one, delta_row)"
    factor = ("update = Mul(k1, delta_row)", inserted)
    text = graphs.STEP
    for old, new in (IMPORTS, factor):
        text = text.replace(old, new)
    report = graphs.fuse(graphs.save(graphs.parse(text + GUARD.format(name=name)), tmp_path))
    assert report.exit == 3
    assert all(site.status != "fused" for site in report.sites)


@pytest.mark.parametrize("name", NAMES)
def test_standard_names_of_another_domain_are_none(name: str, tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17, "my" : 1, "com.microsoft" : 1]> g (float[2,2] x) => (float[2,2] y) '
    text += f"{{ a = my.{name}(x) b = Neg(a) c = com.microsoft.FusedMatMul(b, b) y = com.microsoft.Trilu(c) }}"
    scanned = graphs.scanned(graphs.parse(text), tmp_path)
    assert scanned.graph.standard == ["", "Neg", "FusedMatMul", ""]
    assert scanned.graph.op == [name, "Neg", "FusedMatMul", "Trilu"]
    assert scanned.graph.constant_head(0) is None


def test_where_no_other_domain_is_nothing_is_copied(tmp_path: Path) -> None:
    graph = graphs.scanned(graphs.step(), tmp_path).graph
    assert graph.standard is graph.op
