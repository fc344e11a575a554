"""Names of element types."""

from __future__ import annotations

from onnx import TensorProto

#: Types of real numbers that rules are computed in.
REAL = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


def dtype_name(dtype: int) -> str:
    """``float16`` for 10; ``type 999`` for what the standard does not name."""
    known = dtype in TensorProto.DataType.values()
    return TensorProto.DataType.Name(dtype).lower() if known else f"type {dtype}"
