"""The tables of shape, contents and dtype rules, by operator (``domain:op_type`` outside ai.onnx)."""

from __future__ import annotations

from deltafuse import (
    shape_rules_arithmetic,
    shape_rules_contents,
    shape_rules_contrib,
    shape_rules_control,
    shape_rules_dtype,
    shape_rules_elementwise,
    shape_rules_index,
    shape_rules_layout,
    shape_rules_linear,
)
from deltafuse.shape_op import ContentsRule, DtypeRule, ShapeRule

SHAPE_RULES: dict[str, ShapeRule] = {
    **shape_rules_elementwise.RULES,
    **shape_rules_layout.RULES,
    **shape_rules_index.RULES,
    **shape_rules_linear.RULES,
    **shape_rules_control.RULES,
    **shape_rules_contrib.RULES,
}

CONTENTS_RULES: dict[str, ContentsRule] = {**shape_rules_arithmetic.RULES, **shape_rules_contents.RULES}

DTYPE_RULES: dict[str, DtypeRule] = {
    **dict.fromkeys(SHAPE_RULES, shape_rules_dtype.FIRST),
    **shape_rules_control.DTYPES,
    **shape_rules_dtype.RULES,
}


def rule_key(op: str, domain: str) -> str:
    """The key of an operator in the tables."""
    return op if domain in ("", "ai.onnx") else f"{domain}:{op}"
