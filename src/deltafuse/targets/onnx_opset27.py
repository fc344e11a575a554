"""Target ``onnx``: ai.onnx LinearAttention, operator set 27.

Source: the ONNX operator documentation. Query heads must be a positive multiple of key/value heads, so that grouped
value heads cannot be expressed: query and key are repeated to the value heads. The file's opset import is raised to 27
and the operators whose form has changed since are rewritten; see `deltafuse.opset`.
"""

from __future__ import annotations

from deltafuse.opset import LEAST, LINEAR_ATTENTION_OPSET
from deltafuse.targets import causal_conv_ports, limits, linear_attention
from deltafuse.targets.linear_attention_ports import operator
from deltafuse.targets.profile import BFLOAT16, FLOAT, FLOAT16, Profile, Requirement

PROFILE = Profile(
    name="onnx",
    title="ONNX operator set 27: LinearAttention of the standard itself",
    operators=(operator("", "27"),),
    shared=(
        limits.head_ratio("S", "query and key heads are repeated to the value heads"),
        limits.least_opset("A", LEAST, LINEAR_ATTENTION_OPSET),
    ),
    boundaries=(FLOAT, FLOAT16, BFLOAT16),
    emit=linear_attention.plan,
    runtime="onnxruntime",
    opset=("", LINEAR_ATTENTION_OPSET),
    requires=(
        Requirement("onnx", "1.23", "S", "the first release that knows opset 27; needed to check the file"),
        Requirement("onnxruntime", "1.32", "V", "runs it by its function body, slower than target ort"),
    ),
    others=(causal_conv_ports.operator("", "27"),),
    pins=linear_attention.pins,
)
