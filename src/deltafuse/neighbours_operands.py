"""Neighbours of a rule with other operands than the rule: a vector more, twice as many keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import cast

import numpy as np

from deltafuse import layouts
from deltafuse.draws import Array, Operands
from deltafuse.norms import normalise
from deltafuse.reasons import TEXTS, Reason
from deltafuse.roles import Assignment, assignments, gate_layouts
from deltafuse.rule import first_tokens, relative, run_rule
from deltafuse.search import Setting

TEXTS.update(
    {
        "erase-per-channel": "the delta is read with {value} and not with the key: an erase gate per channel (Gated "
        "DeltaNet-2) or a key of its own (Comba) is another rule; leave the site as it is, or read the delta with "
        "the key, if the gated delta rule is meant",
        "two-steps": "each token updates the state twice: a product of two Householder steps (DeltaProduct) is "
        "another rule; leave the site as it is: no target has an operator for it",
    }
)

#: A recurrence with a keyword more.
Variant = Callable[..., tuple[Array, Array]]

#: A root that is not in the graph: ones, in place of an operand that is missing.
ONES = -1
#: Fewer or more roots than these are no rule with a vector more.
_MORE = (4, 8)
#: See `deltafuse.roles`.
_SCREEN = 1e-8
#: Tokens that tell most readings apart.
_FIRST = 2


def ones(setting: Setting, feeds: Mapping[int, Array]) -> Array:
    """One number for each token and head: a decay per channel has an axis more."""
    shape = feeds[setting.roots[0]].shape
    return np.ones(shape[:-1] if setting.pattern.decay == "channel" else shape)


def agreeing(found: Array, wanted: Array) -> int:
    """How many first tokens are equal up to one factor: all, or at least two; else 0."""
    first = min(2, wanted.shape[1])
    power = float((wanted[:, :first] ** 2).sum())
    scale = float((found[:, :first] * wanted[:, :first]).sum()) / power if np.isfinite(power) and power else 0.0
    if not scale:
        return 0
    count = 0
    while count < wanted.shape[1] and relative(found[:, count], wanted[:, count] * scale) < _SCREEN:
        count += 1
    return count if count >= first else 0


def erasing(setting: Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]) -> Reason | None:
    """A vector more: a gate on what the delta is read with, or what it is read with itself; maybe a gate on values."""
    variants = cast("Sequence[Variant]", getattr(setting.pattern, "erasing", ()))
    for root, written in permutations((*setting.roots[1:], 0), 2) if variants else ():
        if root == 0 or not _MORE[0] < len(feeds) - (written != 0) < _MORE[1]:
            continue
        rest = {value: array for value, array in feeds.items() if value not in (root, written)}
        for assignment in _withones(setting, rest):
            if _erases(setting, assignment, feeds, (root, written), ran, variants):
                return Reason("erase-per-channel", {"value": setting.model.graph.name(root)})
    return None


def _withones(setting: Setting, feeds: Mapping[int, Array]) -> Iterator[Assignment]:
    """Readings of some feeds, and of the same with a beta of ones."""
    pattern, gate = setting.pattern, setting.roots[0]
    for given in (feeds, {**feeds, ONES: ones(setting, feeds)}):
        yield from assignments(given, gate, setting.reading.norms, pattern.decay)


def _erases(
    setting: Setting,
    assignment: Assignment,
    feeds: Mapping[int, Array],
    extra: tuple[int, int],
    ran: Mapping[int, Array],
    variants: Sequence[Variant],
) -> bool:
    """Whether a vector, with or without the key, is what the delta is read with.

    Args:
        setting: of the proof.
        assignment: of all other roots.
        feeds: of all roots.
        extra: the vector, and the gate on values (0 for none).
        ran: what the cut made of it.
        variants: the rule, and what else reads the delta with a vector, each with a keyword ``erase``.
    """
    root, written = extra
    key, value, sizes = assignment.values["key"], assignment.values["value"], assignment.sizes
    known = {ONES: ones(setting, feeds), **feeds}
    if known[key].shape != feeds[root].shape:
        return False
    operands = assignment.read(known)
    if written:
        if known[value].shape != feeds[written].shape:
            return False
        gate = layouts.unpack(feeds[written], assignment.layouts["value"], "BTHV", sizes)
        operands = replace(operands, value=operands.value * gate)
    vectors = layouts.unpack(feeds[root], assignment.layouts["key"], "BTNK", sizes), operands.key
    norms = setting.reading.norms
    vector, plain = (
        normalise(array, norms[one].kind, norms[one].eps) if one in norms else array
        for one, array in zip((root, key), vectors, strict=True)
    )
    for erase, variant in product((vector * plain, vector), variants):
        repeated = np.repeat(erase, sizes["H"] // sizes["N"], axis=2)
        # Nearly all are told by their first tokens.
        for tokens in (_FIRST, None):
            reading = partial(variant, erase=repeated[:, :tokens])
            wanted, _ = run_rule(reading, first_tokens(operands, tokens), assignment.preparation())
            if not _explains(assignment, wanted, ran):
                break
        else:
            return True
    return False


def _explains(assignment: Assignment, wanted: Array, ran: Mapping[int, Array]) -> bool:
    """Whether some value of the cut is an output, as far as that is given."""
    tokens = wanted.shape[1]
    return any(
        agreeing(layouts.unpack(array, layout, "BTHV", assignment.sizes)[:, :tokens], wanted) == tokens
        for array in ran.values()
        if np.isfinite(array).all()
        for layout, _ in layouts.fits(layouts.OUTPUTS, array.shape, assignment.sizes)
    )


def twice(setting: Setting, feeds: Mapping[int, Array], ran: Mapping[int, Array]) -> Reason | None:
    """Two updates for each token: keys, values and betas have twice as many tokens as the decay."""
    if setting.pattern.decay != "head":
        return None
    gate = setting.roots[0]
    for layout, sizes in layouts.fits(gate_layouts("head"), feeds[gate].shape, {}):
        if "T" not in layouts.axes(layout):
            continue
        first, second = (_halved(feeds, gate, sizes["T"], half) for half in (0, 1))
        if first is None or second is None:
            continue
        for assignment in assignments(first, gate, setting.reading.norms):
            operands = _interleaved(assignment.read(first), assignment.read(second))
            wanted, _ = run_rule(setting.pattern.recurrence, operands, assignment.preparation())
            if _explains(assignment, wanted[:, 1::2], ran):
                return Reason("two-steps")
    return None


def _halved(feeds: Mapping[int, Array], gate: int, tokens: int, half: int) -> dict[int, Array] | None:
    """Every second token of the operands that have twice as many; None where none has."""
    halved: dict[int, Array] = {}
    for value, array in feeds.items():
        axis = next((i for i, size in enumerate(array.shape) if size == 2 * tokens and 0 < i < array.ndim - 1), None)
        if value == gate or axis is None:
            halved[value] = array
        else:
            halved[value] = np.take(array, range(half, 2 * tokens, 2), axis)
    return halved if any(halved[value].shape != feeds[value].shape for value in feeds) else None


def _interleaved(first: Operands, second: Operands) -> Operands:
    """Two steps for each token, of which the second does not decay."""

    def pair(one: Array, other: Array) -> Array:
        stacked = np.stack([one, other], axis=2)
        return np.reshape(stacked, (one.shape[0], 2 * one.shape[1], *one.shape[2:]))

    return replace(
        first,
        query=pair(first.query, first.query),
        key=pair(first.key, second.key),
        value=pair(first.value, second.value),
        beta=pair(first.beta, second.beta),
        g=pair(first.g, np.zeros_like(first.g)),
    )
