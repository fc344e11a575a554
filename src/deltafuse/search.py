"""Search the reading of a cut's inputs under which the rule, or a neighbour of it, gives the cut's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from deltafuse import region
from deltafuse.classes import Kind
from deltafuse.draws import Array
from deltafuse.finder import Candidate
from deltafuse.patterns import Pattern, Recurrence
from deltafuse.readings import Reading
from deltafuse.reasons import TEXTS, Reason
from deltafuse.roles import Assignment, Explained, Screen, assignments, finite
from deltafuse.shapes import Shapes
from deltafuse.wire import Model
from deltafuse.worker import Worker

TEXTS.update(
    {
        "not-the-rule": "the subgraph around {anchor} reads like {rule} but no assignment of its inputs ({roots}) "
        "gives its outputs; compare it with the rule's recurrence, or write a pattern where it is a rule of its own",
        "inner-value-used": "the value {value} inside the site is read outside of it and fusing would take it away; "
        "remove that reader or output",
        "no-output": "nothing outside reads the rule's output; make the output one of the graph's, or remove the dead "
        "nodes",
    }
)

#: How many sizes are worked out between two looks at the worker.
_LOOK = 16
#: Roles of the rule.
OPERANDS = ("query", "key", "value", "g", "beta", "state")


@dataclass(frozen=True)
class Setting:
    """What a proof is about: the candidate, one reading of it, and everything that is known of its graph.

    Attributes:
        chains: see `deltafuse.region.exits`.
        first: whether no other reading was tried before: what the site is instead is looked for with that one alone.
    """

    model: Model
    kinds: bytearray
    shapes: Shapes
    pattern: Pattern
    worker: Worker
    candidate: Candidate
    reading: Reading
    chains: Mapping[int, Sequence[int]]
    first: bool = True

    @property
    def roots(self) -> tuple[int, ...]:
        """Values to cut at, the gate first: the log decay, or beta of a rule without decay."""
        return self.reading.roots

    @cached_property
    def needed(self) -> Mapping[int, frozenset[int]]:
        """The roots that each value of the candidate depends on."""
        return region.needed_roots(self.model.graph, self.candidate.nodes, self.roots)

    def know_sizes(self) -> None:
        """Works out sizes inside the candidate, which the guards ask for later, until the worker has answered."""
        for number, value in enumerate(self._sizes):
            self.shapes.contents(value)
            if number % _LOOK == 0 and self.worker.has_answered():
                return

    @cached_property
    def _sizes(self) -> Iterator[int]:
        """The sizes inside the candidate that were not worked out yet."""
        graph, kinds, size = self.model.graph, self.kinds, int(Kind.SHAPE)
        values = (value for node in self.candidate.nodes for value in graph.node_outputs[node])
        return (value for value in values if kinds[value] == size)


@dataclass(frozen=True)
class Fit:
    """An assignment that explains a cut's outputs, and the two values the fused node writes."""

    explained: Explained
    out: int
    final: int | None


class Screens:
    """What a cut gave beside each assignment of its inputs: made once, for one recurrence after the other.

    Args:
        setting: the candidate.
        feeds: what the cut's inputs were.
        ran: what it made of them.
    """

    def __init__(self, setting: Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]) -> None:
        outputs = finite(ran)
        self._left = (Screen(assignment, feeds, outputs) for assignment in assigned(setting, feeds))
        self._made: list[Screen] = []

    def __iter__(self) -> Iterator[Screen]:
        yield from self._made
        for screen in self._left:
            self._made.append(screen)
            yield screen


def search(setting: Setting, screens: Screens, recurrence: Recurrence) -> Fit | Reason | None:
    """The first assignment that explains every reader outside; else why the first that explains the output does not.

    One token from a zero state reads the same with query and key exchanged: only the final state tells them apart.
    """
    refused: Reason | None = None
    for screen in screens:
        explained = screen.explain(recurrence)
        if explained is None:
            continue
        ends = _ends(setting, explained)
        if not isinstance(ends, Reason):
            return Fit(explained, *ends)
        refused = ends if refused is None else refused
    return refused


def assigned(setting: Setting, feeds: Mapping[int, Array]) -> Iterator[Assignment]:
    """Readings of the roots, then of those alone that some value depends on.

    What follows the rule without a weight between (an output gate) brings roots of its own.
    """
    gate, norms = setting.roots[0], setting.reading.norms
    decay = setting.pattern.decay
    most = len(OPERANDS) - (decay == "none")
    yield from assignments(feeds, gate, norms, decay)
    offered = {setting.needed.get(value, frozenset[int]()) for chain in setting.chains.values() for value in chain}
    for roots in sorted(offered, key=lambda found: (-len(found), sorted(found))):
        if len(roots) <= most and gate in roots and len(roots) < len(setting.roots):
            chosen = {value: feeds[value] for value in setting.roots if value in roots}
            yield from assignments(chosen, gate, norms, decay)


def _ends(setting: Setting, explained: Explained) -> tuple[int, int | None] | Reason:
    """The values that the fused node writes: the last ones that explain every reader outside."""
    outs: list[set[int]] = []
    finals: list[set[int]] = []
    for value, chain in setting.chains.items():
        as_out = {v for v in chain if v in explained.outs}
        as_final = {v for v in chain if v in explained.finals}
        if as_out:
            outs.append(as_out)
        elif as_final:
            finals.append(as_final)
        else:
            return Reason("inner-value-used", {"value": setting.model.graph.name(value)})
    common, common_final = _common(outs), _common(finals)
    if finals and not common_final:
        return Reason("inner-value-used", {"value": setting.model.graph.name(min(finals[0]))})
    if not common:
        return Reason("no-output")
    latest = setting.model.graph.producer.__getitem__
    return max(common, key=latest), max(common_final, key=latest) if common_final else None


def _common(sets: Sequence[set[int]]) -> set[int]:
    return sets[0].intersection(*sets[1:]) if sets else set()
