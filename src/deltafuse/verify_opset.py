"""What a raised opset changes between two files, and that it is raised rightly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx

from deltafuse.enclosed import Enclosed, fused_bodies
from deltafuse.graph import Graph
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.lowering_conv import CAUSAL_CONV
from deltafuse.opset import adapt, stale
from deltafuse.reasons import TEXTS, Reason
from deltafuse.verify_regions import unlabelled
from deltafuse.wire import Model

TEXTS.update(
    {
        "changed-opset": "the opset of domain {domain!r} went from {unfused} to {fused}; fuse the unfused file again, "
        "or give the import back its version",
        "stale-operator": "the fused file is of opset {fused}, raised from {unfused}, but {value} is written by an "
        "operator of the old form; fuse the model again",
    }
)


def rewritten(nodes: Counter[bytes], unfused: Model, fused: Model) -> Counter[bytes]:
    """What nodes of the unfused file become where the opset is raised: messages and how often each."""
    have, want = unfused.opset_imports.get("", 0), fused.opset_imports.get("", 0)
    found: Counter[bytes] = Counter()
    for message, count in nodes.items() if want > have else ():
        new = adapt(onnx.NodeProto.FromString(message), have, want)
        if isinstance(new, tuple):
            found.update(dict.fromkeys((unlabelled(node).SerializeToString(deterministic=True) for node in new), count))
    return found


def opset_findings(unfused: Model, fused: Model) -> Iterator[Reason]:
    """Imports that differ, but for new domains and an ai.onnx version that an operator needs."""
    for domain, version in unfused.opset_imports.items():
        now = fused.opset_imports.get(domain)
        if not domain and now is not None and now > version:
            yield from _raised(fused, version, now)
        elif now != version:
            yield Reason("changed-opset", {"domain": domain, "unfused": version, "fused": now})


def _raised(fused: Model, version: int, now: int) -> Iterator[Reason]:
    graph = fused.graph
    node = stale(fused, version)
    bodies = (scope.model.graph for scope in fused_bodies(fused) if isinstance(scope, Enclosed))
    if not any(_needs(one) for one in (graph, *bodies)):
        yield Reason("changed-opset", {"domain": "", "unfused": version, "fused": now})
    elif node is not None:
        value = graph.name(graph.node_outputs[node][0])
        yield Reason("stale-operator", {"unfused": version, "fused": now, "value": value})


def _needs(graph: Graph) -> bool:
    """Whether a graph has an operator that the raised opset brought."""
    needing = (LINEAR_ATTENTION, CAUSAL_CONV)
    return any(op in needing and not domain for op, domain in zip(graph.op, graph.domain, strict=True))
