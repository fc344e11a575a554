"""Kinds of terms that the values of a site consist of."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Term(IntEnum):
    """What the terms of a value have in common.

    Attributes:
        ZERO: there are none: nothing but zeros.
        LOG: each is the log decay times a whole number.
        MASKED: the same, or so far below zero that its exponential is zero: it is not to be taken from anything.
        OPERAND: each has a query, key, value, beta or state before any norm as a factor.
        UNIT: they are rows of length one, or what is left of such rows.
        BARE: some may hold nothing of that: exponentials of the decay, and constants beside data.
    """

    ZERO = 0
    LOG = 1
    MASKED = 2
    OPERAND = 3
    UNIT = 4
    BARE = 5


#: Terms that only sums and exponentials may be made of.
LOGS = frozenset({Term.LOG, Term.MASKED})


def together(kinds: Iterable[Term]) -> Term | None:
    """What values of some kinds are in one sum or one tensor; None where the log decay stands beside other data."""
    found = set(kinds) - {Term.ZERO}
    if not found.isdisjoint(LOGS):
        return max(found) if found <= LOGS else None
    return Term.ZERO if not found else found.pop() if len(found) == 1 else Term.BARE
