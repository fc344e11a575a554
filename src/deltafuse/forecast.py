"""What the likely sites do to the rest of the file, worked out while the proof of the last of them goes on.

It is kept with all that it was worked out from, and taken only where the proven plans ask for exactly that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deltafuse import drafting
from deltafuse.choosing import Chosen
from deltafuse.drafting import Order, Outline, Part
from deltafuse.edits import Edit
from deltafuse.enclosed import Enclosed
from deltafuse.errors import UserError
from deltafuse.match import Match, NoMatch, Plan
from deltafuse.planning import plan_site
from deltafuse.splice import AnyPlan
from deltafuse.undoing import Undo, undo_of
from deltafuse.wire import Model

Plans = Sequence[Sequence[AnyPlan]]


class Forecast:
    """An outline that is made ahead of its time.

    Args:
        chosen: what becomes of which site.
    """

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self._asked: object = None
        self._outlines: tuple[Outline, ...] = ()
        self._edited: Model | None = None
        self._drawn: object = None
        self._edits: tuple[Edit, ...] = ()
        self._undone: tuple[Model, tuple[Edit, ...], Undo] | None = None

    def look(self, scope: Enclosed, sites: Sequence[Match | NoMatch]) -> None:
        """Makes the outline for what is likely to be all that is found."""
        chosen, plans, opset = self.chosen, list[Plan](), scope.model.opset_imports.get("", 17)
        # What an option asks for in vain is told where the sites are planned.
        with suppress(UserError):
            for site in (_likely(site) for site in sites if isinstance(site, Match)):
                options, target = chosen.options_of(site.name), chosen.target_of(site.name)
                plan = plan_site(options, target, site, opset, likely=True)
                plans += [plan] if isinstance(plan, Plan) else []
            asked = self._key([scope], [plans])
            self._outlines = drafting.outline(chosen, [scope], [plans])
            self._asked = asked

    def outline(self, scopes: Sequence[Enclosed], plans: Plans) -> tuple[Outline, ...]:
        """As `deltafuse.drafting.outline`."""
        if self._asked is not None and self._asked == self._key(scopes, plans):
            return self._outlines
        return drafting.outline(self.chosen, scopes, plans)

    def draw_up(self, file: Model, base: Model, scopes: Sequence[Enclosed], order: Order, plans: Plans) -> None:
        """Makes the outline and, where the file is going to be written, the edits and what undoes them, ahead of time.

        What cannot be made is not told: whoever asks for it, once all is proven, is.
        """
        options = self.chosen.options
        with suppress(Exception):
            if self._asked != (asked := self._key(scopes, plans)):
                self._outlines, self._asked = drafting.outline(self.chosen, scopes, plans), asked
            parts = drafting.likely_parts(scopes, self._outlines, plans)
            if any(plans) and parts and options.output is not None and not options.dry_run:
                edits = self.edits(base, scopes, order, parts)
                if options.record != "none" and base is file:
                    self.undo(file, edits)

    def edits(self, base: Model, scopes: Sequence[Enclosed], order: Order, parts: Sequence[Part]) -> tuple[Edit, ...]:
        """As `deltafuse.drafting.edits_of`; those that were made last are kept."""
        asked = [(_drawn(part), part.removed, part.changes) for part in parts]
        if self._edited is not base or self._drawn != asked:
            self._edits = drafting.edits_of(base, scopes, order, parts)
            self._edited, self._drawn = base, asked
        return self._edits

    def undo(self, file: Model, edits: tuple[Edit, ...]) -> Undo:
        """As `deltafuse.undoing.undo_of`; what was made last is kept."""
        if self._undone is None or self._undone[0] is not file or self._undone[1] != edits:
            self._undone = file, edits, undo_of(file, edits)
        return self._undone[2]

    def _key(self, scopes: Sequence[Enclosed], plans: Plans) -> tuple[Any, ...]:
        """All that an outline depends on: the graphs, what their engines were told, and of the plans these things."""
        asked = [[_asked(self.chosen, plan) for plan in some] for some in plans]
        engines = [scope.shapes for scope in scopes]
        return engines, [dict(engine.defined) for engine in engines], asked


def _likely(site: Match) -> Match:
    """A site that is still proven and was found at more than one token (a decode step) is right for more than these."""
    valid = site.valid_tokens
    return site if site.proof.draws or valid is None or valid.low == 1 else replace(site, valid_tokens=None)


def _drawn(part: Part) -> list[tuple[Any, ...]]:
    """All of the plans of a part that its edits depend on."""
    return [(plan.match.name, _ends(plan), plan.nodes, plan.value_info) for plan in part.plans]


def _asked(chosen: Chosen, plan: AnyPlan) -> tuple[Any, ...]:
    match = plan.match
    return type(plan), match.name, _ends(plan), match.nodes, plan.pins, chosen.opset_of(plan)


def _ends(plan: AnyPlan) -> list[list[int]]:
    """The values that a plan's site reads, and those that it writes."""
    return [[role.value for role in roles] for roles in (plan.match.operands(), plan.match.results())]
