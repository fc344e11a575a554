"""External data: which files a model needs, and how they come to stand beside the output.

Data is left where it is or copied, never linked (readers refuse data with more than one hard link, and a later save
through the link would change the original) and never loaded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltafuse.copies import copy_file, same_content
from deltafuse.errors import UserError
from deltafuse.files import clear
from deltafuse.locations import locate
from deltafuse.options import ExternalData
from deltafuse.protobuf import LENGTH, Bytes, fields
from deltafuse.tensors import TensorHead, tensor_head
from deltafuse.wire import Model

__all__ = ["Carried", "carry", "data_files", "external_tensors", "undo"]

Progress = Callable[[int, int], None]
#: which fields of a message are, or hold, tensors: message -> field -> message of the field
_HOLDERS: dict[str, dict[int, str]] = {
    "attribute": {5: "tensor", 10: "tensor", 22: "sparse", 23: "sparse", 6: "graph", 11: "graph"},
    "sparse": {1: "tensor", 2: "tensor"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "function": {7: "node", 11: "attribute"},
    "training": {1: "graph", 2: "graph"},
}


@dataclass(frozen=True)
class Carried:
    """What was done about the external data files.

    Attributes:
        sizes: location -> bytes, None where the file is missing.
        copied: the files that were made, reflinked or copied.
        notes: for the report.
    """

    sizes: dict[str, int | None]
    copied: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def external_tensors(model: Model) -> tuple[TensorHead, ...]:
    """Every external tensor: initializers, attributes, subgraphs, functions, sparse ones and training graphs too."""
    found = [head for head in model.constants if head.external and head.form == "tensor"]
    for head in model.constants:
        if head.form == "sparse":
            found += _walk(model.data, "sparse", head.start, head.end)
    for start, end, kind in _suspects(model):
        found += _walk(model.data, kind, start, end)
    return tuple(found)


def data_files(model: Model, also: Iterable[str] = ()) -> dict[str, Path]:
    """Location -> path of every external data file, and of the locations in `also`, in order of first mention.

    Raises:
        UserError: ``outside-folder``, unless the model may have data anywhere; ``external-data-damaged``.
    """
    folder, outside = model.path.parent, model.allow_outside
    locations = dict.fromkeys([head.external.get("location", "") for head in external_tensors(model)] + [*also])
    return {location: locate(folder, location, allow_outside=outside) for location in locations}


def missing_notes(sizes: Mapping[str, int | None]) -> tuple[str, ...]:
    """A note for each data file that is not there (size None): weights are not read, so the work goes on."""
    text = "the external data file {} is missing: it was not needed here, but the model does not run without it"
    return tuple(text.format(name) for name, size in sizes.items() if size is None)


def carry(
    model: Model,
    output: Path,
    progress: Progress | None = None,
    *,
    also: Iterable[str] = (),
    how: ExternalData | None = None,
    alone: bool = False,
) -> Carried:
    """Sees to it that the data stands beside the output: left where it is in the same folder, else copied.

    Where data may lie outside of the model's folder, that of absolute locations is left there, and that behind a
    symbolic link is copied into the output's folder.

    Args:
        model: the model whose data it is; its folder is where the data lies.
        output: the model file that will be written.
        progress: is called with bytes copied and bytes in all.
        also: locations of further data files.
        how: see `deltafuse.options.FuseOptions`.
        alone: no other process writes there, so that what killed ones left can be cleared away.

    Raises:
        UserError: what `data_files` raises; ``output-is-data``; where data must be copied ``external-data-missing``,
            ``external-data-differs``, ``external-data-linked``, ``external-data-elsewhere`` and ``no-reflink``.
    """
    files = data_files(model, also)
    for name, path in files.items():
        if output.resolve() in (path.resolve(), (output.parent / name).resolve()):
            raise UserError("output-is-data", f"{output} is where external data of the model goes: give another path")
    sizes = {location: path.stat().st_size if path.is_file() else None for location, path in files.items()}
    if output.parent.resolve() == model.path.parent.resolve():
        return Carried(sizes, notes=missing_notes(sizes))
    # what an absolute location names is there for the output too
    pairs = [(path, _target(output.parent, name)) for name, path in files.items() if not Path(name).is_absolute()]
    if alone:
        clear(target for _, target in pairs)
    todo = [pair for pair in pairs if not _is_there(*pair)]
    if todo and how == "keep":
        raise UserError(
            "external-data-elsewhere",
            f"the model's external data {todo[0][0]} does not stand beside {output}: put it there, write the output "
            "into the model's folder, or let the data be copied with --external-data copy",
        )
    return Carried(sizes, _copy_all(todo, progress, how))


def undo(carried: Carried) -> None:
    """Removes the copies again: what they were made for was not written."""
    for path in carried.copied:
        with suppress(OSError):
            path.unlink()


def _suspects(model: Model) -> Iterator[tuple[int, int, str]]:
    """Messages that may hold external tensors: those that contain the text of external_data's first key."""
    spans = model.graph.spans
    for start, end in _node_runs(model):
        at = start
        while (at := _find(model, b"location", at, end)) >= 0:
            node = bisect_right(spans.starts, at) - 1
            yield spans.starts[node], spans.ends[node], "graph"
            at = spans.ends[node]
    for start, end in model.functions:
        if _find(model, b"location", start, end) >= 0:
            yield start, end, "function"
    for start, end in model.training:
        if _find(model, b"location", start, end) >= 0:
            yield start, end, "training"


def _node_runs(model: Model) -> Iterator[tuple[int, int]]:
    spans = model.graph.spans
    starts, ends = np.array(spans.starts), np.array(spans.ends)
    parted = starts[1:] != ends[:-1]
    some = np.ones(min(len(starts), 1), np.bool_)
    firsts, lasts = starts[np.concatenate([some, parted])], ends[np.concatenate([parted, some])]
    yield from zip(firsts.tolist(), lasts.tolist(), strict=True)


def _find(model: Model, text: bytes, start: int, end: int) -> int:
    return model.mapped.find(text, start, end)


def _walk(data: Bytes, kind: str, start: int, end: int) -> Iterator[TensorHead]:
    holders = _HOLDERS[kind]
    split: list[tuple[int, int]] = []
    for number, wire, _, begin, stop, _ in fields(data, start, end):
        inner = holders.get(number) if wire == LENGTH else None
        if kind == "attribute" and number == 5:
            split.append((begin, stop))
        elif inner == "tensor":
            yield from _external(data, [(begin, stop)])
        elif inner is not None:
            yield from _walk(data, inner, begin, stop)
    if split:
        yield from _external(data, split)


def _external(data: Bytes, parts: Sequence[tuple[int, int]]) -> Iterator[TensorHead]:
    head = tensor_head(data, parts)
    if head.external:
        yield head


def _target(folder: Path, location: str) -> Path:
    path = folder / location
    if path.is_symlink():
        raise _linked(path)
    return locate(folder, location)


def _linked(path: Path) -> UserError:
    return UserError(
        "external-data-linked",
        f"{path} is a link, which readers of external data refuse and through which a later save would change other "
        "data: remove it, so that a copy is made",
    )


def _is_there(source: Path, target: Path) -> bool:
    """Whether the data already stands at the target.

    Raises:
        UserError: the source is missing, or another file stands there.
    """
    if not source.is_file():
        raise UserError(
            "external-data-missing",
            f"the external data file {source} is missing and must be copied beside the output: "
            "put it beside the model, or write the output into the model's folder",
        )
    if not target.exists():
        return False
    if target.samefile(source) and target.stat().st_nlink > 1:
        raise _linked(target)
    if target.samefile(source) or same_content(source, target):
        return True
    raise UserError(
        "external-data-differs",
        f"{target} exists and is not the data of this model: write the output into a folder of its own",
    )


def _copy_all(
    pairs: Sequence[tuple[Path, Path]], progress: Progress | None, how: ExternalData | None
) -> tuple[Path, ...]:
    total, done = sum(source.stat().st_size for source, _ in pairs), 0
    made: list[Path] = []
    try:
        for source, target in pairs:
            copy_file(
                source, target, how, lambda count, done=done: progress(done + count, total) if progress else None
            )
            made.append(target)
            done += source.stat().st_size
    except BaseException:
        undo(Carried({}, tuple(made)))
        raise
    return tuple(made)
