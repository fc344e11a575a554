"""The nodes for ``ascend-310p``: the contract of the Custom node, its limits, and that they compute the rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from deltafuse import targets
from deltafuse.lowering import fused_type, lower_model
from deltafuse.match import Plan
from deltafuse.probe_double import to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.targets import TargetOptions
from deltafuse.targets.ascend_310p import LIMITS, RGDR_LIMITS
from hand_match import BF16, FLOAT, HALF, NUMPY, Site, arrange, arrays, l2norm, match, recurrence

CGDR, RGDR = "ChunkGatedDeltaRule", "RecurrentGatedDeltaRule"
TARGET = targets.get("ascend-310p")
DECODE = {"tokens": 1, "qkv_layout": "BTHD"}


def plan(site: Site, **options) -> Plan:
    result = TARGET.plan(match(site), TargetOptions(**options))
    assert isinstance(result, Plan), result
    return result


def custom(site: Site, **options):
    (node,) = (node for node in plan(site, **options).nodes if fused_type(node))
    return node


def constant(site_plan: Plan, value: str) -> np.ndarray:
    (node,) = (node for node in site_plan.nodes if value in node.output)
    assert node.op_type == "Constant"
    return numpy_helper.to_array(node.attribute[0].t)


def readers(site_plan: Plan, value: str):
    return [node for node in site_plan.nodes if value in node.input]


def producer(site_plan: Plan, value: str):
    (node,) = (node for node in site_plan.nodes if value in node.output)
    return node


# The Custom node of the contract, in the contract's order.


def test_chunk_attributes_kinds_and_order():
    node = custom(Site(scale=0.3))
    assert (node.op_type, node.domain) == ("Custom", "")
    names = ["query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "g"]
    expected = [
        ("type", AttributeProto.STRING, CGDR),
        ("input_names", AttributeProto.STRINGS, names),
        ("optional_input_names", AttributeProto.STRINGS, ["g"]),
        ("input_index", AttributeProto.INTS, [0, 1, 2, 3, 4, 5, 6]),
        ("output_names", AttributeProto.STRINGS, ["out", "final_state"]),
        ("output_num", AttributeProto.INT, 2),
        ("scale_value", AttributeProto.FLOAT, float(np.float32(0.3))),
        ("dtype", AttributeProto.INT, 10),
    ]
    assert [(a.name, a.type, value(a)) for a in node.attribute] == expected
    assert len(node.input) == 7
    assert len(node.output) == 2


def test_recurrent_attributes_kinds_and_order():
    node = custom(Site(**DECODE, scale=0.125))
    assert (node.op_type, node.domain) == ("Custom", "")
    names = [
        "query", "key", "value", "beta", "state", "actual_seq_lengths", "ssm_state_indices", "g", "gk",
        "num_accepted_tokens",
    ]  # fmt: skip
    expected = [
        ("type", AttributeProto.STRING, RGDR),
        ("input_names", AttributeProto.STRINGS, names),
        ("optional_input_names", AttributeProto.STRINGS, ["g", "gk", "num_accepted_tokens"]),
        ("input_index", AttributeProto.INTS, [0, 1, 2, 3, 4, 5, 6, 7, 9]),
        ("output_names", AttributeProto.STRINGS, ["out", "state"]),
        ("output_num", AttributeProto.INT, 2),
        ("scale_value", AttributeProto.FLOAT, 0.125),
        ("dtype", AttributeProto.INT, 10),
        ("output_types", AttributeProto.INTS, [42, 42]),
        ("outputs_shape", AttributeProto.STRING, "3,-1,4,32,4,-1,4,32,16,"),
    ]
    assert [(a.name, a.type, value(a)) for a in node.attribute] == expected
    assert len(node.input) == 9


def value(attribute):
    found = helper.get_attribute_value(attribute)
    if isinstance(found, bytes):
        return found.decode()
    return [item.decode() if isinstance(item, bytes) else item for item in found] if isinstance(found, list) else found


@pytest.mark.parametrize(("key_dim", "scale"), [(64, 64**-0.5), (128, 128**-0.5), (128, 1.0)])
def test_scale_comes_from_the_match(key_dim, scale):
    node = custom(Site(key_dim=key_dim, scale=scale))
    (attribute,) = (a for a in node.attribute if a.name == "scale_value")
    assert attribute.f == np.float32(scale)


@pytest.mark.parametrize("site", [Site(), Site(**DECODE), Site(tokens=3, state_layout=None, final_layout=None)])
def test_both_outputs_are_declared_float16(site):
    site_plan = plan(site)
    node = custom(site)
    declared = {info.name: info.type.tensor_type for info in site_plan.value_info}
    tokens = site.tokens
    shapes = [[tokens, 4, 32], [1, 4, 32, 16]]
    for name, shape in zip(node.output, shapes, strict=True):
        assert declared[name].elem_type == TensorProto.FLOAT16
        assert [dim.dim_param or dim.dim_value for dim in declared[name].shape.dim] == shape


def test_a_final_state_that_nothing_reads_is_declared_and_not_consumed():
    site = Site(final_layout=None)
    site_plan = plan(site)
    assert readers(site_plan, custom(site).output[1]) == []
    assert custom(site).output[1] in {info.name for info in site_plan.value_info}


def test_chunk_lengths_come_from_the_query():
    site_plan = plan(Site())
    node = custom(Site())
    expand = producer(site_plan, node.input[5])
    to_int32 = producer(site_plan, expand.input[0])
    cut = producer(site_plan, to_int32.input[0])
    shape = producer(site_plan, cut.input[0])
    assert [n.op_type for n in (shape, cut, to_int32, expand)] == ["Shape", "Slice", "Cast", "Expand"]
    assert list(shape.input) == [node.input[0]]
    assert to_int32.attribute[0].i == TensorProto.INT32
    assert [constant(site_plan, v).tolist() for v in cut.input[1:]] == [[0], [1]]
    assert constant(site_plan, expand.input[1]).tolist() == [1]


def test_recurrent_lengths_slots_and_accepted_tokens_are_int32_constants():
    site_plan = plan(Site(**{**DECODE, "tokens": 3}))
    node = custom(Site(**{**DECODE, "tokens": 3}))
    found = [constant(site_plan, node.input[port]) for port in (5, 6, 8)]
    assert [array.tolist() for array in found] == [[3], [0, 0, 0], [1]]
    assert {array.dtype for array in found} == {np.dtype(np.int32)}


def test_a_prefill_without_a_state_starts_from_a_float16_zero():
    site = Site(state_layout=None)
    zero = constant(plan(site), custom(site).input[4])
    assert zero.dtype == np.float16
    assert zero.shape == (1, 4, 32, 16)
    assert not zero.any()


def test_the_state_is_transposed_and_cast_on_both_sides():
    site_plan, node = plan(Site()), custom(Site())
    inward = producer(site_plan, node.input[4])
    before = producer(site_plan, inward.input[0])
    assert [n.op_type for n in (before, inward)] == ["Transpose", "Cast"]
    assert (list(before.input), list(before.attribute[0].ints)) == (["past_state"], [0, 1, 3, 2])
    assert inward.attribute[0].i == TensorProto.FLOAT16
    (outward,) = readers(site_plan, node.output[1])
    (after,) = readers(site_plan, outward.output[0])
    assert [n.op_type for n in (outward, after)] == ["Transpose", "Cast"]
    assert list(outward.attribute[0].ints) == [0, 1, 3, 2]
    assert (list(after.output), after.attribute[0].i) == (["present_state"], TensorProto.FLOAT)


# The operand that RGDR overwrites.

STATES = [("BHKV", FLOAT), ("BHKV", HALF), ("BHVK", FLOAT), ("BHVK", HALF), ("(BH)VK", HALF), (None, FLOAT)]


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("layout", "dtype"), STATES)
def test_the_recurrent_state_is_a_fresh_node_output_that_nothing_else_reads(layout, dtype, heads, tokens):
    site = Site(
        tokens=tokens, key_heads=1, value_heads=heads, state_layout=layout, state_dtype=dtype, final_layout=layout
    )
    site_plan, node = plan(site), custom(site)
    state = node.input[4]
    assert readers(site_plan, state) == [node]
    # A view of a graph input, or a constant, would be overwritten in place.
    assert producer(site_plan, state).op_type in ("Cast", "Transpose", "Gather", "Mul")


@pytest.mark.parametrize(("layout", "dtype"), STATES)
def test_onnxruntime_cannot_simplify_the_fresh_state_away(layout, dtype, tmp_path):
    site = Site(tokens=2, value_heads=4, state_layout=layout, state_dtype=dtype, final_layout=layout)
    site_plan = plan(site)
    state = custom(site).input[4]
    model = whole(site, [node for node in site_plan.nodes if not fused_type(node)], [])
    # Two readers keep the name; the kernel's own reader is not known to onnxruntime.
    model.graph.output.append(helper.make_tensor_value_info(state, HALF, None))
    keep(model, state)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(tmp_path / "optimised.onnx").graph
    assert state in {name for node in optimised.node for name in node.output}
    assert state not in {tensor.name for tensor in optimised.initializer}
    (last,) = (node for node in optimised.node if state in node.output)
    assert last.op_type not in ("Identity", "Reshape")


def keep(model, value):
    """Leaves only what a value is computed from."""
    wanted, used = {value}, []
    for node in reversed(model.graph.node):
        if wanted & set(node.output):
            wanted |= set(node.input)
            used.insert(0, node)
    inputs = [item for item in model.graph.input if item.name in wanted]
    for field, items in ((model.graph.node, used), (model.graph.input, inputs)):
        del field[:]
        field.extend(items)


# Names and metadata.


def test_names_and_metadata_tell_site_and_rule():
    site = Site(norm=l2norm(FLOAT), valid=(1, 64))
    site_plan = plan(site)
    old = {"/model/layers.3/linear_attn/o", "present_state"}
    names = [node.name for node in site_plan.nodes]
    assert len(set(names)) == len(names)
    for node in site_plan.nodes:
        assert node.name.startswith("layers.3/gated_delta_rule/")
        assert all(name.startswith("layers.3/gated_delta_rule/") or name in old for name in node.output)
        properties = {item.key: item.value for item in node.metadata_props}
        assert properties["deltafuse.site"] == "layers.3"
        assert properties["deltafuse.rule"] == "gated_delta_rule"
        assert properties["deltafuse.version"]
    properties = {item.key: item.value for item in custom(site).metadata_props}
    assert properties["deltafuse.scope"] == "/model/layers.3/linear_attn"
    assert properties["deltafuse.valid_tokens"] == "1..64"
    assert properties["deltafuse.form"] == "chunk"


def test_nodes_are_in_topological_order_and_write_the_old_names_last():
    site_plan = plan(Site(norm=l2norm(HALF), dtype=HALF, qkv_layout="BHTD", out_layout="BHTD"))
    known = {"/model/layers.3/linear_attn/" + name for name in ("q", "k", "v", "g", "beta")} | {"past_state"}
    for node in site_plan.nodes:
        assert set(node.input) <= known
        known |= set(node.output)
    assert {"/model/layers.3/linear_attn/o", "present_state"} <= known


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("layout", ["BTHD", "BHTD", "BT(HD)"])
def test_no_redundant_nodes(layout, dtype):
    site_plan = plan(Site(qkv_layout=layout, out_layout=layout, dtype=dtype, state_layout="BHVK", final_layout="BHVK"))
    types = {"/model/layers.3/linear_attn/" + name: dtype for name in ("q", "k", "v", "beta")}
    types |= {"/model/layers.3/linear_attn/g": FLOAT, "past_state": FLOAT}
    for node in site_plan.nodes:
        if node.op_type == "Cast":
            assert types.get(node.input[0], HALF) != node.attribute[0].i
        if node.op_type in ("Reshape", "Transpose"):
            types[node.output[0]] = types.get(node.input[0], HALF)
    operators = [node.op_type for node in site_plan.nodes]
    # One Reshape each for q, k, v, g, beta and out; a Transpose where heads come first.
    assert operators.count("Reshape") == 6
    assert operators.count("Transpose") == (4 if layout == "BHTD" else 0)
    assert "Identity" not in operators


def test_a_result_that_needs_no_change_keeps_a_name_of_its_own():
    site = Site(tokens=1, dtype=HALF, qkv_layout="BHD", gate_layout="BH", out_layout="BHD", state_dtype=HALF)
    site_plan = plan(site)
    (last,) = readers(site_plan, custom(site).output[0])
    assert (last.op_type, list(last.output)) == ("Identity", ["/model/layers.3/linear_attn/o"])


# Limits.


def refusal(site: Site, changes=None, **options) -> Reason:
    result = TARGET.plan(replace(match(site), **(changes or {})), TargetOptions(**options))
    chosen = TARGET.choose(replace(match(site), **(changes or {})), TargetOptions(**options))
    assert isinstance(result, Reason)
    assert chosen == result
    assert result.text
    return result


def test_every_limit_has_a_text_and_a_mark():
    codes = {limit.code for limit in (*LIMITS, *RGDR_LIMITS)}
    assert codes <= set(TEXTS)
    assert {limit.mark for limit in (*LIMITS, *RGDR_LIMITS)} <= {"V", "S", "A"}


def test_head_size():
    assert TARGET.choose(match(Site(key_dim=128, value_dim=256)), TargetOptions()) == CGDR
    assert refusal(Site(key_dim=144)).args == {"key_dim": 144, "limit": 128}
    assert refusal(Site(key_dim=144)).code == "head-size"
    assert refusal(Site(key_dim=144, **DECODE)).code == "head-size"


def test_head_ratio():
    reason = refusal(Site(key_heads=3, value_heads=4))
    assert (reason.code, reason.args) == ("head-ratio", {"value_heads": 4, "key_heads": 3})


@pytest.mark.parametrize("tokens", [1, "seq_len"])
def test_static_batch(tokens):
    reason = refusal(Site(batch=4, tokens=tokens))
    assert (reason.code, reason.args) == ("static-batch", {"batch": 4, "wanted": 1})
    assert TARGET.choose(match(Site(batch=1, tokens=tokens)), TargetOptions()) == (RGDR if tokens == 1 else CGDR)


def test_bf16_boundary():
    reason = refusal(Site(dtype=BF16))
    assert reason.code == "bf16-boundary"
    assert reason.args == {"roles": "query, key, value, beta, out"}
    assert refusal(Site(state_dtype=BF16)).args == {"roles": "state, final_state"}
    casts = [
        node.attribute[0].i for node in plan(Site(dtype=BF16), allow_bf16_to_fp16=True).nodes if node.op_type == "Cast"
    ]
    assert casts.count(TensorProto.BFLOAT16) == 1
    # g is float32 in the kernel, which loses nothing of a bfloat16.
    assert isinstance(TARGET.choose(match(Site(g_dtype=BF16)), TargetOptions()), str)


@pytest.mark.parametrize("layout", ["BTHK", "BTHD"])
def test_per_channel_decay(layout):
    g = replace(match(Site()).g, layout=layout)
    assert refusal(Site(), {"g": g}).code == "per-channel-decay"


@pytest.mark.parametrize(("tokens", "op"), [(1, RGDR), (8, RGDR), (9, CGDR), (32, CGDR), ("seq_len", CGDR)])
def test_the_operator_is_what_is_legal_for_the_token_count(tokens, op):
    assert TARGET.choose(match(Site(tokens=tokens)), TargetOptions()) == op
    assert plan(Site(tokens=tokens)).op == op


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 32), (16, 24)])
def test_head_sizes_that_recurrent_cannot_do_become_chunk(key_dim, value_dim):
    site = Site(**DECODE, key_dim=key_dim, value_dim=value_dim)
    assert TARGET.choose(match(site), TargetOptions()) == CGDR
    reason = refusal(site, op="rgdr")
    assert reason.code == "rgdr-head-size"
    assert reason.args == {"key_dim": key_dim, "value_dim": value_dim, "block": 16}


@pytest.mark.parametrize("tokens", [9, "seq_len"])
def test_recurrent_asked_for_against_its_token_limit(tokens):
    reason = refusal(Site(tokens=tokens), op="rgdr")
    assert (reason.code, reason.args) == ("rgdr-tokens", {"tokens": tokens, "limit": 8})


def test_chunk_asked_for_where_recurrent_is_legal():
    assert plan(Site(**DECODE), op="cgdr").op == CGDR


def test_a_token_axis_that_is_right_for_one_size_is_pinned_and_literal():
    site = Site(valid=(1, 1))
    assert plan(site).op == RGDR
    assert plan(site, pin=False).op == CGDR
    assert TARGET.choose(match(Site(valid=(1, 64))), TargetOptions()) == CGDR


def test_a_token_count_that_the_user_pins_is_literal():
    assert plan(Site(), tokens=4).op == RGDR
    assert constant(plan(Site(), tokens=4), custom(Site(), tokens=4).input[5]).tolist() == [4]


# Pins and notes.


def test_pins_name_the_batch_axis_of_every_role():
    found = match(Site(qkv_layout="BHTD", state_layout="(BH)KV"))
    site_plan = plan(Site(qkv_layout="BHTD", state_layout="(BH)KV"))
    roles = [found.query, found.key, found.value, found.g, found.beta, found.out, found.final_state]
    assert set(site_plan.pins) == {(role.value, 0, 1) for role in roles} | {(found.state.value, 0, 4)}


def test_pins_name_the_token_axis_where_one_size_is_right():
    found = match(Site(valid=(2, 2), qkv_layout="BHTD"))
    tokens = {pin for pin in plan(Site(valid=(2, 2), qkv_layout="BHTD")).pins if pin[2] == 2}
    expected = {(role.value, 2, 2) for role in (found.query, found.key, found.value)}
    assert tokens == expected | {(role.value, 1, 2) for role in (found.g, found.beta, found.out)}


def test_no_pins_without_pinning_and_a_note_says_what_is_assumed():
    site_plan = plan(Site(), pin=False)
    assert site_plan.pins == ()
    assert any(note.startswith("batch_one_assumed") and "batch" in note for note in site_plan.notes)


def test_a_note_names_what_is_rounded():
    named = "query, key, value, beta, state, out, final_state"
    assert plan(Site()).notes == (f"float16_boundary: {named} rounded to float16",)
    named = named.replace(" state,", "")
    assert plan(Site(state_layout=None)).notes == (f"float16_boundary: {named} rounded to float16",)
    assert plan(Site(dtype=HALF, state_dtype=HALF)).notes == ()
    double = plan(Site(dtype=HALF, state_dtype=HALF, g_dtype=TensorProto.DOUBLE))
    assert double.notes == ("float32_boundary: g rounded to float32",)


# The numbers.


def whole(site: Site, nodes, outputs, opset=17):
    """The plan's nodes as a model whose inputs are the roles."""
    found = match(site)
    roles = [
        role for role in (found.query, found.key, found.value, found.g, found.beta, found.state) if role is not None
    ]
    inputs = [helper.make_tensor_value_info(role.name, role.dtype, [None] * len(role.shape)) for role in roles]
    results = [helper.make_tensor_value_info(role.name, role.dtype, [None] * len(role.shape)) for role in outputs]
    graph = helper.make_graph(nodes, "site", inputs, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def feeds(site: Site, draw):
    found = match(site)
    plain = {"q": "BTHD", "k": "BTHD", "v": "BTHD", "g": "BTH", "beta": "BTH", "state": "BHKV"}
    roles = {"q": found.query, "k": found.key, "v": found.value, "g": found.g, "beta": found.beta, "state": found.state}
    return {
        role.name: arrange(draw[name], plain[name], role.layout) for name, role in roles.items() if role is not None
    }


def run(model, inputs):
    options = onnxruntime.SessionOptions()
    # As written: no cast between two half operators is taken out.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {item.name: inputs[item.name] for item in session.get_inputs()})


SITES = {
    "prefill, grouped heads": Site(),
    "prefill, equal heads": Site(key_heads=4),
    "prefill, no state": Site(state_layout=None),
    "prefill, final state unused": Site(final_layout=None),
    "prefill, half": Site(dtype=HALF, state_dtype=HALF),
    "prefill, half with norm": Site(dtype=HALF, norm=l2norm(HALF)),
    "prefill, norm": Site(norm=l2norm(FLOAT)),
    "prefill, norm in single of a half root": Site(dtype=HALF, norm=l2norm(FLOAT)),
    "prefill, heads first": Site(qkv_layout="BHTD", gate_layout="BHT", out_layout="BHTD", norm=l2norm(FLOAT)),
    "prefill, merged heads": Site(qkv_layout="BT(HD)", out_layout="BT(HD)", norm=l2norm(FLOAT)),
    "prefill, batch and heads merged": Site(qkv_layout="(BH)TD", gate_layout="(BH)T", out_layout="(BH)TD"),
    "prefill, value-major state": Site(state_layout="BHVK", final_layout="BHVK"),
    "prefill, square state": Site(key_dim=16, value_dim=16),
    "prefill, square value-major state": Site(key_dim=16, value_dim=16, state_layout="BHVK", final_layout="BHVK"),
    "prefill, odd sizes": Site(key_dim=10, value_dim=6),
    "prefill, static": Site(tokens=11, batch=1),
    "decode": Site(tokens=1),
    "decode, half": Site(tokens=1, dtype=HALF, state_dtype=HALF, norm=l2norm(HALF)),
    "decode, no state": Site(tokens=1, state_layout=None),
    "decode, three tokens, no state": Site(tokens=3, state_layout=None, norm=l2norm(FLOAT)),
    "decode, value-major half state": Site(tokens=2, state_layout="BHVK", final_layout="BHVK", state_dtype=HALF),
    "decode, one head": Site(tokens=2, key_heads=1, value_heads=1, state_layout="BHVK", state_dtype=HALF),
    "decode, heads first": Site(tokens=1, qkv_layout="BHTD", gate_layout="BHT", out_layout="BHTD"),
    "decode, no time axis": Site(tokens=1, qkv_layout="BHD", gate_layout="BH", out_layout="BHD"),
    "decode, dynamic axis right for one size": Site(valid=(1, 1)),
    "decode, scale one": Site(tokens=1, scale=1.0),
}


@pytest.mark.parametrize("opset", [14, 20])
@pytest.mark.parametrize("title", list(SITES))
def test_lowered_in_double_the_nodes_are_the_recurrence(title, opset):
    site = SITES[title]
    site_plan, found = plan(site), match(site)
    tokens = site.tokens if isinstance(site.tokens, int) else 1 if site.valid == (1, 1) else 7
    assert site_plan.op == (RGDR if title.startswith("decode") else CGDR)
    outputs = [role for role in (found.out, found.final_state) if role is not None]
    node = next(node for node in site_plan.nodes if fused_type(node))
    lowered = to_double(lower_model(whole(site, site_plan.nodes, outputs, opset), {node.name: site.scale}))
    onnx.checker.check_model(lowered)
    draw = arrays(site, tokens)
    results = run(lowered, feeds(site, draw))
    for role, plain, have, result in zip(outputs, recurrence(site, draw), ("BTHD", "BHKV"), results, strict=False):
        expected = arrange(plain, have, role.layout)
        assert result.shape == expected.shape
        assert np.abs(result - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize(
    "title", ["prefill, norm", "prefill, half with norm", "decode", "decode, half", "prefill, odd sizes"]
)
def test_at_the_targets_precision_the_nodes_are_the_recurrence_but_for_rounding(title):
    site = SITES[title]
    site_plan, found = plan(site), match(site)
    tokens = site.tokens if isinstance(site.tokens, int) else 7
    model = lower_model(whole(site, site_plan.nodes, [found.out, found.final_state]))
    draw = {name: array.astype(np.float16).astype(np.float64) for name, array in arrays(site, tokens).items()}
    found_inputs = {
        role.name: NUMPY[role.dtype] for role in (found.query, found.key, found.value, found.g, found.beta, found.state)
    }
    typed = {name: array.astype(found_inputs[name]) for name, array in feeds(site, draw).items()}
    for result, plain, role in zip(
        run(model, typed), recurrence(site, draw), (found.out, found.final_state), strict=True
    ):
        assert result.dtype == NUMPY[role.dtype]
        expected = arrange(plain, "BTHD" if role is found.out else "BHKV", role.layout)
        assert np.sqrt(np.mean((result - expected) ** 2)) <= 2e-3 * np.sqrt(np.mean(expected**2))


# The norm on un-repeated heads.


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("spread", [1e-4, 1.0, 100.0])
def test_the_norm_before_the_repeat_is_bit_equal_to_the_norm_after_it(dtype, spread):
    norm = l2norm(dtype)
    site = Site(dtype=dtype, norm=norm, key_heads=2, value_heads=6, key_dim=64)
    site_plan, found = plan(site), match(site)
    rng = np.random.default_rng(1)
    query = (spread * rng.uniform(-1, 1, size=(1, 5, 2, 64))).astype(NUMPY[dtype])
    # The source: repeat each head, then normalise.
    source = helper.make_graph(
        list(norm.nodes), "source",
        [helper.make_tensor_value_info("x", dtype, [None] * 4)],
        [helper.make_tensor_value_info("y", dtype, [None] * 4)],
        list(norm.initializers),
    )  # fmt: skip
    source = helper.make_model(source, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    (wanted,) = run(source, {"x": np.repeat(query, 3, axis=2)})
    cast = producer(site_plan, custom(site).input[0]) if dtype == FLOAT else None
    normalised = custom(site).input[0] if cast is None else cast.input[0]
    nodes = [node for node in site_plan.nodes if not fused_type(node)]
    model = whole(site, nodes, [replace(found.query, name=normalised, shape=(1, 1, 1))])
    keep(model, normalised)
    (got,) = run(model, {found.query.name: query})
    assert got.dtype == NUMPY[dtype]
    np.testing.assert_array_equal(np.repeat(got, 3, axis=1), wanted[0])


@pytest.mark.parametrize(("root", "inside"), [(FLOAT, FLOAT), (HALF, HALF), (HALF, FLOAT), (FLOAT, HALF)])
def test_the_norm_keeps_operators_order_type_and_eps_bytes(root, inside):
    norm = l2norm(inside)
    site = Site(dtype=root, norm=norm)
    site_plan = plan(site)
    for name in ("query", "key"):
        nodes = [node for node in site_plan.nodes if f"/{name}/l2norm/" in node.name]
        assert [n.op_type for n in nodes if n.op_type != "Constant"] == [n.op_type for n in norm.nodes]
        tensors = [node.attribute[0].t for node in nodes if node.op_type == "Constant"]
        assert [(t.data_type, t.raw_data) for t in tensors] == [(t.data_type, t.raw_data) for t in norm.initializers]
        casts = [node for node in site_plan.nodes if node.op_type == "Cast" and f"/{name}/" in node.name]
        expected = [inside] * (root != inside) + [HALF] * (inside != HALF)
        assert [node.attribute[0].i for node in casts] == expected
        for before, after in pairwise([n for n in nodes if n.op_type != "Constant"]):
            assert before.output[0] in after.input or after.op_type == "Mul"


def test_f16_eps_may_be_subnormal():
    norm = l2norm(HALF)
    assert norm.eps == pytest.approx(1.0133e-06, rel=1e-4)
    tensors = [node.attribute[0].t for node in plan(Site(dtype=HALF, norm=norm)).nodes if "l2norm/eps" in node.name]
    assert [t.raw_data for t in tensors] == [np.float16(1e-6).tobytes()] * 2
