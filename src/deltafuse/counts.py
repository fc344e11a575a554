"""Which token counts a graph runs at, where none of the usual ones was right: exporters bake in how many chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

#: Most tokens that are tried by doubling.
_MOST = 4096
#: A graph traced for n chunks runs from (n - 1) C + 1 to n C tokens only: steps so that none of usual size is missed.
_COUNTS = (*range(2, 65), *range(65, 513, 8), *range(513, 1025, 16))


def smallest_running(tried: Mapping[int, bool], runs: Callable[[int], bool]) -> int:
    """The smallest token count that runs above one that fails, 0 where there is none.

    A graph that was traced for many tokens fails below its range; above it, it runs, but wrongly, or fails too.

    Args:
        tried: token count -> whether it ran.
        runs: tries another.
    """
    low = max((tokens for tokens, ran in tried.items() if not ran), default=0)
    high = min((tokens for tokens, ran in tried.items() if ran and tokens > low), default=0)
    if not high and not any(tried.values()):
        high = next((tokens for tokens in _COUNTS if tokens not in tried and runs(tokens)), 0)
        low = max((tokens for tokens in (*tried, *_COUNTS) if tokens < high), default=0) if high else low
    while not high and low < _MOST:
        low, high = (low, 2 * low) if runs(2 * low) else (2 * low, 0)
    if not low or not high:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high
