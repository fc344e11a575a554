"""Say why not: the neighbour of a rule that a site is, or how far the site follows the rule.

Some neighbours have other operands than the rule (no beta, a vector more, twice as many keys): their operands are made
ones of the rule here, so that a pattern's recurrences serve for them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from deltafuse.draws import Array, Operands
from deltafuse.nearest import nearest, outputs_like
from deltafuse.neighbours_chunks import ChunkFault, chunk_fault
from deltafuse.neighbours_operands import ONES, agreeing, erasing, ones, twice
from deltafuse.patterns import Recurrence
from deltafuse.reasons import TEXTS, Reason
from deltafuse.roles import Assignment, finite
from deltafuse.rule import last_tokens, run_rule
from deltafuse.search import Fit, Screens, Setting, assigned, search

TEXTS.update(
    {
        "activation-inside": "the activation {op} ({node}) is computed from values inside the site: no delta rule has "
        "one; move the activation before the rule or behind it, if a delta rule is meant",
        "beta-missing": "nothing scales the delta: beta is one everywhere; give the model a beta of ones",
        "transposed-state": "the delta is read along the other axis of the state; transpose the state where the delta "
        "is read, if the delta rule is meant",
        "tokens-dropped": "the output is the rule's for the first {tokens:# token} and zero for later ones: a chunk is "
        "dropped; trace the export with at least as many tokens as are fed, or mend how chunks are counted",
        "tokens-skipped": "the output is zero for the first {tokens:# token} and the rule's from there on, from the "
        "first state: tokens are skipped; begin with the first token, or the first chunk, in the model",
        "first-tokens-only": "the output is the rule's for the first {tokens:# token} and something else from there "
        "on; compare how chunks follow each other, and their masks and inverse",
    }
)


def why_not(
    setting: Setting,
    feeds: Mapping[int, Array],
    ran: Mapping[int, Array],
    told: Callable[[int, int], object] = lambda done, of: None,
) -> Reason:
    """The neighbour of the rule that fits, or that none does; and how far the site is from each.

    Of a reading that is not the first one asks whether it is the rule, and what is told is what the first one is.

    Args:
        setting: of the proof.
        feeds: what the cut's inputs were.
        ran: what it made of them.
        told: how many steps are done, and of how many.
    """
    if not setting.first:
        return _nothing(setting)
    diagnoses = _diagnoses(setting, feeds, ran)
    first, of = len(diagnoses), len(diagnoses) + len(setting.pattern.neighbours) + 1
    told(0, of)
    reason, like = _nothing(setting), dict[str, Recurrence]()
    for number, diagnose in enumerate(diagnoses, 1):
        found = diagnose()
        told(number, of)
        if found is not None:
            reason, like = (found.reason, found.like) if isinstance(found, ChunkFault) else (found, like)
            break
    distances = nearest(setting, feeds, ran, like, lambda done: told(min(first + done, of - 1), of))
    told(of, of)
    return replace(reason, nearest=distances)


def _diagnoses(
    setting: Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]
) -> list[Callable[[], Reason | ChunkFault | None]]:
    """What a site may be instead, likely things first."""
    screens = Screens(setting, feeds, ran)
    return [
        partial(_activated, setting),
        partial(_plain, setting, screens),
        partial(chunk_fault, setting, screens, feeds, ran),
        *(
            partial(diagnose, setting, feeds, ran)
            for diagnose in (_without_beta, _transposed, _prefix, _skipped, erasing, twice)
        ),
    ]


def _nothing(setting: Setting) -> Reason:
    graph = setting.model.graph
    return Reason(
        "not-the-rule",
        {
            "anchor": graph.name(graph.node_outputs[setting.candidate.core[0]][0]),
            "rule": setting.pattern.name,
            "roots": ", ".join(graph.name(value) for value in setting.roots),
        },
    )


def _activated(setting: Setting) -> Reason | None:
    """An activation of inner values that goes back into the site."""
    graph = setting.model.graph
    inside = {value for node in setting.candidate.core for value in graph.node_outputs[node]}
    for root in setting.roots:
        node = graph.producer[root]
        if node >= 0 and graph.op[node] in setting.pattern.fence and not inside.isdisjoint(graph.reads(node)):
            name = graph.node_name(node) or graph.name(root)
            return Reason("activation-inside", {"op": graph.op[node], "node": name})
    return None


def _fits(setting: Setting, screens: Screens, recurrence: Recurrence) -> bool:
    """Whether a recurrence explains a cut. An inner value may follow one by chance; its state then does not."""
    fit = search(setting, screens, recurrence)
    return isinstance(fit, Fit) and (fit.final is not None or len(setting.chains) == 1)


def _plain(setting: Setting, screens: Screens) -> Reason | None:
    """Neighbours with the rule's operands."""
    for code, recurrence in setting.pattern.neighbours.items():
        if _fits(setting, screens, recurrence):
            return Reason(code)
    return None


def _without_beta(setting: Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]) -> Reason | None:
    """The rule, or a neighbour of it, with a beta of ones."""
    pattern = setting.pattern
    if pattern.decay == "none":
        return None
    screens = Screens(setting, {**feeds, ONES: ones(setting, feeds)}, ran)
    for code, recurrence in {"beta-missing": pattern.recurrence, **pattern.neighbours}.items():
        if _fits(setting, screens, recurrence):
            return Reason(code)
    return None


@dataclass(frozen=True)
class _Reading:
    """One value of the cut as the rule's output, and how far it follows it."""

    tokens: int
    found: Array
    assignment: Assignment


def _readings(
    setting: Setting,
    feeds: Mapping[int, Array],
    ran: Mapping[int, Array],
    recurrence: Callable[[Assignment], Recurrence | None],
    read: Callable[[Assignment], Operands],
) -> Iterator[_Reading]:
    """All values that have the output's shape and its first two tokens, with all their columns.

    Assignments that have no recurrence are left out.
    """
    numbers = finite(ran)
    for assignment in assigned(setting, feeds):
        rule = recurrence(assignment)
        if rule is None:
            continue
        outputs = outputs_like(assignment, numbers)
        if not outputs:
            continue
        with np.errstate(all="ignore"):
            wanted, _ = run_rule(rule, read(assignment), assignment.preparation())
        for found in outputs:
            tokens = agreeing(found, wanted)
            if tokens:
                yield _Reading(tokens, found, assignment)


def _transposed(setting: Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]) -> Reason | None:
    """A delta that is read along the wrong axis, which only a square state allows."""
    recurrence = cast("Recurrence | None", getattr(setting.pattern, "transposed", None))

    def of_square(assignment: Assignment) -> Recurrence | None:
        return recurrence if assignment.sizes["K"] == assignment.sizes["V"] else None

    found = _readings(setting, feeds, ran, of_square, lambda assignment: assignment.read(feeds))
    return Reason("transposed-state") if any(one.tokens == one.found.shape[1] for one in found) else None


def _prefix(setting: Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]) -> Reason | None:
    """The rule for some first tokens: what comes after tells what is missing."""
    pattern = setting.pattern
    found = _readings(setting, feeds, ran, lambda _: pattern.recurrence, lambda one: one.read(feeds))
    best = max((one for one in found if one.tokens < one.found.shape[1]), key=lambda one: one.tokens, default=None)
    if best is None:
        return None
    if not best.found[:, best.tokens :].any():
        return Reason("tokens-dropped", {"tokens": best.tokens})
    return Reason("first-tokens-only", {"tokens": best.tokens})


def _skipped(setting: Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]) -> Reason | None:
    """The rule for some last tokens, and nothing before."""
    numbers = finite(ran)
    for assignment in assigned(setting, feeds):
        for found in outputs_like(assignment, numbers):
            tokens = int(found.any(axis=(0, 2, 3)).argmax())
            if not tokens:
                continue
            rest = last_tokens(assignment.read(feeds), tokens)
            with np.errstate(all="ignore"):
                wanted, _ = run_rule(setting.pattern.recurrence, rest, assignment.preparation())
            if agreeing(found[:, tokens:], wanted) == wanted.shape[1]:
                return Reason("tokens-skipped", {"tokens": tokens})
    return None
