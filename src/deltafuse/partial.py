"""The edits of the sites that stay fused when others of the same fuse are rolled back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import onnx

from deltafuse.edits import IN_GRAPH, Edit, with_sizes
from deltafuse.graph import Graph
from deltafuse.nesting import Level, levels
from deltafuse.wire import Model, Part, scan_body

__all__ = ["remaining_edits"]


def remaining_edits(model: Model, edits: Iterable[Edit], sites: Sequence[str]) -> tuple[Edit, ...]:
    """What is left of a fuse without some of its sites.

    Nodes that were removed with another site, but that what is restored needs, stay (shape arithmetic of all layers).

    Args:
        model: the original.
        edits: all edits of the fuse.
        sites: names of the sites that are restored.
    """
    kept = [edit for edit in edits if edit.site not in sites and edit.kind != "size"]
    inside = [edit for edit in kept if edit.kind in IN_GRAPH]
    others = [edit for edit in kept if edit.kind not in IN_GRAPH]
    found = [edit for graph, own in _graphs(model, levels(model, inside)) for edit in _left(graph, own)]
    return with_sizes(model, [*found, *others])


def _graphs(model: Model, found: Sequence[Level[Edit]]) -> Iterator[tuple[Graph, tuple[Edit, ...]]]:
    """The main graph and each body that holds edits, with its own; parts of a split graph are one."""
    yield model.graph, tuple(edit for level in found for edit in level.edits)
    bodies: dict[Part, list[Level[Edit]]] = {}
    pending = [body for level in found for body in level.inner]
    while pending:
        body = pending.pop()
        pending += body.inner
        bodies.setdefault(body.around[-1], []).append(body)
    for attribute, parts in bodies.items():
        graph = scan_body(model, (attribute.start, attribute.end))
        yield graph, tuple(edit for level in parts for edit in level.edits)


def _left(graph: Graph, edits: Sequence[Edit]) -> Iterator[Edit]:
    needed = _needed(graph, edits)
    return (piece for edit in edits for piece in _spare(graph, edit, needed))


def _needed(graph: Graph, edits: Sequence[Edit]) -> set[int]:
    """Removed nodes whose outputs something that is there reads, and that no inserted node writes."""
    away = {node for edit in edits if edit.kind == "nodes" for node in _nodes(graph, edit)}
    new = [onnx.GraphProto.FromString(edit.new) for edit in edits if edit.kind == "nodes" and edit.new]
    written = {name.encode() for part in new for node in part.node for name in node.output}
    needed: set[int] = set()
    pending = [value for node in range(len(graph.op)) if node not in away for value in graph.reads(node)]
    pending += graph.outputs
    while pending:
        value = pending.pop()
        source = graph.producer[value]
        if source in away and source not in needed and graph.value_names[value] not in written:
            needed.add(source)
            pending += graph.reads(source)
    return needed


def _nodes(graph: Graph, edit: Edit) -> range:
    """The nodes that an edit of the graph itself covers."""
    starts = graph.spans.starts
    return range(bisect_left(starts, edit.start), bisect_left(starts, edit.end))


def _spare(graph: Graph, edit: Edit, needed: AbstractSet[int]) -> Iterator[Edit]:
    """The edit, or what is left of it, without the removal of needed nodes and of what is declared of their outputs."""
    spared = [node for node in _nodes(graph, edit) if node in needed] if edit.kind == "nodes" else []
    if edit.kind == "values" and not edit.new:
        removed = onnx.GraphProto.FromString(bytes(graph.data[edit.start : edit.end]))
        values = (graph.find(info.name) for info in removed.value_info)
        if any(value is not None and graph.producer[value] in needed for value in values):
            return
    if not spared:
        yield edit
        return
    position = edit.start
    for node in spared:
        start, end = graph.spans[node]
        if start > position:
            yield Edit(position, start, edit.new, edit.site, edit.kind)
        position = end
    if edit.end > position:
        yield Edit(position, edit.end, edit.new, edit.site, edit.kind)
