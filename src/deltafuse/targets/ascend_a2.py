"""Target ``ascend-a2``: ChunkGatedDeltaRule of MindSpore Lite on Atlas 800I A2, RecurrentGatedDeltaRule of CANN.

Source of the contract: MindSpore Lite, tools/custom_kernels/ascend_ops/src/ascend_a2, whose ChunkGatedDeltaRule has the
signature of CANN's aclnn operator; CANN's documentation of aclnnRecurrentGatedDeltaRule. All operands and states of a
node have one type, float16 or bfloat16 (``--boundary``); a float32 state is refused by the kernel.
"""

from __future__ import annotations

from deltafuse.targets import custom_nodes, limits
from deltafuse.targets.custom_signatures import CGDR, RGDR, with_limits
from deltafuse.targets.profile import BFLOAT16, FLOAT16, LintRules, Profile, Requirement

#: Largest head size and head count of ChunkGatedDeltaRule.
DIM, HEADS = 128, 64
#: Those of RecurrentGatedDeltaRule, and its most tokens a sequence.
RGDR_DIM, RGDR_HEADS, RGDR_TOKENS = 512, 256, 8

#: Limits of both kernels.
LIMITS = (
    limits.per_channel_decay("S", "either operator"),
    limits.head_ratio("S", "else tiling fails"),
    limits.static_batch("A", "lengths and slot indices are written for a number of sequences"),
    limits.bf16_boundary("S"),
)
CGDR_LIMITS = (
    limits.head_size("S", DIM, "else tiling fails"),
    limits.value_head_size("S", DIM, "else tiling fails"),
    limits.head_count("S", HEADS, "else tiling fails"),
)
RGDR_LIMITS = (
    limits.rgdr_boundary("S"),
    limits.rgdr_tokens("S", RGDR_TOKENS),
    limits.head_size("S", RGDR_DIM, "else tiling fails"),
    limits.value_head_size("S", RGDR_DIM, "else tiling fails"),
    limits.head_count("S", RGDR_HEADS, "else tiling fails"),
)

PROFILE = Profile(
    name="ascend-a2",
    title="MindSpore Lite on Atlas 800I A2",
    operators=(with_limits(RGDR, RGDR_LIMITS), with_limits(CGDR, CGDR_LIMITS)),
    shared=LIMITS,
    boundaries=(FLOAT16, BFLOAT16),
    emit=custom_nodes.plan,
    fixes_batch=True,
    requires=(Requirement("mindspore-lite", "2.9", "A", "and the kernels of ascend_a2"),),
    lint=LintRules(forbidden_ops=("If", "Loop", "Scan"), own_data=True),
    pins=custom_nodes.pins,
)
