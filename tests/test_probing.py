"""`fuse inspect --tensors --nodes --op`: what a graph holds, without a proof and without a weight."""

from __future__ import annotations

import io
import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from deltafuse import pipeline, probing
from deltafuse.errors import UserError
from deltafuse.options import FuseOptions, SilentProgress
from deltafuse.probing import NodeRow, TensorRow, listing
from deltafuse.tables_listing import print_listing
from exports import export

GRAPH = """<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1], producer_name: "hand">
small (float[batch, 4] hidden, bool yes) => (float[batch, 3] logits)
<float[4, 3] weight, float16[2] bias = {1, 2}>
{
    product = MatMul (hidden, weight)
    one = Constant <value = float {1}> ()
    sum = Add (product, one)
    activated = com.microsoft.Gelu (sum)
    chosen = If (yes) <then_branch = a () => (float[batch, 3] x) { x = Identity (activated) },
                       else_branch = b () => (float[batch, 3] y) { y = Neg (activated) }>
    mystery = com.microsoft.Unheard (chosen)
    logits = Identity (activated)
    never = Neg (absent)
}"""


@pytest.fixture
def small(tmp_path):
    """A model with a name for some nodes, a weight in a file that is not there, a subgraph and unknown operators."""
    model = parser.parse_model(GRAPH)
    model.graph.node[0].name = "head/MatMul"
    model.graph.node[2].name = "head/Add"
    weight = model.graph.initializer.add(name="weight", data_type=TensorProto.FLOAT, dims=[4, 3])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "4096"), ("length", "48")):
        weight.external_data.add(key=key, value=value)
    path = tmp_path / "small.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def rows(found):
    return {row.name: row for row in found.tensors}


def test_every_tensor_and_where_it_comes_from(small):
    found = listing(small, tensors="")
    assert (found.nodes, found.ops) == (None, None)
    assert rows(found)["hidden"] == TensorRow(
        "hidden", "input", "float32", ("batch", 4), None, None, None, 1, False, None, None
    )
    assert rows(found)["weight"] == TensorRow(
        "weight", "initializer", "float32", (4, 3), 48, None, None, 1, False, "weights.bin", 4096
    )
    assert rows(found)["bias"] == TensorRow("bias", "initializer", "float16", (2,), 4, None, None, 0, False, None, None)
    assert rows(found)["one"] == TensorRow("one", "constant", "float32", (), 4, 1, "Constant", 1, False, None, None)
    assert rows(found)["logits"] == TensorRow(
        "logits", "node", "float32", ("batch", 3), None, 6, "Identity", 0, True, None, None
    )
    assert rows(found)["absent"].kind == "unknown"
    assert set(rows(found)) == {
        "hidden", "yes", "weight", "bias", "product", "one", "sum", "activated", "chosen", "mystery", "logits", "never",
        "absent",
    }  # fmt: skip


def test_shapes_follow_from_data_flow_and_are_open_where_nothing_tells(small):
    found = rows(listing(small, tensors="^(product|mystery)$"))
    assert (found["product"].shape, found["product"].dtype) == (("batch", 3), "float32")
    assert (found["mystery"].shape, found["mystery"].dtype, found["mystery"].bytes) == (None, None, None)


def test_readers_include_subgraphs(small):
    assert rows(listing(small, tensors="activated"))["activated"].consumers == 2


def test_tensors_are_filtered_by_a_regular_expression(small):
    assert set(rows(listing(small, tensors="^w|s$"))) == {"weight", "bias", "yes", "logits"}
    assert listing(small, tensors="no such tensor").tensors == ()


def test_nodes_in_the_order_of_the_file(small):
    found = listing(small, nodes="")
    assert found.tensors is None
    reads, shapes = ("hidden", "weight"), (("batch", 3),)
    assert found.nodes[0] == NodeRow(0, "head/MatMul", "MatMul", "", reads, ("product",), shapes)
    assert found.nodes[5] == NodeRow(5, "", "Unheard", "com.microsoft", ("chosen",), ("mystery",), (None,))
    assert [row.index for row in found.nodes] == list(range(8))
    assert found.ops == {
        "MatMul": 1, "Constant": 1, "Add": 1, "com.microsoft.Gelu": 1, "If": 1, "com.microsoft.Unheard": 1,
        "Identity": 1, "Neg": 1,
    }  # fmt: skip


def test_nodes_go_by_their_name_or_their_first_output(small):
    assert [row.op for row in listing(small, nodes="^head/").nodes] == ["MatMul", "Add"]
    assert [row.op for row in listing(small, nodes="^activ").nodes] == ["Gelu"]


def test_operators_are_listed_and_counted(small):
    found = listing(small, ops=["Add", "com.microsoft.*", "Conv"])
    assert [row.index for row in found.nodes] == [2, 3, 5]
    assert found.ops == {"Add": 1, "com.microsoft.Gelu": 1, "com.microsoft.Unheard": 1, "Conv": 0}
    assert listing(small, ops=["Con*"]).ops == {"Constant": 1}


def test_an_operator_without_a_domain_is_of_every_domain(small):
    assert listing(small, ops=["Gelu", "Neg"]).ops == {"com.microsoft.Gelu": 1, "Neg": 1}
    assert listing(small, ops=["com.other.Gelu", "gelu"]).ops == {"com.other.Gelu": 0, "gelu": 0}


@pytest.mark.parametrize(
    ("target", "op", "told"),
    [
        ("ort", "LinearAttention", "com.microsoft.LinearAttention"),
        ("onnx", "LinearAttention", "LinearAttention"),
        ("ascend-310p", "RecurrentGatedDeltaRule", "Custom RecurrentGatedDeltaRule"),
        ("ascend-310p", "Custom", "Custom RecurrentGatedDeltaRule"),
    ],
)
def test_fused_operators_of_every_target_are_counted_by_their_name(tmp_path, target, op, told):
    fused = tmp_path / "fused.onnx"
    assert pipeline.fuse(FuseOptions(export("full_decode_ts17").path, fused, target=target), SilentProgress()).exit == 0
    found = listing(fused, ops=[op])
    assert found.ops == {told: 3}
    assert len(found.nodes) == 3


def test_nodes_and_operators_narrow_each_other(small):
    found = listing(small, nodes="^head/", ops=["Add", "Neg"])
    assert [row.name for row in found.nodes] == ["head/Add"]


def test_what_holds_subgraphs_is_noted(small):
    found = listing(small, ops=["If"])
    assert found.notes == ("1 node has subgraphs (If, Loop, Scan), whose nodes and tensors are not listed",)
    assert (found.node_count, found.opsets, found.ir_version) == (8, {"": 17, "com.microsoft": 1}, 9)
    assert found.producer == "hand"


@pytest.mark.parametrize("option", [{"tensors": "("}, {"nodes": "*"}])
def test_a_bad_regular_expression_is_a_user_error(small, option):
    with pytest.raises(UserError, match="regular expression") as caught:
        listing(small, **option)
    assert caught.value.code == "bad-regex"


@pytest.mark.parametrize(
    ("dtype", "dims", "size"),
    [
        (TensorProto.INT4, [3], 2),
        (TensorProto.BOOL, [5], 5),
        (TensorProto.BFLOAT16, [2, 2], 8),
        (TensorProto.FLOAT8E4M3FN, [3], 3),
        (TensorProto.STRING, [3], None),
        (TensorProto.DOUBLE, [0, 4], 0),
    ],
)
def test_sizes_in_bytes(tmp_path, dtype, dims, size):
    graph = helper.make_graph([], "g", [helper.make_tensor_value_info("x", dtype, dims)], [])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph), path)
    (row,) = listing(path, tensors="").tensors
    names = {TensorProto.DOUBLE: "float64"}
    assert (row.bytes, row.dtype) == (size, names.get(dtype, TensorProto.DataType.Name(dtype).lower()))


def test_above_a_limit_shapes_are_what_the_file_declares(small, monkeypatch):
    monkeypatch.setattr(probing, "_MANY_TENSORS", 3)
    monkeypatch.setattr(probing, "_MANY_NODES", 3)
    found = listing(small, tensors="")
    assert rows(found)["hidden"].shape == ("batch", 4)
    assert rows(found)["weight"].shape == (4, 3)
    assert (rows(found)["product"].shape, rows(found)["product"].dtype) == (None, None)
    assert found.notes[0] == "shapes of 13 tensors were not inferred: list fewer with --tensors REGEX"
    assert rows(listing(small, tensors="^product$"))["product"].shape == ("batch", 3)


def test_no_weight_is_read(tmp_path):
    # A hole of 8 GB in the middle of the file: to read it would take minutes and the memory of this process.
    size = 8 << 30
    head = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[size // 4]).SerializeToString()
    tensor = head + b"\x4a" + varint(size)  # field 9, raw_data
    graph = b"\x2a" + varint(len(tensor) + size) + tensor  # field 5, initializer
    outer = b"\x08\x08\x3a" + varint(len(graph) + size) + graph  # ir_version 8; field 7, graph
    path = tmp_path / "sparse.onnx"
    with path.open("wb") as file:
        file.write(outer)
        file.truncate(len(outer) + size)
    (row,) = listing(path, tensors="").tensors
    assert (row.shape, row.bytes, row.location) == ((size // 4,), size, None)


def varint(number):
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


# The command


def forbidden(*_, **__):
    raise AssertionError("no site is to be looked for")


def test_tables_alone_prove_nothing(fuse, monkeypatch):
    monkeypatch.setattr(pipeline, "inspect", forbidden)
    done = fuse("inspect", export("full_decode_ts17").path, "--tensors", "^past_", "--op", "MatMul")
    assert (done.exit, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == ["tensor", "dtype", "shape", "bytes", "written", "by", "readers", "external", "data"]
    assert [line.split()[0] for line in lines[1:4]] == ["past_conv_states", "past_recurrent_states", "past_kv_cache"]
    assert "float32  [3, batch, 4, 16, 16]" in lines[2]
    assert lines[-1] == "1769 nodes in the main graph; 3 tensors listed; 34 nodes listed; opset ai.onnx 17"


def test_each_table_has_a_key_of_its_own(fuse, small):
    document = fuse("inspect", small, "--tensors", "--json").document
    assert (document["schema"], document["exit"], document["error"]) == (1, 0, None)
    assert {"nodes", "ops", "sites"} & set(document) == set()
    assert document["tensors"][0] == {
        "name": "hidden", "kind": "input", "dtype": "float32", "shape": ["batch", 4], "bytes": None, "producer": None,
        "producer_op": None, "consumers": 1, "output": False, "location": None, "offset": None,
    }  # fmt: skip
    document = fuse("inspect", small, "--nodes", "^head", "--op", "Add", "--json").document
    assert document["nodes"] == [
        {"index": 2, "name": "head/Add", "op": "Add", "domain": "", "inputs": ["product", "one"], "outputs": ["sum"],
             "shapes": [["batch", 3]]}
    ]
    assert document["ops"] == {"Add": 1}
    assert "tensors" not in document


def test_the_shape_of_a_scalar_and_of_an_open_axis_can_be_told_apart(fuse, small):
    lines = fuse("inspect", small, "--tensors", "^(one|mystery|yes|logits)$").out.splitlines()
    cells = {line.split()[0]: line.split() for line in lines[1:5]}
    assert cells["one"][1:3] == ["float32", "[]"]
    assert cells["mystery"][1:3] == ["?", "?"]
    assert cells["logits"][-3:] == ["0", "+", "output"]


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["--tensors", "recurent_states"], "did you mean past_recurrent_states or "),
        (["--tensors", "PAST_KV"], "without regard to case it is 1, e.g. past_kv_cache: write '(?i)PAST_KV'"),
        (["--nodes", "Sigmoid_99999"], "did you mean /model/layers.0/linear_attn/Sigmoid"),
        (["--nodes", "^zzzzzzzz$"], "no node has a name that '^zzzzzzzz$' matches\n"),
        (["--op", "matmull"], "no node has the operator matmull; did you mean MatMul or Mul?"),
    ],
)
def test_what_nothing_matches_says_what_may_be_meant(fuse, arguments, note):
    done = fuse("inspect", export("full_decode_ts17").path, *arguments)
    assert done.exit == 0
    assert note in done.out
    assert "written by" not in done.out
    assert "inputs" not in done.out


class Terminal(io.StringIO):
    """A terminal of 60 characters."""

    def isatty(self):
        return True


def test_a_terminal_that_is_too_narrow_gets_blocks(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    print_listing(listing(export("full_decode_ts17").path, tensors="^past_rec", ops=["Softmax"]), out)
    lines = out.getvalue().splitlines()
    assert lines[:3] == [
        "past_recurrent_states",
        "  dtype float32  shape [3, batch, 4, 16, 16]",
        "  written by input  readers 3",
    ]
    assert lines[4].startswith("node ")
    assert lines[5].startswith("  operator Softmax")
    assert "operator  count" in lines
    assert lines[-1] == "1769 nodes in the main graph; 1 tensor listed; 1 node listed; opset ai.onnx 17"


def test_tables_and_sites_in_one_document(fuse):
    path = export("steps_ts17").path
    document = fuse("inspect", path, "--nodes", "Exp", "--sites", "*", "--json").document
    assert [site["status"] for site in document["sites"]] == ["match"]
    assert [node["op"] for node in document["nodes"]] == ["Exp"] * 3
    done = fuse("inspect", path, "--nodes", "Exp", "--sites", "*")
    assert done.exit == 0
    assert done.out.splitlines()[0].split() == ["node", "operator", "name", "inputs", "outputs", "shapes"]
    assert "1 match" in done.out


@pytest.mark.parametrize(("op", "exit_code"), [("cgdr", 0), ("rgdr", 4)])
def test_op_still_forces_one_of_the_two_kernels(fuse, op, exit_code):
    document = fuse("inspect", export("chunk_ts14").path, "--op", op, "--json").document
    assert "ops" not in document
    assert (document["exit"], document["sites"][0]["op"]) == (
        exit_code,
        "ChunkGatedDeltaRule" if op == "cgdr" else None,
    )


def test_errors_are_those_of_the_other_commands(fuse, tmp_path):
    bad = fuse("inspect", export("rec_ts14").path, "--tensors", "(", "--json")
    assert (bad.exit, bad.document["error"]["code"]) == (1, "bad-regex")
    missing = fuse("inspect", tmp_path / "nowhere.onnx", "--nodes", "--json")
    assert (missing.exit, json.loads(missing.out)["error"]["code"]) == (1, "missing-file")


def test_constants_of_every_form(tmp_path):
    nodes = [
        helper.make_node("Constant", [], ["ints"], value_ints=[1, 2, 3]),
        helper.make_node("Constant", [], ["text"], value_string="a"),
        helper.make_node("Constant", [], ["array"], value=numpy_helper.from_array(np.zeros((2, 0), np.float16))),
    ]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [])), path)
    found = rows(listing(path, tensors=""))
    assert [(row.dtype, row.shape, row.bytes) for row in found.values()] == [
        ("int64", (3,), 24), ("string", (), None), ("float16", (2, 0), 0),
    ]  # fmt: skip
