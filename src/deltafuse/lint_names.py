"""Nodes that are meant for a target, by their name, and that it does not have: misspelt, or in another domain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache

import onnx
from onnx import defs

from deltafuse.graph import Graph
from deltafuse.lint_attributes import value_of
from deltafuse.lint_view import Finding, kind_name
from deltafuse.lowering import CHUNK, RECURRENT
from deltafuse.lowering_attention import LINEAR_ATTENTION, MICROSOFT
from deltafuse.lowering_conv import CAUSAL_CONV
from deltafuse.targets import Profile

__all__ = ["CUSTOM", "NAMED", "meant", "unknown_findings"]

CUSTOM = "Custom"
#: Operators that are called by name, in a domain.
NAMED = (LINEAR_ATTENTION, CAUSAL_CONV)
_TYPES = (CHUNK, RECURRENT)
#: From this likeness on, a name is a misspelt one.
_NEAR = 0.85
_STANDARD = ("", "ai.onnx")


@cache
def meant(op: str, domain: str) -> str:
    """The operator, or the type of a Custom node, that an op_type is or is meant for; "" for none.

    Args:
        op: the op_type.
        domain: of the node; other tools' own domains have names of their own.
    """
    if op in (CUSTOM, *NAMED):
        return op
    if domain not in (*_STANDARD, MICROSOFT) or (domain in _STANDARD and defs.has(op)):
        return ""
    if domain == MICROSOFT:
        return _nearest(op, NAMED)
    # So short a word is like many: its own letters in another order or case.
    return CUSTOM if sorted(op.casefold()) == sorted(CUSTOM.casefold()) else _nearest(op, (*_TYPES, *NAMED))


def unknown_findings(graph: Graph, profile: Profile, node: int) -> Iterator[Finding]:
    """What is wrong with the name of a node that is none of the profile's operators.

    Args:
        graph: what the node is part of.
        profile: what to hold it against.
        node: one that is meant for something.
    """
    message, attributes = graph.node(node), graph.attributes(node)
    name = message.name or next(iter(message.output), "")
    wanted = meant(message.op_type, graph.domain[node])
    if message.op_type not in (CUSTOM, *NAMED):
        yield from _misspelt(profile, message, name, wanted)
        return
    if message.op_type in NAMED:
        yield from _unknown_named(profile, message, name)
        return
    if not _has_custom(profile):
        return
    ops = list(dict.fromkeys(one.op for one in profile.operators))
    known = ", ".join(ops)
    if "type" not in attributes:
        yield Finding("attribute-missing", name, "type", "absent", known, "say which operator the node calls")
    elif attributes["type"].type != onnx.AttributeProto.STRING:
        kinds = kind_name(attributes["type"].type), kind_name(onnx.AttributeProto.STRING)
        yield Finding("attribute-kind", name, "type", *kinds, f"write type as a string, one of {known}")
    elif "gateddelta" in (found := str(value_of(attributes["type"]))).casefold() or _nearest(found, ops):
        near = _nearest(found, ops)
        fix = f"write {near}" if near else f"use one of {known}, or another --target"
        yield Finding("unknown-type", name, "type", found, near or known, fix)


def _has_custom(profile: Profile) -> bool:
    return any(one.op_type == CUSTOM for one in profile.operators)


def _nearest(found: str, ops: Sequence[str]) -> str:
    """Which of some operators a name is meant for: in other letters, or misspelt."""
    folded = {op.casefold(): op for op in ops}
    return next((folded[near] for near in get_close_matches(found.casefold(), folded, 1, _NEAR)), "")


def _misspelt(profile: Profile, message: onnx.NodeProto, name: str, wanted: str) -> Iterator[Finding]:
    """An op_type that no operator set has, and that comes near to one of the profile's."""
    if wanted in (CUSTOM, *_TYPES):
        if _has_custom(profile):
            more = f", with the attribute type set to {wanted}" if wanted in _TYPES else ""
            fix = f"write the op_type {CUSTOM}{more}: the converter's parser goes by op_type alone"
            yield Finding("op-type", name, "op_type", message.op_type, CUSTOM, fix)
    elif any(one.op == wanted for one in (*profile.operators, *profile.others)):
        yield Finding("op-type", name, "op_type", message.op_type, wanted, f"write {wanted}")


def _unknown_named(profile: Profile, message: onnx.NodeProto, name: str) -> Iterator[Finding]:
    known = {one.op: one.domain for one in (*profile.operators, *profile.others) if one.op in NAMED}
    op, domain = message.op_type, message.domain
    if op in known and domain not in (*_STANDARD, MICROSOFT):
        fix = f"write the domain {known[op] or 'ai.onnx'}, or give the target that has it with --target"
        yield Finding("domain", name, "domain", domain, known[op] or "ai.onnx", fix)
    elif known and op not in known and domain in known.values():
        fix = "fuse the unfused file for this target, or give another with --target"
        yield Finding("unknown-type", name, "op_type", op, ", ".join(known), fix)
