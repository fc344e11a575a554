"""Subgraphs as scopes of their own: the body of a Loop, Scan or local function, the branches of an If."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import TensorProto

from deltafuse.classes import Kind, classify_scope
from deltafuse.errors import UserError
from deltafuse.graph import Graph
from deltafuse.wire import Model, scan_body, scan_function
from deltafuse.wording import number

#: Operators whose subgraphs are looked into.
CONTROL = frozenset({"Loop", "Scan", "If"})
LOOPS = frozenset({"Loop", "Scan"})
#: Types that a counter is exact in, however many steps it counts.
_COUNTERS = frozenset({TensorProto.INT32, TensorProto.INT64})


@dataclass(frozen=True)
class Body:
    """One subgraph of a node.

    Attributes:
        model: what its bytes are part of.
        graph: its scope; value ids are its own.
        kinds: kind of each of its values.
        inputs: body input -> value of the scope around it that it starts from or takes slices of.
        carried: body input -> body output that it is in the next step.
        counters: body inputs that count steps: the loop's own, and carried ones that grow by a constant.
        flag: (body input, body output) that says whether to go on, (0, 0) where there is none.
    """

    model: Model
    graph: Graph
    kinds: bytearray
    inputs: dict[int, int]
    carried: dict[int, int]
    counters: tuple[int, ...]
    flag: tuple[int, int]

    def outside(self, around: Graph, value: int) -> int:
        """The value of the scope around that a body value is, 0 where it is computed inside."""
        if value in self.inputs:
            return self.inputs[value]
        if self.graph.producer[value] >= 0 or value in self.graph.initializers or value in self.graph.inputs:
            return 0
        return around.find(self.graph.name(value)) or 0


def is_call(model: Model, graph: Graph, node: int) -> bool:
    """Whether a node calls a function that the model defines."""
    return bool(model.functions) and (graph.domain[node], graph.op[node]) in model.local_functions


def has_body(model: Model, graph: Graph, node: int) -> bool:
    """Whether a node computes by a subgraph."""
    return graph.standard[node] in CONTROL or is_call(model, graph, node)


def scan_call(model: Model, graph: Graph, node: int) -> Model:
    """The function that a node calls, as a model of its own with what this call gives for attributes."""
    return scan_function(model, model.local_functions[graph.domain[node], graph.op[node]], graph.node(node))


def with_bodies(model: Model, graph: Graph) -> list[int]:
    """The nodes that compute by a subgraph, ascending."""
    likely = CONTROL if not model.functions else CONTROL | {name for _, name in model.local_functions}
    return [node for node in graph.nodes_with(likely) if has_body(model, graph, node)]


def bodies(model: Model, graph: Graph, kinds: bytearray, node: int) -> Iterator[Body]:
    """The subgraphs of a node of `graph`; none where it has none."""
    if is_call(model, graph, node):
        yield _called(scan_call(model, graph, node), graph, kinds, node)
        return
    if graph.standard[node] not in CONTROL:
        return
    for _, span in body_attributes(graph, node):
        yield _body(model, graph, kinds, node, scan_body(model, span))


def body_attributes(graph: Graph, node: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and byte range of each attribute of an If, Loop or Scan that is a subgraph, in the order of the file."""
    for name, span in zip(graph.attributes(node), graph.attribute_spans[node], strict=True):
        if name in ("body", "then_branch", "else_branch"):
            yield name, span


def _counts(graph: Graph, value: int, after: int) -> bool:
    """Whether a carried value grows by a constant in each step: a counter that is written out.

    It is a whole number of 32 bits or more all the way: a narrower type runs over, and a float stays where it is once
    the next number is one that it has not.
    """
    while (node := graph.producer[after]) >= 0 and graph.standard[node] in ("Identity", "Cast"):
        to = graph.attributes(node).get("to")
        if graph.standard[node] == "Cast" and (to is None or to.i not in _COUNTERS):
            return False
        after = graph.node_inputs[node][0]
    if node < 0 or graph.standard[node] != "Add" or value not in graph.node_inputs[node]:
        return False
    (step,) = [other for other in graph.node_inputs[node] if other != value] or [value]
    source = graph.producer[step]
    head = graph.initializers.get(step) or (graph.constant_head(source) if source >= 0 else None)
    return head is not None and head.dtype in _COUNTERS


def _called(scope: Model, graph: Graph, kinds: bytearray, node: int) -> Body:
    inner = scope.graph
    inputs = dict(zip(inner.inputs, graph.node_inputs[node], strict=False))
    known = {value: kinds[outer] or Kind.CONSTANT for value, outer in inputs.items()}
    return Body(scope, inner, classify_scope(scope, inner, known), inputs, {}, (), (0, 0))


def _check_inputs(graph: Graph, node: int, inner: Graph) -> None:
    """Trip count and condition of a Loop may be left out, its body takes both."""
    op, count = graph.op[node], len(graph.node_inputs[node])
    given, least = (max(count, 2), 1) if op == "Loop" else (count, 0)
    if len(inner.inputs) != given or len(inner.outputs) < least:
        raise UserError(
            "body-inputs",
            f"the body of {graph.label(node) or op} takes {number(len(inner.inputs), 'value')} and is given {given}, "
            "or it gives none back: export the model again, with opset 9 or newer",
        )


def _body(model: Model, graph: Graph, kinds: bytearray, node: int, inner: Graph) -> Body:
    op, given = graph.op[node], graph.node_inputs[node]
    inputs: dict[int, int] = {}
    carried: dict[int, int] = {}
    counters: tuple[int, ...] = ()
    flag = (0, 0)
    if op in LOOPS:
        _check_inputs(graph, node, inner)
    if op == "Loop":
        counters, flag = (inner.inputs[0],), (inner.inputs[1], inner.outputs[0])
        inputs = dict(zip(inner.inputs[2:], given[2:], strict=True))
        carried = dict(zip(inner.inputs[2:], inner.outputs[1:], strict=False))
        counting = [v for v, after in carried.items() if kinds[inputs[v]] == Kind.CONSTANT and _counts(inner, v, after)]
        counters += tuple(counting)
        inputs, carried = ({v: x for v, x in some.items() if v not in counting} for some in (inputs, carried))
    elif op == "Scan":
        states = len(given) - graph.attributes(node)["num_scan_inputs"].i
        inputs = dict(zip(inner.inputs, given, strict=True))
        carried = dict(zip(inner.inputs[:states], inner.outputs, strict=False))
    known = {value: kinds[outer] or Kind.DATA for value, outer in inputs.items()}
    # What is carried is data even where it starts as a constant; counters are positions, not data.
    known |= dict.fromkeys(carried, Kind.DATA) | dict.fromkeys((*counters, flag[0]), Kind.SHAPE)
    for value in range(1, len(inner.value_names)):
        if value not in known and inner.producer[value] < 0 and value not in inner.initializers:
            known[value] = kinds[graph.find(inner.name(value)) or 0] or Kind.DATA
    return Body(model, inner, classify_scope(model, inner, known), inputs, carried, counters, flag)
