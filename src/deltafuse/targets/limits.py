"""The limits that kernels have, each a reason code with its text; a profile says which hold and where that is known."""

from __future__ import annotations

from onnx import TensorProto

from deltafuse.reasons import TEXTS, Reason
from deltafuse.targets.base import Case, Limit
from deltafuse.wording import number, span

TARGET_TEXTS = {
    "per-channel-decay": "the decay has a value per key channel and {op} takes one per value head and token; leave "
    "this site out with --skip-sites",
    "decay-required": "the rule has no decay and this signature of {op} needs one; leave --signature out",
    "head-ratio": "{value_heads:# value head is|value heads are} no multiple of {key_heads:# key head}, and the kernel "
    "would read wrong heads; leave this site out with --skip-sites",
    "head-size": "the key head size is {key_dim}, the kernel's largest is {limit}; leave this site out with "
    "--skip-sites",
    "value-head-size": "the value head size is {value_dim}, the kernel's largest is {limit}; leave this site out with "
    "--skip-sites",
    "head-count": "there are {key_heads} key and {value_heads:# value head}, the kernel takes at most {limit} of "
    "either; leave this site out with --skip-sites",
    "static-batch": "the batch is fixed to {batch} and the output is to take {wanted}; give --batch {batch}, or export "
    "the model with batch {wanted} or with a dynamic batch axis",
    "bf16-boundary": "{roles} is bfloat16 and the kernel takes float16, whose range is smaller; add "
    "--allow-bf16-to-fp16 if the values stay below 65504",
    "rgdr-tokens": "RecurrentGatedDeltaRule needs a token count that is fixed in the file and between 1 and {limit}, "
    "here it is {tokens}; leave --op out, or pin the token axis with --pin SYMBOL=N",
    "rgdr-head-size": "RecurrentGatedDeltaRule needs head sizes that are multiples of {block}, here they are {key_dim} "
    "and {value_dim}; leave --op out",
    "rgdr-batch-heads": "with {batch:# sequence} RecurrentGatedDeltaRule needs value heads that are a multiple of "
    "{block}, here there are {value_heads}; fuse for one sequence",
    "rgdr-boundary": "RecurrentGatedDeltaRule takes bfloat16 only on this target; add --boundary bf16, or leave "
    "--op out",
    "opset-below": "the file imports opset {opset} and only files from opset {least} on are raised to {wanted}; export "
    "it again with a newer opset",
}
TEXTS.update(TARGET_TEXTS)


def per_channel_decay(mark: str, op: str) -> Limit:
    """The decay is one number per value head and token."""

    def check(case: Case) -> Reason | None:
        return Reason("per-channel-decay", {"op": op}) if case.per_channel else None

    return Limit("per-channel-decay", mark, "one decay per value head and token: g is read as [T, Nv]", check)


def decay_required(mark: str, op: str) -> Limit:
    """There is a decay."""

    def check(case: Case) -> Reason | None:
        return None if case.decays else Reason("decay-required", {"op": op})

    return Limit("decay-required", mark, "the rule has a decay: g is a required input", check)


def head_ratio(mark: str, fact: str) -> Limit:
    """Value heads are a multiple of key heads."""

    def check(case: Case) -> Reason | None:
        keys, values = case.key_heads, case.value_heads
        if not keys or values is None or values % keys == 0:
            return None
        return Reason("head-ratio", {"value_heads": values, "key_heads": keys})

    return Limit("head-ratio", mark, f"value heads are a multiple of key heads: {fact}", check)


def head_size(mark: str, limit: int, fact: str) -> Limit:
    """The key head size is at most `limit`."""

    def check(case: Case) -> Reason | None:
        if case.key_dim is None or case.key_dim <= limit:
            return None
        return Reason("head-size", {"key_dim": case.key_dim, "limit": limit})

    return Limit("head-size", mark, f"key head size at most {limit}: {fact}", check)


def value_head_size(mark: str, limit: int, fact: str) -> Limit:
    """The value head size is at most `limit`."""

    def check(case: Case) -> Reason | None:
        if case.value_dim is None or case.value_dim <= limit:
            return None
        return Reason("value-head-size", {"value_dim": case.value_dim, "limit": limit})

    return Limit("value-head-size", mark, f"value head size at most {limit}: {fact}", check)


def head_count(mark: str, limit: int, fact: str) -> Limit:
    """There are at most `limit` heads of either kind."""

    def check(case: Case) -> Reason | None:
        if max(case.key_heads or 0, case.value_heads or 0) <= limit:
            return None
        heads = {"key_heads": case.key_heads, "value_heads": case.value_heads}
        return Reason("head-count", {**heads, "limit": limit})

    return Limit("head-count", mark, f"at most {number(limit, 'head')} of either kind: {fact}", check)


def static_batch(mark: str, fact: str) -> Limit:
    """The batch is the one that the output takes, or free to become it."""

    def check(case: Case) -> Reason | None:
        # A node that is there already (no source dtypes) may be written for several sequences.
        if case.batch == case.options.batch or not isinstance(case.batch, int) or not case.dtypes:
            return None
        return Reason("static-batch", {"batch": case.batch, "wanted": case.options.batch})

    return Limit("static-batch", mark, f"a batch that is dynamic or that of --batch: {fact}", check)


def bf16_boundary(mark: str) -> Limit:
    """What is bfloat16 becomes float16 only where that was asked for."""

    def check(case: Case) -> Reason | None:
        roles = [name for name, dtype in case.dtypes.items() if dtype == TensorProto.BFLOAT16]
        if not roles or case.boundary != TensorProto.FLOAT16 or case.options.allow_bf16_to_fp16:
            return None
        return Reason("bf16-boundary", {"roles": ", ".join(roles)})

    fact = "with boundary fp16 no bfloat16 operand, unless allowed: q, k, v, beta and states are float16"
    return Limit("bf16-boundary", mark, fact, check)


def rgdr_tokens(mark: str, limit: int) -> Limit:
    """The token count is a literal of at most `limit`."""

    def check(case: Case) -> Reason | None:
        if case.tokens is not None and 1 <= case.tokens <= limit:
            return None
        found = case.tokens_text if case.tokens is None else case.tokens
        return Reason("rgdr-tokens", {"tokens": found, "limit": limit})

    fact = f"{span(1, limit, 'token')}, a number in the file: a longer sequence gets no result and no error"
    return Limit("rgdr-tokens", mark, fact, check)


def rgdr_head_size(mark: str, block: int) -> Limit:
    """Both head sizes are multiples of `block`."""

    def check(case: Case) -> Reason | None:
        if not (case.key_dim or 0) % block and not (case.value_dim or 0) % block:
            return None
        sizes = {"key_dim": case.key_dim, "value_dim": case.value_dim}
        return Reason("rgdr-head-size", {**sizes, "block": block})

    fact = f"head sizes are multiples of {block}: other rows are read and written past their end"
    return Limit("rgdr-head-size", mark, fact, check)


def rgdr_batch_heads(mark: str, block: int) -> Limit:
    """With more than one sequence, value heads are a multiple of `block`."""

    def check(case: Case) -> Reason | None:
        # What is to be fused takes the batch that is asked for; a node that is there already has its own.
        batch = case.options.batch if case.dtypes else case.batch
        if not isinstance(batch, int) or batch == 1 or not (case.value_heads or 0) % block:
            return None
        return Reason("rgdr-batch-heads", {"batch": batch, "value_heads": case.value_heads, "block": block})

    fact = f"for several sequences, value heads are a multiple of {block}: other gates are read past their end"
    return Limit("rgdr-batch-heads", mark, fact, check)


def rgdr_boundary(mark: str) -> Limit:
    """RecurrentGatedDeltaRule is for bfloat16 only."""

    def check(case: Case) -> Reason | None:
        return None if case.boundary == TensorProto.BFLOAT16 else Reason("rgdr-boundary", {})

    return Limit("rgdr-boundary", mark, "boundary bf16: q, k, v, beta and the state are bfloat16", check)


def least_opset(mark: str, least: int, wanted: int) -> Limit:
    """The file's opset can be raised."""

    def check(case: Case) -> Reason | None:
        if case.options.opset >= least:
            return None
        return Reason("opset-below", {"opset": case.options.opset, "least": least, "wanted": wanted})

    return Limit("opset-below", mark, f"files before opset {least} are not raised to {wanted}", check)
