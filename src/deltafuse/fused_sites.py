"""The fused nodes that a file holds already, as sites: what they are, and what its rollback record tells of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from deltafuse.enclosed import Enclosed, fused_bodies
from deltafuse.errors import UserError
from deltafuse.fused import fused_nodes, kernel
from deltafuse.graph import Graph
from deltafuse.held import Held, Port
from deltafuse.lowering_conv import is_causal_conv
from deltafuse.match import FuseReport, Pinned, SiteReport
from deltafuse.next_steps import rollback
from deltafuse.operator_counts import emitted_of
from deltafuse.page_nodes import attribute_texts, node_title, ports_of
from deltafuse.patch import Record, damaged
from deltafuse.probing import short_dtype, tensor_text
from deltafuse.record import find
from deltafuse.shapes import Shapes
from deltafuse.targets.base import FLOATS
from deltafuse.wire import Model

__all__ = ["with_held"]

#: What is there to hand a node its operands.
_AROUND = ("Cast", "Constant", "Reshape", "Transpose", "Identity")


@dataclass(frozen=True)
class _Scope:
    """A graph with what is known of its values."""

    graph: Graph
    shapes: Shapes
    place: str

    def nodes(self) -> range:
        """The nodes of the graph itself."""
        return range(self.graph.outer, len(self.graph.op))


def with_held(report: FuseReport, file: Model) -> FuseReport:
    """A report, and in front of its sites those that an earlier run fused.

    Args:
        report: of an inspection.
        file: as it was scanned.
    """
    bodies = [scope for scope in fused_bodies(file) if isinstance(scope, Enclosed)]
    scopes = [_Scope(file.graph, Shapes(file), "")]
    scopes += [_Scope(scope.model.graph, scope.shapes, scope.model.place) for scope in bodies]
    found = [(scope, node) for scope in scopes for node in _fused(scope)]
    if not found:
        return report
    plain = [_site(scope, scope.graph.label(node), node, [node], None) for scope, node in found]
    try:
        known = find(file)
        record = known.record
        sites = [_site(scope, name, main, nodes, record) for scope, name, main, nodes in _recorded(scopes, record)]
        pinned = (*_pinned(file, record), *report.pinned)
    except (UserError, DecodeError) as error:
        fault = error if isinstance(error, UserError) else damaged(error)
        note = f"what the fused nodes replaced is not known ({fault.code}): {fault}"
        return replace(report, sites=(*plain, *report.sites), notes=(*report.notes, note))
    told = {(site.inside, site.held.node) for site in sites if site.held is not None}
    sites += [site for site in plain if site.held is not None and (site.inside, site.held.node) not in told]
    back = "puts its sites back and keeps what was edited since" if known.edited else "gives the file back as it was"
    note = f"fused before: `{rollback(Path(report.model))}` {back}"
    return replace(report, sites=(*sites, *report.sites), pinned=pinned, notes=(*report.notes, note))


def _fused(scope: _Scope) -> list[int]:
    graph = scope.graph
    convolutions = [node for node in scope.nodes() if is_causal_conv(graph.op[node], graph.domain[node])]
    return sorted([*fused_nodes(graph, scope.nodes()), *convolutions])


def _recorded(scopes: Sequence[_Scope], record: Record) -> Iterator[tuple[_Scope, str, int, list[int]]]:
    """The sites of a record that are still there: their name, the node that stands for each, all that came with it."""
    written = defaultdict[str, list[str]](list)
    for digest in record.digests:
        if digest.site and digest.number == 1:
            written[digest.site].append(digest.name)
    for name, values in written.items():
        for scope in scopes:
            ids = [value for value in map(scope.graph.find, values) if value is not None]
            nodes = sorted({node for value in ids if (node := scope.graph.producer[value]) >= scope.graph.outer})
            if nodes:
                yield scope, name, _main(scope, nodes), nodes
                break


def _main(scope: _Scope, nodes: Sequence[int]) -> int:
    """The fused operator; of an ordinary expression the last node that computes."""
    fused, graph = {*_fused(scope)}, scope.graph
    working = [node for node in nodes if graph.op[node] not in _AROUND] or nodes
    return next((node for node in nodes if node in fused), working[-1])


def _site(scope: _Scope, name: str, main: int, nodes: Sequence[int], record: Record | None) -> SiteReport:
    graph, entries = scope.graph, () if record is None else record.entries
    gone = [entry for entry in entries if entry.site == name and entry.kind == "nodes"]
    replaced = [node for entry in gone for node in onnx.GraphProto.FromString(entry.removed).node]
    node = graph.node(main)
    names = ports_of(node)
    inputs, outputs = (tuple(_ports(scope, values, names)) for values in (node.input, node.output))
    held = Held(
        graph.label(main), node.domain, tuple(attribute_texts(node).items()), inputs, outputs,
        (*_rounded(scope, nodes, inputs), *_returned(scope, nodes, outputs)), emitted_of(replaced),
    )  # fmt: skip
    emitted = emitted_of(graph.node(index) for index in nodes)
    op = kernel(node) or node_title(node).rpartition(".")[2]
    return SiteReport(name, "fused", None, op, nodes=len(replaced), emitted=emitted, inside=scope.place, held=held)


def _ports(scope: _Scope, values: Sequence[str], names: Mapping[str, str]) -> Iterator[Port]:
    shapes = scope.shapes
    for name in dict.fromkeys(filter(None, values)):
        value = scope.graph.find(name)
        shape = None if value is None else shapes.shape(value)
        known = None if shape is None else [size if shapes.is_known(size) else None for size in shape]
        yield Port(names.get(name, ""), name, tensor_text(None if value is None else shapes.dtype(value), known))


def _rounded(scope: _Scope, nodes: Sequence[int], ports: Sequence[Port]) -> Iterator[tuple[str, str, str]]:
    """The operands that nodes of the site turn into another type, with both types."""
    graph, own = scope.graph, {*nodes}
    for port in ports:
        value = graph.find(port.tensor)
        while value is not None and (node := graph.producer[value]) in own and graph.node_inputs[node]:
            source = graph.node_inputs[node][0]
            was, now = scope.shapes.dtype(source), scope.shapes.dtype(value)
            if graph.op[node] == "Cast":
                if was is not None and now is not None and now in FLOATS:
                    yield port.name or port.tensor, short_dtype(was), FLOATS[now]
                break
            value = source


def _returned(scope: _Scope, nodes: Sequence[int], ports: Sequence[Port]) -> Iterator[tuple[str, str, str]]:
    """The results that nodes of the site turn into another type, with that type and the one they come in."""
    graph, own = scope.graph, {*nodes}
    for port in ports:
        value = graph.find(port.tensor)
        while value is not None and (reading := [node for node in graph.consumers[value] if node in own]):
            node, source = reading[0], value
            value = graph.node_outputs[node][0]
            if graph.op[node] == "Cast":
                was, now = scope.shapes.dtype(value), scope.shapes.dtype(source)
                if was is not None and now is not None and now in FLOATS:
                    yield port.name or port.tensor, short_dtype(was), FLOATS[now]
                break


def _pinned(file: Model, record: Record) -> Iterator[Pinned]:
    """The axes of inputs and outputs that have a size where the original had a name."""
    for entry in record.entries:
        if entry.kind != "pins":
            continue
        part = onnx.GraphProto.FromString(entry.removed)
        for kind, infos in (("input", part.input), ("output", part.output)):
            yield from (axis for info in infos for axis in _changed(file.graph, kind, info))


def _changed(graph: Graph, kind: str, old: onnx.ValueInfoProto) -> Iterator[Pinned]:
    value = graph.find(old.name)
    new = None if value is None else graph.value_info(value)
    if new is None:
        return
    dims = zip(old.type.tensor_type.shape.dim, new.type.tensor_type.shape.dim, strict=False)
    for axis, (was, now) in enumerate(dims):
        if now.HasField("dim_value") and not was.HasField("dim_value"):
            yield Pinned(old.name, axis, was.dim_param or "?", now.dim_value, kind)
