"""What a target is: a profile that chooses an operator for a proven site and writes the nodes that call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deltafuse.match import Match, Plan
from deltafuse.options import Operator
from deltafuse.reasons import Reason


@dataclass(frozen=True)
class TargetOptions:
    """What the user, or the stage before, decided.

    Attributes:
        op: force this operator where its limits allow it; None for what is legal.
        allow_bf16_to_fp16: accept that a bfloat16 boundary becomes float16.
        pin: whether axes are pinned in the output file.
        tokens: the token count that is a literal in the output file although the match's is symbolic
            (a user's pin); None where there is none.
    """

    op: Operator | None = None
    allow_bf16_to_fp16: bool = False
    pin: bool = True
    tokens: int | None = None


@dataclass(frozen=True)
class Limit:
    """Something a kernel cannot do.

    Attributes:
        code: reason code.
        mark: V seen in a file of the reference exporter, S read in public source, A assumed.
        fact: what the kernel does beyond the limit.
        check: the reason where a site is beyond it, None where it is within.
    """

    code: str
    mark: str
    fact: str
    check: Callable[[Match, TargetOptions], Reason | None]


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

    def choose(self, match: Match, options: TargetOptions) -> str | Reason:
        """The operator that may replace the site, or the limit that forbids it."""
        ...

    def plan(self, match: Match, options: TargetOptions) -> Plan | Reason:
        """The nodes that replace the site, or the limit that forbids it."""
        ...
