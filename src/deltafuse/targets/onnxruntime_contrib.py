"""Target ``ort``: com.microsoft.LinearAttention, an operator of ONNX Runtime's own.

Source: ONNX Runtime's contrib operators, version 1 of domain com.microsoft. Fewer query and key heads than value heads
are shared in consecutive groups. Batch and tokens stay dynamic.
"""

from __future__ import annotations

from deltafuse.targets import causal_conv_ports, limits, linear_attention
from deltafuse.targets.linear_attention_ports import operator
from deltafuse.targets.profile import BFLOAT16, FLOAT, FLOAT16, Profile, Requirement

PROFILE = Profile(
    name="ort",
    title="ONNX Runtime's own LinearAttention (com.microsoft, version 1)",
    operators=(operator("com.microsoft", "1"),),
    shared=(limits.head_ratio("S", "heads are shared in consecutive groups"),),
    boundaries=(FLOAT, FLOAT16, BFLOAT16),
    emit=linear_attention.plan,
    runtime="onnxruntime",
    opset=("com.microsoft", 1),
    requires=(Requirement("onnxruntime", "1.25.1", "S", "the first release that has the operator"),),
    others=(causal_conv_ports.operator("com.microsoft", "1"),),
    pins=linear_attention.pins,
)
