"""What a target asks of the whole file beside its sites: axes of one size, opset imports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltafuse.match import Plan
from deltafuse.opset import Raised, adapt_all, raised
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
    plans: Sequence[Plan],
    opset: tuple[str, int] | None,
    *,
    pinned: bool,
    extra: Mapping[str, int],
) -> Adjustments | Reason:
    """Works out what must change outside of the sites.

    Args:
        model: in topological order.
        shapes: its engine.
        plans: the sites to fuse.
        opset: domain and least version that the new nodes need.
        pinned: whether the axes that the plans want fixed are fixed.
        extra: further axes to fix, as a user asks for.
    """
    dead = frozenset(node for plan in plans for node in plan.match.nodes)
    opsets = Raised() if opset is None else raised(model, *opset, dead)
    if isinstance(opsets, Reason):
        return opsets
    pins = _pins(model, shapes, plans, dead, pinned, extra)
    return pins if isinstance(pins, Reason) else Adjustments(pins, opsets)


def _pins(
    model: Model, shapes: Shapes, plans: Sequence[Plan], dead: Collection[int], pinned: bool, extra: Mapping[str, int]
) -> PinPlan | Reason | None:
    seeds = tuple(seed for plan in plans for seed in plan.pins) if pinned else ()
    return pin(model.graph, shapes, seeds, dead, extra) if seeds or extra else None


def adapted(plan: Plan, opsets: Raised) -> Plan | Reason:
    """A plan whose nodes are written for the opset that the file will import: a norm keeps the source's operators."""
    version = dict(opsets.imports).get("")
    if version is None:
        return plan
    nodes = adapt_all(plan.nodes, opsets.version, version)
    return nodes if isinstance(nodes, Reason) else replace(plan, nodes=nodes)
