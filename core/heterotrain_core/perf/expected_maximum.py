"""The mean of a maximum: why a step of noisy members is longer than the longest of their means.

Legend: ``W`` members, ``X`` points of integration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_REACH = 6.0
"""Standard deviations that a normal variable is taken not to exceed: only one in 1e9 does."""
_LEAST_DEVIATION = 1e-9
"""Least deviation, relative to the largest mean: the grid would miss the step of a variable without spread."""
_POINTS = 1025
"""Points of the integration grid."""
_TABLE_Z = np.linspace(-_REACH - 1, _REACH + 1, 2801)
_TABLE_P = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in _TABLE_Z.tolist()])


def expected_maximum(means: Sequence[float], deviations: Sequence[float]) -> float:
    """Return the mean of the maximum of independent normal variables, to about 1e-3 of the largest deviation.

    ``E max = h - integral of P(max <= x) dx`` up to an ``h`` above all variables, by the trapezoid rule. Exact for any
    number of variables with different means and deviations, where Clark's (1961) pairwise formula is an approximation.

    Assumes independence. Members slowed by a common cause have a smaller maximum than this.

    Args:
        means: seconds, at least one, positive.
        deviations: standard deviations in seconds, one for each mean.
    """
    mean_W = np.array(means, dtype=float)
    deviation_W = np.maximum(np.array(deviations, dtype=float), _LEAST_DEVIATION * float(mean_W.max()))
    high = float((mean_W + _REACH * deviation_W).max())
    low = float((mean_W - _REACH * deviation_W).max())
    if high - low <= 1e-7 * abs(high):
        return float(mean_W.max())
    x_X = np.linspace(low, high, _POINTS)
    below_X: NDArray[np.float64] = np.ones(_POINTS)
    for mean, deviation in set(zip(mean_W.tolist(), deviation_W.tolist(), strict=True)):
        times = int(np.count_nonzero((mean_W == mean) & (deviation_W == deviation)))
        below_X = below_X * np.interp((x_X - mean) / deviation, _TABLE_Z, _TABLE_P, left=0.0, right=1.0) ** times
    return high - float(np.trapezoid(below_X, x_X))


def quantile_of_maximum(deviations: Sequence[float], probability: float) -> float:
    """Return the quantile of the maximum of independent normal variables with mean zero.

    Solves ``product of P(x_i <= x) = probability`` by bisection, to 1e-6 of the largest deviation.

    Args:
        deviations: standard deviations, in any unit; at least one.
        probability: at least 0.5, below 1.
    """
    deviation_W = np.array([d for d in deviations if d > 0])
    if not len(deviation_W):
        return 0.0
    low, high = 0.0, (_REACH + 1) * float(deviation_W.max())
    while high - low > 1e-6 * float(deviation_W.max()):
        middle = (low + high) / 2
        below = float(np.prod(np.interp(middle / deviation_W, _TABLE_Z, _TABLE_P, left=0.0, right=1.0)))
        low, high = (middle, high) if below < probability else (low, middle)
    return high


def efficiency_ceiling(variations: Sequence[float]) -> float:
    """Return the best expected efficiency of perfectly balanced members without an exchange, in (0, 1].

    Three members with a variation of 0.05, 0.08 or 0.13 reach at most 0.96, 0.94 or 0.90 of the sum of their rates.

    Args:
        variations: standard deviation of each member's compute seconds relative to their mean, at least one.
    """
    return 1.0 / max(1.0, expected_maximum([1.0] * len(variations), variations))
