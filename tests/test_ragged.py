"""Rows of numbers in one array."""

from __future__ import annotations

import numpy as np
import pytest

from deltafuse.ragged import Ragged, Readers

ROWS = [(3, 1), (), (1, 1, 0), (2,), ()]


def test_rows_come_back() -> None:
    assert Ragged.of(ROWS).rows() == ROWS
    assert Ragged.of([]).rows() == []


def test_each_number_knows_its_row() -> None:
    assert Ragged.of(ROWS).row_numbers().tolist() == [0, 0, 2, 2, 2, 3]


@pytest.mark.parametrize("rows", [[0, 2, 3], [3, 0], [1], [4, 2], []])
def test_some_rows_end_to_end(rows: list[int]) -> None:
    flat, lengths = Ragged.of(ROWS).take(np.array(rows, np.int32))
    assert flat.tolist() == [number for row in rows for number in ROWS[row]]
    assert lengths.tolist() == [len(ROWS[row]) for row in rows]


def test_readers_are_ascending_and_named_once() -> None:
    readers = Readers(Ragged.of(ROWS), 5, [(1, 3), (4, 1), (0, 1)])
    assert [list(row) for row in readers] == [[], [0, 2, 4], [3], [0, 1], []]
    assert len(readers) == 5
    assert [list(row) for row in readers[1:3]] == [[0, 2, 4], [3]]


def test_nothing_reads_where_there_is_no_row() -> None:
    assert [list(row) for row in Readers(Ragged.of([]), 2)] == [[], []]
