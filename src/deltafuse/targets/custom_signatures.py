"""Signatures of the Custom nodes: two operators of MindSpore Lite and CANN, and an older form of one of them.

Source: MindSpore Lite, tools/custom_kernels/ascend_ops (op_host definitions and READMEs), and its ONNX parser for
op_type ``Custom``: it needs ``type``, ``input_names`` and ``output_names``; ``input_index`` counts in the space of
``input_names``.
"""

from __future__ import annotations

from dataclasses import replace

from onnx import AttributeProto

from deltafuse.targets.base import Limit
from deltafuse.targets.emit import Attribute
from deltafuse.targets.profile import FLOAT, FLOAT16, INT32, AttributeRule, Operator, Port

_STRING, _STRINGS = int(AttributeProto.STRING), int(AttributeProto.STRINGS)
_INT, _INTS, _FLOAT = int(AttributeProto.INT), int(AttributeProto.INTS), int(AttributeProto.FLOAT)

_QUERY, _KEY = Port("query", "THD", "query"), Port("key", "THD", "key")
_VALUE, _BETA = Port("value", "THD", "value"), Port("beta", "TH", "beta")
_G = Port("g", "TH", "g", (FLOAT,), optional=True)
_OUT = Port("out", "THD", "out")


def _operator(op: str, short: str, signature: str, inputs: tuple[Port, ...], outputs: tuple[Port, ...],
              further: tuple[AttributeRule, ...]) -> Operator:  # fmt: skip
    """The attributes that follow from the ports, in the order that the parser's documentation has."""
    named: tuple[tuple[str, int, Attribute | None], ...] = (
        ("type", _STRING, op),
        ("input_names", _STRINGS, [port.name for port in inputs]),
        ("optional_input_names", _STRINGS, [port.name for port in inputs if port.optional]),
        ("input_index", _INTS, None),
        ("output_names", _STRINGS, [port.name for port in outputs]),
        ("output_num", _INT, 2),
        ("scale_value", _FLOAT, None),
    )
    rules = (
        *(AttributeRule(*entry) for entry in named if entry[2] != []),
        *further,
    )
    return Operator(op, short, signature, "Custom", "", inputs, outputs, rules)


_DTYPE = AttributeRule("dtype", _INT)

CGDR = _operator(
    "ChunkGatedDeltaRule",
    "cgdr",
    "7-input",
    (
        _QUERY, _KEY, _VALUE, _BETA, Port("initial_state", "BHVK", "state"),
        Port("actual_seq_lengths", "B", "lengths", (INT32,)), _G,
    ),
    (_OUT, Port("final_state", "BHVK", "final_state")),
    (_DTYPE,),
)  # fmt: skip

RGDR = _operator(
    "RecurrentGatedDeltaRule",
    "rgdr",
    "10-input",
    (
        _QUERY, _KEY, _VALUE, _BETA, Port("state", "BHVK", "state", fresh=True),
        Port("actual_seq_lengths", "B", "lengths", (INT32,), constant=True),
        Port("ssm_state_indices", "T", "slots", (INT32,), constant=True), _G,
        Port("gk", "THK", "gk", (FLOAT,), optional=True),
        Port("num_accepted_tokens", "B", "accepted", (INT32,), optional=True, constant=True),
    ),
    (_OUT, Port("state", "BHVK", "final_state")),
    (_DTYPE, AttributeRule("output_types", _INTS), AttributeRule("outputs_shape", _STRING)),
)  # fmt: skip

#: The definition that MindSpore Lite first published under this name. That ``cu_seqlens`` starts with 0 and that there
#: is one slot index a sequence is assumed.
CGDR_EIGHT_INPUTS = _operator(
    "ChunkGatedDeltaRule",
    "cgdr",
    "8-input",
    (
        _QUERY, _KEY, _VALUE, Port("g", "TH", "g", (FLOAT16,)), _BETA, Port("initial_state", "BHVK", "state"),
        Port("cu_seqlens", "B", "offsets", (INT32,)),
        Port("ssm_state_indices", "B", "slots", (INT32,), constant=True),
    ),
    (_OUT, Port("final_state", "BHVK", "final_state")),
    (AttributeRule("chunk_size", _INT, 64, required=False), _DTYPE),
)  # fmt: skip


def with_limits(operator: Operator, limits: tuple[Limit, ...]) -> Operator:
    """An operator with the limits it has on one target."""
    return replace(operator, limits=limits)
