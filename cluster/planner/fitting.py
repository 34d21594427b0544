"""Fits the coefficients of `costs.py` to measurements: least squares of the relative error, none below its prior."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def non_negative(
    features: Matrix, seconds: Matrix, least: Sequence[float] | None = None, known: Matrix | None = None
) -> Matrix:
    """Coefficients x >= `least` (0 where None) that make features @ x nearest to `seconds`, relatively.

    [n, k], [n] -> [k]. `known`: seconds of each row that no coefficient is for. Every set of coefficients above their
    bounds is tried: exact for the handful that a law has. A feature that is zero throughout keeps its bound. Raises
    ValueError for no rows or seconds that are not positive.
    """
    if not len(seconds) or np.any(seconds <= 0):
        raise ValueError("needs measurements, each of more than 0 seconds")
    bounds = np.zeros(features.shape[1]) if least is None else np.asarray(least, dtype=np.float64)
    rest = seconds if known is None else seconds - known
    rows, wanted = features / seconds[:, None], (rest - features @ bounds) / seconds
    used = [column for column in range(rows.shape[1]) if np.any(rows[:, column])]
    scale = np.linalg.norm(rows, axis=0)
    best, error = np.zeros_like(bounds), float(wanted @ wanted)
    for size in range(1, len(used) + 1):
        for columns in combinations(used, size):
            chosen = rows[:, columns] / scale[list(columns)]
            found = np.linalg.lstsq(chosen, wanted, rcond=None)[0]
            left = wanted - chosen @ found
            if np.all(found >= 0) and float(left @ left) < error - 1e-12:
                best, error = np.zeros_like(bounds), float(left @ left)
                best[list(columns)] = found / scale[list(columns)]
    lowest: Matrix = bounds + best
    return lowest


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Matrix:
    """|predicted / measured - 1| of each."""
    off: Matrix = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return off
