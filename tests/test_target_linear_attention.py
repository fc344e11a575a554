"""Targets ``ort`` and ``onnx``: the nodes, and every fixture fused, run by onnxruntime as it is, and rolled back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from deltafuse import targets
from deltafuse.fused import kernel, lower_all
from deltafuse.lint import lint
from deltafuse.match import Plan
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.pipeline import fuse as fuse_model
from deltafuse.probe_double import to_double
from deltafuse.reasons import Reason
from deltafuse.rollback import rollback
from deltafuse.targets import TargetOptions
from deltafuse.verify import verify
from exports import Export, export, exports
from hand_match import BF16, FLOAT, HALF, Site, arrange, arrays, l2norm, match, recurrence
from tolerances import TOLERANCES, assert_close, cosine, nrmse

pytestmark = pytest.mark.usefixtures("one_worker")

TARGETS = ["ort", "onnx"]
MATCHES = exports(expect="match")


def planned(name: str, site: Site, **options) -> Plan:
    result = targets.get(name).plan(match(site), TargetOptions(**options))
    assert isinstance(result, Plan), result
    return result


def attention(plan: Plan):
    (node,) = (node for node in plan.nodes if kernel(node))
    return node


def attributes(node) -> dict:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


# The node.


@pytest.mark.parametrize(("name", "domain", "heads"), [("ort", "com.microsoft", 2), ("onnx", "", 4)])
def test_the_node_as_the_operator_documents_it(name, domain, heads):
    node = attention(planned(name, Site(scale=0.3)))
    assert (node.op_type, node.domain, len(node.input), len(node.output)) == ("LinearAttention", domain, 6, 2)
    assert attributes(node) == {
        "q_num_heads": heads,
        "kv_num_heads": 4,
        "update_rule": b"gated_delta",
        "scale": np.float32(0.3),
    }


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_pinned_and_any_batch_is_taken(name):
    assert planned(name, Site()).pins == ()
    plan = planned(name, Site(batch=3, tokens=7))
    shapes = [[dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in plan.value_info]
    assert shapes == [[3, 7, 4 * 32], [3, 4, 16, 32]]


@pytest.mark.parametrize("name", TARGETS)
def test_a_missing_state_is_left_out_unless_the_final_one_needs_its_type(name):
    assert attention(planned(name, Site(state_layout=None))).input[3] == ""
    plan = planned(name, Site(state_layout=None, dtype=HALF, state_dtype=FLOAT))
    assert attention(plan).input[3] != ""
    assert plan.value_info[1].type.tensor_type.elem_type == FLOAT


@pytest.mark.parametrize("name", TARGETS)
def test_the_gate_has_the_type_of_the_query_and_the_state_its_own(name):
    plan = planned(name, Site(dtype=HALF, g_dtype=FLOAT, state_dtype=FLOAT))
    node = attention(plan)
    casts = {cast.output[0]: cast.attribute[0].i for cast in plan.nodes if cast.op_type == "Cast"}
    assert casts[node.input[4]] == HALF
    assert node.input[3] not in casts
    assert plan.notes == ("float16_boundary: g rounded to float16",)
    assert planned(name, Site(dtype=HALF, g_dtype=FLOAT), boundary="fp32").notes == ()


@pytest.mark.parametrize("name", TARGETS)
def test_grouped_value_heads(name):
    plan = planned(name, Site(norm=l2norm(FLOAT)))
    repeats = [node for node in plan.nodes if node.op_type == "Expand"]
    assert len(repeats) == (0 if name == "ort" else 2)
    reason = targets.get(name).plan(match(Site(key_heads=3, value_heads=4)), TargetOptions())
    assert isinstance(reason, Reason)
    assert reason.code == "head-ratio"


@pytest.mark.parametrize("boundary", ["bf16", "fp16"])
@pytest.mark.parametrize("norm", [None, l2norm(FLOAT)], ids=["plain", "norm"])
def test_heads_are_repeated_in_the_type_of_the_model(norm, boundary):
    plan = planned("onnx", Site(norm=norm), boundary=boundary)
    writer = {node.output[0]: node for node in plan.nodes}
    for operand in attention(plan).input[:2]:
        ops = []
        while operand in writer:
            ops.append(writer[operand].op_type)
            operand = writer[operand].input[0]
        assert ops[:4] == ["Cast", "Reshape", "Expand", "Reshape"]
        assert ops.count("Cast") == 1


@pytest.mark.parametrize("batch", [2, "batch"])
def test_a_zero_state_is_spread_before_it_is_cast(batch):
    plan = planned("onnx", Site(batch=batch, state_layout=None, dtype=FLOAT, state_dtype=HALF))
    writer = {node.output[0]: node for node in plan.nodes}
    cast = writer[attention(plan).input[3]]
    assert [cast.op_type, writer[cast.input[0]].op_type] == ["Cast", "Expand"]


@pytest.mark.parametrize("name", ["rec_ts17_nonorm", "rec_dy20_dynB", "chunk_dy20_dynB"])
def test_grouped_heads_at_bfloat16_are_verified_and_without_fault(name, tmp_path):
    source, output = export(name).path, tmp_path / "fused.onnx"
    assert fuse_model(FuseOptions(source, output, target="onnx", boundary="bf16"), SilentProgress()).exit == 0
    assert {"Expand", "LinearAttention"} <= {node.op_type for node in onnx.load(output).graph.node}
    report = verify(source, output, level="site")
    assert (report.exit, [site.verdict for site in report.sites]) == (0, ["equal"])
    assert lint(output).findings == ()
    rollback(output, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", TARGETS)
def test_a_note_names_what_of_a_double_model_is_rounded(name):
    double = TensorProto.DOUBLE
    site = Site(dtype=double, g_dtype=double, state_dtype=double)
    named = "query, key, value, g, beta, state, out, final_state"
    assert planned(name, site).notes == (f"float32_boundary: {named} rounded to float32",)
    fresh = Site(state_dtype=double, state_layout=None)
    assert planned(name, fresh).notes == ("float32_boundary: final_state rounded to float32",)
    halves = planned(name, Site(dtype=HALF, g_dtype=double, state_dtype=double))
    states = "float32_boundary: state, final_state rounded to float32"
    assert halves.notes == ("float16_boundary: g rounded to float16", states)


@pytest.mark.parametrize("name", TARGETS)
def test_a_note_names_what_of_a_half_model_is_rounded(name):
    half = planned(name, Site(dtype=HALF, state_dtype=HALF), boundary="bf16")
    assert half.notes == ("bfloat16_boundary: query, key, value, g, beta, out rounded to bfloat16",)
    brain = planned(name, Site(dtype=BF16, g_dtype=BF16, state_dtype=BF16), boundary="fp16")
    assert brain.notes == ("float16_boundary: query, key, value, g, beta, out rounded to float16",)


def test_a_decay_per_key_channel_is_passed_on():
    site = Site()
    g = replace(match(site).g, layout="BTHD")
    plan = targets.get("ort").plan(replace(match(site), g=g), TargetOptions())
    assert isinstance(plan, Plan)
    (reshape,) = (node for node in plan.nodes if attention(plan).input[4] in node.output)
    assert reshape.op_type == "Reshape"


def test_an_opset_before_13_is_not_raised():
    reason = targets.get("onnx").plan(match(Site()), TargetOptions(opset=12))
    assert isinstance(reason, Reason)
    assert (reason.code, reason.args) == ("opset-below", {"opset": 12, "least": 13, "wanted": 27})


LAYOUTS = [
    {},
    {"qkv_layout": "BHTD", "gate_layout": "BHT", "out_layout": "BHTD"},
    {"qkv_layout": "BT(HD)", "out_layout": "BT(HD)", "state_layout": "BHVK", "final_layout": "BHVK"},
    {"qkv_layout": "(BT)HD", "out_layout": "(BT)(HD)", "norm": l2norm(FLOAT)},
    {"qkv_layout": "(BT)HD", "gate_layout": "(BT)H", "out_layout": "(BTH)D", "batch": 1},
    {"qkv_layout": "BHD", "gate_layout": "BH", "out_layout": "BHD", "tokens": 1},
    {"state_layout": None, "norm": l2norm(FLOAT), "out_layout": "BHTD"},
    {"state_layout": None, "dtype": HALF, "final_layout": "(BH)KV"},
]


@pytest.mark.parametrize("changes", LAYOUTS)
@pytest.mark.parametrize("name", TARGETS)
def test_the_nodes_compute_the_rule_for_two_sequences_in_any_layout(name, changes):
    site = Site(**changes)
    plan = planned(name, site)
    draws = [arrays(site, 1 if site.tokens == 1 else 5, seed) for seed in range(1 if site.batch == 1 else 2)]
    drawn = {key: np.concatenate([draw[key] for draw in draws]) for key in draws[0]}
    outs, finals = zip(*(recurrence(site, draw) for draw in draws), strict=True)
    ran = run_in_double(site, plan, drawn)
    wanted = {
        match(site).out.name: arrange(np.concatenate(outs), "BTHD", site.out_layout),
        match(site).final_state.name: arrange(np.concatenate(finals), "BHKV", site.final_layout),
    }
    for value, array in wanted.items():
        np.testing.assert_allclose(ran[value], array, rtol=1e-11, atol=1e-12)


def run_in_double(site: Site, plan: Plan, drawn: dict) -> dict:
    roles = match(site)
    feeds = {
        roles.query.name: arrange(drawn["q"], "BTHD", site.qkv_layout),
        roles.key.name: arrange(drawn["k"], "BTHD", site.qkv_layout),
        roles.value.name: arrange(drawn["v"], "BTHD", site.qkv_layout),
        roles.g.name: arrange(drawn["g"], "BTH", site.gate_layout),
        roles.beta.name: arrange(drawn["beta"], "BTH", site.gate_layout),
    }
    if roles.state is not None:
        feeds[roles.state.name] = arrange(drawn["state"], "BHKV", site.state_layout)
    scales = {attention(plan).name: site.scale}
    inputs = [
        helper.make_tensor_value_info(role.name, role.dtype, [None] * len(role.shape)) for role in roles.operands()
    ]
    outputs = [onnx.ValueInfoProto(name=role.name) for role in roles.results()]
    graph = helper.make_graph(lower_all(plan.nodes, scales), "g", inputs, outputs)
    model = to_double(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert not isinstance(model, Reason)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in outputs], session.run(None, feeds), strict=True))


# Whole files.


@pytest.mark.parametrize("export", MATCHES, ids=lambda export: export.name)
@pytest.mark.parametrize("name", TARGETS)
def test_a_fixture_fuses_runs_and_comes_back(name: str, export: Export, tmp_path):
    fused, back = tmp_path / "fused.onnx", tmp_path / "back.onnx"
    report = fuse_model(FuseOptions(export.path, fused, target=name), SilentProgress())
    if "inner-value-used" in {site.reason.code for site in report.sites if site.reason is not None}:
        assert "graph output as well" in export.truth["why"]
        assert not fused.exists()
        return
    assert report.exit == 0
    assert report.pinned == ()
    assert is_valid(export.path) <= is_valid(fused)
    check_outputs(fused, export)
    rollback(fused, back)
    assert back.read_bytes() == export.path.read_bytes()


def is_valid(path) -> bool:
    try:
        onnx.checker.check_model(path)
    except onnx.checker.ValidationError:
        return False
    return True


def check_outputs(fused, export: Export) -> None:
    session = onnxruntime.InferenceSession(str(fused), providers=["CPUExecutionProvider"])
    feeds = {value.name: export.inputs[value.name] for value in session.get_inputs()}
    for found, wanted in zip(session.run(None, feeds), export.expected, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        if "16" in export.truth["dtype"]:
            assert nrmse(found, wanted) <= TOLERANCES["float16"].nrmse
            assert cosine(found, wanted) >= TOLERANCES["float16"].cosine
        else:
            assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_other_sizes_than_traced_ones(tmp_path):
    (export,) = (export for export in MATCHES if export.name == "rec_ts17_dynBT")
    fused = tmp_path / "fused.onnx"
    assert fuse_model(FuseOptions(export.path, fused, target="ort"), SilentProgress()).exit == 0
    session = onnxruntime.InferenceSession(str(fused), providers=["CPUExecutionProvider"])
    one = {name: np.concatenate([array, array[::-1]]) for name, array in export.inputs.items()}
    whole = session.run(None, one)
    for found, wanted in zip(whole, session.run(None, export.inputs), strict=True):
        assert_close(found[: len(wanted)], wanted, "float32")


@pytest.mark.parametrize("fixture", ["chunk_ts17_dynBT", "full_decode_ts17", "chunk_ts20_B2", "rec_ts17_half"])
@pytest.mark.parametrize("name", TARGETS)
def test_verify_compares_what_these_targets_write(name, fixture, tmp_path):
    (export,) = (export for export in MATCHES if export.name == fixture)
    fused = tmp_path / "fused.onnx"
    assert fuse_model(FuseOptions(export.path, fused, target=name), SilentProgress()).exit == 0
    report = verify(export.path, fused, level="site")
    assert report.findings == ()
    assert report.exit == 0
    for site in report.sites:
        assert (site.verdict, site.reason) == ("equal", None)
        assert site.error is not None
        assert site.error <= 1e-12
        # An ordinary expression has no boundary of its own.
        assert (site.rounding is None) == ("causal_conv" in site.name)
    assert any(site.rounding is not None for site in report.sites)


def test_verify_finds_a_wrong_head_count_and_a_wrong_scale(tmp_path):
    (export,) = (export for export in MATCHES if export.name == "chunk_ts17_c64")
    fused = tmp_path / "fused.onnx"
    assert fuse_model(FuseOptions(export.path, fused, target="ort", record="none"), SilentProgress()).exit == 0
    model = onnx.load(fused)
    (node,) = (node for node in model.graph.node if kernel(node))
    for attribute in node.attribute:
        if attribute.name == "scale":
            attribute.f *= 1.01
    onnx.save(model, fused)
    report = verify(export.path, fused, level="site")
    assert report.exit == 5
    assert [site.reason.code for site in report.sites if site.reason] == ["site-differs"]


@pytest.mark.parametrize("fixture", ["chunk_ts14", "full_decode_ts17_half"])
@pytest.mark.parametrize("name", TARGETS)
def test_extracted_sites_run_as_they_are_and_lowered(name, fixture, tmp_path, fuse):
    (export,) = (export for export in MATCHES if export.name == fixture)
    outcome = fuse("inspect", export.path, "--target", name, "--extract", tmp_path, "--json")
    assert outcome.exit == 0
    lowered = sorted(tmp_path.glob("*.after.lowered.onnx"))[0]
    after = lowered.with_name(lowered.name.replace(".lowered", ""))
    sessions = [
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in (after, lowered)
    ]
    rng = np.random.default_rng(3)
    feeds = {}
    for value in sessions[0].get_inputs():
        shape = [size if isinstance(size, int) else 2 for size in value.shape]
        dtype = np.float16 if "16" in value.type else np.float32
        feeds[value.name] = (-0.3 * rng.uniform(0.1, 1, shape)).astype(dtype)
    for found, wanted in zip(*(session.run(None, feeds) for session in sessions), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [BF16, TensorProto.DOUBLE])
def test_the_boundary_is_the_graphs_where_the_operator_takes_it(dtype):
    plan = planned("ort", Site(dtype=dtype, g_dtype=dtype, state_dtype=FLOAT))
    assert plan.value_info[0].type.tensor_type.elem_type == (BF16 if dtype == BF16 else FLOAT)


def test_verify_reads_files_whose_nodes_are_out_of_order(tmp_path):
    path, fused = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    (export,) = (export for export in MATCHES if export.name == "chunk_dy18")
    model = onnx.load(export.path)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[10:], *nodes[:10]])
    onnx.save(model, path)
    assert fuse_model(FuseOptions(path, fused, target="ort"), SilentProgress()).exit == 0
    report = verify(path, fused, level="site")
    assert (report.exit, [site.verdict for site in report.sites]) == (0, ["equal"])
