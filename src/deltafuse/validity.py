"""The token counts for which an unfused graph is the rule: a traced graph often is for some only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from deltafuse.bench import Binding
from deltafuse.draws import DRAWS, Draw
from deltafuse.match import Validity
from deltafuse.reasons import Reason
from deltafuse.trial import Step

#: A graph that is still right here is taken to be right for any count (traced chunk counts end far below).
_FAR = 1024
#: Proofs beyond this many tokens tell no more and take longer.
_PROOF = 200
_BAR = 1e-10
_CHUNKS = (64, 32, 16)


class Goal(Protocol):
    """Something that can be tried at any sizes."""

    def error(self, binding: Binding, how: Draw, seed: int) -> float | Reason:
        """Relative error, or why it does not run."""
        ...

    def foresee(self, questions: Sequence[Step]) -> None:
        """Is told what is likely to be tried next."""
        ...


def range_steps(start: Binding) -> list[Step]:
    """What `find_range` is likely to compare first: few tokens are right, and one chunk, and what comes behind it."""
    if start.tokens is None:
        return []
    below = beyond = start.tokens
    counts: list[int] = []
    while below > 1:
        counts.append(below := below // 2)
    while beyond <= max(_CHUNKS):
        counts.append(beyond := _further(beyond))
    return _steps(start, counts)


def find_range(goal: Goal, start: Binding, fixed: int) -> tuple[Validity, Binding]:
    """Bisects both ends of the range around a token count that is right.

    Args:
        goal: what is tried.
        start: sizes at which it is right.
        fixed: the token count where the axis is not free.

    Returns:
        The range, and the binding of its largest size that is cheap enough to prove at.
    """
    if start.tokens is None:
        return Validity(fixed, fixed, None, None, (fixed,)), start
    tried: dict[int, str | None] = {start.tokens: None}

    def outcome(tokens: int) -> str | None:
        if tokens not in tried:
            if tokens > max(_CHUNKS) + 1:
                goal.foresee(_steps(start, sorted({tokens, min(_further(tokens), _FAR)})))
            tried[tokens] = _try(goal, start, tokens)
        return tried[tokens]

    low, below = _end(outcome, start.tokens, lambda n: n // 2, 1)
    high, above = _end(outcome, start.tokens, _further, _FAR)
    at = start.at(max(low, min(high, _PROOF)), start.batch)
    return Validity(low, high, below, above, tuple(sorted(tried))), start if at is None else at


def _try(goal: Goal, start: Binding, tokens: int) -> str | None:
    """``fails``, ``wrong``, or None where the graph is right."""
    step = _step(start, tokens)
    if step is None:
        return "fails"
    error = goal.error(step.binding, step.how, step.seed)
    if isinstance(error, Reason):
        return "fails"
    return None if error <= _BAR else "wrong"


def _step(start: Binding, tokens: int) -> Step | None:
    """The comparison at some tokens of one sequence; None where the symbols allow none."""
    binding = start.at(tokens, 1 if start.batch is not None else None)
    return None if binding is None else Step(binding, DRAWS[0], tokens)


def _steps(start: Binding, counts: Iterable[int]) -> list[Step]:
    """The comparisons at those of some token counts that the symbols allow."""
    return [step for step in (_step(start, count) for count in counts) if step is not None]


def _end(
    outcome: Callable[[int], str | None], start: int, step: Callable[[int], int], limit: int
) -> tuple[int, str | None]:
    """The last right count in one direction and what lies beyond it."""
    right, beyond = start, start
    while beyond != limit and outcome(beyond) is None:
        right, beyond = beyond, step(beyond)
        beyond = max(beyond, limit) if limit == 1 else min(beyond, limit)
    if outcome(beyond) is None:
        return beyond, None
    # What was traced at one count is often right for that one only.
    next_to = (start + 1 if beyond > start else start - 1,) if right == start else ()
    likely = (*next_to, *_likely(*sorted((right, beyond))))
    while abs(beyond - right) > 1:
        middle = next((n for n in likely if min(right, beyond) < n < max(right, beyond)), (right + beyond) // 2)
        if outcome(middle) is None:
            right = middle
        else:
            beyond = middle
    return right, outcome(beyond)


def _further(tokens: int) -> int:
    """Twice as many, but a traced chunk is what ends most ranges: first the largest, then one token beyond it."""
    chunk = max(_CHUNKS)
    return max(chunk, tokens + 1) if tokens <= chunk else 2 * tokens


def _likely(low: int, high: int) -> tuple[int, ...]:
    """Where ranges often end: at a whole number of chunks."""
    multiples = [(high - 1) // chunk * chunk for chunk in _CHUNKS]
    return tuple(n for multiple in multiples if low < multiple for n in (multiple, multiple + 1))
