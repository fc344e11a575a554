"""What the inputs of a decode graph are in a chain of steps: tokens, states, and what tells how many came before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import helper

from deltafuse.graph import Graph
from deltafuse.inputs import Inputs
from deltafuse.inputs_roles import InputRole, input_roles
from deltafuse.shapes import Shapes
from deltafuse.states import Link, Slot
from deltafuse.states_map import State, pair_states
from deltafuse.verify_stage import Stage

_LAYER = re.compile(r"layers?[._/](\d+)")
_NUMBER = re.compile(r"\d+")
#: What flows between layers, not between steps.
_NO_STATE = ("hidden", "embed", "logits")
_FLOATS = (1, 10, 11, 16)


@dataclass(frozen=True)
class Ports:
    """The inputs and outputs of a graph by what they are for.

    Attributes:
        ids: the input for tokens, "" where there is none; `rows` is how many tokens there are.
        logits: the output that tells the next token, "" where there is none.
        recurrent: inputs that a fused site reads as its state -> whether their first axis is layers.
        clocks: see `deltafuse.rollout_child.clocked`.
    """

    roles: Mapping[str, InputRole]
    ids: str
    rows: int
    logits: str
    recurrent: Mapping[str, bool]
    clocks: Mapping[str, str]


def ports_of(stage: Stage) -> Ports:
    """Looks over a graph's inputs and outputs."""
    shapes, graph = stage.after.shapes, stage.after.graph
    roles = input_roles(shapes, stage.after.kinds, stage.parts)
    ids = next((name for name, role in roles.items() if role.role == "ids"), "")
    rows = roles[ids].rows if ids else 0
    names = [graph.name(value) for value in graph.outputs if _is_logits(shapes, value, rows)]
    recurrent = {
        name: len(shapes.shape(graph.find(name) or 0) or ()) > 4
        for name, role in roles.items()
        if role.part is not None and role.part.role == "state"
    }
    clocks = {name: how for name, role in roles.items() if (how := _clock(shapes, name, role))}
    return Ports(roles, ids, rows, names[0] if names else "", recurrent, clocks)


def _is_logits(shapes: Shapes, value: int, rows: int) -> bool:
    shape = shapes.shape(value)
    named = shapes.graph.name(value).rpartition(".")[2] == "logits"
    return named or (shape is not None and len(shape) >= 2 and rows > 1 and shape[-1] == rows)


def _clock(shapes: Shapes, name: str, role: InputRole) -> str:
    value = shapes.graph.find(name) or 0
    shape, low = shapes.shape(value) or (), name.lower()
    if role.role == "positions":
        return "past"
    if role.role != "mask":
        return ""
    if not shape or shape[-1] == 1:
        return "past" if re.search("past|index|offset", low) else "total" if "len" in low else ""
    return "mask" if isinstance(shape[-1], int) else "grow"


def first_links(prefill: Stage, decode: Stage, ports: Ports, maps: Sequence[tuple[str, str]]) -> tuple[Link, ...]:
    """Which output of a prefill becomes which input of a decode; each state of it must come from somewhere."""
    inputs = list(_state_inputs(decode, ports))
    needed = [state.name for state in inputs]
    return pair_states(_state_outputs(prefill), inputs, maps, needed=needed, giver="prefill")


def next_links(
    decode: Stage, ports: Ports, maps: Sequence[tuple[str, str]], first: Sequence[Link] | None
) -> tuple[Link, ...]:
    """Which output of a decode becomes which of its own inputs.

    Args:
        decode: the graph.
        ports: of it.
        maps: what the user says.
        first: what a prefill gave, which must go on; None where there is none.
    """
    inputs = list(_state_inputs(decode, ports))
    if first is None:
        needed = [state.name for state in inputs if state.name in ports.recurrent or len(state.shape or ()) > 3]
    else:
        needed = [name for link in first for name in link.targets]
    return pair_states(_state_outputs(decode), inputs, maps, needed=needed)


def state_names(prefill: Stage | None, decode: Stage | None, ports: Ports | None) -> dict[str, list[str]]:
    """Names of the ``outputs`` of both graphs and of the ``inputs`` of the decode, with `ports`, that may be states."""
    outputs = [state.name for stage in (prefill, decode) if stage is not None for state in _state_outputs(stage)]
    inputs = [] if decode is None or ports is None else [state.name for state in _state_inputs(decode, ports)]
    return {"outputs": outputs, "inputs": inputs}


def slots_of(decode: Stage, ports: Ports) -> dict[str, Slot]:
    """What each input takes, from the fused file: its pinned axes are numbers."""
    shapes, graph = decode.after.shapes, decode.after.graph
    return {
        graph.name(value): Slot(
            _numbers(shapes, value) or (),
            str(helper.tensor_dtype_to_np_dtype(shapes.dtype(value) or 1)),
            graph.name(value) in ports.recurrent,
        )
        for value in graph.inputs
    }


def sequence_length(inputs: Inputs, ids: str) -> int:
    """Tokens that one run takes."""
    return inputs.arrays[ids].shape[-1] if ids and inputs.arrays[ids].ndim else 1


def _state_inputs(stage: Stage, ports: Ports) -> Iterator[State]:
    graph = stage.after.graph
    for name, role in ports.roles.items():
        operand = role.part is not None and role.part.role != "state"
        value = graph.find(name) or 0
        if operand or role.role not in ("operand", "other") or stage.after.shapes.dtype(value) not in _FLOATS:
            continue
        if not any(word in name.lower() for word in _NO_STATE):
            reader = min(graph.consumers[value], default=-1)
            yield State(name, _numbers(stage.after.shapes, value), _layer(graph, name, reader))


def _state_outputs(stage: Stage) -> list[State]:
    shapes, graph = stage.after.shapes, stage.after.graph
    return [
        State(name, _numbers(shapes, value), _layer(graph, name, graph.producer[value]))
        for value in graph.outputs
        if shapes.dtype(value) in (*_FLOATS, None)
        and not any(word in (name := graph.name(value)).lower() for word in _NO_STATE)
    ]


def _numbers(shapes: Shapes, value: int) -> tuple[int | None, ...] | None:
    shape = shapes.shape(value)
    return None if shape is None else tuple(dim if isinstance(dim, int) else None for dim in shape)


def _layer(graph: Graph, name: str, node: int) -> int | None:
    """The number behind ``layers`` in the value's or the node's name, else the first number of the value's name."""
    found = _LAYER.search(name) or _LAYER.search(graph.node_name(node) if node >= 0 else "") or _NUMBER.search(name)
    return int(found.group(found.lastindex or 0)) if found else None
