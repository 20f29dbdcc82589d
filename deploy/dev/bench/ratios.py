"""Ratios of paired measurements, with their uncertainty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval from order statistics, valid for any distribution.

    The true median is below the k-th of n values with the probability of fewer than k heads in n throws of a fair coin.
    """
    ordered, count = sorted(values), len(values)
    below, at, probability = 0.0, 0, 0.5**count
    while probability + below <= 0.025:  # noqa: PLR2004  # half of the outside probability
        below, at = below + probability, at + 1
        probability = math.comb(count, at) * 0.5**count
    lowest = max(0, at - 1)
    return statistics.median(ordered), ordered[lowest], ordered[count - 1 - lowest]


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum of the second values over the sum of the first, and its standard error; needs two pairs.

    The pairs are a random sample. Variance of the ratio estimator: Cochran, Sampling Techniques, 1977, section 6.4.
    """
    firsts, seconds = (math.fsum(column) for column in zip(*pairs, strict=True))
    ratio, count = seconds / firsts, len(pairs)
    off = math.fsum((second - ratio * first) ** 2 for first, second in pairs)
    return ratio, math.sqrt(off * count / (count - 1)) / firsts
