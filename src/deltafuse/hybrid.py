"""Variants of a whole model for looking inside: more outputs, and some sites fused while the others are not."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import helper

from deltafuse.edits import Changes, Edit, Insertion, apply, build, with_sizes
from deltafuse.fused import runnable
from deltafuse.graph import Graph
from deltafuse.protobuf import write_field
from deltafuse.verify_cut import Side
from deltafuse.verify_diff import Region, reads
from deltafuse.wire import Model, scan

_OUTPUT, _INITIALIZER = 12, 5


@contextmanager
def scratch(folder: Path, stem: str) -> Generator[Path]:
    """A path for a file that is gone when the block ends.

    Args:
        folder: where; beside its weights a model finds them.
        stem: part of the name.
    """
    path = folder / f".{stem[:100]}.{secrets.token_hex(6)}.onnx"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def write_tapped(model: Model, names: Collection[str], path: Path) -> None:
    """Writes a model with more outputs; weights outside the file are looked for beside the new one.

    Args:
        model: the scanned file.
        names: values that nodes write and that are no outputs yet; others are left out.
        path: the file to write.
    """
    graph, end = model.graph, model.graph_parts[-1].end
    known = set(graph.outputs)
    values = [value for name in dict.fromkeys(names) if (value := graph.find(name)) is not None]
    new = [value for value in values if value not in known and graph.producer[value] >= 0]
    fields = [onnx.ValueInfoProto(name=graph.name(value)).SerializeToString() for value in new]
    edits = [Edit(end, end, write_field(_OUTPUT, field), "", "values") for field in fields]
    _write(model, with_sizes(model, edits), path)


def write_hybrid(before: Side, after: Side, regions: Sequence[Region], path: Path) -> None:
    """Writes the unfused model with some regions of the fused one in their place, lowered, at the target's precision.

    What the unfused model computes in their place stays, under other names, for the nodes that went with it.

    Args:
        before: the unfused file.
        after: the fused file.
        regions: those to fuse.
        path: the file to write.
    """
    # The sides may be numbered in topological order; edits need the file's own.
    model = scan(before.model.path)
    graph = model.graph
    outputs = {name for region in regions for name in region.outputs}
    values = [value for name in outputs if (value := graph.find(name)) is not None]
    writers = {graph.producer[value] for value in values} - {-1}
    readers = {node for value in values for node in graph.consumers[value] if not _stays(after, graph, node, regions)}
    renamed = sorted(writers | readers)
    inserted = [
        Insertion("", node, (_renamed(graph.node(node), outputs, node in readers, node in writers),))
        for node in renamed
    ]
    nodes = [node for region in regions for node in _lowered(after, region)]
    inserted.append(Insertion("", len(graph.op), tuple(nodes)))
    end = model.graph_parts[-1].end
    extra = [Edit(end, end, field, "", "values") for field in _initializers(model, after, regions)]
    _write(model, build(model, Changes((("", tuple(renamed)),), tuple(inserted)), extra), path)


def _write(model: Model, edits: Sequence[Edit], path: Path) -> None:
    with path.open("wb") as file:
        apply(model.data, edits, file)


def _stays(after: Side, graph: Graph, node: int, regions: Sequence[Region]) -> bool:
    """Whether the fused file has a node of the unfused one too."""
    inside = {number for region in regions for number in region.nodes}
    found = [after.graph.find(graph.name(value)) for value in graph.node_outputs[node] if value]
    return any(value is not None and after.graph.producer[value] not in (-1, *inside) for value in found)


def _renamed(node: onnx.NodeProto, names: Collection[str], reads_old: bool, writes_old: bool) -> onnx.NodeProto:
    """A node of the unfused file that reads or writes what fused nodes write now, under another name."""
    if reads_old:
        node.input[:] = [f"{name}/unfused" if name in names else name for name in node.input]
    if writes_old:
        node.output[:] = [f"{name}/unfused" if name in names else name for name in node.output]
    return node


def _lowered(after: Side, region: Region) -> list[onnx.NodeProto]:
    """A region's nodes with its fused ones as plain operators."""
    graph = after.graph
    body = onnx.GraphProto(name="region", node=[graph.node(node) for node in region.nodes])
    for name in region.inputs:
        value = graph.find(name) or 0
        shape = [dim if isinstance(dim, int) else None for dim in after.shapes.shape(value) or ()]
        body.input.append(helper.make_tensor_value_info(name, after.shapes.dtype(value) or 1, shape))
    opsets = [helper.make_opsetid(domain, version) for domain, version in after.model.opset_imports.items()]
    return list(runnable(onnx.ModelProto(ir_version=10, opset_import=opsets, graph=body), keep=False).graph.node)


def _initializers(model: Model, after: Side, regions: Iterable[Region]) -> list[bytes]:
    """Fields of what the regions read from the fused file's initializers and the unfused file lacks."""
    graph = after.graph
    read = {value for region in regions for node in region.nodes for value in reads(graph, node)}
    new = [value for value in sorted(read & graph.initializers.keys()) if model.graph.find(graph.name(value)) is None]
    heads = [graph.initializers[value] for value in new]
    return [write_field(_INITIALIZER, bytes(after.model.data[head.start : head.end])) for head in heads]
