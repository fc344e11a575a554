"""The protobuf wire format: just enough of it to walk a message without decoding it.

Every legal encoding is read: fields in any order, varints longer than they need be, groups.
Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TypeAlias

from deltafuse import wording

Bytes: TypeAlias = "bytes | memoryview | mmap.mmap"

VARINT, FIXED64, LENGTH, GROUP_START, GROUP_END, FIXED32 = range(6)

#: field number, wire type, number (varints only, else 0), start and end of the payload (the field ends there too),
#: start of the field
Field: TypeAlias = "tuple[int, int, int, int, int, int]"


class WireError(ValueError):
    """The bytes are not a protobuf message."""


class NestedError(WireError):
    """Messages lie in each other deeper than any reader goes."""


class OverrunError(WireError):
    """A field goes on beyond the end of the message that holds it.

    Attributes:
        number: of the field, 0 where it is not known.
    """

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


def read_varint(data: Bytes, position: int) -> tuple[int, int]:
    """Reads one varint. Returns its value (modulo 2**64) and where it ends.

    Raises:
        WireError: it is longer than ten bytes.
        OverrunError: the data ends inside it.
    """
    value = shift = 0
    try:
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF, position
            shift += 7
            if shift > 63:
                raise WireError("a varint is longer than ten bytes")
    except IndexError:
        raise OverrunError("the data ends inside a varint") from None


def write_varint(value: int) -> bytes:
    """The shortest encoding of a number that is not negative."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_field(number: int, payload: bytes) -> bytes:
    """A length-delimited field: tag, length, payload."""
    return write_varint(number << 3 | LENGTH) + write_varint(len(payload)) + payload


def fields(data: Bytes, start: int, end: int) -> Iterator[Field]:
    """Walks the fields of the message in ``data[start:end]``; the payload of a group is empty.

    Raises:
        WireError: the bytes are no message.
    """
    position = start
    while position < end:
        field = read_field(data, position, end)
        yield field
        position = field[4]


def read_field(data: Bytes, position: int, end: int) -> Field:
    """Reads the field that starts at `position` of a message that ends at `end`."""
    tag, begin = read_varint(data, position)
    number, wire, value = tag >> 3, tag & 7, 0
    if not 0 < number < 1 << 29:
        raise WireError(f"{number} is no field number")
    if wire == LENGTH:
        size, begin = read_varint(data, begin)
        stop = begin + size
    elif wire == VARINT:
        value, stop = read_varint(data, begin)
    elif wire == FIXED64:
        stop = begin + 8
    elif wire == FIXED32:
        stop = begin + 4
    elif wire == GROUP_START:
        begin = stop = _end_of_group(data, begin, end, number)
    else:
        raise WireError(f"{wire} is no wire type of a field")
    if stop > end:
        raise OverrunError(f"field {number} ends {wording.number(stop - end, 'byte')} behind its message", number)
    return number, wire, value, begin, stop, position


def _end_of_group(data: Bytes, position: int, end: int, number: int) -> int:
    """Where a group ends; groups in it are counted and not entered, so that no depth of them is too deep."""
    opened = [number]
    while position < end:
        tag, after = read_varint(data, position)
        if tag & 7 == GROUP_START:
            opened.append(tag >> 3)
        elif tag & 7 == GROUP_END:
            last = opened.pop()
            if tag >> 3 != last:
                raise WireError(f"group {last} is closed as group {tag >> 3}")
            if not opened:
                return after
        else:
            after = read_field(data, position, end)[4]
        position = after
    raise OverrunError(f"group {opened[-1]} is not closed")
