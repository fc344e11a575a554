"""The edits of the sites that stay fused when others of the same fuse are rolled back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import onnx

from deltafuse.edits import Edit, with_sizes
from deltafuse.wire import Model

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
    needed = _needed(model, kept)
    return with_sizes(model, [piece for edit in kept for piece in _spare(model, edit, needed)])


def _needed(model: Model, edits: Sequence[Edit]) -> set[int]:
    """Removed nodes whose outputs something that is there reads, and that no inserted node writes."""
    graph = model.graph
    away = {node for edit in edits if edit.kind == "nodes" for node in _nodes(model, edit)}
    new = [onnx.GraphProto.FromString(edit.new) for edit in edits if edit.kind == "nodes" and edit.new]
    written = {name.encode() for part in new for node in part.node for name in node.output}
    needed: set[int] = set()
    pending = [node for node in range(len(graph.op)) if node not in away]
    while pending:
        node = pending.pop()
        for value in (*graph.node_inputs[node], *graph.captures.get(node, ())):
            source = graph.producer[value]
            if source in away and source not in needed and graph.value_names[value] not in written:
                needed.add(source)
                pending.append(source)
    return needed


def _nodes(model: Model, edit: Edit) -> range:
    starts = model.graph.spans.starts
    return range(bisect_left(starts, edit.start), bisect_left(starts, edit.end))


def _spare(model: Model, edit: Edit, needed: AbstractSet[int]) -> Iterator[Edit]:
    """The edit, or what is left of it, without the removal of needed nodes and of what is declared of their outputs."""
    spared = [node for node in _nodes(model, edit) if node in needed] if edit.kind == "nodes" else []
    if edit.kind == "values" and not edit.new:
        removed = onnx.GraphProto.FromString(bytes(model.data[edit.start : edit.end]))
        values = (model.graph.find(info.name) for info in removed.value_info)
        if any(value is not None and model.graph.producer[value] in needed for value in values):
            return
    if not spared:
        yield edit
        return
    position = edit.start
    for node in spared:
        start, end = model.graph.spans[node]
        if start > position:
            yield Edit(position, start, edit.new, edit.site, edit.kind)
        position = end
    if edit.end > position:
        yield Edit(position, edit.end, edit.new, edit.site, edit.kind)
