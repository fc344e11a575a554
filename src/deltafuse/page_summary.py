"""The top of the page: the model, its ends, its operators before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from deltafuse.axis_names import symbol_roles, told
from deltafuse.evidence import Evidence
from deltafuse.match import FuseReport
from deltafuse.probing import byte_size, short_dtype
from deltafuse.tables import telling
from deltafuse.tensors import TensorHead
from deltafuse.wording import number, size_text

#: Operators that have a bar of their own.
_BARS = 18
_CUSTOM = "Custom "


@dataclass(frozen=True)
class End:
    """A graph input or output, as it was and as it is."""

    name: str
    kind: str
    before: str
    after: str


@dataclass(frozen=True)
class Bar:
    """How often an operator is there, before and after."""

    op: str
    before: int
    after: int


def facts(evidence: Evidence, report: FuseReport) -> list[tuple[str, str]]:
    """What the model is, line by line."""
    file = evidence.file
    raised = dict(evidence.draft.changes.opsets.imports)
    opsets = [f"{domain or 'ai.onnx'} {version}" for domain, version in file.opset_imports.items()]
    new = [f"{domain or 'ai.onnx'} {version}" for domain, version in raised.items()]
    return [
        ("model", report.model),
        *([("written", report.output)] if report.output else []),
        ("target", report.target),
        ("producer", file.producer or "unknown"),
        ("opset", ", ".join(opsets) + (f"; added or raised: {', '.join(new)}" if new else "")),
        ("IR version", str(file.ir_version)),
        ("weights", weights(file.constants) or "none"),
        ("nodes", nodes_text(report)),
        ("seconds", ", ".join(f"{stage} {spent:.1f}" for stage, spent in report.seconds.items())),
    ]


def nodes_text(report: FuseReport) -> str:
    """How many there were and are, and how many went and came with the sites."""
    if not changes(report):
        return f"{report.nodes_before:,}"
    text = f"{report.nodes_before:,} before, {report.nodes_after:,} after"
    gone, came = sum(site.removed for site in report.sites), sum(site.added for site in report.sites)
    return f"{text}: {gone:,} go and {came:,} come with the sites" if gone or came else text


def weights(heads: Iterable[TensorHead]) -> str:
    """Initializers by element type: how many, how large."""
    count: Counter[int] = Counter()
    size: Counter[int] = Counter()
    for head in heads:
        count[head.dtype] += 1
        size[head.dtype] += byte_size(head.dtype, head.dims) or 0
    told = ((short_dtype(dtype), number(n, "tensor"), size_text(size[dtype])) for dtype, n in count.most_common())
    return "; ".join(f"{dtype}: {tensors}, {large}" for dtype, tensors, large in told)


def ends(evidence: Evidence, report: FuseReport) -> list[End]:
    """Inputs and outputs with their axes; after is what was pinned."""
    graph = evidence.file.graph
    pinned = {(axis.value, axis.axis): axis.now for axis in report.pinned}
    roles = symbol_roles(report.sites)
    found: list[End] = []
    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            info = graph.value_info(value)
            name = graph.name(value)
            if info is None or not info.type.HasField("tensor_type"):
                found.append(End(name, kind, "not declared as a tensor", ""))
                continue
            tensor = info.type.tensor_type
            before: list[int | str] = [
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim
            ]
            after = [pinned.get((name, axis), size) for axis, size in enumerate(before)]
            texts = [
                f"{short_dtype(tensor.elem_type)} [{', '.join(told(size, roles.get(str(size), '')) for size in sizes)}]"
                for sizes in (before, after)
            ]
            found.append(End(name, kind, texts[0], texts[1] if after != before else ""))
    return found


def pins(report: FuseReport) -> list[tuple[str, int, str, int, str]]:
    """Tensor, axis, name of the size before, size now, why."""
    roles = symbol_roles(report.sites)
    return [
        (axis.value, axis.axis, told(axis.was, roles.get(axis.was, "")), axis.now, axis.why or "follows")
        for axis in report.pinned
    ]


def changes(report: FuseReport) -> bool:
    """Whether anything becomes of the nodes."""
    return any(before != after for before, after in report.operators.values()) or any(
        site.op and site.held is None for site in report.sites
    )


def bars(report: FuseReport) -> list[Bar]:
    """What sites become and what is new, then the operators that are there most often, and all others as one bar."""
    before, after = counts(report)
    order = sorted(before | after, key=lambda op: (-max(before[op], after[op]), op))
    first = [op.removeprefix(_CUSTOM) for op in telling(report)]
    order = [*first, *(op for op in order if op not in first)]
    shown, rest = order[: max(_BARS, len(first))], order[max(_BARS, len(first)) :]
    found = [Bar(op, before[op], after[op]) for op in shown]
    if rest:
        found.append(Bar(number(len(rest), "other"), sum(before[op] for op in rest), sum(after[op] for op in rest)))
    return found


def counts(report: FuseReport) -> tuple[Counter[str], Counter[str]]:
    """Nodes by operator, before and after; a Custom node goes by what it calls."""
    pairs = [(op.removeprefix(_CUSTOM), pair) for op, pair in report.operators.items()]
    before, after = (Counter({op: pair[side] for op, pair in pairs if pair[side]}) for side in (0, 1))
    return before, after
