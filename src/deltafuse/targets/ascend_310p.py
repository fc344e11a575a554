"""Target ``ascend-310p``: MindSpore Lite's two gated delta rule kernels on Atlas 300I Duo.

Source of the contract: MindSpore Lite, tools/custom_kernels/ascend_ops/src/ascend_300iduo, and its ONNX parser for
op_type ``Custom``. Each limit carries a mark: V seen in a file that the reference exporter wrote, S read in public
source, A assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from deltafuse.match import Match, Plan, Role
from deltafuse.reasons import TEXTS, Reason
from deltafuse.targets import ascend_310p_nodes
from deltafuse.targets.ascend_310p_nodes import CGDR, RGDR, Kernel
from deltafuse.targets.base import Limit, TargetOptions

#: Most tokens a sequence may have in one call of RGDR; a longer one returns without a result and without an error.
RGDR_TOKENS = 8
#: RGDR reads and writes rows in blocks of this many elements.
RGDR_BLOCK = 16
#: Largest key head size with a fast path.
KEY_DIM = 128

TARGET_TEXTS = {
    "per-channel-decay": "the decay has a value per key channel; this target's kernels take one per value head and "
    "token, so leave this site out with --skip-sites",
    "head-ratio": "{value_heads} value heads are no multiple of {key_heads} key heads, and the kernel would read wrong "
    "heads; leave this site out with --skip-sites",
    "head-size": "the key head size is {key_dim}, the kernel's largest is {limit}; leave this site out with "
    "--skip-sites",
    "static-batch": "the batch is fixed to {batch} and this target takes one sequence; export the model with batch 1 "
    "or with a dynamic batch axis",
    "bf16-boundary": "{roles} is bfloat16 and the kernel takes float16, whose range is smaller; add "
    "--allow-bf16-to-fp16 if the values stay below 65504",
    "rgdr-tokens": "RecurrentGatedDeltaRule needs a token count that is fixed in the file and between 1 and {limit}, "
    "here it is {tokens}; leave --op out, or pin the token axis with --pin SYMBOL=N",
    "rgdr-head-size": "RecurrentGatedDeltaRule needs head sizes that are multiples of {block}, here they are {key_dim} "
    "and {value_dim}; leave --op out",
}
TEXTS.update(TARGET_TEXTS)


def tokens(match: Match, options: TargetOptions) -> int | None:
    """The token count that is a literal in the output file, None where it stays symbolic."""
    if isinstance(match.dims.tokens, int):
        return match.dims.tokens
    if options.tokens is not None:
        return options.tokens
    valid = match.valid_tokens
    # A graph that is right for one size only gets that size written in.
    return valid.low if options.pin and valid is not None and valid.low == valid.high else None


def _boundary(match: Match) -> tuple[tuple[str, Role], ...]:
    roles = {name: getattr(match, name) for name in ("query", "key", "value", "beta", "state", "out", "final_state")}
    return tuple((name, role) for name, role in roles.items() if role is not None)


def _per_channel(match: Match, _: TargetOptions) -> Reason | None:
    if set(match.g.layout) & set("KD"):
        return Reason("per-channel-decay", {})
    return None


def _head_ratio(match: Match, _: TargetOptions) -> Reason | None:
    if match.dims.value_heads % match.dims.key_heads:
        return Reason("head-ratio", {"value_heads": match.dims.value_heads, "key_heads": match.dims.key_heads})
    return None


def _head_size(match: Match, _: TargetOptions) -> Reason | None:
    if match.dims.key_dim > KEY_DIM:
        return Reason("head-size", {"key_dim": match.dims.key_dim, "limit": KEY_DIM})
    return None


def _static_batch(match: Match, _: TargetOptions) -> Reason | None:
    if isinstance(match.dims.batch, int) and match.dims.batch != 1:
        return Reason("static-batch", {"batch": match.dims.batch})
    return None


def _bf16(match: Match, options: TargetOptions) -> Reason | None:
    roles = [name for name, role in _boundary(match) if role.dtype == TensorProto.BFLOAT16]
    if roles and not options.allow_bf16_to_fp16:
        return Reason("bf16-boundary", {"roles": ", ".join(roles)})
    return None


def _rgdr_tokens(match: Match, options: TargetOptions) -> Reason | None:
    count = tokens(match, options)
    if count is None or not 1 <= count <= RGDR_TOKENS:
        return Reason(
            "rgdr-tokens", {"tokens": str(match.dims.tokens) if count is None else count, "limit": RGDR_TOKENS}
        )
    return None


def _rgdr_head_size(match: Match, _: TargetOptions) -> Reason | None:
    if match.dims.key_dim % RGDR_BLOCK or match.dims.value_dim % RGDR_BLOCK:
        return Reason(
            "rgdr-head-size", {"key_dim": match.dims.key_dim, "value_dim": match.dims.value_dim, "block": RGDR_BLOCK}
        )
    return None


#: Limits of both kernels.
LIMITS = (
    Limit("per-channel-decay", "S", "g is read as [T, Nv]", _per_channel),
    Limit("head-ratio", "S", "the key head's index is clamped in silence", _head_ratio),
    Limit("head-size", "S", "above 128 a slow path is taken, without an error", _head_size),
    Limit("static-batch", "A", "all-zero slot indices and one length are right for one sequence only", _static_batch),
    Limit("bf16-boundary", "S", "q, k, v, beta and states are float16", _bf16),
)
#: Further limits of RecurrentGatedDeltaRule.
RGDR_LIMITS = (
    Limit("rgdr-tokens", "S", "a sequence of more than 8 tokens gets no result and no error", _rgdr_tokens),
    Limit(
        "rgdr-head-size", "S", "rows that are no multiple of 16 are read and written past their end", _rgdr_head_size
    ),
)


def _broken(limits: tuple[Limit, ...], match: Match, options: TargetOptions) -> Reason | None:
    reasons = (limit.check(match, options) for limit in limits)
    return next((reason for reason in reasons if reason is not None), None)


@dataclass(frozen=True)
class Ascend310P:
    """The profile. Emits for one sequence: a batch axis must be pinned to one in the output file."""

    name: str = "ascend-310p"
    limits: tuple[Limit, ...] = (*LIMITS, *RGDR_LIMITS)

    def choose(self, match: Match, options: TargetOptions) -> str | Reason:
        """RecurrentGatedDeltaRule where it is legal, else ChunkGatedDeltaRule, else the limit that forbids both."""
        chosen = self._kernel(match, options)
        return chosen.op if isinstance(chosen, Kernel) else chosen

    def plan(self, match: Match, options: TargetOptions) -> Plan | Reason:
        """The nodes that replace a site: see `ascend_310p_nodes`."""
        kernel = self._kernel(match, options)
        if isinstance(kernel, Reason):
            return kernel
        return ascend_310p_nodes.plan(match, kernel, tokens(match, options), pin=options.pin)

    def _kernel(self, match: Match, options: TargetOptions) -> Kernel | Reason:
        broken = _broken(LIMITS, match, options)
        if broken is not None:
            return broken
        if options.op == "cgdr":
            return CGDR
        broken = _broken(RGDR_LIMITS, match, options)
        if broken is None:
            return RGDR
        return broken if options.op == "rgdr" else CGDR
