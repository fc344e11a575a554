"""What differs between an unfused and a fused file: fused regions, and whatever else should not differ.

Everything follows from the two files. Equal nodes compute equal values from equal values, so that two files are equal
where each region (connected nodes that only the fused file has) writes what the unfused file computes under the same
names from the same values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx

from deltafuse.fused import fused_nodes
from deltafuse.graph import Graph
from deltafuse.reasons import TEXTS, Reason
from deltafuse.verify_aliases import lost_copies, same_without_copies
from deltafuse.verify_interface import interface_findings
from deltafuse.verify_opset import opset_findings, rewritten
from deltafuse.verify_regions import Region, connected, marked, reads, region_of, unlabelled
from deltafuse.verify_weights import weight_findings
from deltafuse.wire import Model

TEXTS.update(
    {
        "changed-outside": "{count:# node outside of any fused site differs|nodes outside of any fused site "
        "differ} from the unfused file, the first writes {value}; undo that edit, or compare with an unfused file that "
        "has it too",
        "missing-value": "{value} is read but nothing writes it in the fused file; fuse the unfused file again: an "
        "edit took the node away that wrote it",
        "changed-source": "{value} is not written by what wrote it in the unfused file; undo that edit, or compare "
        "with an unfused file that has it too",
        "written-twice": "{value} is written by more than one node of the fused file; remove one of them, or fuse the "
        "unfused file again",
        "changed-functions": "the model's local functions differ; fuse the unfused file again, or compare with the "
        "one that the fused file was made from",
        "site-unread": "nothing reads the results of the fused site {site}; fuse the unfused file again: an edit took "
        "its readers away",
    }
)


@dataclass(frozen=True)
class Difference:
    """All that differs; findings are differences that no fused region explains.

    Attributes:
        expressions: regions without a fused node, each node marked as written by a fuse.
        copies: what Identity nodes wrote that are gone, and whose readers read what was copied.
        changed: nodes of the fused graph that the unfused one lacks.
    """

    regions: tuple[Region, ...]
    findings: tuple[Reason, ...]
    expressions: tuple[Region, ...] = ()
    copies: tuple[str, ...] = ()
    changed: tuple[int, ...] = ()

    @property
    def written(self) -> tuple[Region, ...]:
        """All regions."""
        return (*self.regions, *self.expressions)


def compare(unfused: Model, fused: Model, entered: Collection[int] = ()) -> Difference:
    """Compares two graphs node by node, whatever their order.

    Args:
        unfused: a file, or a body (see `deltafuse.enclosed`).
        fused: the fused file, or the same body of it.
        entered: nodes of the fused graph that differ in their bodies alone, which are compared by themselves.
    """
    changed, raised, copied = _changed(unfused, fused, entered)
    groups = connected(fused.graph, changed)
    kernels = set(fused_nodes(fused.graph, changed))
    regions = [region_of(fused.graph, nodes, kernels) for nodes in groups if kernels & set(nodes)]
    others = [nodes for nodes in groups if not kernels & set(nodes)]
    written = [nodes for nodes in others if all(marked(fused.graph, node) for node in nodes)]
    expressions = [region_of(fused.graph, nodes, kernels) for nodes in written]
    stray = [node for nodes in others if nodes not in written for node in nodes]
    findings = [
        *_model_findings(unfused, fused),
        *_stray(fused.graph, stray),
        *_values(unfused, fused, set(changed), raised, (*regions, *expressions)),
    ]
    findings += [Reason("site-unread", {"site": fused.graph.node_name(r.fused[0])}) for r in regions if not r.outputs]
    fresh = [node for region in (*regions, *expressions) for node in region.nodes]
    copies = lost_copies(unfused.graph, fused.graph, (*copied, *fresh))
    kept = [tuple(region for region in some if region.outputs) for some in (regions, expressions)]
    return Difference(kept[0], tuple(findings), kept[1], copies, tuple(changed))


def _changed(before: Model, after: Model, entered: Collection[int]) -> tuple[list[int], set[int], set[int]]:
    """Nodes of the fused graph that the unfused one lacks: by bytes, and where these differ by what an operator reads.

    Returns:
        Those; nodes that are written in the form of a raised opset, which the unfused graph has in the old form; and
        nodes that read what an Identity copied.
    """
    unfused, fused = before.graph, after.graph
    known = Counter(bytes(unfused.data[start:end]) for start, end in unfused.spans)
    left: list[int] = []
    for node, (start, end) in enumerate(fused.spans):
        message = bytes(fused.data[start:end])
        if node in entered:
            continue
        if known[message] > 0:
            known[message] -= 1
        else:
            left.append(node)
    if not left:
        return [], set(), set()
    rest = Counter(map(_decoded, _alike(unfused, fused, known, left)))
    forms = rewritten(rest, before, after)
    changed: list[int] = []
    raised: set[int] = set()
    for node in left:
        message = unlabelled(fused.node(node)).SerializeToString(deterministic=True)
        if rest[message] > 0:
            rest[message] -= 1
        elif forms[message] > 0:
            forms[message] -= 1
            raised.add(node)
        else:
            changed.append(node)
    copied = same_without_copies(unfused, fused, rest + forms, changed)
    return [node for node in changed if node not in copied], raised, copied


def _alike(unfused: Graph, fused: Graph, known: Counter[bytes], left: Sequence[int]) -> Iterator[bytes]:
    """Nodes of the unfused graph among the `known` that write what one of those `left` of the fused one writes."""
    names = {fused.name(value) for node in left for value in fused.node_outputs[node] if value}
    written = {unfused.find(name) for name in names}
    for (start, end), outputs in zip(unfused.spans, unfused.node_outputs, strict=True):
        if any(outputs) and written.isdisjoint(outputs):
            continue
        message = bytes(unfused.data[start:end])
        if known[message] > 0:
            known[message] -= 1
            yield message


def _decoded(field: bytes) -> bytes:
    (node,) = onnx.GraphProto.FromString(field).node
    return unlabelled(node).SerializeToString(deterministic=True)


def _stray(graph: Graph, nodes: Sequence[int]) -> Iterator[Reason]:
    if nodes:
        outputs = [graph.name(value) for node in nodes for value in graph.node_outputs[node] if value]
        yield Reason("changed-outside", {"count": len(nodes), "value": (outputs or ["nothing"])[0]})


def _values(
    unfused: Model, fused: Model, changed: set[int], raised: set[int], regions: Iterable[Region]
) -> Iterator[Reason]:
    """Values whose origin in the fused file is not their origin in the unfused one."""
    before, after = unfused.graph, fused.graph
    written = Counter(value for outputs in after.node_outputs for value in outputs if value)
    for value, count in written.items():
        if count > 1:
            yield Reason("written-twice", {"value": after.name(value)})
    needed = dict.fromkeys(after.outputs)
    for node in range(len(after.op)):
        if node not in changed:
            needed.update(dict.fromkeys(reads(after, node)))
    # What was an attribute may be a constant at a raised opset.
    new = {value for node in raised if after.standard[node] == "Constant" for value in after.node_outputs[node]}
    names = [after.name(value) for value in needed if value and value not in new]
    for name in dict.fromkeys((*names, *(name for region in regions for name in region.inputs))):
        reason = _origin(before, after, name)
        if reason is not None:
            yield reason


def _origin(before: Graph, after: Graph, name: str) -> Reason | None:
    old, new = before.find(name), after.find(name)
    kind = "" if new is None else _kind(after, new)
    if not kind:
        return Reason("missing-value", {"value": name})
    if old is None or _kind(before, old) != kind:
        return Reason("changed-source", {"value": name})
    return None


def _kind(graph: Graph, value: int) -> str:
    if value in graph.initializers:
        return "initializer"
    if graph.producer[value] >= 0:
        return "node"
    return "input" if value in graph.inputs else ""


def _model_findings(unfused: Model, fused: Model) -> Iterator[Reason]:
    if not fused.place:
        yield from opset_findings(unfused, fused)
        if _functions(unfused) != _functions(fused):
            yield Reason("changed-functions")
    yield from interface_findings(unfused, fused)
    yield from weight_findings(unfused, fused)


def _functions(model: Model) -> Counter[bytes]:
    return Counter(_function(bytes(model.data[start:end])) for start, end in model.functions)


def _function(message: bytes) -> bytes:
    """A local function without what no operator reads."""
    function = onnx.FunctionProto.FromString(message)
    function.doc_string = ""
    del function.metadata_props[:]
    plain = [unlabelled(node) for node in function.node]
    del function.node[:]
    function.node.extend(plain)
    return function.SerializeToString(deterministic=True)
