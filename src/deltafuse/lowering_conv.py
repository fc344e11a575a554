"""Lowers CausalConvWithState (com.microsoft version 1, ai.onnx opset 27) to plain ONNX operators (opset 13 or later).

For an onnxruntime that has no kernel for it, and for proofs. Written from the operators' documentation (ONNX operator
set 27; ONNX Runtime's contrib operators). With s the state of k-1 columns, zeros where none is given, and u = [s, x]:

    output[b, c, t]   = act(bias[c] + sum over i < k of weight[c, 0, i] * u[b, c, t + i])
    present_state     = the last k-1 columns of u
    act(y)            = y, or y / (1 + exp(-y)) where ``activation`` is silu or swish

What is inside is float32, or the operands' type where that is not told; results have the operands' type. The kernel
size is read from the weight when the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto, helper

from deltafuse.errors import UserError
from deltafuse.kernels import has_kernel
from deltafuse.lowering import Writer

CAUSAL_CONV = "CausalConvWithState"
ACTIVATIONS = ("none", "silu", "swish")
_DOMAINS = ("", "ai.onnx", "com.microsoft")
_SINGLE = int(TensorProto.FLOAT)
_END = np.iinfo(np.int64).max
#: Attributes of the contrib operator alone, and their value in the form that both operators have.
PLAIN = {"ndim": 1, "dilation": 1, "state_window": 0, "state_length": 0, "channels_last": 0}


def is_causal_conv(op_type: str, domain: str) -> bool:
    """Whether this is one of the two operators."""
    return op_type == CAUSAL_CONV and domain in _DOMAINS


def runtime_has_conv(domain: str, dtype: int = _SINGLE) -> bool:
    """Whether the installed onnxruntime runs CausalConvWithState of this domain on operands of this element type."""
    node = helper.make_node(CAUSAL_CONV, ["x", "w"], ["y", "s"], domain=domain)
    ends = [
        helper.make_tensor_value_info(name, dtype, shape)
        for name, shape in (("x", [1, 2, 3]), ("w", [2, 1, 2]), ("y", [1, 2, 3]), ("s", [1, 2, 1]))
    ]
    return has_kernel(node, ends[:2], ends[2:])


def lower_conv(node: NodeProto, dtype: int | None = None) -> list[NodeProto]:
    """One node as plain operators.

    Args:
        node: what `is_causal_conv` knows.
        dtype: element type of its operands and results, to compute in float32; None to compute in their type, which is
            for proofs in double.

    Raises:
        UserError: ``conv-malformed``: a form that the two operators do not have in common, or too few operands.
    """
    inputs, (output, state) = [*node.input, "", "", "", ""][:4], [*node.output, "", ""][:2]
    activation = _activation(node)
    writer = Writer(f"{node.name or output or state}/lowered")
    x, weight, bias, past = (_single(writer, value, dtype) if value else "" for value in inputs)
    joined = _joined(writer, x, weight, past)
    if output:
        value = _windows(writer, joined, x, weight)
        if bias:
            value = writer.add("Add", (value, writer.shaped(bias, (1, -1, 1))))
        if activation != "none":
            value = writer.add("Mul", (value, writer.add("Sigmoid", (value,))))
        _result(writer, value, output, dtype)
    if state:
        ends = (writer.size(x, 2, keep=True), writer.constant([_END], np.int64), writer.constant([2], np.int64))
        _result(writer, writer.add("Slice", (joined, *ends)), state, dtype)
    return writer.nodes


def _activation(node: NodeProto) -> str:
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    activation = bytes(found.get("activation", b"none")).decode(errors="replace")
    faults = [f"activation is {activation!r}"] if activation not in ACTIVATIONS else []
    faults += [f"{name} is {found[name]}" for name, plain in PLAIN.items() if found.get(name, plain) != plain]
    if len([name for name in node.input[:2] if name]) < len(("input", "weight")):
        faults.append("input or weight is missing")
    if faults:
        raise UserError("conv-malformed", f"{CAUSAL_CONV} {node.name} has no plain form here: {', '.join(faults)}")
    return activation


def _single(writer: Writer, value: str, dtype: int | None) -> str:
    return value if dtype in (None, _SINGLE) else writer.add("Cast", (value,), to=_SINGLE)


def _result(writer: Writer, value: str, output: str, dtype: int | None) -> None:
    if dtype is None:
        writer.add("Identity", (value,), output)
    else:
        writer.add("Cast", (value,), output, to=dtype)


def _joined(writer: Writer, x: str, weight: str, past: str) -> str:
    """State and input, one behind the other: [B, C, k - 1 + T]."""
    if past:
        return writer.add("Concat", (past, x), axis=2)
    carried = writer.add("Sub", (writer.size(weight, 2, keep=True), writer.constant([1], np.int64)))
    parts = (writer.constant([0, 0], np.int64), carried, writer.constant([0, 0, 0], np.int64))
    return writer.add("Pad", (x, writer.add("Concat", parts, axis=0)))


def _windows(writer: Writer, joined: str, x: str, weight: str) -> str:
    """Sum over the taps of what each token sees: [B, C, T, k] times [C, 1, k]."""
    token = writer.shaped(writer.count(writer.size(x, 2)), (-1, 1))
    index = writer.add("Add", (token, writer.count(writer.size(weight, 2))))
    seen: Sequence[str] = (writer.add("Gather", (joined, index), axis=2), weight)
    return writer.add("ReduceSum", (writer.add("Mul", seen), writer.constant([3], np.int64)), keepdims=0)
