"""First divergence: where in a whole model the fused run leaves the unfused one, and who is to blame.

Each site has two errors, both at the target's precision and against the unfused run: isolated, where it is fed the
unfused model's own values, and accumulated, as it comes out of the fused run. Where the second is beyond tolerance and
the first is not, what came before is to blame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from deltafuse.fused import runnable
from deltafuse.measure import sums_of
from deltafuse.probe import Worker
from deltafuse.reasons import Reason
from deltafuse.verify_bars import Bar
from deltafuse.verify_cut import Pair, site_name
from deltafuse.verify_diff import Region
from deltafuse.verify_stage import Stage

__all__ = ["DivergenceReport", "Error", "FirstDivergence", "SiteErrors", "diverge", "taps_of"]

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Error:
    """How far the worst tensor of a site is off."""

    tensor: str
    cosine: float
    nrmse: float
    max_abs: float


@dataclass(frozen=True)
class SiteErrors:
    """One site in a whole model.

    Attributes:
        isolated: fed the unfused model's own values; None where it cannot be run alone.
        accumulated: in the fused run.
    """

    name: str
    isolated: Error | None
    accumulated: Error


@dataclass(frozen=True)
class FirstDivergence:
    """The first tensor beyond tolerance.

    Attributes:
        tensor: its name; one that a site reads or writes.
        site: the site that reads or writes it.
        blame: ``site``: the site itself; ``before``: what came before it.
        error: of the tensor, in the fused run.
        failed: what it failed, e.g. ``NRMSE 0.3 (at most 0.02)``.
    """

    tensor: str
    site: str
    blame: Literal["site", "before"]
    error: Error
    failed: str


@dataclass(frozen=True)
class DivergenceReport:
    """All sites in topological order, and the first tensor beyond tolerance, None where there is none.

    Attributes:
        bar: the tolerance.
        nrmse: largest NRMSE that it admits.
    """

    sites: tuple[SiteErrors, ...]
    first: FirstDivergence | None
    bar: str
    nrmse: float


def taps_of(regions: Sequence[Region]) -> tuple[str, ...]:
    """The values that are needed of both whole models' runs."""
    return tuple(dict.fromkeys(name for region in regions for name in (*region.inputs, *region.outputs)))


def diverge(
    stage: Stage, unfused: Mapping[str, Array], fused: Mapping[str, Array], close: Bar, worker: Worker
) -> DivergenceReport:
    """Compares both runs at each site.

    Args:
        stage: both files.
        unfused: the values of `taps_of`, and the graph's inputs, in the unfused run.
        fused: the same in the fused one.
        close: the bar; how large a value inside a model is does not count.
        worker: runs the sites alone.
    """
    pairs, close = {pair.outputs: pair for pair in stage.pairs}, close.unbounded()
    wrong = {site.name for site in stage.sites if site.verdict == "differs"}
    rows: list[SiteErrors] = []
    first: FirstDivergence | None = None
    for region in stage.regions:
        name = site_name(stage.after.graph, region)
        pair = pairs.get(region.outputs)
        alone = None if pair is None else _isolated(pair, unfused, worker)
        accumulated = [_error(output, fused, unfused) for output in region.outputs]
        rows.append(SiteErrors(name, _worst(alone) if alone else None, _worst(accumulated)))
        if first is None:
            guilty = name in wrong or any(_beyond(error, close) for error in alone or ())
            first = next(_first(name, region, accumulated, fused, unfused, close, guilty), None)
    return DivergenceReport(tuple(rows), first, close.title, close.nrmse)


def _first(
    name: str,
    region: Region,
    accumulated: Sequence[Error],
    fused: Mapping[str, Array],
    unfused: Mapping[str, Array],
    close: Bar,
    guilty: bool,
) -> Iterator[FirstDivergence]:
    """Tensors of a site that are beyond tolerance: what it reads first."""
    for tensor in region.inputs:
        error = _error(tensor, fused, unfused)
        if tensor in unfused and unfused[tensor].dtype.kind == "f" and _beyond(error, close):
            yield FirstDivergence(tensor, name, "before", error, _told(error, close))
    for error in accumulated:
        if _beyond(error, close):
            yield FirstDivergence(error.tensor, name, "site" if guilty else "before", error, _told(error, close))


def _isolated(pair: Pair, unfused: Mapping[str, Array], worker: Worker) -> list[Error] | None:
    """The fused site alone on the unfused model's own values."""
    types = {item.name: item.dtype for item in pair.inputs}
    if TensorProto.BFLOAT16 in types.values():
        return None
    session = worker.load(runnable(pair.fused).SerializeToString())
    if isinstance(session, Reason) or any(name not in unfused for name in session.inputs):
        return None
    feeds = {name: unfused[name].astype(helper.tensor_dtype_to_np_dtype(types[name])) for name in session.inputs}
    found = worker.run(session, feeds, pair.outputs)
    worker.unload(session)
    if isinstance(found, Reason):
        return None
    return [Error(name, *sums_of(array, unfused[name])) for name, array in zip(pair.outputs, found, strict=True)]


def _error(tensor: str, fused: Mapping[str, Array], unfused: Mapping[str, Array]) -> Error:
    if tensor not in fused or tensor not in unfused:
        return Error(tensor, 1.0, 0.0, 0.0)
    return Error(tensor, *sums_of(fused[tensor], unfused[tensor]))


def _worst(errors: Sequence[Error]) -> Error:
    return max(errors, key=lambda error: error.nrmse)


def _beyond(error: Error, close: Bar) -> bool:
    return not close.met(error.cosine, error.nrmse, error.max_abs)


def _told(error: Error, close: Bar) -> str:
    return close.told(error.cosine, error.nrmse, error.max_abs)


def load_taps(files: Mapping[str, Path], names: Sequence[str], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The values of a run by name: mapped from its files, or what was fed."""
    found = {name: inputs[name] for name in names if name in inputs}
    return found | {name: np.load(files[name], mmap_mode="r") for name in names if name in files}
