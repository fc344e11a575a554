"""The token range of an unfused graph: doubled, then bisected on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from deltafuse.bench import Binding
from deltafuse.dims import symbol
from deltafuse.draws import Draw
from deltafuse.reasons import Reason
from deltafuse.trial import Step
from deltafuse.validity import find_range, range_steps

T, B = symbol("tokens"), symbol("batch")


def binding(tokens: int | None, batch: int | None = 2) -> Binding:
    numbers = {"tokens": tokens or 0, "batch": batch or 1}
    return Binding(numbers, batch, tokens, (B,) if batch else (), (T,) if tokens else ())


@dataclass
class Goal:
    """Right between two counts; fails below `runs`, wrong everywhere else."""

    low: int
    high: int
    runs: int = 1
    seen: list[tuple[int | None, int | None]] = field(default_factory=list)
    foreseen: list[int | None] = field(default_factory=list)

    def error(self, at: Binding, how: Draw, seed: int) -> float | Reason:
        self.seen.append((at.tokens, at.batch))
        assert at.tokens is not None
        if at.tokens < self.runs:
            return Reason("cut-does-not-run", {"error": "too few"})
        return 1e-15 if self.low <= at.tokens <= self.high else 1.0

    def foresee(self, questions: Sequence[Step]) -> None:
        self.foreseen += [step.binding.tokens for step in questions]


@pytest.mark.parametrize(
    ("low", "high", "start", "runs", "below", "above"),
    [
        (1, 64, 5, 1, None, "wrong"),
        (65, 128, 67, 65, "fails", "wrong"),
        (65, 128, 100, 1, "wrong", "wrong"),
        (17, 17, 17, 1, "wrong", "wrong"),
        (33, 48, 33, 20, "wrong", "wrong"),
        (1, 10**9, 5, 1, None, None),
        (2, 10**9, 5, 2, "fails", None),
        (1, 1, 1, 1, None, "wrong"),
    ],
)
def test_both_ends_are_found(low: int, high: int, start: int, runs: int, below: object, above: object) -> None:
    goal = Goal(low, high, runs)
    validity, at = find_range(goal, binding(start), 0)
    assert (validity.low, validity.below) == (low, below)
    assert (validity.high, validity.above) == (min(high, 1024), above)
    assert list(validity.tried) == sorted(set(validity.tried))
    assert {low, min(high, 1024)} <= set(validity.tried)
    assert {tokens for tokens, _ in goal.seen} <= set(validity.tried)
    # Proven at the largest size that is cheap enough, and at the batch it was found with.
    assert at.tokens == max(low, min(high, 200))
    assert at.batch == 2


def test_sizes_are_tried_at_batch_one() -> None:
    goal = Goal(1, 64)
    find_range(goal, binding(5), 0)
    assert {batch for _, batch in goal.seen} == {1}


def test_a_fixed_count_is_its_own_range() -> None:
    start = binding(None)
    validity, at = find_range(Goal(1, 1), start, 40)
    assert (validity.low, validity.high, validity.below, validity.above, validity.tried) == (40, 40, None, None, (40,))
    assert at is start


def test_no_size_is_run_twice() -> None:
    goal = Goal(33, 48)
    find_range(goal, binding(40), 0)
    assert len(goal.seen) == len(set(goal.seen))


def test_what_is_foreseen_is_asked_for() -> None:
    goal = Goal(1, 64)
    find_range(goal, binding(5), 0)
    # Nothing beyond one chunk is begun before the first token behind it is known to be right.
    assert goal.foreseen == []
    likely = [(step.binding.tokens, step.binding.batch, step.seed) for step in range_steps(binding(5))]
    assert likely == [(2, 1, 2), (1, 1, 1), (64, 1, 64), (65, 1, 65)]
    assert [(tokens, batch) for tokens, batch, _ in likely] == goal.seen
    assert range_steps(binding(None)) == []
    free = Goal(1, 10**9)
    find_range(free, binding(5), 0)
    assert free.foreseen == [130, 260, 260, 520, 520, 1024, 1024]
