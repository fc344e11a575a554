"""Structure of each fused node: attributes, the types on the way of each operand, and who is wired to whom.

The mathematics cannot see everything: in double no rounding shows. So each operand is followed back to where the fused
region begins, and held against the profile of the target (see `deltafuse.lint`), against what the nodes say they belong
to, and against the record of the fuse where the file has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from deltafuse import targets
from deltafuse.boundary import site_of
from deltafuse.classes import Kind
from deltafuse.dtypes import dtype_name
from deltafuse.errors import UserError
from deltafuse.fused import call as read_call
from deltafuse.graph import Graph
from deltafuse.lint import ASCEND, node_findings
from deltafuse.lowering_conv import CAUSAL_CONV, is_causal_conv
from deltafuse.reasons import TEXTS, Reason
from deltafuse.record import find
from deltafuse.shapes import Shapes
from deltafuse.structure_strangers import NORMED, around, find_strangers, norm_nodes
from deltafuse.undoing import node_digest
from deltafuse.verify_bars import target_of
from deltafuse.verify_cut import Side, site_name
from deltafuse.verify_regions import Region, Walk, walk_back
from deltafuse.verify_trial import Finding, finding

__all__ = ["OperandPath", "SiteStructure", "check_structure"]

TEXTS.update(
    {
        "structure-profile": "{node}, {part}: found {found}, wanted {wanted}; {fix}",
        "structure-rounded": "{what} goes through {narrow} on its way from {source} to {wanted}: numbers are "
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
_CONV_PORTS = ("x", "weight", "bias", "past_state")
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
    """Looks over every fused node of some regions, convolutions among them.

    Args:
        after: the fused file.
        regions: what it has in place of the unfused nodes.
    """
    changed = _changed_since(after)
    return tuple(found for region in regions for found in _check(after, region, changed))


def _check(after: Side, region: Region, changed: dict[str, str]) -> Iterator[SiteStructure]:
    graph = after.graph
    convs = [node for node in region.nodes if is_causal_conv(graph.op[node], graph.domain[node])]
    called = {node: _operands(graph, node) for node in sorted((*region.fused, *convs))}
    inside = around(graph, region, called)
    strange = dict(find_strangers(after, inside, called))
    notes = tuple(dict.fromkeys(changed[value] for value in _written(graph, region) if value in changed))
    for node, ports in called.items():
        message, name = graph.node(node), graph.label(node)
        site = site_of(message) or site_name(graph, region)
        reasons = list(_held_to_profile(after, node))
        reasons += [strange[node]] if node in strange else []
        paths: list[OperandPath] = []
        for port, operand in ports.items():
            walk = walk_back(graph, inside, operand)
            paths.append(_path(after.shapes, port, operand, walk))
            # A norm computes in the type that the source has it in.
            norm = [graph.node_outputs[one][0] for one in (norm_nodes(after, walk) if port in NORMED else ())]
            reasons += _rounded(after, f"{port} of {name}", operand, walk, (*walk.sources, *norm))
            reasons += _wired(graph, port, name, site, walk)
        reasons += _results_rounded(after, inside, node)
        yield SiteStructure(site, name, _kind(message), tuple(paths), tuple(map(finding, reasons)), notes)


def _operands(graph: Graph, node: int) -> dict[str, int]:
    """The ports of a fused node that carry data, and what they are fed with; none where it is malformed."""
    if graph.op[node] == CAUSAL_CONV:
        pairs = zip(_CONV_PORTS, graph.node_inputs[node], strict=False)
        return {port: value for port, value in pairs if value}
    call = read_call(graph.node(node))
    if isinstance(call, Reason):
        return {}
    return {port: graph.find(value) or 0 for port, value in call.ports.items() if port in _DATA}


def _kind(message: NodeProto) -> str:
    """What a fused node calls."""
    call = None if message.op_type == CAUSAL_CONV else read_call(message)
    return message.op_type if call is None or isinstance(call, Reason) else call.op


def _held_to_profile(after: Side, node: int) -> Sequence[Reason]:
    """What is wrong by the node's target; the two of Ascend share their operators, so that either will do."""
    graph = after.graph
    known = target_of(graph)
    names = ASCEND if known in ASCEND else (known,)
    if graph.op[node] == CAUSAL_CONV:
        names = ("ort" if graph.domain[node] == "com.microsoft" else "onnx",)
    found = [node_findings(after.model, after.shapes, targets.get(name), node) for name in names if name]
    least = min(found, key=len, default=())
    return [
        Reason(
            "structure-profile",
            {"node": one.node, "part": one.part or one.code, "found": one.found, "wanted": one.wanted, "fix": one.fix},
        )
        for one in least
    ]


def _path(shapes: Shapes, port: str, operand: int, walk: Walk) -> OperandPath:
    graph = shapes.graph
    plain = [node for node in walk.nodes if graph.standard[node] != "Constant"]
    values = [*walk.sources, *(graph.node_outputs[node][0] for node in plain)]
    kinds = [kind for value in values if (kind := shapes.dtype(value) or 0) in _TYPES]
    names = [_TYPES[kind][1] for index, kind in enumerate(kinds) if not index or kind != kinds[index - 1]]
    sources = tuple(map(graph.name, walk.sources))
    return OperandPath(port, sources, tuple(graph.op[node] for node in plain), tuple(names))


def _rounded(after: Side, what: str, value: int, walk: Walk, sources: Sequence[int]) -> Iterator[Reason]:
    """A type on the way that keeps less than where the value comes from and less than where it goes."""
    graph, shapes = after.graph, after.shapes
    wanted = _TYPES.get(shapes.dtype(value) or 0)
    # A source of unknown type is as good as what becomes of it.
    known = (_TYPES.get(dtype) if (dtype := shapes.dtype(source)) else wanted for source in sources)
    given = [kind for kind in known if kind is not None]
    if not given or wanted is None:
        return
    least = min(*given, wanted)
    for number in walk.nodes:
        made = graph.node_outputs[number][0]
        if graph.standard[number] == "Constant" or after.kinds[made] < Kind.WEIGHT:
            continue
        dtype = shapes.dtype(made)
        kind = least if dtype is None else _TYPES.get(dtype, (0, dtype_name(dtype)))
        if kind < least:
            names = {"narrow": kind[1], "source": given[0][1], "wanted": wanted[1]}
            yield Reason("structure-rounded", {"what": what, **names})
            return


def _results_rounded(after: Side, inside: Collection[int], node: int) -> Iterator[Reason]:
    """The same for what a fused node gives, on its way to whoever reads it."""
    graph, ends = after.graph, set(after.graph.outputs)
    results = {value for value in graph.node_outputs[node] if value}
    for number in sorted(inside):
        for value in filter(None, graph.node_outputs[number]):
            if value not in ends and all(reader in inside for reader in graph.consumers[value]):
                continue
            walk = walk_back(graph, inside, value)
            sources = sorted(results.intersection(walk.sources))
            what = f"{graph.name(value)}, a result of {graph.label(node)},"
            yield from _rounded(after, what, value, walk, sources)


def _wired(graph: Graph, port: str, node: str, site: str, walk: Walk) -> Iterator[Reason]:
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
