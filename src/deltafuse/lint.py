"""``fuse lint``: the fused nodes of any ONNX file, ours or written by other tools, against a target's profile.

A file without findings may still have notes: what is unusual but right, such as results whose type is not declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from deltafuse import targets
from deltafuse.enclosed import Enclosed, fused_bodies
from deltafuse.lint_attention import attention_findings, attention_sizes, opset_notes
from deltafuse.lint_attributes import attribute_findings, custom_findings, scale_findings, value_of
from deltafuse.lint_conv import conv_findings, is_conv
from deltafuse.lint_graph import function_notes, graph_findings
from deltafuse.lint_lengths import length_notes
from deltafuse.lint_limits import limit_findings
from deltafuse.lint_names import CUSTOM, NAMED, meant, unknown_findings
from deltafuse.lint_operands import (
    constant_findings,
    count_findings,
    memory_findings,
    operand_findings,
    result_findings,
    sequence_findings,
    sizes_of,
)
from deltafuse.lint_view import Finding, View, is_attention
from deltafuse.lowered import is_lowered
from deltafuse.lowering_attention import MICROSOFT
from deltafuse.options import Progress, SilentProgress
from deltafuse.shapes import Shapes
from deltafuse.targets import Profile
from deltafuse.targets.profile import Operator
from deltafuse.wire import Model, scan

__all__ = ["ASCEND", "Finding", "LintReport", "lint", "node_findings"]

#: Targets that share the operators of Custom nodes: such a node alone does not tell which of them it is for.
ASCEND = ("ascend-310p", "ascend-a2")


@dataclass(frozen=True)
class LintReport:
    """What was looked at, and what was found.

    Attributes:
        targets: profiles that the nodes were held against; none where there are no nodes and no target was named.
        nodes: how many fused nodes there are.
        notes: unusual, but right.
        exit: 0 without findings, 5 with, 3 where there is no fused node.
        lowered: whether ``fuse lower`` wrote the file.
    """

    model: str
    targets: tuple[str, ...]
    nodes: int
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    exit: int
    lowered: bool = False


def lint(fused: Path, target: str | None = None, progress: Progress | None = None) -> LintReport:
    """Looks over a file.

    Args:
        fused: the file; weights are not read.
        target: profile to hold it against; None for those that its nodes are of.
        progress: told about stages.

    Raises:
        UserError: the file cannot be read, or there is no such target.
    """
    shown = progress or SilentProgress()
    shown.start("looking over")
    model = scan(fused)
    found = list(_found(model))
    choices = [(targets.get(target),)] if target is not None else _choices(found)
    # A file is for one target: of those that its operators leave, the one that finds least fault with it.
    looks = [min((_look(model, found, one) for one in some), key=lambda look: len(look.findings)) for some in choices]
    count = sum(look.nodes for look in looks)
    unique = tuple(dict.fromkeys(finding for look in looks for finding in look.findings))
    noted = tuple(dict.fromkeys((*(note for look in looks for note in look.notes), *function_notes(model))))
    names = tuple(look.profile.name for look in looks)
    code = 5 if unique else 0 if count else 3
    return LintReport(str(fused), names, count, unique, noted, code, is_lowered(model))


@dataclass(frozen=True)
class _Look:
    """A file as one profile has it."""

    profile: Profile
    nodes: int
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]


def _look(model: Model, found: list[tuple[Model, Shapes, int]], profile: Profile) -> _Look:
    findings: list[Finding] = []
    notes: list[Finding] = []
    count = 0
    for scope, shapes, node in found:
        view = _view(scope, shapes, profile, node)
        if view is None:
            findings += unknown_findings(scope.graph, profile, node)
            continue
        count += 1
        findings += _node_findings(view)
        notes += _node_notes(view)
    findings += graph_findings(model, profile)
    return _Look(profile, count, tuple(dict.fromkeys(findings)), tuple(notes))


def node_findings(model: Model, shapes: Shapes, profile: Profile, node: int) -> tuple[Finding, ...]:
    """What is wrong with one fused node.

    Args:
        model: the file.
        shapes: of its values.
        profile: what to hold it against.
        node: in the main graph.
    """
    view = _view(model, shapes, profile, node)
    found = unknown_findings(model.graph, profile, node) if view is None else _node_findings(view)
    return tuple(found)


def _found(model: Model) -> Iterator[tuple[Model, Shapes, int]]:
    """The nodes to look over, with the graph that each is in: the main one, or a body of If, Loop or Scan."""
    scopes = (one for one in fused_bodies(model) if isinstance(one, Enclosed))
    for scope, shapes in ((model, Shapes(model)), *((scope.model, scope.shapes) for scope in scopes)):
        graph = scope.graph
        calls = zip(graph.op[graph.outer :], graph.domain[graph.outer :], strict=True)
        for node, (op, domain) in enumerate(calls, graph.outer):
            # A function of the file under a domain of its own is whatever its body says.
            own = domain not in ("", MICROSOFT) and (domain, op) in model.local_functions
            if meant(op, domain) and not own:
                yield scope, shapes, node


def _choices(found: list[tuple[Model, Shapes, int]]) -> list[tuple[Profile, ...]]:
    """The targets that the nodes may be of, by kind of node; none where there is no node."""
    nodes = [(scope.graph.op[node], scope.graph.domain[node]) for scope, _, node in found]
    kinds = dict.fromkeys(
        ASCEND if meant(op, domain) not in NAMED else ("ort",) if domain else ("onnx",) for op, domain in nodes
    )
    return [tuple(map(targets.get, names)) for names in kinds]


def _view(model: Model, shapes: Shapes, profile: Profile, node: int) -> View | None:
    """The node as one of the profile's operators, None where it is none of them."""
    graph = model.graph
    message, attributes = graph.node(node), graph.attributes(node)
    operator = _operator(profile, message, attributes)
    if operator is None:
        return None
    first = next((name for name in message.output if name), "")
    view = View(model, shapes, profile, node, message, message.name or first, attributes, operator)
    results = tuple(graph.node_outputs[node])
    return replace(view, ports=_ports(view), results=results, boundary=_boundary(view))


def _operator(profile: Profile, message: onnx.NodeProto, attributes: dict[str, onnx.AttributeProto]) -> Operator | None:
    if message.op_type in NAMED:
        domain = "" if message.domain == "ai.onnx" else message.domain
        known = (*profile.operators, *profile.others)
        return next((one for one in known if one.op == message.op_type and one.domain == domain), None)
    if message.op_type != CUSTOM:
        return None
    op = value_of(attributes["type"]) if "type" in attributes else ""
    names = value_of(attributes["input_names"]) if "input_names" in attributes else None
    known = [one for one in profile.operators if one.op == op]
    same = [one for one in known if [port.name for port in one.inputs] == names]
    return next(iter((*same, *known)), None)


def _ports(view: View) -> dict[str, int]:
    """Names of inputs -> values; an index that does not fit is told by a rule of its own."""
    inputs, names = view.graph.node_inputs[view.node], [port.name for port in view.operator.inputs]
    index = range(len(inputs))
    if view.operator.op not in NAMED and "input_index" in view.attributes:
        index = list(view.attributes["input_index"].ints)
    pairs = zip(index, inputs, strict=False)
    return {names[place]: value for place, value in pairs if value and 0 <= place < len(names)}


def _boundary(view: View) -> int:
    """The type that the node says, or that its first input has; the profile's where it takes neither."""
    attribute = view.attributes.get("dtype")
    said = attribute.i if attribute is not None else None
    if view.operator.op in NAMED:
        query = view.graph.find(view.message.input[0]) if view.message.input else None
        said = view.shapes.dtype(query) if query else None
    return said if said in view.profile.boundaries else view.profile.boundaries[0]


def _node_findings(view: View) -> Iterator[Finding]:
    yield from attribute_findings(view)
    if view.operator.op not in NAMED and view.message.domain:
        fix = "leave the domain empty: the converter's parser goes by op_type alone"
        yield view.finding("domain", "domain", view.message.domain, "''", fix)
    sizes, disagreeing = sizes_of(view)
    yield from operand_findings(view)
    yield from disagreeing
    yield from count_findings(view)
    yield from result_findings(view, sizes)
    yield from constant_findings(view)
    yield from memory_findings(view)
    if is_conv(view):
        yield from conv_findings(view, sizes)
        return
    if is_attention(view):
        yield from scale_findings(view, "scale")
        yield from attention_findings(view)
        yield from limit_findings(view, attention_sizes(view))
        return
    yield from custom_findings(view, sizes)
    yield from sequence_findings(view, sizes)
    yield from _gates(view)
    yield from limit_findings(view, sizes)


def _gates(view: View) -> Iterator[Finding]:
    shape = view.shape(view.ports["gk"]) if "gk" in view.ports else None
    if "g" in view.ports and shape and shape[-1] == 1:
        fix = "add gk to g: with both, a gk of one number a head is dropped"
        yield view.finding("gk-scalar", "gk", "one number a head beside g", "one per key channel, or absent", fix)


def _node_notes(view: View) -> Iterator[Finding]:
    missing = [view.graph.name(value) for value in view.results if value and view.graph.value_info(value) is None]
    if missing:
        fix = "nothing: but a converter that asks for the type has to work it out"
        yield view.finding("no-value-info", "", f"no declared type of {', '.join(missing)}", "declared", fix)
    yield from length_notes(view)
    if view.operator.op in NAMED:
        yield from opset_notes(view)
