"""Rows of numbers of different lengths, end to end in one array: whole-graph questions without a loop over nodes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]

#: Rows of up to this length are made many at once.
_SHORT = 6


@dataclass(frozen=True)
class Ragged:
    """Rows of numbers.

    Attributes:
        flat: the numbers of all rows, int32.
        stops: where each row ends in `flat`, int64.
    """

    flat: Numbers
    stops: Offsets

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """The same rows in one array."""
        stops = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)))
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, int(stops[-1]) if len(rows) else 0), stops)

    def rows(self) -> list[tuple[int, ...]]:
        """Each row by itself."""
        lengths = np.diff(self.stops, prepend=0)
        # One object for each number, however often it stands somewhere.
        flat = np.arange(int(self.flat.max(initial=0)) + 1).astype(np.object_)[self.flat]
        rows: list[tuple[int, ...]] = [()] * len(lengths)
        for length in range(1, _SHORT + 1):
            chosen = np.flatnonzero(lengths == length)
            starts = self.stops[chosen] - length
            columns = [flat[starts + place].tolist() for place in range(length)]
            for number, row in zip(chosen.tolist(), zip(*columns, strict=True), strict=True):
                rows[number] = row
        for number in np.flatnonzero(lengths > _SHORT).tolist():
            stop = self.stops[number]
            rows[number] = tuple(flat[stop - lengths[number] : stop].tolist())
        return rows

    def row_numbers(self) -> Numbers:
        """The row that each number of `flat` is in."""
        return np.repeat(np.arange(len(self.stops), dtype=np.int32), np.diff(self.stops, prepend=0))

    def take(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Some rows, end to end, and the length of each."""
        stops = self.stops[rows]
        lengths = stops - np.where(rows > 0, self.stops[rows - 1], 0)
        ends = np.cumsum(lengths)
        places = np.arange(int(lengths.sum())) + np.repeat(stops - ends, lengths)
        return self.flat[places], lengths.astype(np.int32)


class Readers(Sequence[Sequence[int]]):
    """By value, the rows that hold it, ascending and without repeats."""

    def __init__(self, rows: Ragged, values: int, more: Sequence[tuple[int, int]] = ()) -> None:
        """Turns rows of values around.

        Args:
            rows: the values of each row.
            values: how many values there are; value 0 is in no row.
            more: further (row, value) pairs.
        """
        width = len(rows.stops) + 1
        held = np.concatenate([rows.flat, np.array([value for _, value in more], np.int64)]).astype(np.int64)
        holders = np.concatenate([rows.row_numbers(), np.array([row for row, _ in more], np.int64)])
        pairs = np.sort(held * width + holders)
        once = np.concatenate([np.ones(1, np.bool_), pairs[1:] != pairs[:-1]])[: len(pairs)] & (pairs >= width)
        held, numbers = np.divmod(pairs[once], width)
        self._rows = array("i", numbers.astype(np.int32).tobytes())
        self._stops = array("q", np.cumsum(np.bincount(held, minlength=values)).tobytes())

    def __len__(self) -> int:
        return len(self._stops)

    @overload
    def __getitem__(self, index: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[int]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[int] | Sequence[Sequence[int]]:
        if isinstance(index, slice):
            return [self[value] for value in range(*index.indices(len(self)))]
        return self._rows[self._stops[index - 1] if index else 0 : self._stops[index]]
