"""Target ``ascend-310p``: MindSpore Lite's two gated delta rule kernels on Atlas 300I Duo.

Source of the contract: MindSpore Lite, tools/custom_kernels/ascend_ops/src/ascend_300iduo, and its ONNX parser for
op_type ``Custom``. Each limit carries a mark: V seen in a file that the reference exporter wrote, S read in public
source, A assumed. The batch is a number in the output file, one where nothing else is asked for.
"""

from __future__ import annotations

from deltafuse.targets import custom_nodes, limits
from deltafuse.targets.custom_signatures import CGDR, CGDR_EIGHT_INPUTS, RGDR, with_limits
from deltafuse.targets.profile import FLOAT16, LintRules, Profile, Requirement

#: Most tokens a sequence may have in one call of RGDR; a longer one returns without a result and without an error.
RGDR_TOKENS = 8
#: RGDR reads and writes rows in blocks of this many elements.
RGDR_BLOCK = 16
#: Largest key head size with a fast path.
KEY_DIM = 128

#: Limits of both kernels.
LIMITS = (
    limits.head_ratio("S", "else the key head's index is clamped in silence"),
    limits.head_size("S", KEY_DIM, "else a slow path is taken, without an error"),
    limits.static_batch("A", "lengths and slot indices are written for a number of sequences"),
    limits.bf16_boundary("S"),
)
#: Further limits of ChunkGatedDeltaRule, and of its older signature.
CGDR_LIMITS = (limits.per_channel_decay("S", CGDR.op),)
CGDR_EIGHT_LIMITS = (*CGDR_LIMITS, limits.decay_required("S", CGDR.op))
#: Further limits of RecurrentGatedDeltaRule.
RGDR_LIMITS = (
    limits.rgdr_tokens("S", RGDR_TOKENS),
    limits.rgdr_head_size("S", RGDR_BLOCK),
    limits.rgdr_batch_heads("S", RGDR_BLOCK),
)

PROFILE = Profile(
    name="ascend-310p",
    title="MindSpore Lite on Atlas 300I Duo, with its own vendor package of kernels",
    operators=(
        with_limits(RGDR, RGDR_LIMITS),
        with_limits(CGDR, CGDR_LIMITS),
        with_limits(CGDR_EIGHT_INPUTS, CGDR_EIGHT_LIMITS),
    ),
    shared=LIMITS,
    boundaries=(FLOAT16,),
    emit=custom_nodes.plan,
    fixes_batch=True,
    requires=(Requirement("mindspore-lite", "2.9", "V", "and the kernels of ascend_300iduo, for CANN 8.5"),),
    lint=LintRules(forbidden_ops=("If", "Loop", "Scan"), own_data=True),
    pins=custom_nodes.pins,
)
