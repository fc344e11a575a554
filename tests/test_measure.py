"""Measures of two arrays, in pieces or whole."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from deltafuse import measure
from deltafuse.measure import nrmse_of, sums_of
from tolerances import cosine, nrmse


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_measures_are_those_of_the_whole(monkeypatch, piece, dtype):
    monkeypatch.setattr(measure, "_PIECE", piece)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((3, 5, 4)).astype(dtype)
    b = (a + rng.standard_normal(a.shape) * 1e-2).astype(dtype)
    found = sums_of(b, a)
    most = np.abs(b.astype(np.float64) - a.astype(np.float64)).max()
    assert found == (pytest.approx(cosine(b, a)), pytest.approx(nrmse(b, a)), pytest.approx(most))
    assert nrmse_of(b, a) == pytest.approx(nrmse(b, a))


def test_what_cannot_be_measured_is_as_far_off_as_can_be():
    ones = np.ones(3)
    for other in (np.array([1, np.nan, 1]), np.array([1, inf, 1]), np.ones(4)):
        for pair in ((other, ones), (ones, other), (other, np.full(3, inf))):
            assert sums_of(*pair) == (0.0, inf, inf)
            assert nrmse_of(*pair) == inf


@pytest.mark.parametrize("shape", [(0,), (2, 3)])
def test_zeros_are_equal_to_zeros(shape):
    zeros = np.zeros(shape)
    assert sums_of(zeros, zeros) == (1.0, 0.0, 0.0)
    assert nrmse_of(zeros, zeros) == 0


def test_zeros_are_not_equal_to_anything_else():
    assert sums_of(np.full(3, 1e-6), np.zeros(3)) == (0.0, inf, 1e-6)
    assert nrmse_of(np.full(3, 1e-6), np.zeros(3)) == inf
