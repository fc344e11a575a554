"""The opset that a file needs once its fused nodes are lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from deltafuse.enclosed import Enclosed
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.lowering_conv import CAUSAL_CONV
from deltafuse.opset import adapt

#: what the oldest onnxruntime that deltafuse runs on (1.23) takes
_OLDEST_RUNTIME = 23
_STANDARD = (LINEAR_ATTENTION, CAUSAL_CONV)


def lowered_opsets(scopes: Sequence[Enclosed], chosen: Sequence[Sequence[int]]) -> tuple[tuple[str, int], ...]:
    """The opset that the file needs once its standard fused operators are gone; none where it is not known to do.

    An onnxruntime without these operators refuses the opset that came with it, whatever the file holds.
    """
    model = scopes[0].model
    have = model.opset_imports.get("", 0)
    if not _has_standard(scopes, chosen) or have <= _OLDEST_RUNTIME or model.functions:
        return ()
    for scope, some in zip(scopes, chosen, strict=True):
        graph = scope.model.graph
        others = set(range(graph.outer, len(graph.op))) - set(some)
        plain = [index for index in sorted(others) if not graph.domain[index]]
        known = all(onnx.defs.has(op, _OLDEST_RUNTIME, "") for op in {graph.op[index] for index in plain})
        # A node that means the same in both is one that raising the opset leaves alone.
        if not known or any(adapt(graph.node(index), _OLDEST_RUNTIME, have) is not None for index in plain):
            return ()
    return (("", _OLDEST_RUNTIME),)


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
    elif _has_standard(scopes, chosen) and have > _OLDEST_RUNTIME:
        yield (
            f"the file still needs opset {have}, which an onnxruntime without the fused operators may refuse: "
            "convert it with onnx.version_converter"
        )
