"""Ports and attributes of CausalConvWithState, which two domains have in common.

Source: ONNX operator set 27; ONNX Runtime's contrib operators, version 1. Channels first: x is [B, C, T], the weight
[C, 1, k], states are [B, C, k - 1] and of the type of x.
"""

from __future__ import annotations

from onnx import AttributeProto

from deltafuse.lowering_conv import CAUSAL_CONV, PLAIN
from deltafuse.targets.profile import AttributeRule, Operator, Port

INPUTS = (
    Port("input", "BCT", "x"),
    Port("weight", "C1K", "weight"),
    Port("bias", "C", "bias", optional=True),
    Port("past_state", "BCS", "past_state", optional=True),
)
OUTPUTS = (Port("output", "BCT", "y"), Port("present_state", "BCS", "present_state"))
ACTIVATION = AttributeRule("activation", int(AttributeProto.STRING), required=False)
#: What the contrib operator may have beyond the standard's: in other forms it is not known here.
CONTRIB = tuple(
    AttributeRule(name, int(AttributeProto.INT), value, required=False, written=name == "ndim")
    for name, value in PLAIN.items()
)


def operator(domain: str, signature: str) -> Operator:
    """CausalConvWithState of one domain."""
    attributes = (*CONTRIB, ACTIVATION) if domain else (ACTIVATION,)
    return Operator(CAUSAL_CONV, "", signature, CAUSAL_CONV, domain, INPUTS, OUTPUTS, attributes)
