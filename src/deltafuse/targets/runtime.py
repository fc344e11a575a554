"""Whether what is installed here runs what a target writes. Asked by ``verify``: ``fuse`` itself needs no kernels."""

from __future__ import annotations

from importlib import metadata

from deltafuse import targets
from deltafuse.graph import Graph
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.lowering_conv import CAUSAL_CONV
from deltafuse.versions import numbers


def runtime_notes(graph: Graph, installed: str | None = None) -> tuple[str, ...]:
    """One note for each kind of fused node that the installed onnxruntime is too old for.

    Args:
        graph: of the fused file.
        installed: version of onnxruntime; None for that of this environment.
    """
    version = metadata.version("onnxruntime") if installed is None else installed
    named = (LINEAR_ATTENTION, CAUSAL_CONV)
    domains = {domain for op, domain in zip(graph.op, graph.domain, strict=True) if op in named}
    notes: list[str] = []
    for profile in (targets.get("onnx"), targets.get("ort")):
        needed = [one for one in profile.requires if one.package == "onnxruntime"]
        used = domains & {operator.domain for operator in profile.operators}
        notes += [
            f"onnxruntime {version} is installed and target {profile.name} needs {one.version} ({one.fact}): the fused "
            "nodes were compared as plain operators"
            for one in needed
            if used and numbers(version) < numbers(one.version)
        ]
    return tuple(notes)
