"""Whether a dataclass that someone else filled in holds what its annotations say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from deltafuse.wording import number

__all__ = ["misfits"]


def misfits(place: str, value: Any, hint: Any, skip: str = "") -> Iterator[tuple[str, str]]:
    """Where a value is not of its annotated type, and what it is instead; dataclasses and tuples are walked.

    Args:
        place: what to call the value.
        value: to look at.
        hint: its type.
        skip: name of a field of `value` that is not looked at.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and isinstance(value, tuple):
        repeated, parts = arguments[-1] is Ellipsis, cast("tuple[Any, ...]", value)
        if not repeated and len(arguments) != len(parts):
            yield place, f"it has {number(len(parts), 'part')} and must have {len(arguments)}"
            return
        for index, part in enumerate(parts):
            yield from misfits(f"{place}[{index}]", part, arguments[0 if repeated else index])
    elif isinstance(hint, type) and is_dataclass(hint) and isinstance(value, hint):
        hints = get_type_hints(hint)
        for one in fields(hint):
            if one.name != skip:
                yield from misfits(f"{place}.{one.name}", getattr(value, one.name), hints[one.name])
    elif origin in (Union, UnionType) and type(value) in arguments and is_dataclass(value):
        yield from misfits(place, value, type(value))
    elif not _fits(value, hint):
        yield place, f"it is {_shown(value)} and must be {_named(hint)}"


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(next(misfits("", value, one), None) is None for one in arguments)
    if origin is Callable:
        return callable(value)
    if origin is list:
        return isinstance(value, list) and all(isinstance(one, arguments) for one in cast("list[Any]", value))
    if origin is frozenset:
        return isinstance(value, frozenset) and all(isinstance(one, arguments) for one in cast("frozenset[Any]", value))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, arguments[0]) and next(misfits("", one, arguments[1]), None) is None
            for key, one in cast("Mapping[Any, Any]", value).items()
        )
    # numpy's numbers are numbers.
    return isinstance(value, Real if hint is float else Integral if hint is int else origin or hint)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if value is None or (isinstance(value, str | int | float) and len(text) < 60) else _named(type(value))


def _named(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_named, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"a tuple ({', '.join(map(_named, arguments))})"
    if origin in (tuple, frozenset):
        return f"a {'tuple' if origin is tuple else 'set'} of {_named(arguments[0]).removeprefix('a ')}s"
    if origin is list:
        return f"a list of {_named(arguments[0])}"
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        return f"a mapping of {' to '.join(map(_named, arguments))}"
    name = str(hint.__name__)
    return {"NoneType": "None", "str": "a text", "int": "a whole number", "float": "a number"}.get(name, name)
