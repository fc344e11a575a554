"""How close two arrays are: cosine, NRMSE and the largest difference. The unfused side is what is divided by."""

from __future__ import annotations

from math import inf, sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]


def sums_of(fused: Array, unfused: Array) -> tuple[float, float, float]:
    """Cosine, NRMSE and largest difference; of two empty or zero arrays 1, 0 and 0."""
    a, b = np.ravel(fused).astype(np.float64), np.ravel(unfused).astype(np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return 0.0, inf, inf
    lengths = sqrt(float(a @ a)) * sqrt(float(b @ b))
    cosine = min(float(a @ b) / lengths, 1.0) if lengths else float(a.any() == b.any())
    return cosine, _ratio(a - b, b), float(np.abs(a - b).max(initial=0.0))


def nrmse_of(fused: Array, unfused: Array) -> float:
    """Root mean square of the difference, over that of the unfused values."""
    a, b = np.ravel(fused).astype(np.float64), np.ravel(unfused).astype(np.float64)
    return _ratio(a - b, b) if a.shape == b.shape else inf


def _ratio(difference: npt.NDArray[np.float64], unfused: npt.NDArray[np.float64]) -> float:
    size, error = float(unfused @ unfused), float(difference @ difference)
    if not size:
        return inf if error else 0.0
    return sqrt(error / size)
