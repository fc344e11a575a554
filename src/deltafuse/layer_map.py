"""Which layers of a model are linear attention and which full attention, for people to see; nothing is decided by it.

Full attention is known by its form: a Softmax whose result is contracted with other data, or an operator called
attention. Layers go by the numbers in the exporter's scopes where there are any, else in the order of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deltafuse.evidence import Evidence
from deltafuse.finder import layer_of
from deltafuse.fused import fused_nodes
from deltafuse.graph import Graph
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.match import Match, SiteReport
from deltafuse.softmax import weighs_values
from deltafuse.tables import status_text

_NUMBER = re.compile(r"(.*\.)(\d+)")


@dataclass(frozen=True)
class Layer:
    """One layer, or a part of the graph where the exporter left no layers.

    Attributes:
        name: ``layers.3``, or the site's or the node's name.
        kind: ``linear`` attention, ``full`` attention, ``fused`` by an earlier run, ``none`` of these.
        status: of the site, "" where it is none.
        site: the site's number in the report, -1 where it is none.
        what: the nodes that it was known by.
    """

    name: str
    kind: str
    status: str = ""
    site: int = -1
    what: str = ""


def layer_map(evidence: Evidence, sites: Sequence[SiteReport]) -> tuple[Layer, ...]:
    """The layers in the order of the model."""
    graph = evidence.model.graph
    first = {name: candidate.core[0] for name, candidate in evidence.candidates.items()}
    found: list[tuple[int, Layer]] = []
    for index, site in enumerate(sites):
        match = site.match
        start = min(match.nodes) if isinstance(match, Match) else first.get(site.name, -1)
        if start >= 0 and not site.rule:
            layer = layer_of(graph, first.get(site.name, start)) or site.name
            found.append((start, Layer(layer, "linear", str(status_text(site)), index, site.name)))
    inside = {node for candidate in evidence.candidates.values() for node in candidate.core}
    found += _attention(graph, evidence.kinds, inside)
    for node in fused_nodes(graph, graph.nodes_with(("Custom", LINEAR_ATTENTION))):
        found.append((node, Layer(layer_of(graph, node) or graph.label(node), "fused", what=graph.label(node))))
    return _ordered([layer for _, layer in sorted(found, key=lambda pair: pair[0])])


def _attention(graph: Graph, kinds: bytearray, inside: set[int]) -> Iterator[tuple[int, Layer]]:
    """Full attention, one for each node that it is known by."""
    named = {op for op in set(graph.op) if op.endswith("Attention") and op != LINEAR_ATTENTION}
    for node in graph.nodes_with({"Softmax", *named}):
        if graph.op[node] in named or (node not in inside and weighs_values(graph, kinds, node)):
            what = f"{graph.op[node]} {graph.label(node)}"
            yield node, Layer(layer_of(graph, node) or graph.label(node), "full", what=what)


def _ordered(found: Iterable[Layer]) -> tuple[Layer, ...]:
    """One entry for a layer and kind; numbered layers that nothing was seen in have their place among the others."""
    single = list({(layer.name, layer.kind, layer.site): layer for layer in found}.values())
    numbers = [match for layer in single if (match := _NUMBER.fullmatch(layer.name))]
    stems = {match[1] for match in numbers}
    if len(stems) != 1 or len(numbers) != len(single):
        return tuple(single)
    stem = stems.pop()
    by_number: Mapping[int, list[Layer]] = {}
    for match, layer in zip(numbers, single, strict=True):
        by_number.setdefault(int(match[2]), []).append(layer)
    # A number out of all proportion is no layer: then only those that were found are shown.
    span = range(max(by_number) + 1) if max(by_number) < 4 * len(single) + 16 else sorted(by_number)
    return tuple(layer for n in span for layer in by_number.get(n, [Layer(f"{stem}{n}", "none")]))
