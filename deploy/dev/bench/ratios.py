"""Ratios of paired measurements, with their uncertainty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95 % interval from order statistics, whatever the distribution.

    The true median is below the k-th of n values with the probability of fewer than k heads in n throws of a fair coin.
    """
    ordered, count = sorted(values), len(values)
    below, at, chance = 0.0, 0, 0.5**count
    while chance + below <= 0.025:  # noqa: PLR2004 - half of what is outside
        below, at = below + chance, at + 1
        chance = math.comb(count, at) * 0.5**count
    lowest = max(0, at - 1)
    return statistics.median(ordered), ordered[lowest], ordered[count - 1 - lowest]


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum of the second over the sum of the first, and its standard error, from two pairs on.

    The pairs are taken for a sample: the ratio estimator's variance (Cochran, Sampling Techniques, 1977, section 6.4).
    """
    firsts, seconds = (math.fsum(column) for column in zip(*pairs, strict=True))
    ratio, count = seconds / firsts, len(pairs)
    off = math.fsum((second - ratio * first) ** 2 for first, second in pairs)
    return ratio, math.sqrt(off * count / (count - 1)) / firsts
