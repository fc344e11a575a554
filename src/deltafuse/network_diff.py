"""Compares the outputs of two runs, piece by piece, so that no output is ever whole in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltafuse.reasons import TEXTS, Reason
from deltafuse.verify_bars import Bar, bar
from deltafuse.verify_trial import Finding, finding

TEXTS.update(
    {
        "output-missing": "only one of the models has the output {name}; compare files with the same outputs",
        "output-shape": "{name} is {fused} in the fused model, {unfused} in the unfused one; undo that edit of the "
        "fused file, or fuse the unfused one again",
        "output-type": "{name} is {fused} in the fused model, {unfused} in the unfused one; undo that edit of the "
        "fused file, or fuse the unfused one again",
        "output-not-finite": "{name} has infinities or NaNs in the {model} model, at {index}; compare on other "
        "inputs, see --inputs and --seed",
        "output-beyond-bar": "{name} is beyond the bar ({bar}): {failed}, the largest difference at {index}; look for "
        "the site with --bisect, or set another bar if that much is fine",
        "output-values": "{name} differs in {count} of {size:# element}, the first at {index}; look for the site with "
        "--bisect",
    }
)

Array = npt.NDArray[np.generic]
Double = npt.NDArray[np.float64]

#: Elements that are compared at once.
_PIECE = 1 << 20
#: Files up to this size are read, larger ones mapped.
_MAPPED = 1 << 20


@dataclass(frozen=True)
class Worst:
    """The element that differs most."""

    index: tuple[int, ...]
    unfused: float
    fused: float


@dataclass(frozen=True)
class Top1:
    """Whether the most likely token is the same.

    Attributes:
        rows: how many rows of logits there are.
        agree: in how many both models have the same first token.
        margin: least lead of the first over the second in the unfused model.
        lost: largest lead among the rows that do not agree, None where all do.
    """

    rows: int
    agree: int
    margin: float
    lost: float | None


@dataclass(frozen=True)
class OutputVerdict:
    """One output of both models.

    Attributes:
        verdict: ``passes`` where the bar is met: not yet that both are equal.
        shape, dtype: of the fused model's output.
        rms: root mean square of the unfused values.
        cosine, nrmse, max_abs: None where both cannot be compared.
        top1: for logits only.
        failed: which parts of the bar are not met.
    """

    name: str
    verdict: Literal["passes", "differs"]
    shape: tuple[int, ...]
    dtype: str
    rms: float | None = None
    cosine: float | None = None
    nrmse: float | None = None
    max_abs: float | None = None
    worst: Worst | None = None
    top1: Top1 | None = None
    reason: Finding | None = None
    failed: tuple[str, ...] = ()


def compare_outputs(
    unfused: Mapping[str, Path], fused: Mapping[str, Path], vocabulary: int, close: Bar | None = None
) -> Iterator[OutputVerdict]:
    """Compares each output, in the order of the unfused model.

    Args:
        unfused: output -> ``.npy`` file.
        fused: the same of the fused model.
        vocabulary: rows of the embedding, which is the last axis of logits; 0 where there is none.
        close: the bar; None for that of a float16 boundary.
    """
    close = close or bar("fp16")
    for name in dict.fromkeys((*unfused, *fused)):
        if name in unfused and name in fused:
            yield _compare(name, _open(unfused[name]), _open(fused[name]), vocabulary, close)
            continue
        array = _open(unfused[name] if name in unfused else fused[name])
        yield _differs(name, array, Reason("output-missing", {"name": name}))


def _open(path: Path) -> Array:
    small = path.stat().st_size <= _MAPPED
    return np.load(path, mmap_mode=None if small else "r", allow_pickle=False)


def _differs(name: str, fused: Array, reason: Reason) -> OutputVerdict:
    return OutputVerdict(name, "differs", fused.shape, str(fused.dtype), reason=finding(reason))


def _compare(name: str, unfused: Array, fused: Array, vocabulary: int, close: Bar) -> OutputVerdict:
    pair = {"name": name, "unfused": str(unfused.dtype), "fused": str(fused.dtype)}
    if unfused.dtype != fused.dtype:
        return _differs(name, fused, Reason("output-type", pair))
    if unfused.shape != fused.shape:
        sizes = {"name": name, "unfused": list(unfused.shape), "fused": list(fused.shape)}
        return _differs(name, fused, Reason("output-shape", sizes))
    if fused.dtype.kind != "f":
        return _exact(name, unfused, fused)
    for model, array in (("unfused", unfused), ("fused", fused)):
        index = _not_finite(array)
        if index is not None:
            at = {"name": name, "model": model, "index": list(index)}
            return _differs(name, fused, Reason("output-not-finite", at))
    return _measured(name, unfused, fused, _is_logits(name, fused, vocabulary), close)


def _exact(name: str, unfused: Array, fused: Array) -> OutputVerdict:
    """Numbers that are no floats are equal or not."""
    where = np.flatnonzero(np.ravel(unfused != fused))
    if not len(where):
        return OutputVerdict(name, "passes", fused.shape, str(fused.dtype), max_abs=0.0)
    index = _index(int(where[0]), fused.shape)
    at = {"name": name, "count": len(where), "size": fused.size, "index": list(index)}
    return _differs(name, fused, Reason("output-values", at))


def _measured(name: str, unfused: Array, fused: Array, logits: bool, close: Bar) -> OutputVerdict:
    sums = _Sums()
    for start, a, b in _pieces(unfused, fused):
        sums.add(start, a, b)
    index = _index(sums.at, fused.shape)
    measured = sums.cosine, sums.nrmse, sums.max_abs
    failed = close.failed(*measured)
    at = {"name": name, "index": list(index), "bar": close.title, "failed": close.told(*measured)}
    reason = finding(Reason("output-beyond-bar", at)) if failed else None
    return OutputVerdict(
        name,
        "differs" if failed else "passes",
        fused.shape,
        str(fused.dtype),
        sqrt(sums.unfused / fused.size) if fused.size else 0.0,
        sums.cosine,
        sums.nrmse,
        sums.max_abs,
        Worst(index, float(unfused[index]), float(fused[index])) if fused.size else None,
        _top1(unfused, fused) if logits else None,
        reason,
        failed,
    )


@dataclass
class _Sums:
    """What is summed up over the pieces of an output."""

    product: float = 0.0
    unfused: float = 0.0
    fused: float = 0.0
    difference: float = 0.0
    max_abs: float = 0.0
    at: int = 0

    def add(self, start: int, unfused: Double, fused: Double) -> None:
        """Takes in the next piece, whose first element has the flat index `start`."""
        difference = np.abs(fused - unfused)
        self.product += float(unfused @ fused)
        self.unfused += float(unfused @ unfused)
        self.fused += float(fused @ fused)
        self.difference += float(difference @ difference)
        worst = int(difference.argmax())
        if difference[worst] > self.max_abs:
            self.max_abs, self.at = float(difference[worst]), start + worst

    @property
    def cosine(self) -> float:
        """Of the angle between both; that of two zero vectors is 1."""
        lengths = sqrt(self.unfused) * sqrt(self.fused)
        return min(self.product / lengths, 1.0) if lengths else float(self.unfused == self.fused)

    @property
    def nrmse(self) -> float:
        """Root mean square of the difference, over that of the unfused values."""
        if self.unfused:
            return sqrt(self.difference / self.unfused)
        return inf if self.difference else 0.0


def _pieces(unfused: Array, fused: Array) -> Iterator[tuple[int, Double, Double]]:
    a, b = np.reshape(unfused, -1), np.reshape(fused, -1)
    for start in range(0, a.size, _PIECE):
        part = slice(start, start + _PIECE)
        yield start, a[part].astype(np.float64), b[part].astype(np.float64)


def _not_finite(array: Array) -> tuple[int, ...] | None:
    flat = np.reshape(array, -1)
    for start in range(0, flat.size, _PIECE):
        wrong = np.flatnonzero(~np.isfinite(flat[start : start + _PIECE].astype(np.float64)))
        if len(wrong):
            return _index(start + int(wrong[0]), array.shape)
    return None


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape)) if shape and 0 not in shape else ()


def _is_logits(name: str, array: Array, vocabulary: int) -> bool:
    if array.ndim < 2 or array.shape[-1] < 2 or not array.size:
        return False
    return array.shape[-1] == vocabulary or name.rpartition(".")[2] == "logits"


def _top1(unfused: Array, fused: Array) -> Top1:
    size = unfused.shape[-1]
    rows_a, rows_b = np.reshape(unfused, (-1, size)), np.reshape(fused, (-1, size))
    step = max(1, _PIECE // size)
    agree, margin, lost = 0, inf, -1.0
    for start in range(0, len(rows_a), step):
        a = rows_a[start : start + step].astype(np.float64)
        same = a.argmax(-1) == rows_b[start : start + step].argmax(-1)
        second, first = np.moveaxis(np.partition(a, -2, axis=-1)[:, -2:], -1, 0)
        lead = first - second
        agree, margin = agree + int(same.sum()), min(margin, float(lead.min()))
        lost = max([lost, *lead[~same].tolist()])
    return Top1(len(rows_a), agree, margin, None if agree == len(rows_a) else lost)
