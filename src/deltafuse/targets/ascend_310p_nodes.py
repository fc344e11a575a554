"""The nodes that replace a site for ``ascend-310p``: layout, casts, norm and the Custom node of the contract.

The Custom node is what torch's ``graph.op("Custom", ...)`` writes (domain ""). Three places must agree on float16 or
the converter mis-allocates: ``output_types``, ``dtype`` and the declared type of both outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from deltafuse.layouts import axes
from deltafuse.match import Match, Plan, Role
from deltafuse.targets.emit import Attribute, Emitter, annotate, operand, result, version
from deltafuse.targets.layout import Sizes, moves

_FLOAT16 = int(TensorProto.FLOAT16)
#: MindSpore's TypeId of Float16, the value of ``output_types``.
_MINDSPORE_FLOAT16 = 42


@dataclass(frozen=True)
class Kernel:
    """One operator of the target, as the Custom node names it.

    Attributes:
        op: attribute ``type``.
        inputs: ``input_names``, every port.
        optional: ``optional_input_names``.
        fed: ``input_index``, the ports that are fed, in order of the node's inputs.
        outputs: ``output_names``.
        state: port of the initial state.
        declares_outputs: whether ``output_types`` and ``outputs_shape`` are written.
    """

    op: str
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    fed: tuple[int, ...]
    outputs: tuple[str, str]
    state: str
    declares_outputs: bool


CGDR = Kernel(
    op="ChunkGatedDeltaRule",
    inputs=("query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "g"),
    optional=("g",),
    fed=(0, 1, 2, 3, 4, 5, 6),
    outputs=("out", "final_state"),
    state="initial_state",
    declares_outputs=False,
)
RGDR = Kernel(
    op="RecurrentGatedDeltaRule",
    inputs=(
        "query", "key", "value", "beta", "state", "actual_seq_lengths", "ssm_state_indices", "g", "gk",
        "num_accepted_tokens",
    ),
    optional=("g", "gk", "num_accepted_tokens"),
    # 8 is gk, which is not fed.
    fed=(0, 1, 2, 3, 4, 5, 6, 7, 9),
    outputs=("out", "state"),
    state="state",
    declares_outputs=True,
)  # fmt: skip


def plan(match: Match, kernel: Kernel, tokens: int | None, *, pin: bool) -> Plan:
    """The nodes that replace a site that is within the kernel's limits.

    Operands are [T, H, D] with the batch at one; q, k, v, beta and the state are float16 and g is float32.

    Args:
        match: the site.
        kernel: what to call.
        tokens: the token count that is literal in the output file, None where it is symbolic.
        pin: whether axes are pinned in the output file.
    """
    emitter = Emitter(f"{match.name}/{match.rule}", _properties(match))
    ports = _operands(emitter, match, tokens)
    ports[kernel.state] = _state(emitter, match, kernel, ports["beta"], tokens)
    ports |= _lengths(emitter, ports["query"]) if kernel is CGDR else _slots(emitter, tokens)
    outputs = [emitter.name("out"), emitter.name("final_state")]
    inputs = [ports[kernel.inputs[port]] for port in kernel.fed]
    emitter.node("Custom", kernel.op, inputs, _attributes(match, kernel), outputs)
    value_sizes = _sizes(match, "value", tokens)
    result(emitter, "out", outputs[0], match.out, "THD", value_sizes, _FLOAT16)
    if match.final_state is not None:
        result(emitter, "final_state", outputs[1], match.final_state, "BHVK", value_sizes, _FLOAT16)
    nodes = emitter.finish()
    for node in nodes:
        if node.op_type == "Custom":
            annotate(node, _custom_properties(match))
    return Plan(
        match, kernel.op, nodes, _value_info(match, outputs, tokens), _pins(match, pin=pin), _notes(match, pin=pin)
    )


def _operands(emitter: Emitter, match: Match, tokens: int | None) -> dict[str, str]:
    key_sizes, value_sizes = _sizes(match, "key", tokens), _sizes(match, "value", tokens)
    query = operand(emitter, "query", match.query, "THD", key_sizes, match.query_norm, _FLOAT16)
    key = operand(emitter, "key", match.key, "THD", key_sizes, match.key_norm, _FLOAT16)
    return {
        "query": query,
        "key": key,
        "value": operand(emitter, "value", match.value, "THD", value_sizes, None, _FLOAT16),
        "beta": operand(emitter, "beta", match.beta, "TH", value_sizes, None, _FLOAT16),
        "g": operand(emitter, "g", match.g, "TH", value_sizes, None, int(TensorProto.FLOAT)),
    }


def _state(emitter: Emitter, match: Match, kernel: Kernel, beta: str, tokens: int | None) -> str:
    """The initial state [1, Nv, Dv, Dk]; for RGDR the output of a node of its own that nothing else reads.

    RGDR overwrites its state in place, so that the operand must own its memory: a graph input, a constant or a view of
    one (Reshape) would be changed for whoever reads it next. A Cast or a Transpose that moves data makes such memory.
    """
    dims = match.dims
    if match.state is None:
        return _zero_state(emitter, match, kernel, beta, tokens)
    sizes = _sizes(match, "value", tokens)
    state = operand(emitter, "state", match.state, "BHVK", sizes, None, _FLOAT16)
    steps = moves(match.state.layout, "BHVK", sizes)
    fresh = match.state.dtype != _FLOAT16 or any(step.op == "Transpose" for step in steps)
    if kernel is CGDR or fresh:
        return state
    # A copy that no converter takes out: adding zero, multiplying by one and Identity are all simplified away (by
    # onnxruntime, onnxoptimizer and MindSpore Lite alike), a Gather of every index in order is not looked into, unless
    # its axis has size one.
    axis, size = (1, dims.value_heads) if dims.value_heads > 1 else (2, dims.value_dim)
    every = emitter.constant("state/every_index", np.arange(size, dtype=np.int64))
    return emitter.node("Gather", "state/copy", (state, every), {"axis": axis})


def _zero_state(emitter: Emitter, match: Match, kernel: Kernel, beta: str, tokens: int | None) -> str:
    heads, value_dim, key_dim = match.dims.value_heads, match.dims.value_dim, match.dims.key_dim
    if kernel is CGDR:
        return emitter.constant("state/zero", np.zeros((1, heads, value_dim, key_dim), np.float16))
    # What is computed from constants alone is folded into a constant, which the first call would overwrite for all
    # later ones. So the zeros come from data: the first token's beta, which a sigmoid keeps finite.
    first = beta
    if tokens != 1:
        bounds = [emitter.constant(f"state/{value}", np.array([value], np.int64)) for value in (0, 1)]
        first = emitter.node("Slice", "state/first_beta", (beta, bounds[0], bounds[1], bounds[0]))
    shape = emitter.constant("state/heads_shape", np.array([1, heads, 1, 1], np.int64))
    column = emitter.node("Reshape", "state/heads", (first, shape))
    zero = emitter.constant("state/zero", np.zeros((1, 1, value_dim, key_dim), np.float16))
    return emitter.node("Mul", "state/fresh_zero", (column, zero))


def _lengths(emitter: Emitter, query: str) -> dict[str, str]:
    zero, one = (emitter.constant(f"lengths/{value}", np.array([value], np.int64)) for value in (0, 1))
    shape = emitter.node("Shape", "lengths/query_shape", (query,))
    count = emitter.node("Slice", "lengths/tokens", (shape, zero, one))
    count = emitter.node("Cast", "lengths/cast", (count,), {"to": int(TensorProto.INT32)})
    return {"actual_seq_lengths": emitter.node("Expand", "lengths/expand", (count, one))}


def _slots(emitter: Emitter, tokens: int | None) -> dict[str, str]:
    assert tokens is not None, "a limit of RGDR"
    return {
        "actual_seq_lengths": emitter.constant("lengths", np.array([tokens], np.int32)),
        "ssm_state_indices": emitter.constant("slots", np.zeros(tokens, np.int32)),
        # The state is read at slot indices[accepted - 1]; the indices are all zero, so 1 is as good as any count.
        "num_accepted_tokens": emitter.constant("accepted", np.array([1], np.int32)),
    }


def _attributes(match: Match, kernel: Kernel) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "type": kernel.op,
        "input_names": list(kernel.inputs),
        "optional_input_names": list(kernel.optional),
        "input_index": list(kernel.fed),
        "output_names": list(kernel.outputs),
        "output_num": 2,
        "scale_value": float(np.float32(match.scale)),
        "dtype": _FLOAT16,
    }
    if kernel.declares_outputs:
        dims = match.dims
        shapes = ((-1, dims.value_heads, dims.value_dim), (-1, dims.value_heads, dims.value_dim, dims.key_dim))
        flat = [number for shape in shapes for number in (len(shape), *shape)]
        attributes["output_types"] = [_MINDSPORE_FLOAT16, _MINDSPORE_FLOAT16]
        attributes["outputs_shape"] = "".join(f"{number}," for number in flat)
    return attributes


def _sizes(match: Match, heads_of: str, tokens: int | None) -> Sizes:
    dims = match.dims
    heads, size = (dims.key_heads, dims.key_dim) if heads_of == "key" else (dims.value_heads, dims.value_dim)
    return {"B": 1, "T": tokens, "H": heads, "D": size, "K": dims.key_dim, "V": dims.value_dim, "1": 1}


def _properties(match: Match) -> dict[str, str]:
    return {"deltafuse.site": match.name, "deltafuse.rule": match.rule, "deltafuse.version": version()}


def _custom_properties(match: Match) -> dict[str, str]:
    properties = {"deltafuse.form": match.form, "deltafuse.scope": match.out.name.rpartition("/")[0] or match.name}
    if match.valid_tokens is not None:
        properties["deltafuse.valid_tokens"] = f"{match.valid_tokens.low}..{match.valid_tokens.high}"
    return properties


def _value_info(match: Match, outputs: list[str], tokens: int | None) -> tuple[onnx.ValueInfoProto, ...]:
    dims = match.dims
    count = str(dims.tokens) if tokens is None else tokens
    shapes = (
        (count, dims.value_heads, dims.value_dim),
        (1, dims.value_heads, dims.value_dim, dims.key_dim),
    )
    return tuple(
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape)
        for name, shape in zip(outputs, shapes, strict=True)
    )


def _roles(match: Match) -> tuple[Role, ...]:
    roles = (
        match.query, match.key, match.value, match.g, match.beta, match.state, match.out, match.final_state,
    )  # fmt: skip
    return tuple(role for role in roles if role is not None)


def _pins(match: Match, *, pin: bool) -> tuple[tuple[int, int, int], ...]:
    if not pin:
        return ()
    pins = [pin for role in _roles(match) for pin in _axis_pins(match, role, "B", 1)]
    valid = match.valid_tokens
    if not isinstance(match.dims.tokens, int) and valid is not None and valid.low == valid.high:
        pins += [pin for role in _roles(match) for pin in _axis_pins(match, role, "T", valid.low)]
    return tuple(pins)


def _axis_pins(match: Match, role: Role, letter: str, size: int) -> list[tuple[int, int, int]]:
    # A merged axis of known other sizes, such as (BH), is pinned to the product.
    sizes = _sizes(match, "key" if role in (match.query, match.key) else "value", None)
    found: list[tuple[int, int, int]] = []
    for index, axis in enumerate(axes(role.layout)):
        others = [sizes[other] for other in axis if other != letter]
        if letter in axis and None not in others:
            found.append((role.value, index, size * int(np.prod([other or 1 for other in others], dtype=np.int64))))
    return found


def _notes(match: Match, *, pin: bool) -> tuple[str, ...]:
    rounded = ("query", "key", "value", "beta", "state")
    roles = [name for name in rounded if (role := getattr(match, name)) is not None and role.dtype != _FLOAT16]
    notes = [f"float16_boundary: {', '.join(roles)} rounded to float16"] if roles else []
    if not pin and not isinstance(match.dims.batch, int):
        notes.append(f"batch_one_assumed: the axis {match.dims.batch} stays in the file but must be 1")
    return tuple(notes)
