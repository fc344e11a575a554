"""Which token count a graph that was traced for some number of chunks runs at."""

from __future__ import annotations

import pytest

from deltafuse.bench import TOKENS
from deltafuse.counts import smallest_running


def search(low: int, high: int, tried: tuple[int, ...] = TOKENS) -> int:
    """What is found of a graph that runs from `low` to `high` tokens."""
    return smallest_running({n: low <= n <= high for n in tried}, lambda n: low <= n <= high)


@pytest.mark.parametrize("chunk", [8, 16, 32, 64, 128])
def test_no_window_of_a_usual_chunk_is_missed(chunk: int) -> None:
    for number in range(2, 512 // chunk):
        low, high = (number - 1) * chunk + 1, number * chunk
        if not any(low <= n <= high for n in TOKENS):
            assert low <= search(low, high) <= high, (low, high)


@pytest.mark.parametrize("chunk", [2, 3, 5, 6, 7, 9, 10, 12])
def test_no_window_of_a_small_chunk_is_missed_up_to_64_tokens(chunk: int) -> None:
    for number in range(2, 64 // chunk):
        low, high = (number - 1) * chunk + 1, number * chunk
        if not any(low <= n <= high for n in TOKENS):
            assert search(low, high) == low


@pytest.mark.parametrize("low", [6, 65, 601, 2000])
def test_a_graph_that_runs_above_its_range_too_is_taken_at_its_low_end(low: int) -> None:
    assert search(low, 10**9) == low


def test_a_graph_that_never_runs_has_none() -> None:
    assert search(10**6, 10**6) == 0
    assert search(0, 10**6) == 0
