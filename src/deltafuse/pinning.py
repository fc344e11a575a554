"""Pins axes to one size: finds every declared dim that is the same axis by data flow, whatever its symbol is.

Exporters give one batch several names (``s17``, ``s43``, ``4*s17``, ``MatMullogits_dim_0``). So what is pinned is
not a name: the axes that the sites need are followed through the graph that will be written, and the size goes
wherever a declared dim depends on them. Nothing else moves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from deltafuse.dims import Dim, substitute, symbol_name
from deltafuse.graph import Graph
from deltafuse.match import Pinned
from deltafuse.pin_names import declared_symbols
from deltafuse.pin_sizes import Seed, Sizes
from deltafuse.reasons import TEXTS, Reason
from deltafuse.shape_extents import index_extents
from deltafuse.shapes import Shapes

TEXTS.update(
    {
        "pin-static": "axis {axis} of {value!r} must be {size} but is the fixed size {found}; export the model with "
        "{size}, or with a dynamic axis there",
        "pin-disagree": "the axis {symbol!r} must be {size} and {other} at once ({value!r}); fuse fewer sites with "
        "--sites, or drop the --pin that asks for it; give a number of sequences with --batch",
        "pin-bound": "the axis {symbol!r} must be {size} but node {node!r} ({op}) needs it to be {found}; export the "
        "model again with {size}",
        "pin-expression": "axis {axis} of {value!r} has the size {found}, which being {size} fixes no single axis; "
        "give --pin SYMBOL=N for its symbols",
        "pin-unknown-symbol": "--pin {symbol}: no input, output or value_info has such a dim; give one of: {known}",
        "pin-shape-unknown": "the rank of {value!r} is not known, so its axis {axis} cannot be made {size}; run onnx "
        "shape inference on the model first",
        "pin-contradiction": "with {pins} node {node!r} ({op}) gets sizes {left} and {right}, which do not go "
        "together; give sizes that go together, or leave a --pin out",
    }
)


@dataclass(frozen=True)
class PinPlan:
    """What to declare anew.

    Attributes:
        retyped: (value id, its new declaration) for inputs, outputs and value_info with a changed dim.
        pinned: each axis of an input or output that becomes a number.
        bindings: every declared symbol that is a number now.
    """

    retyped: tuple[tuple[int, onnx.ValueInfoProto], ...]
    pinned: tuple[Pinned, ...]
    bindings: dict[str, int]


def pin(
    graph: Graph,
    shapes: Shapes,
    seeds: Sequence[Seed],
    dead: Collection[int] = (),
    extra: Mapping[str, int] | None = None,
) -> PinPlan | Reason:
    """Plans the declarations of the output file.

    Args:
        graph: the main graph.
        shapes: its engine, with the outputs of the sites defined.
        seeds: axes that must be one size, and why.
        dead: nodes that are taken out; what they say about sizes does not count.
        extra: further symbols and their sizes, as a user asks for.

    Returns:
        The plan (empty where every axis has its size already), or why the sizes cannot hold: ``pin-static``,
        ``pin-disagree``, ``pin-bound``, ``pin-expression``, ``pin-unknown-symbol``, ``pin-shape-unknown`` or
        ``pin-contradiction``.
    """
    live = np.delete(np.arange(len(graph.op)), list(dead)).tolist()
    before = shapes.again({})
    _visit(before, live)
    sizes = Sizes(before)
    reason = sizes.seed(seeds, extra or {})
    if reason is not None:
        return reason
    if not sizes.known:
        return PinPlan((), (), {})
    after = shapes.again(sizes.by_name())
    _visit(after, live)
    reason = _contradiction(before, after, sizes)
    return _Declarations(before, after, sizes).plan(dead) if reason is None else reason


def _visit(shapes: Shapes, nodes: Sequence[int]) -> None:
    """Works out every node's outputs, so that all that the graph says about sizes is known."""
    graph = shapes.graph
    for node in nodes:
        if graph.constant_head(node) is not None:
            continue  # says nothing about other sizes
        for value in graph.node_outputs[node]:
            shapes.shape(value)
        if graph.standard[node] == "GatherND":
            _unite_indexed(shapes, node)


def _unite_indexed(shapes: Shapes, node: int) -> None:
    """``mask[arange(batch), arange(length)]`` picks along its whole first axis: that is a batch axis too."""
    data, indices = shapes.graph.node_inputs[node][:2]
    shape, extents = shapes.shape(data), index_extents(shapes, indices)
    if shape and len(extents) > 1 and extents[0] is not None and symbol_name(shape[0]) and symbol_name(extents[0]):
        shapes.unions.unite(shape[0], extents[0], node)


_NOWHERE = {"node": "", "op": ""}


def _contradiction(before: Shapes, after: Shapes, sizes: Sizes) -> Reason | None:
    """A node that the sizes break, and that was whole before."""
    old = {conflict.node for conflict in before.conflicts}
    for conflict in after.conflicts:
        if conflict.node not in old:
            graph = after.graph
            pins = ", ".join(f"{name} = {size}" for name, size in sorted(sizes.known.items()))
            at = {"node": graph.label(conflict.node), "op": graph.op[conflict.node]} if conflict.node >= 0 else _NOWHERE
            return Reason("pin-contradiction", {"pins": pins, "left": conflict.left, "right": conflict.right, **at})
    return None


class _Declarations:
    """Declared dims of the output file."""

    def __init__(self, before: Shapes, after: Shapes, sizes: Sizes) -> None:
        self.before = before
        self.after = after
        self.sizes, self.why_of = sizes.by_name(), sizes.why_of
        self.graph = before.graph
        self.outputs = frozenset(self.graph.outputs)

    def plan(self, dead: Collection[int]) -> PinPlan:
        """Every declaration that changes."""
        graph, ends = self.graph, self.outputs.union(self.graph.inputs)
        retyped: list[tuple[int, onnx.ValueInfoProto]] = []
        pinned: list[Pinned] = []
        for value in sorted(graph.type_spans):
            changes = {} if self._vanishes(value, dead) else self._changes(value)
            if not changes:
                continue
            info = graph.value_info(value)
            if info is None:
                continue
            pinned += self._report(value, info, changes) if value in ends else []
            retyped.append((value, _retype(info, changes)))
        names = declared_symbols(self.before)
        order = {graph.name(value): i for i, value in enumerate((*graph.inputs, *graph.outputs))}
        pinned.sort(key=lambda axis: order[axis.value])
        return PinPlan(tuple(retyped), tuple(pinned), {n: size for n, size in self.sizes.items() if n in names})

    def _vanishes(self, value: int, dead: Collection[int]) -> bool:
        """Whether only removed nodes know the value."""
        if self.graph.producer[value] not in dead or value in self.outputs or value in self.before.defined:
            return False
        return all(node in dead for node in self.graph.consumers[value])

    def _changes(self, value: int) -> dict[int, Dim]:
        stated, now = self.before.declared(value), self.after.shape(value)
        if stated is None:
            return {}
        was = self.before.shape(value)
        if was is None or now is None or len(was) != len(stated) or len(now) != len(stated):
            was = now = None
        found: dict[int, Dim] = {}
        for axis, dim in enumerate(stated):
            new = self._change(value, dim, None if was is None else was[axis], None if now is None else now[axis])
            if new is not None and new != dim and not isinstance(dim, int):
                found[axis] = new
        return found

    def _change(self, value: int, stated: Dim | None, was: Dim | None, now: Dim | None) -> Dim | None:
        """The new dim, None where it stays: `was` and `now` are what data flow makes of it."""
        renamed = None if stated is None else substitute(stated, self.sizes)
        if isinstance(now, int):
            moved = now != was or renamed != stated or value in self.outputs
            return now if moved else None
        if isinstance(renamed, int) and now is not None and self.after.is_known(now):
            return None  # the file's name for this axis is wrong: data flow says that it still varies
        return renamed

    def _report(self, value: int, info: onnx.ValueInfoProto, changes: Mapping[int, Dim]) -> list[Pinned]:
        dims = info.type.tensor_type.shape.dim
        name = self.graph.name(value)
        kind = "input" if value in self.graph.inputs else "output"
        was = self.before.shape(value) or ()
        why = {axis: self.why_of(was[axis]) if axis < len(was) else "" for axis in changes}
        fixed = {axis: new for axis, new in changes.items() if isinstance(new, int)}
        return [Pinned(name, axis, dims[axis].dim_param or "?", new, kind, why[axis]) for axis, new in fixed.items()]


def _retype(info: onnx.ValueInfoProto, changes: Mapping[int, Dim]) -> onnx.ValueInfoProto:
    new = onnx.ValueInfoProto()
    new.CopyFrom(info)
    for axis, dim in changes.items():
        slot = new.type.tensor_type.shape.dim[axis]
        if isinstance(dim, int):
            slot.dim_value = dim
        else:
            slot.dim_param = str(dim)
    return new
