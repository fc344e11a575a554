"""How close is equal: one table, by the precision a comparison is made at. Shape and dtype are compared too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Tolerance:
    """Bars of a comparison.

    Attributes:
        cosine: least cosine of the angle between both.
        nrmse: largest root mean square of the difference, over that of the expected values.
    """

    cosine: float
    nrmse: float


TOLERANCES = {
    "float64": Tolerance(1 - 1e-12, 1e-12),
    "float32": Tolerance(0.999999, 5e-6),
    # What a float16 boundary may cost the outputs of a whole model.
    "float16": Tolerance(0.9999, 5e-3),
}


def nrmse(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Root mean square of the difference over that of the expected values."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2)))


def cosine(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Cosine of the angle between both, as flat vectors."""
    got, want = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    return float(got @ want / np.sqrt((got @ got) * (want @ want)))


def assert_close(got: npt.NDArray[np.generic], want: npt.NDArray[np.generic], precision: str) -> None:
    """Same shape, dtype and, to the bars of ``precision``, values; all of them finite and not all zero."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert np.isfinite(got).all()
    assert np.isfinite(want).all()
    assert np.any(want)
    bars = TOLERANCES[precision]
    assert nrmse(got, want) <= bars.nrmse
    assert cosine(got, want) >= bars.cosine
