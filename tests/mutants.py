"""Mutants: one constant, attribute, operator or edge of a graph changed, or a guard put into an edge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

from graphs import double

#: Operators that take the same operands.
_SWAPS = {"Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "Sqrt": "Exp", "ReduceSum": "ReduceMean"}
_FACTORS = (0.99, 1.5, -1.0, 0.0)

#: Shape and kind of type of values, by name.
Shapes = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Part:
    """The nodes of one scope (main graph, body of a node, function) that may be changed.

    Attributes:
        scope: that holds them.
        places: their places in it.
        shapes: of the values that it names.
    """

    scope: GraphProto | FunctionProto
    places: list[int]
    shapes: Shapes

    def nodes(self) -> list[NodeProto]:
        """The nodes themselves."""
        return [self.scope.node[place] for place in self.places]


Change = Callable[[Part, np.random.Generator], str]


def mutants(
    model: onnx.ModelProto, seed: int, inside: Collection[str] = (), feeds: Mapping[str, np.ndarray] | None = None
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Endless mutants of a model with what was done to each; many of them are no valid models.

    Args:
        inside: values whose nodes may be changed, with their bodies and functions; without, all nodes.
        feeds: one array for each input, for the shapes of values; without, every open size is one.
    """
    rng = np.random.default_rng(seed)
    shapes = _shapes(model, feeds)
    changes: tuple[Change, ...] = (_constant, _constant, _attribute, _operator, _order, _edge, _edge, _guard, _guard)
    while True:
        mutant = onnx.ModelProto()
        mutant.CopyFrom(model)
        parts = _parts(mutant, inside, shapes)
        weights = np.array([len(part.places) for part in parts])
        part = parts[rng.choice(len(parts), p=weights / weights.sum())]
        done = changes[rng.integers(len(changes))](part, rng)
        if done:
            yield done, mutant


def _parts(model: onnx.ModelProto, inside: Collection[str], shapes: Shapes) -> list[Part]:
    """The main graph's nodes inside, and all nodes of their bodies and functions."""
    functions = {(one.domain, one.name): one for one in model.functions}
    parts: list[Part] = []

    def add(scope: GraphProto | FunctionProto, wanted: Collection[str], known: Shapes) -> None:
        places = [i for i, node in enumerate(scope.node) if not wanted or any(name in wanted for name in node.output)]
        if places:
            parts.append(Part(scope, places, known))
        for place in places:
            node = scope.node[place]
            called = functions.pop((node.domain, node.op_type), None)
            if called is not None:
                add(called, (), {})
            for body in (attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH):
                add(body, (), _inferred(body))

    add(model.graph, inside, shapes)
    return parts


def _inferred(body: GraphProto) -> Shapes:
    """What a body itself says of its values: only kinds and static shapes."""
    known = {}
    for info in [*body.input, *body.output, *body.value_info]:
        tensor = info.type.tensor_type
        if tensor.elem_type:
            kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type).kind
            known[info.name] = tuple(dim.dim_value for dim in tensor.shape.dim), kind
    return known


def _shapes(model: onnx.ModelProto, given: Mapping[str, np.ndarray] | None) -> Shapes:
    """Shape and type of each value of the main graph, from one run."""
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
    feeds = {
        i.name: given[i.name] if given else np.full([d if isinstance(d, int) else 1 for d in i.shape], 0.1)
        for i in session.get_inputs()
    }
    arrays = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True)) | feeds
    return {name: (array.shape, array.dtype.kind) for name, array in arrays.items() if isinstance(array, np.ndarray)}


def _pick(rng: np.random.Generator, items: list):
    return items[rng.integers(len(items))] if items else None


def _constant(part: Part, rng: np.random.Generator) -> str:
    nodes = part.nodes()
    tensors: list[tuple[str, TensorProto]] = [
        (node.output[0], attribute.t)
        for node in nodes
        for attribute in node.attribute
        if node.op_type == "Constant" and attribute.type == AttributeProto.TENSOR
    ]
    if isinstance(part.scope, GraphProto):
        read = {name for node in nodes for name in node.input}
        tensors += [(tensor.name, tensor) for tensor in part.scope.initializer if tensor.name in read]
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


def _attribute(part: Part, rng: np.random.Generator) -> str:
    found = [
        (node, attribute)
        for node in part.nodes()
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


def _operator(part: Part, rng: np.random.Generator) -> str:
    node = _pick(rng, [node for node in part.nodes() if node.op_type in _SWAPS])
    if node is None:
        return ""
    old, node.op_type = node.op_type, _SWAPS[node.op_type]
    return f"{old} of {node.output[0]} to {node.op_type}"


def _order(part: Part, rng: np.random.Generator) -> str:
    node = _pick(rng, [node for node in part.nodes() if node.op_type in ("Sub", "Div", "MatMul", "Concat", "Where")])
    if node is None or len(set(node.input)) < 2:
        return ""
    node.input[-1], node.input[-2] = node.input[-2], node.input[-1]
    return f"operands of {node.op_type} {node.output[0]} exchanged"


def _inputs(scope: GraphProto | FunctionProto) -> list[str]:
    return list(scope.input) if isinstance(scope, FunctionProto) else [info.name for info in scope.input]


def _edge(part: Part, rng: np.random.Generator) -> str:
    """Reads another value of the same shape (where shapes are known) written before."""
    place = int(_pick(rng, part.places))
    node = part.scope.node[place]
    earlier = _inputs(part.scope) + [name for other in part.scope.node[:place] for name in other.output]
    slots = [slot for slot, name in enumerate(node.input) if name in earlier]
    slot = _pick(rng, slots)
    if slot is None:
        return ""
    like = part.shapes.get(node.input[slot])
    alike = [name for name in earlier if name not in ("", node.input[slot]) and part.shapes.get(name) == like]
    other = _pick(rng, alike)
    if other is None:
        return ""
    old, node.input[slot] = node.input[slot], other
    return f"{node.op_type} {node.output[0]} reads {other} in place of {old}"


#: Of values in bodies and functions whose kind is not known: operators that take and give floats.
_FLOATS = {"Mul", "Add", "Sub", "Div", "MatMul", "Einsum", "Exp", "ReduceSum", "Sqrt", "Sigmoid", "Gemm", "CumSum"}


def _guard(part: Part, rng: np.random.Generator) -> str:
    """Puts a clamp, a mask or a gate by position into an edge: most of them do nothing to the operands of a proof."""
    place = int(_pick(rng, part.places))
    node = part.scope.node[place]
    known = part.shapes
    slots = [
        slot
        for slot, name in enumerate(node.input)
        if name and (known[name][1] == "f" if name in known else slot == 0 and node.op_type in _FLOATS)
    ]
    slot = _pick(rng, slots)
    if slot is None or node.op_type == "Constant":
        return ""
    value = node.input[slot]
    shape = known[value][0] if value in known and all(known[value][0]) else None
    kind = _pick(rng, ["Clip", "Min", "Max", "mask", *(["position"] if shape is not None else [])])
    bound = float(_pick(rng, [0.7, 50.0, 1e4]))
    numbers = {
        "Clip": (np.float32(-bound), np.float32(bound)), "Min": (np.float32(bound),), "Max": (np.float32(-bound),),
        "mask": (np.float32(-bound), np.float32(0.0)), "position": (_ramp(shape or ()),),
    }[kind]  # fmt: skip
    names = [f"guard_{index}" for index in range(len(numbers))]
    made = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(number), name))
        for name, number in zip(names, numbers, strict=True)
    ]
    if kind == "mask":
        made += [
            helper.make_node("Greater", [value, names[0]], ["guard_kept"]),
            helper.make_node("Where", ["guard_kept", value, names[1]], ["guarded"]),
        ]
    else:
        made.append(helper.make_node("Mul" if kind == "position" else kind, [value, *names], ["guarded"]))
    node.input[slot] = "guarded"
    for new in reversed(made):
        part.scope.node.insert(place, new)
    return f"{kind} at {bound} before {node.op_type} {node.output[0]} on {value}"


def _ramp(shape: tuple[int, ...]) -> np.ndarray:
    """A factor that differs at the last place of the longest axis."""
    factor = np.ones(shape, np.float32)
    if shape:
        np.moveaxis(factor, int(np.argmax(shape)), 0)[-1] = 0.5
    return factor
