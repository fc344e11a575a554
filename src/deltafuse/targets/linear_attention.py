"""The nodes that replace a site by LinearAttention: packed operands, norm, and the operator in one of two domains.

Source: ONNX operator set 27 and ONNX Runtime's contrib operators. Heads are packed into the last axis, [B, T, H*D];
states are [B, Nv, Dk, Dv]. Batch and tokens stay as dynamic as they were: nothing is pinned.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from deltafuse.layouts import axes
from deltafuse.match import Match, Norm, Plan, Role
from deltafuse.targets.base import FLOATS, Case, boundary_notes
from deltafuse.targets.emit import Attribute, Emitter, annotate, custom_properties, operand, properties, result
from deltafuse.targets.layout import Sizes, moves
from deltafuse.targets.profile import FLOAT, Operator

LINEAR_ATTENTION = "LinearAttention"
_PACKED, _PLAIN = "BT(HD)", "BTHD"


def plan(match: Match, operator: Operator, case: Case) -> Plan:
    """The nodes that replace a site.

    Args:
        match: the site.
        operator: ai.onnx (query and key heads are repeated to the value heads) or com.microsoft (they are not).
        case: type of q, k, v, decay, beta and output.
    """
    emitter = Emitter(f"{match.name}/{match.rule}", properties(match), _sources(match))
    repeats = match.dims.value_heads // match.dims.key_heads if not operator.domain else 1
    state_dtype = _state_dtype(match, case)
    feeds = {
        "query": _packed(emitter, "query", match.query, match.query_norm, match, repeats, case),
        "key": _packed(emitter, "key", match.key, match.key_norm, match, repeats, case),
        "value": operand(emitter, "value", match.value, _PACKED, _sizes(match, "value"), None, case.boundary),
        "state": _state(emitter, match, case, state_dtype),
        "g": _decay(emitter, match, case),
        "beta": operand(emitter, "beta", match.beta, "BTH", _sizes(match, "value"), None, case.boundary),
    }  # fmt: skip
    outputs = [emitter.name("out"), emitter.name("final_state")]
    inputs = [feeds[port.role] for port in operator.inputs]
    emitter.node(
        LINEAR_ATTENTION, LINEAR_ATTENTION, inputs, _attributes(match, operator), outputs, domain=operator.domain
    )
    result(emitter, "out", outputs[0], match.out, _PACKED, _sizes(match, "value"), case.boundary)
    if match.final_state is not None:
        result(emitter, "final_state", outputs[1], match.final_state, "BHKV", _sizes(match, "value"), state_dtype)
    nodes = emitter.finish()
    for node in nodes:
        if node.op_type == LINEAR_ATTENTION:
            annotate(node, custom_properties(match))
    info = _value_info(match, case, outputs, state_dtype)
    return Plan(match, operator.op, nodes, info, pins(match, case), _notes(match, case))


def pins(_match: Match, _case: Case) -> tuple[tuple[int, int, int], ...]:
    """The axes that the nodes of `plan` need to be one size: none."""
    return ()


def _packed(emitter: Emitter, what: str, role: Role, norm: Norm | None, match: Match, repeats: int, case: Case) -> str:
    """Query or key: normalised on the heads it has, repeated where the operator cannot share them, packed."""
    sizes = _sizes(match, "key")
    if norm is None and repeats == 1:
        return operand(emitter, what, role, _PACKED, sizes, None, case.boundary)
    if repeats == 1:
        value = operand(emitter, what, role, _PLAIN, sizes, norm, case.boundary)
        return emitter.moved(f"{what}/pack", value, moves(_PLAIN, _PACKED, sizes))
    key_heads, key_dim = match.dims.key_heads, match.dims.key_dim
    column = emitter.constant("repeat/column", np.array([0, 0, key_heads, 1, key_dim], np.int64))
    counts = emitter.constant("repeat/counts", np.array([1, 1, 1, repeats, 1], np.int64))
    packed = emitter.constant("repeat/packed", np.array([0, 0, key_heads * repeats * key_dim], np.int64))
    # Repeated in the type that the model has: runtimes lack operators for narrow types, bfloat16 above all.
    have = role.dtype if norm is None else norm.dtype
    value = operand(emitter, what, role, _PLAIN, sizes, norm, have)
    value = emitter.node("Reshape", f"{what}/repeat/column", (value, column))
    value = emitter.node("Expand", f"{what}/repeat/expand", (value, counts))
    value = emitter.node("Reshape", f"{what}/repeat/pack", (value, packed))
    return emitter.cast(f"{what}/cast", value, have, case.boundary)


def _decay(emitter: Emitter, match: Match, case: Case) -> str:
    """The log decay, a number per value head or per key channel of one; "" where the rule has none."""
    if match.g is None:
        return ""
    sizes = {**_sizes(match, "value"), "D": match.dims.key_dim}
    return operand(emitter, "g", match.g, "BT(HD)" if case.per_channel else "BTH", sizes, None, case.boundary)


def _state(emitter: Emitter, match: Match, case: Case, dtype: int) -> str:
    """The initial state, "" where it may be left out."""
    dims = match.dims
    if match.state is not None:
        return operand(emitter, "state", match.state, "BHKV", _sizes(match, "value"), None, dtype)
    if dtype == case.boundary:
        return ""
    # Without a state the final one has the type of the query.
    zero = np.zeros((1, dims.value_heads, dims.key_dim, dims.value_dim), np.float32)
    value = emitter.constant("state/zero", zero)
    if dims.batch == 1:
        return emitter.cast("state/cast", value, FLOAT, dtype)
    ones = emitter.constant("state/ones", np.ones(3, np.int64))
    if isinstance(dims.batch, int):
        shape = emitter.constant("state/shape", np.array([dims.batch, 1, 1, 1], np.int64))
    else:
        shape = emitter.node("Concat", "state/shape", (emitter.size("B"), ones), {"axis": 0})
    return emitter.cast("state/cast", emitter.node("Expand", "state/expand", (value, shape)), FLOAT, dtype)


def _state_dtype(match: Match, case: Case) -> int:
    role = match.state or match.final_state
    if role is None:
        return case.boundary
    return role.dtype if role.dtype in FLOATS else FLOAT


def _attributes(match: Match, operator: Operator) -> dict[str, Attribute]:
    dims = match.dims
    derived: dict[str, Attribute] = {
        "q_num_heads": dims.key_heads if operator.domain else dims.value_heads,
        "kv_num_heads": dims.value_heads,
        "update_rule": "delta" if match.g is None else "gated_delta",
        # Written out always: 0.0 would mean 1/sqrt(Dk).
        "scale": float(np.float32(match.scale)),
    }
    return {
        rule.name: derived[rule.name] if rule.value is None else rule.value
        for rule in operator.attributes
        if rule.written
    }


def _sources(match: Match) -> dict[str, tuple[str, int]]:
    """Values that have the batch or the tokens as an axis of its own."""
    found: dict[str, tuple[str, int]] = {}
    for role in match.operands():
        for index, axis in enumerate(axes(role.layout)):
            if axis in ("B", "T"):
                found.setdefault(axis, (role.name, index))
    return found


def _sizes(match: Match, heads_of: str) -> Sizes:
    dims = match.dims
    heads, size = (dims.key_heads, dims.key_dim) if heads_of == "key" else (dims.value_heads, dims.value_dim)
    batch, tokens = (dim if isinstance(dim, int) else None for dim in (dims.batch, dims.tokens))
    return {"B": batch, "T": tokens, "H": heads, "D": size, "K": dims.key_dim, "V": dims.value_dim, "1": 1}


def _value_info(
    match: Match, case: Case, outputs: list[str], state_dtype: int
) -> tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]:
    dims = match.dims
    batch, tokens = (dim if isinstance(dim, int) else str(dim) for dim in (dims.batch, dims.tokens))
    return (
        helper.make_tensor_value_info(outputs[0], case.boundary, (batch, tokens, dims.value_heads * dims.value_dim)),
        helper.make_tensor_value_info(outputs[1], state_dtype, (batch, dims.value_heads, dims.key_dim, dims.value_dim)),
    )


def _notes(match: Match, case: Case) -> tuple[str, ...]:
    # States have a type of their own; without a first one the last one says in which they are computed.
    states, other = _state_dtype(match, case), case.boundary
    operands: dict[str, int] = dict.fromkeys(("query", "key", "value", "g", "beta"), other)
    return boundary_notes(match, operands | {"state": states, "out": other, "final_state": states})
