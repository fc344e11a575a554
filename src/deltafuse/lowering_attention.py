"""Lowers LinearAttention (com.microsoft version 1, ai.onnx opset 27) to plain ONNX operators.

For an onnxruntime that has no kernel for it. Written from the operators' documentation (ONNX operator set 27; ONNX
Runtime's contrib operators). With S a state of [Dk, Dv], per token and key/value head:

    S  <- exp(decay) * S              ``gated`` rules; a number per head, or one per key channel
    d   = beta * (v - S^T k)          ``delta`` rules; else d = v
    S  <- S + k d^T
    o   = scale * S^T q               scale 0.0 means 1/sqrt(Dk)

Heads are packed into the last axis. More query heads than states share states in consecutive groups; fewer query or key
heads than states (com.microsoft only) are shared by states in consecutive groups.

What is inside is float32 (double where the operands are); results have the operands' types.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from deltafuse.errors import UserError
from deltafuse.kernels import has_kernel
from deltafuse.lowering import Writer
from deltafuse.wording import number

LINEAR_ATTENTION = "LinearAttention"
MICROSOFT = "com.microsoft"
_RULES = ("linear", "gated", "delta", "gated_delta")
#: Attributes of the contrib operator alone, and their value in the form that both operators have.
PLAIN = {"state_window": 0}
_PORTS = ("query", "key", "value", "past_state", "decay", "beta")
_SINGLE, _DOUBLE = int(TensorProto.FLOAT), int(TensorProto.DOUBLE)


@dataclass(frozen=True)
class Attention:
    """A LinearAttention node.

    Attributes:
        ports: input name -> value, absent inputs left out.
        output, present_state: names of the results, "" where a result is not named.
        query_heads, states: attributes ``q_num_heads`` and ``kv_num_heads``.
        rule: attribute ``update_rule``.
        scale: attribute ``scale``.
    """

    ports: dict[str, str]
    output: str
    present_state: str
    query_heads: int
    states: int
    rule: str
    scale: float


def is_linear_attention(op_type: str, domain: str) -> bool:
    """Whether this is one of the two operators."""
    return op_type == LINEAR_ATTENTION and domain in ("", "ai.onnx", MICROSOFT)


def runtime_has(domain: str, dtype: int = _SINGLE) -> bool:
    """Whether the installed onnxruntime runs LinearAttention of this domain on operands of this element type."""
    inputs = [helper.make_tensor_value_info(name, dtype, [1, 1, 4]) for name in _PORTS[:3]]
    gates = [helper.make_tensor_value_info(name, dtype, [1, 1, 1]) for name in _PORTS[4:]]
    state = [helper.make_tensor_value_info(name, dtype, [1, 1, 4, 4]) for name in ("past_state", "present_state")]
    output = helper.make_tensor_value_info("output", dtype, [1, 1, 4])
    node = helper.make_node(
        LINEAR_ATTENTION, list(_PORTS), ["output", "present_state"], domain=domain, q_num_heads=1, kv_num_heads=1
    )
    return has_kernel(node, [*inputs, state[0], *gates], [output, state[1]])


def read_attention(node: NodeProto) -> Attention:
    """Reads a node.

    Raises:
        UserError: ``attention-malformed``.
    """
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    ports = {name: value for name, value in zip(_PORTS, node.input, strict=False) if value}
    outputs = [*node.output, "", ""]
    rule = bytes(found.get("update_rule", b"gated_delta")).decode()
    heads = (int(found.get("q_num_heads", 0)), int(found.get("kv_num_heads", 0)))
    call = Attention(ports, outputs[0], outputs[1], *heads, rule, float(found.get("scale", 0.0)))
    others = [f"its {name} is {found[name]}" for name, plain in PLAIN.items() if found.get(name, plain) != plain]
    fault = ", ".join(others) or _fault(call)
    if fault:
        raise UserError(
            "attention-malformed",
            f"the LinearAttention node {node.name or outputs[0]} is not as its operator needs it: {fault}",
        )
    return call


def _fault(call: Attention) -> str:
    if call.rule not in _RULES:
        return f"update_rule {call.rule!r} is none of {', '.join(_RULES)}"
    if min(call.query_heads, call.states) < 1:
        return "q_num_heads and kv_num_heads must be given"
    if call.query_heads % call.states and call.states % call.query_heads:
        return f"{number(call.query_heads, 'query head')} and {number(call.states, 'state')} cannot be shared in groups"
    needed = [*_PORTS[:3], *(["decay"] if "gated" in call.rule else []), *(["beta"] if "delta" in call.rule else [])]
    missing = [name for name in needed if name not in call.ports]
    return f"no input for {', '.join(missing)}" if missing else ""


def lower_attention(node: NodeProto, dtype: int, state_dtype: int, scale: float | None = None) -> list[NodeProto]:
    """One node as plain operators (opset 13 or later).

    Args:
        node: LinearAttention of either domain.
        dtype: element type of its query, and so of its output.
        state_dtype: element type of its states.
        scale: to use in place of the attribute, whose float32 hides the exact one.

    Raises:
        UserError: ``attention-malformed``.
    """
    call = read_attention(node)
    writer = Writer(f"{node.name or call.output or call.present_state}/lowered")
    kind = _DOUBLE if dtype == _DOUBLE else _SINGLE
    ports = {name: writer.add("Cast", (value,), to=kind) for name, value in call.ports.items()}
    call = replace(call, ports=ports, scale=call.scale if scale is None else scale)
    unpacked, key_dim = _unpacked(writer, call)
    factor = writer.add("Cast", (_scale(writer, call, key_dim),), to=kind)
    state = ports.get("past_state") or writer.add("Cast", (_zeros(writer, call, unpacked["value"], key_dim),), to=kind)
    results = [f"{writer.prefix}/{name}" for name in ("last", "out")]
    body = _body(f"{writer.prefix}/step", call, list(unpacked), kind, factor)
    axes = [1] * len(unpacked)
    scan = helper.make_node(
        "Scan", [state, *unpacked.values()], results, f"{writer.prefix}/scan",
        body=body, num_scan_inputs=len(axes), scan_input_axes=axes, scan_output_axes=[1],
    )  # fmt: skip
    writer.nodes.append(scan)
    if call.output:
        writer.add("Cast", (writer.shaped(results[1], (0, 0, -1)),), call.output, to=dtype)
    if call.present_state:
        writer.add("Cast", (results[0],), call.present_state, to=state_dtype)
    return writer.nodes


def _unpacked(writer: Writer, call: Attention) -> tuple[dict[str, str], str]:
    """What each token reads, by name, as [B, T, heads, ...]; the key head size, int64 [1].

    query [.., Hq, 1, Dk], key [.., N, 1, Dk] (heads repeated to the N states), value [.., N, 1, Dv], decay
    [.., N, 1 or Dk, 1], beta [.., N or 1, 1, 1].
    """
    ports, states = call.ports, call.states
    query = writer.shaped(ports["query"], (0, 0, call.query_heads, 1, -1))
    key_dim = writer.size(query, 4, keep=True)
    shape = writer.add("Concat", (writer.constant([0, 0, -1, 1], np.int64), key_dim), axis=0)
    key = writer.add("Reshape", (ports["key"], shape))
    # state h reads key head h // (N / Nk)
    group = writer.add("Div", (writer.constant([states], np.int64), writer.size(key, 2, keep=True)))
    head = writer.add("Div", (writer.constant(np.arange(states), np.int64), group))
    found = {"query": query, "key": writer.add("Gather", (key, head), axis=2)}
    found["value"] = writer.shaped(ports["value"], (0, 0, states, 1, -1))
    if "gated" in call.rule:
        found["decay"] = writer.shaped(ports["decay"], (0, 0, states, -1, 1))
    if "delta" in call.rule:
        found["beta"] = writer.shaped(ports["beta"], (0, 0, -1, 1, 1))
    return found, key_dim


def _scale(writer: Writer, call: Attention, key_dim: str) -> str:
    if call.scale:
        return writer.constant(call.scale, np.float64)
    size = writer.add("Cast", (writer.shaped(key_dim, ()),), to=_DOUBLE)
    return writer.add("Reciprocal", (writer.add("Sqrt", (size,)),))


def _zeros(writer: Writer, call: Attention, value: str, key_dim: str) -> str:
    sizes = (
        writer.size(value, 0, keep=True), writer.constant([call.states], np.int64), key_dim,
        writer.size(value, 4, keep=True),
    )  # fmt: skip
    zero = numpy_helper.from_array(np.zeros(1, np.float32))
    return writer.add("ConstantOfShape", (writer.add("Concat", sizes, axis=0),), value=zero)


def _body(prefix: str, call: Attention, names: list[str], kind: int, scale: str) -> onnx.GraphProto:
    """One token of every sequence: the rule of the module's docstring."""
    writer = Writer(prefix)
    inputs = {name: f"{prefix}/{name}" for name in ("state", *names)}
    state, delta = inputs["state"], inputs["value"]
    if "decay" in inputs:
        state = writer.add("Mul", (state, writer.add("Exp", (inputs["decay"],))))
    if "beta" in inputs:
        read = writer.add("MatMul", (inputs["key"], state))
        delta = writer.add("Mul", (inputs["beta"], writer.add("Sub", (delta, read))))
    column = writer.add("Transpose", (inputs["key"],), perm=[0, 1, 3, 2])
    state = writer.add("Add", (state, writer.add("Mul", (column, delta))), f"{prefix}/next_state")
    heads = max(call.query_heads, call.states)
    query, seen = (
        value if count == heads else _repeated(writer, value, heads, count)
        for value, count in ((inputs["query"], call.query_heads), (state, call.states))
    )
    out = writer.add("Mul", (writer.add("MatMul", (query, seen)), scale), f"{prefix}/token_out")
    declared = [helper.make_tensor_value_info(name, kind, None) for name in inputs.values()]
    # onnxruntime allocates a Scan's results by the declared rank.
    results = [helper.make_tensor_value_info(name, kind, [None] * 4) for name in (state, out)]
    return helper.make_graph(writer.nodes, "token", declared, results)


def _repeated(writer: Writer, value: str, heads: int, count: int) -> str:
    index = writer.constant(np.arange(heads) // (heads // count), np.int64)
    return writer.add("Gather", (value, index), axis=1)
