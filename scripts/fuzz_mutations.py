"""Mutations of a model at the level of protobuf fields: what an exporter, a tool or an attacker may have got wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

__all__ = ["mutate"]

_INTEGERS = (0, 1, -1, 2, 3, 7, 8, 16, 17, 27, 64, 127, 999, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63))
_FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, float("inf"), float("nan"))
_NARROW = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM)
_INT_TYPES = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64, *_NARROW)
_FLOAT_TYPES = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)

Place = tuple[Message, FieldDescriptor]


def mutate(model: onnx.ModelProto, rng: random.Random) -> tuple[bytes, list[str]]:
    """A mutant of a model, serialised, and what was done: one change as a rule, sometimes a few.

    Args:
        model: is left as it is.
        rng: decides everything.
    """
    mutant = onnx.ModelProto()
    mutant.CopyFrom(model)
    changes = [_change(mutant, rng) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    content = mutant.SerializeToString()
    if rng.random() < 0.1:
        content, change = _bytes(bytearray(content), rng)
        changes.append(change)
    return content, changes


def _change(model: onnx.ModelProto, rng: random.Random) -> str:
    message, field = _choose(model, rng)
    where = f"{message.DESCRIPTOR.name}.{field.name}"
    many = hasattr(getattr(message, field.name), "append") or hasattr(getattr(message, field.name), "add")
    actions = [_drop, _alter, _alter, _alter, _exchange]
    if many:
        actions += [_repeat, _swap]
    action = rng.choice(actions)
    action(model, message, field, rng)
    return f"{action.__name__.strip('_')} {where}: {_name(message)}"


def _name(message: Message) -> str:
    return str(getattr(message, "name", "") or getattr(message, "op_type", ""))[:40]


def _messages(message: Message) -> Iterator[Message]:
    """A message and all in it."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if hasattr(value, "add") else [value]:
                yield from _messages(inner)


def _choose(model: onnx.ModelProto, rng: random.Random) -> Place:
    """A field of a message that is set; kinds of messages are as likely as each other, however many there are."""
    kinds: dict[str, list[Message]] = {}
    for message in _messages(model):
        if message.ListFields():
            kinds.setdefault(message.DESCRIPTOR.name, []).append(message)
    weights = {"NodeProto": 6, "AttributeProto": 3, "TensorProto": 3}
    names = list(kinds)
    name = rng.choices(names, [weights.get(name, 1) for name in names])[0]
    message = rng.choice(kinds[name])
    return message, rng.choice([field for field, _ in message.ListFields()])


def _many(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    return value if hasattr(value, "append") or hasattr(value, "add") else None


def _drop(_: onnx.ModelProto, message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    """Takes a field away, or one of its elements."""
    values = _many(message, field)
    if values and rng.random() < 0.8:
        del values[rng.randrange(len(values))]
    else:
        message.ClearField(field.name)


def _repeat(_: onnx.ModelProto, message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    """Writes an element once more."""
    values = _many(message, field)
    element = values[rng.randrange(len(values))]
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        values.add().CopyFrom(element)
    else:
        values.append(element)


def _swap(_: onnx.ModelProto, message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    """Exchanges two elements."""
    values = _many(message, field)
    one, other = rng.randrange(len(values)), rng.randrange(len(values))
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        first = type(values[one])()
        first.CopyFrom(values[one])
        values[one].CopyFrom(values[other])
        values[other].CopyFrom(first)
    else:
        values[one], values[other] = values[other], values[one]


def _exchange(model: onnx.ModelProto, message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    """Takes the same field of another message of the kind: a wire from elsewhere, an attribute of another node."""
    others = [other for other in _messages(model) if other.DESCRIPTOR is message.DESCRIPTOR]
    donor = type(message)()
    donor.CopyFrom(rng.choice(others))
    for other, value in donor.ListFields():
        if other.name == field.name:
            message.ClearField(field.name)
            if hasattr(value, "append") or hasattr(value, "add"):
                getattr(message, field.name).extend(value)
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                getattr(message, field.name).CopyFrom(value)
            else:
                setattr(message, field.name, value)


def _alter(model: onnx.ModelProto, message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    """Gives a field, or one of its elements, another value of its type."""
    values = _many(message, field)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = getattr(message, field.name) if values is None else values[rng.randrange(len(values))]
        set_fields = [field for field, _ in inner.ListFields()]
        if set_fields:
            _alter(model, inner, rng.choice(set_fields), rng)
    elif values is None:
        setattr(message, field.name, _value(model, getattr(message, field.name), field, rng))
    elif len(values):
        at = rng.randrange(len(values))
        values[at] = _value(model, values[at], field, rng)


def _value(model: onnx.ModelProto, old: Any, field: FieldDescriptor, rng: random.Random) -> Any:
    if field.type in _INT_TYPES:
        near = old + rng.choice((-1, 1, 2))
        value = near if rng.random() < 0.5 else rng.choice(_INTEGERS)
        if field.type == FieldDescriptor.TYPE_ENUM and field.enum_type.is_closed:
            return rng.choice(field.enum_type.values).number
        low, high = (-(1 << 31), (1 << 31) - 1) if field.type in _NARROW else (-(1 << 63), (1 << 63) - 1)
        low = 0 if field.type == FieldDescriptor.TYPE_UINT64 else low
        return min(max(value, low), high)
    if field.type in _FLOAT_TYPES:
        return rng.choice((*_FLOATS, old * 0.99, -old))
    if field.type == FieldDescriptor.TYPE_BYTES:
        raw = bytearray(old or b"\0")
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return bytes(rng.choice((raw, raw[:-1], raw + b"\0", b"", raw[: len(raw) // 2])))
    texts = [text for node in model.graph.node for text in (*node.input, *node.output, node.op_type)]
    return rng.choice(("", "x", old + "_", "ü", "a/../b", *(rng.choice(texts or [""]) for _ in range(5))))


def _bytes(content: bytearray, rng: random.Random) -> tuple[bytes, str]:
    """Damage that knows nothing of fields."""
    kind = rng.choice(("flip", "cut", "insert", "double"))
    at = rng.randrange(len(content))
    if kind == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "insert":
        content[at:at] = rng.randbytes(rng.randrange(1, 9))
    else:
        content[at:at] = content[at : at + rng.randrange(1, 200)]
    return bytes(content), f"{kind} bytes: {at}"
