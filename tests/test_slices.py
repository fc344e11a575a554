"""Slices that are guessed from the one before are those that a walk finds."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

import graphs
from deltafuse import slices
from deltafuse.probe import backward_slice
from deltafuse.slices import Slices


def model(reads: list[list[int]]) -> onnx.ModelProto:
    """Nodes that write v1, v2, ... and read these by number, modulo how many there are; v0 is the input."""
    nodes = [
        helper.make_node("Sum" if read else "Constant", [f"v{value % number}" for value in read], [f"v{number}"])
        for number, read in enumerate(reads, 1)
    ]
    made = [onnx.ValueInfoProto(name=f"v{len(nodes)}")]
    return helper.make_model(helper.make_graph(nodes, "g", [onnx.ValueInfoProto(name="v0")], made))


reads = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=2, max_size=40)
asked = st.tuples(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)), st.integers(0, 40))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reads, st.lists(asked, min_size=2, max_size=5))
def test_a_guess_never_changes_a_slice(
    tmp_path: Path, reads: list[list[int]], asked: list[tuple[set[int], set[int], int]]
) -> None:
    graph = graphs.scanned(model(reads), tmp_path).graph
    found, count = Slices(graph), len(reads) + 1
    for ends, results, at in asked:
        known, outputs = (
            sorted({graph.find(f"v{value % count}") or 0 for value in values}) for values in (ends, results)
        )
        half = len(known) // 2
        slice_ = found.of(frozenset(known[:half]), known[half:], outputs, at % len(reads))
        assert slice_.tolist() == backward_slice(graph, known, outputs)[0]


def test_equal_layers_take_no_walk(tmp_path: Path) -> None:
    """Four layers of ten nodes, all with a constant that comes before them, each with one at the very end."""
    chains = [[*range(1 + 10 * layer, 10 + 10 * layer)] for layer in range(1, 5)]
    layers = [[value - 1, 1] if value > chain[0] else [0] for chain in chains for value in (*chain, 0)]
    reads = [[], *[[0]] * 9, *layers]
    graph = graphs.scanned(model([*reads, *([chain[-1]] for chain in chains)]), tmp_path).graph
    found = Slices(graph)
    walks: list[int] = []

    def walk(*asked: object) -> tuple[list[int], list[int]]:
        walks.append(1)
        return backward_slice(*asked)  # type: ignore[arg-type]

    with mock.patch.object(slices, "backward_slice", walk):
        for layer, chain in enumerate(chains):
            last = graph.find(f"v{len(reads) + 1 + layer}") or 0
            expected = backward_slice(graph, [graph.find("v0") or 0], [last])[0]
            nodes = found.of(frozenset(), [graph.find("v0") or 0], [last], chain[0] - 1).tolist()
            assert nodes == expected
            assert len(nodes) == 11
    assert len(walks) == 1
