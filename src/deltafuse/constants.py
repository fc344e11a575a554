"""Constants that a site computes: in their own types they must be what they are in double.

A proof in double does not see that 2049 is 2048 in float16. So what is computed from constants alone is worked out
twice, rounded to its own type behind each operator and not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from deltafuse.bodies import has_body
from deltafuse.classes import Kind
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
    }
)

Array = npt.NDArray[Any]

#: Operators that make or move numbers and change none.
EXACT = frozenset({
    "Constant", "ConstantOfShape", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand",
    "Tile", "Concat", "Slice", "Gather", "Split",
})  # fmt: skip
#: Float types and how far apart their numbers are, relative to a number.
_STEPS: dict[int, float] = {TensorProto.FLOAT: 2.0**-23, TensorProto.FLOAT16: 2.0**-10, TensorProto.BFLOAT16: 2.0**-7}
#: How many steps of the narrowest type on its way a constant may be off.
_STEPS_OFF = 4


@dataclass
class _Flat:
    """All constants of a model in one graph, with names of their own.

    Attributes:
        leaf: name of a value of the main graph -> what it is, where that follows from sizes; None elsewhere.
        nodes: that compute constants, in order.
        tensors: what they start from.
        read: constants that something else reads -> their names in the model.
    """

    leaf: Callable[[str], AnyArray | None]
    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    tensors: list[TensorProto] = field(default_factory=list[TensorProto])
    read: dict[str, str] = field(default_factory=dict[str, str])
    count: int = 0

    def walk(self, graph: GraphProto, around: Mapping[str, str] | None = None) -> None:
        """Collects the constants of a scope.

        Args:
            graph: the scope.
            around: constants of the scopes around it: their names -> their names here; None for the main graph.
        """
        own = {info.name for info in graph.input}
        known = {name: flat for name, flat in (around or {}).items() if name not in own} | {"": ""}
        for tensor in graph.initializer:
            self._hold(tensor, known, tensor.name)
        for node in graph.node:
            bodies = [body for attribute in node.attribute for body in (attribute.g, *attribute.graphs) if body.node]
            made = not node.input and (node.domain or node.op_type != "Constant")
            if not made and not bodies and all(name in known for name in node.input):
                self._compute(node, known)
                continue
            found = self.leaf(node.output[0]) if around is None else None
            if found is not None:
                self._hold(numpy_helper.from_array(found), known, node.output[0])
                continue
            self._note(node.input, known)
            for body in bodies:
                self.walk(body, known)
            for name in filter(None, node.output):
                known.pop(name, None)
        self._note([info.name for info in graph.output], known)

    def _note(self, names: Iterable[str], known: Mapping[str, str]) -> None:
        self.read.update({known[name]: name for name in names if name and name in known})

    def _fresh(self) -> str:
        self.count += 1
        return f"c{self.count}"

    def _hold(self, tensor: TensorProto, known: dict[str, str], name: str) -> None:
        held = TensorProto()
        held.CopyFrom(tensor)
        held.name = known[name] = self._fresh()
        self.tensors.append(held)

    def _compute(self, node: NodeProto, known: dict[str, str]) -> None:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [known[name] for name in node.input]
        known.update({name: self._fresh() for name in node.output if name})
        copy.output[:] = [known[name] for name in node.output]
        self.nodes.append(copy)


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

    return rounded(worker, cut.model, settled)


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
            graph.standard[node] not in EXACT and any(shapes.dtype(value) in _STEPS for value in made if value)
        ):
            touched.update(made)
    return [*found, *(value for value in ends if value in touched)]


def rounded(worker: Worker, model: onnx.ModelProto, leaf: Callable[[str], AnyArray | None]) -> Reason | None:
    """The same for a model of its own.

    Args:
        worker: computes them.
        model: a cut, float types as in the source; its initializers are constants, its inputs are none.
        leaf: name of a value of its main graph -> what it is, where that follows from sizes; None elsewhere.

    Returns:
        ``constant-rounds``, or the reason why the constants cannot be computed; None where each is what it is.
    """
    plain = onnx.inliner.inline_local_functions(model) if model.functions else model
    flat = _Flat(leaf)
    flat.walk(plain.graph)
    graph = GraphProto(name="constants", node=_needed(flat.nodes, flat.read), initializer=flat.tensors)
    alone = onnx.ModelProto(ir_version=model.ir_version, graph=graph, opset_import=model.opset_import)
    types = _types(alone)
    steps = _roundings(alone, types)
    checked = {name: source for name, source in flat.read.items() if name in steps}
    if not checked:
        return None
    kept = [NodeProto.FromString(node.SerializeToString()) for node in _needed(alone.graph.node, checked)]
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


def _needed(ordered: Sequence[NodeProto], read: Iterable[str]) -> list[NodeProto]:
    """The nodes behind what is read."""
    wanted, nodes = set(read), list[NodeProto]()
    for node in reversed(ordered):
        if not wanted.isdisjoint(node.output):
            wanted.update(node.input)
            nodes.append(node)
    return nodes[::-1]


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
            own = _STEPS.get(types[name], 0.0) if _rounds(node) else 0.0
            if max(own, before):
                steps[name] = max(own, before)
    return steps


def _rounds(node: NodeProto) -> bool:
    return bool(node.domain) or node.op_type not in EXACT


def _rounding(exact: onnx.ModelProto, types: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of a model in double that rounds behind each operator to what was its type."""
    model = onnx.ModelProto()
    model.CopyFrom(exact)
    nodes: list[NodeProto] = []
    for node in exact.graph.node:
        copy = NodeProto.FromString(node.SerializeToString())
        narrow = [name for name in node.output if types[name] in _STEPS and _rounds(node)]
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


def _differs(name: str, own: Array, exact: Array, step: float) -> Reason | None:
    with np.errstate(invalid="ignore"):
        apart = ~np.isclose(own, exact, rtol=_STEPS_OFF * step, atol=0.0, equal_nan=True)
    if not apart.any():
        return None
    return Reason("constant-rounds", {"value": name, "own": float(own[apart][0]), "exact": float(exact[apart][0])})
