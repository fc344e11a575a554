"""A target as data: signatures, limits, attributes, runtimes. A user's own is a file that defines ``PROFILE``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import TensorProto

from deltafuse.errors import UserError
from deltafuse.match import Match, Plan, Role
from deltafuse.reasons import Reason
from deltafuse.targets.base import Case, Limit, TargetOptions, broken, literal_tokens
from deltafuse.targets.emit import Attribute

FLOAT, FLOAT16, BFLOAT16 = int(TensorProto.FLOAT), int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)
INT32 = int(TensorProto.INT32)
#: How element types are written on the command line.
BOUNDARIES = {"fp16": FLOAT16, "bf16": BFLOAT16, "fp32": FLOAT}
_ROLES = ("query", "key", "value", "beta", "state", "out", "final_state")


@dataclass(frozen=True)
class Port:
    """One input or output of an operator.

    Attributes:
        name: as the operator calls it.
        layout: one letter an axis, merged axes in brackets (see `deltafuse.match.Role`).
        role: what feeds it: a role of `deltafuse.match.Match`, ``gk`` (its log decay where that has a value per key
            channel), ``lengths``, ``offsets``, ``slots`` or ``accepted``; "" for a port that is never fed.
        dtypes: element types it takes; empty for the type of the boundary.
        optional: whether the operator runs without it.
        constant: whether it must be a constant of the file.
        fresh: whether it is overwritten in place, so that it must be a node's own output with no other reader.
    """

    name: str
    layout: str
    role: str
    dtypes: tuple[int, ...] = ()
    optional: bool = False
    constant: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class AttributeRule:
    """One attribute of an operator's node.

    Attributes:
        kind: ``onnx.AttributeProto`` type.
        value: the only legal value; None where it follows from the node or is free.
        required: whether the node is wrong without it.
        written: whether an emitted node has it.
    """

    name: str
    kind: int
    value: Attribute | None = None
    required: bool = True
    written: bool = True


@dataclass(frozen=True)
class Operator:
    """One signature of one operator.

    Attributes:
        op: name of the operator, as the report shows it.
        short: what ``--op`` calls it, "" where it is the only one.
        signature: version of the signature, as ``--signature`` calls it.
        op_type, domain: of the node.
        inputs, outputs: ports, in the operator's order.
        attributes: in the order they are written.
        limits: those of this operator alone.
    """

    op: str
    short: str
    signature: str
    op_type: str
    domain: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[AttributeRule, ...]
    limits: tuple[Limit, ...] = ()

    def fed(self, roles: Collection[str]) -> tuple[int, ...]:
        """Indices of the inputs that an emitted node feeds, given the roles that there is something for."""
        return tuple(index for index, port in enumerate(self.inputs) if port.role in roles)

    def port(self, role: str) -> Port | None:
        """The input that a role feeds."""
        return next((port for port in self.inputs if port.role == role), None)


@dataclass(frozen=True)
class Requirement:
    """A package the fused file needs to run, and from which version on."""

    package: str
    version: str
    mark: str
    fact: str


@dataclass(frozen=True)
class LintRules:
    """What ``fuse lint`` looks at beside each node's signature and limits.

    Attributes:
        forbidden_ops: operators that stop the target's converter wherever they stand.
        own_data: external data names are local to a graph: no two graphs of one folder may share one.
        value_info_type: whether a declared type of a result must be the boundary's.
    """

    forbidden_ops: tuple[str, ...] = ()
    own_data: bool = False
    value_info_type: bool = True


#: Writes the nodes of a site that is within the limits.
Emit = Callable[[Match, Operator, Case], Plan]
#: Tells the axes that the nodes of a site need to be one size, see `deltafuse.match.Plan`.
Pins = Callable[[Match, Case], tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True)
class Profile:
    """One target.

    Attributes:
        name: as given to ``--target``.
        title: one line for people.
        operators: signatures, the preferred operator first; the first signature of an operator is its newest.
        shared: limits of all operators.
        boundaries: element types the operands may have; the first is taken where the graph's is none of them.
        emit: writes the nodes.
        opset: domain and least version of the opset import the nodes need.
        requires: packages that run the fused file.
        lint: further rules.
        fixes_batch: whether the number of sequences is written into the fused nodes.
        runtime: what runs the fused file, where several targets share it; "" for the target's own.
        others: operators that stand for ordinary expressions, which are looked for by default: see
            `deltafuse.expressions.Expression.operator`.
        pins: tells the axes that the plan of `emit` fixes; None where nothing but `emit` does.
        file: of the user's that defines it, None for a shipped one.
    """

    name: str
    title: str
    operators: tuple[Operator, ...]
    shared: tuple[Limit, ...]
    boundaries: tuple[int, ...]
    emit: Emit
    opset: tuple[str, int] | None = None
    requires: tuple[Requirement, ...] = ()
    lint: LintRules = field(default_factory=LintRules)
    fixes_batch: bool = False
    runtime: str = ""
    others: tuple[Operator, ...] = ()
    pins: Pins | None = None
    file: Path | None = None

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All limits of all operators, each once."""
        own = [limit for operator in self.operators for limit in operator.limits]
        return tuple(dict.fromkeys((*self.shared, *own)))

    @property
    def signatures(self) -> tuple[str, ...]:
        """All versions of signatures, the newest first."""
        return tuple(dict.fromkeys(operator.signature for operator in self.operators))

    @property
    def ordinary(self) -> tuple[str, ...]:
        """Names of the operators for ordinary expressions."""
        return tuple(one.op for one in self.others)

    @property
    def control_flow(self) -> bool:
        """Whether what reads the output takes If, Loop and Scan; else nothing is fused inside them."""
        return not self.lint.forbidden_ops

    def domain_of(self, op: str) -> str | None:
        """Domain of an operator for ordinary expressions, None where the target has none of that name."""
        return next((one.domain for one in self.others if one.op == op), None)

    def choose(self, match: Match, options: TargetOptions) -> str | Reason:
        """The first operator whose limits hold, else the limit that forbids the last one."""
        chosen = self._operator(match, options)
        return chosen if isinstance(chosen, Reason) else chosen.op

    def plan(self, match: Match, options: TargetOptions, *, likely: bool = False) -> Plan | Reason:
        """The nodes that replace a site; none of one that is only `likely`, where `pins` tells the rest.

        Raises:
            UserError: ``option``: an option names what this target does not have.
        """
        self.check(options)
        operator = self._operator(match, options)
        if isinstance(operator, Reason):
            return operator
        case = self.case(match, options)
        if likely and self.pins is not None:
            return Plan(match, operator.op, (), (), self.pins(match, case))
        plan = self.emit(match, operator, case)
        return replace(plan, notes=(*plan.notes, *self._passed_over(operator, case)))

    def check(self, options: TargetOptions) -> None:
        """Refuses options that this target does not take, whatever the site.

        Raises:
            UserError: ``option``.
        """
        if options.batch != 1 and not self.fixes_batch:
            raise UserError("option", f"target {self.name} leaves the batch as it is in the model; leave --batch out")
        if options.allow_bf16_to_fp16 and all(limit.code != "bf16-boundary" for limit in self.limits):
            raise UserError("option", f"target {self.name} has no limit that --allow-bf16-to-fp16 lifts; leave it out")
        if options.boundary is not None and BOUNDARIES[options.boundary] not in self.boundaries:
            known = ", ".join(name for name, dtype in BOUNDARIES.items() if dtype in self.boundaries)
            raise UserError("option", f"target {self.name} takes no {options.boundary}; give --boundary {known}")
        self.candidates(options)

    def _passed_over(self, chosen: Operator, case: Case) -> Iterator[str]:
        """That a preferred operator is not taken for the number of sequences alone."""
        for operator in self.candidates(case.options):
            if operator is chosen:
                return
            reason = broken(operator.limits, case)
            if reason is not None and reason.code == "rgdr-batch-heads":
                yield f"several_sequences: decode goes to {chosen.op}: {reason.what}"

    def case(self, match: Match, options: TargetOptions) -> Case:
        """What the limits look at."""
        dims = match.dims
        return Case(
            batch=dims.batch,
            tokens=literal_tokens(match, options),
            tokens_text=str(dims.tokens),
            key_heads=dims.key_heads,
            value_heads=dims.value_heads,
            key_dim=dims.key_dim,
            value_dim=dims.value_dim,
            dtypes={name: role.dtype for name, role in _boundary_roles(match)},
            per_channel=match.channel_decay,
            decays=match.g is not None,
            boundary=self._boundary(match, options),
            options=options,
        )

    def _operator(self, match: Match, options: TargetOptions) -> Operator | Reason:
        case = self.case(match, options)
        reason = broken(self.shared, case)
        for operator in () if reason is not None else self.candidates(options):
            reason = broken(operator.limits, case)
            if reason is None:
                return operator
        if reason is None:
            raise UserError("option", f"target {self.name} has no operator for this site")
        return reason

    def candidates(self, options: TargetOptions) -> tuple[Operator, ...]:
        """The operators that the options leave, one signature each.

        Raises:
            UserError: ``option``.
        """
        if options.signature is not None and options.signature not in self.signatures:
            known = ", ".join(self.signatures)
            text = f"target {self.name} has no signature {options.signature!r}; give one of: {known}"
            raise UserError("option", text)
        wanted = {operator.op: operator for operator in reversed(self.operators)}
        if options.signature is not None:
            wanted |= {one.op: one for one in self.operators if one.signature == options.signature}
        left = tuple(one for one in wanted.values() if options.op in (None, one.short))
        if not left:
            raise UserError("option", f"target {self.name} has no operator {options.op!r}; leave --op out")
        order = [operator.op for operator in self.operators]
        return tuple(sorted(left, key=lambda one: order.index(one.op)))

    def _boundary(self, match: Match, options: TargetOptions) -> int:
        if options.boundary is None:
            return match.value.dtype if match.value.dtype in self.boundaries else self.boundaries[0]
        return BOUNDARIES[options.boundary]


def _boundary_roles(match: Match) -> Iterator[tuple[str, Role]]:
    for name in _ROLES:
        role = getattr(match, name)
        if isinstance(role, Role):
            yield name, role
