"""Near misses of the rule, each with the reason that is to be given."""

from __future__ import annotations

import functools

import torch

from spelled_chunk import Chunked
from spelled_loops import Looped
from spelled_near import NEAR, Erasing, Twice, gated_tokens, transposed
from spelled_steps import Stepwise
from zoo_member import Member, operands
from zoo_spellings import ANY


def missed(member: Member, code: str) -> Member:
    """A member that is not the rule."""
    return member.replaced(expect="no-match", exit=3, codes=[code])


def step(code: str, name: str, function, tokens: int = 3, **sizes: int) -> Member:
    """Steps with one fault."""
    build = functools.partial(Stepwise, function)
    why = (function.__doc__ or "").strip()
    return missed(Member(f"near_{name}", build, operands(tokens, **sizes), why, tokens=tokens), code)


def chunk(code: str, name: str, why: str, tokens: int = 8, size: int = 4, **options: str) -> Member:
    """A chunk rule with one fault."""
    build = functools.partial(Chunked, size, **options)
    member = Member(f"near_chunk_{name}", build, operands(tokens), why, tokens=tokens, chunk=size)
    return missed(member, code)


def erasing(name: str, why: str, *, gated: bool) -> Member:
    """An erase gate, or a key to read with."""
    given = operands(3)
    vector = torch.rand_like(given["key"]) if gated else given["key"] + 0.3 * torch.randn_like(given["key"])
    state = given.pop("state")
    inputs = given | {"erase": vector, "state": state}
    member = Member(f"near_{name}", functools.partial(Erasing, gated=gated), inputs, why, tokens=3)
    return missed(member, "erase-per-channel")


def twice() -> Member:
    """Two Householder steps."""
    many, few = operands(6, key_heads=4), operands(3, key_heads=4)
    inputs = {name: (few if name in ("query", "g", "state") else many)[name] for name in many}
    return missed(Member("near_two_steps", Twice, inputs, "two updates for each token", tokens=3), "two-steps")


def gated() -> Member:
    """The rule, but no value is its output as a whole."""
    build = functools.partial(Stepwise, gated_tokens)
    why = "each token's output is gated before the tokens are put together"
    return Member("parts_gated_tokens", build, operands(3), why, tokens=3)


def short_while() -> Member:
    """A while loop that counts to a smaller number."""
    build = functools.partial(Looped, "short-while")
    member = Member("near_while_short", build, operands(7, batch=2), "a while loop of 2000 tokens", tokens=7, axes=ANY)
    return missed(member, "trip-count")


NEAR_MISSES = (
    *(step(code, name, function) for code, steps in NEAR.items() for name, function in steps.items()),
    step("transposed-state", "transposed", transposed, value_dim=16),
    erasing("erase_channel", "an erase gate per channel (Gated DeltaNet-2)", gated=True),
    erasing("own_read_key", "the delta is read with a vector of its own (Comba)", gated=False),
    twice(),
    chunk("decay-sign", "decay_sign", "exp(-g) everywhere", fault="decay-sign"),
    chunk("read-before-update", "diagonal", "the mask of q k^T lacks its diagonal", fault="diagonal"),
    chunk("diagonal-kept", "diagonal_kept", "the mask of k k^T keeps its diagonal", fault="kept", inverse="divided"),
    chunk("beta-value-only", "beta_value", "beta on the value only", fault="beta-value"),
    chunk("beta-erase-only", "beta_erase", "beta on the key only", fault="beta-key"),
    chunk("no-delta-term", "no_delta", "no inverse and no correction", fault="no-delta"),
    chunk("inverse-short", "short_rows", "the inverse lacks its last row", inverse="short-rows"),
    chunk("first-tokens-only", "short_doubling", "the inverse lacks a factor", 16, 8, inverse="short-doubling"),
    chunk("tokens-dropped", "last", "the last chunk is dropped", fault="last"),
    gated(),
    short_while(),
)
