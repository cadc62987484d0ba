"""The exponential moving average of a column."""

from __future__ import annotations

import numpy as np

_BLOCK = 256  # Values that one matrix product averages


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the exponential moving average of values, float64 (N), corrected for its start.

    Non-finite values stay non-finite, and the average skips them.

    Args:
        weight: of the average so far, at least 0 and below 1.
    """
    is_known = np.isfinite(values)
    sums = _sum_decaying(np.where(is_known, values, 0.0), weight)
    weights = _sum_decaying(is_known.astype(np.float64), weight)
    with np.errstate(invalid="ignore"):
        return np.where(is_known, sums / weights, np.nan)


def _sum_decaying(values: np.ndarray, weight: float) -> np.ndarray:
    """Return `total[n] = weight * total[n - 1] + values[n]`, in blocks."""
    blocks = np.pad(values, (0, -len(values) % _BLOCK)).reshape(-1, _BLOCK)
    place = np.arange(_BLOCK)
    decay = np.tril(weight ** np.maximum(place[:, None] - place[None, :], 0).astype(np.float64))
    totals, before, carry = blocks @ decay.T, 0.0, weight ** (place + 1.0)
    for block in totals:
        block += before * carry
        before = block[-1]
    return totals.reshape(-1)[: len(values)]
