"""What ``fuse lint`` finds in a file as a whole: control flow, and data that two graphs of a folder share."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from deltafuse.errors import DeltafuseError
from deltafuse.external import external_tensors
from deltafuse.functions import plain_domain
from deltafuse.lint_names import meant
from deltafuse.lint_view import Finding
from deltafuse.targets import Profile
from deltafuse.wire import Model, scan


def graph_findings(model: Model, profile: Profile) -> Iterator[Finding]:
    """What stops the target's converter wherever it stands.

    Args:
        model: the file.
        profile: what to hold it against.
    """
    graph, forbidden = model.graph, profile.lint.forbidden_ops
    found = [(graph.label(node), op) for node, op in enumerate(graph.op) if op in forbidden and not graph.domain[node]]
    if forbidden and model.functions:
        found += [
            (f"{function.name}/{node.name or next(iter(node.output), '')}", node.op_type)
            for function in _called(model)
            for node in function.node
            if node.op_type in forbidden and node.domain in ("", "ai.onnx")
        ]
    for name, op in found:
        fix = "take the control flow out: export with fixed branches, or fuse the loop"
        yield Finding("control-flow", name, "", op, "no control flow", fix)
    if profile.lint.own_data:
        yield from _shared_data(model)


def function_notes(model: Model) -> Iterator[Finding]:
    """Fused nodes in local functions that are called: without a call's types and sizes nothing can be said of them.

    Args:
        model: the file.
    """
    for function in _called(model) if model.functions else ():
        for node in function.node:
            domain = plain_domain(node.domain)
            if meant(node.op_type, domain) and (domain, node.op_type) not in model.local_functions:
                found = f"{node.op_type} in the local function {function.name}, which is not looked into"
                name, fix = node.name or next(iter(node.output), ""), "inline it with onnx.inliner and lint the result"
                yield Finding("in-function", f"{function.name}/{name}", "", found, "a node of the graph", fix)


def _called(model: Model) -> list[onnx.FunctionProto]:
    """The local functions that the main graph calls, by others of them too."""
    known, found = model.local_functions, dict[tuple[str, str], onnx.FunctionProto]()
    left = [key for key in dict.fromkeys(zip(model.graph.domain, model.graph.op, strict=True)) if key in known]
    while left:
        key = left.pop()
        if key not in found:
            found[key] = known[key]
            calls = ((plain_domain(node.domain), node.op_type) for node in known[key].node)
            left += [call for call in calls if call in known]
    return list(found.values())


def _shared_data(model: Model) -> Iterator[Finding]:
    """External data names are local to a graph: converters of two graphs in one folder overwrite each other's files."""
    own = {head.external.get("location", "") for head in external_tensors(model)}
    if not own:
        return
    for path in sorted(model.path.parent.glob("*.onnx")):
        if path.resolve() == model.path.resolve():
            continue
        try:
            others = {head.external.get("location", "") for head in external_tensors(scan(path))}
        except DeltafuseError:
            continue
        for location in sorted(own & others):
            fix = "put each graph into a folder of its own"
            yield Finding("shared-data", path.name, "external_data", f"both use {location}", "a file of its own", fix)
