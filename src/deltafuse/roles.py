"""Assign roles: which root is query, key, value, beta and state, in which layouts, and which outputs they explain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

import numpy as np

from deltafuse import layouts
from deltafuse.draws import Array, Operands
from deltafuse.match import Norm
from deltafuse.patterns import Decay, Recurrence
from deltafuse.rule import Preparation, first_tokens, project, relative, run_rule

#: A wrong assignment differs by far more, a right one by rounding in double; what passes is proven at 1e-12 after.
_SCREEN = 1e-8
_FIRST = 2


@dataclass(frozen=True)
class Assignment:
    """One way to read a cut's inputs as operands of the rule.

    Attributes:
        values: role -> value id (``state`` is missing where there is none).
        layouts: role -> layout.
        sizes: letter -> size, in the run that was looked at.
        norms: value id -> norm, for query and key.
        scale: factor on the query, 1.0 until outputs were compared.
    """

    values: Mapping[str, int]
    layouts: Mapping[str, str]
    sizes: Mapping[str, int]
    norms: Mapping[int, Norm] = field(default_factory=dict[int, Norm])
    scale: float = 1.0

    @property
    def channels(self) -> bool:
        """Whether the log decay has a value per key channel."""
        return "K" in self.layouts.get("g", "")

    def preparation(self) -> Preparation:
        """What the recurrence needs to know beside the operands."""
        return Preparation(
            self.norms.get(self.values["query"]), self.norms.get(self.values["key"]), "state" not in self.values
        )

    def read(self, feeds: Mapping[int, Array]) -> Operands:
        """The operands that some feeds of the cut are."""
        plain = {
            role: layouts.unpack(feeds[value], self.layouts[role], self._order(role), self.sizes)
            for role, value in self.values.items()
        }
        b, t, h, k, v = (self.sizes[letter] for letter in "BTHKV")
        # What a rule does not have is zero.
        return Operands(**{"state": np.zeros((b, h, k, v)), "g": np.zeros((b, t, h)), **plain})

    def write(self, operands: Operands) -> dict[int, Array]:
        """The feeds of the cut for some operands."""
        return {
            value: layouts.pack(getattr(operands, role), self._order(role), self.layouts[role])
            for role, value in self.values.items()
        }

    def _order(self, role: str) -> str:
        return "BTHK" if role == "g" and self.channels else _ORDERS[role]


_ORDERS = {"query": "BTNK", "key": "BTNK", "value": "BTHV", "g": "BTH", "beta": "BTH", "state": "BHKV"}


@dataclass(frozen=True)
class Explained:
    """Outputs of the cut that an assignment reproduces: value id -> layout."""

    assignment: Assignment
    outs: Mapping[int, str]
    finals: Mapping[int, str]


def assignments(
    feeds: Mapping[int, Array], gate: int, norms: Mapping[int, Norm], decay: Decay = "head"
) -> Iterator[Assignment]:
    """All readings of the roots that sizes allow, likely ones first.

    Args:
        feeds: root -> what it was in a run.
        gate: the root that is the log decay, or beta of a rule without decay.
        norms: see `Assignment`.
        decay: what the log decay is one number of.
    """
    others = [value for value in feeds if value != gate]
    for layout, sizes in layouts.fits(gate_layouts(decay), feeds[gate].shape, {}):
        if "T" not in "".join(layouts.axes(layout)):
            sizes = {**sizes, "T": 1}
        if decay == "none":
            yield from _with_state(Assignment({"beta": gate}, {"beta": layout}, sizes, norms), feeds, others)
            continue
        for beta in others:
            rest = [value for value in others if value != beta]
            for beta_layout, _ in layouts.fits(layouts.GATES, feeds[beta].shape, sizes):
                start = Assignment({"g": gate, "beta": beta}, {"g": layout, "beta": beta_layout}, sizes, norms)
                yield from _with_state(start, feeds, rest)


def gate_layouts(decay: Decay) -> tuple[str, ...]:
    """The layouts that a rule's gate may have."""
    return layouts.CHANNEL_GATES if decay == "channel" else layouts.GATES


def _with_state(start: Assignment, feeds: Mapping[int, Array], rest: Sequence[int]) -> Iterator[Assignment]:
    if len(rest) in (2, 3):
        yield from _with_vectors(start, feeds, rest)
    if len(rest) not in (3, 4):
        return
    for state in rest:
        for layout, sizes in layouts.fits(layouts.STATES, feeds[state].shape, start.sizes):
            left = [value for value in rest if value != state]
            yield from _with_vectors(_extend(start, {"state": (state, layout)}, sizes), feeds, left)


def _with_vectors(start: Assignment, feeds: Mapping[int, Array], rest: Sequence[int]) -> Iterator[Assignment]:
    # Two roots: query and key may be one value.
    orders = list(permutations(rest)) if len(rest) == 3 else [(a, a, b) for a, b in permutations(rest)]
    for query, key, value in orders:
        if value in start.norms:
            continue
        for value_layout, sizes in layouts.fits(layouts.VALUES, feeds[value].shape, start.sizes):
            for heads in _divisors(sizes["H"]):
                known = {**sizes, "N": heads}
                yield from _queries(start, feeds, (query, key, value, value_layout), known)


def _queries(
    start: Assignment, feeds: Mapping[int, Array], chosen: tuple[int, int, int, str], known: Mapping[str, int]
) -> Iterator[Assignment]:
    query, key, value, value_layout = chosen
    for query_layout, with_query in layouts.fits(layouts.QUERIES, feeds[query].shape, known):
        for key_layout, sizes in layouts.fits(layouts.QUERIES, feeds[key].shape, with_query):
            vectors = {"query": (query, query_layout), "key": (key, key_layout), "value": (value, value_layout)}
            yield _extend(start, vectors, sizes)


def _extend(start: Assignment, roles: Mapping[str, tuple[int, str]], sizes: Mapping[str, int]) -> Assignment:
    values = {**start.values, **{role: value for role, (value, _) in roles.items()}}
    named = {**start.layouts, **{role: layout for role, (_, layout) in roles.items()}}
    return Assignment(values, named, sizes, start.norms)


def _divisors(heads: int) -> list[int]:
    return [n for n in range(heads, 0, -1) if heads % n == 0]


def finite(outputs: Mapping[int, Array]) -> dict[int, Array]:
    """Those outputs of a cut that hold numbers only: no others can be compared."""
    return {value: array for value, array in outputs.items() if np.isfinite(array).all()}


class Screen:
    """The outputs of a cut beside an assignment of its inputs, for one recurrence after the other.

    The first tokens of all outputs are compared at once: nearly always none of them is the rule's.

    Args:
        assignment: how the inputs are read.
        feeds: what the inputs were.
        outputs: `finite` ones.
    """

    def __init__(self, assignment: Assignment, feeds: Mapping[int, Array], outputs: Mapping[int, Array]) -> None:
        self.assignment = assignment
        self._feeds = feeds
        self._outputs = outputs
        width = assignment.sizes["V"]
        self._projection = np.random.default_rng(3).standard_normal((width, min(2, width)))
        self._readings = [
            (value, layout)
            for value, array in outputs.items()
            for layout, _ in layouts.fits(layouts.OUTPUTS, array.shape, assignment.sizes)
        ]

    @np.errstate(all="ignore")
    def beginning(self, recurrence: Recurrence, count: int = 1) -> list[list[tuple[int, str]]]:
        """The outputs, each with a layout, whose first tokens a recurrence reproduces.

        Args:
            recurrence: gives one output, or several along a first axis.
            count: how many it gives.
        """
        if not self._readings:
            return [[]] * count
        few, _ = run_rule(recurrence, self._few, self.assignment.preparation())
        close = (_scales(self._first, wanted) != 0.0 for wanted in np.reshape(few, (count, -1)))
        return [[self._readings[place] for place in np.flatnonzero(found)] for found in close]

    @np.errstate(all="ignore")
    def explain(self, recurrence: Recurrence) -> Explained | None:
        """The outputs that the recurrence reproduces; None where nothing is its output."""
        of, how = self.assignment, self.assignment.preparation()
        (likely,) = self.beginning(recurrence)
        if not likely:
            return None
        out, final = run_rule(recurrence, project(of.read(self._feeds), self._projection), how)
        plain = np.stack([self._output(*reading).ravel() for reading in likely])
        scale = next((scale for scale in _scales(plain, out.ravel()).tolist() if scale), 0.0)
        if not scale:
            return None
        wanted = (out * scale).ravel()
        outs = {
            value: layout
            for (value, layout), found in zip(likely, plain, strict=True)
            if relative(found, wanted) < _SCREEN
        }
        finals = {
            value: layout
            for value, array in self._outputs.items()
            for layout, _ in layouts.fits(layouts.STATES, array.shape, of.sizes)
            if relative(layouts.unpack(array, layout, "BHKV", of.sizes) @ self._projection, final) < _SCREEN
        }
        return Explained(replace(of, scale=scale), outs, finals)

    @cached_property
    def _few(self) -> Operands:
        return first_tokens(project(self.assignment.read(self._feeds), self._projection), _FIRST)

    @cached_property
    def _first(self) -> Array:
        """A row for each reading: its first tokens."""
        return np.stack([self._output(*reading, _FIRST).ravel() for reading in self._readings])

    def _output(self, value: int, layout: str, tokens: int | None = None) -> Array:
        plain = layouts.unpack(self._outputs[value], layout, "BTHV", self.assignment.sizes)
        return plain[:, :tokens] @ self._projection


def _scales(found: Array, wanted: Array) -> Array:
    """The factor between each row and what is wanted, 0.0 where there is none."""
    # Sums, not products of matrices: their rounding is the same wherever they are made, and smaller.
    power = float((wanted * wanted).sum())
    if not np.isfinite(power) or power == 0.0:
        return np.zeros(len(found))
    scales = (found * wanted).sum(axis=1) / power
    # As `deltafuse.rule.relative`, of all rows.
    tops = np.abs(scales) * np.abs(wanted).max()
    gaps = np.abs(found - scales[:, None] * wanted).max(axis=1)
    good = (tops > 0.0) & np.isfinite(tops) & (gaps < _SCREEN * tops)
    return np.where(good, scales, 0.0)
