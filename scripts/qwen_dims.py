"""Dims of the models that are measured; apart, so that reading them imports nothing."""

from __future__ import annotations

#: Qwen3.5-4B, but for the vocabulary: its two matrices would add nothing to the graph.
DIMS = {
    "hidden": 2560,
    "vocab": 1024,
    "key_heads": 16,
    "value_heads": 32,
    "key_dim": 128,
    "value_dim": 128,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 256,
    "intermediate": 9216,
}
#: The widths around the rule add nothing to the graph.
NARROW = DIMS | {"hidden": 64, "vocab": 64, "intermediate": 64}
