"""How often each operator stands in the graphs that were searched, before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from onnx import NodeProto

from deltafuse.drafting import Draft
from deltafuse.fused import fused_type
from deltafuse.graph import Graph
from deltafuse.probing import title
from deltafuse.splice import adapted_nodes
from deltafuse.wire import Model


def emitted_of(nodes: Iterable[NodeProto]) -> dict[str, int]:
    """Operator -> count, most frequent first."""
    return dict(Counter(title(node.op_type, node.domain, fused_type(node) or "") for node in nodes).most_common())


def operators_of(file: Model, graphs: Sequence[Graph], draft: Draft) -> Mapping[str, tuple[int, int]]:
    """Operator -> nodes of it before and after, the largest change first.

    Args:
        file: as it was scanned.
        graphs: the main graph as the draft numbers it, calls in place, and the bodies that were entered.
        draft: what is to be changed.
    """
    main, *bodies = graphs
    before = _counted(file.graph)
    after = Counter(before) if main is file.graph else _counted(main)
    for graph in bodies:
        inside = _counted(graph, range(graph.outer, len(graph.op)))
        before, after = before + inside, after + inside
    for graph, part in zip(graphs, draft.parts, strict=True):
        replaced = part.changes.opsets.replaced
        gone = [node for _, nodes in part.removed for node in nodes]
        after.subtract(_counted(graph, [*gone, *(node for node, _ in replaced)]))
        written = [node for plan in part.plans for node in adapted_nodes(plan, part.changes)]
        after.update(emitted_of([*written, *(node for _, nodes in replaced for node in nodes)]))
    ops = {op: (before[op], after[op]) for op in (*before, *after)}
    return dict(sorted(ops.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0])))


def _counted(graph: Graph, nodes: Collection[int] | None = None) -> Counter[str]:
    chosen = range(len(graph.op)) if nodes is None else nodes
    ops, domains = (column if nodes is None else map(column.__getitem__, nodes) for column in (graph.op, graph.domain))
    # Nearly always there is one domain: texts are counted faster than pairs.
    counts = zip(ops, domains, strict=True) if any(graph.domain) else {(op, ""): n for op, n in Counter(ops).items()}
    keys = Counter(counts)
    found = Counter({title(op, domain): count for (op, domain), count in keys.items() if op != "Custom" or domain})
    if keys["Custom", ""]:
        customs = [node for node in chosen if graph.op[node] == "Custom" and not graph.domain[node]]
        found.update(title("Custom", "", fused_type(graph.node(node)) or "") for node in customs)
    return found
