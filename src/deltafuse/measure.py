"""How close two arrays are: cosine, NRMSE and the largest difference. The unfused side is what is divided by.

Arrays may be mapped files: no copy of a whole one is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]
Double: TypeAlias = npt.NDArray[np.float64]

#: Elements that are compared at once.
_PIECE = 1 << 20


def sums_of(fused: Array, unfused: Array) -> tuple[float, float, float]:
    """Cosine, NRMSE and largest difference; of two empty or zero arrays 1, 0 and 0."""
    if fused.shape != unfused.shape:
        return 0.0, inf, inf
    product = left = right = error = most = 0.0
    for a, b in _pieces(fused, unfused):
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return 0.0, inf, inf
        difference = a - b
        product, left, right = product + float(a @ b), left + float(a @ a), right + float(b @ b)
        error, most = error + float(difference @ difference), max(most, float(np.abs(difference).max()))
    lengths = sqrt(left) * sqrt(right)
    cosine = min(product / lengths, 1.0) if lengths else float(left == right)
    return cosine, _ratio(error, right), most


def nrmse_of(fused: Array, unfused: Array) -> float:
    """Root mean square of the difference, over that of the unfused values."""
    if fused.shape != unfused.shape:
        return inf
    error = size = 0.0
    for a, b in _pieces(fused, unfused):
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return inf
        difference = a - b
        error, size = error + float(difference @ difference), size + float(b @ b)
    return _ratio(error, size)


def _ratio(error: float, size: float) -> float:
    return sqrt(error / size) if size else (inf if error else 0.0)


def _pieces(fused: Array, unfused: Array) -> Iterator[tuple[Double, Double]]:
    a, b = np.reshape(fused, -1), np.reshape(unfused, -1)
    for start in range(0, a.size, _PIECE):
        part = slice(start, start + _PIECE)
        yield a[part].astype(np.float64), b[part].astype(np.float64)
