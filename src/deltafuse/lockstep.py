"""Walks many messages at once: the first field of each, then the second of each, with whole arrays.

A loop over bytes in Python costs more than all else that a scan does; a graph has hundreds of thousands of nodes, of a
few fields each.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltafuse.protobuf import LENGTH, Bytes, OverrunError, fields, read_varint
from deltafuse.ragged import Numbers, Offsets

#: Messages with more fields than this are walked one by one, and all where there are but a few.
_MOST, _FEW = 48, 24
_STRINGS = np.array([tag & 7 == LENGTH and 8 <= tag < 128 for tag in range(256)])


@dataclass(frozen=True)
class Fields:
    """Length-delimited fields of many messages, message by message, in the order of the file.

    Attributes:
        message: which one each field is part of.
        number: field numbers.
        start, stop: byte ranges of the payloads.
    """

    message: Numbers
    number: Numbers
    start: Offsets
    stop: Offsets


def walk(source: Bytes, position: int, end: int, tag: int) -> tuple[array[int], array[int], int]:
    """Goes from field to field until one has another tag: the nodes of a graph.

    Args:
        source: what they lie in, one behind the other.
        position: where to begin.
        end: of the message that holds them.
        tag: of one byte; the fields are length-delimited.

    Returns:
        Where the fields start, where what is in them begins, and where the last one ends.

    Raises:
        OverrunError: a field goes on beyond the end.
        IndexError: the data ends inside a field.
    """
    starts, begins = array("q"), array("q")
    add_start, add_begin = starts.append, begins.append
    while position < end and source[position] == tag:
        add_start(position)
        size, begin = source[position + 1], position + 2
        if size > 127:
            high, begin = source[begin], begin + 1
            size += (high << 7) - 128
            if high > 127:
                size, begin = read_varint(source, position + 1)
        add_begin(begin)
        position = begin + size
        if position > end:
            raise OverrunError("a node goes on beyond the graph")
    return starts, begins, position


def split(source: Bytes, begins: Offsets, stops: Offsets) -> Fields:
    """The length-delimited fields of messages; fields of other wire types are passed over.

    Args:
        source: what the messages are part of.
        begins: where each message begins.
        stops: where each message ends.

    Raises:
        WireError: the bytes are no message.
    """
    count = len(begins)
    odd = np.ones(count, np.bool_)
    steps = [] if count < _FEW else _walk(np.frombuffer(source, np.uint8), begins, stops, odd)
    steps = [tuple(column[~odd[step[0]]] for column in step) for step in steps]
    singles = {int(i): _single(source, int(begins[i]), int(stops[i])) for i in np.flatnonzero(odd)}
    held = np.zeros(count, np.int64)
    for step in steps:
        held[step[0]] += 1
    for message, rows in singles.items():
        held[message] = len(rows)
    places = np.cumsum(held) - held
    result = np.empty((3, int(held.sum())), np.int64)
    for nth, (message, *columns) in enumerate(steps):
        result[:, places[message] + nth] = columns
    for message, rows in singles.items():
        for nth, row in enumerate(rows):
            result[:, places[message] + nth] = row
    return Fields(np.repeat(np.arange(count, dtype=np.int32), held), result[0].astype(np.int32), result[1], result[2])


def _walk(
    data: npt.NDArray[np.uint8], begins: Offsets, stops: Offsets, odd: npt.NDArray[np.bool_]
) -> list[tuple[Numbers, Numbers, Offsets, Offsets]]:
    """The nth field of each message, for each n: message, number, start, stop. `odd` becomes false for what was walked.

    Read is the common encoding: tags of one byte, lengths of one or two.
    """
    steps: list[tuple[Numbers, Numbers, Offsets, Offsets]] = []
    message, at, last = np.arange(len(begins), dtype=np.int32), begins, len(data) - 1
    odd[:] = begins != stops
    message, at = message[odd], at[odd]
    for _ in range(_MOST):
        if not len(message):
            break
        tag, low, high = (data[np.minimum(at + step, last)].astype(np.int64) for step in range(3))
        wide = low > 127
        start = at + 2 + wide
        stop = start + np.where(wide, low - 128 + (high << 7), low)
        plain = _STRINGS[tag] & ~(wide & (high > 127)) & (stop <= stops[message])
        message, tag, start, stop = message[plain], tag[plain], start[plain], stop[plain]
        steps.append((message, tag >> 3, start, stop))
        more = stop < stops[message]
        odd[message[~more]] = False
        message, at = message[more], stop[more]
    return steps


def _single(source: Bytes, begin: int, stop: int) -> list[tuple[int, int, int]]:
    return [(number, start, end) for number, wire, _, start, end, _ in fields(source, begin, stop) if wire == LENGTH]
