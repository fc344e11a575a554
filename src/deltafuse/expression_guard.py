"""What a proposed expression may consist of: its own operators, constants, and nothing that something else reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import TensorProto

from deltafuse.bodies import has_body
from deltafuse.classes import Kind
from deltafuse.constants_flat import EXACT
from deltafuse.dims import Dim
from deltafuse.expression_view import View, counts_fit
from deltafuse.expressions import Expression, Proposal
from deltafuse.graph import Graph
from deltafuse.guards import is_random
from deltafuse.probe import Cut, backward_slice, cut_model
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.wire import Model

TEXTS.update(
    {
        "expression-unknown": "the {what} of {value} is not known, so that nothing can be proven of {rule}; "
        "run onnx shape inference on the model first",
        "expression-dtype": "{value} has an element type ({dtype}) that {rule} is not for; cast it to one that the "
        "operator takes",
        "expression-types": "{value} has another element type than the rest of the expression, "
        "which the operator of {rule} cannot have; cast it outside",
        "expression-operators": "the operators between {source} and {result} are not those of {rule}: {ops}; leave "
        "them as they are, or write the expression without the others",
        "expression-inside": "the node that writes {value} inside the expression is neither its operator nor constant; "
        "compute the value outside, or fold it",
        "expression-constant": "the constant {value} is computed by {op}, whose rounding a proof in double does not "
        "see; fold the constants of the model first",
        "expression-roles": "{value} has two parts in the expression at once, or none, and {rule} needs a value for "
        "each; copy the value in the model, or leave the expression as it is",
    }
)


#: Float types, each with those that hold all of its numbers.
_WIDER: dict[int, frozenset[int]] = {
    TensorProto.BFLOAT16: frozenset({TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE}),
    TensorProto.FLOAT16: frozenset({TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE}),
    TensorProto.FLOAT: frozenset({TensorProto.FLOAT, TensorProto.DOUBLE}),
    TensorProto.DOUBLE: frozenset({TensorProto.DOUBLE}),
}


@dataclass(frozen=True)
class Checked:
    """A proposal that consists of what it may consist of.

    Attributes:
        cut: between roles and outputs.
        nodes: those that data passes through, ascending.
        sizes: sizes that are read from values outside: the value that holds them -> what they are.
    """

    proposal: Proposal
    cut: Cut
    nodes: tuple[int, ...]
    sizes: Mapping[int, tuple[Dim, ...]] = field(default_factory=dict[int, tuple[Dim, ...]])


def check(
    model: Model, kinds: bytearray, shapes: Shapes, view: View, pattern: Expression, proposal: Proposal
) -> Checked | Reason:
    """Cuts a proposal out and looks at each of its nodes."""
    refused = _typed(view, pattern, proposal)
    if refused is not None:
        return refused
    roles, results = tuple(proposal.roles.values()), tuple(proposal.outputs.values())
    sizes = sizes_read(model.graph, shapes, roles, results) if "Shape" in pattern.shape_operators else {}
    cut = cut_model(model, shapes, (*roles, *sizes), results)
    if isinstance(cut, Reason):
        return cut
    nodes = _through(model.graph, cut.nodes, proposal.roles.values())
    ops = [view.op(node) for node in nodes]
    if not counts_fit(ops, pattern.operators):
        ends = [view.name(next(iter(values.values()))) for values in (proposal.roles, proposal.outputs)]
        args = {"source": ends[0], "result": ends[1], "rule": pattern.name, "ops": ", ".join(ops)}
        return Reason("expression-operators", args)
    for node in cut.nodes:
        if node not in nodes and not _harmless(model, kinds, pattern, node):
            return Reason("expression-inside", {"value": view.name(model.graph.node_outputs[node][0])})
        if node not in nodes and _rounds(model.graph, shapes, node):
            value = model.graph.node_outputs[node][0]
            return Reason("expression-constant", {"value": view.name(value), "op": view.op(node)})
    return Checked(proposal, cut, nodes, sizes)


def _typed(view: View, pattern: Expression, proposal: Proposal) -> Reason | None:
    """Why the values of a proposal cannot be fed or read, None where they can."""
    values = (*proposal.roles.values(), *proposal.outputs.values())
    twice = [value for value in values if not value or values.count(value) > 1]
    if twice or not proposal.roles or not proposal.outputs:
        return Reason("expression-roles", {"value": view.name(twice[0]) if twice else "nothing", "rule": pattern.name})
    types = [view.dtype(value) for value in values]
    for value, dtype in zip(values, types, strict=True):
        if dtype is None or view.shape(value) is None:
            what = "element type" if dtype is None else "number of axes"
            return Reason("expression-unknown", {"what": what, "value": view.name(value), "rule": pattern.name})
        if dtype not in pattern.dtypes:
            return Reason("expression-dtype", {"value": view.name(value), "dtype": dtype, "rule": pattern.name})
        if pattern.one_type and dtype != types[0]:
            return Reason("expression-types", {"value": view.name(value), "rule": pattern.name})
    return None


def sizes_read(
    graph: Graph, shapes: Shapes, roles: Sequence[int], results: Sequence[int]
) -> dict[int, tuple[Dim, ...]]:
    """What Shape tells of values that are not computed from a role, as far as it is known."""
    reached, found = set(roles), dict[int, tuple[Dim, ...]]()
    for node in backward_slice(graph, roles, results)[0]:
        if graph.op[node] == "Shape" and reached.isdisjoint(graph.node_inputs[node]):
            dims, attributes = shapes.shape(graph.node_inputs[node][0]), graph.attributes(node)
            start, end = (attributes[name].i if name in attributes else None for name in ("start", "end"))
            if dims is not None:
                found[graph.node_outputs[node][0]] = dims[start:end]
        elif not reached.isdisjoint(graph.reads(node)):
            reached.update(value for value in graph.node_outputs[node] if value)
    # Sizes that only values further up are computed with are not read here.
    nodes = backward_slice(graph, (*roles, *found), results)[0]
    read = {value for node in nodes for value in graph.reads(node)}
    return {value: dims for value, dims in found.items() if value in read}


def _through(graph: Graph, nodes: Sequence[int], roles: Collection[int]) -> tuple[int, ...]:
    """The nodes that depend on a role's numbers; what is computed from a role's size does not."""
    reached = set(roles)
    through: list[int] = []
    for node in nodes:
        if graph.standard[node] not in ("Shape", "Size") and not reached.isdisjoint(graph.reads(node)):
            reached.update(graph.node_outputs[node])
            through.append(node)
    return tuple(through)


def _harmless(model: Model, kinds: bytearray, pattern: Expression, node: int) -> bool:
    """Whether a node that no data passes through may stand inside: a constant, or a size where the pattern has any."""
    graph = model.graph
    if has_body(model, graph, node) or is_random(graph, node):
        return False
    kind = max((kinds[value] for value in graph.node_outputs[node] if value), default=Kind.DATA)
    return kind == Kind.CONSTANT or (kind == Kind.SHAPE and graph.standard[node] in pattern.shape_operators)


def _rounds(graph: Graph, shapes: Shapes, node: int) -> bool:
    """Whether a node computes a constant with digits of its own type, which a proof in double does not see."""
    made = shapes.dtype(graph.node_outputs[node][0])
    if graph.standard[node] in EXACT or (made is not None and made not in _WIDER):
        return False
    given = [shapes.dtype(value) for value in graph.reads(node)]
    if graph.standard[node] != "Cast" or None in given:
        return True
    # Whole numbers stay what they are.
    return any(made not in _WIDER.get(dtype or 0, {made}) for dtype in given)


def staying(graph: Graph, checked: Checked) -> dict[int, int]:
    """The nodes inside that something outside needs -> the value it reads. Constants may be shared and do not count."""
    results, ends, inside = set(checked.proposal.outputs.values()), set(graph.outputs), set(checked.cut.nodes)
    found: dict[int, int] = {}
    for node in reversed(checked.nodes):
        for value in graph.node_outputs[node]:
            if not value or value in results:
                continue
            needed = [found[reader] for reader in graph.consumers[value] if reader in found]
            if value in ends or any(reader not in inside for reader in graph.consumers[value]):
                needed = [value]
            if needed:
                found.setdefault(node, needed[0])
    return found


def outside(graph: Graph, pattern: Expression, checked: Checked) -> Reason | None:
    """Why the rest of the graph needs the nodes to stay as they are, None where it does not.

    A value inside that something else reads, unless it is computed by what may stay; or a role that is computed from an
    output.
    """
    results, inside = set(checked.proposal.outputs.values()), set(checked.cut.nodes)
    for node, value in staying(graph, checked).items():
        if graph.op[node] not in pattern.kept or graph.domain[node]:
            return Reason("inner-value-used", {"value": graph.name(value)})
    last = max((graph.producer[value] for value in checked.proposal.roles.values()), default=-1)
    reached = set(results)
    for node in range(min(checked.nodes), last + 1):
        if node not in inside and not reached.isdisjoint(graph.reads(node)):
            reached.update(graph.node_outputs[node])
    return None if reached.isdisjoint(checked.proposal.roles.values()) else Reason("not-convex")
