"""Prove that a part of the graph is a pattern's expression, and that what is to be written is equal to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import onnx
from onnx import helper, shape_inference

from deltafuse.bench import open_bench
from deltafuse.errors import InternalError
from deltafuse.expression_bounds import untried
from deltafuse.expression_constants import unfelt
from deltafuse.expression_guard import Checked
from deltafuse.expression_match import ExpressionPlan
from deltafuse.expression_trial import SizedTrial, bindings, difference, empty, feed, typed
from deltafuse.expressions import Array, Expression, Neighbour, Operands, Parameters
from deltafuse.graph import Graph
from deltafuse.match import Role
from deltafuse.probe import to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shapes import Shapes
from deltafuse.worker import AnyArray, Session, Worker

TEXTS.update(
    {
        "expression-differs": "the nodes up to {value} have the operators of {rule} but are not it: relative error "
        "{error:.1e} in double; compare them with the reference in the pattern's file",
        "expression-idle": "the result {value} does not depend on {role}, so that nothing can be proven of {rule}; "
        "look whether {role} is multiplied by zero or left out in the model",
        "expression-empty": "no sizes were found at which {value} has elements; declare its axes",
    }
)

#: Largest error in double, relative to the largest number, where a pattern does not ask for equality.
BAR = 1e-12
#: Seeds: of the proof, of the proof of what is emitted.
_SEED, _FRESH = 0, 1000
#: Choices of sizes that must give something, where there are several.
_TOLD = 2


@dataclass(frozen=True)
class ProvenExpression:
    """A proposal that is the expression.

    Attributes:
        trials: at every choice of sizes that was run.
        draws: how many operands were compared.
    """

    parameters: Parameters
    trials: tuple[SizedTrial, ...]
    max_error: float
    draws: int


def prove_expression(
    worker: Worker, graph: Graph, shapes: Shapes, pattern: Expression, checked: Checked
) -> ProvenExpression | Reason:
    """Runs a proposal against the pattern's reference; where they differ the reason says what it is instead."""
    trials = _trials(worker, graph, shapes, checked)
    if isinstance(trials, Reason):
        return trials
    limit = untried(graph, shapes, checked, pattern.name, [trial.sizes for trial in trials])
    if limit is not None:
        return limit
    found = _agrees(graph, pattern, trials, Neighbour(pattern.solve, pattern.reference))
    if not isinstance(found, Reason):
        found = _felt(worker, graph, shapes, pattern, checked, found)
    if isinstance(found, Reason):
        near = [code for code, other in pattern.neighbours.items() if _agrees(graph, pattern, trials, other)]
        worker.unload(trials[0].bench.session)
        return Reason(near[0], {"value": _result(graph, trials[0])}) if near else found
    return found


def _trials(worker: Worker, graph: Graph, shapes: Shapes, checked: Checked) -> tuple[SizedTrial, ...] | Reason:
    proposal, cut = checked.proposal, checked.cut
    dims = {role: shapes.shape(value) or () for role, value in proposal.roles.items()}
    dtypes = {role: shapes.dtype(value) or 0 for role, value in proposal.roles.items()}
    names = {value: graph.name(value) for value in (*cut.inputs, *cut.outputs)}
    shaped = {value: dims[role] for role, value in proposal.roles.items()}
    bench = open_bench(worker, cut, names, shaped, checked.sizes)
    if isinstance(bench, Reason):
        return bench
    known = (*dims.values(), *checked.sizes.values())
    trials = tuple(SizedTrial(bench, proposal, dims, dtypes, sizes) for sizes in bindings(known))
    return trials or Reason("expression-empty", {"value": names[cut.outputs[0]]})


def _result(graph: Graph, trial: SizedTrial) -> str:
    return graph.name(next(iter(trial.proposal.outputs.values())))


def _agrees(
    graph: Graph, pattern: Expression, trials: tuple[SizedTrial, ...], rule: Neighbour
) -> ProvenExpression | Reason:
    """Whether a reference gives what the cut gives, on all draws and at all sizes."""
    parameters = rule.solve(trials[0])
    if isinstance(parameters, Reason):
        return parameters
    worst, draws, told = 0.0, 0, 0
    for number, trial in enumerate(trials):
        for operands in _draws(pattern, trial, parameters, _SEED + number):
            found = trial.run(operands)
            if isinstance(found, Reason):
                return found
            if empty(found):
                break
            told |= 1 << number
            with np.errstate(all="ignore"):  # infinities and NaNs are compared too
                error = difference(found, rule.reference(operands, parameters))
            if not error <= (0.0 if pattern.exact else BAR):
                args = {"value": _result(graph, trial), "rule": pattern.name, "error": error}
                return Reason("expression-differs", args)
            worst, draws = max(worst, error), draws + 1
    # One size alone tells nothing of how the result goes with the sizes.
    if told.bit_count() < min(_TOLD, len(trials)):
        return Reason("expression-empty", {"value": _result(graph, trials[0])})
    idle = _idle(graph, pattern, trials[0], parameters)
    return ProvenExpression(parameters, trials, worst, draws) if idle is None else idle


def _draws(pattern: Expression, trial: SizedTrial, parameters: Parameters, seed: int) -> Iterator[Operands]:
    for operands in pattern.draws(trial.shapes, parameters, np.random.default_rng(seed)):
        yield typed(operands, trial.dtypes)


def _felt(
    worker: Worker, graph: Graph, shapes: Shapes, pattern: Expression, checked: Checked, proven: ProvenExpression
) -> ProvenExpression | Reason:
    """What was proven, unless it has a constant that no draw feels."""
    trial = proven.trials[0]
    idle = unfelt(
        worker, graph, shapes, checked, trial, lambda: _draws(pattern, trial, proven.parameters, _SEED)
    )  # fmt: skip
    if idle is None or isinstance(idle, Reason):
        return proven if idle is None else idle
    args = {"value": _result(graph, trial), "role": f"the constant {graph.name(idle)}", "rule": pattern.name}
    return Reason("expression-idle", args)


def _idle(graph: Graph, pattern: Expression, trial: SizedTrial, parameters: Parameters) -> Reason | None:
    """A role that no output depends on: agreement tells nothing of it."""
    first = next(_draws(pattern, trial, parameters, _SEED))
    second = next(_draws(pattern, trial, parameters, _FRESH))
    before = trial.run(first)
    for role in first:
        after = trial.run({**first, role: second[role]})
        if isinstance(before, Reason) or isinstance(after, Reason):
            return before if isinstance(before, Reason) else cast("Reason", after)
        if difference(after, before) == 0.0:
            return Reason("expression-idle", {"value": _result(graph, trial), "role": role, "rule": pattern.name})
    return None


def prove_emission(pattern: Expression, plan: ExpressionPlan, proven: ProvenExpression, worker: Worker,
                   opsets: Mapping[str, int]) -> float:  # fmt: skip
    """Runs what is to be written against what it replaces, on fresh draws and at all sizes.

    Args:
        pattern: whose plan it is.
        plan: the new nodes.
        proven: of this site or of one with an equal cut.
        worker: runs both.
        opsets: domain -> version that the file imports.

    Returns:
        The largest relative error.

    Raises:
        InternalError: they differ, do not run or give another type: a bug in the pattern's emission.
    """
    session = _load(pattern, plan, worker, opsets)
    worst = 0.0
    for number, trial in enumerate(proven.trials):
        for operands in _draws(pattern, trial, proven.parameters, _FRESH + number):
            wanted = trial.run(operands)
            if not isinstance(wanted, Reason) and empty(wanted):
                break
            found = _run(plan, worker, session, operands)
            if isinstance(wanted, Reason) or isinstance(found, Reason):
                reason = wanted if isinstance(wanted, Reason) else cast("Reason", found)
                raise _bug(plan, reason.text)
            error = difference(found, wanted)
            if not error <= (0.0 if pattern.exact else BAR):
                raise _bug(plan, f"they differ by {error:.1e}")
            worst = max(worst, error)
    if session is not None:
        worker.unload(session)
    return worst


def _run(
    plan: ExpressionPlan, worker: Worker, session: Session | None, operands: Operands
) -> dict[str, Array] | Reason:
    """What the new nodes give, an alias what it stands for; by the pattern's names of the outputs."""
    match = plan.match
    names = {role.name: name for name, role in match.roles.items()}
    feeds: dict[str, AnyArray] = {role.name: feed(operands[name], role.dtype) for name, role in match.roles.items()}
    results: dict[str, Array] = {}
    if session is not None:
        ran = worker.run(session, feeds)
        if isinstance(ran, Reason):
            return ran
        results = {name: np.asarray(array, np.float64) for name, array in zip(session.outputs, ran, strict=True)}
    results |= {output: operands[names[source]] for output, source in plan.aliases.items()}
    return {name: results[role.name] for name, role in match.outputs.items()}


def _load(pattern: Expression, plan: ExpressionPlan, worker: Worker, opsets: Mapping[str, int]) -> Session | None:
    if not plan.nodes:
        return None
    plain = [part for node in plan.nodes for part in pattern.lower(node)]
    written = [role for role in plan.match.results() if role.name not in plan.aliases]
    graph = onnx.GraphProto(name="emitted", node=plain)
    graph.input.extend(_declared(role) for role in plan.match.operands())
    graph.output.extend(onnx.ValueInfoProto(name=role.name) for role in written)
    imports = [helper.make_opsetid(domain, version) for domain, version in _imports(plan, plain, opsets).items()]
    model = onnx.ModelProto(ir_version=8, opset_import=imports, graph=graph)
    _check_types(plan, model, written)
    double = to_double(model)
    session = double if isinstance(double, Reason) else worker.load(double.SerializeToString())
    if isinstance(session, Reason):
        raise _bug(plan, session.text)
    return session


def _imports(plan: ExpressionPlan, plain: Sequence[onnx.NodeProto], opsets: Mapping[str, int]) -> Mapping[str, int]:
    """What lowered nodes need: an older onnxruntime refuses a new opset, whatever the file holds."""
    have = opsets.get("", 17)
    if all(onnx.defs.has(node.op_type, have, "") for node in plain if node.domain in ("", "ai.onnx")):
        added = {node.domain: 1 for node in plain if node.domain} if plan.target_opset else {}
        return {**added, **opsets}
    return {**opsets, **dict([plan.target_opset] if plan.target_opset else [])}


def _declared(role: Role) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(role.name, role.dtype, [None] * len(role.shape))


def _check_types(plan: ExpressionPlan, model: onnx.ModelProto, written: list[Role]) -> None:
    """The new nodes must write the element types that the old ones wrote: in double that is not seen."""
    inferred = shape_inference.infer_shapes(model).graph
    found = {info.name: info.type.tensor_type.elem_type for info in (*inferred.output, *inferred.value_info)}
    for role in written:
        if found.get(role.name) not in (None, 0, role.dtype):
            raise _bug(plan, f"{role.name} would have the element type {found[role.name]} and not {role.dtype}")


def _bug(plan: ExpressionPlan, what: str) -> InternalError:
    return InternalError(
        f"the nodes emitted for {plan.match.name} ({plan.op}) are not equal to what they replace: {what}"
    )
