"""Ports and attributes of LinearAttention, which two domains have in common."""

from __future__ import annotations

from onnx import AttributeProto

from deltafuse.lowering_attention import LINEAR_ATTENTION, PLAIN
from deltafuse.targets.profile import BFLOAT16, FLOAT, FLOAT16, AttributeRule, Operator, Port

_INT = int(AttributeProto.INT)
_ANY = (FLOAT, FLOAT16, BFLOAT16)

INPUTS = (
    Port("query", "BT(HD)", "query"),
    Port("key", "BT(HD)", "key"),
    Port("value", "BT(HD)", "value"),
    Port("past_state", "BHKV", "state", _ANY, optional=True),
    Port("decay", "BTH", "g", optional=True),
    Port("beta", "BTH", "beta"),
)
OUTPUTS = (Port("output", "BT(HD)", "out"), Port("present_state", "BHKV", "final_state", _ANY))
ATTRIBUTES = (
    AttributeRule("q_num_heads", _INT),
    AttributeRule("kv_num_heads", _INT),
    # "gated_delta", or "delta" where there is no decay.
    AttributeRule("update_rule", int(AttributeProto.STRING), required=False),
    # 1/sqrt of the key head size without it.
    AttributeRule("scale", int(AttributeProto.FLOAT), required=False),
    # A tuning hint; it does not change the result.
    AttributeRule("chunk_size", _INT, required=False, written=False),
)
#: What the contrib operator may have beyond the standard's: in other forms it is not known here.
CONTRIB = tuple(AttributeRule(name, _INT, value, required=False, written=False) for name, value in PLAIN.items())


def operator(domain: str, signature: str) -> Operator:
    """LinearAttention of one domain."""
    attributes = (*ATTRIBUTES, *CONTRIB) if domain else ATTRIBUTES
    return Operator(LINEAR_ATTENTION, "", signature, LINEAR_ATTENTION, domain, INPUTS, OUTPUTS, attributes)
