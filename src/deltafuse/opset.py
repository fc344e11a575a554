"""Raises the opset a file imports: rewrites the nodes whose form or meaning has changed since, and no others.

From opset 13 to 27 few operators changed in more than the element types they take. Source: the schemas of onnx 1.23,
each version compared with the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, defs, helper, numpy_helper

from deltafuse.reasons import TEXTS, Reason
from deltafuse.wire import Model

#: ReduceSum, Squeeze and Unsqueeze take their axes as an input, and Softmax is over one axis, from here on.
LEAST = 13
#: What the oldest onnxruntime that deltafuse runs on (1.23) takes.
OLDEST_RUNTIME = 23
#: The first version that has LinearAttention.
LINEAR_ATTENTION_OPSET = 27

TEXTS.update(
    {
        "opset-operator": "the operator {op} (node {node}) means something else from opset {since} on and is not "
        "converted: {why}; export the model with opset {since} or newer, or choose another target",
        "opset-functions": "the model has local functions, whose operators are not converted to opset {opset}; inline "
        "them first with onnx.inliner.inline_local_functions",
    }
)

_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass(frozen=True)
class Raised:
    """What becomes of a file whose opset is raised.

    Attributes:
        imports: (domain, version) to import.
        version: the ai.onnx version that the file has now.
        replaced: main graph node -> the nodes in its place.
    """

    imports: tuple[tuple[str, int], ...] = ()
    version: int = 0
    replaced: tuple[tuple[int, tuple[NodeProto, ...]], ...] = ()


def raised(model: Model, domain: str, version: int, dead: Collection[int] = ()) -> Raised | Reason:
    """What to change so that a file imports at least this version of a domain.

    Args:
        model: the scanned file.
        domain: "" for ai.onnx.
        version: the least version that is needed.
        dead: nodes that go anyway, or whose bodies are taken for themselves.
    """
    have = model.opset_imports.get(domain, 0)
    if have >= version:
        return Raised(version=model.opset_imports.get("", 0))
    if domain:
        return Raised(((domain, version),), model.opset_imports.get("", 0))
    if model.functions:
        return Reason("opset-functions", {"opset": version})
    graph, gone = model.graph, frozenset(dead)
    replaced: list[tuple[int, tuple[NodeProto, ...]]] = []
    for index, op in enumerate(graph.op):
        if graph.domain[index] or index in gone or index < graph.outer or not (op in _CHANGES or op in _CONTROL):
            continue
        nodes = adapt(graph.node(index), have, version)
        if isinstance(nodes, Reason):
            return nodes
        if nodes is not None:
            replaced.append((index, nodes))
    return Raised((("", version),), have, tuple(replaced))


def stale(model: Model, have: int) -> int | None:
    """The first node of a file that is not written as the file's opset wants it, None where all are.

    Args:
        model: a file whose opset was raised.
        have: the version it was raised from.
    """
    graph, want = model.graph, model.opset_imports.get("", 0)
    for index, op in enumerate(graph.op):
        if graph.domain[index] or not (op in _CHANGES or op in _CONTROL):
            continue
        if adapt(graph.node(index), have, want) is not None:
            return index
    return None


def needed(nodes: Iterable[NodeProto], have: int) -> int:
    """The opset that nodes of one scope need: an older one where they mean the same in it, else the one they have.

    An onnxruntime refuses an opset that is newer than itself, whatever the file holds.

    Args:
        nodes: those of a domain of their own are not looked at.
        have: the opset they are of.
    """
    if have <= OLDEST_RUNTIME:
        return have
    # A node that means the same in both is one that raising the opset leaves alone.
    same = all(_known(node) and adapt(node, OLDEST_RUNTIME, have) is None for node in nodes)
    return OLDEST_RUNTIME if same else have


def import_needed(model: ModelProto) -> None:
    """Makes a model import the opset that its nodes need, see `needed`; one with functions stays as it is."""
    for opset in model.opset_import if not model.functions else ():
        opset.version = opset.version if opset.domain else needed(model.graph.node, opset.version)


def _known(node: NodeProto) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return True
    bodies = (attribute.g.node for attribute in node.attribute if attribute.type == AttributeProto.GRAPH)
    if not defs.has(node.op_type, OLDEST_RUNTIME, ""):
        return False
    attributes = defs.get_schema(node.op_type, OLDEST_RUNTIME, "").attributes
    stated = all(attribute.name in attributes for attribute in node.attribute)
    return stated and all(_known(inner) for body in bodies for inner in body)


def adapt_all(nodes: Iterable[NodeProto], have: int, want: int) -> tuple[NodeProto, ...] | Reason:
    """Nodes of one scope as the newer opset writes them; those that stay are the same objects."""
    found: list[NodeProto] = []
    for node in nodes:
        new = adapt(node, have, want)
        if isinstance(new, Reason):
            return new
        found += (node,) if new is None else new
    return tuple(found)


def adapt(node: NodeProto, have: int, want: int) -> tuple[NodeProto, ...] | Reason | None:
    """One node as the newer opset writes it, constants that it then needs in front.

    Returns:
        None where it stays as it is; ``opset-operator`` where it is not converted.
    """
    if node.domain not in ("", "ai.onnx"):
        return None
    change = _CHANGES.get(node.op_type)
    if change is not None and have < change.since <= want:
        return change.apply(node)
    if any(attribute.type == AttributeProto.GRAPH for attribute in node.attribute):
        return _adapt_bodies(node, have, want)
    return None


def _adapt_bodies(node: NodeProto, have: int, want: int) -> tuple[NodeProto, ...] | Reason | None:
    changed = False
    copy = NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        if attribute.type != AttributeProto.GRAPH:
            continue
        body: GraphProto = attribute.g
        before = [NodeProto.FromString(inner.SerializeToString()) for inner in body.node]
        after = adapt_all(before, have, want)
        if isinstance(after, Reason):
            return after
        if len(after) != len(before) or any(a is not b for a, b in zip(after, before, strict=True)):
            changed = True
            del body.node[:]
            body.node.extend(after)
    return (copy,) if changed else None


def _attribute(node: NodeProto, name: str) -> AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def _number(node: NodeProto, name: str) -> int:
    found = _attribute(node, name)
    return 0 if found is None else found.i


def _copy(node: NodeProto, without: str = "") -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    kept = [attribute for attribute in node.attribute if attribute.name != without]
    del copy.attribute[:]
    copy.attribute.extend(kept)
    return copy


def _axes_input(node: NodeProto) -> tuple[NodeProto, ...] | None:
    """Reductions: the attribute ``axes`` becomes the second input."""
    axes = _attribute(node, "axes")
    if axes is None:
        return None
    copy, name = _copy(node, "axes"), f"{node.output[0]}/opset_axes"
    copy.input.append(name)
    return _constant(name, np.array(list(axes.ints), np.int64)), copy


def _constant(name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> NodeProto:
    node = NodeProto(op_type="Constant", name=name, output=[name])
    node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(array)))
    return node


def _split(node: NodeProto) -> tuple[NodeProto, ...] | None:
    """Split without sizes needs the number of its outputs as an attribute."""
    if (len(node.input) > 1 and node.input[1]) or _attribute(node, "num_outputs") is not None:
        return None
    copy = _copy(node)
    copy.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
    return (copy,)


def _dft(node: NodeProto) -> tuple[NodeProto, ...] | None:
    """The attribute ``axis``, 1 where it is absent, becomes the third input."""
    if len(node.input) > 2:
        return None
    axis, name = _attribute(node, "axis"), f"{node.output[0]}/opset_axis"
    copy = _copy(node, "axis")
    copy.input.extend([""] * (2 - len(copy.input)))
    copy.input.append(name)
    return _constant(name, np.array(1 if axis is None else axis.i, np.int64)), copy


def _grid_sample(node: NodeProto) -> tuple[NodeProto, ...] | None:
    """Two modes have new names."""
    mode = _attribute(node, "mode")
    new = {b"bilinear": "linear", b"bicubic": "cubic"}.get(b"" if mode is None else mode.s)
    if new is None:
        return None
    copy = _copy(node, "mode")
    copy.attribute.append(helper.make_attribute("mode", new))
    return (copy,)


def _roi_align(node: NodeProto) -> tuple[NodeProto, ...] | None:
    """The way coordinates are read was one that is no longer the default."""
    if _attribute(node, "coordinate_transformation_mode") is not None:
        return None
    copy = _copy(node)
    copy.attribute.append(helper.make_attribute("coordinate_transformation_mode", "output_half_pixel"))
    return (copy,)


@dataclass(frozen=True)
class _Change:
    """What changed at version `since`: how to rewrite a node, and when not to."""

    since: int
    rewrite: Callable[[NodeProto], tuple[NodeProto, ...] | None] | None = None
    refused: Callable[[NodeProto], bool] | None = None
    why: str = ""

    def apply(self, node: NodeProto) -> tuple[NodeProto, ...] | Reason | None:
        if self.refused is not None and self.refused(node):
            where = {"op": node.op_type, "node": node.name or ", ".join(node.output)}
            return Reason("opset-operator", {**where, "since": self.since, "why": self.why})
        return None if self.rewrite is None else self.rewrite(node)


_REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip
_CHANGES: dict[str, _Change] = {
    **dict.fromkeys(_REDUCTIONS, _Change(18, _axes_input)),
    "Split": _Change(18, _split),
    "DFT": _Change(20, _dft),
    "GridSample": _Change(20, _grid_sample),
    "RoiAlign": _Change(16, _roi_align),
    "GroupNormalization": _Change(
        21, refused=lambda node: True, why="scale and bias are one number per channel, no longer one per group"
    ),
    "BatchNormalization": _Change(
        14, refused=lambda node: len([name for name in node.output if name]) > 1, why="its training results changed"
    ),
    "AveragePool": _Change(
        19,
        refused=lambda node: bool(_number(node, "ceil_mode") and _number(node, "count_include_pad")),
        why="what counts as padding with ceil_mode changed",
    ),
    "Attention": _Change(
        24,
        refused=lambda node: bool(_number(node, "is_causal")) and len(node.input) > 4,
        why="the causal mask is aligned to the past keys",
    ),
}
