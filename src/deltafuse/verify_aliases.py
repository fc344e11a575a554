"""Nodes that read a value itself where the unfused file reads a copy of it that an Identity made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import onnx

from deltafuse.aliases import Renaming, resolved
from deltafuse.graph import Graph
from deltafuse.verify_regions import unlabelled


def same_without_copies(before: Graph, after: Graph, known: Counter[bytes], changed: Sequence[int]) -> set[int]:
    """Those of the changed nodes that are equal to one of the unfused file's once all Identity nodes are seen through.

    Args:
        before: the unfused graph.
        after: the fused one.
        known: nodes of the unfused graph, decoded, that the fused one has not; those that are found are taken out.
        changed: nodes of the fused graph that the unfused one has not.
    """
    old, new = _copies(before), _copies(after)
    if not changed or not old.names:
        return set()
    forms: dict[bytes, list[bytes]] = {}
    for message, count in known.items():
        plain = _plain(onnx.NodeProto.FromString(message), old)
        forms.setdefault(plain, []).extend([message] * count)
    found: set[int] = set()
    for node in changed:
        left = forms.get(_plain(unlabelled(after.node(node)), new))
        if left:
            known[left.pop()] -= 1
            found.add(node)
    return found


def lost_copies(before: Graph, after: Graph, readers: Iterable[int]) -> tuple[str, ...]:
    """Copies of the unfused graph that the fused one has not, where some nodes read what was copied instead."""
    old = _copies(before)
    read = {after.name(value) for node in readers for value in after.node_inputs[node]}
    written = {after.name(value) for outputs in after.node_outputs for value in outputs}
    return tuple(copy for copy, source in old.names.items() if copy not in written and source in read)


def _copies(graph: Graph) -> Renaming:
    identities = [node for node, op in enumerate(graph.op) if op == "Identity" and not graph.domain[node]]
    pairs = ((graph.node_outputs[node], graph.node_inputs[node]) for node in identities)
    return resolved({graph.name(outputs[0]): graph.name(inputs[0]) for outputs, inputs in pairs})


def _plain(node: onnx.NodeProto, renaming: Renaming) -> bytes:
    (plain,) = renaming.apply((node,))
    return plain.SerializeToString(deterministic=True)
