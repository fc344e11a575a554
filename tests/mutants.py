"""Mutants: one constant, attribute, operator or edge of a graph changed, or a guard put into an edge."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, helper, numpy_helper

from graphs import double

#: Operators that take the same operands.
_SWAPS = {"Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "Sqrt": "Exp", "ReduceSum": "ReduceMean"}
_FACTORS = (0.99, 1.5, -1.0, 0.0)


def mutants(model: onnx.ModelProto, seed: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Endless mutants of a model with what was done to each; many of them are no valid models."""
    rng = np.random.default_rng(seed)
    shapes = _shapes(model)
    changes = (_constant, _constant, _attribute, _operator, _order, _edge, _edge, _guard, _guard)
    while True:
        mutant = onnx.ModelProto()
        mutant.CopyFrom(model)
        done = changes[rng.integers(len(changes))](mutant.graph, rng, shapes)
        if done:
            yield done, mutant


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of each value, from one run."""
    every = onnx.ModelProto()
    every.CopyFrom(model)
    known = {info.name for info in model.graph.output}
    every.graph.output.extend(
        onnx.ValueInfoProto(name=name)
        for node in model.graph.node
        for name in node.output
        if name and name not in known
    )
    session = double(every)
    feeds = {i.name: np.full([d if isinstance(d, int) else 1 for d in i.shape], 0.1) for i in session.get_inputs()}
    arrays = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True)) | feeds
    return {name: (array.shape, array.dtype.kind) for name, array in arrays.items()}


def _pick(rng: np.random.Generator, items: list):
    return items[rng.integers(len(items))] if items else None


def _constant(graph: onnx.GraphProto, rng: np.random.Generator, _: object) -> str:
    tensors = [(tensor.name, tensor) for tensor in graph.initializer]
    tensors += [
        (node.output[0], attribute.t)
        for node in graph.node
        for attribute in node.attribute
        if node.op_type == "Constant" and attribute.type == AttributeProto.TENSOR
    ]
    chosen = _pick(rng, tensors)
    if chosen is None:
        return ""
    name, tensor = chosen
    array = numpy_helper.to_array(tensor).copy()
    if array.size == 0 or array.dtype == bool:
        return ""
    index = tuple(rng.integers(n) for n in array.shape)
    before = array[index]
    if array.dtype.kind == "f":
        array[index] = before * _pick(rng, list(_FACTORS)) if before else 1.0
    else:
        array[index] = before + _pick(rng, [-1, 1])
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"constant {name}{index} {before} to {array[index]}" if before != array[index] else ""


def _attribute(graph: onnx.GraphProto, rng: np.random.Generator, _: object) -> str:
    found = [
        (node, attribute)
        for node in graph.node
        for attribute in node.attribute
        if (attribute.name == "perm" and len(attribute.ints) > 1)
        or attribute.name in ("axis", "keepdims", "upper", "reverse", "exclusive", "reduction")
    ]
    chosen = _pick(rng, found)
    if chosen is None:
        return ""
    node, attribute = chosen
    if attribute.name == "perm":
        a, b = rng.choice(len(attribute.ints), 2, replace=False)
        perm = list(attribute.ints)
        perm[a], perm[b] = perm[b], perm[a]
        attribute.ints[:] = perm
    elif attribute.name == "axis":
        attribute.i += _pick(rng, [-1, 1])
    elif attribute.name == "reduction":
        attribute.s = b"add" if attribute.s == b"none" else b"none"
    else:
        attribute.i = 1 - attribute.i
    return f"{attribute.name} of {node.op_type} to {list(attribute.ints) or attribute.i}"


def _operator(graph: onnx.GraphProto, rng: np.random.Generator, _: object) -> str:
    node = _pick(rng, [node for node in graph.node if node.op_type in _SWAPS])
    if node is None:
        return ""
    old, node.op_type = node.op_type, _SWAPS[node.op_type]
    return f"{old} of {node.output[0]} to {node.op_type}"


def _order(graph: onnx.GraphProto, rng: np.random.Generator, _: object) -> str:
    node = _pick(rng, [node for node in graph.node if node.op_type in ("Sub", "Div", "MatMul", "Concat", "Where")])
    if node is None or len(set(node.input)) < 2:
        return ""
    node.input[-1], node.input[-2] = node.input[-2], node.input[-1]
    return f"operands of {node.op_type} {node.output[0]} exchanged"


def _edge(graph: onnx.GraphProto, rng: np.random.Generator, shapes: dict[str, tuple[tuple[int, ...], str]]) -> str:
    """Reads another value of the same shape (or one that broadcasts the same) written before."""
    place = int(rng.integers(len(graph.node)))
    node: NodeProto = graph.node[place]
    slots = [slot for slot, name in enumerate(node.input) if name in shapes]
    slot = _pick(rng, slots)
    if slot is None:
        return ""
    earlier = [info.name for info in graph.input] + [name for other in graph.node[:place] for name in other.output]
    alike = [name for name in earlier if name != node.input[slot] and shapes.get(name) == shapes[node.input[slot]]]
    other = _pick(rng, alike)
    if other is None:
        return ""
    old, node.input[slot] = node.input[slot], other
    return f"{node.op_type} {node.output[0]} reads {other} in place of {old}"


def _guard(graph: onnx.GraphProto, rng: np.random.Generator, shapes: dict[str, tuple[tuple[int, ...], str]]) -> str:
    """Puts a clamp, a mask or a gate by position into an edge: most of them do nothing to the operands of a proof."""
    place = int(rng.integers(len(graph.node)))
    node: NodeProto = graph.node[place]
    slots = [slot for slot, name in enumerate(node.input) if shapes.get(name, ((), ""))[1] == "f"]
    slot = _pick(rng, slots)
    if slot is None or node.op_type == "Constant":
        return ""
    value, shape = node.input[slot], shapes[node.input[slot]][0]
    kind = _pick(rng, ["Clip", "Min", "Max", "mask", "position"])
    bound = float(_pick(rng, [0.7, 50.0, 1e4]))
    numbers = {
        "Clip": (np.float32(-bound), np.float32(bound)), "Min": (np.float32(bound),), "Max": (np.float32(-bound),),
        "mask": (np.float32(-bound), np.float32(0.0)), "position": (_ramp(shape),),
    }[kind]  # fmt: skip
    names = [f"guard_{index}" for index in range(len(numbers))]
    graph.initializer.extend(numpy_helper.from_array(np.array(x), n) for x, n in zip(numbers, names, strict=True))
    if kind == "mask":
        made = [
            helper.make_node("Greater", [value, names[0]], ["guard_kept"]),
            helper.make_node("Where", ["guard_kept", value, names[1]], ["guarded"]),
        ]
    else:
        made = [helper.make_node("Mul" if kind == "position" else kind, [value, *names], ["guarded"])]
    node.input[slot] = "guarded"
    for new in reversed(made):
        graph.node.insert(place, new)
    return f"{kind} at {bound} before {node.op_type} {node.output[0]} on {value}"


def _ramp(shape: tuple[int, ...]) -> np.ndarray:
    """A factor that differs at the last place of the longest axis."""
    factor = np.ones(shape, np.float32)
    if shape:
        np.moveaxis(factor, int(np.argmax(shape)), 0)[-1] = 0.5
    return factor
