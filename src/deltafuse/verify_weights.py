"""Whether two files have the same weights: byte for byte, inside the files and outside where both are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from onnx import SparseTensorProto, TensorProto, numpy_helper

from deltafuse.errors import UserError
from deltafuse.locations import external_bytes, locate
from deltafuse.reasons import TEXTS, Reason
from deltafuse.tensors import TensorHead
from deltafuse.wire import Model

TEXTS.update(
    {
        "changed-initializer": "the initializer {value} is not the same in both files; undo that edit, or compare "
        "with an unfused file that has it too",
        "doubled-initializer": "the fused file has the initializer {value} more than once, with different data, and "
        "readers do not agree which counts; remove all but one, or fuse the unfused file again",
    }
)

#: Bytes that are compared at once.
_CHUNK = 8 << 20


def weight_findings(unfused: Model, fused: Model) -> Iterator[Reason]:
    """Initializers of the fused file that have other data than in the unfused one, or two kinds of it."""
    counts = Counter(head.name for head in fused.constants if head.name)
    twice = [name for name, count in counts.items() if count > 1]
    for name in twice:
        if len({head.message(fused.data) for head in fused.constants if head.name == name}) > 1:
            yield Reason("doubled-initializer", {"value": name})
    before = unfused.graph
    for value, head in fused.graph.initializers.items():
        name = fused.graph.name(value)
        old = before.find(name)
        known = None if old is None else before.initializers.get(old)
        if known is not None and not _same(unfused, known, fused, head):
            yield Reason("changed-initializer", {"value": name})


def _same(unfused: Model, old: TensorHead, fused: Model, new: TensorHead) -> bool:
    """The same numbers, in whatever field, inside the file or outside of it; what cannot be read is not the same."""
    if (old.dtype, old.dims, old.form) != (new.dtype, new.dims, new.form):
        return False
    if old.external and new.external:
        return _same_outside(unfused, old, fused, new)
    before, after = old.message(unfused.data), new.message(fused.data)
    kind = SparseTensorProto if old.form == "sparse" else TensorProto
    if before == after or kind.FromString(before) == kind.FromString(after):
        return True
    if old.form == "sparse" or old.dtype == TensorProto.STRING:
        return False
    if not old.external and not new.external:
        return _numbers(before) == _numbers(after)
    inside, outside = (_numbers(after), (unfused, old)) if old.external else (_numbers(before), (fused, new))
    return inside is not None and external_bytes(*outside, outside[1].name, len(inside)) == inside


def _numbers(message: bytes) -> bytes | None:
    """The elements of a tensor that lies in its file, None where there are not as many as it has."""
    tensor = TensorProto.FromString(message)
    try:
        return tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
    except (TypeError, ValueError):
        return None


def _same_outside(unfused: Model, old: TensorHead, fused: Model, new: TensorHead) -> bool:
    """The same place of one file, or the same bytes; where these are not there in both, the same place in both."""
    try:
        places = [
            locate(model.path.parent, head.external.get("location", ""), allow_outside=model.allow_outside)
            for model, head in ((unfused, old), (fused, new))
        ]
        spans = [(head.offset, head.length) for head in (old, new)]
    except UserError:
        return old.external == new.external
    if places[0].is_file() and places[1].is_file():
        if places[0].samefile(places[1]) and spans[0] == spans[1]:
            return True
        first, second = (_range(place, *span) for place, span in zip(places, spans, strict=True))
        if first is not None and second is not None:
            return _same_bytes((places[0], *first), (places[1], *second))
    return old.external == new.external


def _range(path: Path, offset: int, length: int) -> tuple[int, int] | None:
    """Where some data begins and how long it is, None where the file is too short for it."""
    there = path.stat().st_size - offset
    return (offset, length or there) if there >= max(length, 0) else None


def _same_bytes(first: tuple[Path, int, int], second: tuple[Path, int, int]) -> bool:
    """Compares ranges of two files piece by piece: weights are larger than memory."""
    left = first[2]
    if left != second[2]:
        return False
    with first[0].open("rb", buffering=0) as one, second[0].open("rb", buffering=0) as other:
        one.seek(first[1])
        other.seek(second[1])
        while left > 0:
            piece = one.read(min(left, _CHUNK))
            if not piece or piece != other.read(len(piece)):
                return False
            left -= len(piece)
    return True
