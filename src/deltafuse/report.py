"""The JSON documents: built from the dataclasses, keys stable. Light, so that every exit can print one.

Keys of ``fuse`` and ``inspect`` (schema 1): see `fuse_document`. A dim is a number or the text of a symbolic size.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from deltafuse.dims import Dim
    from deltafuse.expression_match import ExpressionMatch
    from deltafuse.held import Held
    from deltafuse.match import FuseReport, Looked, Match, Proof, Role, SiteReport
    from deltafuse.probing import Listing, NodeRow, TensorRow
    from deltafuse.reasons import Nearest, Reason

SCHEMA = 1
ROLES = ("query", "key", "value", "g", "beta", "state")
OUTPUTS = ("out", "final_state")
#: Element types of TensorProto that a role can have.
DTYPES = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}

Document = dict[str, Any]


def write(document: Document) -> None:
    """Prints a document on stdout."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False, default=str) + "\n")


def failure(arguments: Sequence[str], exit_code: int, code: str, text: str) -> Document:
    """What an error leaves to say: the keys of `fuse_document`, empty, and ``error``.

    Args:
        arguments: the command line; its first file is taken for the model.
        exit_code: 1 or 2.
        code: stable short name, e.g. ``not-onnx``.
        text: the message.
    """
    files = [argument for argument in arguments if argument.endswith(".onnx")]
    return {
        "schema": SCHEMA,
        "exit": exit_code,
        "error": {"code": code, "text": text},
        "model": files[0] if files else None,
        "target": None,
        "nodes_before": None,
        "nodes_after": None,
        "seconds": {},
        "sites": [],
        "pinned": [],
        "notes": [],
    }


def fuse_document(report: FuseReport) -> Document:
    """What ``fuse`` and ``inspect`` found and did."""
    return {
        "schema": SCHEMA,
        "exit": report.exit,
        "error": None,
        "model": report.model,
        "output": report.output,
        "target": report.target,
        "nodes_before": report.nodes_before,
        "nodes_after": report.nodes_after,
        "seconds": {stage: round(spent, 3) for stage, spent in report.seconds.items()},
        "sites": [site_document(site) for site in report.sites],
        "pinned": [dataclasses.asdict(pinned) for pinned in report.pinned],
        "notes": list(report.notes),
        "extracted": list(report.extracted),
        "operators": {
            op: {"before": before, "after": after, "change": after - before}
            for op, (before, after) in report.operators.items()
        },
    }


def site_document(site: SiteReport) -> Document:
    """One site; what is known of a match only is null where there is none."""
    reason = site.reason
    known = match_document(site.match)
    if site.rule:
        known |= {"rule": site.rule, "form": "expression"}
    return {
        "name": site.name,
        "status": site.status,
        "status_note": reason.what if reason is not None and reason.code == "left-out" else None,
        "op": site.op,
        "inside": site.inside or None,
        **known,
        "nodes": site.nodes,
        "nodes_removed": site.removed,
        "nodes_added": site.added,
        "emitted": dict(site.emitted),
        "reason": None if reason is None else reason_document(reason),
        "looked": looked_document(site.looked),
        "nearest": None if reason is None else nearest_document(reason.nearest),
        "notes": list(site.notes),
        "held": held_document(site.held),
    }


def held_document(held: Held | None) -> Document | None:
    """A site that an earlier run fused; None of any other."""
    if held is None:
        return None
    return {
        "node": held.node,
        "domain": held.domain,
        "attributes": dict(held.attributes),
        "inputs": [dataclasses.asdict(port) for port in held.inputs],
        "outputs": [dataclasses.asdict(port) for port in held.outputs],
        "rounded": [{"operand": name, "was": was, "now": now} for name, was, now in held.rounded],
        "replaced": dict(held.replaced),
    }


def reason_document(reason: Reason) -> Document:
    """Why a site is not fused: ``fix`` is the end of ``text`` that says what to do."""
    return {"code": reason.code, "text": reason.text, "fix": reason.fix}


def looked_document(looked: Sequence[Looked]) -> Document | None:
    """The tensors that a site which is no match reads and writes; None where they are not known."""
    if not looked:
        return None
    ends: dict[str, list[Document]] = {"inputs": [], "outputs": []}
    for one in looked:
        shape = None if one.shape is None else [None if size is None else dim(size) for size in one.shape]
        dtype = None if not one.dtype else DTYPES.get(one.dtype, str(one.dtype))
        ends[f"{one.kind}s"].append({"value": one.name, "shape": shape, "dtype": dtype})
    return ends


def nearest_document(nearest: Nearest | None) -> Document | None:
    """How far a near miss is from the rule and its neighbours; None where nothing could be compared."""
    if nearest is None:
        return None
    differences = [{"name": name, "difference": error} for name, error in nearest.differences if error < float("inf")]
    return {"rule": nearest.rule, "tokens": nearest.tokens, "differences": differences}


def match_document(match: Match | ExpressionMatch | None) -> Document:
    """What was proven of a site."""
    keys = ("rule", "form", "roles", "outputs", "dims", "scale", "qk_l2norm", "l2norm_eps", "valid_tokens", "proof")
    if match is None:
        return dict.fromkeys(keys)
    if match.form == "expression":
        return dict.fromkeys(keys) | _expression_document(cast("ExpressionMatch", match))
    return _rule_document(cast("Match", match))


def _expression_document(match: ExpressionMatch) -> Document:
    """Only the keys that such a site has; ``parameters`` it has alone."""
    return {
        "rule": match.rule,
        "form": match.form,
        "roles": {name: role_document(role) for name, role in match.roles.items()},
        "outputs": {name: role.name for name, role in match.outputs.items()},
        # JSON knows no infinity: a bound that is none.
        "parameters": {name: x if abs(x) < float("inf") else None for name, x in match.parameters.items()},
        "proof": proof_document(match.proof),
    }


def _rule_document(match: Match) -> Document:
    norm, valid = match.query_norm, match.valid_tokens
    return {
        "rule": match.rule,
        "form": match.form,
        "roles": {name: role_document(getattr(match, name)) for name in ROLES},
        "outputs": {name: _name(getattr(match, name)) for name in OUTPUTS},
        "dims": {name: dim(size) for name, size in vars(match.dims).items()},
        "scale": match.scale,
        "qk_l2norm": norm is not None and match.key_norm is not None,
        "l2norm_eps": None if norm is None else norm.eps,
        "valid_tokens": None
        if valid is None
        else {
            "proven": [valid.low, valid.high],
            "below": valid.below,
            "above": valid.above,
            "tried": list(valid.tried),
        },
        "proof": proof_document(match.proof),
    }


def proof_document(proof: Proof) -> Document:
    """How equality was shown."""
    return {
        "precision": proof.precision,
        "max_error": proof.max_error,
        "emitted_error": proof.emitted_error,
        "draws": proof.draws,
        "shared_with": proof.shared_with,
    }


def role_document(role: Role | None) -> Document | None:
    """An operand as a tensor of the graph."""
    if role is None:
        return None
    return {
        "value": role.name,
        "shape": [dim(size) for size in role.shape],
        "dtype": DTYPES.get(role.dtype, str(role.dtype)),
        "layout": role.layout,
    }


def roles_text(match: ExpressionMatch) -> str:
    """``x=[n, 6] scale=[6] axis=-1 eps=1e-05``: the shapes of the roles, and what was solved."""
    shapes = [f"{name}=[{', '.join(str(dim(size)) for size in role.shape)}]" for name, role in match.roles.items()]
    return " ".join([*shapes, *(f"{name}={number:.9g}" for name, number in match.parameters.items())])


def dim(size: Dim) -> int | str:
    """A number, or the text of a symbolic size."""
    return size if isinstance(size, int) else str(size)


def plain_document(report: object) -> Document:
    """A report dataclass of verify or rollback: its fields under their own names."""
    if not dataclasses.is_dataclass(report) or isinstance(report, type):
        raise TypeError(f"{report!r} is not a report")
    return _plain(dataclasses.asdict(report))


def listing_document(listing: Listing) -> Document:
    """The tables of ``inspect --tensors --nodes --op``; a table that was not asked for has no key."""
    document: Document = {
        "model": listing.model,
        "producer": listing.producer,
        "ir_version": listing.ir_version,
        "opsets": listing.opsets,
        "node_count": listing.node_count,
    }
    if listing.tensors is not None:
        document["tensors"] = [_row(row) for row in listing.tensors]
    if listing.nodes is not None:
        document["nodes"] = [_row(row) for row in listing.nodes]
    if listing.ops is not None:
        document["ops"] = listing.ops
    return document | {"notes": list(listing.notes)}


def _row(row: TensorRow | NodeRow) -> Document:
    # asdict copies each value deeply, which takes longer than all else for two hundred thousand rows
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


def _name(role: Role | None) -> str | None:
    return None if role is None else role.name


def _plain(value: Any) -> Any:
    """JSON's own types: tuples become lists, paths text, numbers that JSON does not know text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in cast("dict[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value
