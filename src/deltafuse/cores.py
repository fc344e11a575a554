"""Where the cores of the sites of one graph begin and end, worked out for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltafuse.classes import Kind
from deltafuse.graph import Graph


class Cores:
    """The cores of a graph's sites: the nodes of each colour.

    Args:
        graph: in topological order.
        kinds: kind of each value.
        colours: node -> number of the site whose core it is part of, negative for none.
    """

    def __init__(self, graph: Graph, kinds: bytearray, colours: Sequence[int]) -> None:
        # One colour more: that of what nothing writes, which is no site's.
        self._colours = np.array([*colours, -1], np.int32)
        captured = [(node, value) for node, values in graph.captures.items() for value in values]
        reader = np.concatenate([graph.reading.row_numbers(), np.array([node for node, _ in captured], np.int32)])
        value = np.concatenate([graph.reading.flat, np.array([value for _, value in captured], np.int32)])
        inner, outer = self._colours[reader], self._colours[graph.producers[value]]
        is_data = np.frombuffer(kinds, np.uint8) == Kind.DATA
        starts = graph.writing.stops - np.diff(graph.writing.stops, prepend=0)
        gives_data = is_data[graph.writing.flat[np.minimum(starts, len(graph.writing.flat) - 1)]]
        enters = (inner >= 0) & (inner != outer) & is_data[value]
        leaves = (outer >= 0) & (inner != outer) & gives_data[reader]
        results = np.array(graph.outputs, np.int32)
        self._entering = (value[enters], inner[enters])
        self._leaving = (
            np.concatenate([value[leaves], results]),
            np.concatenate([outer[leaves], self._colours[graph.producers[results]]]),
        )

    def nodes(self, colour: int) -> list[int]:
        """The nodes of a core, ascending."""
        return np.flatnonzero(self._colours == colour).tolist()

    def entries(self, colour: int) -> list[int]:
        """The data values that a core reads and does not write, ascending."""
        return _of(*self._entering, colour)

    def frontier(self, colour: int) -> list[int]:
        """The values of a core that something outside makes data of, or that are graph outputs, ascending."""
        return _of(*self._leaving, colour)


def _of(values: npt.NDArray[np.int32], colours: npt.NDArray[np.int32], colour: int) -> list[int]:
    return sorted(set(values[colours == colour].tolist()))
