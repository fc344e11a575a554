"""The exporter based on torch.export: operators of torch that run the rule, and a table that says what they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deltafuse import targets
from deltafuse.options import DEFAULT_TARGET, Boundary, Operator
from deltafuse.torch.call import Call, Operand, Settings, declared, plan
from deltafuse.torch.symbolic import NAMES, TYPES, compute

#: The opset that nodes are written for: the exporter raises what it has built to the opset that is asked for.
_OPSET = 18
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state, int chunk_size, "
    "float? scale, bool use_qk_l2norm_in_kernel) -> (Tensor, Tensor)"
)


def _define(form: Any) -> Any:
    def run(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
        chunk_size: int, scale: float | None, use_qk_l2norm_in_kernel: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        call = Call(form, scale, use_qk_l2norm_in_kernel, keep_state=True, chunk_size=chunk_size)
        out, final = compute(call, (query, key, value, g, beta, initial_state))
        # A result of an operator of torch must not be one of its operands.
        return out, final.clone() if final is initial_state else final

    def fake(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
        chunk_size: int, scale: float | None, use_qk_l2norm_in_kernel: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, _, heads, value_dim = value.shape
        out = torch.empty_like(value, dtype=query.dtype, memory_format=torch.contiguous_format)
        return out, value.new_empty((batch, heads, key.shape[3], value_dim), dtype=torch.float32)

    custom: Any = torch.library.custom_op(f"deltafuse::{form}_gated_delta_rule", run, mutates_args=(), schema=_SCHEMA)
    custom.register_fake(fake)
    return getattr(torch.ops.deltafuse, f"{form}_gated_delta_rule").default


OPERATORS = {"chunk": _define("chunk"), "recurrent": _define("recurrent")}


def export(call: Call, operands: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Runs the rule while torch.export looks on."""
    if call.settings is not None:
        # What cannot be exported ends here, before the exporter goes through all of it.
        given = zip(NAMES, operands, strict=True)
        plan(call, {name: _traced(operand) for name, operand in given if operand is not None}, "Reciprocal", _OPSET)
    out, final = OPERATORS[call.form](*operands, call.chunk_size, call.scale, call.normalise)
    return out, final if call.keep_state else None


def translations(
    target: str = DEFAULT_TARGET,
    op: Operator | None = None,
    *,
    boundary: Boundary | None = None,
    signature: str | None = None,
    allow_bf16_to_fp16: bool = False,
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `torch.onnx.export` takes as ``custom_translation_table``: the rule becomes the target's node.

        >>> torch.onnx.export(model, args, "model.onnx", dynamo=True,
        ...                   custom_translation_table=deltafuse.torch.translations("ort"))

    Args:
        target: name of a profile, see ``fuse targets``.
        op: force this operator where its limits allow it; None for what is legal.
        boundary: element type of the kernels' operands, where the target leaves a choice.
        signature: version of the operators' signature; None for the newest.
        allow_bf16_to_fp16: accept the smaller range where a bfloat16 model meets a float16 kernel.

    Raises:
        UserError: ``unknown-target``; ``option``: the target does not take one. In an export, where a call is beyond a
            limit of the target: the exporter wraps it into errors of its own, whose cause it is.
    """
    settings = Settings(target, op, boundary, signature, allow_bf16_to_fp16)
    targets.get(target).check(settings.options(_OPSET))
    return {operator: _translation(form, settings) for form, operator in OPERATORS.items()}


def _translation(form: Any, settings: Settings) -> Callable[..., Any]:
    def translate(
        query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any,
        chunk_size: int, scale: Any, use_qk_l2norm_in_kernel: bool,
    ) -> Any:  # fmt: skip
        call = Call(form, scale, use_qk_l2norm_in_kernel, keep_state=True, chunk_size=chunk_size, settings=settings)
        return _write(call, (query, key, value, g, beta, initial_state))

    return translate


def _write(call: Call, operands: Sequence[Any]) -> tuple[Any, Any]:
    given = {name: value for name, value in zip(NAMES, operands, strict=True) if value is not None}
    planned = plan(call, {name: _operand(value) for name, value in given.items()}, "Reciprocal", _OPSET)
    from onnxscript import evaluator, ir

    recorder: Any = evaluator.default()
    values: dict[str, Any] = {"": None, **given}
    types = declared(planned)
    for node in planned.nodes:
        attributes = [ir.from_proto(entry) for entry in node.attribute]
        made = ir.Node(node.domain, node.op_type, [values[name] for name in node.input], attributes,
                       num_outputs=len(node.output))  # fmt: skip
        recorder.nodes.append(made)
        for name, value in zip(node.output, made.outputs, strict=True):
            values[name] = value
            if name in types:
                dtype, shape = types[name]
                value.dtype, value.shape = ir.DataType(dtype), ir.Shape(shape)
    return values["out"], values["final_state"]


def _traced(operand: Tensor) -> Operand:
    return Operand(tuple(size if type(size) is int else None for size in operand.shape), TYPES[operand.dtype])


def _operand(value: Any) -> Operand:
    return Operand(tuple(size if isinstance(size, int) else None for size in value.shape), int(value.dtype))
