"""Regions: connected nodes that only the fused file has, and what they read and write."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx

from deltafuse.graph import Graph
from deltafuse.probe_double import FLOATS

#: What they give is no data.
SIZES = frozenset({"Shape", "Size"})


@dataclass(frozen=True)
class Region:
    """Connected nodes that only the fused file has, around one or more fused nodes.

    Attributes:
        nodes: of the fused graph, ascending.
        fused: the fused nodes among them.
        inputs: names of the values it reads, in order of first use; initializers are part of the region.
        outputs: names of the values that the rest of the graph reads.
    """

    nodes: tuple[int, ...]
    fused: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def reads(graph: Graph, node: int) -> tuple[int, ...]:
    """Values that a node reads, those of its subgraphs too."""
    return graph.node_inputs[node] + graph.captures.get(node, ())


@dataclass(frozen=True)
class Walk:
    """The way back from a value: nodes in order, values it starts from, sizes apart."""

    nodes: tuple[int, ...]
    sources: tuple[int, ...]


def walk_back(graph: Graph, inside: Collection[int], value: int) -> Walk:
    """Follows a value back through some nodes, to what these read from elsewhere."""
    nodes, sources, seen, stack = set[int](), dict[int, None](), {0}, [value]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        node = graph.producer[value]
        if node not in inside:
            sources[value] = None
        elif graph.standard[node] not in SIZES:
            nodes.add(node)
            stack += reads(graph, node)
    return Walk(tuple(sorted(nodes)), tuple(sources))


def marked(graph: Graph, node: int) -> str:
    """The site that a node was written for, "" where it says of none."""
    return next((item.value for item in graph.node(node).metadata_props if item.key == "deltafuse.site"), "")


def unlabelled(node: onnx.NodeProto) -> onnx.NodeProto:
    """A copy of a node without what no operator reads: names of nodes, doc strings, metadata; in its bodies too."""
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    _strip(plain)
    return plain


def _strip(node: onnx.NodeProto) -> None:
    node.name = node.doc_string = ""
    del node.metadata_props[:]
    for attribute in node.attribute:
        for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in body.node:
                _strip(inner)


def rule_of(graph: Graph, node: int) -> str:
    """The rule of the site that a node was written for, "" where it says of none."""
    return next((item.value for item in graph.node(node).metadata_props if item.key == "deltafuse.rule"), "")


def connected(graph: Graph, nodes: Sequence[int]) -> list[list[int]]:
    """Parts of a set of nodes that share values one of them writes, in order of their first node."""
    owner = {value: node for node in nodes for value in graph.node_outputs[node] if value}
    parent = {node: node for node in nodes}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in nodes:
        for value in reads(graph, node):
            if value in owner:
                parent[root(node)] = root(owner[value])
    groups: dict[int, list[int]] = {}
    for node in nodes:
        groups.setdefault(root(node), []).append(node)
    return list(groups.values())


def region_of(graph: Graph, nodes: Sequence[int], kernels: set[int]) -> Region:
    """The region of some connected nodes; `kernels` are all fused nodes."""
    inside = set(nodes)
    written = [value for node in nodes for value in graph.node_outputs[node] if value]
    weights = _weights(graph, nodes, kernels)
    own = {0, *written, *(value for value in graph.initializers if value not in weights)}
    inputs = dict.fromkeys(value for node in nodes for value in reads(graph, node) if value not in own)
    results = set(graph.outputs)
    outputs = [v for v in written if v in results or any(reader not in inside for reader in graph.consumers[v])]
    return Region(
        tuple(nodes),
        tuple(node for node in nodes if node in kernels),
        tuple(map(graph.name, inputs)),
        tuple(map(graph.name, outputs)),
    )


def _weights(graph: Graph, nodes: Sequence[int], kernels: set[int]) -> set[int]:
    """Float initializers that an ordinary expression in a region reads: any numbers do for them."""
    if not {marked(graph, node) for node in nodes} - {marked(graph, node) for node in nodes if node in kernels}:
        return set()
    read = {value for node in nodes for value in reads(graph, node) if value in graph.initializers}
    heads = {value: graph.initializers[value] for value in read}
    return {value for value, head in heads.items() if head.dtype in FLOATS and head.elements > 1}
