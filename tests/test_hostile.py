"""Broken and hostile files: one message that says how to mend, exit 1, in bounded time; never a traceback."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

import graphs
from conftest import Outcome
from deltafuse import calls, limits
from deltafuse.bench import open_bench
from deltafuse.diagnosis import explained
from deltafuse.errors import UserError
from deltafuse.probe import Cut
from deltafuse.protobuf import write_field
from deltafuse.reasons import Reason
from deltafuse.wire import scan
from deltafuse.worker import Worker
from exports import export

Fuse = Callable[..., Outcome]
Change = Callable[[ModelProto], "ModelProto | bytes | None"]
SOURCE = export("rec_ts17_eqheads_nofinal").path
ZOO = Path(__file__).parent / "zoo"
#: Seconds that a command may take on any of these files; alone it is one or two.
PATIENCE = 30


def hostile(change: Change, folder: Path) -> Path:
    """A real export with a change made to it."""
    model = onnx.load(SOURCE)
    changed = change(model)
    content = changed if isinstance(changed, bytes) else (changed or model).SerializeToString()
    path = folder / "hostile.onnx"
    path.write_bytes(content)
    return path


def commands(path: Path, folder: Path) -> list[list[object]]:
    """Every command that reads a model."""
    return [
        [path, "-o", folder / "fused.onnx"],
        ["inspect", path],
        ["inspect", path, "--tensors", "--nodes", "--op", "*"],
        ["lint", path],
        ["lower", path, "-o", folder / "lowered.onnx"],
        ["rollback", path, "-o", folder / "back.onnx"],
        ["verify", path, SOURCE, "--timeout", "4"],
        ["verify", SOURCE, path, "--timeout", "4"],
    ]


def of(model: ModelProto, *ops: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in ops]


def cycle(model: ModelProto) -> None:
    model.graph.node[5].input[0] = model.graph.node[-3].output[0]


def cycle_of_one(model: ModelProto) -> None:
    model.graph.node[8].input[0] = model.graph.node[8].output[0]


def missing_producer(model: ModelProto) -> None:
    model.graph.node.remove(of(model, "Mul")[1])


def missing_output(model: ModelProto) -> None:
    model.graph.output[0].name = "nowhere"


def undeclared_inputs(model: ModelProto) -> None:
    del model.graph.input[:]


def one_output_of_two_nodes(model: ModelProto) -> None:
    model.graph.node.append(of(model, "Mul")[0])


def an_output_that_is_an_input(model: ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info(of(model, "Mul")[0].output[0], TensorProto.FLOAT, [1]))


def an_output_that_is_an_initializer(model: ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor(of(model, "Mul")[0].output[0], TensorProto.FLOAT, [1], [1.0]))


def an_input_twice(model: ModelProto) -> None:
    model.graph.input.append(model.graph.input[0])


def an_input_without_a_name(model: ModelProto) -> None:
    model.graph.input[0].name = ""


def initializers_that_differ(model: ModelProto) -> None:
    for value in (1.0, 2.0):
        model.graph.initializer.append(helper.make_tensor("twice", TensorProto.FLOAT, [1], [value]))


def no_opset(model: ModelProto) -> None:
    del model.opset_import[:]


def no_opset_of_a_domain(model: ModelProto) -> None:
    of(model, "Mul")[0].domain = "com.example"


def an_opset_of_the_future(model: ModelProto) -> None:
    model.opset_import[0].version = 999


def an_opset_below_one(model: ModelProto) -> None:
    model.opset_import[0].version = -3


def subgraphs(depth: int) -> bytes:
    """A GraphProto with that many branches in each other."""
    graph = helper.make_graph([helper.make_node("Identity", ["query"], ["deep"])], "deep", [], []).SerializeToString()
    for _ in range(depth):
        branch = write_field(1, b"then_branch") + write_field(6, graph) + b"\xa0\x01\x05"
        node = write_field(1, b"query") + write_field(2, b"deep") + write_field(4, b"If") + write_field(5, branch)
        graph = write_field(1, node)
    return graph


def nested_beyond_protobuf(model: ModelProto) -> bytes:
    return model.SerializeToString() + write_field(7, subgraphs(40))


def nested_beyond_recursion(model: ModelProto) -> bytes:
    return model.SerializeToString() + write_field(7, subgraphs(3000))


def with_functions(model: ModelProto, called: dict[str, tuple[str, ...]]) -> None:
    """Local functions, each with the functions that it calls one after the other; the first Exp calls the first."""
    for name, callees in called.items():
        nodes = [
            helper.make_node(callee, [f"v{i}" if i else "x"], [f"v{i + 1}"], domain="f" if callee in called else "")
            for i, callee in enumerate(callees)
        ]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
        model.functions.append(helper.make_function("f", name, ["x"], [f"v{len(nodes)}"], nodes, imports))
    model.opset_import.append(helper.make_opsetid("f", 1))
    node = of(model, "Exp")[0]
    node.domain, node.op_type = "f", next(iter(called))


def a_function_that_calls_itself(model: ModelProto) -> None:
    with_functions(model, {"f": ("f",)})


def functions_that_call_each_other(model: ModelProto) -> None:
    with_functions(model, {"f": ("g",), "g": ("Exp", "f")})


def calls_beyond_recursion(model: ModelProto) -> None:
    with_functions(model, {f"f{i}": (f"f{i + 1}",) for i in range(3000)} | {"f3000": ("Exp",)})


def calls_that_double(model: ModelProto) -> None:
    with_functions(model, {f"f{i}": (f"f{i + 1}",) * 2 for i in range(60)} | {"f60": ("Exp",)})


def a_function_that_is_none(model: ModelProto) -> bytes:
    with_functions(model, {"f": ("Exp",)})
    return model.SerializeToString() + write_field(25, b"\x0a\xff\xff")


def a_name_that_is_not_utf8(model: ModelProto) -> bytes:
    return model.SerializeToString().replace(b"query", b"qu\xffry")


def an_axis_that_is_not_utf8(model: ModelProto) -> bytes:
    dim = write_field(1, write_field(2, b"\xff"))
    info = write_field(1, b"query") + write_field(2, write_field(1, b"\x08\x01" + write_field(2, dim)))
    del model.graph.input[[info.name for info in model.graph.input].index("query")]
    return model.SerializeToString() + write_field(7, write_field(11, info))


def a_type_that_is_none(model: ModelProto) -> bytes:
    info = write_field(1, b"query") + write_field(2, write_field(1, b"\x08\x01\x12\xff"))
    del model.graph.input[[info.name for info in model.graph.input].index("query")]
    return model.SerializeToString() + write_field(7, write_field(11, info))


def external(model: ModelProto, **entries: str) -> None:
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def a_location_with_a_zero(model: ModelProto) -> None:
    external(model, location="a\0b")


def a_location_without_end(model: ModelProto) -> None:
    external(model, location="a" * 5000)


def a_domain_s_version_below_one(model: ModelProto) -> None:
    model.opset_import.append(onnx.OperatorSetIdProto(domain="com.microsoft", version=-1))


def a_loop_s_body_with_more_than_is_given(_: ModelProto) -> ModelProto:
    model = onnx.load(export("loop_list").path)
    (loop,) = of(model, "Loop")
    body = next(one.g for one in loop.attribute if one.name == "body")
    body.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))
    return model


def a_call_with_more_than_its_function_gives(_: ModelProto) -> ModelProto:
    model = onnx.load(ZOO / "steps_gates__function.onnx")
    del model.functions[0].output[-1]
    return model


def nothing(_: ModelProto) -> bytes:
    return b""


def zeros(_: ModelProto) -> bytes:
    return bytes(100_000)


def half(model: ModelProto) -> bytes:
    content = model.SerializeToString()
    return content[: len(content) // 2]


REFUSED: dict[Change, str] = {
    cycle: "cyclic",
    cycle_of_one: "cyclic",
    missing_producer: "value-without-source",
    missing_output: "value-without-source",
    undeclared_inputs: "value-without-source",
    one_output_of_two_nodes: "value-written-twice",
    an_output_that_is_an_input: "value-written-twice",
    an_output_that_is_an_initializer: "value-written-twice",
    an_input_twice: "value-written-twice",
    an_input_without_a_name: "empty-name",
    initializers_that_differ: "initializer-twice",
    no_opset: "opset-missing",
    no_opset_of_a_domain: "opset-missing",
    an_opset_of_the_future: "opset-unknown",
    an_opset_below_one: "opset-unknown",
    a_domain_s_version_below_one: "opset-unknown",
    a_loop_s_body_with_more_than_is_given: "body-inputs",
    nested_beyond_protobuf: "nested-too-deep",
    nested_beyond_recursion: "nested-too-deep",
    a_function_that_calls_itself: "function-recursive",
    functions_that_call_each_other: "function-recursive",
    calls_beyond_recursion: "function-too-large",
    calls_that_double: "function-too-large",
    a_function_that_is_none: "not-onnx",
    a_name_that_is_not_utf8: "not-onnx",
    an_axis_that_is_not_utf8: "not-onnx",
    a_type_that_is_none: "not-onnx",
    a_location_with_a_zero: "external-data-damaged",
    a_location_without_end: "external-data-damaged",
    nothing: "not-onnx",
    zeros: "not-onnx",
    half: "truncated",
}


def quick(fuse: Fuse, *arguments: object) -> Outcome:
    """Runs a command that may say anything but must not hang or show a traceback."""
    begin = time.monotonic()
    outcome = fuse(*arguments)
    assert time.monotonic() - begin < PATIENCE, arguments
    assert outcome.exit in (0, 1, 3, 4, 5), outcome.err
    assert "Traceback" not in outcome.err
    if outcome.exit == 1:
        assert outcome.err.startswith("fuse: ")
    return outcome


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_no_reader_agrees_on_is_refused_with_a_reason(fuse: Fuse, tmp_path: Path, change: Change) -> None:
    path = hostile(change, tmp_path)
    before = path.read_bytes()
    error = fuse(path, "-o", tmp_path / "fused.onnx", "--json").document["error"]
    assert error["code"] == REFUSED[change]
    assert ": " in error["text"]  # what is wrong, and then how to mend it
    for arguments in commands(path, tmp_path):
        quick(fuse, *arguments)
    assert path.read_bytes() == before
    assert not (tmp_path / "fused.onnx").exists()


def enormous_dims(model: ModelProto) -> None:
    for info in model.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            dim.dim_value = 1 << 62


def negative_dims(model: ModelProto) -> None:
    for dim in model.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_value = -5


def many_dims(model: ModelProto) -> None:
    for _ in range(20_000):
        model.graph.input[0].type.tensor_type.shape.dim.add(dim_value=2)


def enormous_constants(model: ModelProto) -> None:
    for node in of(model, "Constant"):
        node.attribute[0].t.dims[:] = [1 << 40]


def a_shape_without_end(model: ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("n", TensorProto.INT64, [1], [1 << 33]))
    model.graph.node.insert(0, helper.make_node("Expand", ["n", "n"], ["without_end"]))
    of(model, "Unsqueeze")[0].input[1] = "without_end"


def a_range_without_end(model: ModelProto) -> None:
    for name, value in (("r0", 0), ("r1", 1 << 60), ("r2", 1)):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [], [value]))
    model.graph.node.insert(0, helper.make_node("Range", ["r0", "r1", "r2"], ["range"]))
    model.graph.node.insert(1, helper.make_node("Cast", ["range"], ["ranged"], to=TensorProto.FLOAT))
    of(model, "Mul")[1].input[1] = "ranged"


def short_constants(model: ModelProto) -> None:
    for node in of(model, "Constant"):
        node.attribute[0].t.raw_data = b"\1"


def absurd_attributes(model: ModelProto) -> None:
    of(model, "Mul")[0].attribute.extend(
        [helper.make_attribute("many", list(range(300_000))), helper.make_attribute("long", "z" * 5_000_000)]
    )
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("axis", "to", "keepdims"):
                attribute.i = (1 << 63) - 1
            if attribute.name in ("perm", "axes"):
                attribute.ints[:] = [(1 << 63) - 1] * 3


def attributes_of_other_kinds(model: ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            attribute.CopyFrom(onnx.AttributeProto(name=attribute.name, type=3, s=b"\xff\xfe"))


def nodes_without_inputs(model: ModelProto) -> None:
    for node in model.graph.node:
        del node.input[:]


def names_that_are_empty(model: ModelProto) -> None:
    for node in model.graph.node:
        node.name = ""
    for node in model.graph.node[10:20]:
        node.input[:] = [""] * len(node.input)


def types_that_are_none(model: ModelProto) -> None:
    for info in model.graph.input:
        info.type.tensor_type.elem_type = 999


def inputs_that_are_sequences(model: ModelProto) -> None:
    for info in model.graph.input:
        info.type.sequence_type.elem_type.tensor_type.elem_type = 1


def a_loop_without_end(model: ModelProto) -> None:
    counts = [helper.make_tensor_value_info("i", 7, []), helper.make_tensor_value_info("c", 9, [])]
    given, result = (helper.make_tensor_value_info(name, 1, None) for name in ("s", "s2"))
    nodes = [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Add", ["s", "s"], ["s2"])]
    body = helper.make_graph(nodes, "b", [*counts, given], [helper.make_tensor_value_info("c2", 9, []), result])
    model.graph.initializer.append(helper.make_tensor("trips", TensorProto.INT64, [], [1 << 62]))
    model.graph.initializer.append(helper.make_tensor("go", TensorProto.BOOL, [], [True]))
    at = next(i for i, node in enumerate(model.graph.node) if node.op_type == "Mul")
    last = model.graph.node[at].input[0]
    model.graph.node.insert(at, helper.make_node("Loop", ["trips", "go", last], ["looped"], body=body))
    model.graph.node[at + 1].input[0] = "looped"


def groups_in_each_other(model: ModelProto) -> bytes:
    return model.SerializeToString() + b"\xfb\x06" * 20_000 + b"\xfc\x06" * 20_000


def offsets_that_are_no_numbers(model: ModelProto) -> None:
    external(model, location="w.bin", offset="abc", length="-3")


def no_graph_inside(model: ModelProto) -> None:
    model.graph.Clear()


LEFT_ALONE = [
    enormous_dims, negative_dims, many_dims, enormous_constants, a_shape_without_end, a_range_without_end,
    short_constants, absurd_attributes, attributes_of_other_kinds, nodes_without_inputs, names_that_are_empty,
    types_that_are_none, inputs_that_are_sequences, a_loop_without_end, groups_in_each_other,
    offsets_that_are_no_numbers, no_graph_inside, a_call_with_more_than_its_function_gives,
]  # fmt: skip


@pytest.mark.parametrize("change", LEFT_ALONE, ids=lambda change: change.__name__)
def test_what_can_be_read_ends_in_an_answer(fuse: Fuse, tmp_path: Path, change: Change) -> None:
    path = hostile(change, tmp_path)
    before = path.read_bytes()
    for arguments in commands(path, tmp_path):
        quick(fuse, *arguments)
    assert path.read_bytes() == before


def test_nodes_out_of_order_are_no_fault(fuse: Fuse, tmp_path: Path) -> None:
    def backwards(model: ModelProto) -> None:
        nodes = list(model.graph.node)[::-1]
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    assert fuse(hostile(backwards, tmp_path), "-o", tmp_path / "fused.onnx").exit == 0


@pytest.mark.parametrize("given", [True, False], ids=["passed through", "a constant"])
def test_a_model_without_nodes_has_nothing_to_fuse(fuse: Fuse, tmp_path: Path, given: bool) -> None:
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])]
    constant = helper.make_tensor("x", TensorProto.FLOAT, [1], [2.0])
    graph = helper.make_graph([], "g", ends if given else [], ends, [] if given else [constant])
    path = tmp_path / "empty.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    exits = [fuse(*command).exit for command in commands(path, tmp_path)]
    assert exits == [3, 3, 0, 3, 3, 1, 5, 5]
    assert fuse("inspect", path, "--target", "ort", "--html", tmp_path / "page.html").exit == 3
    assert "no layer was recognised" in (tmp_path / "page.html").read_text()


def test_an_initializer_twice_with_the_same_bytes_is_no_fault(fuse: Fuse, tmp_path: Path) -> None:
    def twice(model: ModelProto) -> None:
        model.graph.initializer.extend([helper.make_tensor("twice", TensorProto.FLOAT, [1], [1.0])] * 2)

    assert fuse(hostile(twice, tmp_path), "-o", tmp_path / "fused.onnx").exit == 0


def test_a_constant_that_says_it_is_of_another_type_is_none(tmp_path: Path) -> None:
    def of_other_type(model: ModelProto) -> None:
        of(model, "Constant")[0].attribute[0].type = onnx.AttributeProto.FLOATS

    def nameless(model: ModelProto) -> bytes:
        return model.SerializeToString().replace(b"\x0a\x05value\x2a", b"\x0a\x05valu\xff\x2a")

    for change, known in ((of_other_type, False), (nameless, False), (lambda _: None, True)):
        graph = scan(hostile(change, tmp_path)).graph
        assert (graph.constant_head(graph.op.index("Constant")) is not None) == known


@pytest.mark.parametrize("dims", [[1 << 40], [2] * 65])
def test_operands_that_no_one_can_draw_are_a_reason(tmp_path: Path, dims: list[int]) -> None:
    cut = Cut(onnx.ModelProto(), (1,), (2,), ())
    with Worker(30.0) as worker:
        reason = open_bench(worker, cut, {1: "query"}, {1: tuple(dims)}, {})
    assert isinstance(reason, Reason)
    assert reason.code == "operand-too-large"
    assert "leave the axes dynamic" in reason.text


def test_random_bits_flipped(fuse: Fuse, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    content = bytearray(SOURCE.read_bytes())
    for _ in range(40):
        broken = bytearray(content)
        for at in rng.integers(0, len(content), 3):
            broken[at] ^= 1 << int(rng.integers(8))
        (tmp_path / "broken.onnx").write_bytes(broken)
        quick(fuse, tmp_path / "broken.onnx", "-o", tmp_path / "fused.onnx")


def test_a_pipe_is_not_waited_for(fuse: Fuse, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    for arguments in commands(tmp_path / "pipe.onnx", tmp_path):
        document = fuse(*arguments, "--json").document
        assert (document["exit"], document["error"]["code"]) == (1, "not-a-file")
        assert "into a file" in document["error"]["text"]


def test_calls_are_followed_to_the_end() -> None:
    def function(*callees: str) -> onnx.FunctionProto:
        nodes = [helper.make_node(callee, ["x"], ["y"], domain="f") for callee in callees]
        return helper.make_function("f", "any", ["x"], ["y"], nodes, [])

    shared = {("f", "a"): function("b", "c"), ("f", "b"): function("c"), ("f", "c"): function("Exp")}
    calls.check_calls(shared)
    inner = helper.make_graph(list(function("a").node), "g", [], [])
    shared["f", "c"].node.append(helper.make_node("If", ["x"], ["z"], then_branch=inner))
    with pytest.raises(UserError, match="calls itself") as caught:
        calls.check_calls(shared)
    assert caught.value.code == "function-recursive"


def test_an_unexpected_error_of_a_right_model_is_our_bug(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        with explained(path, None):
            raise IndexError("list index out of range")

    with pytest.raises(IndexError):
        fail(SOURCE)
    with pytest.raises(IndexError):
        fail(tmp_path / "nowhere.onnx")


def test_an_unexpected_error_of_a_wrong_model_names_the_fault(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        with explained(path):
            raise IndexError("list index out of range")

    with pytest.raises(UserError, match="Mul") as caught:
        fail(hostile(lambda model: of(model, "Mul")[0].input.append("query"), tmp_path))
    assert caught.value.code == "invalid-onnx"
    assert isinstance(caught.value.__cause__, IndexError)


def test_an_operator_of_a_kernel_is_no_fault_of_a_model(tmp_path: Path) -> None:
    path = hostile(lambda model: setattr(of(model, "Mul")[0], "op_type", "Custom"), tmp_path)
    with pytest.raises(KeyError), explained(path):
        raise KeyError("value")


def test_memory_that_runs_out_is_told() -> None:
    with pytest.raises(UserError, match="larger machine") as caught, explained(SOURCE):
        raise MemoryError
    assert caught.value.code == "out-of-memory"


def test_a_run_that_takes_too_long_is_ended() -> None:
    begin = time.monotonic()
    with pytest.raises(UserError, match="--timeout") as caught, limits.within(0.2):
        time.sleep(20)
    assert caught.value.code == "timeout"
    assert time.monotonic() - begin < 5
    with limits.within(60):
        pass


def test_a_whole_run_has_a_limit(fuse: Fuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafuse.pipeline.find", lambda *_, **__: time.sleep(60))
    document = fuse(SOURCE, "-o", tmp_path / "fused.onnx", "--timeout", "0.5", "--json").document
    assert (document["exit"], document["error"]["code"]) == (1, "timeout")
    assert list(tmp_path.iterdir()) == []


def test_an_alarm_that_comes_first_is_left_alone() -> None:
    import signal

    before, _ = signal.getitimer(signal.ITIMER_REAL)
    with limits.within(5):
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= max(before, 5)
    after, _ = signal.getitimer(signal.ITIMER_REAL)
    assert (after > 0) == (before > 0)
    assert after <= before


def test_each_proof_takes_a_share_of_the_run() -> None:
    assert limits.share(7.0) == 7.0
    with limits.within(4.0):
        assert 1.9 < limits.share(600.0) <= 2.0
        assert limits.share(1.0) == 1.0


ENDLESS = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1] x) => (float[1] y) <int64 trips = {4611686018427387904}, bool go = {1}>
{ y = Loop (trips, go, x) <body = b (int64 i, bool c, float[1] s) => (bool c2, float[1] s2)
    { c2 = Identity(c) s2 = Add(s, s) }> }
"""


def test_an_endless_kernel_is_a_reason() -> None:
    model = onnx.parser.parse_model(ENDLESS).SerializeToString()
    with limits.within(4.0), Worker(600.0) as worker:
        session = worker.load(model)
        for _ in range(2):  # the second takes what the first has left, and the run itself goes on
            reason = worker.run(session, {"x": np.ones(1, np.float32)})
            assert reason.code in ("worker-timeout", "worker-died")


def test_a_site_with_an_endless_kernel_is_refused_with_its_reason(fuse: Fuse, tmp_path: Path) -> None:
    model = graphs.step()
    counts = [helper.make_tensor_value_info("i", 7, []), helper.make_tensor_value_info("c", 9, [])]
    given, result = (helper.make_tensor_value_info(name, 1, []) for name in ("s", "s2"))
    nodes = [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["s"], ["s2"])]
    body = helper.make_graph(nodes, "b", [*counts, given], [helper.make_tensor_value_info("c2", 9, []), result])
    model.graph.initializer.append(helper.make_tensor("trips", TensorProto.INT64, [], [1 << 62]))
    model.graph.initializer.append(helper.make_tensor("go", TensorProto.BOOL, [], [True]))
    at = next(i for i, node in enumerate(model.graph.node) if "scale" in node.input)
    model.graph.node[at].input[1] = "looped"
    model.graph.node.insert(at, helper.make_node("Loop", ["trips", "go", "scale"], ["looped"], body=body))
    path = graphs.save(model, tmp_path)
    document = fuse(path, "-o", tmp_path / "fused.onnx", "--timeout", "6", "--json").document
    assert document["exit"] == 3
    (site,) = document["sites"]
    assert site["reason"]["code"] == "worker-timeout"
    assert "--timeout" in site["reason"]["text"]
    assert not (tmp_path / "fused.onnx").exists()
