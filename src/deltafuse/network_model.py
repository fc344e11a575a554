"""A model as onnxruntime can run it: fused nodes lowered, weights left where they are."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from deltafuse.enclosed import fused_bodies
from deltafuse.errors import UserError
from deltafuse.external import data_files, external_tensors
from deltafuse.foreign import Foreign, foreign_nodes, write_lowered
from deltafuse.hybrid import scratch, write_tapped
from deltafuse.lower import lower
from deltafuse.reasons import TEXTS, Reason
from deltafuse.wire import Model, scan

TEXTS.update(
    {
        "network-data-missing": "{path}: {error}; put the file beside the model, or take --level site, which needs no "
        "weights",
        "network-data-outside": "{path} has weights outside of its folder, where onnxruntime reads none; move them "
        "into the folder and save the model again, or take --level site",
        "network-data-short": "the external data file {file} has {size:# byte}, but {path} has weights up to byte "
        "{end} in it; copy the file again",
        "network-foreign-operator": "{path} has {count:# Custom node that is|Custom nodes that are} none of ours "
        "(the first: {node}, of type {type}), which onnxruntime cannot run; give a file that lowers them with "
        "--lowering",
        "network-not-lowered": "{path} cannot be turned into what onnxruntime runs: {error}; look the file over with "
        "fuse lint, and fuse the model again",
    }
)


@dataclass(frozen=True)
class Runnable:
    """What a session is opened on.

    Attributes:
        path: the model file.
        size: bytes of model and weights.
    """

    path: Path
    size: int


#: What may have to be lowered.
_LOWERED = frozenset({"Custom", "LinearAttention", "CausalConvWithState"})


def obstacle(model: Model, foreign: Foreign | None = None) -> Reason | None:
    """Why a model cannot be run at all, None where nothing speaks against it.

    Args:
        model: the scanned file.
        foreign: what lowers Custom nodes of other tools.
    """
    graph, known = model.graph, frozenset[str]() if foreign is None else foreign.operators
    others = [(node, kind) for node, kind in foreign_nodes(graph) if kind not in known]
    if others:
        node, kind = others[0]
        name = graph.label(node)
        at = {"path": model.path, "count": len(others), "node": name, "type": kind or "none"}
        return Reason("network-foreign-operator", at)
    try:
        files = data_files(replace(model, allow_outside=False))
    except UserError as error:
        if error.code == "outside-folder":
            return Reason("network-data-outside", {"path": model.path})
        return Reason("network-data-missing", {"path": model.path, "error": str(error)})
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        text = f"the external data file {missing[0]} is missing"
        return Reason("network-data-missing", {"path": model.path, "error": text})
    return _short(model, files)


def _short(model: Model, files: dict[str, Path]) -> Reason | None:
    for head in external_tensors(model):
        file = files[head.external.get("location", "")]
        end = head.offset + head.length
        size = file.stat().st_size
        if end > size:
            return Reason("network-data-short", {"path": model.path, "file": file, "size": size, "end": end})
    return None


@contextmanager
def runnable(
    model: Model, folder: Path, *, rounding: bool = True, taps: Collection[str] = (), foreign: Foreign | None = None
) -> Generator[Runnable | Reason]:
    """The model itself where onnxruntime knows all of it, else a lowered copy that is removed when the block ends.

    A copy whose weights lie outside stands beside them for that time, so that they are found and stay where they are.

    Args:
        model: the scanned file; see `obstacle`.
        folder: where to write a copy that holds its weights.
        rounding: at the target's precision; else in the unfused graph's own, see `deltafuse.lower`.
        taps: values inside that are wanted as outputs too.
        foreign: what lowers Custom nodes of other tools.

    Raises:
        UserError: ``bad-lowering``.
    """
    files = data_files(model)
    size = len(model.data) + sum(path.stat().st_size for path in files.values())
    place, stem = model.path.parent if files else folder, model.path.name
    with (
        scratch(place, f"{stem}.plain") as plain,
        scratch(place, f"{stem}.lowered") as lowered,
        scratch(place, f"{stem}.tapped") as tapped,
    ):
        source: Runnable | Reason = Runnable(model.path, size)
        if foreign is not None and write_lowered(model.path, foreign, plain):
            source = Runnable(plain, size)
        if _LOWERED & set(model.graph.op) or any(True for _ in fused_bodies(model)):
            source = _lowered(source, lowered, rounding)
        if taps and isinstance(source, Runnable):
            write_tapped(scan(source.path), taps, tapped)
            source = Runnable(tapped, size)
        yield source


def _lowered(source: Runnable, copy: Path, rounding: bool) -> Runnable | Reason:
    try:
        report = lower(source.path, copy, rounding=rounding)
    except UserError as error:
        return Reason("network-not-lowered", {"path": source.path, "error": str(error)})
    return source if report.output is None else Runnable(copy, source.size)
