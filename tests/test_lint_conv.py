"""`fuse lint` on CausalConvWithState, each fault by itself, and nothing of other operators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from onnx import TensorProto, defs, helper

from deltafuse import lint_attention
from deltafuse.lint import lint

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
_SIZES = {"x": ("n", 6, "t"), "w": (6, 1, 4), "b": (6,), "p": ("n", 6, 3)}


def model(
    sizes: dict[str, tuple[str | int, ...]] | None = None,
    dtypes: dict[str, int] | None = None,
    domain: str = "com.microsoft",
    inputs: tuple[str, ...] = ("x", "w", "b", "p"),
    outputs: tuple[str, ...] = ("y", "s"),
    opset: int = 27,
    contrib: int = 1,
    op_type: str = "CausalConvWithState",
    **attributes: object,
) -> onnx.ModelProto:
    node = helper.make_node(op_type, inputs, outputs, "conv", domain=domain, **attributes)
    shapes, types = _SIZES | (sizes or {}), dict.fromkeys("xwbp", FLOAT) | (dtypes or {})
    ends = [helper.make_tensor_value_info(name, types[name], shape) for name, shape in shapes.items()]
    results = [helper.make_tensor_value_info(name, types["x"], ["n", 6, size]) for name, size in (("y", "t"), ("s", 3))]
    opsets = [helper.make_opsetid("", 17 if domain else opset)]
    opsets += [helper.make_opsetid(domain, contrib)] if domain and contrib else []
    graph = helper.make_graph([node], "g", ends, [result for result in results if result.name in outputs])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def findings(folder: Path, target: str | None = None, **options: object) -> list[tuple[str, str]]:
    onnx.save(model(**options), folder / "model.onnx")
    report = lint(folder / "model.onnx", target)
    assert (report.nodes, report.exit) == (1, 5 if report.findings else 0)
    assert all(finding.node == "conv" and finding.fix and finding.wanted for finding in report.findings)
    return [(finding.code, finding.part) for finding in report.findings]


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
def test_a_node_that_is_right_has_no_findings(domain: str, activation: str, tmp_path: Path) -> None:
    assert findings(tmp_path, domain=domain, activation=activation) == []
    assert findings(tmp_path, domain=domain, inputs=("x", "w")) == []
    assert findings(tmp_path, domain=domain, dtypes=dict.fromkeys("xwbp", HALF)) == []
    # What the contrib operator has beyond the standard's, as it is without it.
    plain = {"ndim": 1, "dilation": 1, "state_window": 0, "state_length": 0, "channels_last": 0} if domain else {}
    assert findings(tmp_path, domain=domain, **plain) == []
    assert lint(tmp_path / "model.onnx").targets == ("ort" if domain else "onnx",)


@pytest.mark.parametrize(
    ("found", "options"),
    [
        (("activation", "activation"), {"activation": "relu"}),
        (("attribute-value", "ndim"), {"ndim": 2}),
        (("attribute-value", "dilation"), {"dilation": 2}),
        (("attribute-value", "channels_last"), {"channels_last": 1}),
        (("attribute-extra", "ndim"), {"domain": "", "ndim": 1}),
        (("attribute-extra", "dilation"), {"domain": "", "dilation": 1}),
        (("attribute-kind", "activation"), {"activation": 1}),
        (("input-missing", "weight"), {"inputs": ("x", "", "b")}),
        (("input-dtype", "weight"), {"dtypes": {"w": HALF}}),
        (("input-rank", "input"), {"sizes": {"x": ("n", 6, 1, "t")}}),
        (("input-rank", "bias"), {"sizes": {"b": (6, 1)}}),
        (("input-shape", "weight"), {"sizes": {"w": (6, 2, 4)}}),
        (("input-shape", "weight"), {"sizes": {"w": (5, 1, 4)}}),
        (("input-shape", "bias"), {"sizes": {"b": (5,)}}),
        (("input-shape", "past_state"), {"sizes": {"p": ("n", 6, 4)}}),
        (("output-count", "present_state"), {"outputs": ("y",)}),
        (("opset", "ai.onnx"), {"domain": "", "opset": 26}),
        (("opset-newer", "com.microsoft"), {"contrib": 2}),
        (("opset", "com.microsoft"), {"contrib": 0}),
        (("input-dtype", "past_state"), {"dtypes": {"p": HALF}}),
        (("attribute-extra", "group"), {"group": 6}),
    ],
)
def test_each_fault_is_told(found: tuple[str, str], options: dict[str, object], tmp_path: Path) -> None:
    told = findings(tmp_path, **options)
    # Sizes that a result is declared with follow from the same input.
    assert [one for one in told if one[0] != "declared-shape"] == [found]


@pytest.mark.parametrize("opset", [28, 99])
def test_a_newer_opset_in_which_the_operator_is_the_same_is_no_fault(opset: int, tmp_path: Path) -> None:
    assert findings(tmp_path, domain="", opset=opset) == []
    notes = [(note.code, note.part) for note in lint(tmp_path / "model.onnx").notes]
    # What the installed onnx does not know may have changed.
    assert notes == [("opset-unchecked", "ai.onnx")] * (opset > defs.onnx_opset_version())


def test_a_newer_opset_in_which_the_operator_is_another_is_one(tmp_path: Path, monkeypatch) -> None:
    known = SimpleNamespace(has=lambda *_: True, get_schema=lambda *_: SimpleNamespace(since_version=28))
    monkeypatch.setattr(lint_attention, "defs", SimpleNamespace(**vars(known), onnx_opset_version=lambda: 28))
    assert findings(tmp_path, domain="", opset=28) == [("opset-newer", "ai.onnx")]
    assert lint(tmp_path / "model.onnx").notes == ()


def test_another_target_has_no_such_operator(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "model.onnx")
    assert lint(tmp_path / "model.onnx", "ascend-310p").exit == 3
    assert lint(tmp_path / "model.onnx", "onnx").nodes == 0


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("op_type", ["CausalConvWithStates", "causalconvwithstate", "CausalConvWithSate"])
def test_a_misspelt_operator_is_told_with_the_nearest_name(op_type: str, domain: str, tmp_path: Path) -> None:
    onnx.save(model(domain=domain, op_type=op_type), tmp_path / "model.onnx")
    report = lint(tmp_path / "model.onnx")
    assert (report.nodes, report.exit, report.targets) == (0, 5, ("ort" if domain else "onnx",))
    (finding,) = report.findings
    assert (finding.code, finding.node, finding.part, finding.found) == ("op-type", "conv", "op_type", op_type)
    assert (finding.wanted, finding.fix) == ("CausalConvWithState", "write CausalConvWithState")


@pytest.mark.parametrize(
    ("op_type", "domain"),
    [("CausalConv", ""), ("CustomOp", ""), ("CausalConv", "com.microsoft"), ("CausalConvWithStates", "elsewhere")],
)
def test_an_operator_of_its_own_name_is_left_alone(op_type: str, domain: str, tmp_path: Path) -> None:
    onnx.save(model(domain=domain, op_type=op_type), tmp_path / "model.onnx")
    assert (lint(tmp_path / "model.onnx").exit, lint(tmp_path / "model.onnx").findings) == (3, ())
