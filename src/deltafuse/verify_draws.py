"""At which sizes and on which draws both sides of a site are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import helper

from deltafuse.bench import TOKENS, solve
from deltafuse.draws import DRAWS, Draw
from deltafuse.fused import kernel
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.reasons import TEXTS, Reason
from deltafuse.verify_cut import Pair, axis_dims, free_symbols
from deltafuse.verify_feeds import FLOATS, Array, feeds

TEXTS["no-size-runs"] = (
    "the unfused file's nodes run at none of the token counts that were tried: {error}; look "
    "whether onnxruntime runs the unfused file"
)


@dataclass(frozen=True)
class Run:
    """Where a comparison takes place."""

    how: Draw
    seed: int
    numbers: Mapping[str, int]
    tokens: int


class PairDraws:
    """Sizes and draws for one pair.

    Args:
        pair: both sides.
        unfused: runs the unfused side; gives a `Reason` where it does not run.
    """

    def __init__(self, pair: Pair, unfused: Callable[[Run], object]) -> None:
        self._pair = pair
        self._unfused = unfused
        self._batch = 1

    def sizes(self) -> tuple[int, ...] | Reason:
        """Token counts to compare at: inside the range the file states, else the first that runs."""
        tokens, valid = self._pair.tokens, self._pair.valid
        self._batch = self._batches()
        if isinstance(tokens, int):
            return (tokens,)
        if valid is not None:
            low, high = valid
            return tuple(dict.fromkeys(min(max(size, low), high) for size in (5, 70)))
        failed = Reason("no-size-runs", {"error": "none"})
        for size in TOKENS:
            ran = self._unfused(next(self.runs(size)))
            if not isinstance(ran, Reason):
                return (size,)
            failed = Reason("no-size-runs", {"error": ran.what})
        return failed

    def runs(self, tokens: int) -> Iterator[Run]:
        """Every draw at one token count."""
        numbers = self._numbers(tokens)
        return (Run(how, 100 * tokens + seed, numbers, tokens) for seed, how in enumerate(DRAWS))

    def _batches(self) -> int:
        """Two sequences where the operator takes them and the unfused nodes are right for more than one."""
        low, high = self._pair.valid or (TOKENS[0], TOKENS[0])
        kernels = [kernel(node) for node in self._pair.fused.graph.node]
        if LINEAR_ATTENTION not in kernels:
            return 1
        self._batch = 2
        ran = self._unfused(next(self.runs(min(max(TOKENS[0], low), high))))
        return 1 if isinstance(ran, Reason) else 2

    def _numbers(self, tokens: int) -> dict[str, int]:
        # Free axes that are neither are taken to be one.
        numbers = dict.fromkeys(free_symbols(self._pair), 1)
        wanted = [(dim, self._batch) for dim in axis_dims(self._pair, "batch")]
        wanted += [(dim, tokens) for dim in (self._pair.tokens, *axis_dims(self._pair, "tokens"))]
        return numbers | (solve(wanted, ()) or solve([(self._pair.tokens, tokens)], ()) or {})


def drawn(pair: Pair, run: Run) -> dict[str, Array]:
    """The inputs of one run, floats in double."""
    return feeds(pair.inputs, run.numbers, pair.tokens, run.how, run.seed)


def drawn_as_typed(pair: Pair, run: Run) -> dict[str, Array]:
    """The inputs of one run in the types of the fused file."""
    types = {item.name: helper.tensor_dtype_to_np_dtype(item.dtype) for item in pair.inputs}
    return {name: array.astype(types[name]) for name, array in drawn(pair, run).items()}


def exactly(pair: Pair, typed: Mapping[str, Array]) -> dict[str, Array]:
    """The same numbers with all floats in double."""
    floats = {item.name for item in pair.inputs if item.dtype in FLOATS}
    return {name: array.astype(np.float64) if name in floats else array for name, array in typed.items()}
