"""Feeds for the first look at a cut, before it is known which root plays which role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deltafuse.bench import Bench
from deltafuse.draws import Array
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
            feeds[root] = rng.standard_normal(shape) / np.sqrt(shape[-1] if shape else 1)
    return feeds
