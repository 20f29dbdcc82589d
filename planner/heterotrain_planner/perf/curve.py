"""A time curve: how far a member's measured times stray from its line near the sizes that it has had.

Lines stay unless the observations of a pool's members reject them together. Then the logarithm of time over line, as a
function of the size, is a random process with the covariance ``t² exp(-|ln x - ln x'| / REACH)``. t² follows by moments
from all members of the pool. Each member's curve is the mean of this process given the member's own observations
(kriging: Krige 1951; Cressie, "Statistics for Spatial Data", 1993). So at a size that was measured often, the curve has
the measured time. Measured rarely, it is drawn to the line, and far from all measured sizes it is the line. It never
falls. Legend: ``O`` observations, ``K`` knots, ``P`` points of the curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from heterotrain_core.contract.plan import ComputeTime
from numpy.typing import NDArray

from heterotrain_planner.perf.line import PRIOR_EXCESS, PRIOR_OBSERVATIONS, TINY_S, Floats, median, persistence
from heterotrain_planner.perf.model import MemberModel, TimeCurve
from heterotrain_planner.perf.regression_data import RegressionData

REACH = 0.5
"""Logarithm of a ratio of sizes over which the correlation of their distances from the line falls to 1/e."""
SURE_DEVIATIONS = 3.09
"""Lines are rejected where chance alone strays as far in 0.1 % of cases."""
_KNOT_RATIO = 1.05
"""Sizes within this ratio make one knot."""
_MOST_KNOTS = 64
"""Knots of a member; with more of them, neighbours are merged."""
_LEAST_KNOTS = 3
"""Knots from which a line can be rejected: it passes through any two."""
_TUKEY = 4.685
"""Deviations beyond which an observation at a knot does not count: bisquare weights, as for lines."""
_LARGEST_DISTANCE = 1.0
"""Cap on the logarithm of a time over the line."""
_TAIL_RATIOS = (1.25, 1.6, 2.0, 2.5, 4.0, 8.0)
"""Points beyond the outermost knots, relative to them; from the last one on, the curve is the line."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Knots:
    """One member's observations by size.

    Attributes:
        log_size_K: logarithms of the micro-batch sizes, growing.
        distance_K: mean logarithms of time over line.
        variance_K: their variances.
        basis_K2: the two parts of any line's time, relative to the time of the member's line.
    """

    log_size_K: Floats
    distance_K: Floats
    variance_K: Floats
    basis_K2: Floats

    def beyond_line(self) -> tuple[float, int]:
        """Return the squared distances from the best line in units of the variances, and their degrees of freedom."""
        if len(self.distance_K) < _LEAST_KNOTS:
            return 0.0, 0
        root_K = 1 / np.sqrt(self.variance_K)
        line, *_ = np.linalg.lstsq(self.basis_K2 * root_K[:, None], self.distance_K * root_K, rcond=None)
        miss_K = (self.distance_K - self.basis_K2 @ line) * root_K
        return float(miss_K @ miss_K), len(self.distance_K) - 2


def time_curves(
    data: Sequence[RegressionData | None], models: Sequence[MemberModel], pools: Sequence[str]
) -> tuple[TimeCurve | None, ...]:
    """Return a curve for each member whose pool's observations reject lines; ``None`` where lines hold.

    Args:
        data: by member, without the pace that all members share; ``None`` without observations.
        models: the lines of these data, in the same order.
        pools: the members' pools; a member with an empty name is its own pool.
    """
    knots = [_knots(seen, model) for seen, model in zip(data, models, strict=True)]
    groups: dict[tuple[str, int], list[int]] = {}
    for i, pool in enumerate(pools):
        groups.setdefault((pool, 0 if pool else i), []).append(i)
    found: list[TimeCurve | None] = [None] * len(models)
    for group in groups.values():
        stray2 = _stray2([each for i in group if (each := knots[i]) is not None])
        for i in group if stray2 > 0 else ():
            mine, line = knots[i], models[i].compute
            if mine is not None and line is not None:
                found[i] = _curve(mine, line, stray2)
    return tuple(found)


def lines_rejected(distances: Sequence[tuple[float, int]]) -> bool:
    """Return whether members are further from their best lines than chance takes them in 0.1 % of cases.

    Where lines are true, the sum of these distances is chi-squared (quantile by Wilson and Hilferty 1931).

    Args:
        distances: by member, the squared distances from its best line, summed in units of their variances, and their
            degrees of freedom.
    """
    freedom = sum(degrees for _, degrees in distances)
    if freedom == 0:
        return False
    part = 2 / (9 * freedom)
    most = freedom * (1 - part + SURE_DEVIATIONS * math.sqrt(part)) ** 3
    return sum(square for square, _ in distances) > most


def _stray2(knots: Sequence[_Knots]) -> float:
    """Return the variance of the distances from lines, 0 where lines are not rejected."""
    if not lines_rejected([each.beyond_line() for each in knots]):
        return 0.0
    beyond = sum(float((each.distance_K**2 - each.variance_K).sum()) for each in knots)
    return max(0.0, beyond / sum(len(each.distance_K) for each in knots))


def _knots(seen: RegressionData | None, model: MemberModel) -> _Knots | None:
    """Return the member's knots; ``None`` where it has no line, or changed its speed and is being learned again."""
    if seen is None or model.compute is None or model.drifted:
        return None
    slope, fixed = _line(model.compute)
    if slope + fixed <= TINY_S:
        return None
    usable_O = seen.seconds_O > TINY_S
    size_O, weight_O = seen.size_O[usable_O], seen.weight_O[usable_O]
    if not len(size_O):
        return None
    log_O = np.log(seen.seconds_O[usable_O] / np.maximum(slope * size_O + fixed, TINY_S))
    log_O = np.clip(log_O, -_LARGEST_DISTANCE, _LARGEST_DISTANCE)
    place_O = _places(np.log(size_O))
    count = int(place_O.max()) + 1
    middle_K = np.array([median(log_O[place_O == k]) for k in range(count)])
    miss_O = np.abs(log_O - middle_K[place_O]) * np.sqrt(weight_O)
    scale = max(1.0, 1.4826 * median(miss_O))
    robust_O = weight_O * np.maximum(1 - (miss_O / (_TUKEY * scale)) ** 2, 0.0) ** 2
    # Two times of one size that contradict each other: neither is an outlier.
    robust_O = np.where(np.bincount(place_O, weights=robust_O)[place_O] > 0, robust_O, weight_O)
    whole_K = np.bincount(place_O, weights=robust_O)
    distance_K = np.bincount(place_O, weights=robust_O * log_O) / whole_K
    size_K = np.bincount(place_O, weights=robust_O * size_O) / whole_K
    off_O = log_O - distance_K[place_O]
    # Few observations may agree by chance, as for a line.
    misses = float(robust_O @ off_O**2) + PRIOR_OBSERVATIONS * PRIOR_EXCESS
    excess = max(1.0, misses / (len(log_O) - count + PRIOR_OBSERVATIONS))
    line_K = np.maximum(slope * size_K + fixed, TINY_S)
    return _Knots(
        log_size_K=np.log(size_K),
        distance_K=distance_K,
        variance_K=excess * persistence(robust_O * off_O) / whole_K,
        basis_K2=np.stack([size_K / line_K, np.full(count, size_K.mean()) / line_K], axis=1),
    )


def _places(log_O: Floats) -> NDArray[np.int64]:
    """Return the number of each observation's knot, by growing size."""
    order = np.argsort(log_O, kind="stable")
    width = math.log(_KNOT_RATIO)
    while True:
        place_O = np.zeros(len(log_O), dtype=np.int64)
        knot, first = 0, float(log_O[order[0]])
        for index, size in zip(order.tolist(), log_O[order].tolist(), strict=True):
            if size - first > width:
                knot, first = knot + 1, size
            place_O[index] = knot
        if knot < _MOST_KNOTS:
            return place_O
        width *= 2


def _curve(knots: _Knots, line: ComputeTime, stray2: float) -> TimeCurve:
    """Return the mean of the process given the member's knots, with its standard error."""
    slope, fixed = _line(line)
    at_K, tail = knots.log_size_K, np.log(_TAIL_RATIOS)
    at_P = np.concatenate((at_K[0] - tail[::-1], at_K, at_K[-1] + tail))
    between_KK = stray2 * np.exp(-np.abs(at_K[:, None] - at_K) / REACH)
    across_PK = stray2 * np.exp(-np.abs(at_P[:, None] - at_K) / REACH)
    gain_PK = np.linalg.solve(between_KK + np.diag(knots.variance_K), across_PK.T).T
    distance_P = gain_PK @ knots.distance_K
    distance_P[0] = distance_P[-1] = 0.0
    variance_P = np.maximum(stray2 - (gain_PK * across_PK).sum(axis=1), _TINY)
    size_P = np.exp(at_P)
    seconds_P = _rising((slope * size_P + fixed) * np.exp(distance_P), 1 / variance_P)
    return TimeCurve(
        points=tuple(zip(size_P.tolist(), seconds_P, strict=True)), errors=tuple(np.sqrt(variance_P).tolist())
    )


def _rising(value_P: Floats, weight_P: Floats) -> list[float]:
    """Return the values closest to these that never fall: adjacent ones that fall get their mean."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(value_P.tolist(), weight_P.tolist(), strict=True):
        mean, whole, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, its, more = blocks.pop()
            mean = (before * its + mean * whole) / (its + whole)
            whole, count = whole + its, count + more
        blocks.append((mean, whole, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


def _line(compute: ComputeTime) -> tuple[float, float]:
    """Return slope and fixed part."""
    return compute.per_sample_s + compute.backward_per_sample_s, compute.fixed_s + compute.backward_fixed_s
