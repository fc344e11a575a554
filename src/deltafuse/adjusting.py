"""What a target asks of the whole file beside its sites: axes of one size, opset imports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltafuse.expression_match import ExpressionPlan
from deltafuse.match import Plan
from deltafuse.opset import Raised, adapt_all, raised
from deltafuse.pin_sizes import Seed
from deltafuse.pinning import PinPlan, pin
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.wire import Model


@dataclass(frozen=True)
class Adjustments:
    """Declarations to change, opset imports to raise."""

    pins: PinPlan | None = None
    opsets: Raised = field(default_factory=Raised)


def adjust(
    model: Model,
    shapes: Shapes,
    dead: Collection[int],
    opsets: Sequence[tuple[str, int]],
    seeds: Sequence[Seed],
    extra: Mapping[str, int],
    entered: Collection[int] = (),
) -> Adjustments | Reason:
    """Works out what must change outside of the sites.

    Args:
        model: in topological order.
        shapes: its engine.
        dead: nodes that go.
        opsets: domains and least versions that the new nodes need.
        seeds: axes that the new nodes need to be one size, and why.
        extra: further axes to fix, as a user asks for.
        entered: nodes whose bodies are adjusted by themselves.
    """
    found = Raised()
    for opset in opsets:
        more = raised(model, *opset, {*dead, *entered})
        if isinstance(more, Reason):
            return more
        found = Raised(found.imports + more.imports, more.version, found.replaced + more.replaced)
    pins = pin(model.graph, shapes, seeds, dead, extra) if seeds or extra else None
    return pins if isinstance(pins, Reason) else Adjustments(pins, found)


def adapted(plan: Plan | ExpressionPlan, opsets: Raised) -> Plan | ExpressionPlan | Reason:
    """A plan whose nodes are written for the opset that the file will import: a norm keeps the source's operators."""
    version = dict(opsets.imports).get("")
    if version is None:
        return plan
    nodes = adapt_all(plan.nodes, opsets.version, version)
    return nodes if isinstance(nodes, Reason) else replace(plan, nodes=nodes)
