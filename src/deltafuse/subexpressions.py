"""Leaves out of a model what it computes twice (common subexpression elimination), so that it loads and runs faster.

Exporters write shape arithmetic and constants anew wherever they are needed: more than half of the nodes of a traced
chunk rule repeat an earlier one. An operator of ai.onnx that is no random one gives the same for the same: its results
are those of the first node that is equal to it in all but names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import AttributeProto

from deltafuse.constants_flat import bodies

#: Operators of ai.onnx that give something else each time.
_RANDOM = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
})  # fmt: skip


def without_repeats(model: onnx.ModelProto, same: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """A copy of a model in which each value is computed once.

    Args:
        model: in topological order.
        same: input -> another input that always holds the same, in place of which it is not asked for any more.

    Returns:
        The copy; its outputs, and what subgraphs read by name, are as they were.
    """
    graph = model.graph
    fixed = {output.name for output in graph.output}.union(*map(_mentioned, graph.node))
    renamed = {name: other for name, other in (same or {}).items() if name not in fixed}
    nodes: list[onnx.NodeProto] = []
    seen: dict[tuple[object, ...], list[str]] = {}
    for node in graph.node:
        inputs = [renamed.get(name, name) for name in node.input]
        outputs = list(node.output)
        if _is_pure(node):
            first = seen.setdefault(_key(node, inputs, outputs), outputs)
            if first is not outputs and fixed.isdisjoint(outputs):
                renamed.update(zip(outputs, first, strict=True))
                continue
        nodes.append(_reading(node, inputs))
    result = onnx.ModelProto()
    result.CopyFrom(_without_nodes(model))
    result.graph.node.extend(nodes)
    result.graph.input.extend(one for one in graph.input if one.name not in renamed)
    return result


def _without_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """All of a model but the nodes and inputs of its graph."""
    graph = model.graph
    bare = onnx.GraphProto(
        name=graph.name, initializer=graph.initializer, sparse_initializer=graph.sparse_initializer,
        output=graph.output, value_info=graph.value_info,
    )  # fmt: skip
    return onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, graph=bare, functions=model.functions
    )


def _reading(node: onnx.NodeProto, inputs: list[str]) -> onnx.NodeProto:
    """A node with other inputs; itself where they are the same."""
    if inputs == list(node.input):
        return node
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.input[:] = inputs
    return changed


def _is_pure(node: onnx.NodeProto) -> bool:
    """Whether a node gives the same for the same, and reads nothing but its inputs."""
    return node.domain in ("", "ai.onnx") and node.op_type not in _RANDOM and not bodies(node)


def _key(node: onnx.NodeProto, inputs: list[str], outputs: list[str]) -> tuple[object, ...]:
    """What equal nodes have in common."""
    given = tuple(bool(name) for name in outputs)
    return node.op_type, tuple(inputs), given, *map(_attribute, node.attribute)


def _attribute(attribute: AttributeProto) -> bytes:
    """An attribute as bytes; names of tensors in it say nothing."""
    if attribute.type == AttributeProto.TENSOR and any(map(attribute.t.HasField, ("name", "doc_string"))):
        plain = AttributeProto()
        plain.CopyFrom(attribute)
        plain.t.ClearField("name")
        plain.t.ClearField("doc_string")
        attribute = plain
    return attribute.SerializeToString(deterministic=True)


def _mentioned(node: onnx.NodeProto) -> Iterator[str]:
    """Every name that the subgraphs of a node read."""
    for body in bodies(node):
        yield from (output.name for output in body.output)
        for inner in body.node:
            yield from inner.input
            yield from _mentioned(inner)
