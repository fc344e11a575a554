"""Custom nodes of other tools: lowered for a run by a file that says how, left alone by everything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from deltafuse import pipeline
from deltafuse.errors import UserError
from deltafuse.foreign import foreign_nodes, load_lowering, shipped, write_lowered
from deltafuse.inputs import InputOptions
from deltafuse.lowerings.fixed_capacity import lower
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.verify import Settings, check
from deltafuse.verify_task import TaskOptions, verify_task
from deltafuse.wire import scan
from exports import export

DECODE, PREFILL = "full_decode_ts17", "full_prefill_ts17"
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def custom(kind, inputs, output, **attributes):
    names = list(inputs)
    return helper.make_node(
        "Custom", list(inputs.values()), [output], f"theirs/{kind}", type=kind, input_names=names,
        output_names=["out"], **attributes,
    )  # fmt: skip


def run(node, feeds):
    """The lowered node alone on onnxruntime."""
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, types[name], array.shape) for name, array in feeds.items()]
    graph = helper.make_graph(lower(node, types), "g", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 14)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


# Scatter.


@pytest.mark.parametrize(("shape", "axis", "count"), [((2, 3, 7, 4), -2, 1), ((2, 3, 7, 4), 2, 3), ((3, 6), 1, 2)])
def test_scatter_writes_updates_from_an_index_on(shape, axis, count):
    rng = np.random.default_rng(0)
    var = rng.standard_normal(shape).astype(np.float16)
    small = list(shape)
    small[axis] = count
    updates = rng.standard_normal(small).astype(np.float16)
    indices = rng.integers(0, shape[axis] - count + 1, shape[0]).astype(np.int32)
    node = custom("Scatter", {"var": "var", "indices": "at", "updates": "new"}, "y", reduce="update", axis=axis)
    found = run(node, {"var": var, "at": indices, "new": updates})
    wanted = var.copy()
    for row, start in enumerate(indices):
        np.moveaxis(wanted[row], axis if axis < 0 else axis - 1, 0)[start : start + count] = np.moveaxis(
            updates[row], axis if axis < 0 else axis - 1, 0
        )
    assert found.dtype == np.float16
    assert np.array_equal(found, wanted)


def test_inputs_are_told_by_their_index():
    node = custom("Scatter", {"var": "var", "indices": "at", "updates": "new"}, "y", reduce="update", axis=1,
                  input_index=[0, 1, 2])  # fmt: skip
    node.input[:] = ["new", "var", "at"]
    node.attribute.remove(next(item for item in node.attribute if item.name == "input_index"))
    node.attribute.append(helper.make_attribute("input_index", [2, 0, 1]))
    feeds = {"var": np.zeros((1, 3), np.float32), "at": np.array([1]), "new": np.ones((1, 1), np.float32)}
    assert run(node, feeds).tolist() == [[0, 1, 0]]


# IncreFlashAttention.


def attention(query, key, value, scale, length=None, mask=None, shift=None):
    """One token against a cache, by hand: [B, N, 1, D] and [B, M, S, D]."""
    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, 1).astype(np.float64), np.repeat(value, group, 1).astype(np.float64)
    scores = scale * query.astype(np.float64) @ np.swapaxes(key, -1, -2)
    scores = scores if shift is None else scores + shift
    hidden = np.zeros(scores.shape, bool)
    if length is not None:
        hidden |= np.arange(scores.shape[-1]) >= np.reshape(length, (-1, 1, 1, 1))
    if mask is not None:
        hidden |= np.reshape(mask, (mask.shape[0], 1, 1, -1)).astype(bool)
    shares = np.exp(np.where(hidden, -np.inf, scores))
    return shares / shares.sum(-1, keepdims=True) @ value


@pytest.mark.parametrize("layout", ["BNSD", "BSH", "BSND"])
@pytest.mark.parametrize("given", [(), ("length",), ("mask",), ("length", "mask", "shift")])
def test_attention_is_that_of_the_documentation(layout, given):
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((2, heads, size, 8)) for heads, size in ((4, 1), (2, 9), (2, 9)))
    extra = {
        "length": ("actual_seq_lengths", np.array([5, 9])),
        "mask": ("atten_mask", rng.integers(0, 2, (2, 1, 1, 9)).astype(bool) & (np.arange(9) > 0)),
        "shift": ("pse_shift", rng.standard_normal((2, 4, 1, 9)).astype(np.float32)),
    }

    def laid(array):
        """From [B, N, S, D] into the layout."""
        moved = array if layout == "BNSD" else np.swapaxes(array, 1, 2)
        return np.ascontiguousarray(moved.reshape(*moved.shape[:2], -1) if layout == "BSH" else moved)

    feeds = {name: laid(a).astype(np.float32) for name, a in (("query", query), ("key", key), ("value", value))}
    feeds |= {extra[name][0]: extra[name][1] for name in given}
    node = custom("IncreFlashAttention", {name: name for name in feeds}, "y", num_heads=4, num_key_value_heads=2,
                  scale_value=0.3, input_layout=layout)  # fmt: skip
    wanted = attention(query, key, value, 0.3, **{name: extra[name][1] for name in given})
    found = run(node, feeds)
    assert found.shape == feeds["query"].shape
    assert np.allclose(found, laid(wanted), atol=1e-5)


def test_the_result_has_the_type_of_the_query():
    feeds = {name: np.ones((1, 1, 2), np.float16) for name in ("query", "key0", "value0")}
    node = custom("IncreFlashAttention", {name: name for name in feeds}, "y", num_heads=1)
    assert run(node, feeds).dtype == np.float16


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (custom("Scatter", {"var": "a", "indices": "b", "updates": "c"}, "y", reduce="add", axis=0), "reduce add"),
        (custom("Scatter", {"var": "a", "indices": "b"}, "y", axis=0), "no input updates"),
        (custom("IncreFlashAttention", {"query": "q"}, "y", num_heads=1), "no input key"),
        (custom("IncreFlashAttention", {"query": "q"}, "y", input_layout="TND"), "input_layout TND"),
        (custom("Scatter", {"var": "a"}, "y", input_index=[3], axis=0), "input_index"),
    ],
)
def test_what_is_not_known_is_told(node, says):
    with pytest.raises(ValueError, match=says):
        lower(node, {})


# A decode graph whose cache has a fixed capacity.


def fixed_capacity(graph):
    """Writes the new entry of the cache by a Custom Scatter; the cache holds 40 tokens."""
    for old, new in (("present_kv_cache", "grown"), ("past_kv_cache", "filled"), ("attention_mask", "short_mask")):
        for info in (*graph.output, *graph.input):
            info.name = new if info.name == old else info.name
        for node in graph.node:
            node.output[:] = [new if name == old else name for name in node.output]
            node.input[:] = [new if name == old else name for name in node.input]
    for name, old, shape in (
        ("past_kv_cache", "filled", [2, 1, 1, 40, 32]), ("attention_mask", "short_mask", [1, 40]),
    ):  # fmt: skip
        info = next(info for info in graph.input if info.name == old)
        info.CopyFrom(helper.make_tensor_value_info(name, info.type.tensor_type.elem_type, shape))
    tensors = {"zero": [0], "one": [1], "three": [3], "last": [-1], "many": [99], "twice": [2]}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in tensors.items())
    front = [
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["total"], keepdims=0),
        helper.make_node("Sub", ["total", "one"], ["before"]),
        helper.make_node("Slice", ["past_kv_cache", "zero", "before", "three"], ["filled"]),
        helper.make_node("Slice", ["attention_mask", "zero", "total", "one"], ["short_mask"]),
    ]
    for node in reversed(front):
        graph.node.insert(0, node)
    graph.node.append(helper.make_node("Slice", ["grown", "last", "many", "three"], ["new_entry"]))
    graph.node.append(helper.make_node("Expand", ["before", "twice"], ["where"]))
    inputs = {"var": "past_kv_cache", "indices": "where", "updates": "new_entry"}
    graph.node.append(custom("Scatter", inputs, "present_kv_cache", reduce="update", axis=3))
    info = next(info for info in graph.output if info.name == "grown")
    info.CopyFrom(helper.make_tensor_value_info("present_kv_cache", FLOAT, [2, 1, 1, 40, 32]))


@pytest.fixture(scope="module")
def decode(tmp_path_factory) -> tuple[Path, Path]:
    """Unfused and fused file of a decode graph with a Custom node of another tool."""
    folder = tmp_path_factory.mktemp("fixed")
    model = onnx.load(export(DECODE).path)
    fixed_capacity(model.graph)
    onnx.save(model, folder / "unfused.onnx")
    options = FuseOptions(folder / "unfused.onnx", folder / "fused.onnx")
    assert pipeline.fuse(options, SilentProgress()).exit == 0
    return folder / "unfused.onnx", folder / "fused.onnx"


@pytest.fixture(scope="module")
def prefill(tmp_path_factory) -> tuple[Path, Path]:
    output = tmp_path_factory.mktemp("prefill") / "fused.onnx"
    assert pipeline.fuse(FuseOptions(export(PREFILL).path, output), SilentProgress()).exit == 0
    return export(PREFILL).path, output


def test_fuse_leaves_them_byte_for_byte(decode):
    theirs = [
        bytes(model.graph.data[slice(*model.graph.spans[node])])
        for model in map(scan, decode)
        for node, kind in foreign_nodes(model.graph)
        if kind == "Scatter"
    ]
    assert len(theirs) == 2
    assert theirs[0] == theirs[1]


def test_without_a_lowering_the_sites_alone_are_compared_and_it_is_said(fuse, decode):
    done = fuse("verify", *decode)
    assert done.exit == 0
    assert "site level only (network-foreign-operator)" in done.out
    assert "theirs/Scatter, of type Scatter" in done.out.replace("\n", " ")
    assert "--lowering" in done.out
    assert fuse("verify", *decode, "--level", "network", "--json").document["error"]["code"] == (
        "network-foreign-operator"
    )


def test_with_one_the_whole_models_run(fuse, decode):
    document = fuse("verify", *decode, "--lowering", "fixed-capacity", "--json").document
    assert (document["exit"], document["network"]["verdict"]) == (0, "passes")
    assert [output["name"] for output in document["network"]["outputs"]][-1] == "present_kv_cache"


def test_a_pair_with_them_is_rolled_out(prefill, decode, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(20))
    settings = Settings(level="task", inputs=InputOptions(), foreign=load_lowering("fixed-capacity"))
    report = verify_task(TaskOptions(prefill, decode, 8, tmp_path / "ids.npy"), settings)
    rollout = report.task.rollout
    assert (report.exit, rollout.verdict) == (0, "passes")
    assert [run.equal_tokens for run in rollout.runs] == [9, 9]
    assert "put 20 entries of axis 3 into a cache of 40" in rollout.fitted[0]


def test_causes_are_found_with_them_too(decode):
    from deltafuse.verify_causes import Causes, find_causes

    settings = Settings(level="network", foreign=load_lowering("fixed-capacity"))
    report = find_causes(check(*decode, settings), Causes(bisect=True), settings)
    assert (report.exit, report.bisect.culprits) == (0, ())


# Files.


def test_shipped_lowerings_have_names():
    assert list(shipped()) == ["fixed-capacity"]
    assert load_lowering("fixed-capacity").operators == {"IncreFlashAttention", "Scatter"}
    by_path = load_lowering(str(shipped()["fixed-capacity"]))
    assert by_path.operators == {"IncreFlashAttention", "Scatter"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lacks OPERATORS"),
        ("OPERATORS = ('A',)", "lower"),
        ("OPERATORS = 'A'\ndef lower(node, types): return []", "lacks OPERATORS"),
        ("import nothing_of_this_name", "cannot be imported"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, says):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=says) as error:
        load_lowering(str(tmp_path / "mine.py"))
    assert error.value.code == "bad-lowering"


@pytest.mark.parametrize(
    ("body", "says"),
    [("raise KeyError('axis')", "cannot lower the node theirs/Scatter"), ("return []", "does not write present_kv")],
)
def test_a_file_that_fails_on_a_node(fuse, decode, tmp_path, body, says):
    (tmp_path / "mine.py").write_text(f"OPERATORS = ('Scatter',)\ndef lower(node, types):\n    {body}\n")
    done = fuse("verify", *decode, "--lowering", tmp_path / "mine.py", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "bad-lowering")
    assert says in done.document["error"]["text"]


def test_a_file_that_is_not_there(fuse, decode):
    done = fuse("verify", *decode, "--lowering", "nowhere.py", "--json")
    assert (done.exit, done.document["error"]["code"]) == (1, "bad-lowering")
    assert "fixed-capacity" in done.document["error"]["text"]


def test_a_model_without_such_nodes_is_not_written(tmp_path):
    foreign = load_lowering("fixed-capacity")
    assert not write_lowered(export(DECODE).path, foreign, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
