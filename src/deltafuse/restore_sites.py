"""What a record tells of the sites of an edited file: fused nodes that are still there, original ones to put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx

from deltafuse.enclosed import held_bodies
from deltafuse.patch import Entry, Record
from deltafuse.protobuf import fields
from deltafuse.subgraphs import attribute_graphs, free_names
from deltafuse.undoing import node_digest
from deltafuse.wire import Model

__all__ = ["SHARED", "Node", "Run", "Site", "given_values", "shared_nodes", "site_of", "writer_of", "written_by"]


#: stands for the site of `shared_nodes`
SHARED = ""


@dataclass(frozen=True)
class Node:
    """A node of the original that was removed: its bytes and the names it writes and reads (subgraphs included)."""

    payload: bytes
    outputs: tuple[str, ...]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """Neighbours in the original; `start`, `before` and `after` say where, see `deltafuse.patch.Entry`."""

    start: int
    before: str
    after: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Site:
    """One site: the fused nodes that stand for it, the original's nodes in runs."""

    name: str
    fused: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def nodes(self) -> Iterator[Node]:
        """The original's nodes."""
        return (node for run in self.runs for node in run.nodes)


def site_of(model: Model, record: Record, name: str) -> Site | str:
    """Finds a site in the file, or says what became of its fused nodes."""
    fused: list[int] = []
    for digest in record.digests:
        if digest.site != name or digest.number != 1:
            continue
        node = writer_of(model, digest.name)
        holder = _holder(model, digest.name) if node < 0 else ""
        if holder:
            return f"it lies inside {holder}, where a site is put back only in a file that was not edited since"
        if node < 0:
            return f"the node that wrote {digest.name} is no longer there"
        if node_digest(model.graph.node(node)) != digest.digest:
            return f"the node that writes {digest.name} was changed"
        fused.append(node)
    runs = (_missing(model, run) for run in _runs(record.entries, [name]))
    return Site(name, tuple(fused), tuple(runs))


def _holder(model: Model, name: str) -> str:
    """The node in whose body a value is written, "" where there is none."""
    graph = model.graph

    def writes(scope: onnx.GraphProto) -> bool:
        return any(
            name in node.output or any(writes(attribute.g) for attribute in node.attribute) for node in scope.node
        )

    for node in held_bodies(graph):
        if any(writes(attribute.g) for attribute in graph.node(node).attribute):
            return graph.label(node)
    return ""


def shared_nodes(model: Model, record: Record, sites: Mapping[str, Site]) -> Site:
    """Nodes that went with sites which stay fused, and that the restored ones need: shape arithmetic of all layers."""
    written = written_by(sites)
    there = {model.graph.name(value) for value in given_values(model)}
    wanted = [name for site in sites.values() for node in site.nodes for name in node.reads]
    others = list(_runs(record.entries, [name for name in record.sites if name not in sites])) if wanted else []
    writers = {name: node for run in others for node in run.nodes for name in node.outputs}
    needed: set[bytes] = set()
    while wanted:
        name = wanted.pop()
        node = writers.get(name)
        if node is None or name in written or name in there or writer_of(model, name) >= 0:
            continue
        written.update(node.outputs)
        needed.add(node.payload)
        wanted += node.reads
    runs = (replace(run, nodes=tuple(node for node in run.nodes if node.payload in needed)) for run in others)
    return Site(SHARED, (), tuple(run for run in runs if run.nodes))


def written_by(sites: Mapping[str, Site]) -> set[str]:
    """The names that the original's nodes of these sites write."""
    return {name for site in sites.values() for node in site.nodes for name in node.outputs}


def given_values(model: Model) -> set[int]:
    """Values that no node has to write: graph inputs, initializers, the absent one."""
    graph = model.graph
    return {0, *graph.inputs, *graph.initializers, *(d.value for d in model.declarations if d.number == 11)}


def writer_of(model: Model, name: str) -> int:
    """The node that writes a value, or -1."""
    value = model.graph.find(name) if name else None
    return -1 if value is None else model.graph.producer[value]


def _runs(entries: Iterable[Entry], sites: Iterable[str]) -> Iterator[Run]:
    wanted = set(sites)
    for entry in entries:
        if entry.site in wanted and entry.kind == "nodes" and entry.removed:
            raw = entry.removed
            nodes = tuple(_node(raw[begin:stop]) for _, _, _, begin, stop, _ in fields(raw, 0, len(raw)))
            yield Run(entry.start, entry.before, entry.after, nodes)


def _node(payload: bytes) -> Node:
    node = onnx.NodeProto.FromString(payload)
    reads = dict.fromkeys(filter(None, node.input))
    for number, _, _, begin, stop, _ in fields(payload, 0, len(payload)):
        if number == 5:
            for graph in attribute_graphs(payload, begin, stop):
                reads.update(dict.fromkeys(name.decode() for name in free_names(payload, graph)))
    return Node(payload, tuple(filter(None, node.output)), tuple(reads))


def _missing(model: Model, run: Run) -> Run:
    """The run without the nodes that came back earlier, with another site that needed them."""
    return replace(run, nodes=tuple(node for node in run.nodes if not _is_there(model, node)))


def _is_there(model: Model, node: Node) -> bool:
    writers = {writer_of(model, name) for name in node.outputs}
    if len(writers) != 1 or -1 in writers:
        return False
    return node_digest(model.graph.node(writers.pop())) == node_digest(onnx.NodeProto.FromString(node.payload))
