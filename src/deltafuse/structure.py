"""Structure of each fused node: attributes, the types on the way of each operand, and who is wired to whom.

The mathematics cannot see everything: in double no rounding shows. So each operand is followed back to where the fused
region begins, and held against the profile of the target (see `deltafuse.lint`), against what the nodes say they belong
to, and against the record of the fuse where the file has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from deltafuse import targets
from deltafuse.boundary import site_of
from deltafuse.errors import UserError
from deltafuse.fused import call as read_call
from deltafuse.graph import Graph
from deltafuse.lint import ASCEND, node_findings
from deltafuse.reasons import TEXTS, Reason
from deltafuse.record import find, node_digest
from deltafuse.shapes import Shapes
from deltafuse.verify_bars import target_of
from deltafuse.verify_cut import Side, site_name
from deltafuse.verify_diff import Region, reads
from deltafuse.verify_trial import Finding, finding

__all__ = ["OperandPath", "SiteStructure", "check_structure"]

TEXTS.update(
    {
        "structure-profile": "{node}, {part}: found {found}, wanted {wanted}; {fix}",
        "structure-rounded": "{port} of {node} goes through {narrow} on its way from {source} to {wanted}: numbers are "
        "lost that neither side has to lose; fuse the model again",
        "structure-wiring": "{port} of {node}, which belongs to {site}, is computed by nodes of {other}; "
        "fuse the model again",
    }
)

#: Element type -> bits of the significand, what it keeps of a number, and its name.
_TYPES: dict[int, tuple[int, str]] = {
    TensorProto.BFLOAT16: (8, "bfloat16"),
    TensorProto.FLOAT16: (11, "float16"),
    TensorProto.FLOAT: (24, "float32"),
    TensorProto.DOUBLE: (53, "float64"),
}
_SIZES = frozenset({"Shape", "Size"})
_DATA = ("query", "key", "value", "g", "gk", "beta", "state", "initial_state")


@dataclass(frozen=True)
class OperandPath:
    """How an operand comes to a fused node.

    Attributes:
        port: of the node.
        sources: values that the region reads for it; none where it is a constant.
        ops: operators on the way, in order.
        dtypes: element types on the way, from the sources' to the operand's, each once in a row.
    """

    port: str
    sources: tuple[str, ...]
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class SiteStructure:
    """One fused node.

    Attributes:
        site: name of its site.
        node: name of the node.
        op: what it calls.
        operands: one for each port that carries data.
        findings: what is wrong.
        notes: nodes that are not as the record of the fuse has them.
    """

    site: str
    node: str
    op: str
    operands: tuple[OperandPath, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def check_structure(after: Side, regions: Sequence[Region]) -> tuple[SiteStructure, ...]:
    """Looks over every fused node of some regions.

    Args:
        after: the fused file.
        regions: what it has in place of the unfused nodes.
    """
    changed = _changed_since(after)
    return tuple(_check(after, region, node, changed) for region in regions for node in region.fused)


def _check(after: Side, region: Region, node: int, changed: dict[str, str]) -> SiteStructure:
    graph = after.graph
    message = graph.node(node)
    name = message.name or graph.name(graph.node_outputs[node][0])
    site = site_of(message) or site_name(graph, region)
    reasons = list(_held_to_profile(after, node))
    call = read_call(message)
    ports = {} if isinstance(call, Reason) else {p: v for p, v in call.ports.items() if p in _DATA}
    paths: list[OperandPath] = []
    for port, operand in ports.items():
        walk = _walk(graph, set(region.nodes), graph.find(operand) or 0)
        paths.append(_path(after.shapes, port, operand, walk))
        reasons += _rounded(after.shapes, port, name, operand, walk)
        reasons += _wired(graph, port, name, site, walk)
    notes = tuple(dict.fromkeys(changed[value] for value in _written(graph, region) if value in changed))
    kind = call.op if not isinstance(call, Reason) else message.op_type
    return SiteStructure(site, name, kind, tuple(paths), tuple(map(finding, reasons)), notes)


def _held_to_profile(after: Side, node: int) -> Sequence[Reason]:
    """What is wrong by the node's target; the two of Ascend share their operators, so that either will do."""
    known = target_of(after.graph)
    names = ASCEND if known in ASCEND else (known,)
    found = [node_findings(after.model, after.shapes, targets.get(name), node) for name in names if name]
    least = min(found, key=len, default=())
    return [
        Reason(
            "structure-profile",
            {"node": one.node, "part": one.part or one.code, "found": one.found, "wanted": one.wanted, "fix": one.fix},
        )
        for one in least
    ]


@dataclass(frozen=True)
class _Walk:
    """The way back from an operand: nodes in order, values it starts from, sizes apart."""

    nodes: tuple[int, ...]
    sources: tuple[int, ...]


def _walk(graph: Graph, inside: set[int], operand: int) -> _Walk:
    nodes, sources, seen, stack = set[int](), dict[int, None](), {0}, [operand]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        node = graph.producer[value]
        if node not in inside:
            sources[value] = None
        elif graph.standard[node] not in _SIZES:
            nodes.add(node)
            stack += reads(graph, node)
    return _Walk(tuple(sorted(nodes)), tuple(sources))


def _path(shapes: Shapes, port: str, operand: str, walk: _Walk) -> OperandPath:
    graph = shapes.graph
    plain = [node for node in walk.nodes if graph.standard[node] != "Constant"]
    values = [*walk.sources, *(graph.node_outputs[node][0] for node in plain)]
    kinds = [kind for value in values if (kind := shapes.dtype(value) or 0) in _TYPES]
    names = [_TYPES[kind][1] for index, kind in enumerate(kinds) if not index or kind != kinds[index - 1]]
    sources = tuple(map(graph.name, walk.sources))
    return OperandPath(port, sources, tuple(graph.op[node] for node in plain), tuple(names))


def _rounded(shapes: Shapes, port: str, node: str, operand: str, walk: _Walk) -> Iterator[Reason]:
    """A type on the way that keeps less than where the operand comes from and less than where it goes."""
    graph = shapes.graph
    given = [_TYPES[kind] for value in walk.sources if (kind := shapes.dtype(value) or 0) in _TYPES]
    wanted = _TYPES.get(shapes.dtype(graph.find(operand) or 0) or 0)
    if not given or wanted is None:
        return
    least = min(*given, wanted)
    for number in walk.nodes:
        kind = _TYPES.get(shapes.dtype(graph.node_outputs[number][0]) or 0, least)
        if kind < least and graph.standard[number] != "Constant":
            names = {"narrow": kind[1], "source": given[0][1], "wanted": wanted[1]}
            yield Reason("structure-rounded", {"port": port, "node": node, **names})
            return


def _wired(graph: Graph, port: str, node: str, site: str, walk: _Walk) -> Iterator[Reason]:
    """Nodes of another site on the way: what a fuse writes says whose it is."""
    others = {site_of(graph.node(number)) for number in walk.nodes} - {site, ""}
    if others:
        at = {"port": port, "node": node, "site": site, "other": ", ".join(sorted(others))}
        yield Reason("structure-wiring", at)


def _changed_since(after: Side) -> dict[str, str]:
    """Value -> what became of the node that a fuse wrote it with; empty where the file has no record."""
    graph = after.graph
    try:
        digests = find(after.model).record.digests
    except UserError:
        return {}
    found: dict[str, str] = {}
    for digest in digests:
        value = graph.find(digest.name) if digest.number == 1 else None
        node = -1 if value is None else graph.producer[value]
        if digest.number == 1 and node >= 0 and node_digest(graph.node(node)) != digest.digest:
            found[digest.name] = f"the node that writes {digest.name} was changed since the fuse"
    return found


def _written(graph: Graph, region: Region) -> Iterator[str]:
    return (graph.name(value) for node in region.nodes for value in graph.node_outputs[node] if value)
