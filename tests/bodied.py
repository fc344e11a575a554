"""The step of the rule inside the bodies of If, Loop and Scan, among other things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

import graphs

Array = npt.NDArray[Any]
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL

#: What the step reads and writes.
OPERANDS = ("query", "key", "value", "g", "beta", "state")
_SHAPES = {"query": (1, 1, 4, 5), "key": (1, 1, 4, 5), "value": (1, 1, 4, 3), "g": (1, 1, 4), "beta": (1, 1, 4),
           "state": (1, 4, 5, 3), "out": (1, 1, 4, 3), "final_state": (1, 4, 5, 3)}  # fmt: skip


def info(name: str, shape: Sequence[int | str] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    """A declared value."""
    return helper.make_tensor_value_info(name, dtype, shape)


def infos(*names: str) -> list[onnx.ValueInfoProto]:
    """Declared operands and results of the step."""
    return [info(name, _SHAPES[name]) for name in names]


def constant(name: str, array: Any) -> onnx.TensorProto:
    """An initializer."""
    return numpy_helper.from_array(np.asarray(array), name)


def whole(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
) -> onnx.ModelProto:
    """A checked model."""
    graph = helper.make_graph(list(nodes), "main", list(inputs), list(outputs), list(constants))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def step_nodes(step: onnx.ModelProto | None = None, suffix: str = "") -> list[onnx.NodeProto]:
    """The step's nodes; inner values have a suffix."""
    kept = {*OPERANDS, *(tensor.name for tensor in (step or graphs.step()).graph.initializer)}
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (step or graphs.step()).graph.node]
    for node in nodes:
        node.input[:] = [name if name in kept else name + suffix for name in node.input]
        node.output[:] = [name + suffix for name in node.output]
    return nodes


def constants(step: onnx.ModelProto | None = None) -> list[onnx.TensorProto]:
    """The step's constants."""
    return list((step or graphs.step()).graph.initializer)


def chosen(step: onnx.ModelProto | None = None, *, inside: bool = False, opset: int = 17) -> onnx.ModelProto:
    """An If: the step, or the value for out and the state as it was.

    Args:
        step: see `graphs.step`.
        inside: its constants lie inside the branch, not in the main graph.
        opset: of the file.
    """
    own = constants(step)
    then = helper.make_graph(step_nodes(step), "then", [], infos("out", "final_state"), own if inside else [])
    other = helper.make_graph(
        [helper.make_node("Identity", ["value"], ["kept"]), helper.make_node("Identity", ["state"], ["same"])],
        "else", [], [info("kept", _SHAPES["value"]), info("same", _SHAPES["state"])],
    )  # fmt: skip
    node = helper.make_node("If", ["active"], ["o", "s"], name="choice", then_branch=then, else_branch=other)
    tail = helper.make_node("Tanh", ["o"], ["y"])
    outputs = [info("y", _SHAPES["out"]), info("s", _SHAPES["state"])]
    given = [*infos(*OPERANDS), info("active", (), BOOL)]
    return whole([node, tail], given, outputs, [] if inside else own, opset)


def decoding(step: onnx.ModelProto | None = None, *extra: onnx.NodeProto, declared: bool = True) -> onnx.ModelProto:
    """A Loop over decode steps that carries the state; each step has a Tanh in front of the query and behind the rule.

    Args:
        step: see `graphs.step`.
        extra: further nodes of the body, in front of the rule.
        declared: whether the body says how large the state is.
    """
    take = [
        helper.make_node("Gather", [f"all_{name}", "i"], [f"one_{name}"], axis=0)
        for name in ("query", "key", "value", "g", "beta")
    ]
    prepared = [helper.make_node("Tanh", ["one_query"], ["turned"])]
    names = {"query": "turned", "state": "state"} | {name: f"one_{name}" for name in ("key", "value", "g", "beta")}
    nodes = step_nodes(step)
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
    written = {name for node in extra for name in node.output}
    for node in nodes if "g" in written else ():
        node.input[:] = ["g" if name == "one_g" else name for name in node.input]
    end = [helper.make_node("Tanh", ["out"], ["y"]), helper.make_node("Identity", ["go"], ["on"])]
    body = helper.make_graph(
        [*take, *prepared, *extra, *nodes, *end], "step",
        [info("i", (), INT), info("go", (), BOOL), info("state", _SHAPES["state"] if declared else None)],
        [info("on", (), BOOL), info("final_state", None), info("y", None)],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["steps", "always", "first"], ["end", "ys"], name="decode", body=body)
    given = [info(f"all_{name}", ("n", *_SHAPES[name])) for name in ("query", "key", "value", "g", "beta")]
    given += [info("steps", (), INT), info("first", _SHAPES["state"])]
    outputs = [info("end", _SHAPES["state"]), info("ys", ("n", *_SHAPES["out"]))]
    return whole([loop], given, outputs, [*constants(step), constant("always", np.array(True))])


def layered() -> onnx.ModelProto:
    """A Loop over layers: weights that the layer's number takes from stacks project x to all operands."""
    sizes = {"query": 20, "key": 20, "value": 12, "g": 4, "beta": 4}
    rng = np.random.default_rng(0)
    stacks = {name: rng.normal(size=(3, 8, size)) / 8 for name, size in sizes.items()}
    stacks["out"] = rng.normal(size=(3, 12, 8)) / 4
    weights = [constant(f"w_{name}", stack.astype(np.float32)) for name, stack in stacks.items()]
    nodes = [helper.make_node("Gather", [f"w_{name}", "i"], [f"own_{name}"], axis=0) for name in stacks]
    shapes: list[onnx.TensorProto] = []
    for name in sizes:
        end = {"g": ["Sigmoid", "Neg"], "beta": ["Sigmoid"]}.get(name, [])
        flat = [f"flat_{name}", *(f"{op}_{name}" for op in end)]
        nodes.append(helper.make_node("MatMul", ["x", f"own_{name}"], [flat[0]]))
        nodes += [helper.make_node(op, [a], [b]) for op, a, b in zip(end, flat[:-1], flat[1:], strict=True)]
        nodes.append(helper.make_node("Reshape", [flat[-1], f"to_{name}"], [name]))
        shapes.append(constant(f"to_{name}", np.array(_SHAPES[name], np.int64)))
    nodes.append(helper.make_node("Gather", ["states", "i"], ["state"], axis=0))
    nodes += step_nodes()
    nodes += [
        helper.make_node("Reshape", ["out", "to_x"], ["mixed"]),
        helper.make_node("MatMul", ["mixed", "own_out"], ["change"]),
        helper.make_node("Add", ["x", "change"], ["next"]),
        helper.make_node("Identity", ["go"], ["on"]),
    ]
    body = helper.make_graph(
        nodes, "layer", [info("i", (), INT), info("go", (), BOOL), info("x", (1, 1, 8))],
        [info("on", (), BOOL), info("next", (1, 1, 8)), info("final_state", _SHAPES["state"])],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["layers", "always", "hidden"], ["y", "new_states"], name="layers", body=body)
    numbers = {"to_x": np.array([1, 1, 12]), "layers": np.array(3), "always": np.array(True)}
    own = [*constants(), *weights, *shapes, *(constant(name, number) for name, number in numbers.items())]
    given = [info("hidden", (1, 1, 8)), info("states", (3, *_SHAPES["state"]))]
    return whole([loop], given, [info("y", (1, 1, 8)), info("new_states", (3, *_SHAPES["state"]))], own)


def feeds(model: onnx.ModelProto, seed: int = 0, **given: Array) -> dict[str, Array]:
    """Inputs as a rule has them: decays below zero, three steps where a number of them is asked for."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [dim.dim_value or 3 for dim in value.type.tensor_type.shape.dim]
        name = value.name.removeprefix("all_")
        array = rng.normal(size=shape).astype(np.float32)
        if name.startswith("g"):
            array = -np.abs(array) / 4
        elif name == "beta":
            array = 1 / (1 + np.exp(-array))
        elif value.type.tensor_type.elem_type != FLOAT:
            array = np.array(True) if name == "active" else np.array(3, np.int64)
        found[value.name] = array
    return {**found, **given}


def enclosed(model: onnx.ModelProto, op: str) -> onnx.ModelProto:
    """A whole graph as the branch of an If, or as the body of a Loop; its constants and inputs stay outside.

    Args:
        model: of any graph.
        op: ``If`` (the input ``active`` chooses; the other branch gives zeros) or ``Loop`` (a single step).
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    del graph.node[:], graph.output[:], graph.value_info[:]
    inner = helper.make_graph(list(model.graph.node), "inner", [], list(model.graph.output))
    inner.value_info.extend(model.graph.value_info)
    names = [f"main.{value.name}" for value in model.graph.output]
    types = [value.type.tensor_type.elem_type for value in model.graph.output]
    if op == "If":
        zeros = [numpy_helper.from_array(np.zeros((), helper.tensor_dtype_to_np_dtype(dtype))) for dtype in types]
        nodes = [helper.make_node("Constant", [], [f"zero.{n}"], value=zero) for n, zero in enumerate(zeros)]
        other = helper.make_graph(nodes, "other", [], [info(f"zero.{n}", None, one) for n, one in enumerate(types)])
        node = helper.make_node("If", ["active"], names, name="around", then_branch=inner, else_branch=other)
        graph.input.append(info("active", (), BOOL))
    else:
        inner.node.append(helper.make_node("Identity", ["go.on"], ["go.next"]))
        inner.input.extend([info("number", (), INT), info("go.on", (), BOOL)])
        inner.output.insert(0, info("go.next", (), BOOL))
        node = helper.make_node("Loop", ["rounds", ""], names, name="around", body=inner)
        graph.initializer.append(constant("rounds", np.array(1)))
    graph.node.append(node)
    graph.output.extend(info(name, None, dtype) for name, dtype in zip(names, types, strict=True))
    return result


def scanning() -> onnx.ModelProto:
    """A Scan over decode steps: each projects a row of x to all operands by weights of the main graph."""
    model = layered()
    loop = model.graph.node[0]
    body = loop.attribute[0].g
    gone = {"state", "on", *(node.output[0] for node in body.node if node.output[0].startswith("own_"))}
    nodes = [node for node in body.node if node.output[0] not in gone]
    for node in nodes:
        node.input[:] = [f"w_{name[4:]}" if name.startswith("own_") else name for name in node.input]
    weights = [tensor for tensor in model.graph.initializer if tensor.name.startswith("w_")]
    others = [tensor for tensor in model.graph.initializer if tensor.name[:2] != "w_"]
    firsts = [constant(tensor.name, numpy_helper.to_array(tensor)[0]) for tensor in weights]
    step = helper.make_graph(
        nodes, "step", [info("state", _SHAPES["state"]), info("x", (1, 1, 8))],
        [info("final_state", _SHAPES["state"]), info("next", (1, 1, 8))],
    )  # fmt: skip
    scan = helper.make_node("Scan", ["first", "rows"], ["end", "ys"], name="steps", body=step, num_scan_inputs=1)
    given = [info("first", _SHAPES["state"]), info("rows", ("n", 1, 1, 8))]
    return whole([scan], given, [info("end", _SHAPES["state"]), info("ys", ("n", 1, 1, 8))], [*others, *firsts])
