"""What is known of a model before anything is changed: scanned, its sites found and proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltafuse import patterns
from deltafuse.clock import Clock
from deltafuse.enclosed import Enclosed
from deltafuse.forecast import Forecast
from deltafuse.gathering import gathered
from deltafuse.inlining import inlined
from deltafuse.ordering import in_order
from deltafuse.pin_names import check_pins
from deltafuse.probe import Worker
from deltafuse.restated import Restated
from deltafuse.sanity import checked
from deltafuse.searching import Search, Searched
from deltafuse.shapes import Shapes
from deltafuse.wire import Ahead, Model, scan


@dataclass(frozen=True)
class Found:
    """What is known of a model before anything is changed.

    Attributes:
        file: as it was scanned.
        base: the same with those calls in place that hold a rule among other nodes, and outputs in parts put together.
        order: number in `base` of each node of the main graph that was searched, None where they are the same.
        main: what was found, in topological order.
    """

    file: Model
    base: Restated
    order: tuple[int, ...] | None
    main: Searched

    @property
    def scopes(self) -> list[Enclosed]:
        """Of all graphs."""
        return [searched.scope for searched in self.graphs]

    @property
    def graphs(self) -> tuple[Searched, ...]:
        """The main graph and all bodies that were entered."""
        return tuple(self.main.all())


def find(
    clock: Clock, worker: Worker, forecast: Forecast, left: Sequence[str] = (), ahead: Ahead | None = None
) -> Found:
    """Scans a model and finds and proves its sites.

    Args:
        clock: of the run.
        worker: runs what is cut out.
        forecast: holds what was chosen, and is told what is likely to be found.
        left: sites whose outputs in parts are not put together.
        ahead: reads the file's first nodes.

    Raises:
        UserError: what `deltafuse.wire.scan` raises; an option that fits no part of the model.
    """
    chosen, options = forecast.chosen, forecast.chosen.options
    with clock.stage("scanning"):
        rules = patterns.load(options.patterns, options.rules or None, chosen.ordinary)
        file = checked(scan(options.model, allow_outside=options.allow_outside, ahead=ahead))
        if options.pins:
            check_pins(options.pins, Shapes(file))
    search = Search(rules, clock, worker, forecast.look)
    base = Restated(file)
    while True:
        with clock.stage("scanning"):
            model, order = in_order(base.model)
            scope = Enclosed.main(model)
        main = search.graph(scope)
        more = inlined(base, model, order, scope.kinds, search.recurrences, main.sites)
        more = gathered(base, order, main, search.recurrences, worker, left) if more is None else more
        if more is None:
            break
        base = more
    # A converter that takes no control flow has no use for what is fused inside.
    return Found(file, base, order, search.bodies(main) if chosen.control_flow else main)
