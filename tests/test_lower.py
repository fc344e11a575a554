"""`fuse lower`: what it writes runs in onnxruntime and is what the kernels' documentation says."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

import graphs
from deltafuse import lower as lower_module  # the function: the package's name for it
from deltafuse import pipeline
from deltafuse.errors import UserError
from deltafuse.lower import lower
from deltafuse.lowering_attention import runtime_has
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.record import KEY
from exports import export
from tolerances import assert_close

pytestmark = pytest.mark.usefixtures("one_worker")

CHUNK, RECURRENT = "ChunkGatedDeltaRule", "RecurrentGatedDeltaRule"
FLOAT, HALF, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE


def run(path, feeds):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {one.name: feeds[one.name] for one in session.get_inputs()})


def boundary_casts(model):
    """Casts to float16 that a fuse wrote."""
    ours = [node for node in model.graph.node if any(entry.key == "deltafuse.site" for entry in node.metadata_props)]
    return [node.name for node in ours if node.op_type == "Cast" and node.attribute[0].i == HALF]


# Real exports, fused


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Fused fixtures by name, each made once."""
    folder, made = tmp_path_factory.mktemp("fused"), {}

    def make(name):
        if name not in made:
            path = folder / f"{name}.onnx"
            report = pipeline.fuse(FuseOptions(model=export(name).path, output=path), SilentProgress())
            assert report.exit == 0
            made[name] = path
        return made[name]

    return make


CASES = [
    "chunk_ts14",
    "chunk_dy20_half",
    "chunk_dy23_noinit_nofinal",
    "steps_ts17",
    "rec_ts17_half",
    "full_decode_ts17",
]


@pytest.mark.parametrize("name", CASES)
def test_a_fused_export_runs_at_the_precision_of_the_kernels(fused, tmp_path, name):
    output = tmp_path / "runnable.onnx"
    report = lower(fused(name), output)
    model = onnx.load(output)
    onnx.checker.check_model(model, full_check=True)
    assert (report.exit, report.rounding, report.output) == (0, True, str(output))
    assert len(model.graph.node) == report.nodes_after
    assert len(boundary_casts(model)) > 0
    for got, want in zip(run(output, export(name).inputs), export(name).expected, strict=True):
        assert_close(got, want, "float16")


@pytest.mark.parametrize("name", CASES)
def test_without_rounding_a_fused_export_is_what_it_was_before(fused, tmp_path, name):
    output = tmp_path / "exact.onnx"
    report = lower(fused(name), output, rounding=False)
    model = onnx.load(output)
    onnx.checker.check_model(model, full_check=True)
    assert (report.exit, report.rounding) == (0, False)
    assert len(model.graph.node) == report.nodes_after
    assert boundary_casts(model) == []
    for got, want in zip(run(output, export(name).inputs), export(name).expected, strict=True):
        assert_close(got, want, "float32")


def test_all_else_stays_byte_for_byte(fused, tmp_path):
    source, output = fused("full_decode_ts17"), tmp_path / "runnable.onnx"
    report = lower(source, output)
    before, after = onnx.load(source), onnx.load(output)
    kept = [node.SerializeToString() for node in before.graph.node if node.op_type != "Custom"]
    new = {node.SerializeToString() for node in after.graph.node} - set(kept)
    assert [n for n in (node.SerializeToString() for node in after.graph.node) if n not in new] == kept
    assert len(kept) == report.nodes_before - 3
    for field in ("initializer", "input", "output", "value_info"):
        assert list(getattr(before.graph, field)) == list(getattr(after.graph, field))
    # The record undoes a fuse of the file that was lowered, not of this one.
    metadata = {entry.key: entry.value for entry in before.metadata_props}
    assert metadata.pop(KEY)
    assert {entry.key: entry.value for entry in after.metadata_props} == metadata | {"deltafuse.lowered": "fuse lower"}
    assert list(before.opset_import) == list(after.opset_import)


def test_the_report_names_each_node(fused, tmp_path):
    report = lower(fused("full_decode_ts17"), tmp_path / "runnable.onnx")
    assert [(one.site, one.op) for one in report.lowered] == [(f"layers.{i}", RECURRENT) for i in range(3)]
    assert report.lowered[0].name == "layers.0/gated_delta_rule/RecurrentGatedDeltaRule"
    assert report.notes == ()


def test_external_data_stays_in_its_folder_and_is_copied_to_another(fused, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    model = onnx.load(fused("full_decode_ts17"))
    onnx.save(model, here / "fused.onnx", save_as_external_data=True, location="weights.bin", size_threshold=64)
    lower(here / "fused.onnx", here / "runnable.onnx")
    lower(here / "fused.onnx", there / "runnable.onnx")
    assert sorted(path.name for path in here.iterdir()) == ["fused.onnx", "runnable.onnx", "weights.bin"]
    assert (there / "weights.bin").read_bytes() == (here / "weights.bin").read_bytes()
    assert (there / "weights.bin").stat().st_nlink == 1
    case = export("full_decode_ts17")
    for got, want in zip(run(there / "runnable.onnx", case.inputs), case.expected, strict=True):
        assert_close(got, want, "float16")


# The node as an exporter's symbolic code writes it, against the forward beside it


def rule(query, key, value, beta, store, lengths, g, gk, slots, accepted, scale):
    """The kernels' documentation in torch: float32 inside, one sequence and one token at a time."""
    query, key, value, beta, store = (x.float() for x in (query, key, value, beta, store))
    group = value.shape[1] // query.shape[1]
    query, key = query.repeat_interleave(group, 1), key.repeat_interleave(group, 1)
    out, store, start = torch.zeros_like(value), store.clone(), 0
    for b, length in enumerate(lengths.tolist()):
        first = b if slots is None else int(slots[start + int(accepted[b]) - 1])
        state = store[first].clone()
        for t in range(start, start + length):
            if g is not None:
                state = state * g[t, :, None, None].exp()
            if gk is not None:
                state = state * gk[t, :, None, :].exp()
            delta = beta[t, :, None] * (value[t] - torch.einsum("hvk,hk->hv", state, key[t]))
            state = state + torch.einsum("hv,hk->hvk", delta, key[t])
            out[t] = scale * torch.einsum("hvk,hk->hv", state, query[t])
            if slots is not None:
                store[int(slots[t])] = state
        if slots is None:
            store[b] = state
        start += length
    return out, store


CHUNK_PORTS = ["query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "g"]
RECURRENT_PORTS = [
    "query", "key", "value", "beta", "state", "actual_seq_lengths", "ssm_state_indices", "g", "gk",
    "num_accepted_tokens",
]  # fmt: skip
SCALE = 0.3


class ChunkRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, beta, state, lengths, g):
        found = rule(query, key, value, beta, state, lengths, g, None, None, None, SCALE)
        return tuple(x.to(query.dtype) for x in found)

    @staticmethod
    def symbolic(graph, *operands):
        found = graph.op(
            "Custom", *operands, outputs=2, type_s=CHUNK, input_names_s=CHUNK_PORTS, input_index_i=list(range(7)),
            optional_input_names_s=["g"], output_names_s=["out", "final_state"], output_num_i=2, scale_value_f=SCALE,
            dtype_i=10,
        )  # fmt: skip
        return tuple(x.setType(operand.type()) for x, operand in zip(found, (operands[2], operands[4]), strict=True))


class RecurrentRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, beta, state, lengths, slots, g, gk, accepted):
        found = rule(query, key, value, beta, state, lengths, g, gk, slots, accepted, SCALE)
        return tuple(x.to(query.dtype) for x in found)

    @staticmethod
    def symbolic(graph, *operands):
        found = graph.op(
            "Custom", *operands, outputs=2, type_s=RECURRENT, input_names_s=RECURRENT_PORTS,
            input_index_i=list(range(10)), optional_input_names_s=["g", "gk", "num_accepted_tokens"],
            output_names_s=["out", "state"], output_num_i=2, scale_value_f=SCALE, dtype_i=10, output_types_i=[42, 42],
        )  # fmt: skip
        return tuple(x.setType(operand.type()) for x, operand in zip(found, (operands[2], operands[4]), strict=True))


class Layer(torch.nn.Module):
    """The node with its boundary: float16 in and out, a state that is value-major inside."""

    def __init__(self, function, half=True):
        super().__init__()
        self.function = function
        self.half = half

    def narrow(self, x):
        return x.half() if self.half else x

    def forward(self, query, key, value, beta, state, lengths, *others):
        operands = [self.narrow(x) for x in (query, key, value, beta)]
        state = self.narrow(state).transpose(-1, -2)
        out, last = self.function.apply(*operands, state, lengths, *others)
        return out.float(), last.transpose(-1, -2).float()


def draw(lengths, slots, heads, sizes, seed=0, *, recurrent):
    """Operands for sequences of these lengths; the state is [slots, Nv, Dk, Dv]."""
    torch.manual_seed(seed)
    (key_heads, value_heads), (key_dim, value_dim), tokens = heads, sizes, sum(lengths)
    found = {
        "query": torch.randn(tokens, key_heads, key_dim),
        "key": torch.nn.functional.normalize(torch.randn(tokens, key_heads, key_dim), dim=-1),
        "value": torch.randn(tokens, value_heads, value_dim),
        "beta": torch.rand(tokens, value_heads),
        "state": torch.randn(slots, value_heads, key_dim, value_dim),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }
    g = -torch.rand(tokens, value_heads)
    if not recurrent:
        return found | {"g": g}
    index = torch.randperm(slots)[:tokens].to(torch.int32)
    accepted = torch.tensor([1 + i % max(length, 1) for i, length in enumerate(lengths)], dtype=torch.int32)
    gk = -torch.rand(tokens, value_heads, key_dim)
    return found | {"slots": index, "g": g, "gk": gk, "accepted": accepted}


FREE = {name: {0: f"{name}_0", 1: f"{name}_1"} for name in ("query", "key", "value", "beta", "g", "gk")} | {
    "state": {0: "slots", 1: "value_heads"}, "lengths": {0: "batch"}, "slots": {0: "tokens"}, "accepted": {0: "batch"},
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the TorchScript exporter writes of each kernel, every size free but those of the heads' vectors."""
    folder, paths = tmp_path_factory.mktemp("written"), {}
    for function, recurrent in ((ChunkRule, False), (RecurrentRule, True)):
        operands = draw([3, 2], 6, (2, 4), (16, 24), recurrent=recurrent)
        paths[recurrent] = folder / f"{function.__name__}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Layer(function), tuple(operands.values()), str(paths[recurrent]), dynamo=False, opset_version=17,
                input_names=list(operands), output_names=["out", "last"],
                dynamic_axes={name: axes for name, axes in FREE.items() if name in operands},
            )  # fmt: skip
    return paths


SHAPES = [
    ([5], 9, (1, 1)), ([3, 4], 9, (2, 4)), ([1, 5, 2], 8, (2, 6)), ([2, 0, 3], 7, (3, 3)), ([1, 1], 2, (2, 8)),
]  # fmt: skip


@pytest.mark.parametrize("recurrent", [False, True], ids=["chunk", "recurrent"])
@pytest.mark.parametrize(("lengths", "slots", "heads"), SHAPES)
@pytest.mark.parametrize("rounding", [True, False], ids=["rounded", "exact"])
def test_an_exported_node_equals_the_forward_beside_it(written, tmp_path, recurrent, lengths, slots, heads, rounding):
    slots = slots if recurrent else len(lengths)
    operands = draw(lengths, slots, heads, (16, 24), seed=len(lengths), recurrent=recurrent)
    output = tmp_path / "lowered.onnx"
    report = lower(written[recurrent], output, rounding=rounding)
    assert [one.op for one in report.lowered] == [RECURRENT if recurrent else CHUNK]
    found = run(output, {name: tensor.numpy() for name, tensor in operands.items()})
    function = RecurrentRule if recurrent else ChunkRule
    for got, want in zip(found, Layer(function, half=rounding)(*operands.values()), strict=True):
        # Both round operands and results alike and compute in float32: a result may fall to the next float16.
        assert np.abs(got - want.numpy()).max() <= np.abs(want.numpy()).max() * (2.0**-10 if rounding else 2e-6)
        assert (got.shape, got.dtype) == (tuple(want.shape), np.float32)
    assert np.abs(found[0]).max() > 0.01


def recurrence(feeds, scale, batch_slots):
    """The rule in numpy and double for sequences of one length, all of them at once: [B, T, heads, size]."""
    query, key, value, beta, g = (feeds[name].astype(np.float64) for name in ("query", "key", "value", "beta", "g"))
    batch, heads = len(feeds["lengths"]), value.shape[1]
    query, key = (np.repeat(x, heads // x.shape[1], axis=1) for x in (query, key))
    query, key, value, beta, g = (x.reshape(batch, -1, *x.shape[1:]) for x in (query, key, value, beta, g))
    state = feeds["state"].astype(np.float64)[batch_slots]
    out = np.zeros_like(value)
    for t in range(value.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None]
        delta = beta[:, t, :, None] * (value[:, t] - np.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state = state + np.einsum("bhk,bhv->bhkv", key[:, t], delta)
        out[:, t] = scale * np.einsum("bhkv,bhk->bhv", state, query[:, t])
    return out.reshape(-1, *out.shape[2:]), state


def test_two_sequences_equal_the_recurrence(written, tmp_path):
    feeds = {name: x.numpy() for name, x in draw([4, 4], 2, (2, 4), (16, 24), recurrent=False).items()}
    lower(written[False], tmp_path / "lowered.onnx", rounding=False)
    for got, want in zip(run(tmp_path / "lowered.onnx", feeds), recurrence(feeds, SCALE, [0, 1]), strict=True):
        assert_close(got, want.astype(np.float32), "float32")


def test_slots_are_read_where_accepted_tokens_say_and_written_each_token(written, tmp_path):
    feeds = {name: x.numpy() for name, x in draw([3, 3], 7, (2, 4), (16, 24), recurrent=True).items()}
    feeds |= {"gk": np.zeros_like(feeds["gk"]), "slots": np.array([6, 4, 1, 0, 2, 5], np.int32)}
    feeds["accepted"] = np.array([2, 1], np.int32)
    lower(written[True], tmp_path / "lowered.onnx", rounding=False)
    out, store = run(tmp_path / "lowered.onnx", feeds)
    want, last = recurrence(feeds, SCALE, [4, 0])
    assert_close(out, want.astype(np.float32), "float32")
    assert_close(store[[1, 5]], last.astype(np.float32), "float32")
    np.testing.assert_array_equal(store[3], feeds["state"][3])


# The boundary, where rounding is left out


def site(text, name="s"):
    """A graph in ONNX text; nodes whose first output begins with ``ours`` are marked as what a fuse wrote."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}')
    for node in model.graph.node:
        if node.output[0].startswith("ours"):
            node.metadata_props.add(key="deltafuse.site", value=name)
        if node.op_type == "Custom":
            node.name = "ours/rule"
            ports = ["query", "key", "value", "beta", "initial_state", "actual_seq_lengths"]
            for key, value in {"type": CHUNK, "input_names": ports, "input_index": list(range(6))}.items():
                node.attribute.append(helper.make_attribute(key, value))
    return model


def saved(model, folder):
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


GRAPH = """g (float[T, 2, 4] q, float[T, 2, 4] k, float[2, T, 4] v, float[T, 2] b, float16[1, 2, 4, 4] s, int32[1] n)
    => ({outputs}) {{
    source_half = Cast <to = 10> (q)
    source_single = Cast <to = 1> (source_half)
    source_b = Cast <to = 10> (b)
    ours_q = Cast <to = 10> (source_single)
    ours_k = Cast <to = 10> (k)
    ours_v_half = Cast <to = 10> (v)
    ours_v = Transpose <perm = [1, 0, 2]> (ours_v_half)
    ours_out, ours_last = Custom (ours_q, ours_k, ours_v, source_b, s, n)
    ours_moved = Transpose <perm = [1, 0, 2]> (ours_out)
    {tail}
}}"""
OPERANDS = {
    "q": (3, 2, 4), "k": (3, 2, 4), "v": (2, 3, 4), "b": (3, 2), "s": (1, 2, 4, 4),
}  # fmt: skip


def feeds_of_graph():
    rng = np.random.default_rng(3)
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in OPERANDS.items()}
    return feeds | {"s": feeds["s"].astype(np.float16), "n": np.array([3], np.int32)}


def by_hand(feeds, beta_type=np.float16):
    """What the graph computes without the boundary; the source's own rounding of q and beta counts."""
    query = feeds["q"].astype(np.float16).astype(np.float64)
    key, beta = feeds["k"].astype(np.float64), feeds["b"].astype(beta_type).astype(np.float64)
    value, state = feeds["v"].transpose(1, 0, 2).astype(np.float64), feeds["s"][0].astype(np.float64)
    out = np.zeros_like(value)
    for t in range(3):
        delta = beta[t][:, None] * (value[t] - np.einsum("hvk,hk->hv", state, key[t]))
        state = state + np.einsum("hv,hk->hvk", delta, key[t])
        out[t] = np.einsum("hvk,hk->hv", state, query[t])
    return out.transpose(1, 0, 2), state[None]


def ops(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def test_the_casts_of_the_fuse_are_passed_and_those_of_the_source_are_not(tmp_path):
    tail = "ours_o = Cast <to = 1> (ours_moved)\n ours_l = Cast <to = 11> (ours_last)"
    path = saved(site(GRAPH.format(outputs="float[2, T, 4] ours_o, double[1, 2, 4, 4] ours_l", tail=tail)), tmp_path)
    lower(path, tmp_path / "exact.onnx", rounding=False)
    model = onnx.load(tmp_path / "exact.onnx")
    onnx.checker.check_model(model)
    halves = [n.output[0] for n in model.graph.node if n.op_type == "Cast" and n.attribute[0].i == HALF]
    assert halves == ["source_half", "source_b"]
    feeds = feeds_of_graph()
    out, last = run(tmp_path / "exact.onnx", feeds)
    want_out, want_last = by_hand(feeds)
    assert_close(out, want_out.astype(np.float32), "float32")
    np.testing.assert_allclose(last, want_last, rtol=1e-5, atol=1e-6)
    assert last.dtype == np.float64


def test_around_a_node_that_no_fuse_wrote_every_such_cast_is_passed(tmp_path):
    tail = "ours_o = Cast <to = 1> (ours_moved)"
    model = site(GRAPH.format(outputs="float[2, T, 4] ours_o, float16[1, 2, 4, 4] ours_last", tail=tail))
    for node in model.graph.node:
        del node.metadata_props[:]
    lower(saved(model, tmp_path), tmp_path / "exact.onnx", rounding=False)
    # The query's own rounding is two Casts away and stays; the state that the file gives in float16 stays so.
    halves = [
        n for n in onnx.load(tmp_path / "exact.onnx").graph.node if n.op_type == "Cast" and n.attribute[0].i == HALF
    ]
    assert [node.output[0] for node in halves] == ["source_half", "ours_last"]
    feeds = feeds_of_graph()
    out, last = run(tmp_path / "exact.onnx", feeds)
    assert_close(out, by_hand(feeds, np.float32)[0].astype(np.float32), "float32")
    assert last.dtype == np.float16


def test_who_reads_a_rounded_result_still_does(tmp_path):
    tail = "ours_o = Cast <to = 1> (ours_moved)\n half = Identity (ours_moved)\n other = Neg (ours_out)"
    outputs = "float[2, T, 4] ours_o, float16[2, T, 4] half, float16[T, 2, 4] other, float16[1, 2, 4, 4] ours_last"
    path = saved(site(GRAPH.format(outputs=outputs, tail=tail)), tmp_path)
    lower(path, tmp_path / "exact.onnx", rounding=False)
    onnx.checker.check_model(onnx.load(tmp_path / "exact.onnx"))
    feeds = feeds_of_graph()
    out, half, other, last = run(tmp_path / "exact.onnx", feeds)
    assert_close(out, by_hand(feeds)[0].astype(np.float32), "float32")
    np.testing.assert_array_equal(half, out.astype(np.float16))
    np.testing.assert_array_equal(other, -half.transpose(1, 0, 2))
    assert last.dtype == np.float16


def test_a_rounded_operand_that_another_node_reads_stays(tmp_path):
    tail = "ours_o = Cast <to = 1> (ours_moved)\n other = Neg (ours_k)"
    outputs = "float[2, T, 4] ours_o, float16[T, 2, 4] other, float16[1, 2, 4, 4] ours_last"
    path = saved(site(GRAPH.format(outputs=outputs, tail=tail)), tmp_path)
    lower(path, tmp_path / "exact.onnx", rounding=False)
    feeds = feeds_of_graph()
    out, other, _ = run(tmp_path / "exact.onnx", feeds)
    assert_close(out, by_hand(feeds)[0].astype(np.float32), "float32")
    np.testing.assert_array_equal(other, -feeds["k"].astype(np.float16))


def test_nodes_of_one_name_get_names_of_their_own(tmp_path):
    model = site(GRAPH.format(outputs="float16[2, T, 4] ours_moved, float16[1, 2, 4, 4] again_last", tail=""))
    again = onnx.NodeProto()
    again.CopyFrom(next(node for node in model.graph.node if node.op_type == "Custom"))
    again.output[:] = ["again_out", "again_last"]
    model.graph.node.append(again)
    report = lower(saved(model, tmp_path), tmp_path / "lowered.onnx")
    assert [one.name for one in report.lowered] == ["ours_out", "again_out"]
    onnx.checker.check_model(onnx.load(tmp_path / "lowered.onnx"))
    half = run(tmp_path / "lowered.onnx", feeds_of_graph())
    assert np.isfinite(half[0]).all()


def test_a_bfloat16_boundary_rounds_to_bfloat16(tmp_path):
    tail = "ours_o = Cast <to = 1> (ours_moved)"
    model = site(GRAPH.format(outputs="float[2, T, 4] ours_o", tail=tail).replace("to = 10> (k", "to = 16> (k"))
    custom = next(node for node in model.graph.node if node.op_type == "Custom")
    custom.attribute.append(helper.make_attribute("dtype", TensorProto.BFLOAT16))
    path = saved(model, tmp_path)
    lower(path, tmp_path / "lowered.onnx")
    rounded = [n for n in onnx.load(tmp_path / "lowered.onnx").graph.node if n.output[0] in ("ours_out", "ours_last")]
    assert [node.attribute[0].i for node in rounded] == [TensorProto.BFLOAT16] * 2
    feeds = feeds_of_graph()
    (coarse,) = run(tmp_path / "lowered.onnx", feeds)
    want = by_hand(feeds)[0]
    error = np.abs(coarse - want).max() / np.abs(want).max()
    assert 2.0**-11 < error < 2.0**-6


# LinearAttention


def attention(feeds, query_heads, states, update_rule, scale):
    """The operator's documentation in numpy and double, one head and one token at a time."""
    q, k, v = (feeds[name].astype(np.float64) for name in "qkv")
    batch, tokens, key_dim = *q.shape[:2], q.shape[2] // query_heads
    q, k, v = (x.reshape(batch, tokens, n, -1) for x, n in ((q, query_heads), (k, k.shape[2] // key_dim), (v, states)))
    state = feeds["s"].astype(np.float64) if "s" in feeds else np.zeros((batch, states, key_dim, v.shape[3]))
    heads = max(query_heads, states)
    out = np.zeros((batch, tokens, heads, v.shape[3]))
    for b, t in np.ndindex(batch, tokens):
        for h in range(states):
            if "gated" in update_rule:
                state[b, h] *= np.exp(feeds["g"].reshape(batch, tokens, states, -1)[b, t, h])[:, None]
            key, delta = k[b, t, h // (states // k.shape[2])], v[b, t, h]
            if "delta" in update_rule:
                beta = feeds["b"][b, t, h if feeds["b"].shape[2] > 1 else 0]
                delta = beta * (delta - state[b, h].T @ key)
            state[b, h] += np.outer(key, delta)
        for h in range(heads):
            read = state[b, h // (heads // states)]
            out[b, t, h] = (scale or key_dim**-0.5) * read.T @ q[b, t, h // (heads // query_heads)]
    return out.reshape(batch, tokens, -1), state


def attention_case(
    query_heads, key_heads, states, update_rule="gated_delta", without="", channel=False, one_beta=False
):
    rng = np.random.default_rng(5)
    batch, tokens, key_dim, value_dim = 2, 5, 8, 12
    key = rng.normal(size=(batch, tokens, key_heads, key_dim))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    feeds = {
        "q": rng.normal(size=(batch, tokens, query_heads * key_dim)),
        "k": key.reshape(batch, tokens, -1),
        "v": rng.normal(size=(batch, tokens, states * value_dim)),
        "s": rng.normal(size=(batch, states, key_dim, value_dim)),
        "g": -rng.uniform(0, 1, size=(batch, tokens, states * (key_dim if channel else 1))),
        "b": rng.uniform(0, 1, size=(batch, tokens, 1 if one_beta else states)),
    }
    unread = {"linear": "gb", "gated": "b", "delta": "g", "gated_delta": ""}[update_rule] + without
    return {name: value for name, value in feeds.items() if name not in unread}


def attention_model(feeds, domain, dtype, **attributes):
    names = [name if name in feeds else "" for name in "qkvsgb"]
    node = helper.make_node("LinearAttention", names, ["out", "last"], name="attention", domain=domain, **attributes)
    inputs = [helper.make_tensor_value_info(name, dtype, [None] * feeds[name].ndim) for name in feeds]
    outputs = [helper.make_tensor_value_info(name, dtype, [None] * rank) for name, rank in (("out", 3), ("last", 4))]
    opsets = [helper.make_opsetid("", 17 if domain else 27), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=8)


ATTENTION = [
    ("", {"query_heads": 4, "key_heads": 4, "states": 4}, 0.0),
    ("", {"query_heads": 4, "key_heads": 2, "states": 2, "channel": True, "without": "s"}, 0.5),
    ("", {"query_heads": 4, "key_heads": 4, "states": 4, "update_rule": "gated"}, 0.0),
    ("", {"query_heads": 3, "key_heads": 1, "states": 1, "update_rule": "linear"}, 0.0),
    ("com.microsoft", {"query_heads": 2, "key_heads": 2, "states": 6}, 0.0),
    ("com.microsoft", {"query_heads": 4, "key_heads": 2, "states": 4, "one_beta": True}, 1.0),
    ("com.microsoft", {"query_heads": 2, "key_heads": 2, "states": 4, "update_rule": "delta", "without": "s"}, 0.0),
]


@pytest.mark.parametrize(("domain", "case", "scale"), ATTENTION)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["single", "half"])
def test_linear_attention_equals_its_documentation(tmp_path, domain, case, scale, dtype):
    feeds = {name: value.astype(dtype) for name, value in attention_case(**case).items()}
    heads = {"q_num_heads": case["query_heads"], "kv_num_heads": case["states"]}
    update_rule = case.get("update_rule", "gated_delta")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    path = saved(attention_model(feeds, domain, kind, update_rule=update_rule, scale=scale, **heads), tmp_path)
    report = lower(path, tmp_path / "lowered.onnx", linear_attention="always")
    assert [(one.name, one.op) for one in report.lowered] == [("attention", "LinearAttention")]
    model = onnx.load(tmp_path / "lowered.onnx")
    onnx.checker.check_model(model)
    assert "LinearAttention" not in ops(tmp_path / "lowered.onnx")
    want = attention(feeds, case["query_heads"], case["states"], update_rule, scale)
    for got, expected in zip(run(tmp_path / "lowered.onnx", feeds), want, strict=True):
        assert (got.shape, got.dtype) == (expected.shape, dtype)
        limit = 2e-6 if dtype is np.float32 else 2.0**-10
        assert np.abs(got - expected).max() <= np.abs(expected).max() * limit


def test_without_rounding_the_gate_of_linear_attention_is_not_rounded(tmp_path):
    model = site("""g (float16[B, T, 8] q, float16[B, T, 8] k, float16[B, T, 8] v, float[B, 1, 8, 8] s,
    float[B, T, 1] g, float16[B, T, 1] b) => (float16[B, T, 8] out, float[B, 1, 8, 8] ours_last) {
        ours_g = Cast <to = 10> (g)
        ours_out, ours_last = com.microsoft.LinearAttention <q_num_heads = 1, kv_num_heads = 1> (q, k, v, s, ours_g, b)
        out = Identity (ours_out)
    }""")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path = saved(model, tmp_path)
    rng = np.random.default_rng(1)
    key = rng.normal(size=(2, 40, 8))
    feeds = {
        "q": rng.normal(size=(2, 40, 8)), "k": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "v": rng.normal(size=(2, 40, 8)), "b": rng.uniform(size=(2, 40, 1)),
    }  # fmt: skip
    feeds = {name: value.astype(np.float16) for name, value in feeds.items()}
    feeds |= {"s": rng.normal(size=(2, 1, 8, 8)).astype(np.float32)}
    feeds |= {"g": -rng.uniform(0, 0.05, size=(2, 40, 1)).astype(np.float32)}
    want = attention(feeds, 1, 1, "gated_delta", 0.0)
    errors = []
    for rounding in (True, False):
        lower(path, tmp_path / "lowered.onnx", rounding=rounding, linear_attention="always")
        found = run(tmp_path / "lowered.onnx", feeds)
        assert [x.dtype for x in found] == [np.float16, np.float32]
        errors.append(np.abs(found[1] - want[1]).max())
        assert np.abs(found[0] - want[0]).max() <= np.abs(want[0]).max() * 2.0**-10
    assert errors[0] > 1e-5
    assert errors[1] < 2e-6


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize(("mode", "has", "lowered"), [("auto", True, 0), ("auto", False, 1), ("never", False, 0)])
def test_linear_attention_is_lowered_where_the_runtime_lacks_it(monkeypatch, tmp_path, domain, mode, has, lowered):
    import importlib

    monkeypatch.setattr(importlib.import_module("deltafuse.lower"), "runtime_has", lambda *_: has)
    feeds = attention_case(2, 2, 2)
    path = saved(attention_model(feeds, domain, FLOAT, q_num_heads=2, kv_num_heads=2), tmp_path)
    report = lower(path, tmp_path / "lowered.onnx", linear_attention=mode)
    assert (len(report.lowered), report.exit) == (lowered, 0 if lowered else 3)
    assert any("imports opset 23 in place of 27" in note for note in report.notes) == (lowered == 1 and domain == "")


def test_the_opset_of_linear_attention_goes_with_it(tmp_path):
    feeds = {name: value.astype(np.float32) for name, value in attention_case(2, 2, 2).items()}
    model = attention_model(feeds, "", FLOAT, q_num_heads=2, kv_num_heads=2)
    lower(saved(model, tmp_path), tmp_path / "lowered.onnx", linear_attention="always")
    lowered = onnx.load(tmp_path / "lowered.onnx")
    assert [(entry.domain, entry.version) for entry in lowered.opset_import] == [("", 23)]
    onnx.checker.check_model(lowered, full_check=True)
    assert np.isfinite(run(tmp_path / "lowered.onnx", feeds)[0]).all()


def with_convolution(model, domain):
    # Over the five tokens of the key, as five channels.
    model.graph.node.append(helper.make_node("CausalConvWithState", ["k", "w"], ["y", "carry"], "conv", domain=domain))
    weight = np.random.default_rng(0).normal(size=(5, 1, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.output.extend(helper.make_tensor_value_info(name, FLOAT, None) for name in ("y", "carry"))
    return model


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("rounding", [True, False])
def test_a_causal_convolution_is_lowered_beside_it(tmp_path, domain, rounding):
    feeds = {name: value.astype(np.float32) for name, value in attention_case(2, 2, 2).items()}
    model = with_convolution(attention_model(feeds, domain, FLOAT, q_num_heads=2, kv_num_heads=2), domain)
    path = saved(model, tmp_path)
    report = lower(path, tmp_path / "lowered.onnx", linear_attention="always", rounding=rounding)
    assert [(found.name, found.op) for found in report.lowered] == [
        ("attention", "LinearAttention"),
        ("conv", "CausalConvWithState"),
    ]
    lowered = onnx.load(tmp_path / "lowered.onnx")
    assert {node.op_type for node in lowered.graph.node}.isdisjoint({"LinearAttention", "CausalConvWithState"})
    assert next(entry.version for entry in lowered.opset_import if not entry.domain) == (17 if domain else 23)
    for found, wanted in zip(run(tmp_path / "lowered.onnx", feeds)[2:], run(path, feeds)[2:], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_causal_convolution_stays_where_onnxruntime_has_it(tmp_path):
    feeds = {name: value.astype(np.float32) for name, value in attention_case(2, 2, 2).items()}
    model = with_convolution(attention_model(feeds, "com.microsoft", FLOAT, q_num_heads=2, kv_num_heads=2), "")
    model.graph.node[1].domain = "com.microsoft"
    assert lower(saved(model, tmp_path), tmp_path / "lowered.onnx").exit == 3
    model.graph.node[1].domain = "my.domain"
    assert lower(saved(model, tmp_path), tmp_path / "lowered.onnx", linear_attention="always").exit == 0
    assert "CausalConvWithState" in {node.op_type for node in onnx.load(tmp_path / "lowered.onnx").graph.node}


@pytest.mark.parametrize("op", ["Attention", "CumProd"])
def test_the_opset_stays_where_another_node_needs_it(tmp_path, op):
    model = attention_model(attention_case(2, 2, 2), "", FLOAT, q_num_heads=2, kv_num_heads=2)
    # One whose causal mask changed with opset 24, and one that came with 26.
    node = helper.make_node(
        "Attention", ["k", "k", "k", "", "past"], ["more"], is_causal=1, q_num_heads=1, kv_num_heads=1
    )
    other = helper.make_node("CumProd", ["k", "axis"], ["more"])
    model.graph.node.append(node if op == "Attention" else other)
    report = lower(saved(model, tmp_path), tmp_path / "lowered.onnx", linear_attention="always")
    assert [entry.version for entry in onnx.load(tmp_path / "lowered.onnx").opset_import] == [27]
    assert any("still needs opset 27" in note for note in report.notes)


def test_what_the_runtime_has_is_what_it_runs(tmp_path):
    feeds = {name: value.astype(np.float32) for name, value in attention_case(2, 2, 2).items()}
    for domain in ("", "com.microsoft"):
        path = saved(attention_model(feeds, domain, FLOAT, q_num_heads=2, kv_num_heads=2), tmp_path)
        try:
            runs = len(run(path, feeds)) == 2
        except Exception:  # onnxruntime's errors have no common base but this
            runs = False
        assert runtime_has(domain) == runs
    assert not runtime_has("no.such.domain")


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        ({"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "kimi"}, "update_rule 'kimi'"),
        ({"q_num_heads": 2}, "must be given"),
        ({"q_num_heads": 3, "kv_num_heads": 2}, "cannot be shared in groups"),
        ({"q_num_heads": 2, "kv_num_heads": 2, "state_window": 2}, "its state_window is 2"),
    ],
)
def test_a_malformed_attention_node_is_a_user_error(tmp_path, attributes, fault):
    path = saved(attention_model(attention_case(2, 2, 2), "com.microsoft", FLOAT, **attributes), tmp_path)
    with pytest.raises(UserError, match=fault) as caught:
        lower(path, tmp_path / "lowered.onnx", linear_attention="always")
    assert caught.value.code == "attention-malformed"


def test_an_attention_node_without_its_gate_is_a_user_error(tmp_path):
    path = saved(
        attention_model(attention_case(2, 2, 2, without="g"), "", FLOAT, q_num_heads=2, kv_num_heads=2), tmp_path
    )
    with pytest.raises(UserError, match="no input for decay"):
        lower(path, tmp_path / "lowered.onnx", linear_attention="always")


def test_an_attention_node_of_unknown_type_is_a_user_error(tmp_path):
    model = attention_model(attention_case(2, 2, 2), "com.microsoft", FLOAT, q_num_heads=2, kv_num_heads=2)
    model.graph.node.insert(0, helper.make_node("Mystery", ["x"], ["q"], domain="elsewhere"))
    model.graph.node[1].output[0] = "inner"
    model.graph.node.append(helper.make_node("Identity", ["inner"], ["out"]))
    model.graph.input[0].name = "x"
    with pytest.raises(UserError, match="shape inference") as caught:
        lower(saved(model, tmp_path), tmp_path / "lowered.onnx", linear_attention="always")
    assert caught.value.code == "dtype-unknown"


# Nothing to do, and errors


def test_nothing_to_lower_is_exit_3_and_nothing_is_written(fuse, tmp_path):
    output = tmp_path / "out.onnx"
    done = fuse("lower", export("rec_ts14").path, "-o", output)
    assert (done.exit, done.err) == (3, "")
    assert "nothing to lower" in done.out
    assert done.out.splitlines()[-1] == "nothing written"
    document = fuse("lower", export("rec_ts14").path, "-o", output, "--json").document
    assert (document["exit"], document["output"], document["lowered"]) == (3, None, [])
    assert not output.exists()


def test_the_command_writes_and_reports(fuse, fused, tmp_path):
    output = tmp_path / "out.onnx"
    done = fuse("lower", fused("steps_ts17"), "-o", output)
    assert (done.exit, done.err) == (0, "")
    assert done.out.splitlines()[0] == "site.0/gated_delta_rule/RecurrentGatedDeltaRule: RecurrentGatedDeltaRule"
    assert done.out.splitlines()[-1].startswith("1 lowered; ")
    rounded = output.read_bytes()
    for option in (("--exact",), ("--rounding", "off")):
        document = fuse("lower", fused("steps_ts17"), "-o", output, *option, "--json").document
        assert (document["exit"], document["error"], document["rounding"]) == (0, None, False)
        assert document["lowered"][0]["op"] == RECURRENT
        assert output.read_bytes() != rounded


@pytest.mark.parametrize("target", ["ascend-310p", "ort"])
def test_a_lowered_file_is_known_and_its_nodes_are_no_near_misses(fuse, fused, tmp_path, target):
    output = tmp_path / "out.onnx"
    assert lower(fused("full_decode_ts17"), output).exit == 0
    document = fuse("inspect", output, "--target", target, "--json").document
    assert {site["status"] for site in document["sites"]} <= {"match"}
    assert document["notes"][0].startswith("lowered: the file was written by fuse lower; take the fused file or")
    assert document["exit"] == (3 if target == "ascend-310p" else 0)


def test_what_was_a_near_miss_before_stays_one_in_a_lowered_file(fuse, tmp_path):
    model = graphs.step(("delta = Mul(missing, b1)", "early = Mul(missing, b1) delta = Tanh(early)"))
    model.metadata_props.add(key="deltafuse.lowered", value="fuse lower")
    document = fuse("inspect", graphs.save(model, tmp_path), "--json").document
    assert [site["reason"]["code"] for site in document["sites"]] == ["activation-inside"]
    assert document["notes"][0].startswith("lowered: ")


def test_the_output_may_not_be_the_input(fuse, fused):
    path = fused("steps_ts17")
    before = path.read_bytes()
    done = fuse("lower", path, "-o", path, "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "output-is-input")
    assert path.read_bytes() == before


def test_a_malformed_node_is_exit_1(fuse, fused, tmp_path):
    model = onnx.load(fused("steps_ts17"))
    custom = next(node for node in model.graph.node if node.op_type == "Custom")
    del custom.input[-1]
    for option in ((), ("--exact",)):
        done = fuse("lower", saved(model, tmp_path), "-o", tmp_path / "out.onnx", "--json", *option)
        assert (done.exit, done.document["error"]["code"]) == (1, "custom-malformed")
    assert not (tmp_path / "out.onnx").exists()


def test_an_old_opset_is_exit_1(fuse, tmp_path):
    model = site(GRAPH.format(outputs="float16[2, T, 4] ours_moved", tail=""))
    model.opset_import[0].version = 12
    done = fuse("lower", saved(model, tmp_path), "-o", tmp_path / "out.onnx", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "opset-too-old")


def test_foreign_custom_nodes_are_left_and_named(tmp_path):
    model = site(GRAPH.format(outputs="float16[2, T, 4] ours_moved", tail=""))
    node = helper.make_node("Custom", ["k"], ["kept"], name="cache", type="Scatter")
    model.graph.node.append(node)
    report = lower(saved(model, tmp_path), tmp_path / "lowered.onnx")
    assert report.notes == ("onnxruntime does not know the Custom node cache (Scatter): it is left as it is",)
    assert onnx.load(tmp_path / "lowered.onnx").graph.node[-1] == node


def branching(**names: str) -> onnx.ModelProto:
    """A fused node, and the same in both branches of an If; inner values are renamed as told."""
    inner = site(GRAPH.format(outputs="float16[2, T, 4] ours_moved", tail=""))
    custom = next(node for node in inner.graph.node if node.op_type == "Custom")
    custom.output[:] = [names.get(name, f"in_{name}") for name in custom.output]
    model = site(GRAPH.format(outputs="float16[2, T, 4] ours_moved", tail=""))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    result = helper.make_tensor_value_info(custom.output[0], HALF, None)
    branch = helper.make_graph([custom], "branch", [], [result])
    model.graph.node.append(helper.make_node("If", ["yes"], ["chosen"], then_branch=branch, else_branch=branch))
    model.graph.output.append(helper.make_tensor_value_info("chosen", HALF, None))
    return model


def test_a_fused_node_inside_a_branch_is_lowered_where_it_is(tmp_path):
    report = lower(saved(branching(), tmp_path), tmp_path / "lowered.onnx")
    assert [(node.name, node.op) for node in report.lowered] == [
        ("ours_out", "ChunkGatedDeltaRule"),
        ("chosen/else_branch/in_ours_out", "ChunkGatedDeltaRule"),
        ("chosen/then_branch/in_ours_out", "ChunkGatedDeltaRule"),
    ]
    assert report.notes == ()
    after = onnx.load(tmp_path / "lowered.onnx")
    branch = next(node for node in after.graph.node if node.op_type == "If").attribute[0].g
    assert not {node.op_type for node in (*after.graph.node, *branch.node)} & {"Custom"}
    assert len(branch.node) > 10
    moved, chosen = run(tmp_path / "lowered.onnx", feeds_of_graph())
    assert np.array_equal(moved, chosen.transpose(1, 0, 2))
    assert np.abs(chosen).max() > 0.1


def test_a_fused_node_inside_a_body_without_a_meaning_of_its_own_is_left_and_noted(tmp_path):
    # The branch gives a value twice: once by the node, once by an initializer.
    model = branching()
    for attribute in model.graph.node[-1].attribute:
        attribute.g.initializer.append(numpy_helper.from_array(np.zeros(1, np.float16), attribute.g.node[0].output[0]))
    report = lower(saved(model, tmp_path), tmp_path / "lowered.onnx")
    assert [node.name for node in report.lowered] == ["ours/rule"]
    assert any("in_ours_out' is given more than once" in note for note in report.notes)


def test_the_package_names_the_function(tmp_path):
    path = saved(site(GRAPH.format(outputs="float16[2, T, 4] ours_moved", tail="")), tmp_path)
    assert lower_module(str(path), str(tmp_path / "lowered.onnx")).exit == 0
    assert Path(tmp_path / "lowered.onnx").is_file()
