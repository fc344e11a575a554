"""Constants that a site computes: in their own types they must be what they are in double.

A proof in double does not see that 2049 is 2048 in float16. So what is computed from constants alone is worked out
twice, rounded to its own type behind each operator and not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
import onnx.inliner
from onnx import GraphProto, NodeProto, TensorProto, helper

from deltafuse.bodies import has_body
from deltafuse.classes import Kind
from deltafuse.constant_pairs import STEPS, differ
from deltafuse.constants_flat import EXACT, Flat, needed, rounds
from deltafuse.graph import Graph
from deltafuse.probe import backward_slice, cut_model
from deltafuse.probe_double import to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.wire import Model
from deltafuse.worker import AnyArray, Worker

TEXTS.update(
    {
        "constant-rounds": "the constant {value} is {own} in the types of the model and {exact} without their "
        "rounding, so a proof in double does not hold for it; fold the constants of the model first",
        "constant-unfollowed": "the constant {value} is computed with roundings in a shape that follows free sizes, "
        "and which numbers are in it cannot be told, so a proof in double says nothing of them; fold the constants of "
        "the model first, or fix its sizes",
    }
)

Array = npt.NDArray[Any]


def rounded_constant(
    worker: Worker, model: Model, kinds: bytearray, shapes: Shapes, inputs: Sequence[int], ends: Sequence[int]
) -> Reason | None:
    """Looks for a constant between some values of a graph that is another number in its own types than in double.

    Args:
        worker: computes them.
        model: in topological order.
        kinds: of its values.
        shapes: of its values.
        inputs: where to begin.
        ends: where to end.

    Returns:
        ``constant-rounds``, or the reason why the constants cannot be computed; None where each is what it is.
    """
    graph = model.graph
    nodes, _ = backward_slice(graph, inputs, ends)
    if not any(has_body(model, graph, node) for node in nodes):
        ends = _frontier(graph, kinds, shapes, nodes, ends)
    if not ends:
        return None
    cut = cut_model(model, shapes, inputs, ends)
    if isinstance(cut, Reason):
        return cut

    def settled(name: str) -> AnyArray | None:
        value = graph.find(name) or 0
        contents = shapes.contents(value) if kinds[value] == Kind.SHAPE else None
        if contents is None or not all(type(item) is int for item in contents.ravel().tolist()):
            return None
        return contents.astype(helper.tensor_dtype_to_np_dtype(shapes.dtype(value) or TensorProto.INT64))

    sizes = {graph.name(value) for value in inputs if kinds[value] == Kind.SHAPE}
    return rounded(worker, cut.model, settled, sizes)


def _frontier(
    graph: Graph, kinds: bytearray, shapes: Shapes, nodes: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """What is computed with roundings and without data, and read by what computes data."""
    touched: set[int] = set()
    found = dict[int, None]()
    for node in nodes:
        read, made = graph.reads(node), graph.node_outputs[node]
        if kinds[made[0]] == Kind.DATA:
            found.update((value, None) for value in read if value in touched)
        elif not touched.isdisjoint(read) or (
            graph.standard[node] not in EXACT
            and any((shapes.dtype(value) or TensorProto.FLOAT) in STEPS for value in made if value)
        ):
            touched.update(made)
    return [*found, *(value for value in ends if value in touched)]


def rounded(
    worker: Worker, model: onnx.ModelProto, leaf: Callable[[str], AnyArray | None], sizes: Collection[str] = ()
) -> Reason | None:
    """The same for a model of its own.

    Args:
        worker: computes them.
        model: a cut, float types as in the source; its initializers are constants, its inputs are none.
        leaf: name of a value of its main graph -> what it is, where that follows from sizes; None elsewhere.
        sizes: its inputs that hold sizes.

    Returns:
        ``constant-rounds``, or the reason why the constants cannot be computed; None where each is what it is.
    """
    plain = onnx.inliner.inline_local_functions(model) if model.functions else model
    flat = Flat(leaf, sizes)
    flat.walk(plain.graph)
    graph = GraphProto(name="constants", node=needed(flat.nodes, flat.read), initializer=flat.tensors)
    alone = onnx.ModelProto(ir_version=model.ir_version, graph=graph, opset_import=model.opset_import)
    types = _types(alone)
    steps = _roundings(alone, types)
    checked = {name: source for name, source in flat.read.items() if name in steps}
    loose = _loose(flat)
    if loose is not None or not checked:
        return loose
    kept = [NodeProto.FromString(node.SerializeToString()) for node in needed(alone.graph.node, checked)]
    del alone.graph.node[:]
    alone.graph.node.extend(kept)
    alone.graph.output.extend(onnx.ValueInfoProto(name=name) for name in checked)
    exact = to_double(alone)
    if isinstance(exact, Reason):
        return exact
    own, wanted = _run(worker, _rounding(exact, types)), _run(worker, exact)
    if isinstance(own, Reason) or isinstance(wanted, Reason):
        return own if isinstance(own, Reason) else wanted if isinstance(wanted, Reason) else None
    for (name, source), got, want in zip(checked.items(), own, wanted, strict=True):
        reason = _differs(source, got, want, steps[name])
        if reason is not None:
            return reason
    return None


def _loose(flat: Flat) -> Reason | None:
    """The same for constants in a shape that is not known."""
    pairs = flat.pairs()
    for name, source in flat.read_loose.items():
        reason = _differs(source, pairs[name].own, pairs[name].exact, pairs[name].step)
        if reason is not None:
            return reason
        if not pairs[name].fine:
            return Reason("constant-unfollowed", {"value": source})
    return None


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of the tensors of a model, as far as onnx knows them."""
    given = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    inferred = onnx.shape_inference.infer_shapes(model)
    given.update((info.name, info.type.tensor_type.elem_type) for info in inferred.graph.value_info)
    for node in model.graph.node:
        # onnx does not know onnxruntime's own operators: all keep the type of what they are given.
        for name in node.output:
            given.setdefault(name, next((given[read] for read in node.input if read in given), 0))
    return given


def _roundings(model: onnx.ModelProto, types: Mapping[str, int]) -> dict[str, float]:
    """Values with a rounding on their way -> the step of the narrowest type there."""
    steps: dict[str, float] = {}
    for node in model.graph.node:
        before = max((steps.get(name, 0.0) for name in node.input), default=0.0)
        for name in node.output:
            own = STEPS.get(types[name], 0.0) if rounds(node) else 0.0
            if max(own, before):
                steps[name] = max(own, before)
    return steps


def _rounding(exact: onnx.ModelProto, types: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of a model in double that rounds behind each operator to what was its type."""
    model = onnx.ModelProto()
    model.CopyFrom(exact)
    nodes: list[NodeProto] = []
    for node in exact.graph.node:
        copy = NodeProto.FromString(node.SerializeToString())
        narrow = [name for name in node.output if types[name] in STEPS and rounds(node)]
        copy.output[:] = [f"{name}/exact" if name in narrow else name for name in node.output]
        nodes.append(copy)
        for name in narrow:
            nodes.append(helper.make_node("Cast", [f"{name}/exact"], [f"{name}/own"], to=types[name]))
            nodes.append(helper.make_node("Cast", [f"{name}/own"], [name], to=TensorProto.DOUBLE))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _run(worker: Worker, model: onnx.ModelProto) -> tuple[AnyArray, ...] | Reason:
    session = worker.load(model.SerializeToString())
    if isinstance(session, Reason):
        return session
    ran = worker.run(session, {})
    worker.unload(session)
    return ran


def _differs(name: str, own: Array | None, exact: Array | None, step: float) -> Reason | None:
    if own is None or exact is None:
        return None
    apart = differ(own, exact, step)
    if not apart.any():
        return None
    return Reason("constant-rounds", {"value": name, "own": float(own[apart][0]), "exact": float(exact[apart][0])})
