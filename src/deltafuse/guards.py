"""No hidden guards: a proof by draws holds for analytic operators only.

Agreement on draws proves nothing about a clamp that no draw reaches. So data may pass only through operators that are
analytic in it; whatever is not on the list refuses the match.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnx import AttributeProto

from deltafuse.bodies import bodies, has_body
from deltafuse.carried import only_lays_out, squeezes
from deltafuse.classes import Kind
from deltafuse.dtypes import REAL
from deltafuse.far_reads import FarReads
from deltafuse.graph import Graph
from deltafuse.reach import Reach
from deltafuse.reasons import TEXTS, Reason
from deltafuse.scope import SHAPES, Scope
from deltafuse.shape_bodies import engines
from deltafuse.size_choices import period
from deltafuse.size_flow import FARTHEST, GATE, SIZE, Flow, FlowKind, Sizes
from deltafuse.size_rules import Follower
from deltafuse.while_loops import limit, runs_through

TEXTS.update(
    {
        "piecewise": "the operator {op} ({node}) changes the result only for some values (a clamp, a comparison, "
        "a choice by data): no number of trials proves it away, so the site stays as it is; "
        "remove it from the model if it is not meant",
        "unsupported-operator": "the operator {op} ({node}) is not known to be smooth in its data, "
        "so the site is not proven; export it as plain arithmetic",
        "position-gate": "the operator {op} ({node}) makes the result depend on a position or a size, so that it "
        "may be another where no trial reaches; let nothing depend on its number, if the plain rule is meant",
        "random": "the operator {op} ({node}) draws random numbers; export the model for inference",
        "early-exit": "the loop {node} may end before its last token; give it a condition that is always true",
    }
)

_PIECEWISE = frozenset({
    "Clip", "Max", "Min", "Abs", "Sign", "Floor", "Ceil", "Round", "Mod", "Relu", "LeakyRelu", "PRelu",
    "ThresholdedRelu", "HardSigmoid", "HardSwish", "Elu", "Selu", "Celu", "Shrink", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Xor", "Where", "If", "ReduceMax", "ReduceMin",
    "ArgMax", "ArgMin", "TopK", "Softmax", "LogSoftmax", "Hardmax", "QuantizeLinear", "DequantizeLinear",
    "DynamicQuantizeLinear", "IsNaN", "IsInf", "NonZero", "Unique", "Compress", "MaxPool", "BitShift", "BitwiseAnd",
    "BitwiseOr", "BitwiseXor", "BitwiseNot",
})  # fmt: skip

#: Polynomial in every operand. Roots, logarithms and quotients are not: they hide absolute values and soft clamps. A
#: norm has them, and is proven by itself; a decay may be divided by.
_ANALYTIC = frozenset({
    "Add", "Sub", "Mul", "Neg", "MatMul", "Gemm", "Einsum", "Sum", "Mean",
    "ReduceSum", "ReduceSumSquare", "ReduceMean", "Identity", "Transpose", "Flatten", "Concat",
    "SequenceInsert", "SequenceConstruct", "ConcatFromSequence",
})  # fmt: skip

#: Analytic in operand 0 (and, for scatters, 2) as long as the others hold no data.
_ANALYTIC_IN = {
    "CumSum": (0,), "Reshape": (0,), "Expand": (0,), "Tile": (0,), "Squeeze": (0,), "Unsqueeze": (0,),
    "Slice": (0,), "Gather": (0,), "GatherND": (0,), "GatherElements": (0,), "Split": (0,), "Trilu": (0,),
    "Pad": (0, 2), "ScatterND": (0, 2), "ScatterElements": (0, 2), "Where": (1, 2), "Dropout": (0,), "SequenceAt": (0,),
    "SplitToSequence": (0,),
}  # fmt: skip

_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)

#: Operators that leave an exponential one.
_MOVES = frozenset({
    "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Identity", "Cast", "Slice", "Gather", "Mul", "Split",
})  # fmt: skip
#: The same of onnxruntime's own operators (a product with transposes, an inverse).
CONTRIB = frozenset({"FusedMatMul", "Inverse", "TransposeMatMul"})
#: All operators that a rule may have in its data, and those that are known to be no part of one.
KNOWN = _ANALYTIC | _PIECEWISE | _ANALYTIC_IN.keys()


def find_guard(
    scope: Scope,
    nodes: Sequence[int],
    data: Sequence[int],
    sizes: Collection[int],
    exempt: Collection[int],
    *,
    decays: bool = True,
    known: Sizes | None = None,
) -> Reason | None:
    """Looks for an operator that is not analytic in the data that reaches it, or that hides a choice by size.

    Args:
        scope: where the nodes are.
        nodes: a site's nodes, ascending.
        data: values that vary: the roots, the log decay first.
        sizes: values that hold free sizes.
        exempt: nodes of norms, which are proven otherwise.
        decays: whether the first root is a log decay, whose exponential is part of the rule.
        known: what is known of the sizes; is told more.

    Returns:
        A Reason that names the first such node, None where there is none.
    """
    # Bit 0 is the log decay's, where there is one.
    roots = {value: 1 << index for index, value in enumerate(data, 0 if decays else 1)}
    reach = Reach(roots, sized=dict.fromkeys(sizes, SIZE))
    return _search(scope, nodes, reach, exempt, Sizes() if known is None else known)


def _search(scope: Scope, nodes: Sequence[int], reach: Reach, exempt: Collection[int], known: Sizes) -> Reason | None:
    """`find_guard` in one scope."""
    graph = scope.graph
    follower = Follower(scope, reach.sized, known, FarReads(scope, known, reach.moved, reach.whole))
    for node in nodes:
        if is_random(graph, node) and not _rests(scope, node):
            return _reason(graph, node, "random")
        roots = reach.of(graph.reads(node))
        if not roots or graph.standard[node] in SHAPES:
            follower.follow(node)
            continue
        found = _refusal(scope, node, reach, follower, exempt=node in exempt)
        if found is not None:
            return found
        if not has_body(scope.model, graph, node):
            reach.data.update(dict.fromkeys(graph.node_outputs[node], roots))
        if _is_power(graph, node, reach):
            reach.powers.update(graph.node_outputs[node])
        if graph.standard[node] == "Exp" or not reach.curved.isdisjoint(graph.reads(node)):
            reach.curved.update(graph.node_outputs[node])
    return None


def _refusal(scope: Scope, node: int, reach: Reach, follower: Follower, *, exempt: bool) -> Reason | None:
    """Why a node that data reaches is none a proof by draws can hold for."""
    graph = scope.graph
    inputs = graph.node_inputs[node]
    if has_body(scope.model, graph, node):
        return _search_bodies(scope, node, reach, follower)
    varying = [position for position, value in enumerate(inputs) if value in reach.data]
    if not exempt and not _analytic(scope, node, varying, reach):
        return _reason(graph, node)
    return _reason(graph, node, "position-gate") if follower.spoils(node, varying) else None


def _is_power(graph: Graph, node: int, reach: Reach) -> bool:
    """An exponential, or exponentials that are moved or multiplied."""
    if graph.standard[node] == "Exp":
        return True
    read = [value for value in graph.node_inputs[node] if value in reach.data]
    return graph.standard[node] in _MOVES and all(value in reach.powers for value in read)


def _search_bodies(scope: Scope, node: int, reach: Reach, follower: Follower) -> Reason | None:
    graph = scope.graph
    decided = {"If": (0,), "Loop": (0, 1)}.get(graph.standard[node], ())
    chosen = [graph.node_inputs[node][position] for position in decided if position < len(graph.node_inputs[node])]
    if any(value in reach.data for value in chosen):
        return _reason(graph, node, "piecewise")
    sized = graph.standard[node] == "If" and any(value in reach.sized for value in chosen)
    # A choice that comes round again is tried at each of its turns.
    turns = sized and scope.shapes is not None and period(graph, scope.shapes, chosen[0])[0]
    if sized and not turns and not squeezes(scope, node):
        return _reason(graph, node, "position-gate")
    # What a trip count is in the main graph's sizes is looked at elsewhere, with what it should be.
    trips = chosen[0] if graph.standard[node] == "Loop" else 0
    if reach.sized.get(trips) == GATE or (scope.shapes is None and not follower.lays_out(trips)):
        return _reason(graph, node, "position-gate")
    read, outputs = graph.reads(node), graph.node_outputs[node]
    farthest = max((reach.moved.get(value, 0) for value in read), default=0)
    for body, engine in zip(bodies(scope.model, graph, scope.kinds, node), engines(scope.engine, node), strict=False):
        counted = body.flag != (0, 0) and limit(scope.model, graph, node, body) != 0
        if body.flag != (0, 0) and not counted and not runs_through(scope, node, body):
            return _reason(graph, node, "early-exit")
        within = Scope(body.model, body.graph, body.kinds, None, scope, body, engine)
        inner = _settled(within, node, reach, follower)
        if isinstance(inner, Reason):
            return inner
        inside = max(inner.moved.values(), default=0)
        # By sizes that are not all tried, a branch is not to read farther away, nor to compute anything.
        if sized and (inside > farthest or not only_lays_out(within, inner.data)):
            return _reason(graph, node, "position-gate")
        reach.leave(graph, node, body, inner, sized=sized)
        farthest = max(farthest, inside)
    # What comes out has been as far as anything inside.
    reach.moved.update(dict.fromkeys(outputs, farthest) if farthest else {})
    reach.whole.update(() if reach.whole.isdisjoint(read) else outputs)
    return None


def _settled(within: Scope, node: int, reach: Reach, follower: Follower) -> Reach | Reason:
    """Goes through a body until no step of it hands on what is read farther away than in the step before."""
    body, around = within.body, within.around
    assert body is not None, "a subgraph takes values from around"
    assert around is not None, "a subgraph lies in a scope"
    farther: dict[int, int] = {}
    # A move that each step makes again shows once it has gone through all that is carried.
    for _ in range(len(body.carried) + 1):
        inner = reach.inside(within, node)
        # What is made of sizes there is not known, but how far apart these are.
        inner.sized.update({
            value: Flow(FlowKind.SIZE, int(min(follower.moves_inside(around), FARTHEST + 1)))
            for value, around in within.outers().items() if follower.is_size(around)
        })  # fmt: skip
        inner.moved.update(farther)
        found = _search(within, range(len(body.graph.op)), inner, (), follower.sizes)
        if found is not None:
            return found
        ends = {value: inner.moved.get(after, 0) for value, after in body.carried.items()}
        more = {value: moved for value, moved in ends.items() if moved > inner.moved.get(value, 0)}
        if not more:
            return inner
        farther |= more
    return _reason(around.graph, node, "position-gate")


def _analytic(scope: Scope, node: int, varying: Sequence[int], reach: Reach) -> bool:
    graph = scope.graph
    op, inputs = graph.standard[node], graph.node_inputs[node]
    if graph.domain[node]:
        return graph.domain[node] == "com.microsoft" and op in CONTRIB
    if op == "Cast":
        return graph.attributes(node)["to"].i in REAL
    if op == "CastLike":
        return scope.dtype(inputs[1]) in REAL
    if op == "Exp":
        # Of anything but the log decay it is no part of the rule, however small it is where it was tried.
        return reach.data[inputs[0]] == 1 and inputs[0] not in reach.curved
    if op in ("Div", "Reciprocal"):
        below = len(inputs) - 1
        return below not in varying or inputs[below] in reach.powers
    if op == "Pow":
        return varying == [0] and scope.number(inputs[1]) in (1.0, 2.0, 3.0)
    if op in _ANALYTIC:
        return True
    if op not in _ANALYTIC_IN or any(position not in _ANALYTIC_IN[op] for position in varying):
        return False
    return _plain_mode(op, graph.attributes(node))


def _plain_mode(op: str, attributes: dict[str, AttributeProto]) -> bool:
    """Scatters that overwrite or add; pads with a constant."""
    if op in ("ScatterND", "ScatterElements"):
        return "reduction" not in attributes or attributes["reduction"].s in (b"none", b"add")
    if op == "Pad":
        return "mode" not in attributes or attributes["mode"].s == b"constant"
    return True


def is_random(graph: Graph, node: int) -> bool:
    """Whether a node gives other numbers each time it runs."""
    training = graph.standard[node] == "Dropout" and any(graph.node_inputs[node][2:3])
    return training or graph.standard[node] in _RANDOM


def _rests(scope: Scope, node: int) -> bool:
    """Whether a Dropout is told by a constant not to draw."""
    switch = scope.graph.node_inputs[node][2:3] if scope.graph.standard[node] == "Dropout" else ()
    return any(scope.kinds[value] == Kind.CONSTANT and scope.number(value) == 0.0 for value in switch)


def _reason(graph: Graph, node: int, code: str = "") -> Reason:
    code = code or ("piecewise" if graph.standard[node] in _PIECEWISE else "unsupported-operator")
    return Reason(code, {"op": graph.op[node], "node": graph.label(node)})
