"""Pinning: every declared dim of an axis gets its size, whatever its symbol, and nothing else moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx.parser
import pytest
import torch

from deltafuse.dims import symbol
from deltafuse.pin_sizes import Seed
from deltafuse.pinning import PinPlan, pin
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.wire import scan
from exports import export

Declared = dict[str, list[str | int]]


def model_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18, "other" : 1]> g {text}')


def engine_of(model: onnx.ModelProto, folder: Path) -> Shapes:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return Shapes(scan(path))


def value_of(shapes: Shapes, name: str) -> int:
    value = shapes.graph.find(name)
    assert value is not None
    return value


def pinned(
    model: onnx.ModelProto,
    folder: Path,
    seeds: Sequence[tuple[str, int, int]],
    extra: Mapping[str, int] | None = None,
    dead: Sequence[int] = (),
) -> PinPlan | Reason:
    shapes = engine_of(model, folder)
    return pin(shapes.graph, shapes, [Seed(value_of(shapes, name), *rest) for name, *rest in seeds], dead, extra)


def plan_of(
    model: onnx.ModelProto, folder: Path, seeds: Sequence[tuple[str, int, int]], extra: Mapping[str, int] | None = None
) -> PinPlan:
    plan = pinned(model, folder, seeds, extra)
    assert isinstance(plan, PinPlan), plan
    return plan


def reason_of(
    model: onnx.ModelProto, folder: Path, seeds: Sequence[tuple[str, int, int]], extra: Mapping[str, int] | None = None
) -> str:
    reason = pinned(model, folder, seeds, extra)
    assert isinstance(reason, Reason), reason
    assert reason.text
    return reason.code


def dims_of(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim]


def after(model: onnx.ModelProto, plan: PinPlan) -> Declared:
    """What inputs and outputs declare once the plan is carried out."""
    graph = model.graph
    new = {value.name: value for _, value in plan.retyped}
    return {value.name: dims_of(new.get(value.name, value)) for value in (*graph.input, *graph.output)}


def changed(plan: PinPlan) -> Declared:
    return {value.name: dims_of(value) for _, value in plan.retyped}


PREFILL_BEFORE: Declared = {
    "input_ids": ["batch", "seq_len"],
    "attention_mask": ["batch", "seq_len"],
    "position_ids": [4, "batch", "seq_len"],
    "logits": ["batch", "seq_len", 64],
    "present_kv_cache": [2, "batch", 1, "seq_len", 32],
}
PREFILL_AFTER: Declared = {
    "input_ids": [1, "seq_len"],
    "attention_mask": [1, "seq_len"],
    "position_ids": [4, 1, "seq_len"],
    "logits": [1, "seq_len", 64],
    "present_conv_states": [3, 1, 128, 4],
    "present_recurrent_states": [3, 1, 4, 16, 16],
    "present_kv_cache": [2, 1, 1, "seq_len", 32],
}
DECODE_AFTER: Declared = {
    "input_ids": [1, 1],
    "attention_mask": [1, "total_seq_len"],
    "position_ids": [4, 1, 1],
    "past_conv_states": [3, 1, 128, 4],
    "past_recurrent_states": [3, 1, 4, 16, 16],
    "past_kv_cache": [2, 1, 1, "past_seq_len", 32],
    "logits": [1, 1, 64],
    "present_conv_states": [3, 1, 128, 4],
    "present_recurrent_states": [3, 1, 4, 16, 16],
    "present_kv_cache": [2, 1, 1, "total_seq_len", 32],
}


def decay_of(shapes: Shapes) -> int:
    """A value of the first site with its batch first and its tokens second: what Softplus writes."""
    graph = shapes.graph
    return next(graph.node_outputs[node][0] for node, op in enumerate(graph.op) if op == "Softplus")


@pytest.mark.parametrize(
    ("name", "axes", "expected"),
    [("full_prefill_ts17", (0,), PREFILL_AFTER), ("full_decode_ts17", (0, 1), DECODE_AFTER)],
)
def test_dynamic_axes_of_a_torchscript_export(name: str, axes: tuple[int, ...], expected: Declared) -> None:
    path = export(name).path
    model, shapes = onnx.load(path), Shapes(scan(path))
    before = after(model, PinPlan((), (), {}))
    assert all(before[value] == dims for value, dims in PREFILL_BEFORE.items() if "prefill" in name)
    plan = pin(shapes.graph, shapes, [Seed(decay_of(shapes), axis, 1) for axis in axes])
    assert isinstance(plan, PinPlan)
    assert after(model, plan) == expected
    listed = {(axis.value, axis.axis): axis.now for axis in plan.pinned}
    assert listed == {
        (value, axis): dim
        for value, dims in expected.items()
        for axis, dim in enumerate(dims)
        if dim != before[value][axis]
    }


def test_all_symbols_of_one_batch_in_a_transformers_export() -> None:
    path = export("full_decode_transformers").path
    model, shapes = onnx.load(path), Shapes(scan(path))
    plan = pin(shapes.graph, shapes, [Seed(decay_of(shapes), 0, 1)])
    assert isinstance(plan, PinPlan)
    assert plan.bindings == {"s17": 1, "s43": 1}
    found = after(model, plan)
    assert found["input_ids"] == [1, 1]
    assert found["attention_mask"] == [1, "s53"]
    assert found["input.cache.layers.3.keys"] == [1, 1, "s12", "32"]
    assert found["output.cache.layers.3.keys"] == [1, 1, "s12 + 1", 32]
    declared = [dim for _, value in plan.retyped for dim in dims_of(value) if isinstance(dim, str)]
    assert not [dim for dim in declared if "s17" in dim or "s43" in dim]
    known = {value.name: value for value in model.graph.value_info}
    inner = [value for value in known.values() if "4*s17" in dims_of(value)]
    assert inner
    changes = changed(plan)
    assert all(changes[value.name][dims_of(value).index("4*s17")] == 4 for value in inner)


SEVERAL = """(float[s17, t, 8] x, float[s43, t, 8] y, float[4, s9, t] ids, float[s17, 1] free) =>
    (float[MatMula_dim_0, u, 8] a, float[c0, c1] c, float[s17, 1] d)
    <float[s43, t, 8] sum, float[product, k] flat> {
    sum = Add(x, y)
    two = Constant <value_ints = [2]> ()
    mean = ReduceSum <keepdims = 0> (sum, two)
    i = Constant <value_int = 1> ()
    id = Gather <axis = 0> (ids, i)
    with = Add(mean, id)
    back = Unsqueeze(with, two)
    a = Add(sum, back)
    shape = Constant <value_ints = [-1, 2]> ()
    one = ReduceMean <keepdims = 0> (x, one_axis)
    one_axis = Constant <value_ints = [1]> ()
    flat = Reshape(one, shape)
    c = Exp(flat)
    d = Neg(free)
}"""


def _sorted(model: onnx.ModelProto) -> onnx.ModelProto:
    nodes = sorted(model.graph.node, key=lambda node: node.op_type != "Constant")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def test_axes_are_pinned_and_not_names(tmp_path: Path) -> None:
    model = _sorted(model_of(SEVERAL))
    flat = next(value for value in model.graph.value_info if value.name == "flat")
    flat.type.tensor_type.shape.dim[0].dim_param = "4*s17"
    plan = plan_of(model, tmp_path, [("y", 0, 1)])
    assert after(model, plan) == {
        "x": [1, "t", 8],
        "y": [1, "t", 8],
        "ids": [4, 1, "t"],
        "free": [1, 1],
        "a": [1, "u", 8],
        "c": [4, 2],
        "d": [1, 1],
    }
    assert changed(plan)["sum"] == [1, "t", 8]
    assert changed(plan)["flat"] == [4, "k"]
    assert plan.bindings == {"s17": 1, "s43": 1, "s9": 1}
    assert [(axis.value, axis.axis, axis.was, axis.now) for axis in plan.pinned] == [
        ("x", 0, "s17", 1),
        ("y", 0, "s43", 1),
        ("ids", 1, "s9", 1),
        ("free", 0, "s17", 1),
        ("a", 0, "MatMula_dim_0", 1),
        ("c", 0, "c0", 4),
        ("c", 1, "c1", 2),
        ("d", 0, "s17", 1),
    ]


def test_an_axis_that_has_its_size_already_moves_nothing(tmp_path: Path) -> None:
    model = model_of("(float[1, t] x) => (float[Expy_dim_0, t] y) { y = Exp(x) }")
    assert plan_of(model, tmp_path, [("x", 0, 1)]) == PinPlan((), (), {})


def test_products_are_rewritten_and_others_stay_to_the_byte(tmp_path: Path) -> None:
    text = """(float[s17, s53, 8] x) => (float[n, 8] y, float[s53, s17] w)
        <float["s17*s53", 8] flat, float[s53] alone> {
        i = Constant <value_ints = [-1, 8]> ()
        flat = Reshape(x, i)
        y = Exp(flat)
        w = other.Thing(x)
        alone = other.Thing(w)
    }"""
    model = model_of(text.replace('"s17*s53"', "product"))
    for value in model.graph.value_info:
        if value.name == "flat":
            value.type.tensor_type.shape.dim[0].dim_param = "s17*s53"
        value.doc_string = "kept"
        value.metadata_props.add(key="pkg.torch.onnx", value="kept too")
    plan = plan_of(model, tmp_path, [("x", 0, 1)])
    assert changed(plan) == {"x": [1, "s53", 8], "flat": ["s53", 8], "w": ["s53", 1]}
    flat = next(value for _, value in plan.retyped if value.name == "flat")
    assert flat.doc_string == "kept"
    assert [(entry.key, entry.value) for entry in flat.metadata_props] == [("pkg.torch.onnx", "kept too")]
    expected = onnx.ValueInfoProto()
    expected.CopyFrom(model.graph.value_info[0])
    expected.type.tensor_type.shape.dim[0].dim_param = "s53"
    assert flat == expected


DECODE = """(float[b, past, 8] cache, float[b, step, 8] key, float[b, total] mask) =>
    (float[b, total, 8] out, float[b, Reduce_dim_1] sums) {
    i = Constant <value_ints = [2]> ()
    out = Concat <axis = 1> (cache, key)
    sum = ReduceSum <keepdims = 0> (out, i)
    sums = Add(sum, mask)
}"""


def test_tied_lengths_stay_dynamic(tmp_path: Path) -> None:
    model = model_of(DECODE)
    plan = plan_of(model, tmp_path, [("key", 0, 1), ("key", 1, 1)])
    assert after(model, plan) == {
        "cache": [1, "past", 8],
        "key": [1, 1, 8],
        "mask": [1, "total"],
        "out": [1, "total", 8],
        "sums": [1, "Reduce_dim_1"],
    }


def test_an_unnamed_input_axis_is_pinned_too(tmp_path: Path) -> None:
    model = model_of("(float[b, t] x, float[q, t] z) => (float[r, t] y) { y = Add(x, z) }")
    model.graph.input[1].type.tensor_type.shape.dim[0].Clear()
    plan = plan_of(model, tmp_path, [("x", 0, 1)])
    assert after(model, plan) == {"x": [1, "t"], "z": [1, "t"], "y": [1, "t"]}
    assert plan.pinned[1].was == "?"


def test_a_wrong_name_on_an_output_is_left_alone(tmp_path: Path) -> None:
    model = model_of("(float[b, t] x) => (float[b, b] y) { y = Exp(x) }")
    plan = plan_of(model, tmp_path, [("x", 0, 1)])
    assert after(model, plan) == {"x": [1, "t"], "y": [1, "b"]}


def test_a_mask_that_is_indexed_by_a_range_of_the_batch(tmp_path: Path) -> None:
    text = """(float[s17, t] x, float[s43, s53] mask) => (float[p, q] y) {
        zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        rows_at = Constant <value_ints = [1, 2]> ()
        columns_at = Constant <value_ints = [0, 2]> ()
        nought = Constant <value_ints = [0]> ()
        first = Shape <start = 0, end = 1> (x)
        b = Squeeze(first, nought)
        rows = Range(zero, b, one)
        columns = Range(zero, one, one)
        r = Unsqueeze(rows, rows_at)
        c = Unsqueeze(columns, columns_at)
        both = Max(r, c)
        wide = Shape(both)
        rr = Expand(r, wide)
        cc = Expand(c, wide)
        index = Concat <axis = -1> (rr, cc)
        picked = GatherND(mask, index)
        y = Add(picked, x)
    }"""
    model = model_of(text)
    plan = plan_of(model, tmp_path, [("x", 0, 1)])
    assert after(model, plan) == {"x": [1, "t"], "mask": [1, "s53"], "y": [1, "q"]}


def test_removed_nodes_say_nothing(tmp_path: Path) -> None:
    text = """(float[b, 8] x, float[4, 8] z) => (float[b, 8] y) <float[b, 8] inner, float[b, 8] out> {
        inner = Add(x, z)
        out = Exp(inner)
        y = Exp(out)
    }"""
    model = model_of(text)
    assert reason_of(model, tmp_path, [("x", 0, 1)]) == "pin-bound"
    shapes = engine_of(model, tmp_path)
    shapes.define(value_of(shapes, "out"), (symbol("b"), 8), onnx.TensorProto.FLOAT)
    plan = pin(shapes.graph, shapes, [Seed(value_of(shapes, "x"), 0, 1)], {0, 1})
    assert isinstance(plan, PinPlan)
    assert changed(plan) == {"x": [1, 8], "out": [1, 8], "y": [1, 8]}


def test_a_users_own_pins(tmp_path: Path) -> None:
    model = model_of(DECODE)
    plan = plan_of(model, tmp_path, [("key", 0, 1)], {"past": 32, "step": 2})
    assert after(model, plan)["cache"] == [1, 32, 8]
    assert after(model, plan)["out"] == [1, 34, 8]
    assert after(model, plan)["sums"] == [1, 34]
    assert after(model, plan)["mask"] == [1, 34]
    assert plan.bindings == {"b": 1, "past": 32, "step": 2, "total": 34}


def test_reasons(tmp_path: Path) -> None:
    static = model_of("(float[4, t] x) => (float[4, t] y) { y = Exp(x) }")
    assert reason_of(static, tmp_path, [("x", 0, 1)]) == "pin-static"
    joined = model_of("(float[b, t] x, float[4, t] z) => (float[b, t] y) { y = Add(x, z) }")
    assert reason_of(joined, tmp_path, [("x", 0, 1)]) == "pin-bound"
    both = model_of("(float[b, t] x, float[d, t] z) => (float[b, t] y) { y = Add(x, z) }")
    assert reason_of(both, tmp_path, [("x", 0, 1), ("z", 0, 2)]) == "pin-disagree"
    assert reason_of(both, tmp_path, [("x", 0, 1)], {"d": 2}) == "pin-disagree"
    assert reason_of(both, tmp_path, [("x", 0, 1)], {"unheard": 2}) == "pin-unknown-symbol"
    merged = model_of("(float[b, t] x) => (float[n] y) { i = Constant <value_ints = [-1]> () y = Reshape(x, i) }")
    assert reason_of(merged, tmp_path, [("y", 0, 6)]) == "pin-expression"
    unknown = model_of("(float[b, t] x) => (float[n] y) { z = other.Thing(x) y = Exp(z) }")
    assert reason_of(unknown, tmp_path, [("z", 0, 1)]) == "pin-shape-unknown"
    summed = model_of(
        "(float[b, 8] x, float[s, 8] z, float[5, 8] w) => (float[5, 8] y)"
        " { c = Concat <axis = 0> (x, z) y = Add(c, w) }"
    )
    assert reason_of(summed, tmp_path, [("x", 0, 1)], {"s": 1}) == "pin-contradiction"


def test_a_product_of_one_fixes_all_its_factors(tmp_path: Path) -> None:
    merged = model_of("(float[b, t] x) => (float[n] y) { i = Constant <value_ints = [-1]> () y = Reshape(x, i) }")
    assert plan_of(merged, tmp_path, [("y", 0, 1)]).bindings == {"b": 1, "t": 1}


class _Step(torch.nn.Module):
    """A cache that grows, a mask over it, a state of several layers."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, cache: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        keys = torch.cat([cache[0], x], dim=1)
        scores = torch.matmul(x, keys.transpose(1, 2)) + mask[:, None, :]
        out = torch.matmul(torch.softmax(scores, dim=-1), keys)
        state = states[1] * torch.sigmoid(out.mean(dim=1))[:, :, None]
        return out, torch.stack([keys]), torch.stack([states[0], state])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_export_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    inputs = (torch.ones(2, 1, 8), torch.zeros(2, 6), torch.ones(1, 2, 5, 8), torch.ones(2, 2, 8, 3))
    torch.onnx.export(
        _Step(),
        inputs,
        str(path),
        dynamo=False,
        opset_version=17,
        input_names=["x", "mask", "cache", "states"],
        output_names=["out", "present", "new_states"],
        dynamic_axes={
            "x": {0: "batch", 1: "step"},
            "mask": {0: "batch", 1: "total"},
            "cache": {1: "batch", 2: "past"},
            "states": {1: "batch"},
            "out": {0: "batch", 1: "step"},
            "present": {1: "batch", 2: "total"},
            "new_states": {1: "batch"},
        },
    )
    model, shapes = onnx.load(path), Shapes(scan(path))
    graph = shapes.graph
    gate = next(graph.node_outputs[node][0] for node, op in enumerate(graph.op) if op == "Sigmoid")
    plan = pin(graph, shapes, [Seed(gate, 0, 1), Seed(value_of(shapes, "x"), 1, 1)])
    assert isinstance(plan, PinPlan)
    assert after(model, plan) == {
        "x": [1, 1, 8],
        "mask": [1, "total"],
        "cache": [1, 1, "past", 8],
        "states": [2, 1, 8, 3],
        "out": [1, 1, 8],
        "present": [1, 1, "total", 8],
        "new_states": [2, 1, 8, 3],
    }
