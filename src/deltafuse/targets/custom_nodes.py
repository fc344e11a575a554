"""The nodes that replace a site on Ascend: layout, casts, norm and the Custom node of the contract.

The Custom node is what torch's ``graph.op("Custom", ...)`` writes (domain ""). Three places must agree on the type of
the boundary or the converter mis-allocates: ``output_types``, ``dtype`` and the declared type of both outputs.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from deltafuse.layouts import axes
from deltafuse.match import Match, Plan, Role
from deltafuse.targets.base import Case, boundary_notes
from deltafuse.targets.emit import Attribute, Emitter, annotate, custom_properties, operand, properties, result
from deltafuse.targets.layout import Sizes, moves
from deltafuse.targets.profile import Operator, Port

_FLOAT, _FLOAT16, _INT32 = int(TensorProto.FLOAT), int(TensorProto.FLOAT16), int(TensorProto.INT32)
#: MindSpore's TypeId of an element type, the value of ``output_types``.
MINDSPORE_TYPES = {_FLOAT16: 42, _FLOAT: 43, int(TensorProto.BFLOAT16): 45}


def plan(match: Match, operator: Operator, case: Case) -> Plan:
    """The nodes that replace a site that is within the operator's limits.

    Operands are [T, H, D], the tokens of all sequences one after the other; all sequences are equally long.

    Args:
        match: the site.
        operator: what to call.
        case: token count, type of the boundary, options.
    """
    emitter = Emitter(f"{match.name}/{match.rule}", properties(match))
    feeds = _operands(emitter, match, operator, case)
    feeds["state"] = _state(emitter, match, operator, case, feeds["beta"])
    feeds |= _lengths(emitter, operator, case, feeds["query"])
    outputs = [emitter.name("out"), emitter.name("final_state")]
    fed = operator.fed(feeds)
    inputs = [feeds[operator.inputs[port].role] for port in fed]
    emitter.node("Custom", operator.op, inputs, _attributes(match, operator, case, fed), outputs)
    value_sizes = _sizes(match, "value", case)
    result(emitter, "out", outputs[0], match.out, _flat("THD", case), value_sizes, case.boundary)
    if match.final_state is not None:
        result(emitter, "final_state", outputs[1], match.final_state, "BHVK", value_sizes, case.boundary)
    nodes = emitter.finish()
    for node in nodes:
        if node.op_type == "Custom":
            annotate(node, custom_properties(match))
    info, notes = _value_info(match, case, outputs), _notes(match, operator, case)
    return Plan(match, operator.op, nodes, info, pins(match, case), notes)


def _operands(emitter: Emitter, match: Match, operator: Operator, case: Case) -> dict[str, str]:
    found: dict[str, str] = {}
    norms = {"query": match.query_norm, "key": match.key_norm}
    for name in ("query", "key", "value", "beta"):
        port, role = operator.port(name), getattr(match, name)
        if port is not None and isinstance(role, Role):
            sizes = _sizes(match, "key" if name in norms else "value", case)
            layout = _flat(port.layout, case)
            found[name] = operand(emitter, name, role, layout, sizes, norms.get(name), _dtype(port, case))
    name = "gk" if match.channel_decay else "g"
    port = operator.port(name)
    if port is not None and match.g is not None:
        layout = _flat(port.layout.replace("K", "D"), case)
        sizes = {**_sizes(match, "value", case), "D": match.dims.key_dim}
        found[name] = operand(emitter, name, match.g, layout, sizes, None, _dtype(port, case))
    return found


def _dtype(port: Port, case: Case) -> int:
    """Element type that an operand is handed over in."""
    return port.dtypes[0] if port.dtypes else case.boundary


def _flat(layout: str, case: Case) -> str:
    """A layout over the tokens of one sequence, for as many sequences as there are."""
    return layout if case.options.batch == 1 else layout.replace("T", "(BT)")


def _state(emitter: Emitter, match: Match, operator: Operator, case: Case, beta: str) -> str:
    """The initial state [B, Nv, Dv, Dk]; where it is overwritten in place, a node's output that nothing else reads.

    Such an operand must own its memory: a graph input, a constant or a view of one (Reshape) would be changed for
    whoever reads it next. A Cast or a Transpose that moves data makes such memory.
    """
    dims, port = match.dims, operator.port("state")
    in_place = port is not None and port.fresh
    if match.state is None:
        return _fresh_zero(emitter, match, case, beta) if in_place else _zero(emitter, match, case)
    sizes = _sizes(match, "value", case)
    state = operand(emitter, "state", match.state, "BHVK", sizes, None, case.boundary)
    steps = moves(match.state.layout, "BHVK", sizes)
    fresh = match.state.dtype != case.boundary or any(step.op == "Transpose" for step in steps)
    if fresh or not in_place:
        return state
    # A copy that no converter takes out: adding zero, multiplying by one and Identity are all simplified away (by
    # onnxruntime, onnxoptimizer and MindSpore Lite alike), a Gather of every index in order is not looked into, unless
    # its axis has size one.
    axis, size = (1, dims.value_heads) if dims.value_heads > 1 else (2, dims.value_dim)
    every = emitter.constant("state/every_index", np.arange(size, dtype=np.int64))
    return emitter.node("Gather", "state/copy", (state, every), {"axis": axis})


def _zero(emitter: Emitter, match: Match, case: Case) -> str:
    shape = (case.options.batch, match.dims.value_heads, match.dims.value_dim, match.dims.key_dim)
    if case.boundary == _FLOAT16:
        return emitter.constant("state/zero", np.zeros(shape, np.float16))
    # numpy has no bfloat16 of its own
    return emitter.cast("state/zero_cast", emitter.constant("state/zero", np.zeros(shape, np.float32)), _FLOAT,
                        case.boundary)  # fmt: skip


def _fresh_zero(emitter: Emitter, match: Match, case: Case, beta: str) -> str:
    """Zeros that are computed from data.

    What is computed from constants alone is folded into a constant, which the first call would overwrite for all later
    ones. So the zeros come from data: the first token's beta, which a sigmoid keeps finite.
    """
    dims, first = match.dims, beta
    if case.tokens != 1 or case.options.batch != 1:
        bounds = [emitter.constant(f"state/{value}", np.array([value], np.int64)) for value in (0, 1)]
        first = emitter.node("Slice", "state/first_beta", (beta, bounds[0], bounds[1], bounds[0]))
    shape = emitter.constant("state/heads_shape", np.array([1, dims.value_heads, 1, 1], np.int64))
    column = emitter.node("Reshape", "state/heads", (first, shape))
    half = case.boundary == _FLOAT16
    column = column if half else emitter.cast("state/heads_cast", column, case.boundary, _FLOAT)
    zeros = np.zeros((case.options.batch, 1, dims.value_dim, dims.key_dim), np.float16 if half else np.float32)
    product = emitter.node("Mul", "state/fresh_zero", (column, emitter.constant("state/zero", zeros)))
    return product if half else emitter.cast("state/fresh_zero_cast", product, _FLOAT, case.boundary)


def _lengths(emitter: Emitter, operator: Operator, case: Case, query: str) -> dict[str, str]:
    """Where each sequence lies in the token axis, and which state is whose."""
    found: dict[str, str] = {}
    batch = case.options.batch
    lengths, offsets, slots = (operator.port(role) for role in ("lengths", "offsets", "slots"))
    if lengths is not None and lengths.constant:
        assert case.tokens is not None, "a limit of the operator"
        found["lengths"] = emitter.constant("lengths", np.full(batch, case.tokens, np.int32))
    elif lengths is not None:
        sequences = emitter.constant(f"lengths/{batch}", np.array([batch], np.int64))
        found["lengths"] = emitter.node("Expand", "lengths/expand", (_count(emitter, query, batch), sequences))
    if offsets is not None:
        found["offsets"] = _offsets(emitter, _count(emitter, query, batch), batch)
    if slots is not None:
        tokens = 1 if slots.layout == "B" else case.tokens
        assert tokens is not None, "a limit of the operator"
        found["slots"] = emitter.constant("slots", np.repeat(np.arange(batch, dtype=np.int32), tokens))
    if operator.port("accepted") is not None:
        # The state is read at slot indices[start + accepted - 1]; a sequence's indices are all the same, so 1 is as
        # good as any count.
        found["accepted"] = emitter.constant("accepted", np.ones(batch, np.int32))
    return found


def _offsets(emitter: Emitter, tokens: str, batch: int) -> str:
    """Begin of each sequence and end of the last [B + 1] int32."""
    if batch == 1:
        first = emitter.constant("lengths/first", np.zeros(1, np.int32))
        return emitter.node("Concat", "lengths/offsets", (first, tokens), {"axis": 0})
    steps = emitter.constant("lengths/steps", np.arange(batch + 1, dtype=np.int32))
    return emitter.node("Mul", "lengths/offsets", (steps, tokens))


def _count(emitter: Emitter, query: str, batch: int) -> str:
    """The token count of a sequence [1] int32, from the query's shape."""
    zero, one = (emitter.constant(f"lengths/{value}", np.array([value], np.int64)) for value in (0, 1))
    shape = emitter.node("Shape", "lengths/query_shape", (query,))
    count = emitter.node("Slice", "lengths/tokens", (shape, zero, one))
    if batch > 1:
        sequences = emitter.constant(f"lengths/{batch}", np.array([batch], np.int64))
        count = emitter.node("Div", "lengths/of_one", (count, sequences))
    return emitter.node("Cast", "lengths/cast", (count,), {"to": _INT32})


def _attributes(match: Match, operator: Operator, case: Case, fed: tuple[int, ...]) -> dict[str, Attribute]:
    dims, typed = match.dims, MINDSPORE_TYPES[case.boundary]
    derived: dict[str, Attribute] = {
        "input_index": list(fed),
        "scale_value": float(np.float32(match.scale)),
        "dtype": case.boundary,
        "output_types": [typed, typed],
        "outputs_shape": outputs_shape(dims.value_heads, dims.value_dim, dims.key_dim),
    }
    return {
        rule.name: derived[rule.name] if rule.value is None else rule.value
        for rule in operator.attributes
        if rule.written
    }


def outputs_shape(value_heads: int, value_dim: int, key_dim: int) -> str:
    """Both result shapes as one flat string, each after its rank: tokens and slots are -1."""
    shapes = ((-1, value_heads, value_dim), (-1, value_heads, value_dim, key_dim))
    return "".join(f"{number}," for shape in shapes for number in (len(shape), *shape))


def _sizes(match: Match, heads_of: str, case: Case) -> Sizes:
    dims = match.dims
    heads, size = (dims.key_heads, dims.key_dim) if heads_of == "key" else (dims.value_heads, dims.value_dim)
    batch = case.options.batch
    return {"B": batch, "T": case.tokens, "H": heads, "D": size, "K": dims.key_dim, "V": dims.value_dim, "1": 1}


def _value_info(match: Match, case: Case, outputs: list[str]) -> tuple[onnx.ValueInfoProto, ...]:
    dims = match.dims
    batch = case.options.batch
    count = str(batch * dims.tokens) if case.tokens is None else batch * case.tokens
    shapes = (
        (count, dims.value_heads, dims.value_dim),
        (batch, dims.value_heads, dims.value_dim, dims.key_dim),
    )
    return tuple(
        helper.make_tensor_value_info(name, case.boundary, shape) for name, shape in zip(outputs, shapes, strict=True)
    )


def pins(match: Match, case: Case) -> tuple[tuple[int, int, int], ...]:
    """The axes that the nodes of `plan` need to be one size."""
    if not case.options.pin:
        return ()
    roles = (*match.operands(), *match.results())
    found = [pin for role in roles for pin in _axis_pins(match, role, "B", case.options.batch, case)]
    valid = match.valid_tokens
    if not isinstance(match.dims.tokens, int) and valid is not None and valid.low == valid.high:
        found += [pin for role in roles for pin in _axis_pins(match, role, "T", valid.low, case)]
    return tuple(found)


def _axis_pins(match: Match, role: Role, letter: str, size: int, case: Case) -> list[tuple[int, int, int]]:
    # A merged axis of known other sizes, such as (BH), is pinned to the product.
    sizes = {**_sizes(match, "key" if role in (match.query, match.key) else "value", case), "T": None}
    found: list[tuple[int, int, int]] = []
    for index, axis in enumerate(axes(role.layout)):
        others = [sizes[other] for other in axis if other != letter]
        if letter in axis and None not in others:
            found.append((role.value, index, size * int(np.prod([other or 1 for other in others], dtype=np.int64))))
    return found


def _notes(match: Match, operator: Operator, case: Case) -> tuple[str, ...]:
    ports = {name: operator.port(name) for name in ("query", "key", "value", "beta")}
    typed = {name: _dtype(port, case) for name, port in ports.items() if port is not None}
    gate = operator.port("gk" if match.channel_decay else "g")
    typed |= {} if gate is None else {"g": _dtype(gate, case)}
    rest: dict[str, int] = dict.fromkeys(("state", "out", "final_state"), case.boundary)
    notes = list(boundary_notes(match, typed | rest))
    if not case.options.pin and not isinstance(match.dims.batch, int):
        notes.append(
            f"batch_one_assumed: the axis {match.dims.batch} stays in the file but must be {case.options.batch}"
        )
    return tuple(notes)
