"""Topological order: some tools append nodes behind their readers; onnxruntime takes that, so do we."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from deltafuse.errors import UserError
from deltafuse.graph import Graph, Runs, Spans
from deltafuse.sanity import check_written_once
from deltafuse.wire import Model


def in_order(model: Model) -> tuple[Model, tuple[int, ...] | None]:
    """A model whose nodes are numbered so that each comes after what it reads.

    Returns:
        The model, and for each node its number in the file; the same model and None where the file is in order.

    Raises:
        UserError: ``cyclic``: nodes read each other's results; ``value-written-twice``: two write the same value.
    """
    graph = model.graph
    if is_sorted(graph):
        return model, None
    order = _sorted(model.path, graph)
    numbers = {old: new for new, old in enumerate(order)}
    renumbered = replace(
        graph,
        op=[graph.op[node] for node in order],
        domain=[graph.domain[node] for node in order],
        node_inputs=[graph.node_inputs[node] for node in order],
        node_outputs=[graph.node_outputs[node] for node in order],
        captures={numbers[node]: values for node, values in graph.captures.items()},
        spans=_spans([graph.spans[node] for node in order]),
        attribute_spans=_runs([graph.attribute_spans[node] for node in order]),
        _attributes={},
        _heads={},
    )
    return replace(model, graph=renumbered), tuple(order)


def _spans(ranges: Sequence[tuple[int, int]]) -> Spans:
    return Spans(array("q", [start for start, _ in ranges]), array("q", [end for _, end in ranges]))


def _runs(runs: Sequence[Sequence[tuple[int, int]]]) -> Runs:
    return Runs(_spans([span for run in runs for span in run]), array("q", accumulate(len(run) for run in runs)))


def is_sorted(graph: Graph) -> bool:
    """Whether each node comes after those that write what it reads."""
    producer = graph.producer
    if any(producer[value] >= node for node, values in graph.captures.items() for value in values):
        return False
    return not bool((graph.producers[graph.reading.flat] >= graph.reading.row_numbers()).any())


def _sorted(path: Path, graph: Graph) -> list[int]:
    """Depth-first from each node in the file's order, without recursion: what is in order stays so."""
    producer = graph.producer
    done = bytearray(len(graph.op))
    order: list[int] = []
    for first in range(len(graph.op)):
        stack = [first]
        while stack:
            node = stack[-1]
            if done[node] == 2:
                stack.pop()
                continue
            waiting = [
                producer[value] for value in graph.reads(node) if producer[value] >= 0 and done[producer[value]] < 2
            ]
            if not waiting:
                done[node] = 2
                order.append(stack.pop())
                continue
            if done[node] == 1:
                check_written_once(path, graph)
                name = graph.label(node)
                raise UserError(
                    "cyclic", f"in {path} the node {name} reads what is computed from it: undo the edit that did that, "
                    "or make the file again"
                )  # fmt: skip
            done[node] = 1
            stack += waiting
    return order
