"""The lowered form of the fused nodes against the kernels' documentation, written out in numpy."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from deltafuse.errors import UserError
from deltafuse.lowering import CHUNK, RECURRENT, fused_type, lower_model, lower_nodes, read_call
from deltafuse.probe_double import to_double
from deltafuse.reasons import Reason

CHUNK_PORTS = ["query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "g"]
RECURRENT_PORTS = [
    "query", "key", "value", "beta", "state", "actual_seq_lengths", "ssm_state_indices", "g", "gk",
    "num_accepted_tokens",
]  # fmt: skip
INT32 = ("actual_seq_lengths", "ssm_state_indices", "num_accepted_tokens")


def kernel(op, feeds, scale):
    """Either kernel, one token and one value head at a time."""
    q, k, v, beta = (feeds[name] for name in ("query", "key", "value", "beta"))
    store = feeds["state" if op == RECURRENT else "initial_state"].copy()
    heads, group = v.shape[1], v.shape[1] // q.shape[1]
    decay = np.zeros((*v.shape[:2], q.shape[2]))
    if "g" in feeds:
        decay = decay + feeds["g"][..., None]
    if "gk" in feeds:
        decay = decay + feeds["gk"]
    out, start = np.zeros(v.shape), 0
    for b, length in enumerate(feeds["actual_seq_lengths"]):
        accepted = feeds["num_accepted_tokens"][b] if "num_accepted_tokens" in feeds else 1
        slot = feeds["ssm_state_indices"][start + accepted - 1] if op == RECURRENT else b
        state = store[slot].copy()
        for t in range(start, start + length):
            for h in range(heads):
                state[h] = state[h] * np.exp(decay[t, h])[None, :]
                delta = beta[t, h] * (v[t, h] - state[h] @ k[t, h // group])
                state[h] = state[h] + np.outer(delta, k[t, h // group])
                out[t, h] = scale * state[h] @ q[t, h // group]
            store[feeds["ssm_state_indices"][t] if op == RECURRENT else b] = state
        start += length
    return out, store


def draw(op, lengths, slots, key_heads, value_heads, key_dim, value_dim, seed=0, optional=("g",)):
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    key = rng.normal(size=(tokens, key_heads, key_dim))
    feeds = {
        "query": rng.normal(size=(tokens, key_heads, key_dim)) / np.sqrt(key_dim),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.normal(size=(tokens, value_heads, value_dim)),
        "beta": rng.uniform(0.1, 0.9, size=(tokens, value_heads)),
        "state" if op == RECURRENT else "initial_state": rng.normal(size=(slots, value_heads, value_dim, key_dim)),
        "actual_seq_lengths": np.array(lengths, np.int32),
    }
    if "g" in optional:
        feeds["g"] = -rng.uniform(0, 1, size=(tokens, value_heads))
    if "gk" in optional:
        feeds["gk"] = -rng.uniform(0, 1, size=(tokens, value_heads, key_dim))
    return feeds


def model(op, feeds, scale=None, dtype=TensorProto.FLOAT16):
    """A model of one Custom node; every feed is a graph input."""
    ports = RECURRENT_PORTS if op == RECURRENT else CHUNK_PORTS
    fed = [name for name in ports if name in feeds]
    attributes = {"type": op, "input_names": ports, "input_index": [ports.index(name) for name in fed]}
    if scale is not None:
        attributes["scale_value"] = scale
    node = helper.make_node("Custom", fed, ["out", "last"], name="site", **attributes)
    types = [
        TensorProto.INT32 if name in INT32 else TensorProto.FLOAT if name in ("g", "gk") else dtype for name in fed
    ]
    inputs = [
        helper.make_tensor_value_info(name, kind, [None] * feeds[name].ndim)
        for name, kind in zip(fed, types, strict=True)
    ]
    outputs = [helper.make_tensor_value_info(name, dtype, [None] * rank) for name, rank in (("out", 3), ("last", 4))]
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def run(proto, feeds):
    onnx.checker.check_model(proto)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}
    typed = {i.name: feeds[i.name].astype(types.get(i.type, feeds[i.name].dtype)) for i in session.get_inputs()}
    return session.run(None, typed)


def relative(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def in_double(op, feeds, scale=None, scales=None):
    return run(to_double(lower_model(model(op, feeds, scale), scales)), feeds)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 6), (1, 4)])
@pytest.mark.parametrize("lengths", [[7], [3, 1, 4]])
def test_chunk_equals_the_documentation(lengths, key_heads, value_heads):
    feeds = draw(CHUNK, lengths, len(lengths), key_heads, value_heads, 8, 5)
    wanted = kernel(CHUNK, feeds, 0.25)
    for found, expected in zip(in_double(CHUNK, feeds, 0.25), wanted, strict=True):
        assert found.shape == expected.shape
        assert relative(found, expected) < 1e-13


@pytest.mark.parametrize("optional", [("g",), ("gk",), ("g", "gk"), ()])
def test_recurrent_equals_the_documentation(optional):
    feeds = draw(RECURRENT, [2, 3], 7, 2, 4, 8, 5, optional=optional)
    # The first sequence reads slot 4 (two tokens accepted) and writes 6 and 4; the second reads and writes 1, 0, 2.
    feeds["ssm_state_indices"] = np.array([6, 4, 1, 0, 2], np.int32)
    feeds["num_accepted_tokens"] = np.array([2, 1], np.int32)
    for found, expected in zip(in_double(RECURRENT, feeds, 0.5), kernel(RECURRENT, feeds, 0.5), strict=True):
        assert relative(found, expected) < 1e-13


def test_recurrent_reads_the_first_slot_where_nothing_is_said_of_accepted_tokens():
    feeds = draw(RECURRENT, [3], 2, 1, 1, 4, 4)
    feeds["ssm_state_indices"] = np.array([1, 0, 0], np.int32)
    for found, expected in zip(in_double(RECURRENT, feeds), kernel(RECURRENT, feeds, 1.0), strict=True):
        assert relative(found, expected) < 1e-13


def test_scale_is_one_where_it_is_not_given():
    feeds = draw(CHUNK, [4], 1, 1, 2, 8, 8)
    assert relative(in_double(CHUNK, feeds)[0], kernel(CHUNK, feeds, 1.0)[0]) < 1e-13


def test_a_scale_given_in_double_replaces_the_attribute():
    feeds = draw(CHUNK, [4], 1, 1, 2, 8, 8)
    exact = 1 / np.sqrt(128)
    wanted = kernel(CHUNK, feeds, exact)[0]
    assert relative(in_double(CHUNK, feeds, exact)[0], wanted) > 1e-9
    assert relative(in_double(CHUNK, feeds, exact, {"site": exact})[0], wanted) < 1e-13


@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
def test_target_precision_rounds_operands_and_results_to_half_and_nothing_between(op):
    feeds = draw(op, [6], 1, 1, 2, 16, 16)
    if op == RECURRENT:
        feeds["ssm_state_indices"] = np.zeros(6, np.int32)
    half = {name: value if name in (*INT32, "g") else value.astype(np.float16) for name, value in feeds.items()}
    exact = kernel(op, {n: v if n in INT32 else v.astype(np.float64) for n, v in half.items()}, 0.25)
    for found, expected in zip(run(lower_model(model(op, feeds, 0.25)), half), exact, strict=True):
        assert found.dtype == np.float16
        # float32 inside: the only visible rounding is the result's.
        assert np.abs(found.astype(np.float64) - expected).max() <= np.abs(expected).max() * 2.0**-11 * 1.01


def test_operands_of_other_types_are_rounded_to_half_first():
    feeds = draw(CHUNK, [3], 1, 1, 1, 16, 16)
    single = run(lower_model(model(CHUNK, feeds, 1.0, TensorProto.FLOAT16)), feeds)
    node = model(CHUNK, feeds, 1.0, TensorProto.FLOAT)
    for output in node.graph.output:
        output.type.tensor_type.elem_type = TensorProto.FLOAT16
    for found, expected in zip(run(lower_model(node), feeds), single, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_input_index_tells_the_port_of_each_input():
    feeds = draw(CHUNK, [5], 1, 1, 2, 8, 4)
    proto = model(CHUNK, feeds, 0.25)
    node = proto.graph.node[0]
    inputs = list(node.input)
    index = next(attribute for attribute in node.attribute if attribute.name == "input_index")
    order = [3, 6, 0, 2, 1, 5, 4]
    node.input[:] = [inputs[i] for i in order]
    index.ints[:] = order
    found = run(to_double(lower_model(proto)), feeds)
    assert relative(found[0], kernel(CHUNK, feeds, 0.25)[0]) < 1e-13


def test_only_the_two_kernels_are_lowered():
    other = helper.make_node("Custom", ["a"], ["b"], type="Scatter")
    plain = helper.make_node("Relu", ["a"], ["c"])
    foreign = helper.make_node("Custom", ["a"], ["b"], domain="x", type=CHUNK)
    nodes = [other, plain, foreign]
    assert [fused_type(node) for node in nodes] == ["", "", ""]
    assert lower_nodes(nodes) == nodes


def test_a_result_without_a_name_is_left_out():
    feeds = draw(CHUNK, [3], 1, 1, 1, 4, 4)
    proto = model(CHUNK, feeds, 1.0)
    proto.graph.node[0].output[1] = ""
    del proto.graph.output[1]
    (found,) = run(to_double(lower_model(proto)), feeds)
    assert relative(found, kernel(CHUNK, feeds, 1.0)[0]) < 1e-13


def index_of(node):
    return next(attribute.ints for attribute in node.attribute if attribute.name == "input_index")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda node: index_of(node).pop(), "input_index does not fit"),
        (lambda node: index_of(node).__setitem__(0, 9), "input_index does not fit"),
        (
            lambda node: node.attribute.pop(next(i for i, a in enumerate(node.attribute) if a.name == "input_names")),
            "input_index does not fit",
        ),
        (lambda node: node.input.__setitem__(4, ""), "no input for initial_state"),
    ],
)
def test_a_malformed_node_is_refused(change, fault):
    proto = model(CHUNK, draw(CHUNK, [3], 1, 1, 1, 4, 4))
    change(proto.graph.node[0])
    reason = read_call(proto.graph.node[0])
    assert isinstance(reason, Reason)
    assert (reason.code, fault in reason.text) == ("custom-malformed", True)
    with pytest.raises(UserError, match=fault):
        lower_model(proto)


def test_read_call_leaves_absent_ports_out():
    feeds = draw(CHUNK, [3], 1, 1, 1, 4, 4, optional=())
    call = read_call(model(CHUNK, feeds).graph.node[0])
    assert sorted(call.ports) == sorted(set(CHUNK_PORTS) - {"g"})
    assert (call.op, call.out, call.state, call.scale) == (CHUNK, "out", "last", 1.0)


def test_every_other_node_and_the_model_around_stay_as_they_are():
    feeds = draw(CHUNK, [3], 1, 1, 1, 4, 4)
    proto = model(CHUNK, feeds)
    proto.graph.node.append(helper.make_node("Identity", ["out"], ["again"], name="after"))
    lowered = lower_model(proto)
    assert lowered.graph.node[-1] == proto.graph.node[-1]
    assert [i.name for i in lowered.graph.input] == [i.name for i in proto.graph.input]
    assert fused_type(proto.graph.node[0]) == CHUNK
