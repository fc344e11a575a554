"""A profile from a file of the user's: looked over when it is read, and what its functions give whenever they do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import defs

from deltafuse.errors import UserError
from deltafuse.kinds import misfits
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.lowering_conv import CAUSAL_CONV
from deltafuse.match import Match, Plan
from deltafuse.opset import LINEAR_ATTENTION_OPSET
from deltafuse.reasons import TEXTS, Reason
from deltafuse.targets.base import FLOATS, Case, Limit
from deltafuse.targets.profile import Emit, Operator, Profile
from deltafuse.user_code import at_fault, blamed, guide

#: What an operator of the rule reads and gives, see `deltafuse.targets.profile.Port`.
_INPUTS = (
    "", "query", "key", "value", "beta", "g", "gk", "state", "lengths", "offsets", "slots", "accepted",
)  # fmt: skip
_OUTPUTS = ("out", "final_state")
_LAYOUT = re.compile(r"([A-Z1]|\([A-Z]{2,}\))+")
_MARKS = ("V", "S", "A")


def checked(profile: Profile, file: Path) -> Profile:
    """The same profile, whose limits and `emit` tell what is wrong with what they give.

    Args:
        profile: as the file defines it.
        file: of the user's.

    Raises:
        UserError: ``target-file``: a part is missing, of another type, or has a value that means nothing.
    """
    for faults in (misfits("PROFILE", profile, Profile), _faults(profile)):
        for place, what in faults:
            raise _error(file, place, what)
    guarded: dict[int, Limit] = {}

    def limits(given: tuple[Limit, ...]) -> tuple[Limit, ...]:
        # A limit that stands in several places stays one.
        return tuple(guarded.setdefault(id(one), replace(one, check=_check(one, file))) for one in given)

    operators = tuple(replace(one, limits=limits(one.limits)) for one in profile.operators)
    emit = _emit(profile, file)
    return replace(profile, file=file, operators=operators, shared=limits(profile.shared), emit=emit, pins=None)


def _error(file: Path, place: str, what: str) -> UserError:
    return UserError("target-file", f"{file}, {place}: {what}; mend {place}, {guide('target')}")


def _faults(profile: Profile) -> Iterator[tuple[str, str]]:
    """Values of the right type that mean nothing."""
    for name in ("name", "title", "operators", "boundaries"):
        if not getattr(profile, name):
            yield f"PROFILE.{name}", "it is empty"
    for index, dtype in enumerate(profile.boundaries):
        if dtype not in FLOATS:
            known = ", ".join(f"{number} ({name})" for number, name in FLOATS.items())
            yield f"PROFILE.boundaries[{index}]", f"{dtype} is none of {known}"
    for index, limit in enumerate(profile.shared):
        yield from _limit_faults(f"PROFILE.shared[{index}]", limit)
    for index, operator in enumerate(profile.operators):
        yield from _operator_faults(f"PROFILE.operators[{index}]", operator)
    yield from _opset_faults(profile)


def _opset_faults(profile: Profile) -> Iterator[tuple[str, str]]:
    """An opset import that no file can have, or that does not bring an operator with it."""
    domain, version = profile.opset or ("", 1)
    newest = max(LINEAR_ATTENTION_OPSET, defs.onnx_opset_version())
    if version < 1 or (not domain and version > newest):
        yield "PROFILE.opset", f"{version} is no version that is known of {domain or 'ai.onnx'}"
    if domain == "ai.onnx":
        yield "PROFILE.opset", "the domain of ONNX itself is written as an empty text"
    for kind, operators in (("operators", profile.operators), ("others", profile.others)):
        for index, operator in enumerate(operators):
            missing = _not_imported(operator, profile.opset)
            if missing:
                yield f"PROFILE.{kind}[{index}].domain", f"PROFILE.opset does not import {missing}"


def _not_imported(operator: Operator, opset: tuple[str, int] | None) -> str:
    """What a file must import for an operator and a target does not, "" where nothing is missing."""
    domain, version = opset or ("", 0)
    if operator.domain:
        return "" if operator.domain == domain else operator.domain
    standard = operator.op_type in (LINEAR_ATTENTION, CAUSAL_CONV)
    lacks = standard and (domain or version < LINEAR_ATTENTION_OPSET)
    return f"ai.onnx {LINEAR_ATTENTION_OPSET}, which has {operator.op_type}" if lacks else ""


def _operator_faults(place: str, operator: Operator) -> Iterator[tuple[str, str]]:
    for name in ("op", "signature", "op_type"):
        if not getattr(operator, name):
            yield f"{place}.{name}", "it is empty"
    for kind, ports in (("inputs", operator.inputs), ("outputs", operator.outputs)):
        bad = {index: port.layout for index, port in enumerate(ports) if not _LAYOUT.fullmatch(port.layout)}
        for index, layout in bad.items():
            yield f"{place}.{kind}[{index}].layout", f"{layout!r} is not one letter an axis, merged in brackets"
    for index, port in enumerate(operator.inputs):
        if port.role not in _INPUTS:
            yield f"{place}.inputs[{index}].role", f"{port.role!r} is none of {', '.join(_INPUTS[1:])}, or empty"
    roles = tuple(port.role for port in operator.outputs)
    if roles != _OUTPUTS:
        yield f"{place}.outputs", f"their roles are {', '.join(roles) or 'none'} and must be {', '.join(_OUTPUTS)}"
    for index, limit in enumerate(operator.limits):
        yield from _limit_faults(f"{place}.limits[{index}]", limit)


def _limit_faults(place: str, limit: Limit) -> Iterator[tuple[str, str]]:
    if limit.code not in TEXTS:
        yield f"{place}.code", f"there is no text for {limit.code!r} in deltafuse.reasons.TEXTS"
    if limit.mark not in _MARKS:
        yield f"{place}.mark", f"{limit.mark!r} is none of {', '.join(_MARKS)}"


def _check(limit: Limit, file: Path) -> Callable[[Case], Reason | None]:
    """The limit's own check; what it raises and what it should not give is the file's fault."""
    place = f"check of limit {limit.code}"

    def check(case: Case) -> Reason | None:
        with at_fault(file, "target", place), blamed():
            found: Any = limit.check(case)
        if found is None:
            return None
        if not isinstance(found, Reason):
            raise _error(file, place, f"it gives {found!r} and must give a Reason or None")
        if found.code not in TEXTS:
            raise _error(file, place, f"there is no text for {found.code!r} in deltafuse.reasons.TEXTS")
        try:
            str((found.text, found.what, found.fix))
        except (LookupError, ValueError, TypeError) as error:
            what = f"the text of {found.code} asks for what its Reason has not: {type(error).__name__}: {error}"
            raise _error(file, place, what) from error
        return found

    return check


def _emit(profile: Profile, file: Path) -> Emit:
    """The profile's own `emit`, in the same way."""

    def emit(match: Match, operator: Operator, case: Case) -> Plan:
        with at_fault(file, "target", "emit"), blamed():
            plan: Any = profile.emit(match, operator, case)
        if not isinstance(plan, Plan):
            raise _error(file, "emit", f"it gives {type(plan).__name__} and must give a Plan")
        for place, what in misfits("the Plan", plan, Plan, "match"):
            raise _error(file, "emit", f"{place.removeprefix('the Plan.')} of its Plan: {what}")
        for what in _plan_faults(plan, match, operator):
            raise _error(file, "emit", what)
        return plan

    return emit


def _plan_faults(plan: Plan, match: Match, operator: Operator) -> Iterator[str]:
    if plan.match is not match:
        yield "the match of its Plan is not the one that it was given"
    if plan.op != operator.op:
        yield f"its Plan is of {plan.op}, and it was to write {operator.op}"
    values = {role.value: len(role.shape) for role in (*match.operands(), *match.results())}
    for value, axis, size in plan.pins:
        if not 0 <= axis < values.get(value, 0) or size < 1:
            yield f"it pins axis {axis} of value {value} to {size}, which is no axis of a role"
    if all((node.op_type, node.domain) != (operator.op_type, operator.domain) for node in plan.nodes):
        yield f"its Plan has no node {operator.op_type} of the domain {operator.domain or 'ai.onnx'}"
    left = {name for node in plan.nodes for name in node.output}
    for node in plan.nodes:
        early = next((name for name in node.input if name and name in left), "")
        if early:
            yield f"the node {node.name} comes before the one that writes {early}"
        left.difference_update(node.output)
