"""Custom nodes of a decode graph whose cache has a fixed capacity: IncreFlashAttention and Scatter.

Written from the operators' public documentation (CANN); that exporters write them under these input names is assumed.

IncreFlashAttention, one token of query against a cache: ``softmax(scale_value * q k^T + pse_shift) v``. Entries from
``actual_seq_lengths`` on, and those that ``atten_mask`` marks, are not seen. ``input_layout`` is BSH, BNSD or BSND,
``num_key_value_heads`` 0 means as many as ``num_heads``. Inside is float32, the result has the query's type.

Scatter with ``reduce`` "update": ``var`` with ``updates`` written along ``axis`` from ``indices[b]`` on, for each b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from deltafuse.lowering import Writer

OPERATORS = ("IncreFlashAttention", "Scatter")
_FLOAT, _INT64, _BOOL = int(TensorProto.FLOAT), int(TensorProto.INT64), int(TensorProto.BOOL)
_LOWEST = -1e30
#: Attributes in Python: numbers, bytes and lists of these.
Attributes = Mapping[str, Any]


def lower(node: NodeProto, types: Mapping[str, int]) -> list[NodeProto]:
    """One Custom node, whose ``type`` is one of `OPERATORS`, as plain operators of opset 13 or later.

    Args:
        node: the node.
        types: element types of the values it reads, as far as they are known.

    Raises:
        ValueError: an attribute has a value that is not known here, or an input is missing.
    """
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    writer = Writer(f"{node.name or node.output[0]}/lowered")
    ports = _ports(node, attributes)
    if _text(attributes, "type", "") == "Scatter":
        _scatter(writer, ports, attributes, node.output[0])
    else:
        _attention(writer, ports, attributes, types, node.output[0])
    return writer.nodes


def _ports(node: NodeProto, attributes: Attributes) -> dict[str, str]:
    """Names of inputs -> values: a list input such as ``key0`` goes by its stem."""
    names = [bytes(name).decode() for name in attributes.get("input_names", ())]
    index = [int(place) for place in attributes.get("input_index", ())] or list(range(len(node.input)))
    if len(index) != len(node.input) or not all(0 <= place < len(names) for place in index):
        raise ValueError("input_index does not fit inputs and input_names")
    return {names[place].rstrip("0"): value for place, value in zip(index, node.input, strict=True) if value}


def _text(attributes: Attributes, name: str, default: str) -> str:
    value = attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(attributes: Attributes, name: str, default: float) -> float:
    value = attributes.get(name, default)
    return float(value) if isinstance(value, int | float) else default


def _needed(ports: Mapping[str, str], name: str) -> str:
    if name not in ports:
        raise ValueError(f"there is no input {name}")
    return ports[name]


def _attention(
    writer: Writer, ports: Mapping[str, str], attributes: Attributes, types: Mapping[str, int], output: str
) -> None:
    layout = _text(attributes, "input_layout", "BSH")
    if layout not in ("BSH", "BNSD", "BSND"):
        raise ValueError(f"input_layout {layout} is none of BSH, BNSD, BSND")
    heads = int(_number(attributes, "num_heads", 1))
    shared = int(_number(attributes, "num_key_value_heads", 0)) or heads
    query = _heads_first(writer, _needed(ports, "query"), layout, heads)
    key, value = (_heads_first(writer, _needed(ports, name), layout, shared) for name in ("key", "value"))
    if heads != shared:
        order = writer.constant(np.arange(heads) // (heads // shared), np.int64)
        key, value = (writer.add("Gather", (part, order), axis=1) for part in (key, value))
    scale = writer.constant(_number(attributes, "scale_value", 1.0), np.float32)
    scores = writer.add("MatMul", (query, writer.add("Transpose", (key,), perm=[0, 1, 3, 2])))
    scores = writer.add("Mul", (scores, scale))
    if "pse_shift" in ports:
        scores = writer.add("Add", (scores, writer.add("Cast", (ports["pse_shift"],), to=_FLOAT)))
    for hidden in _hidden(writer, ports, key):
        scores = writer.add("Where", (hidden, writer.constant(_LOWEST, np.float32), scores))
    result = writer.add("MatMul", (writer.add("Softmax", (scores,), axis=-1), value))
    if layout != "BNSD":
        result = writer.add("Transpose", (result,), perm=[0, 2, 1, 3])
    if layout == "BSH":
        result = writer.shaped(result, (0, 0, -1))
    writer.add("Cast", (result,), output, to=types.get(ports["query"], TensorProto.FLOAT16))


def _heads_first(writer: Writer, value: str, layout: str, heads: int) -> str:
    """[B, N, S, D] in float32."""
    value = writer.add("Cast", (value,), to=_FLOAT)
    if layout == "BSH":
        value = writer.shaped(value, (0, 0, heads, -1))
    return value if layout == "BNSD" else writer.add("Transpose", (value,), perm=[0, 2, 1, 3])


def _hidden(writer: Writer, ports: Mapping[str, str], key: str) -> Sequence[str]:
    """Conditions [B, 1, 1, S] under which an entry of the cache is not seen."""
    found: list[str] = []
    if "actual_seq_lengths" in ports:
        entry = writer.shaped(writer.count(writer.size(key, 2)), (1, 1, 1, -1))
        length = writer.shaped(writer.add("Cast", (ports["actual_seq_lengths"],), to=_INT64), (-1, 1, 1, 1))
        found.append(writer.add("GreaterOrEqual", (entry, length)))
    mask = next((ports[name] for name in ("atten_mask", "attn_mask") if name in ports), None)
    if mask is not None:
        whole = writer.add("Reshape", (mask, _mask_shape(writer, mask)))
        found.append(writer.add("Cast", (whole,), to=_BOOL))
    return found


def _mask_shape(writer: Writer, mask: str) -> str:
    """[B, 1, 1, S] of a mask with any number of ones between."""
    shape = writer.add("Shape", (mask,))
    first, last = (writer.add("Gather", (shape, writer.constant([at], np.int64)), axis=0) for at in (0, -1))
    return writer.add("Concat", (first, writer.constant([1, 1], np.int64), last), axis=0)


def _scatter(writer: Writer, ports: Mapping[str, str], attributes: Attributes, output: str) -> None:
    reduce = _text(attributes, "reduce", "update")
    if reduce != "update":
        raise ValueError(f"reduce {reduce} is not update")
    var, updates = _needed(ports, "var"), _needed(ports, "updates")
    axis = int(_number(attributes, "axis", 0))
    one, zero = writer.constant(1, np.int64), writer.constant(0, np.int64)
    shape = writer.add("Shape", (var,))
    rank = writer.add("Size", (shape,))
    place = writer.constant(axis, np.int64) if axis >= 0 else writer.add("Add", (rank, writer.constant(axis, np.int64)))
    size, count = (
        writer.add("Gather", (writer.add("Shape", (value,)), place), axis=0) for value in (var, updates)
    )
    # Position of each entry of `var` among the updates, [B, 1, .., S, .., 1].
    ones = writer.add("Expand", (one, writer.shaped(rank, (1,))))
    along = writer.add("ScatterElements", (ones, writer.shaped(place, (1,)), writer.shaped(size, (1,))), axis=0)
    entry = writer.add("Reshape", (writer.count(size), along))
    first = writer.add("ScatterElements", (ones, writer.shaped(zero, (1,)), writer.constant([-1], np.int64)), axis=0)
    start = writer.add("Reshape", (writer.add("Cast", (_needed(ports, "indices"),), to=_INT64), first))
    position = writer.add("Sub", (entry, start))
    inside = writer.add("And", (writer.add("GreaterOrEqual", (position, zero)), writer.add("Less", (position, count))))
    nearest = writer.add("Min", (writer.add("Max", (position, zero)), writer.add("Sub", (count, one))))
    spread = writer.add("GatherElements", (updates, writer.add("Expand", (nearest, shape))), axis=axis)
    writer.add("Where", (inside, spread, var), output)
