"""What is a causal convolution, what resembles one, and what `verify` says of a fused one that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphs
from deltafuse.match import SiteReport
from deltafuse.rollback import rollback
from deltafuse.verify import verify
from test_expressions import same

_MODEL = """
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
g (float[n, 5, t] a, float[n, 5, 3] past) => (float[n, 5, t] b, float[n, 5, 3] present)
<int64[1] from = {-3}, int64[1] end = {9223372036854775807}, int64[1] axis = {2}, int64[1] zero = {0},
 int64[1] one = {1}, int64[1] two = {2}, int64[1] less = {-1}, int64[6] pads = {0, 0, 3, 0, 0, 0},
 float low = {-0.5}, float high = {0.5}>
{
  x = Neg(a)
  u = Concat<axis = -1>(past, x)
  present = Slice(u, from, end, axis)
  c = Conv<group = 5, kernel_shape = [4]>(u, w, bias)
  s = Sigmoid(c)
  y = Mul(c, s)
  b = Neg(y)
}"""
_JOINED, _CONV = "u = Concat<axis = -1>(past, x)", "c = Conv<group = 5, kernel_shape = [4]>(u, w, bias)"
_ALONE = (
    ("float[n, 5, 3] past)", "float[n, 5, 3] other)"),
    ("present = Slice(u, from, end, axis)", "present = Neg(other)"),
)
_FREE = (("b, float[n, 5, 3] present", "b, float[n, 5, p] present"), ("float[n, 5, t] b", "float[n, 5, q] b"))


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    with graphs.one_worker():
        yield


def model(*edits: tuple[str, str], weight: tuple[int, ...] = (5, 1, 4)) -> onnx.ModelProto:
    text = _MODEL
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    parsed = graphs.parse(text)
    rng = np.random.default_rng(0)
    dtype = np.float16 if "float16[n, 5, t] b" in text else np.float64 if "double[n" in text else np.float32
    for name, shape in (("w", weight), ("bias", weight[:1])):
        parsed.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(dtype), name))
    return parsed


def sites(folder: Path, *edits: tuple[str, str], **options: object) -> tuple[tuple[SiteReport, ...], list[str]]:
    """Sites of an edited model, and the operators after the fuse; what is fused is compared and rolled back."""
    weight = options.pop("weight", (5, 1, 4))
    path, out = graphs.save(model(*edits, weight=weight), folder), folder / "fused.onnx"
    report = graphs.fuse(path, out, **({"target": "ort"} | options))
    assert out.exists() == any(site.status == "fused" for site in report.sites)
    if not out.exists():
        return report.sites, []
    same(path, out)
    assert verify(path, out, level="site").exit == 0
    rollback(out, folder / "back.onnx")
    assert (folder / "back.onnx").read_bytes() == path.read_bytes()
    return report.sites, [node.op_type for node in onnx.load(out).graph.node if node.op_type != "Constant"]


def test_as_it_is_it_matches(tmp_path: Path) -> None:
    found, ops = sites(tmp_path)
    assert [(site.name, site.status, site.op) for site in found] == [("causal_conv.0", "fused", "CausalConvWithState")]
    assert found[0].match.parameters == {"width": 4.0, "silu": 1.0, "state": 1.0}
    assert found[0].match.proof.emitted_error <= 1e-12
    assert ops == ["Neg", "CausalConvWithState", "Neg"]


FUSED = [
    (
        "the state is not used",
        [("present = Slice(u, from, end, axis)", "present = Neg(past)")],
        ["Neg", "CausalConvWithState", "Neg"],
    ),
    ("no bias", [("(u, w, bias)", "(u, w)")], []),
    (
        "the bias behind it",
        [
            ("(u, w, bias)", "(u, w)"),
            ("s = Sigmoid(c)", "d = Add(c, column) s = Sigmoid(d)"),
            ("Mul(c, s)", "Mul(d, s)"),
            ("int64[1] two", "float[5, 1] column = {1.0, 2.0, 3.0, 4.0, 5.0}, int64[1] two"),
        ],
        [],
    ),
    (
        "SiLU of one operator",
        [("s = Sigmoid(c)", ""), ("y = Mul(c, s)", "y = com.microsoft.QuickGelu<alpha = 1.0>(c)")],
        [],
    ),
    (
        "SiLU as a quotient",
        [
            ("s = Sigmoid(c)", "m = Neg(c) e = Exp(m) f = Add(e, unit) s = Reciprocal(f)"),
            ("float low", "float unit = {1.0}, float low"),
        ],
        [],
    ),
    ("the kernel's size is not stated", [(", kernel_shape = [4]", "")], []),
    (
        "pads at both ends, cut off",
        [
            *_ALONE,
            (_JOINED, ""),
            (
                _CONV,
                "v = Conv<group = 5, pads = [3, 3]>(x, w, bias) "
                "h = Shape(x) t = Slice(h, two, end, zero) c = Slice(v, zero, t, axis)",
            ),
        ],
        [],
    ),
    (
        "the zeros by an attribute of Conv alone",
        [*_ALONE, (_JOINED, ""), (_CONV, "c = Conv<group = 5, pads = [3, 0]>(x, w, bias)")],
        [],
    ),
    (
        "the state out of padded input",
        [("float[n, 5, 3] past", "float[n, 5, 3] other"), (_JOINED, "u = Pad(x, pads)")],
        [],
    ),
    ("half precision", [("float", "float16"), ("{-0.5}", "{0}"), ("{0.5}", "{1}")], []),
    (
        "state and input are cast",
        [
            ("float[n, 5, t] a, float[n, 5, 3]", "float16[n, 5, t] a, float16[n, 5, 3]"),
            ("(u, w, bias)", "(u1, w, bias)"),
            ("c = Conv", "u1 = Cast<to = 1>(u) c = Conv"),
            ("5, 3] present", "5, 3] present"),
            ("Slice(u, from", "Slice(u1, from"),
        ],
        [],
    ),
]


@pytest.mark.parametrize(("edits", "ops"), [case[1:] for case in FUSED], ids=[case[0] for case in FUSED])
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_spellings(edits: list[tuple[str, str]], ops: list[str], target: str, tmp_path: Path) -> None:
    found, left = sites(tmp_path, *edits, target=target)
    assert [(site.status, site.op) for site in found] == [("fused", "CausalConvWithState")]
    assert {"Conv", "Sigmoid", "Mul", "Exp", "Pad", "Concat", "QuickGelu"}.isdisjoint(left)
    assert not ops or sorted(left) == sorted([*ops, "Neg"])


PARTS = [
    (
        "a clip of the state stays in front",
        [(_JOINED, "q = Clip(past, low, high) u = Concat<axis = -1>(q, x)")],
        "Clip",
        1.0,
    ),
    (
        "a clip behind it keeps SiLU outside",
        [("s = Sigmoid(c)", "d = Clip(c, low, high) s = Sigmoid(d)"), ("Mul(c, s)", "Mul(d, s)")],
        "Clip",
        0.0,
    ),
    ("another gate stays behind it", [("s = Sigmoid(c)", "d = Mul(c, high) s = Sigmoid(d)")], "Sigmoid", 0.0),
    ("so does GELU", [("s = Sigmoid(c)", ""), ("y = Mul(c, s)", "y = com.microsoft.QuickGelu(c)")], "QuickGelu", 0.0),
    ("a value between convolution and SiLU is read", [("b = Neg(y)", "r = Relu(c) b = Sub(y, r)")], "Sigmoid", 0.0),
    (
        "another state stays computed",
        [
            ("Slice(u, from, end, axis)", "Slice(u, from0, less, axis)"),
            ("int64[1] from =", "int64[1] from0 = {-4}, int64[1] from ="),
        ],
        "Slice",
        1.0,
    ),
    (
        "a bias for each token stays outside",
        [
            ("(u, w, bias)", "(u, w)"),
            ("float[n, 5, t]", "float[n, 5, 6]"),
            ("s = Sigmoid(c)", "d = Add(c, row) s = Sigmoid(d)"),
            ("Mul(c, s)", "Mul(d, s)"),
            ("int64[1] two", "float[6] row = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, int64[1] two"),
        ],
        "Add",
        0.0,
    ),
]


@pytest.mark.parametrize(("edits", "stays", "silu"), [case[1:] for case in PARTS], ids=[case[0] for case in PARTS])
def test_what_is_not_part_of_it_stays(edits: list[tuple[str, str]], stays: str, silu: float, tmp_path: Path) -> None:
    (site,), left = sites(tmp_path, *edits)
    assert site.status == "fused"
    assert site.match.parameters.get("silu", 0.0) == silu
    assert stays in left
    assert "CausalConvWithState" in left


_PADS = "int64[6] pads = {0, 0, 3, 0, 0, 0}"
NEAR = [
    ("causal-conv-ahead", [*_ALONE, (_JOINED, "u = Pad(x, pads)"), (_PADS, "int64[6] pads = {0, 0, 0, 0, 0, 3}")]),
    ("causal-conv-ahead", [*_ALONE, (_JOINED, "u = Pad(x, pads)"), (_PADS, "int64[6] pads = {0, 0, 2, 0, 0, 1}")]),
    (
        "causal-conv-ahead",
        [
            *_ALONE,
            (_JOINED, ""),
            (_CONV, "v = Conv<group = 5, pads = [3, 3]>(x, w, bias) c = Slice(v, from, end, axis)"),
            ("int64[1] from = {-3}", "int64[1] from = {3}"),
        ],
    ),
    (
        "causal-conv-behind",
        [
            *_ALONE,
            (_JOINED, "v = Pad(x, pads) u = Slice(v, zero, less, axis)"),
            (_PADS, "int64[6] pads = {0, 0, 4, 0, 0, 0}"),
        ],
    ),
    ("causal-conv-unpadded", [*_ALONE, *_FREE, (_JOINED, "u = Identity(x)")]),
    ("causal-conv-unpadded", [(_JOINED, "v = Concat<axis = -1>(past, x) u = Clip(v, low, high)")]),
    ("causal-conv-unpadded", [(_JOINED, "v = Concat<axis = -1>(past, x) k = Greater(v, low) u = Where(k, v, high)")]),
    ("causal-conv-unpadded", [(_JOINED, "u = Concat<axis = -1>(x, past)")]),
    ("causal-conv-unpadded", [*_ALONE, (_JOINED, "u = Pad(x, pads, high)")]),
    ("causal-conv-unpadded", [*_ALONE, (_JOINED, 'u = Pad<mode = "edge">(x, pads)')]),
    ("causal-conv-unpadded", [("5, 3] past", "5, 2] past"), *_FREE, (_JOINED, "u = Concat<axis = -1>(past, x)")]),
    ("causal-conv-dilation", [*_FREE, ("group = 5", "dilations = [2], group = 5")]),
    ("causal-conv-stride", [*_FREE, ("group = 5", "strides = [2], group = 5")]),
    ("causal-conv-auto-pad", [*_FREE, ("group = 5", 'auto_pad = "SAME_LOWER", group = 5')]),
    ("expression-dtype", [("float", "double")]),
    ("expression-opset", [('"" : 17', '"" : 12')]),
]


@pytest.mark.parametrize(("code", "edits"), NEAR, ids=[f"{code}-{number}" for number, (code, _) in enumerate(NEAR)])
def test_near_misses_are_told_and_left(code: str, edits: list[tuple[str, str]], tmp_path: Path) -> None:
    found, _ = sites(tmp_path, *edits)
    assert [site.reason.code for site in found] == [code]
    assert found[0].status == ("refused" if code == "expression-opset" else "near-miss")
    assert found[0].reason.text


@pytest.mark.parametrize(
    ("group", "weight", "codes"),
    [
        (5, (10, 1, 4), ["causal-conv-groups"]),
        (1, (5, 5, 4), []),
        (1, (7, 5, 4), []),
    ],
)
def test_kernels_that_do_not_have_a_channel_each(
    group: int, weight: tuple[int, ...], codes: list[str], tmp_path: Path
) -> None:
    # One group is a convolution like any other, of which an audio model is full.
    found, _ = sites(
        tmp_path, ("group = 5", f"group = {group}"), ("float[n, 5, t] b", "float[n, q, t] b"), weight=weight
    )
    assert [site.reason.code for site in found] == codes


def test_columns_up_to_a_constant_stay_cut_off(tmp_path: Path) -> None:
    # Right for all sizes that are run; a longer input would show that it is not the last columns.
    (site,), left = sites(tmp_path, ("{9223372036854775807}", "{1000}"))
    assert set(site.match.outputs) == {"y"}
    assert "Slice" in left


def test_a_state_that_was_rounded_to_another_type_stays_where_it_is(tmp_path: Path) -> None:
    edits = [("present = Slice(u", "h = Cast<to = 10>(u) v = Cast<to = 1>(h) present = Slice(v")]
    (site,), left = sites(tmp_path, *edits)
    assert set(site.match.outputs) == {"y"}
    assert left.count("Cast") == 2


def test_two_channels_a_group(tmp_path: Path) -> None:
    edits = [("[n, 5, ", "[n, 6, "), ("group = 5", "group = 3")]
    (site,), _ = sites(tmp_path, *edits, weight=(6, 2, 4))
    assert site.reason.code == "causal-conv-groups"
    assert "3 groups for 6 channels" in site.reason.text


def test_a_choice_by_size_inside_is_refused(tmp_path: Path) -> None:
    # No more than a thousand tokens are kept: right for all sizes that a proof could run.
    edits = [
        *_ALONE,
        (_JOINED, ""),
        (
            _CONV,
            "v = Conv<group = 5, pads = [3, 3]>(x, w, bias) h = Shape(x) "
            "t0 = Slice(h, two, end, zero) t = Min(t0, most) c = Slice(v, zero, t, axis)",
        ),
        ("int64[1] two", "int64[1] most = {1000}, int64[1] two"),
    ]
    found, left = sites(tmp_path, *edits)
    assert not left
    assert found[0].status == "near-miss"


def test_a_sum_over_channels_is_no_window(tmp_path: Path) -> None:
    edits = [
        ("[n, 5, t]", "[n, 5, 1]"),
        ("(float[n, 5, 1] b", "(float[n, 4] b"),
        ("s = Sigmoid(c)", ""),
        ("y = Mul(c, s)", "y = Neg(c)"),
        (_CONV, "m = Mul(u, w2) c = ReduceSum<keepdims = 0>(m, one)"),
        ("int64[1] two", "float[5, 4] w2 = {" + ", ".join(map(str, np.arange(20) * 0.5)) + "}, int64[1] two"),
    ]
    found, left = sites(tmp_path, *edits)
    assert ([site.reason.code for site in found], left) == (["causal-conv-other"], [])


def node(fused: onnx.ModelProto) -> onnx.NodeProto:
    return next(one for one in fused.graph.node if one.op_type == "CausalConvWithState")


def attribute(fused: onnx.ModelProto, value: bytes) -> None:
    next(one for one in node(fused).attribute if one.name == "activation").s = value


def other_weight(fused: onnx.ModelProto) -> None:
    (weight,) = [one for one in fused.graph.initializer if one.name == "w"]
    array = numpy_helper.to_array(weight)[..., ::-1].copy()
    fused.graph.initializer.append(numpy_helper.from_array(array, "reversed"))
    node(fused).input[1] = "reversed"


WRONG: list[Callable[[onnx.ModelProto], None]] = [
    lambda fused: attribute(fused, b"none"),
    lambda fused: node(fused).input.__setitem__(3, ""),
    lambda fused: node(fused).input.__setitem__(2, ""),
    other_weight,
]


@pytest.mark.parametrize("spoil", WRONG, ids=["activation", "state", "bias", "taps"])
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_verify_sees_what_is_wrong(spoil: Callable[[onnx.ModelProto], None], target: str, tmp_path: Path) -> None:
    path, out = graphs.save(model(), tmp_path), tmp_path / "fused.onnx"
    graphs.fuse(path, out, target=target)
    spoiled = onnx.load(out)
    spoil(spoiled)
    onnx.save(spoiled, tmp_path / "spoiled.onnx")
    for level in ("site", "network"):
        assert verify(path, out, level=level).exit == 0
        assert verify(path, tmp_path / "spoiled.onnx", level=level).exit == 5, level


@pytest.mark.parametrize(("rules", "exit_code"), [((), 0), (("gated_delta_rule", "causal_conv"), 4)])
def test_one_that_is_refused_blocks_only_where_it_was_asked_for(
    rules: tuple[str, ...], exit_code: int, tmp_path: Path
) -> None:
    step = graphs.step(
        ("float[1,4,5,3] state)", "float[1,4,5,3] state, float z)"),
        ("float[1,4,5,3] final_state)", "float[1,4,5,3] final_state, float[n,4,t] conv)"),
        ("  out = Unsqueeze(o, time)", "  out = Unsqueeze(o, time)\n  conv = Conv<group = 4, pads = [3, 0]>(z, w)"),
    )
    step.graph.initializer.append(numpy_helper.from_array(np.ones((4, 1, 4), np.float32), "w"))
    step.graph.input[6].type.tensor_type.ClearField("shape")
    path = graphs.save(step, tmp_path)
    report = graphs.fuse(path, tmp_path / "fused.onnx", target="ort", rules=rules)
    assert [(site.status, site.op) for site in report.sites] == [
        ("match" if exit_code else "fused", "LinearAttention"),
        ("refused", None),
    ]
    assert report.sites[1].reason.code == "expression-unknown"
    assert report.exit == exit_code
    assert (tmp_path / "fused.onnx").exists() == (exit_code == 0)
