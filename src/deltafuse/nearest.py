"""How far a site that is no rule is from the rule and from each of its named neighbours: numbers for people to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np

from deltafuse import layouts
from deltafuse.draws import Array
from deltafuse.patterns import Recurrence
from deltafuse.reasons import Nearest
from deltafuse.roles import Assignment, finite
from deltafuse.rule import project, relative, run_rule
from deltafuse.search import Setting, assigned

#: Readings of the operands that are compared, likely ones first: each costs a run of the rule and of each neighbour.
_READINGS = 4
_COLUMNS = 2


def nearest(
    setting: Setting,
    feeds: Mapping[int, Array],
    ran: Mapping[int, Array],
    like: Mapping[str, Recurrence],
    told: Callable[[int], object],
) -> Nearest | None:
    """The smallest relative difference to the rule and to each neighbour that has the rule's operands.

    Args:
        setting: of the proof.
        feeds: what the cut's inputs were.
        ran: what it made of them.
        like: further recurrences by their reason code, in place of the neighbour that has it.
        told: how many recurrences were measured.

    Returns:
        None where no value of the cut has the shape of an output.
    """
    pattern = setting.pattern
    recurrences: dict[str, Recurrence] = {pattern.name: pattern.recurrence, **pattern.neighbours, **like}
    outputs = finite(ran)
    readings = ((one, outputs_like(one, outputs)) for one in assigned(setting, feeds))
    likely = list(islice((pair for pair in readings if pair[1]), _READINGS))
    smallest: list[tuple[str, float]] = []
    for number, (name, recurrence) in enumerate(recurrences.items() if likely else (), 1):
        smallest.append((name, min(_difference(one, recurrence, feeds, outs) for one, outs in likely)))
        told(number)
    known = sorted((pair for pair in smallest if np.isfinite(pair[1])), key=lambda pair: pair[1])
    return Nearest(pattern.name, likely[-1][0].sizes["T"], tuple(known)) if known else None


def outputs_like(assignment: Assignment, outputs: Mapping[int, Array]) -> list[Array]:
    """All `finite` values of a cut that have the shape of the rule's output, its axes in plain order."""
    return [
        layouts.unpack(array, layout, "BTHV", assignment.sizes)
        for array in outputs.values()
        for layout, _ in layouts.fits(layouts.OUTPUTS, array.shape, assignment.sizes)
    ]


def _difference(
    assignment: Assignment, recurrence: Recurrence, feeds: Mapping[int, Array], outputs: Sequence[Array]
) -> float:
    """Of the output that is closest, up to one factor; a few columns tell as much as all."""
    width = assignment.sizes["V"]
    projection = np.random.default_rng(3).standard_normal((width, min(_COLUMNS, width)))
    with np.errstate(all="ignore"):
        wanted, _ = run_rule(recurrence, project(assignment.read(feeds), projection), assignment.preparation())
        power = float((wanted * wanted).sum())
        if not np.isfinite(power) or not power:
            return float("inf")
        return min(_scaled(plain @ projection, wanted, power) for plain in outputs)


def _scaled(found: Array, wanted: Array, power: float) -> float:
    scale = float((found * wanted).sum()) / power
    return relative(found, wanted * scale) if scale else float("inf")
