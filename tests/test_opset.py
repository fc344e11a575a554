"""Raising the opset: rewritten operators compute what they did, others stay, and what cannot be rewritten is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import graphs
from deltafuse.adjusting import Adjustments
from deltafuse.edits import build
from deltafuse.opset import Raised, adapt, import_needed, needed, raised, stale
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.pipeline import fuse
from deltafuse.reasons import Reason
from deltafuse.record import publish
from deltafuse.rollback import rollback
from deltafuse.splice import changes_of
from deltafuse.verify import verify
from deltafuse.wire import scan
from exports import export

pytestmark = pytest.mark.usefixtures("one_worker")

REDUCTIONS = ["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
              "ReduceProd", "ReduceSumSquare"]  # fmt: skip

MODELS = {
    **{op: f"y = {op}<axes=[1], keepdims=0>(x)" for op in REDUCTIONS},
    "ReduceMean of all": "y = ReduceMean<keepdims=1>(x)",
    "Split": "a, b = Split<axis=1>(x)\n y = Sub(a, b)",
    "Split with sizes": "s = Constant<value_ints=[1, 3]>()\n a, b = Split<axis=1>(x, s)\n y = Mul(a, b)",
    "Softmax": "y = Softmax<axis=1>(x)",
    "If": """t = Constant<value = bool {1}>()
        y = If(t) <then_branch = one () => (float[N, K] p) { p = ReduceMean<axes=[1]>(x) },
                   else_branch = two () => (float[N, K] r) { r = Identity(x) }>""",
}


def model_of(body: str, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[N, 4] x) => (float y) {{ {body} }}'
    )


def raise_file(path: Path, target: Path, version: int = 27) -> Raised | Reason:
    """Writes a file with nothing but its opset raised."""
    model = scan(path)
    found = raised(model, "", version)
    if isinstance(found, Raised):
        changes = changes_of(model.graph, (), (), Adjustments(None, found))
        publish(model, build(model, changes), target, "embed")
    return found


def run(path: Path, feeds: dict) -> list:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.mark.parametrize("name", MODELS)
def test_a_raised_file_is_valid_computes_the_same_and_comes_back(name, tmp_path):
    before, after, back = (tmp_path / f"{stem}.onnx" for stem in ("before", "after", "back"))
    model = model_of(MODELS[name])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, before)
    assert isinstance(raise_file(before, after), Raised)
    raised_model = onnx.load(after)
    assert {entry.domain: entry.version for entry in raised_model.opset_import} == {"": 27}
    onnx.shape_inference.infer_shapes(raised_model, check_type=True, strict_mode=True)
    assert stale(scan(after), 17) is None
    feeds = {"x": np.random.default_rng(1).uniform(0.5, 2, (3, 4)).astype(np.float32)}
    for found, wanted in zip(run(after, feeds), run(before, feeds), strict=True):
        np.testing.assert_array_equal(found, wanted)
    rollback(after, back)
    assert back.read_bytes() == before.read_bytes()


def node_of(op: str, inputs: int, outputs: int = 1, **attributes) -> onnx.NodeProto:
    names = [f"i{index}" for index in range(inputs)]
    return helper.make_node(op, names, [f"o{index}" for index in range(outputs)], "n", **attributes)


@pytest.mark.parametrize(
    ("node", "have", "found"),
    [
        (node_of("GridSample", 2, mode="bilinear"), 16, "linear"),
        (node_of("GridSample", 2, mode="bicubic"), 16, "cubic"),
        (node_of("GridSample", 2, mode="nearest"), 16, None),
        (node_of("RoiAlign", 3), 13, "output_half_pixel"),
        (node_of("RoiAlign", 3), 16, None),
    ],
)
def test_attributes_that_have_another_name_or_default(node, have, found):
    new = adapt(node, have, 27)
    if found is None:
        assert new is None
        return
    assert isinstance(new, tuple)
    assert [helper.get_attribute_value(a).decode() for a in new[-1].attribute] == [found]


def test_the_axis_of_a_dft_becomes_an_input():
    new = adapt(node_of("DFT", 1, axis=2), 17, 27)
    assert isinstance(new, tuple)
    constant, node = new
    assert numpy_helper.to_array(constant.attribute[0].t) == 2
    assert list(node.input) == ["i0", "", constant.output[0]]
    assert not node.attribute


@pytest.mark.parametrize(
    ("node", "have"),
    [
        (node_of("GroupNormalization", 3, num_groups=2), 18),
        (node_of("BatchNormalization", 5, 3), 13),
        (node_of("AveragePool", 1, kernel_shape=[2, 2], ceil_mode=1, count_include_pad=1), 17),
        (node_of("Attention", 6, is_causal=1), 23),
    ],
)
def test_what_means_something_else_is_refused_by_name(node, have):
    reason = adapt(node, have, 27)
    assert isinstance(reason, Reason)
    assert reason.code == "opset-operator"
    assert node.op_type in reason.text


@pytest.mark.parametrize(
    ("node", "have"),
    [
        (node_of("GroupNormalization", 3, num_groups=2), 21),
        (node_of("BatchNormalization", 5), 13),
        (node_of("AveragePool", 1, kernel_shape=[2, 2]), 17),
        (node_of("Attention", 3, is_causal=1), 23),
        (node_of("ReduceSum", 2, keepdims=0), 13),
        (node_of("Pad", 3), 14),
    ],
)
def test_what_means_the_same_stays(node, have):
    assert adapt(node, have, 27) is None


def test_a_node_of_another_domain_stays():
    node = node_of("ReduceMean", 1, axes=[1])
    node.domain = "com.example"
    assert adapt(node, 17, 27) is None


def test_local_functions_are_refused(tmp_path):
    model = model_of("y = Identity(x)")
    model.opset_import.add(domain="mine", version=1)
    model.functions.append(
        helper.make_function("mine", "F", ["a"], ["b"], [node_of("Identity", 1)], [helper.make_opsetid("", 17)])
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    reason = raise_file(path, tmp_path / "out.onnx")
    assert isinstance(reason, Reason)
    assert reason.code == "opset-functions"


def test_a_refused_operator_stops_the_fuse_and_names_it(tmp_path):
    path, fused = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    model = onnx.load(export("chunk_dy18").path)
    model.graph.initializer.extend(numpy_helper.from_array(np.ones(2, np.float32), name) for name in ("scale", "bias"))
    model.graph.input.append(helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 4, 2, 2]))
    model.graph.output.append(helper.make_tensor_value_info("pooled", TensorProto.FLOAT, [1, 4, 2, 2]))
    model.graph.node.append(
        helper.make_node("GroupNormalization", ["image", "scale", "bias"], ["pooled"], "pool", num_groups=2)
    )
    onnx.save(model, path)
    report = fuse(FuseOptions(path, fused, target="onnx"), SilentProgress())
    assert (report.exit, fused.exists()) == (4, False)
    (reason,) = (site.reason for site in report.sites if site.reason is not None)
    assert reason.code == "opset-operator"
    assert "GroupNormalization" in reason.text
    assert fuse(FuseOptions(path, fused, target="ort"), SilentProgress()).exit == 0


def test_external_data_stays_where_it_is(tmp_path):
    path, fused = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    model = onnx.load(export("full_decode_ts17").path)
    onnx.save_model(
        model, path, save_as_external_data=True, location="weights.bin", size_threshold=0, convert_attribute=True
    )
    before = {tensor.name: {e.key: e.value for e in tensor.external_data} for tensor in external(path)}
    assert fuse(FuseOptions(path, fused, target="onnx"), SilentProgress()).exit == 0
    after = {tensor.name: {e.key: e.value for e in tensor.external_data} for tensor in external(fused)}
    assert before
    assert after == before


def external(path: Path) -> list:
    model = onnx.load(path, load_external_data=False)
    return [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]


def edited(path: Path, target: Path) -> None:
    model = onnx.load(path)
    model.doc_string = "edited since"
    onnx.save(model, target)


def test_sites_of_an_edited_file_come_back_in_the_form_of_its_opset(tmp_path):
    (fused, changed, back), source = ((tmp_path / f"{n}.onnx" for n in "fcb"), export("full_decode_ts17"))
    assert fuse(FuseOptions(source.path, fused, target="onnx"), SilentProgress()).exit == 0
    edited(fused, changed)
    report = rollback(changed, back)
    assert report.mode == "in-place"
    assert {entry.domain: entry.version for entry in onnx.load(back).opset_import}[""] == 27
    for found, wanted in zip(run(back, source.inputs), run(source.path, source.inputs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_verify_tells_operators_that_were_left_in_the_old_form(tmp_path):
    fused, changed, source = tmp_path / "fused.onnx", tmp_path / "changed.onnx", export("full_decode_ts17")
    assert fuse(FuseOptions(source.path, fused, target="onnx", record="none"), SilentProgress()).exit == 0
    model, old = onnx.load(fused), onnx.load(source.path)
    means = {node.output[0]: node for node in old.graph.node if node.op_type == "ReduceMean"}
    for node in model.graph.node:
        if node.op_type == "ReduceMean":
            node.CopyFrom(means[node.output[0]])
    onnx.save(model, changed)
    report = verify(source.path, changed, level="site")
    assert report.exit == 5
    assert "stale-operator" in {finding.code for finding in report.findings}


def test_verify_tells_an_opset_that_was_raised_for_nothing(tmp_path):
    changed, source = tmp_path / "changed.onnx", export("chunk_dy18")
    model = onnx.load(source.path)
    model.opset_import[0].version = 20
    onnx.save(model, changed)
    report = verify(source.path, changed, level="site")
    assert [finding.code for finding in report.findings] == ["changed-opset"]


@pytest.mark.parametrize(
    ("nodes", "version"),
    [
        ([helper.make_node("Mul", ["x", "x"], ["y"])], 23),
        ([helper.make_node("Anything", ["x"], ["y"], domain="com.microsoft")], 23),
        ([helper.make_node("LinearAttention", ["x", "x", "x"], ["y", "s"])], 27),
    ],
)
def test_an_older_import_does_where_nothing_needs_the_newer_one(nodes, version):
    assert needed(nodes, 27) == version
    assert needed(nodes, 18) == 18
    body = helper.make_graph(nodes, "body", [], [])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    assert needed([branch], 27) == version
    model = helper.make_model(helper.make_graph([branch], "g", [], []), opset_imports=[helper.make_opsetid("", 27)])
    import_needed(model)
    assert model.opset_import[0].version == version


@pytest.mark.parametrize("target", ["ascend-310p", "ascend-a2", "ort", "onnx"])
def test_a_file_of_an_older_opset_is_told_to_be_exported_again(tmp_path: Path, target: str) -> None:
    model = graphs.step()
    constants = {tensor.name: numpy_helper.to_array(tensor).tolist() for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("Squeeze", "Unsqueeze", "ReduceSum"):
            node.attribute.append(helper.make_attribute("axes", constants[node.input.pop()]))
    model.opset_import[0].version = 12
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    report = graphs.fuse(graphs.save(model, tmp_path), tmp_path / "fused.onnx", target=target)
    assert (report.exit, graphs.codes(report)) == (4, ["opset-old"])
    assert report.sites[0].reason.args == {"opset": 12, "least": 13}
