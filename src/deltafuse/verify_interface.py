"""Inputs and outputs of a fused file against those of the unfused one: names, types, and sizes that a fuse pinned."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from deltafuse.dims import Dim, parse, symbols
from deltafuse.dtypes import dtype_name
from deltafuse.errors import UserError
from deltafuse.graph import Graph
from deltafuse.reasons import TEXTS, Reason
from deltafuse.record import find
from deltafuse.undoing import content_digest, value_digest
from deltafuse.wire import Model

TEXTS.update(
    {
        "changed-inputs": "the graph {kind}s differ: {unfused} in the unfused file, {fused} in the fused one; undo "
        "that edit, or compare with the file that the fused one was made from",
        "changed-type": "the declared type of {value} differs by more than pinned axes: {unfused} became {fused}; "
        "undo that edit, or compare with an unfused file that has it too",
        "changed-axis": "axis {axis} of the graph {kind} {value} is {unfused} in the unfused file and {fused} in the "
        "fused one, and no fuse wrote that; undo that edit, or fuse the unfused file again with --pin",
    }
)


def interface_findings(unfused: Model, fused: Model) -> Iterator[Reason]:
    """Inputs and outputs that are others, or have sizes that no fuse gave them."""
    before, after = unfused.graph, fused.graph
    known = None if fused.place else _recorded(unfused, fused)
    # What a body takes from around is told by its nodes.
    inputs = [[value for value in graph.inputs if value not in graph.captured] for graph in (before, after)]
    pairs = (("input", 11, *inputs), ("output", 12, before.outputs, after.outputs))
    for kind, number, olds, news in pairs:
        old_names, new_names = [before.name(v) for v in olds], [after.name(v) for v in news]
        if old_names != new_names:
            old_text, new_text = ", ".join(old_names), ", ".join(new_names)
            yield Reason("changed-inputs", {"kind": kind, "unfused": old_text, "fused": new_text})
            continue
        for old, new in zip(olds, news, strict=True):
            was, now = _declared(before, old), _declared(after, new)
            if not _pinned_only(was, now):
                yield Reason("changed-type", {"value": before.name(old), "unfused": _text(was), "fused": _text(now)})
                continue
            digest = None if known is None else known.get((number, after.name(new)), "")
            for axis, a, b in _axes(before, old, after, new, digest):
                at = {"axis": axis, "kind": kind, "value": after.name(new)}
                yield Reason("changed-axis", {**at, "unfused": a, "fused": b})


def _recorded(unfused: Model, fused: Model) -> dict[tuple[int, str], str] | None:
    """Digest of each declaration that the fuse of this unfused file wrote; None where there is no record of that."""
    try:
        record = find(fused).record
    except UserError:
        return None
    if record.original_sha256 != content_digest(unfused.data):
        return None
    return {(digest.number, digest.name): digest.digest for digest in record.digests}


def _axes(before: Graph, old: int, after: Graph, new: int, digest: str | None) -> list[tuple[int, Dim, Dim]]:
    """Free axes that no fuse made what they are now, with what they were and are.

    Args:
        before: the unfused graph.
        old: an input or output of it.
        after: the fused graph.
        new: the same there.
        digest: of the declaration that a fuse wrote, "" where it wrote none; None where no record tells, and any axis
            may be pinned.
    """
    given, info = before.value_info(old), after.value_info(new)
    if given is None or info is None or value_digest(info) == digest:
        return []
    sizes = zip(_declared(before, old)[1] or (), _declared(after, new)[1] or (), strict=False)
    changed = [(axis, a, b) for axis, (a, b) in enumerate(sizes) if a is not None and b is not None and a != b]
    if digest is None:
        return [(axis, a, b) for axis, a, b in changed if not symbols(b) <= symbols(a)]
    alone = [one for one in changed if _with_axis(info, given, one[0]) == digest]
    return alone or changed


def _with_axis(info: onnx.ValueInfoProto, given: onnx.ValueInfoProto, axis: int) -> str:
    """Digest of a declaration with one axis as it was."""
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(info)
    copy.type.tensor_type.shape.dim[axis].CopyFrom(given.type.tensor_type.shape.dim[axis])
    return value_digest(copy)


def _declared(graph: Graph, value: int) -> tuple[str, list[Dim | None] | None]:
    """Element type, or the whole type where it is no tensor, and the declared sizes."""
    info = graph.value_info(value)
    if info is None or not info.type.HasField("tensor_type"):
        return ("" if info is None else info.type.SerializeToString(deterministic=True).hex()), None
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return dtype_name(tensor.elem_type), None
    return dtype_name(tensor.elem_type), [_dim(dim) for dim in tensor.shape.dim]


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim | None:
    if dim.HasField("dim_value"):
        return dim.dim_value
    return parse(dim.dim_param) if dim.dim_param else None


def _pinned_only(was: tuple[str, list[Dim | None] | None], now: tuple[str, list[Dim | None] | None]) -> bool:
    """Whether every size is what it was, or was not a number before."""
    if was[0] != now[0] or was[1] is None or now[1] is None:
        return was[0] == now[0] and (was[1] is None or was[1] == now[1])
    if len(was[1]) != len(now[1]):
        return False
    return all(a == b or (not isinstance(a, int) and b is not None) for a, b in zip(was[1], now[1], strict=True))


def _text(declared: tuple[str, list[Dim | None] | None]) -> str:
    kind, dims = declared
    shape = "?" if dims is None else ", ".join("?" if dim is None else str(dim) for dim in dims)
    return f"{kind} [{shape}]"
