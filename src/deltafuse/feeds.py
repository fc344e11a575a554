"""Feeds for the first look at a cut, before it is known which root plays which role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from deltafuse.bench import Bench, Binding
from deltafuse.draws import Array, normal
from deltafuse.patterns import Decay


def search_feeds(
    bench: Bench, roots: Sequence[int], numbers: Mapping[str, int], decay: Decay
) -> dict[int, Array]:
    """Draws each root by its shape: like gates where it has as many numbers as there are gates, else like vectors.

    Vectors are short, so that many steps of the rule stay bounded whatever role they turn out to play.

    Args:
        bench: knows the shapes.
        roots: the gate first: the log decay, or beta of a rule without decay.
        numbers: for the symbols of the shapes.
        decay: what the log decay is one number of.
    """
    rng = np.random.default_rng(11)
    shape = bench.shape(roots[0], numbers)
    gates = int(np.prod(shape[:-1] if decay == "channel" else shape))
    feeds: dict[int, Array] = {}
    for root in roots:
        shape = bench.shape(root, numbers)
        if root == roots[0] and decay != "none":
            feeds[root] = rng.uniform(-0.4, -0.05, shape)
        elif int(np.prod(shape)) == gates:
            feeds[root] = rng.uniform(0.2, 0.9, shape)
        else:
            feeds[root] = normal(rng, shape) / np.sqrt(shape[-1] if shape else 1)
    return feeds


class Fed:
    """Bindings in turn, and their feeds, those of the next one drawn while the worker computes.

    Args:
        bench: knows the shapes.
        roots: see `search_feeds`.
        decay: see `search_feeds`.
        bindings: what is gone through.
    """

    def __init__(self, bench: Bench, roots: Sequence[int], decay: Decay, bindings: Iterator[Binding]) -> None:
        self._bench = bench
        self._roots = roots
        self._decay: Decay = decay
        self._bindings = bindings
        self._ready: tuple[Binding, dict[int, Array]] | None = None
        self._next: Binding | None = None

    def __iter__(self) -> Iterator[Binding]:
        while True:
            binding, self._next = self._next or next(self._bindings, None), None
            if binding is None:
                return
            yield binding

    def of(self, binding: Binding) -> dict[int, Array]:
        """The feeds at a binding."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is binding:
            return ready[1]
        return search_feeds(self._bench, self._roots, binding.numbers, self._decay)

    def prepare(self) -> None:
        """Draws what the next binding needs."""
        self._next = self._next or next(self._bindings, None)
        if self._next is not None:
            self._ready = self._next, self.of(self._next)
