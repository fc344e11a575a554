"""What a target is: a profile that chooses an operator for a proven site and writes the nodes that call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from onnx import TensorProto

from deltafuse.dims import Dim
from deltafuse.match import Match, Plan, Role
from deltafuse.options import Boundary, FuseOptions, Operator
from deltafuse.reasons import Reason

#: Float types that kernels have.
FLOATS: Mapping[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
}  # fmt: skip


def boundary_notes(match: Match, typed: Mapping[str, int]) -> tuple[str, ...]:
    """What is said of operands and results that a node has in a type that does not hold all of their numbers.

    Args:
        match: the site.
        typed: role -> its element type at the node; roles that the site lacks are left out.
    """
    rounded: dict[str, list[str]] = {}
    for name, dtype in typed.items():
        role = getattr(match, name)
        if isinstance(role, Role) and role.dtype not in ((*FLOATS,) if dtype == TensorProto.FLOAT else (dtype,)):
            rounded.setdefault(FLOATS[dtype], []).append(name)
    return tuple(f"{dtype}_boundary: {', '.join(names)} rounded to {dtype}" for dtype, names in rounded.items())


@dataclass(frozen=True)
class TargetOptions:
    """What the user, or the stage before, decided.

    Attributes:
        op: force this operator where its limits allow it; None for what is legal.
        allow_bf16_to_fp16: accept that a bfloat16 boundary becomes float16.
        pin: whether axes are pinned in the output file.
        tokens: the token count that is a literal in the output file although the match's is symbolic
            (a user's pin); None where there is none.
        boundary: element type of the kernel's operands; None for what the target, or the graph, has.
        signature: version of the operators' signature; None for the newest.
        opset: version of the ai.onnx operators that the file imports.
        batch: how many sequences the output takes, where the target fixes it.
    """

    op: Operator | None = None
    allow_bf16_to_fp16: bool = False
    pin: bool = True
    tokens: int | None = None
    boundary: Boundary | None = None
    signature: str | None = None
    opset: int = 17
    batch: int = 1


def target_options(options: FuseOptions, tokens: int | None = None, opset: int = TargetOptions.opset) -> TargetOptions:
    """What of a run's options a target looks at.

    Args:
        options: of the run.
        tokens: see `TargetOptions`.
        opset: see there.
    """
    chosen = (options.op, options.allow_bf16_to_fp16, options.pin, tokens, options.boundary, options.signature)
    return TargetOptions(*chosen, opset, options.batch)


def literal_tokens(match: Match, options: TargetOptions) -> int | None:
    """The token count that is a literal in the output file, None where it stays symbolic."""
    if isinstance(match.dims.tokens, int):
        return match.dims.tokens
    if options.tokens is not None:
        return options.tokens
    valid = match.valid_tokens
    # A graph that is right for one size only gets that size written in.
    return valid.low if options.pin and valid is not None and valid.low == valid.high else None


@dataclass(frozen=True)
class Case:
    """What a limit looks at: a proven site that is to be fused, or a fused node that is looked over.

    Attributes:
        batch, key_heads, value_heads, key_dim, value_dim: sizes, None where they are not known.
        tokens: the token count that is a literal in the output file, None where there is none.
        tokens_text: the token count as it is shown.
        dtypes: role -> its element type in the source; empty for a node.
        per_channel: whether the decay has a value per key channel.
        decays: whether the rule has a decay.
        boundary: element type of the kernel's operands.
        options: what was asked for.
    """

    batch: Dim | None
    tokens: int | None
    tokens_text: str
    key_heads: int | None
    value_heads: int | None
    key_dim: int | None
    value_dim: int | None
    dtypes: Mapping[str, int] = field(default_factory=dict[str, int])
    per_channel: bool = False
    decays: bool = True
    boundary: int = 0
    options: TargetOptions = field(default_factory=TargetOptions)


@dataclass(frozen=True)
class Limit:
    """Something a kernel cannot do.

    Attributes:
        code: reason code.
        mark: V seen in a file of the reference exporter, S read in public source, A assumed.
        fact: what holds, and what the kernel does beyond it or why.
        check: the reason where a case is beyond it, None where it is within or not known to be beyond.
    """

    code: str
    mark: str
    fact: str
    check: Callable[[Case], Reason | None]


def broken(limits: tuple[Limit, ...], case: Case) -> Reason | None:
    """The first limit that a case is beyond."""
    reasons = (limit.check(case) for limit in limits)
    return next((reason for reason in reasons if reason is not None), None)


class Target(Protocol):
    """One profile: its contract, limits and the nodes to emit. Knows nothing of how a match was found."""

    @property
    def name(self) -> str:
        """Name as given to ``--target``."""
        ...

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All limits of all kernels, for ``fuse targets``."""
        ...

    @property
    def opset(self) -> tuple[str, int] | None:
        """Domain and least version of an opset import that the output file needs, None where it needs none."""
        ...

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Element types that the operators' operands may have, the preferred one first."""
        ...

    @property
    def ordinary(self) -> tuple[str, ...]:
        """Operators that stand for ordinary expressions, which are looked for by default."""
        ...

    @property
    def control_flow(self) -> bool:
        """Whether what reads the output takes If, Loop and Scan."""
        ...

    def domain_of(self, op: str) -> str | None:
        """Domain of an operator of the target's that stands for an ordinary expression, None where it has none."""
        ...

    def choose(self, match: Match, options: TargetOptions) -> str | Reason:
        """The operator that may replace the site, or the limit that forbids it."""
        ...

    def plan(self, match: Match, options: TargetOptions, *, likely: bool = False) -> Plan | Reason:
        """The nodes that replace the site, or the limit that forbids it; one that is only `likely` may have none."""
        ...
