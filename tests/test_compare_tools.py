"""scripts/compare_tools.py: what it counts, and what it says of a tool that does not end well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import parser

import compare_tools
from deltafuse.demo import write_demo
from doc_blocks import ROOT

MODEL = """
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
g (bool c, float[n] a) => (float[n] b) {
  x = com.microsoft.LinearAttention(a)
  b = If(c) <
    then_branch = t () => (float[n] y) { z = Neg(x) y = Neg(z) }, else_branch = e () => (float[n] w) { w = Abs(x) }
  >
}"""


def test_nodes_of_branches_count_and_fused_ones_are_told_apart(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(MODEL), tmp_path / "model.onnx")
    assert compare_tools.counted(tmp_path / "model.onnx") == (5, 1)


@pytest.mark.parametrize(
    ("code", "limit", "says"),
    [
        ("raise SystemExit('no')", 60, "no"),
        ("pass", 60, "it wrote nothing"),
        ("import time; time.sleep(9)", 1, "over 1 s"),
    ],
)
def test_a_tool_that_fails_is_told_why(code: str, limit: float, says: str, tmp_path: Path) -> None:
    assert compare_tools.tried(code, tmp_path / "model.onnx", limit)["why"] == says


def test_what_fuse_leaves_is_what_the_page_says(tmp_path: Path) -> None:
    write_demo(tmp_path)
    decode = tmp_path / "decode.onnx"
    _, code = compare_tools.TOOLS["fuse --target ort"]
    found = compare_tools.tried(code, decode, 120)
    nodes, fused = compare_tools.counted(decode)
    page = (ROOT / "docs/comparison.md").read_text()
    assert (found["fused"], fused) == (6, 0)
    assert f"| as exported | {nodes:,} |" in page
    assert f"| `fuse --target ort` | {found['nodes']:,} |" in page


def test_a_tool_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_tools, "TOOLS", {"other": ("nothing_like_this", "")})
    onnx.save(parser.parse_model(MODEL), tmp_path / "model.onnx")
    assert compare_tools.compare(tmp_path / "model.onnx", 1)["other"] == {"why": "not installed"}


def test_the_script_says_what_it_does() -> None:
    command = [sys.executable, str(ROOT / "scripts/compare_tools.py"), "--help"]
    assert "Puts other tools beside fuse" in subprocess.check_output(command, text=True)
