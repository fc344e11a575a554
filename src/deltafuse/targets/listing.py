"""What ``fuse targets`` tells of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deltafuse.probing import short_dtype
from deltafuse.targets.profile import BOUNDARIES, Operator, Port, Profile

_DTYPES = {dtype: name for name, dtype in BOUNDARIES.items()}


#: What the letter in front of a limit says of where it is known from.
MARKS = {"V": "seen in a file or a run", "S": "read in public source", "A": "assumed"}
LEGEND = "marks of where a limit is known from: " + "; ".join(f"{mark} {what}" for mark, what in MARKS.items())


def lines_of(profile: Profile) -> Iterator[str]:
    """A profile for people."""
    yield f"{profile.name}: {profile.title}"
    boundaries = ", ".join(_DTYPES[dtype] for dtype in profile.boundaries)
    operators = "; ".join(f"{one.op} (signature {one.signature})" for one in profile.operators)
    yield f"  operators: {operators}; boundary: {boundaries}"
    if profile.others:
        yield f"  for ordinary expressions, by default: {', '.join(one.op for one in profile.others)}"
    for needed in profile.requires:
        yield f"  needs {needed.package} {needed.version} ({needed.mark}): {needed.fact}"
    shared = set(profile.shared)
    for limit in profile.limits:
        owners = [one.op for one in profile.operators if limit in one.limits and limit not in shared]
        of = f" ({', '.join(dict.fromkeys(owners))})" if owners else ""
        yield f"  {limit.mark}  {limit.code}{of}: {limit.fact}"


def details_of(profile: Profile) -> Iterator[str]:
    """One profile in full: its limits and what it needs, then each operator with its ports and attributes."""
    yield from lines_of(profile)
    if profile.opset is not None:
        yield f"  opset: {profile.opset[0] or 'ai.onnx'} {profile.opset[1]}"
    for one in (*profile.operators, *profile.others):
        yield f"operator {one.op}, signature {one.signature}: {one.domain or 'ai.onnx'} {one.op_type}"
        yield from _ports("input", one.inputs)
        yield from _ports("output", one.outputs)
        for rule in one.attributes:
            value = "" if rule.value is None else f" = {rule.value!r}"
            yield f"  attribute {rule.name}{value}{'' if rule.required else ', optional'}"
        if one.limits:
            yield f"  limits of it alone: {', '.join(limit.code for limit in one.limits)}"


def _ports(kind: str, ports: Sequence[Port]) -> Iterator[str]:
    for number, port in enumerate(ports, 1):
        marks = [*(["optional"] if port.optional else []), *(["a constant of the file"] if port.constant else [])]
        types = [_DTYPES.get(dtype) or short_dtype(dtype) for dtype in port.dtypes] or ["the boundary's type"]
        layout = f" {port.layout}" if port.layout else ""
        yield f"  {kind} {number} {port.name}{layout}: {', '.join([' or '.join(types), *marks])}"


def target_document(profile: Profile) -> dict[str, Any]:
    """A profile as JSON."""
    return {
        "name": profile.name,
        "title": profile.title,
        "boundaries": [_DTYPES[dtype] for dtype in profile.boundaries],
        "signatures": list(profile.signatures),
        "opset": None if profile.opset is None else {"domain": profile.opset[0], "version": profile.opset[1]},
        "requires": [
            {"package": one.package, "version": one.version, "mark": one.mark, "fact": one.fact}
            for one in profile.requires
        ],
        "operators": [_operator(one) for one in profile.operators],
        "others": [_operator(one) for one in profile.others],
        "limits": [{"code": limit.code, "mark": limit.mark, "fact": limit.fact} for limit in profile.limits],
    }


def _operator(operator: Operator) -> dict[str, Any]:
    ports = {
        "inputs": operator.inputs,
        "outputs": operator.outputs,
    }
    return {
        "op": operator.op,
        "signature": operator.signature,
        "op_type": operator.op_type,
        "domain": operator.domain,
        **{
            kind: [{"name": port.name, "layout": port.layout, "optional": port.optional} for port in found]
            for kind, found in ports.items()
        },
        "attributes": [rule.name for rule in operator.attributes],
        "limits": [limit.code for limit in operator.limits],
    }
