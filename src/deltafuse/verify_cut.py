"""The two sides of a site as stand-alone models: the fused region, and what the unfused file computes in its place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import onnx
from onnx import AttributeProto

from deltafuse.classes import Kind, classify
from deltafuse.dim_algebra import exact_quotient
from deltafuse.dims import Dim, parse, symbols
from deltafuse.fused import key_dim, result_tokens
from deltafuse.graph import Graph
from deltafuse.probe import cut_model
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.verify_feeds import Input, Part, parts
from deltafuse.verify_regions import Region, marked, reads, rule_of
from deltafuse.wire import Model

TEXTS.update(
    {
        "verify-type-unknown": "size or element type of {value} is not known, so the site cannot be run; run onnx "
        "shape inference on both files first",
        "verify-reads-more": "the unfused nodes also use the values of {value}, which the fused site does not read; "
        "fuse the model again",
        "verify-not-in-unfused": "the fused site writes {value}, which the unfused file lacks; fuse the model again",
    }
)


@dataclass(frozen=True)
class Side:
    """A scanned file, its shapes and what kind each value is (see `deltafuse.classes`)."""

    model: Model
    shapes: Shapes
    kinds: bytearray

    @classmethod
    def of(cls, model: Model) -> Side:
        """Works out shapes when they are asked for, kinds at once."""
        return cls(model, Shapes(model), classify(model))

    @property
    def graph(self) -> Graph:
        """The main graph."""
        return self.model.graph


@dataclass(frozen=True)
class Pair:
    """Both sides of one site, float types as in the files.

    Attributes:
        name: names of the sites in the region, from the nodes' metadata.
        unfused, fused: the same inputs and outputs by name; each may lack an input that it does not read.
        inputs: every input of either.
        tokens: the token count, symbolic where it is free.
        valid: the range for which the unfused graph is right, None where the file does not say.
        key: equal for pairs that are equal up to names.
    """

    name: str
    unfused: onnx.ModelProto
    fused: onnx.ModelProto
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    tokens: Dim
    valid: tuple[int, int] | None
    key: bytes


def cut_pair(unfused: Side, fused: Side, region: Region) -> Pair | Reason:
    """Cuts a region out of the fused file and its counterpart out of the unfused one.

    Sizes come from the fused file, whose pinned axes are numbers.
    """
    graph = fused.graph
    known = parts(graph, region, {node: _key_dim(fused, node) for node in region.fused})
    if isinstance(known, Reason):
        return known
    cuts: list[onnx.ModelProto] = []
    inputs: dict[str, Input] = {}
    for side in (unfused, fused):
        cut = cut_side(side, fused, region, known, inputs)
        if isinstance(cut, Reason):
            return cut
        cuts.append(cut)
    tokens = _tokens(fused, region.fused[0])
    valid = _range(_properties(graph, region.fused[0]).get("deltafuse.valid_tokens", ""))
    parts_of_key = [f"{i.shape}{i.dtype}{i.part}".encode() for i in inputs.values()]
    parts_of_key += [f"{tokens}{valid}".encode(), *(canonical(cut, tuple(inputs)) for cut in cuts)]
    key = hashlib.sha256(b"\0".join(parts_of_key)).digest()
    return Pair(site_name(graph, region), cuts[0], cuts[1], tuple(inputs.values()), region.outputs, tokens, valid, key)


def cut_expression(unfused: Side, fused: Side, region: Region) -> Pair | Reason:
    """`cut_pair` for a region without a fused operator: every input is only a number, there are no tokens."""
    inputs: dict[str, Input] = {}
    before = cut_side(unfused, fused, region, {}, inputs)
    after = cut_side(fused, fused, region, {}, inputs)
    if isinstance(before, Reason) or isinstance(after, Reason):
        return before if isinstance(before, Reason) else cast("Reason", after)
    parts_of_key = [f"{item.shape}{item.dtype}".encode() for item in inputs.values()]
    sides = [canonical(cut, tuple(inputs)) for cut in (before, after)]
    key = hashlib.sha256(b"\0".join([*parts_of_key, *sides])).digest()
    return Pair(site_name(fused.graph, region), before, after, tuple(inputs.values()), region.outputs, 1, None, key)


def site_name(graph: Graph, region: Region) -> str:
    """The names of the sites in a region, as the nodes' metadata has them.

    Those of its fused nodes, and of expressions beside them; what was written around another fused node is that one's.
    """
    known = [_properties(graph, node).get("deltafuse.site", region.outputs[0]) for node in region.fused]
    rules = {rule_of(graph, node) for node in region.fused}
    others = [node for node in region.nodes if rule_of(graph, node) not in rules]
    return ", ".join(filter(None, dict.fromkeys([*known, *(marked(graph, node) for node in others)])))


def _properties(graph: Graph, node: int) -> dict[str, str]:
    return {item.key: item.value for item in graph.node(node).metadata_props}


def canonical(model: onnx.ModelProto, inputs: Sequence[str]) -> bytes:
    """A model's bytes without names: equal for cuts that differ in names only."""
    numbers: dict[str, str] = {"": ""}
    for name in inputs:
        numbers.setdefault(name, f"{len(numbers)}")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _strip(copy.graph, numbers)
    return copy.SerializeToString(deterministic=True)


def _strip(graph: onnx.GraphProto, numbers: dict[str, str]) -> None:
    def number(name: str) -> str:
        return numbers.setdefault(name, f"{len(numbers)}")

    graph.name = graph.doc_string = ""
    del graph.value_info[:]
    for item in (*graph.input, *graph.initializer):
        item.name = number(item.name)
    for node in graph.node:
        node.name = node.doc_string = ""
        del node.metadata_props[:]
        node.input[:] = [number(name) for name in node.input]
        node.output[:] = [number(name) for name in node.output]
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _strip(attribute.g, numbers)
            elif attribute.type == AttributeProto.TENSOR:
                attribute.t.name = ""
    for item in graph.output:
        item.name = number(item.name)


def cut_side(
    side: Side, fused: Side, region: Region, known: dict[str, Part], inputs: dict[str, Input]
) -> onnx.ModelProto | Reason:
    """One side's model; its inputs are added to `inputs`."""
    graph = side.graph
    found = [graph.find(name) for name in region.outputs]
    ends = [value for value in found if value is not None]
    if len(ends) < len(found):
        return Reason("verify-not-in-unfused", {"value": region.outputs[found.index(None)]})
    starts = [value for name in region.inputs if (value := graph.find(name)) is not None]
    sources = () if side is fused else shape_sources(graph, side.kinds, starts, ends)
    if isinstance(sources, int):
        return Reason("verify-reads-more", {"value": _outermost(side, fused, sources)})
    for value in (*starts, *sources):
        item = _input(side, fused, value, known.get(graph.name(value), Part("shape" if value in sources else "other")))
        if isinstance(item, Reason):
            return item
        side.shapes.define(value, item.shape, item.dtype)
        inputs.setdefault(item.name, item)
    cut = cut_model(side.model, side.shapes, (*starts, *sources), ends)
    return cut if isinstance(cut, Reason) else cut.model


def shape_sources(graph: Graph, kinds: bytearray, starts: Sequence[int], ends: Sequence[int]) -> tuple[int, ...] | int:
    """Values that are not computed from the starts and of which only the shape is used on the way to the ends.

    Returns:
        One value where there is other data whose numbers are used.
    """
    reached = _reached(graph, starts, ends)
    sources: dict[int, None] = {}
    seen, stack = {0, *starts}, list(ends)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if kinds[value] == Kind.DATA and value not in reached:
            return value
        node = graph.producer[value]
        if node < 0:
            continue
        asked = graph.node_inputs[node][0] if graph.standard[node] in ("Shape", "Size") else 0
        if asked and asked not in reached and kinds[asked] in (Kind.DATA, Kind.WEIGHT):
            sources[asked] = None
        else:
            stack += reads(graph, node)
    return tuple(sources)


def _outermost(side: Side, fused: Side, value: int) -> str:
    """The nearest value before one that the fused file has too, to name in a message."""
    graph = side.graph
    while fused.graph.find(graph.name(value)) is None and graph.producer[value] >= 0:
        data = [other for other in reads(graph, graph.producer[value]) if side.kinds[other] == Kind.DATA]
        if not data:
            break
        value = data[0]
    return graph.name(value)


def _reached(graph: Graph, starts: Sequence[int], ends: Sequence[int]) -> set[int]:
    """Values computed from the starts, as far as the ends."""
    reached = set(starts)
    first = min((min(graph.consumers[value], default=0) for value in starts), default=0)
    for node in range(first, max(graph.producer[value] for value in ends) + 1):
        if any(value in reached for value in reads(graph, node)):
            reached.update(graph.node_outputs[node])
    return reached


def _input(side: Side, fused: Side, value: int, part: Part) -> Input | Reason:
    name = side.graph.name(value)
    for where in (fused, side):
        found = where.graph.find(name)
        if found is None:
            continue
        shape, dtype = where.shapes.shape(found), where.shapes.dtype(found)
        if shape is not None and dtype is not None:
            return Input(name, shape, dtype, part)
    return Reason("verify-type-unknown", {"value": name})


def _tokens(fused: Side, node: int) -> Dim:
    """The tokens of a sequence: the token axis of the kernel's output, as it is declared, shared among its states."""
    axis = result_tokens(fused.graph, node)
    total, states = _declared(fused, node, 0, axis), _declared(fused, node, 1, 0)
    if total is None:
        shape = fused.shapes.shape(fused.graph.node_inputs[node][0])
        total = shape[axis] if shape else 1
    if axis or not isinstance(states, int) or states < 2:
        return total
    shared = exact_quotient(total, states)
    return total if shared is None else shared


def _declared(fused: Side, node: int, output: int, axis: int) -> Dim | None:
    """A size of a kernel's result as the file declares it, None where it does not."""
    outputs = fused.graph.node_outputs[node]
    info = fused.graph.value_info(outputs[output]) if output < len(outputs) else None
    dims = [] if info is None else list(info.type.tensor_type.shape.dim)
    declared = dims[axis] if axis < len(dims) else onnx.TensorShapeProto.Dimension()
    if declared.dim_param:
        return fused.shapes.find(parse(declared.dim_param))
    return declared.dim_value or None


def _key_dim(fused: Side, node: int) -> int:
    shape = fused.shapes.shape(fused.graph.node_inputs[node][0])
    return key_dim(fused.graph, node, shape[-1]) if shape else 0


def _range(text: str) -> tuple[int, int] | None:
    low, _, high = text.partition("..")
    return (int(low), int(high)) if low.isdigit() and high.isdigit() else None


def free_symbols(pair: Pair) -> list[str]:
    """Symbols in the sizes of a pair's inputs, sorted."""
    return sorted({name for item in pair.inputs for dim in item.shape for name in symbols(dim)})


def axis_dims(pair: Pair, axis: Literal["batch", "tokens"]) -> list[Dim]:
    """The free sizes of the batch or the token axis: exporters may give every operand its own symbol.

    The gate tells where the axes are: [B, T, H], [B, H, T] or [T, H]; other operands have them in the same place.
    """
    gates = {item.part.role: item.shape for item in reversed(pair.inputs) if item.part.role in ("g", "gk", "beta")}
    decays = [gates[role] for role in ("g", "gk", "beta") if role in gates]
    shapes = [item.shape for item in pair.inputs if item.part.role in ("g", "gk", "beta", "query", "key", "value")]
    free = [index for index, dim in enumerate(decays[0]) if not isinstance(dim, int)] if decays else []
    if axis == "batch":
        batched = bool(decays) and len(decays[0]) > 2 and 0 in free
        states = [item.shape for item in pair.inputs if item.part.role == "state"]
        return [shape[0] for shape in (*shapes, *states) if batched and shape and not isinstance(shape[0], int)]
    wanted = [index for index in free if index or len(decays[0]) < 3]
    dims = [shape[wanted[0]] for shape in shapes if wanted and len(shape) > wanted[0]]
    return [dim for dim in dims if not isinstance(dim, int)]
