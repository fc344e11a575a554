"""LinearAttention against its operator's documentation: heads, widths, inputs that the rule needs, opset import."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import AttributeProto, defs

from deltafuse.lint_view import Finding, View
from deltafuse.wording import number

_RULES = ("linear", "gated", "delta", "gated_delta")


def attention_findings(view: View) -> Iterator[Finding]:
    """What the signature alone does not say."""
    yield from _rule(view)
    yield from opset_findings(view)
    chunk = view.attributes.get("chunk_size")
    if chunk is not None and chunk.type == AttributeProto.INT and chunk.i < 1:
        yield view.finding("attribute-value", "chunk_size", chunk.i, "1 or more", "leave chunk_size out: it is a hint")
    heads = [view.attributes[name].i for name in ("q_num_heads", "kv_num_heads") if name in view.attributes]
    if len(heads) == 2:
        yield from _heads(view, *heads)


def attention_sizes(view: View) -> dict[str, int]:
    """Sizes by the letters of `deltafuse.lint_operands.sizes_of`, whose axes LinearAttention packs with the heads.

    Args:
        view: the node.

    Returns:
        Those that are known: N is the heads that the key has.
    """
    heads = {name: view.attributes[name].i for name in ("q_num_heads", "kv_num_heads") if name in view.attributes}
    queries, states = heads.get("q_num_heads", 0), heads.get("kv_num_heads", 0)
    found: dict[str, int] = {}
    if states > 0:
        found["H"] = states
        value = _width(view, "value")
        found |= {"V": value // states} if value is not None else {}
    query, key = _width(view, "query"), _width(view, "key")
    if query is not None and 0 < queries <= query:
        found["K"] = query // queries
        found |= {"N": key // found["K"]} if key is not None else {}
    shape = view.shape(view.ports["query"]) if "query" in view.ports else None
    rows = zip("BT", shape or (), strict=False)
    return found | {letter: size for letter, size in rows if isinstance(size, int)}


def _rule(view: View) -> Iterator[Finding]:
    attribute = view.attributes.get("update_rule")
    rule = "gated_delta" if attribute is None else attribute.s.decode(errors="replace")
    if rule not in _RULES:
        wanted = " or ".join(_RULES)
        yield view.finding("update-rule", "update_rule", rule, wanted, f"set update_rule to {wanted}")
        return
    needed = [*(["decay"] if "gated" in rule else []), *(["beta"] if "delta" in rule else [])]
    for name in (*(port.name for port in view.operator.inputs if not port.optional), *needed):
        if name not in view.ports and (name in needed or name not in ("decay", "beta")):
            yield view.finding("input-missing", name, "not fed", f"fed, for {rule}", f"feed {name}")
    for name in ("decay", "beta"):
        if name in view.ports and name not in needed:
            fix = f"leave {name} empty, or set update_rule to a rule that has it"
            yield view.finding("input-extra", name, "fed", f"absent, for {rule}", fix)


def opset_findings(view: View) -> Iterator[Finding]:
    """The file imports what the operator came with, and no version in which it is another."""
    domain, least = view.profile.opset or ("", 0)
    found, where = view.model.opset_imports.get(domain), domain or "ai.onnx"
    if found is not None and found > least > 0 and (_since(view, domain, found) or least) > least:
        fix = f"import {where} {least}: {view.operator.op} is another operator in the newer version"
        yield view.finding("opset-newer", where, found, least, fix)
    if found is None or found < least:
        fix = f"import {where} {least}; raise other operators with it"
        yield view.finding("opset", where, "absent" if found is None else found, f"{least} or newer", fix)


def opset_notes(view: View) -> Iterator[Finding]:
    """The file imports a version that is newer than what is known here."""
    domain, least = view.profile.opset or ("", 0)
    found = view.model.opset_imports.get(domain, 0)
    if found > least > 0 and _since(view, domain, found) is None:
        fix = f"look up whether {view.operator.op} has changed since {least}, or lint with a newer onnx"
        known = f"{defs.onnx_opset_version()} at most"
        told = f"the file imports ai.onnx {found}, the installed onnx knows {known}"
        yield view.finding("opset-unchecked", "ai.onnx", told, known, fix)


def _since(view: View, domain: str, version: int) -> int | None:
    """The version that the operator is of where a file imports `version`; None where nobody here knows."""
    if domain:
        # Runtimes refuse a newer version of a domain of their own than they have.
        return version
    if version > defs.onnx_opset_version() or not defs.has(view.operator.op_type, version, ""):
        return None
    return defs.get_schema(view.operator.op_type, version, "").since_version


def _heads(view: View, queries: int, states: int) -> Iterator[Finding]:
    if min(queries, states) < 1:
        fix = "count the heads of the query, and those of the value"
        yield view.finding("heads", "q_num_heads", f"{queries} and {states}", "1 or more of both", fix)
        return
    grouped = queries % states == 0 or (bool(view.operator.domain) and states % queries == 0)
    if not grouped:
        fix = "repeat query and key to the value heads, or use com.microsoft where there are fewer of them"
        yield view.finding("heads", "q_num_heads", queries, f"a positive multiple of {states}", fix)
        return
    yield from _widths(view, queries, states)


def _widths(view: View, queries: int, states: int) -> Iterator[Finding]:
    widths = {name: _width(view, name) for name in ("query", "key", "value", "decay", "beta")}
    query, key, value = widths["query"], widths["key"], widths["value"]
    key_dim = query // queries if query is not None and query % queries == 0 else None
    fix = "pack heads into the last axis: heads times head size"
    if query is not None and key_dim is None:
        yield view.finding("width", "query", query, f"a multiple of {queries}", fix)
    if key is not None and key_dim and (key % key_dim or states % max(1, key // key_dim)):
        sharing = number(states, "state shares", "states share")
        yield view.finding("width", "key", key, f"heads of {key_dim} that {sharing}", fix)
    if value is not None and value % states:
        yield view.finding("width", "value", value, f"a multiple of {states}", fix)
    for name, allowed in (("decay", (states, states * (key_dim or 0))), ("beta", (states, 1))):
        width = widths[name]
        if width is not None and width not in allowed:
            wanted = " or ".join(map(str, dict.fromkeys(allowed)))
            yield view.finding("width", name, width, wanted, f"give {name} one number a head")
    yield from _state(view, states, key_dim, value)


def _state(view: View, states: int, key_dim: int | None, value: int | None) -> Iterator[Finding]:
    shape = view.shape(view.ports.get("past_state", 0)) if "past_state" in view.ports else None
    wanted = [states, key_dim, value // states if value is not None and value % states == 0 else None]
    if shape is None or len(shape) != 4:
        return
    if any(
        isinstance(size, int) and other is not None and size != other
        for size, other in zip(shape[1:], wanted, strict=True)
    ):
        found, text = " x ".join(map(str, shape[1:])), " x ".join("?" if size is None else str(size) for size in wanted)
        fix = "feed the state as [batch, value heads, key size, value size]"
        yield view.finding("input-shape", "past_state", found, text, fix)


def _width(view: View, name: str) -> int | None:
    shape = view.shape(view.ports[name]) if name in view.ports else None
    last = shape[-1] if shape is not None and len(shape) == 3 else None
    return last if isinstance(last, int) else None
