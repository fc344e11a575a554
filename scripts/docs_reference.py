"""The commands and the targets as pages of the documentation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from deltafuse import targets as profiles
from deltafuse.parsers import PARSERS, plain_parser
from deltafuse.targets.listing import target_document
from deltafuse.targets.profile import BOUNDARIES, Operator, Port, Profile
from docs_text import cell, code, table

_DTYPES = {dtype: name for name, dtype in BOUNDARIES.items()} | {6: "i32"}
#: How wide a help text is.
_WIDTH = "80"


def commands() -> str:
    """The help of every command."""
    makers = {"fuse": plain_parser, **{f"fuse {name}": parser for name, parser in PARSERS.items()}}
    with _wide():
        helps = {name: make().format_help().rstrip() for name, make in makers.items()}
    return "\n".join(f"## {name}\n\n```text\n{text}\n```\n" for name, text in helps.items())


@contextmanager
def _wide() -> Iterator[None]:
    """Help texts are as wide as the terminal is said to be."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def targets() -> str:
    """Every shipped profile."""
    return "\n".join(_target(profiles.get(name)) for name in profiles.names())


def _target(profile: Profile) -> str:
    document = target_document(profile)
    parts = [f"## {profile.name}\n\n{profile.title}.\n"]
    opset = document["opset"]
    facts = [
        f"Boundary: {', '.join(document['boundaries'])}.",
        f"Batch: {'written into the nodes (`--batch`)' if profile.fixes_batch else 'as in the model'}.",
    ]
    if opset is not None:
        facts.append(f"Opset import: {code(opset['domain'] or 'ai.onnx')} {opset['version']} or newer.")
    if profile.lint.forbidden_ops:
        facts.append(f"Stops its converter wherever it stands: {', '.join(map(code, profile.lint.forbidden_ops))}.")
    parts.append("".join(f"- {fact}\n" for fact in facts))
    parts.append("Needed to run what is written:\n")
    needs = [[cell(f"{one.package} {one.version}"), one.mark, cell(one.fact)] for one in profile.requires]
    parts.append(table(("package", "mark", "what for"), needs))
    parts.append("Limits; a site beyond one is refused with this code:\n")
    parts.append(table(("code", "mark", "operator", "what holds, and what happens beyond it or why"), _limits(profile)))
    parts += [_operator(profile, one) for one in (*profile.operators, *profile.others)]
    return "\n".join(parts)


def _limits(profile: Profile) -> Iterator[list[str]]:
    shared = set(profile.shared)
    for limit in profile.limits:
        owners = [one.op for one in profile.operators if limit in one.limits and limit not in shared]
        link = f"[{code(limit.code)}](reasons.md#{limit.code})"
        yield [link, limit.mark, ", ".join(map(code, dict.fromkeys(owners))) or "all", cell(limit.fact)]


def _operator(profile: Profile, operator: Operator) -> str:
    domain = operator.domain or "ai.onnx"
    heading = f"### {operator.op}, {operator.signature} {{ #{profile.name}-{operator.op}-{operator.signature} }}"
    kind = f"Node {code(operator.op_type)} of domain {code(domain)}, signature {code(operator.signature)}."
    ports = [*_ports("input", operator.inputs), *_ports("output", operator.outputs)]
    attributes = ", ".join(code(rule.name) for rule in operator.attributes)
    return "\n".join(
        (f"{heading}\n\n{kind}\n", table(("", "name", "layout", "type", ""), ports), f"Attributes: {attributes}.\n")
    )


def _ports(kind: str, ports: tuple[Port, ...]) -> Iterator[list[str]]:
    for index, port in enumerate(ports):
        types = ", ".join(_DTYPES[dtype] for dtype in port.dtypes) or "boundary"
        says = {"optional": port.optional, "never fed": not port.role, "constant": port.constant, "fresh": port.fresh}
        yield [f"{kind} {index}", code(port.name), code(port.layout), types, ", ".join(k for k, v in says.items() if v)]
