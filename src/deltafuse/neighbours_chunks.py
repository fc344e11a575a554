"""Neighbours of a rule whose chunks are wrong: how many tokens a chunk has is told by where the output departs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from deltafuse import layouts
from deltafuse.chunk_faults import FAULTS, Fault, beginnings, chunked
from deltafuse.draws import Array
from deltafuse.neighbours_operands import agreeing
from deltafuse.patterns import Recurrence
from deltafuse.reasons import Reason
from deltafuse.roles import Screen, finite
from deltafuse.rule import run_rule
from deltafuse.search import Screens, Setting

#: Tokens of a chunk at most.
_MOST = 256
#: Fewer tokens tell nothing of a chunk.
_LEAST = 3


@dataclass(frozen=True)
class ChunkFault:
    """What is wrong in each chunk, and by its code the recurrence that is wrong in the same way."""

    reason: Reason
    like: dict[str, Recurrence]


@np.errstate(all="ignore")
def chunk_fault(
    setting: Setting, screens: Screens, feeds: Mapping[int, Array], ran: Mapping[int, Array]
) -> ChunkFault | None:
    """The rule in chunks with one fault; None where none of `FAULTS` fits, or the rule is none of a delta."""
    pattern, numbers = setting.pattern, finite(ran)
    if not getattr(pattern, "in_chunks", False):
        return None
    known = [(code, fault) for code, fault in FAULTS if pattern.decay != "none" or not fault.of_decay]
    run = partial(beginnings, faults=[fault for _, fault in known])
    for screen in screens:
        if screen.assignment.sizes["T"] < _LEAST:
            continue
        for (code, fault), likely in zip(known, screen.beginning(run, len(known)), strict=True):
            size = _size(screen, fault, feeds, [_unpacked(screen, numbers, *one) for one in likely])
            if size:
                return ChunkFault(Reason(code, {"tokens": size}), {code: partial(chunked, fault=fault, size=size)})
    return None


def _unpacked(screen: Screen, outputs: Mapping[int, Array], value: int, layout: str) -> Array:
    return layouts.unpack(outputs[value], layout, "BTHV", screen.assignment.sizes)


def _size(screen: Screen, fault: Fault, feeds: Mapping[int, Array], outputs: Sequence[Array]) -> int:
    """How many tokens a chunk has; 0 where no size explains an output as a whole."""
    of = screen.assignment
    tokens = of.sizes["T"]

    @cache
    def run(size: int) -> Array:
        return run_rule(partial(chunked, fault=fault, size=size), of.read(feeds), of.preparation())[0]

    for found in outputs:
        # A chunk of all tokens departs where the second one begins, or a token before or behind that.
        begun = agreeing(found, run(min(tokens, _MOST)))
        for size in (begun, begun + 1, begun - 1) if begun else ():
            if 1 < size <= tokens and agreeing(found, run(size)) == tokens:
                return size
    return 0
