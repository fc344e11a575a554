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
#: Types of attributes that may hold a subgraph; old files name none.
_GRAPHS = frozenset({AttributeProto.UNDEFINED, AttributeProto.GRAPH, AttributeProto.GRAPHS})


def without_repeats(model: onnx.ModelProto, same: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """A copy of a model in which each value is computed once.

    Args:
        model: in topological order.
        same: input -> another input that always holds the same, in place of which it is not asked for any more.

    Returns:
        The copy; its outputs, and what subgraphs read by name, are as they were.
    """
    graph, every = model.graph, list(model.graph.node)
    attributes = [list(node.attribute) for node in every]
    holds = [any(one.type in _GRAPHS for one in some) for some in attributes]
    holders = (node for node, holding in zip(every, holds, strict=True) if holding)
    fixed = {output.name for output in graph.output}.union(*map(_mentioned, holders))
    renamed = {name: other for name, other in (same or {}).items() if name not in fixed}
    nodes: list[onnx.NodeProto] = []
    seen: dict[tuple[object, ...], list[str]] = {}
    for node, some, holding in zip(every, attributes, holds, strict=True):
        read, outputs = list(node.input), list(node.output)
        inputs = [renamed.get(name, name) for name in read]
        if not holding and node.domain in ("", "ai.onnx") and node.op_type not in _RANDOM:
            first = seen.setdefault(_key(node, inputs, outputs, some), outputs)
            if first is not outputs and fixed.isdisjoint(outputs):
                renamed.update(zip(outputs, first, strict=True))
                continue
        nodes.append(node if inputs == read else _reading(node, inputs))
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
    """A node with other inputs."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.input[:] = inputs
    return changed


def _key(
    node: onnx.NodeProto, inputs: list[str], outputs: list[str], attributes: list[AttributeProto]
) -> tuple[object, ...]:
    """What equal nodes have in common."""
    return node.op_type, tuple(inputs), tuple(map(bool, outputs)), *map(_attribute, attributes)


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
