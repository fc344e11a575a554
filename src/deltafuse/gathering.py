"""Outputs that a graph takes token by token, put together: then one value is what a fused node writes.

The tokens become one value and are taken out of it again, which changes no number; whether it is the rule's output is
proven as of any other value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from deltafuse.edits import Changes, Insertion
from deltafuse.graph import Graph
from deltafuse.match import NoMatch
from deltafuse.opset import LEAST
from deltafuse.parted import Parts, parts_of
from deltafuse.patterns import Pattern
from deltafuse.restated import Restated
from deltafuse.searching import Searched
from deltafuse.splice import early_readers
from deltafuse.wire import Model
from deltafuse.worker import Worker

#: Layout of one token -> axis of the tokens in that of all, and whether each token has it too.
_AXES = {"BTHV": (1, True), "BHTV": (2, True), "BT(HV)": (1, True), "BHV": (1, False), "B(HV)": (1, False)}


def gathered(
    file: Restated,
    order: Sequence[int] | None,
    found: Searched,
    rules: Iterable[Pattern],
    worker: Worker,
    left: Collection[str] = (),
) -> Restated | None:
    """The file with the tokens of one more output put together.

    Args:
        file: as it was searched.
        order: number in the file of each node that was searched, None where they are the same.
        found: in its main graph.
        rules: that were looked for.
        worker: runs the cuts.
        left: sites whose tokens stay as they are.

    Returns:
        None where there is no such output, or its tokens cannot be put together.
    """
    scope, graph = found.scope, found.scope.model.graph
    if scope.model.opset_imports.get("", 0) < LEAST:
        return None
    for site in found.sites:
        if not isinstance(site, NoMatch) or site.reason.code != "output-in-parts":
            continue
        if site.name in (*left, *file.gathered):
            continue
        for rule in rules:
            known = (scope.model, scope.kinds, scope.shapes, rule, worker, found.candidates[site.name])
            parts = parts_of(*known)
            if parts is None or parts.layout not in _AXES:
                continue
            changes = _changes(graph, parts, _fresh(scope.model, f"{site.name}/tokens"), order)
            if changes is not None:
                return file.changed(changes, gathered=[site.name])
    return None


def _changes(graph: Graph, parts: Parts, name: str, order: Sequence[int] | None) -> Changes | None:
    """None where what takes a token is asked for before the last one is there."""
    writers = [graph.producer[value] for value in parts.values]
    before = max(writers) + 1
    early = early_readers(graph, parts.values, before)
    if len(set(writers)) < len(writers) or not set(early).isdisjoint(writers):
        return None
    places = range(len(graph.op) + 1) if order is None else (*order, len(order))
    inner = {graph.name(value): f"{name}/{token}" for token, value in enumerate(parts.values)}
    renamed = [Insertion(name, places[node], (_renamed(graph.node(node), inner),)) for node in writers]
    taken = Insertion(name, places[before], tuple(_put_together(name, inner, parts.layout)))
    # A file that is out of order may stay so.
    moved = tuple((name, node, before) for node in early) if order is None else ()
    return Changes(((name, tuple(sorted(places[node] for node in writers))),), (*renamed, taken), moved)


def _renamed(node: onnx.NodeProto, names: dict[str, str]) -> onnx.NodeProto:
    node.output[:] = [names.get(output, output) for output in node.output]
    return node


def _put_together(name: str, inner: dict[str, str], layout: str) -> Iterable[onnx.NodeProto]:
    """Nodes that join the tokens along an axis of their own, and those that take each out again."""
    axis, has_axis = _AXES[layout]
    tokens = list(inner.values())
    if not has_axis:
        yield _constant(f"{name}/axis", np.array([axis], np.int64))
        for token in tokens:
            yield helper.make_node("Unsqueeze", [token, f"{name}/axis"], [f"{token}/row"], f"{token}/row")
        tokens = [f"{token}/row" for token in tokens]
    yield helper.make_node("Concat", tokens, [name], name, axis=axis)
    for number, (outer, token) in enumerate(inner.items()):
        index = np.array([number] if has_axis else number, np.int64)
        yield _constant(f"{token}/index", index)
        yield helper.make_node("Gather", [name, f"{token}/index"], [outer], f"{token}/taken", axis=axis)


def _constant(name: str, array: npt.NDArray[np.int64]) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], name, value=numpy_helper.from_array(array))


def _fresh(model: Model, name: str) -> str:
    """A name that no name of the file begins with."""
    while model.mapped.find(name.encode()) >= 0:
        name += "'"
    return name
