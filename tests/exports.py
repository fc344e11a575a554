"""The fixtures: real exports with inputs, what torch made of them, and the truth. Made by scripts/make_zoo.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parent / "fixtures"


@dataclass(frozen=True)
class Export:
    """One fixture.

    Attributes:
        name: of its files.
        truth: what holds of it, see `scripts/make_zoo.py`.
    """

    name: str
    truth: dict[str, Any]

    @property
    def path(self) -> Path:
        """The model."""
        return FOLDER / f"{self.name}.onnx"

    @property
    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """One array for each graph input."""
        return {name: array for name, array in self._arrays().items() if name in self.truth["inputs"]}

    @property
    def expected(self) -> list[npt.NDArray[Any]]:
        """What torch gives for the inputs, in the order of the graph's outputs."""
        arrays = self._arrays()
        return [arrays[f"out{index}"] for index in range(len(self.truth["outputs"]))]

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        with np.load(self.path.with_suffix(".npz")) as arrays:
            return {name: arrays[name] for name in arrays.files}


def export(name: str) -> Export:
    """A fixture by name."""
    return Export(name, json.loads((FOLDER / f"{name}.json").read_text()))


def exports(**truth: object) -> list[Export]:
    """All fixtures whose truth has these entries, by name."""
    everything = [export(path.stem) for path in sorted(FOLDER.glob("*.json"))]
    return [one for one in everything if all(one.truth[key] == value for key, value in truth.items())]
