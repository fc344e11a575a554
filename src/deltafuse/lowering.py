"""Lowers the fused Custom nodes to plain ONNX operators that onnxruntime runs.

Written from the kernels' documentation (MindSpore Lite custom kernels, ascend_300iduo), so that it is a second opinion
on what a target emits. With S a state of [Dv, Dk], per token t and value head h, which reads key head h // (Nv / Nk):

    S  <- S * exp(g + gk)             decay in log space, both optional; gk is per key channel
    d   = beta * (v - S k)
    S  <- S + d k^T
    out = scale_value * S q           scale_value is 1.0 where it is not given

``actual_seq_lengths`` parts the token axis into sequences. ChunkGatedDeltaRule has one initial and one final state a
sequence; RecurrentGatedDeltaRule reads slot ``indices[start + accepted - 1]`` and writes slot ``indices[t]`` after each
token.

The lowered graph rounds its operands at the boundary to the type that the node says (float16, as a rule), computes in
float32 and rounds the results: the target's precision. `deltafuse.probe.to_double` turns all of that into double, for
proofs. `lower_node` leaves the rounding out where that is asked for: operands of any float type, results in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from deltafuse.errors import UserError
from deltafuse.reasons import TEXTS, Reason

TEXTS["custom-malformed"] = "the Custom node {node} is not as its kernel needs it: {fault}; fuse the model again"

CHUNK = "ChunkGatedDeltaRule"
RECURRENT = "RecurrentGatedDeltaRule"

_COMMON = ("query", "key", "value", "beta", "actual_seq_lengths")
_REQUIRED = {CHUNK: (*_COMMON, "initial_state"), RECURRENT: (*_COMMON, "state", "ssm_state_indices")}

#: Begin of each sequence and end of the last, in an older signature of ChunkGatedDeltaRule.
_OFFSETS = "cu_seqlens"

_BOOL, _INT64 = TensorProto.BOOL, TensorProto.INT64
_HALF, _SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT
_BOUNDARIES = (_HALF, _SINGLE, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Call:
    """A fused node as the kernel sees it.

    Attributes:
        op: attribute ``type``.
        ports: input name -> value, absent optional inputs left out.
        out, state: names of the results; "" where a result is not named.
        scale: ``scale_value``.
        dtype: element type that the kernel takes and gives, attribute ``dtype``; float16 where it is not given.
    """

    op: str
    ports: Mapping[str, str]
    out: str
    state: str
    scale: float
    dtype: int = TensorProto.FLOAT16


def fused_type(node: NodeProto) -> str:
    """The kernel that a node calls, "" where it is no fused node of ours."""
    if node.op_type != "Custom" or node.domain:
        return ""
    kinds = [attribute.s.decode() for attribute in node.attribute if attribute.name == "type"]
    return kinds[0] if kinds and kinds[0] in (CHUNK, RECURRENT) else ""


def read_call(node: NodeProto) -> Call | Reason:
    """Reads a fused node: which value feeds which port is told by ``input_index``.

    Returns:
        ``custom-malformed`` where the attributes do not fit the inputs, or a port that the kernel needs is not fed.
    """
    attributes = {attribute.name: attribute for attribute in node.attribute}
    names = [name.decode() for name in attributes["input_names"].strings] if "input_names" in attributes else []
    index = list(attributes["input_index"].ints) if "input_index" in attributes else list(range(len(node.input)))
    if len(index) != len(node.input) or not all(0 <= port < len(names) for port in index):
        return Reason(
            "custom-malformed", {"node": node.name, "fault": "input_index does not fit inputs and input_names"}
        )
    ports = {names[port]: value for port, value in zip(index, node.input, strict=True) if value}
    op = fused_type(node)
    missing = [name for name in _needed(op, ports) if name not in ports]
    if missing:
        return Reason("custom-malformed", {"node": node.name, "fault": f"no input for {', '.join(missing)}"})
    outputs = [*node.output, "", ""]
    scale = attributes["scale_value"].f if "scale_value" in attributes else 1.0
    dtype = attributes["dtype"].i if "dtype" in attributes else _HALF
    return Call(op, ports, outputs[0], outputs[1], scale, dtype if dtype in _BOUNDARIES else _HALF)


def _needed(op: str, ports: Mapping[str, str]) -> tuple[str, ...]:
    # An older signature parts the tokens by where each sequence begins and ends.
    return tuple(_OFFSETS if name == "actual_seq_lengths" and _OFFSETS in ports else name for name in _REQUIRED[op])


def lower_nodes(nodes: Iterable[NodeProto], scales: Mapping[str, float] | None = None) -> list[NodeProto]:
    """Replaces each fused node by plain operators (opset 13 or later); other nodes are the same objects, order is kept.

    Args:
        nodes: nodes of one graph, e.g. those of a plan.
        scales: node name -> scale to use in place of ``scale_value``, whose float32 hides the exact one.

    Raises:
        UserError: a fused node is not as the kernel's contract says.
    """
    lowered: list[NodeProto] = []
    for node in nodes:
        lowered += lower_node(node, (scales or {}).get(node.name)) if fused_type(node) else [node]
    return lowered


def lower_model(model: onnx.ModelProto, scales: Mapping[str, float] | None = None) -> onnx.ModelProto:
    """A copy of a model in which each fused node is plain operators at the target's precision; see `lower_nodes`.

    External data stays where it is.
    """
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    del lowered.graph.node[:]
    lowered.graph.node.extend(lower_nodes(model.graph.node, scales))
    return lowered


class Writer:
    """Collects nodes, and names what they write below one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[NodeProto] = []

    def add(self, op_type: str, inputs: Sequence[str], output: str = "", **attributes: object) -> str:
        """A node; returns its only output."""
        name = output or f"{self.prefix}/{len(self.nodes)}_{op_type}"
        node = helper.make_node(op_type, list(inputs), [name], f"{self.prefix}/{len(self.nodes)}")
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return name

    def constant(self, value: object, dtype: type[np.generic]) -> str:
        """A Constant node."""
        tensor = numpy_helper.from_array(np.array(value, dtype))
        return self.add("Constant", (), value=tensor)

    def shaped(self, value: str, shape: Sequence[int], output: str = "") -> str:
        """Reshape; 0 keeps a size, -1 is what is left."""
        return self.add("Reshape", (value, self.constant(shape, np.int64)), output)

    def size(self, value: str, axis: int, *, keep: bool = False) -> str:
        """The size of an axis, int64: a scalar, or a list of one with `keep`."""
        index = self.constant([axis] if keep else axis, np.int64)
        return self.add("Gather", (self.add("Shape", (value,)), index), axis=0)

    def count(self, size: str) -> str:
        """0, 1, ... below the scalar `size`."""
        return self.add("Range", (self.constant(0, np.int64), size, self.constant(1, np.int64)))


def lower_node(node: NodeProto, scale: float | None = None, *, rounding: bool = True) -> list[NodeProto]:
    """One fused node as plain operators (opset 13 or later).

    Args:
        node: what `fused_type` knows.
        scale: to use in place of ``scale_value``.
        rounding: operands and results are rounded to the kernel's type; else operands of any float type are taken as
            they are and the results are float32.

    Raises:
        UserError: the node is not as the kernel's contract says.
    """
    call = read_call(node)
    if isinstance(call, Reason):
        raise UserError(call.code, call.text)
    writer = Writer(f"{node.name or node.output[0]}/lowered")
    boundary = call.dtype if rounding else _SINGLE
    ports = {name: _operand(writer, name, value, boundary) for name, value in call.ports.items()}
    if _OFFSETS in ports:
        ports["actual_seq_lengths"] = _lengths(writer, ports[_OFFSETS])
    state = ports["state" if call.op == RECURRENT else "initial_state"]
    tokens = _per_token(writer, ports) + _schedule(writer, call, ports)
    # In double until the last moment, so that a proof in double sees all digits.
    factor = writer.constant(call.scale if scale is None else scale, np.float64)
    factor = writer.add("Cast", (factor,), to=_SINGLE)
    first = writer.add("Gather", (state, writer.constant(0, np.int64)), axis=0)
    slots = writer.count(writer.size(state, 0))
    results = [f"{writer.prefix}/{name}" for name in ("last", "store", "out")]
    body = _body(f"{writer.prefix}/step", factor, slots)
    scan = helper.make_node(
        "Scan", [first, state, *tokens], results, f"{writer.prefix}/scan", body=body, num_scan_inputs=len(tokens)
    )
    writer.nodes.append(scan)
    for value, output in ((results[2], call.out), (results[1], call.state)):
        if output:
            writer.add("Cast", (value,), output, to=boundary)
    return writer.nodes


def _lengths(writer: Writer, offsets: str) -> str:
    first, second, end = (writer.constant([number], np.int64) for number in (0, 1, np.iinfo(np.int64).max))
    ends = writer.add("Slice", (offsets, second, end, first))
    return writer.add("Sub", (ends, writer.add("Slice", (offsets, first, writer.constant([-1], np.int64), first))))


def _operand(writer: Writer, name: str, value: str, boundary: int) -> str:
    if name in ("actual_seq_lengths", _OFFSETS, "ssm_state_indices", "num_accepted_tokens"):
        return writer.add("Cast", (value,), to=_INT64)
    if boundary != _SINGLE and name not in ("g", "gk"):
        value = writer.add("Cast", (value,), to=boundary)
    return writer.add("Cast", (value,), to=_SINGLE)


def _per_token(writer: Writer, ports: Mapping[str, str]) -> list[str]:
    """What each token reads: q, k [Nv, Dk] (heads repeated), v [Nv, Dv], beta [Nv], log decay [Nv, 1, 1 or Dk]."""
    key_heads, value_heads = writer.size(ports["query"], 1), writer.size(ports["value"], 1)
    group = writer.add("Div", (value_heads, key_heads))
    head = writer.add("Div", (writer.count(value_heads), group))
    query, key = (writer.add("Gather", (ports[name], head), axis=1) for name in ("query", "key"))
    return [query, key, ports["value"], ports["beta"], _log_decay(writer, ports)]


def _log_decay(writer: Writer, ports: Mapping[str, str]) -> str:
    parts = [writer.shaped(ports[name], shape) for name, shape in _DECAYS.items() if name in ports]
    if not parts:
        zero = numpy_helper.from_array(np.zeros(1, np.float32))
        shape = writer.add("Shape", (writer.shaped(ports["beta"], (0, 0, 1, 1)),))
        return writer.add("ConstantOfShape", (shape,), value=zero)
    return parts[0] if len(parts) == 1 else writer.add("Add", parts)


_DECAYS = {"g": (0, 0, 1, 1), "gk": (0, 0, 1, -1)}


def _schedule(writer: Writer, call: Call, ports: Mapping[str, str]) -> list[str]:
    """Per token: slot to read, slot to write, whether a sequence starts here, whether any sequence has the token."""
    lengths = ports["actual_seq_lengths"]
    token = writer.count(writer.size(ports["value"], 0))
    ends = writer.add("CumSum", (lengths, writer.constant(0, np.int64)))
    passed = writer.add("GreaterOrEqual", (writer.shaped(token, (-1, 1)), writer.shaped(ends, (1, -1))))
    sequence = writer.add(
        "ReduceSum", (writer.add("Cast", (passed,), to=_INT64), writer.constant([1], np.int64)), keepdims=0
    )
    total = writer.size(lengths, 0)
    valid = writer.add("Less", (sequence, total))
    sequence = writer.add("Min", (sequence, writer.add("Sub", (total, writer.constant(1, np.int64)))))
    starts = writer.add("Gather", (writer.add("Sub", (ends, lengths)), sequence), axis=0)
    first = writer.add("Equal", (token, starts))
    if call.op == CHUNK:
        return [sequence, sequence, first, valid]
    indices = ports["ssm_state_indices"]
    if "num_accepted_tokens" in ports:
        accepted = writer.add("Gather", (ports["num_accepted_tokens"], sequence), axis=0)
        starts = writer.add("Sub", (writer.add("Add", (starts, accepted)), writer.constant(1, np.int64)))
    return [writer.add("Gather", (indices, starts), axis=0), indices, first, valid]


def _body(prefix: str, factor: str, slots: str) -> onnx.GraphProto:
    """One token: the rule of the module's docstring, between reading a slot and writing one."""
    writer = Writer(prefix)
    names = ("state", "store", "query", "key", "value", "beta", "log_decay", "read", "write", "first", "valid")
    types = (*[_SINGLE] * 7, _INT64, _INT64, _BOOL, _BOOL)
    inputs = {name: f"{prefix}/{name}" for name in names}
    query, key = (writer.shaped(inputs[name], (0, -1, 1)) for name in ("query", "key"))
    value, beta = writer.shaped(inputs["value"], (0, -1, 1)), writer.shaped(inputs["beta"], (-1, 1, 1))

    stored = writer.add("Gather", (inputs["store"], inputs["read"]), axis=0)
    state = writer.add("Where", (inputs["first"], stored, inputs["state"]))
    state = writer.add("Mul", (state, writer.add("Exp", (inputs["log_decay"],))))
    error = writer.add("Sub", (value, writer.add("MatMul", (state, key))))
    delta = writer.add("Mul", (beta, error))
    update = writer.add("Mul", (delta, writer.shaped(inputs["key"], (0, 1, -1))))
    state = writer.add("Add", (state, update), f"{prefix}/next_state")
    out = writer.add("Mul", (writer.shaped(writer.add("MatMul", (state, query)), (0, -1)), factor))
    out = writer.add("Where", (inputs["valid"], out, writer.add("Cast", (writer.constant(0, np.float32),), to=_SINGLE)),
                     f"{prefix}/token_out")  # fmt: skip

    here = writer.add("And", (writer.add("Equal", (slots, inputs["write"])), inputs["valid"]))
    store = writer.add("Where", (writer.shaped(here, (-1, 1, 1, 1)), state, inputs["store"]), f"{prefix}/next_store")
    declared = [
        helper.make_tensor_value_info(inputs[name], dtype, None) for name, dtype in zip(names, types, strict=True)
    ]
    # onnxruntime allocates a Scan's results by the declared rank.
    ranks = ((state, 3), (store, 4), (out, 2))
    results = [helper.make_tensor_value_info(name, _SINGLE, [None] * rank) for name, rank in ranks]
    return helper.make_graph(writer.nodes, "token", declared, results)
