"""Prefill and decode of one export: whether the states that the one gives fit what the other takes.

Both are told apart by their inputs: a decode takes states from the step before, a prefill has none. States belong
together by the stems of their names: ``present_X`` and ``past_X``, ``present.X`` and ``past_key_values.X``,
``output.cache.X`` and ``input.cache.X``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from onnx import TensorProto

from deltafuse.dims import Dim, parse, symbols
from deltafuse.dtypes import dtype_name
from deltafuse.external import external_tensors
from deltafuse.match import Pinned
from deltafuse.reasons import TEXTS, Reason
from deltafuse.wire import Model

TEXTS.update(
    {
        "pair-dtype": "{prefill} gives {output} as {found} and {decode} takes {input} as {wanted}; export both with "
        "the same element type",
        "pair-shape": "{prefill} gives {output} as {found} and {decode} takes {input} as {wanted}: axis {axis} "
        "differs; export both for the same batch and sizes, or pin the same axes in both",
        "pair-missing": "{decode} takes the state {input} and {prefill} does not give it; export both from one model",
        "pair-unread": "{prefill} gives the state {output} and {decode} does not take it; export both from one model",
        "data-shared": "{models} keep weights in one file, {location}: names of external data are local to a graph, "
        "and what the target's converter writes for one overwrites the other's; put each model into a folder of its "
        "own, with a copy of the file",
    }
)

_PAST = re.compile(r"(?:input\.cache\.|past_key_values\.|past[._])(.+)")
_PRESENT = re.compile(r"(?:output\.cache\.|cache\.|present_key_values\.|present[._])(.+)")


@dataclass(frozen=True)
class Tensor:
    """An input or output as it is declared: a text for a dynamic axis, None for a shape that nothing says."""

    dtype: int
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of a model, the symbols of its declarations, and names of files with its external data."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    symbols: frozenset[str]
    data: frozenset[str] = frozenset()


@dataclass(frozen=True)
class State:
    """One state that is handed on: the prefill's output, the decode's input ("" where it has none), what is wrong."""

    output: str
    input: str
    difference: Reason | None


@dataclass(frozen=True)
class Pair:
    """A prefill and the decode that goes on from it."""

    prefill: str
    decode: str
    states: tuple[State, ...]

    @property
    def differences(self) -> tuple[Reason, ...]:
        """What does not fit."""
        return tuple(state.difference for state in self.states if state.difference is not None)


def interface(model: Model) -> Interface:
    """What a model declares."""
    graph = model.graph
    found: dict[str, Tensor] = {}
    for value in (*graph.inputs, *graph.outputs):
        info, name = graph.value_info(value), graph.name(value)
        tensor = TensorProto.UNDEFINED if info is None else info.type.tensor_type.elem_type
        shape = None
        if info is not None and info.type.tensor_type.HasField("shape"):
            shape = tuple(_dim(dim.dim_param, dim.dim_value) for dim in info.type.tensor_type.shape.dim)
        found[name] = Tensor(tensor, shape)
    inputs, outputs = (
        {graph.name(value): found[graph.name(value)] for value in values} for values in (graph.inputs, graph.outputs)
    )
    data = {head.external.get("location", "") for head in external_tensors(model)}
    return Interface(inputs, outputs, frozenset(_symbols(model)), frozenset(data))


def shared_data(fused: Mapping[str, Interface]) -> Iterator[str]:
    """What to say of models in one folder that keep their weights in one file.

    Args:
        fused: path below the folder -> interface, of the models that are fused.
    """
    users: dict[tuple[PurePosixPath, str], list[str]] = {}
    for name, seen in fused.items():
        for location in sorted(seen.data):
            users.setdefault((PurePosixPath(name).parent, location), []).append(name)
    for (_, location), names in users.items():
        if len(names) > 1:
            yield Reason("data-shared", {"models": " and ".join(names), "location": location}).text


def with_pins(model: Interface, pinned: Sequence[Pinned]) -> Interface:
    """The same with the axes that a fuse pins."""
    sizes = {(pin.value, pin.axis): pin.now for pin in pinned}

    def after(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: Tensor(
                tensor.dtype,
                tensor.shape and tuple(sizes.get((name, axis), dim) for axis, dim in enumerate(tensor.shape)),
            )
            for name, tensor in tensors.items()
        }

    return Interface(after(model.inputs), after(model.outputs), model.symbols, model.data)


def candidates(models: Mapping[str, Interface]) -> tuple[Pair, ...]:
    """Every prefill with every decode that takes a state which the prefill gives.

    Args:
        models: path below the folder -> interface.
    """
    found = (
        Pair(prefill, decode, tuple(_states(prefill, given, decode, taken)))
        for decode, taken in models.items()
        if _taken(taken)
        for prefill, given in models.items()
        if prefill != decode
    )
    return tuple(pair for pair in found if any(state.output and state.input for state in pair.states))


def _dim(text: str, number: int) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text or number or "?"


def _symbols(model: Model) -> Iterator[str]:
    for value in model.graph.type_spans:
        info = model.graph.value_info(value)
        dims = () if info is None else info.type.tensor_type.shape.dim
        for dim in dims:
            size: Dim = parse(dim.dim_param) if dim.dim_param else 0
            yield from symbols(size)


def _taken(model: Interface) -> dict[str, str]:
    """Stem -> the input that takes a state of the step before."""
    return {match[1]: name for name in model.inputs if (match := _PAST.fullmatch(name))}


def _states(prefill: str, given: Interface, decode: str, taken: Interface) -> Iterator[State]:
    wanted = _taken(taken)
    if _taken(given):
        return
    for output, tensor in given.outputs.items():
        match = _PRESENT.fullmatch(output)
        stem = match[1] if match else output
        where = {"prefill": prefill, "decode": decode, "output": output}
        if stem in wanted:
            name = wanted.pop(stem)
            yield State(output, name, _difference(tensor, taken.inputs[name], where | {"input": name}))
        elif match:
            yield State(output, "", Reason("pair-unread", where))
    for name in wanted.values():
        yield State("", name, Reason("pair-missing", {"prefill": prefill, "decode": decode, "input": name}))


def _difference(given: Tensor, taken: Tensor, where: Mapping[str, object]) -> Reason | None:
    """Why an output does not fit an input; an axis that is dynamic in either takes the other's size."""
    if given.dtype != taken.dtype and TensorProto.UNDEFINED not in (given.dtype, taken.dtype):
        found, wanted = (dtype_name(dtype) for dtype in (given.dtype, taken.dtype))
        return Reason("pair-dtype", {**where, "found": found, "wanted": wanted})
    if given.shape is None or taken.shape is None:
        return None
    shapes = {"found": _text(given.shape), "wanted": _text(taken.shape)}
    for axis in range(max(len(given.shape), len(taken.shape))):
        sizes = [shape[axis] if axis < len(shape) else 0 for shape in (given.shape, taken.shape)]
        if sizes[0] != sizes[1] and all(isinstance(size, int) for size in sizes):
            return Reason("pair-shape", {**where, **shapes, "axis": axis})
    return None if len(given.shape) == len(taken.shape) else Reason("pair-shape", {**where, **shapes, "axis": "count"})


def _text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
