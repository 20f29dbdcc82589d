"""A robust, non-negative line through a member's seconds by micro-batch size, with its error.

Weighted by relative error, Tukey's bisquare against outliers, and leaning on what is thought of the fixed part as on one
more observation at size zero. Legend: ``O`` observations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heterotrain_core.perf.model import LineError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

LEAST_STEPS = 8
NOTHING_S = 1e-15
_SAME_SIZE_RATIO = 1.25
_SAME_TIME = 0.15
_NEW_GROUND = 1.5
_SEEN_AGAIN = 3
_BENDS = 3
_LARGEST_BEND = 0.5
_SOUND = 0.5
_NO_REACH = 1e-6
_FEW, _USUAL_EXCESS = 2, 4.0
"""A handful of observations may agree by chance: so many more are thought to miss by twice what their own spread says."""
_LEAST_SERIES = 8
"""Observations below which nobody can tell whether one is like the next."""
_MOST_PERSISTENT = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPart:
    """What is thought of the fixed part of a member's time before its own data are looked at.

    Attributes:
        ratio: fixed part relative to the time of a micro-batch of ``of_samples``.
        deviation: standard error of the ratio.
        of_samples: 0 for whatever size is typical of the data.
        seen: whether it was seen (in others of the pool), so that it counts as data, or is assumed.
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
class Line:
    """Seconds of a micro-batch of x samples: ``slope x + fixed``; ``error`` is ``None`` where the data do not tell."""

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
) -> Line:
    """Return the robust non-negative weighted line; ``weight_O`` are relative weights (of y / its mean).

    Where a line does not explain the times, it is to be right at ``here_samples``: other sizes count less, the further away
    (and the more times bend) the less. ``None`` asks for the line that suits all sizes.

    What the newest steps show far beyond all other sizes is no outlier if it can be true, however far it is from the line of
    all others: then the time is no line, as where small shares leave a GPU half idle, and shares are decided here.
    """
    positive = y_O > NOTHING_S
    if not positive.any():
        return Line(0.0, 0.0, None)
    x_O, y_O, weight_O = x_O[positive], y_O[positive], weight_O[positive]
    steps_O, newest_O = steps_O[positive], newest_O[positive]
    w_O = weight_O / y_O**2
    slope, fixed = _least_squares(x_O, y_O, w_O, assumed)
    if len(y_O) > 3:  # noqa: PLR2004  # three points do not tell which of them is the outlier
        slope, fixed = _middle_line(x_O, y_O)
        robust_O = np.zeros_like(y_O)
        firm_O = _new_ground(x_O, y_O, newest_O) | _alone_in_its_range(x_O, y_O, steps_O)
        usual_O = _usual_at_its_size(x_O, y_O)
        for _ in range(8):
            expected_O = np.maximum(slope * x_O + fixed, NOTHING_S)
            miss_O = np.abs(y_O / np.where(usual_O > 0, usual_O, expected_O) - 1) * np.sqrt(weight_O)
            scale = max(1.0, 1.4826 * float(np.median(miss_O)))
            following_O = np.maximum(1 - (miss_O / (4.685 * scale)) ** 2, 0.0) ** 2
            following_O = np.where(firm_O, 1.0, following_O)
            if np.allclose(following_O, robust_O, atol=1e-3):
                break
            robust_O = following_O
            w_O = weight_O * robust_O / expected_O**2
            slope, fixed = _least_squares(x_O, y_O, w_O, assumed)
        far_O = np.log(x_O / here_samples) ** 2 if here_samples else np.zeros_like(x_O)
        for _ in range(_BENDS if here_samples else 0):
            expected_O = np.maximum(slope * x_O + fixed, NOTHING_S)
            bend = _bend(y_O / expected_O - 1, far_O, weight_O, robust_O)
            w_O = robust_O / (1 / weight_O + (bend * far_O) ** 2) / expected_O**2
            slope, fixed = _least_squares(x_O, y_O, w_O, assumed)
    return Line(slope, fixed, _line_error(x_O, y_O, w_O, slope=slope, fixed=fixed, assumed=assumed))


def _bend(miss_O: Floats, far_O: Floats, weight_O: Floats, robust_O: Floats) -> float:
    """Return how far times stray from a line, relative to them, at a distance of 1 (squared logarithm of sizes).

    By moments: what the relative misses are beyond their own errors. 0 where a line explains them.
    """
    sound_O = robust_O > _SOUND
    reach = float((far_O[sound_O] ** 2).sum())
    beyond = float((miss_O[sound_O] ** 2 - 1 / weight_O[sound_O]).sum())
    return min(_LARGEST_BEND, math.sqrt(beyond / reach)) if reach > _NO_REACH and beyond > 0 else 0.0


def _usual_at_its_size(x_O: Floats, y_O: Floats) -> Floats:
    """Return the median seconds at each observation's size where some agree on it, 0 where too few tell.

    What was seen again and again at one size is no outlier, however far from the line: then the time is no line.
    """
    usual_O = np.zeros_like(y_O)
    for x in np.unique(x_O).tolist():
        there_O = x_O == x
        if np.count_nonzero(there_O) >= _SEEN_AGAIN:
            usual_O[there_O] = np.median(y_O[there_O])
    return usual_O


def _new_ground(x_O: Floats, y_O: Floats, newest_O: Flags) -> Flags:
    """Return which of the newest observations lie far beyond all other sizes, agree with those at their own, and can be true.

    More samples take no less time, and no more time a sample, as long as memory holds.
    """
    found_O = np.zeros(len(x_O), dtype=bool)
    for i in np.flatnonzero(newest_O).tolist():
        x, y = float(x_O[i]), float(y_O[i])
        beside_O = np.abs(np.log(x_O / x)) < math.log(_SAME_SIZE_RATIO)
        others_x, others_y = x_O[~beside_O], y_O[~beside_O]
        if not len(others_x):
            continue
        larger, smaller = x > _NEW_GROUND * others_x.max(), x * _NEW_GROUND < others_x.min()
        if not (larger or smaller) or abs(y / float(np.median(y_O[beside_O])) - 1) > _SAME_TIME:
            continue
        time, pace = float(np.median(others_y)), float(np.median(others_y / others_x))
        found_O[i] = (y >= time and y / x <= pace) if larger else (y <= time and y / x >= pace)
    return found_O


def _alone_in_its_range(x_O: Floats, y_O: Floats, steps_O: Floats) -> Flags:
    """Return which observations are all that is known of a range of sizes, agree with each other, and can be true.

    Most steps are made at few sizes. Where the time is no line, those at other sizes miss the line of the many; left out as
    outliers, they would be forgotten, and the same error made again.
    """
    found_O = np.zeros(len(x_O), dtype=bool)
    for x in np.unique(x_O).tolist():
        distance_O = np.abs(np.log(x_O / x))
        beside_O = distance_O < math.log(_SAME_SIZE_RATIO)
        if steps_O[beside_O].sum() < LEAST_STEPS or (~beside_O & (distance_O < math.log(_NEW_GROUND))).any():
            continue
        time = float(np.median(y_O[beside_O]))
        for nearest in (x_O[x_O < x / _NEW_GROUND].max(initial=0.0), x_O[x_O > x * _NEW_GROUND].min(initial=math.inf)):
            if not 0 < nearest < math.inf:
                continue
            there = float(np.median(y_O[np.abs(np.log(x_O / nearest)) < math.log(_SAME_SIZE_RATIO)]))
            least, most = sorted((there, there * x / nearest))
            if not (1 - _SAME_TIME) * least <= time <= (1 + _SAME_TIME) * most:
                break
        else:
            found_O |= (x_O == x) & (np.abs(y_O / time - 1) <= _SAME_TIME)
    return found_O


def _middle_line(x_O: Floats, y_O: Floats) -> tuple[float, float]:
    """Return the line of median slope through the median point (Theil-Sen): a start that a few outliers do not move."""
    i, j = np.triu_indices(len(x_O), k=1)
    run, rise = x_O[j] - x_O[i], y_O[j] - y_O[i]
    apart = run != 0
    slope = max(0.0, float(np.median(rise[apart] / run[apart]))) if apart.any() else 0.0
    return slope, max(0.0, float(np.median(y_O - slope * x_O)))


def _least_squares(x_O: Floats, y_O: Floats, w_O: Floats, assumed: FixedPart) -> tuple[float, float]:
    """Return the non-negative (slope, fixed part), the assumption counting as one observation at size zero."""
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
    """Return what is thought of the seconds at size zero, and its weight."""
    whole = float(w_O.sum())
    typical = float((w_O * y_O).sum()) / whole
    there = assumed.at(float((w_O * x_O).sum()) / whole)
    return there.ratio * typical, 1.0 / (there.deviation * typical) ** 2


def _line_error(
    x_O: Floats, y_O: Floats, w_O: Floats, *, slope: float, fixed: float, assumed: FixedPart
) -> LineError | None:
    """Return the standard error of the line from what was seen, ``None`` where that does not tell."""
    if float(w_O.sum()) <= 0:
        return None
    degrees = max(1, len(x_O) - 2)
    pull_O = w_O * (y_O - slope * x_O - fixed)
    misses = float((pull_O**2 / np.where(w_O > 0, w_O, 1.0)).sum())
    excess = max(1.0, (misses + _FEW * _USUAL_EXCESS) / (degrees + _FEW))
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
        centre_s=math.sqrt(excess * persistence(pull_O) / whole),
        slope_s=math.sqrt(excess * persistence(pull_O * about_O) / spread),
    )


def persistence(pull_O: Floats) -> float:
    """Return how many times as large the variance of a sum over time is as independent parts would make it, at least 1.

    ``(1 + r) / (1 - r)`` for parts that are correlated by r with the next one (and r^k with the k-th). A fit makes its own
    misses cancel out, which lowers what is seen of r by about ``(1 + 3 r) / n`` (Kendall 1954); that is put right.

    Args:
        pull_O: what each observation contributes to the sum, in order of time; the mean is about 0.
    """
    n, square = len(pull_O), float((pull_O**2).sum())
    if n < _LEAST_SERIES or square <= 0:
        return 1.0
    seen = float((pull_O[1:] * pull_O[:-1]).sum()) / square
    r = min(max((n * seen + 1) / (n - 3), 0.0), _MOST_PERSISTENT)
    return (1 + r) / (1 - r)


def uncertainty(line: Line, typical: float) -> float:
    """Return the relative standard error at half and twice the typical size, the worse one."""
    if line.error is None:
        return math.inf
    worst = 0.0
    for x in (typical / 2, typical * 2):
        expected = line.slope * x + line.fixed
        if expected <= 0:
            return math.inf
        worst = max(worst, line.error.at(x) / expected)
    return worst
