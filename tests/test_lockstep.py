"""Many messages walked at once give what each gives by itself."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest

from deltafuse.lockstep import split
from deltafuse.protobuf import LENGTH, WireError, fields
from wire_forms import FORMS, Form, encode

PLAIN = Form()


def nodes(count: int, seed: int, forms: list[Form]) -> list[bytes]:
    rng = random.Random(seed)
    made: list[bytes] = []
    for index in range(count):
        node = onnx.NodeProto(
            op_type=rng.choice(["Add", "Concat", "Constant", ""]),
            name="n" * rng.choice([0, 3, 127, 128, 300, 20_000]),
            input=[f"in{i}" for i in range(rng.choice([0, 1, 2, 3, 70]))],
            output=[f"out{index}"] * rng.choice([0, 1, 2]),
            domain=rng.choice(["", "custom"]),
        )
        node.attribute.add(name="axis", type=onnx.AttributeProto.INT, i=rng.choice([0, -1, 1 << 40]))
        made.append(encode(node, rng.choice(forms)))
    return made


def joined(messages: list[bytes]) -> tuple[bytes, list[int], list[int]]:
    """The messages with a byte between, where each begins, where each ends."""
    data, begins, stops = b"", list[int](), list[int]()
    for message in messages:
        data += b"\x7f"
        begins.append(len(data))
        data += message
        stops.append(len(data))
    return data, begins, stops


def one_by_one(data: bytes, begins: list[int], stops: list[int]) -> list[tuple[int, int, int, int]]:
    return [
        (index, number, start, stop)
        for index, span in enumerate(zip(begins, stops, strict=True))
        for number, wire, _, start, stop, _ in fields(data, *span)
        if wire == LENGTH
    ]


def at_once(data: bytes, begins: list[int], stops: list[int]) -> list[tuple[int, int, int, int]]:
    found = split(data, np.array(begins, np.int64), np.array(stops, np.int64))
    columns: list[list[int]] = [x.tolist() for x in (found.message, found.number, found.start, found.stop)]
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("count", [0, 1, 5, 200])
@pytest.mark.parametrize("forms", [[PLAIN], [PLAIN, *FORMS.values()]], ids=["plain", "mixed"])
def test_fields_are_those_of_each_message(count: int, forms: list[Form]) -> None:
    data, begins, stops = joined(nodes(count, count, forms))
    assert at_once(data, begins, stops) == one_by_one(data, begins, stops)


def test_empty_messages_have_no_field() -> None:
    messages = [b""] * 40 + [b"\x0a\x01x"] + [b""] * 40
    data, begins, stops = joined(messages)
    assert at_once(data, begins, stops) == [(40, 1, begins[40] + 2, begins[40] + 3)]


def test_a_field_that_leaves_its_message_is_no_field() -> None:
    messages = [b"\x0a\x01x"] * 60
    messages[30] = b"\x0a\x02x"
    data, begins, stops = joined(messages)
    with pytest.raises(WireError, match="ends 1 byte behind its message"):
        at_once(data, begins, stops)


def test_a_message_at_the_end_of_the_data_is_read_and_nothing_beyond_it() -> None:
    data, begins, stops = joined([b"\x0a\x01x"] * 60 + [b"\x0a\x00"])
    assert at_once(data, begins, stops)[-1] == (60, 1, len(data), len(data))
    with pytest.raises(WireError):
        at_once(data[:-1], begins, [*stops[:-1], stops[-1] - 1])
