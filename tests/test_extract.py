"""``--extract``: the stand-alone models of a site."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import deltafuse
from deltafuse import targets
from deltafuse.dims import parse
from deltafuse.extract import _work_out, extract_site
from deltafuse.lowering import fused_type
from deltafuse.targets import TargetOptions
from exports import export
from hand_match import FLOAT, HALF, NUMPY, Site, arrange, arrays, l2norm, match, recurrence

PREFILL = export("full_prefill_ts17").path


def cut(site: Site) -> onnx.ModelProto:
    """A stand-in for a site's cut: the same inputs without sizes, outputs without types, one inner value offered."""
    found = match(site)
    roles = [role for role in (found.query, found.key, found.value, found.g, found.beta, found.state) if role]
    nodes = [helper.make_node("Mul", [found.value.name, found.value.name], ["inner"])]
    nodes.append(helper.make_node("Identity", ["inner"], [found.out.name]))
    nodes.append(helper.make_node("Identity", [found.state.name], [found.final_state.name]))
    graph = onnx.GraphProto(name="cut", node=nodes)
    graph.input.extend(helper.make_tensor_value_info(r.name, r.dtype, [None] * len(r.shape)) for r in roles)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in (found.out.name, found.final_state.name, "inner"))
    return onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 17)], graph=graph)


def plan(site: Site):
    return targets.get("ascend-310p").plan(match(site), TargetOptions())


@pytest.mark.parametrize("site", [Site(), Site(tokens=2, dtype=HALF, norm=l2norm(HALF))])
def test_three_models_that_hold_the_site(site, tmp_path):
    before, after, lowered = extract_site(tmp_path / "new" / "folder", plan(site), cut(site))
    assert [path.name for path in (before, after, lowered)] == [
        "layers.3.before.onnx", "layers.3.after.onnx", "layers.3.after.lowered.onnx",
    ]  # fmt: skip
    for path in (before, lowered):
        onnx.checker.check_model(onnx.load(path), full_check=True)
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [node for node in onnx.load(after).graph.node if fused_type(node)]
    assert not [node for node in onnx.load(lowered).graph.node if fused_type(node)]


def test_inputs_and_outputs_are_declared_as_the_match_knows_them(tmp_path):
    site = Site()
    before, after, lowered = (onnx.load(path).graph for path in extract_site(tmp_path, plan(site), cut(site)))
    for graph in (before, after, lowered):
        shapes = {
            info.name: [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
            for info in (*graph.input, *graph.output)
        }
        assert shapes["/model/layers.3/linear_attn/q"] == ["batch", "seq_len", 2, 16]
        assert shapes["present_state"] == ["batch", 4, 16, 32]
        assert [info.name for info in graph.output] == ["/model/layers.3/linear_attn/o", "present_state"]
        assert {info.type.tensor_type.elem_type for info in graph.output} == {TensorProto.FLOAT}


def test_before_and_after_of_a_layer_run_on_the_same_inputs(tmp_path):
    """The site reads sizes of what comes before its operands: they are worked out from the operands."""
    deltafuse.inspect(PREFILL, sites="layers.0", extract=tmp_path)
    before, after, lowered = (tmp_path / f"layers.0.{kind}.onnx" for kind in ("before", "after", "after.lowered"))
    names = [[info.name for info in onnx.load(path).graph.input] for path in (before, after, lowered)]
    assert set(names[0]) == set(names[1]) == set(names[2])
    sizes = {"batch": 1, "seq_len": 20}
    rng = np.random.default_rng(4)
    fed = {
        info.name: rng.uniform(-1, 0, [sizes.get(d.dim_param, d.dim_value) for d in info.type.tensor_type.shape.dim])
        for info in onnx.load(before).graph.input
    }
    fed = {name: array.astype(np.float32) for name, array in fed.items()}
    results = [
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, fed)
        for path in (before, lowered)
    ]
    for wanted, found in zip(*results, strict=True):
        assert np.abs(wanted - found).max() <= 5e-3 * np.abs(wanted).max()
    # What was cut out is found again.
    assert [site.status for site in deltafuse.inspect(before).sites] == ["match"]


def test_a_size_that_no_operand_has_stays_an_input():
    value = helper.make_tensor_value_info
    roles = match(Site()).operands()
    for sizes, stays in ((None, True), ([2, 5], False), ([parse("elsewhere")], True), ([parse("seq_len"), 3], False)):
        graph = onnx.GraphProto(input=[value("x", FLOAT, [1]), value("size", TensorProto.INT64, [2])])
        _work_out(graph, "size", None if sizes is None else np.array(sizes, object), roles)
        assert ([info.name for info in graph.input] == ["x", "size"]) == stays
        assert (not graph.node) == stays


def test_the_cut_itself_is_not_changed(tmp_path):
    site, model = Site(), cut(Site())
    kept = model.SerializeToString()
    extract_site(tmp_path, plan(site), model)
    assert model.SerializeToString() == kept


def test_a_name_with_slashes_stays_one_file(tmp_path):
    site = Site(name="/model/layers.0")
    paths = extract_site(tmp_path, plan(site), cut(site))
    assert {path.parent for path in paths} == {tmp_path}
    assert paths[0].name == "_model_layers.0.before.onnx"


def test_the_lowered_model_computes_the_rule(tmp_path):
    site = Site(norm=l2norm(FLOAT))
    found = match(site)
    session = onnxruntime.InferenceSession(
        str(extract_site(tmp_path, plan(site), cut(site))[2]), providers=["CPUExecutionProvider"]
    )
    draw = arrays(site, 9)
    roles = {"q": found.query, "k": found.key, "v": found.value, "g": found.g, "beta": found.beta, "state": found.state}
    plain = {"q": "BTHD", "k": "BTHD", "v": "BTHD", "g": "BTH", "beta": "BTH", "state": "BHKV"}
    fed = {
        role.name: arrange(draw[name], plain[name], role.layout).astype(NUMPY[role.dtype])
        for name, role in roles.items()
    }
    for result, expected in zip(session.run(None, fed), recurrence(site, draw), strict=True):
        assert result.shape == expected.shape
        assert np.abs(result - expected).max() <= 5e-3 * np.abs(expected).max()
