"""The opset that a file needs once its fused nodes are lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from deltafuse.enclosed import Enclosed
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.lowering_conv import CAUSAL_CONV
from deltafuse.opset import OLDEST_RUNTIME, needed

_STANDARD = (LINEAR_ATTENTION, CAUSAL_CONV)


def lowered_opsets(scopes: Sequence[Enclosed], chosen: Sequence[Sequence[int]]) -> tuple[tuple[str, int], ...]:
    """The opset that the file needs once its standard fused operators are gone; none where it is not known to do."""
    model = scopes[0].model
    have = model.opset_imports.get("", 0)
    if not _has_standard(scopes, chosen) or model.functions:
        return ()
    wanted = max(needed(_others(scope, some, scopes), have) for scope, some in zip(scopes, chosen, strict=True))
    return (("", wanted),) if wanted < have else ()


def _others(scope: Enclosed, chosen: Sequence[int], scopes: Sequence[Enclosed]) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph that stay; not those whose bodies are among the graphs."""
    entered = {body.around.model.graph.spans[body.node] for body in scopes if body.around is not None}
    graph, gone = scope.model.graph, {*chosen}
    for index in range(graph.outer, len(graph.op)):
        if index not in gone and graph.spans[index] not in entered:
            yield graph.node(index)


def _has_standard(scopes: Sequence[Enclosed], chosen: Sequence[Sequence[int]]) -> bool:
    pairs = zip((scope.model.graph for scope in scopes), chosen, strict=True)
    return any(graph.op[index] in _STANDARD and not graph.domain[index] for graph, some in pairs for index in some)


def opset_notes(
    scopes: Sequence[Enclosed], chosen: Sequence[Sequence[int]], opsets: Sequence[tuple[str, int]]
) -> Iterator[str]:
    """What is to be said of the opset that the file has then."""
    have = scopes[0].model.opset_imports.get("", 0)
    if opsets:
        yield f"the file imports opset {opsets[0][1]} in place of {have}, which nothing in it needs any more"
    elif _has_standard(scopes, chosen) and have > OLDEST_RUNTIME:
        yield (
            f"the file still needs opset {have}, which an onnxruntime without the fused operators may refuse: "
            "convert it with onnx.version_converter"
        )
