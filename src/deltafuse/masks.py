"""Padded draws beside masks of ones, and which outputs the mask reaches.

The recurrent state of many graphs does not see the mask at all: a padded prompt then ruins it, fused or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltafuse.inputs import Inputs
from deltafuse.measure import nrmse_of
from deltafuse.network_diff import OutputVerdict, compare_outputs
from deltafuse.verify_bars import Bar

__all__ = ["MaskReach", "MaskReport", "PaddedDraw", "compare_padded", "padded"]

Array = npt.NDArray[np.generic]
Padding = Literal["right", "left"]
PADDINGS: tuple[Padding, ...] = ("right", "left")


#: Share of an output's largest number without padding below which it is next to nothing.
_FAINT = 1e-3


@dataclass(frozen=True)
class PaddedDraw:
    """Both models on one padded draw.

    Attributes:
        tokens: how many tokens are padding, of how many.
        outputs: verdicts, those left out that the padding makes infinite or NaN in the unfused model already, or next
            to nothing in both.
        silent: names of these.
    """

    padding: Padding
    verdict: Literal["passes", "differs"]
    tokens: tuple[int, int]
    outputs: tuple[OutputVerdict, ...]
    silent: tuple[str, ...]


@dataclass(frozen=True)
class MaskReach:
    """How much an output of the unfused model changes with the mask alone.

    Attributes:
        right, left: NRMSE of the padded draw against that with a mask of ones.
        depends: whether it changes at all.
    """

    output: str
    right: float
    left: float
    depends: bool


@dataclass(frozen=True)
class MaskReport:
    """The padded draws, and which outputs depend on the mask."""

    draws: tuple[PaddedDraw, ...]
    reach: tuple[MaskReach, ...]


def padded(inputs: Inputs) -> dict[Padding, dict[str, Array]]:
    """The same inputs with a third of the tokens masked, at the end and at the beginning; none without such a mask."""
    names = [name for name, role in inputs.roles.items() if role.role == "mask" and _is_mask(inputs.arrays[name])]
    if not names:
        return {}
    found: dict[Padding, dict[str, Array]] = {}
    for padding in PADDINGS:
        found[padding] = dict(inputs.arrays)
        for name in names:
            mask = np.array(inputs.arrays[name])
            count = _count(mask)
            mask[:, -count:] = 0 if padding == "right" else mask[:, -count:]
            mask[:, :count] = 0 if padding == "left" else mask[:, :count]
            found[padding][name] = mask
    return found


def _is_mask(array: Array) -> bool:
    """Whole numbers or booleans, all ones, one for each token of several."""
    return array.dtype.kind in "iub" and array.ndim == 2 and array.shape[1] > 2 and bool(array.all())


def _count(mask: Array) -> int:
    return max(1, mask.shape[1] // 3)


def compare_padded(
    inputs: Inputs,
    unfused: tuple[Mapping[str, Path], ...],
    fused: tuple[Mapping[str, Path], ...],
    vocabulary: int,
    close: Bar,
) -> MaskReport:
    """Compares the runs of the padded draws.

    Args:
        inputs: the draw with masks of ones.
        unfused: outputs of the unfused model: of that draw, then of each in `PADDINGS`.
        fused: the same of the fused one.
        vocabulary: see `deltafuse.network_diff.compare_outputs`.
        close: the bar.
    """
    names = [name for name, role in inputs.roles.items() if role.role == "mask" and _is_mask(inputs.arrays[name])]
    total = inputs.arrays[names[0]].shape[1]
    size = (_count(inputs.arrays[names[0]]), total)
    draws: list[PaddedDraw] = []
    for padding, one, other in zip(PADDINGS, unfused[1:], fused[1:], strict=True):
        infinite = [name for name, path in one.items() if not _finite(path)]
        kept = {name: path for name, path in one.items() if name not in infinite}
        rest = {name: path for name, path in other.items() if name not in infinite}
        compared = tuple(compare_outputs(kept, rest, vocabulary, close))
        # A state that padding wears down to nothing is below what the boundary's type can hold.
        faint = [
            output.name
            for output in compared
            if output.verdict == "differs"
            and output.name in one.keys() & other.keys()
            and _faint(one[output.name], other[output.name], unfused[0][output.name])
        ]
        outputs = tuple(output for output in compared if output.name not in faint)
        silent = (*infinite, *faint)
        good = all(output.verdict == "passes" for output in outputs)
        draws.append(PaddedDraw(padding, "passes" if good else "differs", size, outputs, silent))
    return MaskReport(tuple(draws), tuple(_reach(unfused)))


def _reach(runs: tuple[Mapping[str, Path], ...]) -> Iterator[MaskReach]:
    ones, right, left = runs
    for name in ones:
        whole = _load(ones[name])
        changes = [nrmse_of(_load(run[name]), whole) for run in (right, left)]
        yield MaskReach(name, changes[0], changes[1], any(change > 0 for change in changes))


def _faint(one: Path, other: Path, without: Path) -> bool:
    """Whether an output is next to nothing in both models, against what it is without padding."""
    return max(_largest(one), _largest(other)) < _FAINT * _largest(without)


def _largest(path: Path) -> float:
    array = _load(path)
    return float(np.abs(array.astype(np.float64)).max(initial=0.0)) if array.dtype.kind == "f" else np.inf


def _finite(path: Path) -> bool:
    array = _load(path)
    return array.dtype.kind != "f" or bool(np.isfinite(array.astype(np.float64)).all())


def _load(path: Path) -> Array:
    array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array
