"""Feeds for the first look at a cut, before it is known which root plays which role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deltafuse.bench import Bench
from deltafuse.draws import Array


def search_feeds(bench: Bench, roots: Sequence[int], g: int, numbers: Mapping[str, int]) -> dict[int, Array]:
    """Draws each root by its shape: like gates where it has as many numbers as g, else like vectors.

    Vectors are short, so that many steps of the rule stay bounded whatever role they turn out to play.
    """
    rng = np.random.default_rng(11)
    gates = int(np.prod(bench.shape(g, numbers)))
    feeds: dict[int, Array] = {}
    for root in roots:
        shape = bench.shape(root, numbers)
        if root == g:
            feeds[root] = rng.uniform(-0.4, -0.05, shape)
        elif int(np.prod(shape)) == gates:
            feeds[root] = rng.uniform(0.2, 0.9, shape)
        else:
            feeds[root] = rng.standard_normal(shape) / np.sqrt(shape[-1] if shape else 1)
    return feeds
