"""Constants of an expression that no draw feels: agreement with a reference tells nothing of what they stand before.

A little of something else, ``y + 1e-20 * x``, is lost beside y on every draw of common size, and shows on larger
numbers. So each constant is made half as large again, where a node reads it, and numbers of one magnitude at a time:
what the expression is made of shows that at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from deltafuse.bench import Bench, open_bench
from deltafuse.expression_guard import Checked
from deltafuse.expression_trial import SizedTrial, difference
from deltafuse.expressions import FLOATS, Array, Operands
from deltafuse.graph import Graph
from deltafuse.probe import Cut
from deltafuse.reasons import Reason
from deltafuse.shapes import Shapes
from deltafuse.worker import Worker

#: Bounds: of several, one alone may be reached. They add nothing to a number.
_BOUNDS = frozenset({"Clip", "Max", "Min"})
_FACTOR = 1.5
#: Relative change that shows: more than an expression may differ from its reference.
_FELT = 1e-10


@dataclass(frozen=True)
class _Use:
    """A float constant that a node reads.

    Attributes:
        node, place: the node and which of its operands.
        value: the constant.
        factor: number of the further operand of the cut that it is multiplied by; negative, so that it is no value's.
    """

    node: int
    place: int
    value: int
    factor: int


def unfelt(
    worker: Worker,
    graph: Graph,
    shapes: Shapes,
    checked: Checked,
    trial: SizedTrial,
    draws: Callable[[], Iterator[Operands]],
) -> int | Reason | None:
    """The first constant whose size changes nothing on any draw, None where there is none; a Reason where that fails.

    Args:
        worker: runs the cut.
        graph: the main graph.
        shapes: its shapes.
        checked: the site.
        trial: the site at some sizes.
        draws: makes the operands.
    """
    uses = _uses(graph, shapes, checked)
    if not uses:
        return None
    bench = _bench(worker, graph, shapes, checked, trial.bench, uses)
    if isinstance(bench, Reason):
        return bench
    found = _first_unfelt(bench, replace(trial, bench=bench), uses, draws)
    worker.unload(bench.session)
    return found


def _uses(graph: Graph, shapes: Shapes, checked: Checked) -> list[_Use]:
    data = {*checked.proposal.roles.values(), *(v for node in checked.nodes for v in graph.node_outputs[node])}
    found: list[_Use] = []
    for node in checked.nodes:
        for place, value in enumerate(graph.node_inputs[node]):
            if value and value not in data and shapes.dtype(value) in FLOATS and graph.op[node] not in _BOUNDS:
                found.append(_Use(node, place, value, -len(found) - 1))
    return found


def _bench(
    worker: Worker, graph: Graph, shapes: Shapes, checked: Checked, plain: Bench, uses: Sequence[_Use]
) -> Bench | Reason:
    """The cut with a factor on each constant, which also gives the constants."""
    model = onnx.ModelProto()
    model.CopyFrom(checked.cut.model)
    written: list[onnx.NodeProto] = []
    names = dict(plain.names)
    for node, proto in zip(checked.cut.nodes, list(model.graph.node), strict=True):
        for use in uses:
            if use.node != node:
                continue
            dtype, factor = shapes.dtype(use.value) or 0, f"factor.{-use.factor}"
            names |= {use.factor: factor, use.value: graph.name(use.value)}
            product, dims = f"{factor}/product", shapes.shape(use.value)
            model.graph.input.append(helper.make_tensor_value_info(factor, dtype, None))
            if dims is not None:
                sizes = [dim if isinstance(dim, int) else None for dim in dims]
                model.graph.value_info.append(helper.make_tensor_value_info(product, dtype, sizes))
            written.append(helper.make_node("Mul", [proto.input[use.place], factor], [product]))
            proto.input[use.place] = product
        written.append(proto)
    del model.graph.node[:]
    model.graph.node.extend(written)
    held = [value for value in dict.fromkeys(use.value for use in uses) if value not in checked.cut.outputs]
    model.graph.output.extend(onnx.ValueInfoProto(name=names[value]) for value in held)
    cut = Cut(model, checked.cut.inputs, (*checked.cut.outputs, *held), checked.cut.nodes)
    return open_bench(worker, cut, names, {**plain.shapes, **{use.factor: () for use in uses}}, plain.sizes)


def _first_unfelt(
    bench: Bench, trial: SizedTrial, uses: Sequence[_Use], draws: Callable[[], Iterator[Operands]]
) -> int | Reason | None:
    constants = bench.run({}, trial.sizes)
    if isinstance(constants, Reason):
        return constants
    given: list[tuple[Mapping[int, Array], Operands]] = []
    for operands in draws():
        before = trial.run(operands)
        if isinstance(before, Reason):
            return before
        given.append((trial.feeds(operands), before))
    for use in uses:
        for factor in _factors(constants[use.value]):
            felt = _is_felt(trial, given, use, factor)
            if isinstance(felt, Reason) or not felt:
                return felt if isinstance(felt, Reason) else use.value
    return None


def _is_felt(
    trial: SizedTrial, given: Sequence[tuple[Mapping[int, Array], Operands]], use: _Use, factor: Array
) -> bool | Reason:
    """Whether a factor on a constant changes what comes out on any draw."""
    for feeds, before in given:
        after = trial.run_fed({**feeds, use.factor: factor})
        if isinstance(after, Reason):
            return after
        if not difference(after, before) <= _FELT:
            return True
    return False


def _factors(constant: Array) -> Iterator[Array]:
    """Of a constant's numbers those of one magnitude after the other; zeros add nothing, whatever they are times."""
    array = np.asarray(constant, np.float64)
    magnitudes = np.where(np.isfinite(array) & (array != 0), np.frexp(array)[1], 1 << 12)
    for magnitude in np.unique(magnitudes):
        if magnitude != 1 << 12:
            yield np.where(magnitudes == magnitude, _FACTOR, 1.0)
