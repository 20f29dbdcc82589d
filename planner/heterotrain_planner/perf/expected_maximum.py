"""The mean of a maximum: why a step of noisy members is longer than the longest of their means.

Legend: ``W`` members, ``X`` points of integration, ``B`` batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_REACH = 6.0
"""Standard deviations that a normal variable is taken not to exceed: only one in 1e9 does."""
_LEAST_DEVIATION = 1e-9
"""Least deviation, relative to the largest mean: the grid would miss the step of a variable without spread."""
_POINTS = 1025
"""Points of the integration grid for a mean alone."""
_POINTS_PER_DEVIATION = 2
"""Points of the grid for derivatives per least deviation, within the next two limits; the integrands are smooth."""
_FEWEST_POINTS = 129
_MOST_POINTS = 2049
_LEAST_PROBABILITY = 1e-30
"""Least factor of the product of probabilities: its logarithm and its inverse stay finite."""
_MOST_MEAN_POINTS = 16_385
"""Most points for a mean alone, where rare long steps make the range wide."""
_VARIATION_ERROR = 1e-4
_TABLE_Z = np.linspace(-_REACH - 1, _REACH + 1, 2801)
_TABLE_P = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in _TABLE_Z.tolist()])
_TABLE_P[0], _TABLE_P[-1] = 0.0, 1.0
_RISE_P = np.append(np.diff(_TABLE_P), 0.0)
"""Rise of the distribution from one point of the table to the next."""


def expected_maximum(
    means: Sequence[float],
    deviations: Sequence[float],
    *,
    hiccups: Hiccups = NO_HICCUPS,
    own_s: Sequence[float] | None = None,
) -> float:
    """Return the mean of the maximum of independent variables, to about 1e-3 of the largest deviation.

    Each is normal or, with ``hiccups``, a mixture of two normal distributions with the same deviation and mean.

    ``E max = h - integral of P(max <= x) dx`` up to an ``h`` above all variables, by the trapezoid rule. Exact for any
    number of variables with different means and deviations, where Clark's (1961) pairwise formula is an approximation.

    Assumes independence. Members slowed by a common cause have a smaller maximum than this.

    Args:
        means: seconds, at least one, positive.
        deviations: standard deviations in seconds, one for each mean, without hiccups.
        hiccups: of every variable.
        own_s: seconds that a hiccup's ratio refers to; ``None`` for the means.
    """
    mean_W = np.array(means, dtype=float)
    deviation_W = np.maximum(np.array(deviations, dtype=float), _LEAST_DEVIATION * float(mean_W.max()))
    longer_W = hiccups.ratio * (mean_W if own_s is None else np.array(own_s, dtype=float)) + hiccups.pause_s
    parts = _parts(hiccups)
    high = max(float((mean_W + moved * longer_W + _REACH * deviation_W).max()) for _, moved in parts)
    low = min(float((mean_W + moved * longer_W - _REACH * deviation_W).max()) for _, moved in parts)
    if high - low <= 1e-7 * abs(high):
        return float(mean_W.max())
    points = _POINTS if len(parts) == 1 else int(np.clip((high - low) / deviation_W.min(), _POINTS, _MOST_MEAN_POINTS))
    x_X = np.linspace(low, high, points)
    below_X: Floats = np.ones(points)
    alike = Counter(zip(mean_W.tolist(), deviation_W.tolist(), longer_W.tolist(), strict=True))
    for (mean, deviation, longer), times in alike.items():
        one_X = sum(weight * _below((x_X - mean - moved * longer) / deviation) for weight, moved in parts)
        below_X = below_X * one_X**times
    return high - float(np.trapezoid(below_X, x_X))


def _parts(hiccups: Hiccups) -> tuple[tuple[float, float], ...]:
    """Return probability and displacement of each part of the mixture, in units of a hiccup; the mean stays."""
    if hiccups.rate <= 0 or hiccups.ratio + hiccups.pause_s <= 0:
        return ((1.0, 0.0),)
    return ((1 - hiccups.rate, -hiccups.rate), (hiccups.rate, 1 - hiccups.rate))


def expected_maximum_of_hiccups(mean_BW: Floats, own_BW: Floats, hiccups: Hiccups) -> Floats:
    """Return the mean of the maximum of members that vary by their hiccups alone, for each row of means.

    Such a member has one of two times, so the mean is a sum: beyond the largest of the short times, each long time adds
    its distance to the one before, times the chance that some member has a time as long. It costs microseconds where
    the quadrature takes milliseconds. Other noise makes the mean longer (Jensen), so this is a lower bound of
    ``expected_maximum``.

    Args:
        mean_BW: seconds.
        own_BW: seconds that a hiccup's ratio refers to.
        hiccups: of every variable.
    """
    longer_BW = hiccups.ratio * own_BW + hiccups.pause_s
    short_B1 = (mean_BW - hiccups.rate * longer_BW).max(axis=1, keepdims=True)
    long_BW = np.sort(np.maximum(mean_BW + (1 - hiccups.rate) * longer_BW, short_B1), axis=1)
    some_W = 1 - (1 - hiccups.rate) ** np.arange(mean_BW.shape[1], 0, -1)
    found: Floats = short_B1[:, 0] + np.diff(long_BW, axis=1, prepend=short_B1) @ some_W
    return found


def _below(z: Floats) -> Floats:
    """Return the standard normal distribution, from a table with equal steps: three times as fast as ``np.interp``."""
    last = len(_TABLE_Z) - 1
    place: Floats = (z - _TABLE_Z[0]) * (last / (_TABLE_Z[-1] - _TABLE_Z[0]))
    np.clip(place, 0.0, last, out=place)
    whole = place.astype(np.int32)
    place -= whole
    place *= _RISE_P.take(whole)
    place += _TABLE_P.take(whole)
    return place


@dataclass(frozen=True, slots=True)
class Derivatives:
    """The mean of a maximum whose means and deviations are straight lines in one variable ``b_i`` per member.

    Attributes:
        value: the mean of the maximum, in seconds.
        gradient_W: its derivative by each variable: the slope of a member's time, averaged over the cases in which this
            member is the last.
        diagonal_W, factor_WX: the second derivatives are ``diag(diagonal_W) - factor_WX @ factor_WX.T``.
    """

    value: float
    gradient_W: Floats
    diagonal_W: Floats
    factor_WX: Floats


def derivatives(
    mean_W: Floats,
    deviation_W: Floats,
    mean_slope_W: Floats,
    deviation_slope_W: Floats,
    *,
    hiccups: Hiccups = NO_HICCUPS,
    own_W: Floats | None = None,
    own_slope_W: Floats | None = None,
) -> Derivatives:
    """Return the mean of the maximum with its first and second derivatives.

    With ``F_i(x)`` the distribution of member i and ``P`` their product, ``E max = h - integral of P``, hence
    ``dE/db_i = - integral of F_i' P / F_i`` and ``d2E/db_i db_j = - integral of F_i' F_j' P / (F_i F_j)`` for two
    members, where ``'`` is the derivative by the member's own variable.

    Args:
        mean_W: seconds.
        deviation_W: seconds, all positive.
        mean_slope_W: seconds per unit of the member's variable.
        deviation_slope_W: the same of the deviation.
        hiccups: of every member.
        own_W: seconds that a hiccup's ratio refers to; ``None`` for the means.
        own_slope_W: their slope; ``None`` for that of the means.
    """
    longer_W = hiccups.ratio * (mean_W if own_W is None else own_W) + hiccups.pause_s
    longer_slope_W = hiccups.ratio * (mean_slope_W if own_slope_W is None else own_slope_W)
    parts = _parts(hiccups)
    x_X, weight_X = _grid(mean_W, deviation_W, longer_W, parts)
    below_WX, slope_WX, bend_WX = (np.zeros((len(mean_W), len(x_X))) for _ in range(3))
    for weight, moved in parts:
        z_WX = (x_X - (mean_W + moved * longer_W)[:, None]) / deviation_W[:, None]
        density_WX = weight * np.exp(-0.5 * z_WX * z_WX) / math.sqrt(2 * math.pi)
        # How z moves with the variable, once and twice.
        mean_slope = (mean_slope_W + moved * longer_slope_W)[:, None]
        first_WX = -(mean_slope + z_WX * deviation_slope_W[:, None]) / deviation_W[:, None]
        second_WX = -2 * first_WX * (deviation_slope_W / deviation_W)[:, None]
        below_WX += weight * _below(z_WX)
        slope_WX += density_WX * first_WX
        bend_WX += density_WX * (second_WX - z_WX * first_WX * first_WX)
    below_WX = np.maximum(below_WX, _LEAST_PROBABILITY)
    logs_WX = np.log(below_WX)
    all_X = logs_WX.sum(axis=0)
    others_WX = np.exp(all_X - logs_WX) * weight_X
    factor_WX = slope_WX * np.sqrt(others_WX / below_WX)
    return Derivatives(
        value=float(x_X[-1]) - float(np.exp(all_X) @ weight_X),
        gradient_W=-(slope_WX * others_WX).sum(axis=1),
        diagonal_W=-(bend_WX * others_WX).sum(axis=1) + (factor_WX * factor_WX).sum(axis=1),
        factor_WX=factor_WX,
    )


def value_alone(mean_W: Floats, deviation_W: Floats, own_W: Floats, hiccups: Hiccups) -> float:
    """Return the value that ``derivatives`` has, on the same grid, at a fifth of the cost for 64 members.

    Args:
        mean_W: seconds.
        deviation_W: seconds, all positive.
        own_W: seconds that a hiccup's ratio refers to.
        hiccups: of every member.
    """
    longer_W = hiccups.ratio * own_W + hiccups.pause_s
    parts = _parts(hiccups)
    x_X, weight_X = _grid(mean_W, deviation_W, longer_W, parts)
    below_WX = np.zeros((len(mean_W), len(x_X)))
    for weight, moved in parts:
        below_WX += weight * _below((x_X - (mean_W + moved * longer_W)[:, None]) / deviation_W[:, None])
    return float(x_X[-1]) - float(below_WX.prod(axis=0) @ weight_X)


def _grid(
    mean_W: Floats, deviation_W: Floats, longer_W: Floats, parts: Sequence[tuple[float, float]]
) -> tuple[Floats, Floats]:
    """Return points from below all likely maxima to above all members, and their weights by the trapezoid rule."""
    high = max(float((mean_W + moved * longer_W + _REACH * deviation_W).max()) for _, moved in parts)
    low = min(float((mean_W + moved * longer_W - _REACH * deviation_W).max()) for _, moved in parts)
    points = int(np.clip(_POINTS_PER_DEVIATION * (high - low) / deviation_W.min(), _FEWEST_POINTS, _MOST_POINTS))
    x_X, width = np.linspace(low, high, points, retstep=True)
    weight_X: Floats = np.full(points, float(width))
    weight_X[[0, -1]] /= 2
    return x_X, weight_X


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


def balanced_ceiling(variations: Sequence[float], hiccups: Hiccups = NO_HICCUPS) -> float:
    """Return the expected efficiency of perfectly balanced members without an exchange, in (0, 1].

    Three members with a variation of 0.05, 0.08 or 0.13 reach 0.96, 0.94 or 0.90 of the sum of their rates. Where
    variations differ, other shares reach more: see ``split.expected.efficiency_ceiling``.

    Args:
        variations: standard deviation of each member's compute seconds relative to their mean, at least one, without
            hiccups.
        hiccups: of every member, in units of its mean own time (see ``Hiccups.relative_to``).
    """
    return 1.0 / max(1.0, expected_maximum([1.0] * len(variations), variations, hiccups=hiccups))


def common_variation(ceiling: float, members: int, hiccups: Hiccups = NO_HICCUPS) -> float:
    """Return the variation with which so many equal members have this balanced ceiling; 0 for a single member.

    Without hiccups, the expected maximum is linear in the common variation. With them, it is found by bisection to
    1e-4; 0 where the hiccups alone explain the ceiling.

    Args:
        ceiling: expected efficiency in (0, 1].
        members: at least one.
        hiccups: of every member, in units of its mean own time.
    """
    per_unit = expected_maximum([1.0] * members, [1.0] * members) - 1.0 if members > 1 else 0.0
    if ceiling <= 0 or per_unit <= 0:
        return 0.0
    most = max(0.0, (1.0 / ceiling - 1.0) / per_unit)
    if hiccups.rate <= 0:
        return most
    low = 0.0
    while most - low > _VARIATION_ERROR:
        middle = (low + most) / 2
        below = balanced_ceiling([middle] * members, hiccups) < ceiling
        low, most = (low, middle) if below else (middle, most)
    return low
