"""What the codes of notes on sites mean, for ``fuse explain``. Light."""

from __future__ import annotations

from collections.abc import Mapping

_BOUNDARY = (
    "the operands that are named are handed to the kernel as {0}, and the results that are named (out, final_state) "
    "come from it as {0}, which does not hold all of their numbers; run fuse verify to measure what that costs, or {1}"
)
#: Code of a note on a site -> what it means; what to do.
NOTES: Mapping[str, str] = {
    "float16_boundary": _BOUNDARY.format("float16", "give --boundary where the target has another type"),
    "bfloat16_boundary": _BOUNDARY.format("bfloat16", "give --boundary where the target has another type"),
    "float32_boundary": _BOUNDARY.format("float32", "leave the site out with --skip-sites"),
    "valid_tokens": "the unfused graph is the rule for these token counts only, since the exporter wrote sizes of its "
    "example into it, while the fused node has no such limit unless the note says that it is fixed to one; compare "
    "the two within these counts",
    "state_ignores_mask": "the recurrent state is made of all tokens, masked ones too, in the unfused graph as in the "
    "fused one; feed prompts without padding",
    "sizes_taken_as_equal": "the file declares one axis of several operands with different sizes or symbols, and the "
    "fused node takes them to be equal; feed equal sizes, or export with one symbol",
    "overflows": "the unfused arithmetic overflows for strong decay and the fused node does not, so that the two "
    "differ there; compare them where both are finite",
    "several_sequences": "the kernel for decode does not take so many sequences with this number of heads, so that "
    "another operator was chosen; fuse for one sequence to have it",
    "batch_one_assumed": "--no-pin leaves the batch axis dynamic in the file, while the number of sequences is written "
    "into the fused node; feed that number only, or leave --no-pin out",
}
