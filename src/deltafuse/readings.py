"""Where to cut a candidate: the values that play the roles, and the norms between them and the rule.

Higher is better (heads not yet repeated, no layout changes), so the roots themselves come first. Where the rule does
not hold from there, lower values are tried: behind a head repeat that is not the kernels', behind a factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deltafuse import region
from deltafuse.classes import Kind
from deltafuse.finder import Candidate
from deltafuse.match import Norm
from deltafuse.norms import prove_norm, take_norm
from deltafuse.patterns import Decay
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.wire import Model
from deltafuse.worker import Worker

_REPEATS = frozenset({"Expand", "Tile"})
_FACTORS = frozenset({"Mul", "Div", "Add", "Sub"})


@dataclass(frozen=True)
class Reading:
    """One way to cut a candidate.

    Attributes:
        roots: values to cut at, the log decay first.
        norms: root -> the norm behind it.
        exempt: the norms' nodes: they are proven by themselves, on both sides of eps.
    """

    roots: tuple[int, ...]
    norms: Mapping[int, Norm]
    exempt: frozenset[int]


@dataclass(frozen=True)
class _Path:
    """A root's way to the rule: its chain, and the norm between two values of it."""

    chain: Sequence[int]
    norm: Norm | None
    before: int
    nodes: tuple[int, ...]


def readings(
    model: Model, kinds: bytearray, shapes: Shapes, worker: Worker, candidate: Candidate, decay: Decay
) -> Iterator[Reading]:
    """The ways to cut a candidate, best first; the same one never twice."""
    paths = [_path(model, kinds, shapes, worker, candidate, root) for root in candidate.roots]
    tried: set[tuple[int, ...]] = set()
    for operators in (frozenset[str](), _REPEATS, _FACTORS, _REPEATS | _FACTORS):
        starts = [_start(model, shapes, path, operators) for path in paths]
        if decay != "none":
            # The log decay stays where it is: lower down it would be another rule's.
            starts[0] = candidate.roots[0]
        if tuple(starts) in tried:
            continue
        tried.add(tuple(starts))
        kept = [(start, path) for start, path in zip(starts, paths, strict=True) if _has_norm(path, start)]
        norms = {start: path.norm for start, path in kept if path.norm is not None}
        yield Reading(tuple(starts), norms, frozenset(node for _, path in kept for node in path.nodes))


def _path(model: Model, kinds: bytearray, shapes: Shapes, worker: Worker, candidate: Candidate, root: int) -> _Path:
    chain = region.role_chain(model.graph, kinds, candidate, root)
    opset = model.opset_imports.get("", 17)
    found: _Path | None = None
    for index, (before, after) in enumerate(itertools.pairwise(chain)):
        if _single_step(model, kinds, before, after):
            continue
        taken = take_norm(model, kinds, shapes, before, after)
        dtype = shapes.dtype(before)
        if isinstance(taken, Reason) or dtype is None or found is not None:
            return _Path(chain[index + 1 :], None, -1, ())
        nodes, initializers, source_nodes = taken
        norm = prove_norm(worker, nodes, initializers, dtype, opset, model.graph.name(root))
        if isinstance(norm, Reason):
            return _Path(chain[index + 1 :], None, -1, ())
        found = _Path(chain, norm, index, source_nodes)
    return found if found is not None else _Path(chain, None, -1, ())


def _start(model: Model, shapes: Shapes, path: _Path, operators: frozenset[str]) -> int:
    """The value behind the last of some operators on a path, with the layout of an operand (at most four axes)."""
    graph = model.graph
    start = 0
    for index, value in enumerate(path.chain[1:], 1):
        normed = path.before == index - 1 and path.norm is not None
        if graph.standard[graph.producer[value]] in operators and not normed:
            start = index
    while operators and start + 1 < len(path.chain) and len(shapes.shape(path.chain[start]) or ()) > 4:
        start += 1
    return path.chain[start]


def _has_norm(path: _Path, start: int) -> bool:
    return path.norm is not None and path.chain.index(start) <= path.before


def _single_step(model: Model, kinds: bytearray, before: int, after: int) -> bool:
    graph = model.graph
    data = [value for value in graph.reads(graph.producer[after]) if kinds[value] == Kind.DATA]
    return data == [before]
