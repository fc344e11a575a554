"""A rule whose tokens of output go their own ways: no one value in the graph is its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from deltafuse import layouts, region
from deltafuse.bench import bindings
from deltafuse.cuts import open_cut
from deltafuse.draws import Array
from deltafuse.feeds import search_feeds
from deltafuse.finder import Candidate
from deltafuse.patterns import Pattern
from deltafuse.probe import backward_slice
from deltafuse.readings import readings
from deltafuse.reasons import TEXTS, Reason
from deltafuse.roles import Assignment, gate_layouts
from deltafuse.rule import relative, run_rule
from deltafuse.search import OPERANDS, Setting, assigned
from deltafuse.shapes import Shapes
from deltafuse.wire import Model
from deltafuse.worker import Worker

TEXTS.update(
    {
        "output-in-parts": "the site is the rule, but something ({reader}) takes its output token by token before the "
        "tokens are put together, so no one value is what a fused node would write; apply it to all tokens at once",
    }
)

#: See `deltafuse.roles`.
_SCREEN = 1e-8


@dataclass(frozen=True)
class Parts:
    """The tokens of an output, each a value of its own.

    Attributes:
        values: in the order of the tokens.
        layout: of each, with one token.
        reader: a node that takes one of them.
    """

    values: tuple[int, ...]
    layout: str
    reader: str

    @property
    def reason(self) -> Reason:
        """Why a site with such an output is refused."""
        return Reason("output-in-parts", {"reader": self.reader})


def parts_of(
    model: Model, kinds: bytearray, shapes: Shapes, pattern: Pattern, worker: Worker, candidate: Candidate
) -> Parts | None:
    """The tokens of a candidate with more roots than the rule has, where it is the rule with something behind each."""
    for inner in _narrowed(model, candidate):
        chains = region.exits(model.graph, inner)
        for reading in readings(model, kinds, shapes, worker, inner, pattern.decay):
            found = _found(Setting(model, kinds, shapes, pattern, worker, inner, reading, chains))
            if found:
                layouts_of = {layout for _, layout in found}
                return Parts(
                    tuple(value for value, _ in found),
                    layouts_of.pop() if len(layouts_of) == 1 else "",
                    _reader(model, inner),
                )
    return None


def _narrowed(model: Model, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate without what depends on some roots, so that no more are left than the rule has."""
    graph = model.graph
    if len(candidate.roots) <= len(OPERANDS):
        return
    needed = region.needed_roots(graph, candidate.nodes, candidate.roots)
    of_core = {node: frozenset[int]().union(*(needed.get(v, ()) for v in graph.reads(node))) for node in candidate.core}
    chosen = {roots for roots in of_core.values() if candidate.roots[0] in roots and len(roots) <= len(OPERANDS)}
    for roots in (one for one in chosen if not any(one < other for other in chosen)):
        core = tuple(node for node, found in of_core.items() if found <= roots)
        inside = [value for node in core for value in graph.node_outputs[node]]
        members = set(core)
        frontier = tuple(v for v in inside if v in graph.outputs or not members.issuperset(graph.consumers[v]))
        kept = tuple(root for root in candidate.roots if root in roots)
        ends = {*kept, *(value for value, _ in candidate.sizes)}
        nodes, _ = backward_slice(graph, ends, list(frontier))
        yield replace(candidate, roots=kept, core=core, nodes=tuple(nodes), frontier=frontier)


def _found(setting: Setting) -> list[tuple[int, str]]:
    """The values that are tokens of the rule's output, in their order, and the layout of each.

    Empty where something else than these and the final state is read outside.
    """
    bench = open_cut(setting)
    if isinstance(bench, Reason):
        return []
    pattern, gate = setting.pattern, setting.roots[0]
    for binding in bindings(bench.shapes, bench.sizes, gate, gate_layouts(pattern.decay)):
        feeds = search_feeds(bench, setting.roots, binding.numbers, pattern.decay)
        ran = bench.run(feeds, binding.numbers)
        if isinstance(ran, Reason):
            continue
        for one in assigned(setting, feeds):
            found = _tokens(one, feeds, ran, setting)
            if found:
                return found
    return []


def _tokens(
    assignment: Assignment, feeds: Mapping[int, Array], ran: Mapping[int, Array], setting: Setting
) -> list[tuple[int, str]]:
    operands, sizes = assignment.read(feeds), assignment.sizes
    if sizes["T"] < 2:
        return []
    out, final = run_rule(setting.pattern.recurrence, operands, assignment.preparation())
    single = {**sizes, "T": 1}
    tokens: list[list[_Token]] = [[] for _ in range(sizes["T"])]
    for last, exits in setting.chains.items():
        if last in ran and _is_final(ran[last], final, sizes):
            continue
        arrays = {value: ran[value] for value in exits if value in ran}
        # Nearest to the reader first: what comes behind the token may be part of the rule.
        found = [
            (token, _Token(value, layout, scale))
            for value, array in arrays.items()
            for layout, _ in layouts.fits(layouts.OUTPUTS, array.shape, single)
            for token in range(sizes["T"])
            if (scale := _scale(layouts.unpack(array, layout, "BTHV", single)[:, 0], out[:, token]))
        ]
        if not found:
            return []
        for token, one in found:
            tokens[token].append(one)
    for first in tokens[0]:
        alike = [next(filter(first.goes_with, others), None) for others in tokens]
        if None not in alike:
            return [(one.value, one.layout) for one in alike if one is not None]
    return []


@dataclass(frozen=True)
class _Token:
    """A value that is a token of the rule's output, times a number."""

    value: int
    layout: str
    scale: float

    def goes_with(self, other: _Token) -> bool:
        """Whether both are of one output."""
        return abs(self.scale - other.scale) <= _SCREEN * abs(self.scale)


def _is_final(array: Array, final: Array, sizes: Mapping[str, int]) -> bool:
    fits = layouts.fits(layouts.STATES, array.shape, sizes)
    return any(relative(layouts.unpack(array, layout, "BHKV", sizes), final) < _SCREEN for layout, _ in fits)


def _scale(found: Array, wanted: Array) -> float:
    """The factor up to which two arrays are equal, 0 where there is none."""
    power = float((wanted * wanted).sum())
    scale = float((found * wanted).sum()) / power if power and np.isfinite(power) else 0.0
    return scale if scale and relative(found, wanted * scale) < _SCREEN else 0.0


def _reader(model: Model, inner: Candidate) -> str:
    """A node that takes a token of the output."""
    graph, members = model.graph, set(inner.core)
    readers = chain.from_iterable(graph.consumers[value] for value in inner.frontier)
    node = next((reader for reader in readers if reader not in members), None)
    return "a graph output" if node is None else graph.label(node)
