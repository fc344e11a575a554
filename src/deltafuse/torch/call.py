"""One call of the rule under an exporter: what was asked for, and the nodes that a target writes for it.

The nodes come from the targets' own emission, the one that ``fuse`` uses; the exporters only write them down.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from deltafuse import targets
from deltafuse.dims import Dim, symbol
from deltafuse.errors import UserError
from deltafuse.match import Dims, Match, Norm, Plan, Proof, Role
from deltafuse.options import DEFAULT_TARGET, Boundary, Form, Operator
from deltafuse.reasons import Reason
from deltafuse.targets.base import TargetOptions
from deltafuse.torch.eager import EPS

#: First opset whose ReduceSum takes its axes as an input, as the norm is written here.
LEAST_OPSET = 13
#: Name of the rule in the emitted nodes.
RULE = "gated_delta_rule"
#: Axes of each operand and result, one letter an axis; see `deltafuse.match.Role`.
LAYOUTS = {
    "query": "BTHD", "key": "BTHD", "value": "BTHD", "g": "BTH", "beta": "BTH", "state": "BHKV",
    "out": "BTHD", "final_state": "BHKV",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """For whom calls are exported, as `deltafuse.FuseOptions` has it."""

    target: str = DEFAULT_TARGET
    op: Operator | None = None
    boundary: Boundary | None = None
    signature: str | None = None
    allow_bf16_to_fp16: bool = False

    def options(self, opset: int) -> TargetOptions:
        """The same for a target; nothing is pinned.

        Args:
            opset: of ONNX, that the exporter writes.
        """
        chosen = (self.op, self.allow_bf16_to_fp16, False, None, self.boundary, self.signature)
        return TargetOptions(*chosen, opset)


#: What `deltafuse.torch.use_custom_gated_delta_rule` says while it is open, else None.
SETTINGS: ContextVar[Settings | None] = ContextVar("deltafuse_torch_settings", default=None)


@dataclass(frozen=True)
class Call:
    """What one call asks for, beside its tensors.

    Attributes:
        form: which of the two functions was called.
        scale: factor on the query; None for 1/sqrt(Dk).
        normalise: whether query and key are L2-normalised first.
        keep_state: whether the final state is given back.
        chunk_size: tokens in a chunk where the rule runs in torch; kernels have their own.
        settings: None where nobody has said anything.
    """

    form: Form
    scale: float | None
    normalise: bool
    keep_state: bool
    chunk_size: int = 64
    settings: Settings | None = None


@dataclass(frozen=True)
class Operand:
    """One tensor of a call: sizes, None where the exported axis is dynamic, and its ONNX element type."""

    shape: tuple[int | None, ...]
    dtype: int


def plan(call: Call, operands: Mapping[str, Operand], inverse: str, opset: int) -> Plan:
    """The nodes for one call; they read `operands` by name and write ``out`` and ``final_state``.

    Args:
        call: what was asked for.
        operands: ``query``, ``key``, ``value``, ``g``, ``beta`` and, where there is one, ``state``.
        inverse: how the exporter writes the reciprocal in an rsqrt: ``Div`` or ``Reciprocal``.
        opset: of ONNX, that the exporter writes.

    Raises:
        UserError: the code of the limit that the call is beyond; ``static-batch``, ``opset-below``, ``dynamic-head``.
    """
    settings = call.settings or Settings()
    profile = targets.get(settings.target)
    if opset < LEAST_OPSET or (profile.opset is not None and not profile.opset[0] and profile.opset[1] > opset):
        least = LEAST_OPSET if opset < LEAST_OPSET else profile.opset[1] if profile.opset else 0
        raise UserError(
            "opset-below",
            f"the exporter writes opset {opset} and target {profile.name} needs {least} or newer here; give a newer "
            "opset_version, or export the plain rule and run `fuse` on the file",
        )
    match = _match(call, operands, inverse)
    if match.dims.batch != 1 and any(limit.code == "static-batch" for limit in profile.limits):
        found = f"{match.dims.batch}" if isinstance(match.dims.batch, int) else "dynamic, or may be"
        raise UserError(
            "static-batch",
            f"target {profile.name} takes one sequence and the batch is {found}: trace with batch 1, leave the batch "
            "axis out of the dynamic axes, and trace those that are dynamic with other sizes than 1",
        )
    planned = profile.plan(match, settings.options(opset))
    if isinstance(planned, Reason):
        raise UserError(planned.code, f"target {profile.name} cannot take this call: {planned.text}")
    return planned


def _match(call: Call, operands: Mapping[str, Operand], inverse: str) -> Match:
    """The call as if it had been found in a graph."""
    dims = _dims(operands)
    roles = {name: _role(name, operand, number) for number, (name, operand) in enumerate(operands.items(), 1)}
    out = Operand(operands["value"].shape, operands["query"].dtype)
    final = Operand((operands["value"].shape[0], dims.value_heads, dims.key_dim, dims.value_dim), TensorProto.FLOAT)
    norm = _norm(inverse) if call.normalise else None
    return Match(
        name=RULE,
        rule=RULE,
        form=call.form,
        query=roles["query"],
        key=roles["key"],
        value=roles["value"],
        g=roles["g"],
        beta=roles["beta"],
        state=roles.get("state"),
        out=_role("out", out, len(roles) + 1),
        final_state=_role("final_state", final, len(roles) + 2) if call.keep_state else None,
        query_norm=norm,
        key_norm=norm,
        dims=dims,
        scale=dims.key_dim**-0.5 if call.scale is None else call.scale,
        valid_tokens=None,
        nodes=(),
        class_key=b"",
        proof=Proof(0.0, 0),
    )


def _role(name: str, operand: Operand, number: int) -> Role:
    layout = LAYOUTS[name]
    shape = tuple(_dim(letter) if size is None else size for letter, size in zip(layout, operand.shape, strict=True))
    return Role(number, name, layout, shape, operand.dtype)


def _dim(letter: str) -> Dim:
    return symbol({"B": "batch", "T": "tokens"}.get(letter, letter))


def _dims(operands: Mapping[str, Operand]) -> Dims:
    batch, tokens, value_heads, value_dim = operands["value"].shape
    key_heads, key_dim = operands["key"].shape[2:]
    if value_heads is None or value_dim is None or key_heads is None or key_dim is None:
        raise UserError("dynamic-head", "heads and head sizes must be fixed: leave them out of the dynamic axes")
    return Dims(
        _dim("B") if batch is None else batch, _dim("T") if tokens is None else tokens, key_heads, value_heads,
        key_dim, value_dim,
    )  # fmt: skip


def _norm(inverse: str) -> Norm:
    """The norm x * rsqrt(sum(x^2) + eps) over the last axis in float32, as an exporter writes torch's operators."""
    one, eps = (np.array([number], np.float32) for number in (1.0, EPS))
    divisor = ("one", "root") if inverse == "Div" else ("root",)
    nodes = (
        helper.make_node("Mul", ["x", "x"], ["square"]),
        helper.make_node("ReduceSum", ["square", "axes"], ["sum"], keepdims=1),
        helper.make_node("Add", ["sum", "eps"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["root"]),
        helper.make_node(inverse, divisor, ["factor"]),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    )
    constants = {"axes": np.array([-1], np.int64), "eps": eps} | ({"one": one} if inverse == "Div" else {})
    tensors = tuple(numpy_helper.from_array(array, name) for name, array in constants.items())
    return Norm("rsqrt", EPS, TensorProto.FLOAT, nodes, tensors)


def declared(planned: Plan) -> dict[str, tuple[int, tuple[int | str, ...]]]:
    """Element type and shape of the values that a plan declares."""
    found: dict[str, tuple[int, tuple[int | str, ...]]] = {}
    for info in planned.value_info:
        tensor = info.type.tensor_type
        found[info.name] = tensor.elem_type, tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return found


def attribute(entry: onnx.AttributeProto) -> object:
    """The value of an attribute, text as text."""
    value = helper.get_attribute_value(entry)
    if isinstance(value, list):
        return [_text(item) for item in cast("list[object]", value)]
    return _text(value)


def _text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value
