"""The two functions: plain torch where nothing is exported, a target's node where something is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltafuse.errors import UserError
from deltafuse.torch import symbolic, translation
from deltafuse.torch.call import SETTINGS, Call
from deltafuse.wording import number

#: Torch does not declare what this module exports.
_jit: Any = torch.jit

__all__ = ["chunk_gated_delta_rule", "recurrent_gated_delta_rule"]


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over a sequence, chunk by chunk; takes the place of ``torch_chunk_gated_delta_rule``.

    Args:
        query: [B, T, Nk, Dk].
        key: [B, T, Nk, Dk].
        value: [B, T, Nv, Dv]; Nv is a multiple of Nk, and value head h reads key head h // (Nv / Nk).
        g: decay in log space, [B, T, Nv].
        beta: [B, T, Nv].
        chunk_size: tokens in a chunk of the plain form; kernels have their own.
        initial_state: [B, Nv, Dk, Dv], None for zeros.
        output_final_state: whether the final state is given back.
        use_qk_l2norm_in_kernel: normalise query and key over Dk first, eps 1e-6 under the root.
        scale: factor on the query; None for 1/sqrt(Dk).
        kwargs: further keywords that callers pass to kernels; they say nothing of the result and are ignored.

    Returns:
        Output [B, T, Nv, Dv] in the query's type; the final state [B, Nv, Dk, Dv] in float32, or None.

    Raises:
        UserError: ``head-ratio``, ``packed-sequences``; under an exporter the limit of the target.
    """
    call = Call("chunk", scale, use_qk_l2norm_in_kernel, output_final_state, chunk_size, SETTINGS.get())
    return _run(call, (query, key, value, g, beta, initial_state), kwargs)


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same token by token; takes the place of ``torch_recurrent_gated_delta_rule``.

    Arguments, result and errors are those of `chunk_gated_delta_rule`.
    """
    call = Call("recurrent", scale, use_qk_l2norm_in_kernel, output_final_state, settings=SETTINGS.get())
    return _run(call, (query, key, value, g, beta, initial_state), kwargs)


def _run(
    call: Call, operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    if kwargs.get("cu_seqlens") is not None:
        raise UserError("packed-sequences", "cu_seqlens is given: packed sequences cannot be kept apart here, so give "
                        "each sequence as a batch of its own")  # fmt: skip
    key_heads, value_heads = operands[1].shape[2], operands[2].shape[2]
    if value_heads % key_heads:
        wrong = number(value_heads, "value head is", "value heads are")
        raise UserError("head-ratio", f"{wrong} no multiple of {number(key_heads, 'key head')}")
    if torch.onnx.is_in_onnx_export() and _jit.is_tracing():
        return symbolic.export(call, operands)
    if torch.compiler.is_exporting():
        return translation.export(call, operands)
    out, final = symbolic.compute(call, operands)
    return out, final if call.keep_state else None
