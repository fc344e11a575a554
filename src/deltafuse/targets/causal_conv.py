"""The nodes that replace a convolution with a state: CausalConvWithState of one of two domains, changes of layout.

Source: ONNX operator set 27 and ONNX Runtime's contrib operators. Both results are mandatory, activations are lower
case, the state has the type of the input; all tried on onnxruntime 1.32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from deltafuse.expression_layouts import emit_ordered
from deltafuse.expressions import Parameters, Place
from deltafuse.lowering_conv import CAUSAL_CONV
from deltafuse.targets.emit import Attribute, Emitter

#: Batch, channels, tokens: what the operator takes.
ORDER = "BCT"
#: How roles may lie, see `deltafuse.expression_layouts`.
LAYOUTS = (ORDER, "BTC", "BC", "CT", "TC", "BC1T", "BCT1", "BT1C", "B1TC", "B1CT", "BTC1")
#: Squeeze and Unsqueeze take their axes as an input from here on.
LEAST_OPSET = 13
_RESULTS = ("y", "present_state")
_END = np.iinfo(np.int64).max


def layout_of(parameters: Parameters, role: str) -> str:
    """The layout that a role or result was found to have."""
    return LAYOUTS[int(parameters.get(f"{role}_layout", 0))]


def write(place: Place, emitter: Emitter) -> tuple[onnx.ValueInfoProto, ...]:
    """Writes the nodes of a site; returns the types of the operator's results."""
    dtype = _dtype(place)
    inputs = [_columns(place, emitter, "x", dtype), _weight(place, emitter), _bias(place, emitter)]
    inputs.append(_past(place, emitter, dtype))
    direct = {name: role.name for name, role in place.outputs.items() if _as_it_is(place, name)}
    outputs = [direct.get(name, emitter.name(f"{CAUSAL_CONV}/{name}")) for name in _RESULTS]
    attributes: dict[str, Attribute] = {"activation": "silu" if place.parameters.get("silu") else "none"}
    attributes |= {"ndim": 1} if place.domain else {}
    emitter.node(CAUSAL_CONV, CAUSAL_CONV, inputs, attributes, outputs, place.domain or "")
    for name, value in zip(_RESULTS, outputs, strict=True):
        if name in place.outputs and name not in direct:
            _write(place, emitter, name, value)
    return _declared(place, outputs)


def _dtype(place: Place) -> int:
    """Element type of the operator's operands and results: the weight's, where the target takes it."""
    return place.boundary(place.roles["weight"].dtype)


def _columns(place: Place, emitter: Emitter, role: str, dtype: int) -> str:
    """A role as [B, C, T], in the operator's type."""
    given = place.roles[role]
    value = emit_ordered(emitter, role, given.name, layout_of(place.parameters, role), ORDER)
    return emitter.cast(f"{role}/cast", value, given.dtype, dtype)


def _last(emitter: Emitter, what: str, value: str, count: int, output: str | None = None) -> str:
    """The last columns of [B, C, T]."""
    held = [(f"last_{count}", -count), ("end", _END), ("axis", ORDER.index("T"))]
    ends = [emitter.constant(name, np.array([number], np.int64)) for name, number in held]
    return emitter.node("Slice", f"{what}/last", (value, *ends), None, None if output is None else (output,))


def _past(place: Place, emitter: Emitter, dtype: int) -> str:
    """The columns before x; "" where they are zeros."""
    if "past_state" not in place.roles:
        return ""
    width, layout = int(place.parameters["width"]) - 1, layout_of(place.parameters, "past_state")
    value = _columns(place, emitter, "past_state", dtype)
    axis = layout.find("T")
    exact = (place.roles["past_state"].shape[axis] if axis >= 0 else 1) == width
    return value if exact else _last(emitter, "past_state", value, width)


def _weight(place: Place, emitter: Emitter) -> str:
    """The weight as [C, 1, k]."""
    role, width = place.roles["weight"], int(place.parameters["width"])
    value, sizes = role.name, [size for size in role.shape if isinstance(size, int) and size != 1]
    if place.parameters.get("taps_first"):
        plain = emitter.constant("weight/plain", np.array([width, -1], np.int64))
        value = emitter.node("Reshape", "weight/reshape", (value, plain))
        value = emitter.node("Transpose", "weight/transpose", (value,), {"perm": [1, 0]})
    if place.parameters.get("taps_first") or role.shape != (sizes[0], 1, width):
        value = emitter.node("Reshape", "weight", (value, emitter.constant("weight/shape", np.array([-1, 1, width]))))
    return emitter.cast("weight/cast", value, role.dtype, _dtype(place))


def _bias(place: Place, emitter: Emitter) -> str:
    role = place.roles.get("bias")
    if role is None:
        return ""
    value = role.name
    if len(role.shape) != 1:
        value = emitter.node("Reshape", "bias", (value, emitter.constant("bias/shape", np.array([-1], np.int64))))
    return emitter.cast("bias/cast", value, role.dtype, _dtype(place))


def _kept(place: Place) -> int:
    """How many of the last tokens are kept, 0 for all."""
    columns, axis = int(place.parameters.get("columns", 0)), layout_of(place.parameters, "x").find("T")
    return 0 if (place.roles["x"].shape[axis] if axis >= 0 else 1) == columns else columns


def _as_it_is(place: Place, name: str) -> bool:
    """Whether the operator writes a result as it is wanted."""
    if name not in place.outputs or place.outputs[name].dtype != _dtype(place):
        return False
    return layout_of(place.parameters, name) == ORDER and not (name == "y" and _kept(place))


def _write(place: Place, emitter: Emitter, name: str, value: str) -> None:
    layout, result = layout_of(place.parameters, name), place.outputs[name]
    steps, output = [*["last"] * (name == "y" and _kept(place) > 0), *["layout"] * (layout != ORDER)], result.name
    if result.dtype != _dtype(place):
        last = None if steps else (output,)
        value = emitter.node("Cast", f"{name}/cast", (value,), {"to": result.dtype}, last)
    if "last" in steps:
        value = _last(emitter, name, value, _kept(place), output if layout == ORDER else None)
    if "layout" in steps:
        emit_ordered(emitter, f"{name}/layout", value, ORDER, layout, output)


def _declared(place: Place, outputs: Sequence[str]) -> tuple[onnx.ValueInfoProto, ...]:
    """Types of the operator's results."""
    x, layout = place.roles["x"].shape, layout_of(place.parameters, "x")
    batch, channels, tokens = (x[layout.index(letter)] if letter in layout else 1 for letter in ORDER)
    sizes = ((batch, channels, tokens), (batch, channels, int(place.parameters["width"]) - 1))
    return tuple(
        helper.make_tensor_value_info(
            name, _dtype(place), [size if isinstance(size, int) else str(size) for size in shape]
        )
        for name, shape in zip(outputs, sizes, strict=True)
    )
