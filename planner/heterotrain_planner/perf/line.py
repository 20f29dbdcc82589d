"""A robust, non-negative line through a member's seconds by micro-batch size, with its error.

Observations are weighted by relative error, with Tukey's bisquare against outliers. The expected fixed part counts as
one more observation at size zero. Legend: ``O`` observations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heterotrain_planner.perf.model import LineError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

LEAST_STEPS = 8
"""Steps from which a model can be trusted, and from which a range of sizes counts as observed."""
TINY_S = 1e-15
"""Seconds that count as zero."""
_SAME_SIZE_RATIO = 1.25
"""Micro-batch sizes within this ratio count as one size."""
_SAME_TIME = 0.15
"""Relative difference within which times at one size agree."""
_FAR_SIZE_RATIO = 1.5
"""Ratio of micro-batch sizes from which a size lies in a range of its own."""
_REPEATED = 3
"""Observations at one size from which their median is compared with, instead of the line."""
_CURVE_PASSES = 3
"""Passes that estimate how far times stray from a line, each starting from the line of the previous one."""
_LARGEST_STRAY = 0.5
"""Most relative deviation from a line, at a size ratio of e."""
_INLIER_WEIGHT = 0.5
"""Least bisquare weight of an observation that counts as an inlier."""
_NO_REACH = 1e-6
"""Sum of squared size distances (fourth powers of logarithms) below which all sizes are one size."""
PRIOR_OBSERVATIONS, PRIOR_EXCESS = 2, 4.0
"""Few observations may agree by chance: this many more are assumed, with this squared error over their spread."""
_LEAST_SERIES = 8
"""Observations below which a correlation with the next observation cannot be estimated."""
_MOST_PERSISTENT = 0.95
"""Largest correlation with the next observation: the variance of a sum is then 39 times that of independent parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPart:
    """The expected fixed part of a member's time, before its own data.

    Attributes:
        ratio: fixed part relative to the time of a micro-batch of ``of_samples``.
        deviation: standard error of the ratio.
        of_samples: 0 for the size that is typical of the data.
        seen: whether it was observed in others of the pool, so that it counts as data; otherwise it is an assumption.
    """

    ratio: float = 0.1
    deviation: float = 0.3
    of_samples: float = 0.0
    seen: bool = False

    def at(self, samples: float) -> FixedPart:
        """Return the same line's fixed part relative to its time at another size."""
        if self.of_samples <= 0 or samples <= 0:
            return self
        whole = self.ratio * self.of_samples + (1 - self.ratio) * samples
        if whole <= 0:
            return self
        return replace(
            self,
            ratio=self.ratio * self.of_samples / whole,
            deviation=self.deviation * self.of_samples * samples / whole**2,
            of_samples=samples,
        )


ASSUMED = FixedPart()


@dataclass(frozen=True, slots=True)
class FittedLine:
    """Seconds of a micro-batch of x samples: ``slope x + fixed``; ``error`` is ``None`` where it is unknown."""

    slope: float
    fixed: float
    error: LineError | None


def fit_line(
    x_O: Floats,
    y_O: Floats,
    *,
    weight_O: Floats,
    steps_O: Floats,
    newest_O: Flags,
    assumed: FixedPart,
    here_samples: float | None = None,
) -> FittedLine:
    """Return the robust non-negative weighted line.

    The newest observations far beyond all other sizes are not outliers if they are plausible, however far they are from
    the line of the others: then the time is not linear, as where small shares leave a GPU half idle.

    Args:
        x_O: micro-batch sizes.
        y_O: seconds.
        weight_O: relative weights: inverse squares of the errors of ``y / mean``.
        steps_O: steps of each observation.
        newest_O: whether an observation shows the current speed.
        assumed: the expected fixed part.
        here_samples: where times are not linear, the line is fitted for this size: other sizes count less, the further
            away they are and the more times curve. ``None`` fits all sizes alike.
    """
    positive = y_O > TINY_S
    if not positive.any():
        return FittedLine(0.0, 0.0, None)
    x_O, y_O, weight_O = x_O[positive], y_O[positive], weight_O[positive]
    steps_O, newest_O = steps_O[positive], newest_O[positive]
    w_O = weight_O / y_O**2
    slope, fixed = _least_squares(x_O, y_O, w_O, assumed)
    if len(y_O) > 3:  # noqa: PLR2004  # of three points, any one may be the outlier
        slope, fixed = _theil_sen(x_O, y_O)
        robust_O = np.zeros_like(y_O)
        kept_O = _beyond_other_sizes(x_O, y_O, newest_O) | _only_ones_in_range(x_O, y_O, steps_O)
        median_O = _median_at_its_size(x_O, y_O)
        repeated_O, root_O = median_O > 0, np.sqrt(weight_O)
        for _ in range(8):
            expected_O = np.maximum(slope * x_O + fixed, TINY_S)
            miss_O = np.abs(y_O / np.where(repeated_O, median_O, expected_O) - 1) * root_O
            scale = max(1.0, 1.4826 * median(miss_O))
            following_O = np.maximum(1 - (miss_O / (4.685 * scale)) ** 2, 0.0) ** 2
            following_O = np.where(kept_O, 1.0, following_O)
            if bool((np.abs(following_O - robust_O) <= 1e-3 + 1e-5 * robust_O).all()):
                break
            robust_O = following_O
            w_O = weight_O * robust_O / expected_O**2
            slope, fixed = _least_squares(x_O, y_O, w_O, assumed)
        far_O = np.log(x_O / here_samples) ** 2 if here_samples else np.zeros_like(x_O)
        for _ in range(_CURVE_PASSES if here_samples else 0):
            expected_O = np.maximum(slope * x_O + fixed, TINY_S)
            stray = _stray(y_O / expected_O - 1, far_O, weight_O, robust_O)
            w_O = robust_O / (1 / weight_O + (stray * far_O) ** 2) / expected_O**2
            slope, fixed = _least_squares(x_O, y_O, w_O, assumed)
    return FittedLine(slope, fixed, _line_error(x_O, y_O, w_O, slope=slope, fixed=fixed, assumed=assumed))


def _stray(miss_O: Floats, far_O: Floats, weight_O: Floats, robust_O: Floats) -> float:
    """Return how far times stray from a line, relative to the times, at a distance of 1 (squared logarithm of sizes).

    By moments: the relative misses in excess of their own errors. 0 where a line explains them.
    """
    inlier_O = robust_O > _INLIER_WEIGHT
    reach = float((far_O[inlier_O] ** 2).sum())
    beyond = float((miss_O[inlier_O] ** 2 - 1 / weight_O[inlier_O]).sum())
    return min(_LARGEST_STRAY, math.sqrt(beyond / reach)) if reach > _NO_REACH and beyond > 0 else 0.0


def _median_at_its_size(x_O: Floats, y_O: Floats) -> Floats:
    """Return the median seconds at each observation's size, 0 where a size has too few observations.

    Repeated measurements at one size are never outliers, however far from the line: they show that times are not
    linear.
    """
    median_O = np.zeros_like(y_O)
    for x in np.unique(x_O).tolist():
        there_O = x_O == x
        if np.count_nonzero(there_O) >= _REPEATED:
            median_O[there_O] = median(y_O[there_O])
    return median_O


def _beyond_other_sizes(x_O: Floats, y_O: Floats, newest_O: Flags) -> Flags:
    """Return which of the newest observations lie far beyond other sizes, agree at their own, and are plausible.

    Plausible: more samples take no less time in all, and no more time per sample, as long as memory suffices.
    """
    found_O = np.zeros(len(x_O), dtype=bool)
    for i in np.flatnonzero(newest_O).tolist():
        x, y = float(x_O[i]), float(y_O[i])
        beside_O = np.abs(np.log(x_O / x)) < math.log(_SAME_SIZE_RATIO)
        others_x, others_y = x_O[~beside_O], y_O[~beside_O]
        if not len(others_x):
            continue
        larger, smaller = x > _FAR_SIZE_RATIO * others_x.max(), x * _FAR_SIZE_RATIO < others_x.min()
        if not (larger or smaller) or abs(y / median(y_O[beside_O]) - 1) > _SAME_TIME:
            continue
        time, pace = median(others_y), median(others_y / others_x)
        found_O[i] = (y >= time and y / x <= pace) if larger else (y <= time and y / x >= pace)
    return found_O


def _only_ones_in_range(x_O: Floats, y_O: Floats, steps_O: Floats) -> Flags:
    """Return which observations are the only ones in a range of sizes, agree with each other, and are plausible.

    Most steps have one of a few sizes. Where times are not linear, steps at other sizes miss the line of the majority.
    Dropped as outliers, they would be forgotten, and the same error would be made again.
    """
    found_O = np.zeros(len(x_O), dtype=bool)
    for x in np.unique(x_O).tolist():
        distance_O = np.abs(np.log(x_O / x))
        beside_O = distance_O < math.log(_SAME_SIZE_RATIO)
        if steps_O[beside_O].sum() < LEAST_STEPS or (~beside_O & (distance_O < math.log(_FAR_SIZE_RATIO))).any():
            continue
        time = median(y_O[beside_O])
        for nearest in (
            x_O[x_O < x / _FAR_SIZE_RATIO].max(initial=0.0),
            x_O[x_O > x * _FAR_SIZE_RATIO].min(initial=math.inf),
        ):
            if not 0 < nearest < math.inf:
                continue
            there = median(y_O[np.abs(np.log(x_O / nearest)) < math.log(_SAME_SIZE_RATIO)])
            least, most = sorted((there, there * x / nearest))
            if not (1 - _SAME_TIME) * least <= time <= (1 + _SAME_TIME) * most:
                break
        else:
            found_O |= (x_O == x) & (np.abs(y_O / time - 1) <= _SAME_TIME)
    return found_O


def _theil_sen(x_O: Floats, y_O: Floats) -> tuple[float, float]:
    """Return the line of median slope through the median point (Theil-Sen): a start that resists a few outliers."""
    run_OO, rise_OO = x_O[:, None] - x_O, y_O[:, None] - y_O
    larger_OO = run_OO > 0  # each pair of different sizes once
    slope = max(0.0, median(rise_OO[larger_OO] / run_OO[larger_OO])) if larger_OO.any() else 0.0
    return slope, max(0.0, median(y_O - slope * x_O))


def median(values: Floats) -> float:
    """Return the median of finite values; for a few dozen of them, several times as fast as numpy's."""
    ordered, middle = np.sort(values), len(values) // 2
    return float((ordered[middle] + ordered[-1 - middle]) / 2)


def _least_squares(x_O: Floats, y_O: Floats, w_O: Floats, assumed: FixedPart) -> tuple[float, float]:
    """Return the non-negative (slope, fixed part); the expected fixed part counts as one observation at size zero."""
    value, weight = _at_zero(x_O, y_O, w_O, assumed)
    sw, sy = float(w_O.sum()) + weight, float((w_O * y_O).sum()) + weight * value
    sx, sxx, sxy = (float(v) for v in ((w_O * x_O).sum(), (w_O * x_O * x_O).sum(), (w_O * x_O * y_O).sum()))
    determinant = sw * sxx - sx * sx
    if determinant > 0:
        slope, fixed = (sw * sxy - sx * sy) / determinant, (sxx * sy - sx * sxy) / determinant
        if slope >= 0 and fixed >= 0:
            return slope, fixed
        if slope >= 0:
            return sxy / sxx, 0.0
    return 0.0, sy / sw


def _at_zero(x_O: Floats, y_O: Floats, w_O: Floats, assumed: FixedPart) -> tuple[float, float]:
    """Return the expected seconds at size zero, and their weight."""
    whole = float(w_O.sum())
    typical = float((w_O * y_O).sum()) / whole
    there = assumed.at(float((w_O * x_O).sum()) / whole)
    return there.ratio * typical, 1.0 / (there.deviation * typical) ** 2


def _line_error(
    x_O: Floats, y_O: Floats, w_O: Floats, *, slope: float, fixed: float, assumed: FixedPart
) -> LineError | None:
    """Return the standard error of the line from the observations, ``None`` where they do not determine it."""
    if float(w_O.sum()) <= 0:
        return None
    degrees = max(1, len(x_O) - 2)
    part_O = w_O * (y_O - slope * x_O - fixed)
    misses = float((part_O**2 / np.where(w_O > 0, w_O, 1.0)).sum())
    excess = max(1.0, (misses + PRIOR_OBSERVATIONS * PRIOR_EXCESS) / (degrees + PRIOR_OBSERVATIONS))
    about_O = x_O - float((w_O * x_O).sum() / w_O.sum())
    if assumed.seen:
        _, weight = _at_zero(x_O, y_O, w_O, assumed)
        x_O, w_O = np.append(x_O, 0.0), np.append(w_O, weight)
    whole = float(w_O.sum())
    centre = float((w_O * x_O).sum() / whole)
    spread = float((w_O * (x_O - centre) ** 2).sum())
    if spread <= 1e-9 * whole * centre**2:
        return None
    return LineError(
        centre_samples=centre,
        centre_s=math.sqrt(excess * persistence(part_O) / whole),
        slope_s=math.sqrt(excess * persistence(part_O * about_O) / spread),
    )


def persistence(part_O: Floats) -> float:
    """Return the variance of a sum over time relative to that of independent parts, at least 1.

    ``(1 + r) / (1 - r)`` for parts with a correlation of r with the next one (and r^k with the k-th). The misses of a
    fit cancel out, which lowers the observed r by about ``(1 + 3 r) / n`` (Kendall 1954); this bias is corrected.

    Args:
        part_O: contribution of each observation to the sum, in order of time; the mean is about 0.
    """
    n, square = len(part_O), float((part_O**2).sum())
    if n < _LEAST_SERIES or square <= 0:
        return 1.0
    seen = float((part_O[1:] * part_O[:-1]).sum()) / square
    r = min(max((n * seen + 1) / (n - 3), 0.0), _MOST_PERSISTENT)
    return (1 + r) / (1 - r)


def uncertainty(line: FittedLine, typical: float) -> float:
    """Return the relative standard error at half and twice the typical size, the worse of the two."""
    if line.error is None:
        return math.inf
    worst = 0.0
    for x in (typical / 2, typical * 2):
        expected = line.slope * x + line.fixed
        if expected <= 0:
            return math.inf
        worst = max(worst, line.error.at(x) / expected)
    return worst
