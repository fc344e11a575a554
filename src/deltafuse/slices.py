"""Backward slices of one graph, each guessed from the one before: layers follow each other and are alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from deltafuse.graph import Graph
from deltafuse.probe import backward_slice
from deltafuse.ragged import Numbers

#: How often a guess is mended before the long way is taken.
_TRIES = 8


class Slices:
    """Finds slices of one graph, which is in topological order."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._before: tuple[Numbers, int] | None = None
        self._known: frozenset[int] = frozenset()
        self._is_end = self._ends(())

    def of(self, known: frozenset[int], roots: Sequence[int], outputs: Sequence[int], at: int) -> Numbers:
        """The nodes that compute the outputs from other values, ascending; see `deltafuse.probe.backward_slice`.

        Args:
            known: values that it starts from, mostly the same for all slices.
            roots: further ones.
            outputs: value ids.
            at: a node; where it lies some nodes behind that of the last slice, all of this one is likely to.
        """
        if known is not self._known:
            self._known, self._is_end = known, self._ends(known)
        nodes = None
        if self._before is not None and not self._graph.captures:
            before, place = self._before
            nodes = self._mended(roots, np.array(outputs, np.int32), before + (at - place))
        if nodes is None:
            nodes = np.array(backward_slice(self._graph, known.union(roots), outputs)[0], np.int32)
        self._before = (nodes, at)
        return nodes

    def _ends(self, values: Collection[int]) -> npt.NDArray[np.bool_]:
        is_end = np.zeros(len(self._graph.value_names), np.bool_)
        is_end[[0, *values]] = True
        return is_end

    def _mended(self, roots: Sequence[int], outputs: Numbers, guess: Numbers) -> Numbers | None:
        """The slice, None where the guess is too far off.

        A node is in it if and only if it writes an output, or a value that another node in it reads, where that is
        neither known nor a root. No other set of nodes has that property, as the last node of a difference would be in
        both or in none: so a guess that comes out of one step as it went in is the slice.
        """
        graph, count = self._graph, len(self._graph.op)
        is_end = np.array(self._is_end)
        is_end[list(roots)] = True
        # One more, for what nothing writes.
        is_in = np.zeros(count + 1, np.bool_)
        guess, grows = guess[(guess >= 0) & (guess < count)], True
        for _ in range(_TRIES):
            reads, _ = graph.reading.take(guess)
            wanted = np.concatenate([outputs, reads])
            is_in[:] = False
            is_in[graph.producers[wanted[~is_end[wanted]]]] = True
            # What is missing comes first: without it, whatever it reads would go.
            is_in[guess] |= grows
            found = np.flatnonzero(is_in[:-1]).astype(np.int32)
            settled = len(found) == len(guess) and np.array_equal(found, guess)
            if settled and not grows:
                return found
            guess, grows = found, grows and not settled
        return None
