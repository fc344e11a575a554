"""Prove what is emitted: the new nodes, lowered to plain operators, against the cut they replace, in double."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx
from onnx import helper

from deltafuse.agreement import BAR
from deltafuse.bench import Binding, open_bench
from deltafuse.draws import DRAWS, FAR, Array, Draw
from deltafuse.errors import InternalError
from deltafuse.fused import call, kernel, lower_all
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.match import Match, Plan, Role
from deltafuse.probe import to_double
from deltafuse.reasons import TEXTS, Reason
from deltafuse.rule import relative
from deltafuse.splice import AnyPlan
from deltafuse.trial import Step, Trial
from deltafuse.user_code import at_fault, own_file
from deltafuse.worker import Session, Worker

TEXTS.update(
    {
        "other-at-size": "the site is the rule at other sizes, but not at batch {batch} and {tokens:# token} "
        "('{draw}'); leave --batch or --pin out, or ask for other sizes",
    }
)

#: Seeds that the prover did not use.
_SEED = 1000
#: What is emitted is one operator, whatever the operands' sizes: wires and attributes show on plain ones, and the eps
#: of a norm on tiny ones.
_DRAWS = tuple(how for how in DRAWS if how.name in ("slow decay", "any sign of beta, tiny norms"))
#: One sequence far larger than the next.
_APART = replace(DRAWS[0], spread=FAR)


def without_names(plan: AnyPlan) -> Hashable:
    """What the nodes of a plan are beside their names: equal for plans of one class of sites that one proof holds for.

    Args:
        plan: what is to be written.
    """
    numbers, roles = {"": 0}, (*plan.match.operands(), *plan.match.results())

    def numbered(names: Iterable[str]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(name, len(numbers)) for name in names])

    typed = numbered(role.name for role in roles), tuple(role.dtype for role in roles)
    return typed, tuple(
        (
            node.op_type, node.domain, numbered(node.input), numbered(node.output),
            tuple([attribute.SerializeToString() for attribute in node.attribute]),
        )
        for node in plan.nodes
    )  # fmt: skip


def prove_emitted(
    plan: Plan,
    trial: Trial,
    worker: Worker,
    opset: int,
    tokens: int | None = None,
    batch: int = 1,
    file: Path | None = None,
) -> float | Reason:
    """Runs emitted nodes and cut on fresh draws, at the batch that they are written for where the target fixes it.

    Args:
        plan: the site and the nodes emitted for it.
        trial: of this site or of one with an equal cut (then values correspond by their roles).
        worker: runs the emitted nodes.
        opset: version of the default domain that the nodes are written for.
        tokens: the token count that the nodes are written for, where they are for one that the cut leaves free.
        batch: the batch they are written for, where they are for one.
        file: of the user's that the target is in, None for a shipped one.

    Returns:
        The largest relative error; ``other-at-size`` where the cut is not the rule at the sizes that are asked for.

    Raises:
        InternalError: they differ, or the emitted nodes do not run: a bug in the target's emission.
        UserError: the same where the target, or the rule, is the user's own.
    """
    own = own_file(str(getattr(trial.recurrence, "__module__", "")))
    rule = None if own is None else own[0]
    with at_fault(rule if file is None else None, "pattern", "recurrence"), at_fault(file, "target", "emit"):
        return _proven(plan, trial, worker, opset, tokens, batch)


def _proven(
    plan: Plan, trial: Trial, worker: Worker, opset: int, tokens: int | None, batch: int
) -> float | Reason:
    session = _load(plan, worker, opset)
    held = _held(trial, worker)
    if isinstance(held, Reason):
        return held
    trial = held
    free = trial.binding.batch is not None and plan.op != LINEAR_ATTENTION
    at = batch if free else trial.binding.batch
    binding = trial.few_tokens(at) if tokens is None else trial.binding.at(tokens, at)
    if binding is None:
        raise _bug(plan, "there are no sizes to run it at")
    if batch > 1 or tokens is not None:
        # What several sequences have of each other may come with later tokens: they are tried at as many as one was.
        many = trial.binding.at(trial.binding.tokens, at) if tokens is None else None
        tries = [(binding, how) for how in DRAWS] + ([] if many is None else [(many, _APART)])
        other = _other_rule(trial, tries)
        if other is not None:
            worker.unload(session)
            return other
    worst = 0.0
    steps = [Step(binding, how, seed) for seed, how in enumerate(_DRAWS, _SEED)]
    ahead = trial.ahead(steps)
    for step in steps:
        operands, _ = ahead.draw(step)
        assignment = trial.explained.assignment
        written = assignment.write(operands)
        wanted = trial.bench.run(written, binding.numbers, [v for v in (trial.out, trial.final) if v is not None])
        if isinstance(wanted, Reason):
            raise _bug(plan, wanted.text)
        if not all(np.isfinite(array).all() for array in wanted.values()):
            continue
        feeds = {_operand(plan.match, name).name: written[value] for name, value in assignment.values.items()}
        found = worker.run(session, feeds, meanwhile=ahead.prepare)
        if isinstance(found, Reason):
            raise _bug(plan, found.text)
        results = cast("tuple[Array, ...]", found)
        worst = max(worst, _compare(plan, trial, wanted, dict(zip(session.outputs, results, strict=True))))
    worker.unload(session)
    return worst


def _held(trial: Trial, worker: Worker) -> Trial | Reason:
    """The trial with a session that the worker has: what a child that was killed had is loaded again."""
    bench = trial.bench
    if worker.has(bench.session):
        return trial
    again = open_bench(worker, bench.cut, bench.names, bench.shapes, bench.sizes)
    return again if isinstance(again, Reason) else replace(trial, bench=again, there=None)


def _other_rule(trial: Trial, tries: Sequence[tuple[Binding, Draw]]) -> Reason | None:
    """That the cut is not the rule at some sizes, though it is at those that it was proven at."""
    for seed, (binding, how) in enumerate(tries, _SEED):
        error = trial.error(binding, how, seed)
        if isinstance(error, Reason) and error.code == "overflows":
            continue
        if isinstance(error, Reason) or not error <= BAR:
            sizes = {"batch": binding.batch or "the given", "tokens": binding.tokens or "the given"}
            return Reason("other-at-size", sizes | {"draw": how.name})
    return None


def _compare(plan: Plan, trial: Trial, wanted: Mapping[int, Array], found: Mapping[str, Array]) -> float:
    pairs = [(plan.match.out, trial.out), (plan.match.final_state, trial.final)]
    worst = 0.0
    for role, value in pairs:
        if role is None or value is None:
            continue
        error = relative(found[role.name], wanted[value])
        if not error <= BAR:
            raise _bug(plan, f"{role.name} differs by {error:.1e}")
        worst = max(worst, error)
    return worst


def _operand(match: Match, name: str) -> Role:
    role = getattr(match, name)
    if not isinstance(role, Role):
        raise InternalError(f"{match.name} has no operand {name}")
    return role


def _load(plan: Plan, worker: Worker, opset: int) -> Session:
    match = plan.match
    graph = onnx.GraphProto(name="emitted", node=lower_all(plan.nodes, _scales(plan)))
    roles = {
        role.name: role for role in (match.query, match.key, match.value, match.g, match.beta, match.state) if role
    }
    graph.input.extend(
        helper.make_tensor_value_info(role.name, role.dtype, [None] * len(role.shape)) for role in roles.values()
    )
    graph.output.extend(onnx.ValueInfoProto(name=role.name) for role in (match.out, match.final_state) if role)
    model = onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", opset)], graph=graph)
    double = to_double(model)
    session = double if isinstance(double, Reason) else worker.load(double.SerializeToString())
    if isinstance(session, Reason):
        raise _bug(plan, session.text)
    return session


def _scales(plan: Plan) -> dict[str, float]:
    """The exact scale of each fused node, which its attribute has as float32; left out where that stands for a default.

    Raises:
        InternalError: the attribute is another number.
    """
    exact, found = plan.match.scale, dict[str, float]()
    for node in filter(kernel, plan.nodes):
        read = call(node)
        if isinstance(read, Reason) or (read.op == LINEAR_ATTENTION and not read.scale):
            continue
        if np.float32(read.scale) != np.float32(exact):
            raise _bug(plan, f"the scale of {node.name} is {read.scale:g}, and that of the site is {exact:g}")
        found[node.name] = exact
    return found


def _bug(plan: Plan, what: str) -> InternalError:
    return InternalError(
        f"the nodes emitted for {plan.match.name} ({plan.op}) are not equal to what they replace: {what}"
    )
