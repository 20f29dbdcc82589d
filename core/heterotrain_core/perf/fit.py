"""A member's time model from its observations.

Seconds of a phase that is paid per micro-batch, divided by the number of micro-batches, are a line in the micro-batch's
size, ``y = q x + s``, so steps with and without accumulation are one regression. It is weighted by relative error
(variance of the mean from telemetry, plus what a line cannot say), keeps ``q`` and ``s`` non-negative, gives outliers
no weight (Tukey's bisquare), forgets, and leans on a stated assumption about the fixed part exactly as far as the
data are silent. Legend: ``O`` observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.perf.drift import Point, changes
from heterotrain_core.perf.model import MemberModel, Verdict
from heterotrain_core.perf.samples import SHORTEST_STEP_S, Moments, Observation, usable

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

TRUSTED_ERROR = 0.05
"""A model is ok when it predicts half and twice the typical share this well."""
LEAST_STEPS = 8
NEWEST_STEPS = 20
"""What so many last steps show is how fast the member is now."""
_SAME_SIZE_RATIO = 1.25
_SAME_TIME = 0.15
_NEW_GROUND = 1.5
WARM_UP_STEPS = 3
"""The first steps of a process choose kernels, build buckets and fill caches."""
_HALF_LIFE_STEPS = 600
_OLDEST_WEIGHT = 0.02
"""Old observations at other shares still tell the slope, so they are never forgotten altogether."""
_NOTHING_S = 1e-15
_MODEL_ERROR = 0.005
_USUAL_VARIATION = 0.1
_WARM_UP_VARIATION = 0.5
_LARGEST_VARIATION = 10.0
_BACKWARD_PART = 2 / 3
"""Where only the sum of phases is known: a backward pass costs about two forward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPart:
    """An assumption about the fixed part of a member's time, relative to its time at the typical share."""

    ratio: float = 0.1
    deviation: float = 0.3


ASSUMED = FixedPart()


@dataclass(frozen=True, slots=True)
class _Line:
    slope: float
    fixed: float
    uncertainty_ratio: float


def fit_member(observations: Sequence[Observation], *, assumed: FixedPart = ASSUMED) -> MemberModel:
    """Return the member's model from its observations, oldest first; what cannot be computed with is left out.

    With one share only, the fixed part is the ``assumed`` one and the verdict is thin. Never raises on telemetry.
    """
    seen = [o for o in sorted(filter(usable, observations), key=lambda o: o.ended_s) if _own(o) is not None]
    seen = _warm([o for o in seen if o.share_samples > 0])
    if not seen:
        return MemberModel(
            compute=None, verdict=Verdict.DEGENERATE, reason="there is no usable observation of its compute time yet"
        )
    usual = _usual_variation(seen)
    steps_O = np.array([o.steps for o in seen], dtype=float)
    micro_O = np.array([o.micro_batches for o in seen], dtype=float)
    x_O = np.array([o.share_samples for o in seen]) / micro_O
    moved = changes([_point(o, usual) for o in seen])
    pace_O = np.ones(len(seen))
    for change in moved:
        pace_O[: change.first] *= change.ratio
    after_O = np.cumsum(steps_O[::-1])[::-1] - steps_O
    trust_O = np.maximum(0.5 ** (after_O / _HALF_LIFE_STEPS), _OLDEST_WEIGHT)

    later_O = np.array([o.ended_s > seen[0].ended_s for o in seen])
    newest_O = later_O & (after_O < NEWEST_STEPS) & (steps_O >= LEAST_STEPS)

    def line(phases: Sequence[Moments | None]) -> _Line:
        means_O = np.array([p.mean if p else math.nan for p in phases])
        error_O = np.array([_error(o, p, usual) for o, p in zip(seen, phases, strict=True)])
        have_O = np.isfinite(means_O)
        return _fitted(
            x_O[have_O],
            (means_O * pace_O / micro_O)[have_O],
            weight_O=(trust_O / error_O**2)[have_O],
            steps_O=steps_O[have_O],
            newest_O=newest_O[have_O],
            assumed=assumed,
        )

    own = line([_own(o) for o in seen])
    split = [o for o in seen if o.backward is not None and (o.forward is not None or o.load is not None)]
    if len(split) == len(seen):
        before = line([_sum(o.load, o.forward) for o in seen])
        backward = line([o.backward for o in seen])
        # The sum of phases is known best; the phases only say how its slope and its fixed part divide.
        by_mean = _part(_at_mean(before, x_O), _at_mean(backward, x_O), 1 - _BACKWARD_PART)
        of_slope = _part(before.slope, backward.slope, by_mean)
        of_fixed = _part(before.fixed, backward.fixed, by_mean)
    else:
        of_slope = of_fixed = 1 - _BACKWARD_PART
    updates = [(o.update.mean, o.steps) for o in seen if o.update is not None]
    compute = ComputeTime(
        per_sample_s=own.slope * of_slope,
        fixed_s=own.fixed * of_fixed,
        backward_per_sample_s=own.slope * (1 - of_slope),
        backward_fixed_s=own.fixed * (1 - of_fixed),
        update_s=_weighted_median(updates) if updates else 0.0,
    )
    since = moved[-1].first if moved else 0
    shapes = len(set(x_O.tolist()))
    steps = int(steps_O.sum())
    verdict, reason = _verdict(own, compute, shapes=shapes, steps=steps)
    return MemberModel(
        compute=compute if verdict is not Verdict.DEGENERATE else None,
        variation=usual,
        uncertainty_ratio=own.uncertainty_ratio,
        largest_share_samples=max(o.share_samples for o in seen),
        steps=steps,
        shapes=shapes,
        drifted=bool(moved) and len(set(x_O[since:].tolist())) < 2,  # noqa: PLR2004  # a line needs two points
        drift_ratio=moved[-1].ratio if moved else 1.0,
        verdict=verdict,
        reason=reason,
    )


def _warm(seen: list[Observation]) -> list[Observation]:
    """Return the observations without those that hold little but a process's first steps, if any others are left.

    In an observation of more steps the slow first ones show as a large variance, which takes its weight away.
    """
    warm = [o for o in seen if not (o.warm_up and o.steps <= WARM_UP_STEPS)]
    return warm or seen


def _verdict(own: _Line, compute: ComputeTime, *, shapes: int, steps: int) -> tuple[Verdict, str]:
    rate = compute.per_sample_s + compute.backward_per_sample_s
    fixed = compute.fixed_s + compute.backward_fixed_s
    if not (rate > 0 or fixed > 0 or compute.update_s > 0):
        return Verdict.DEGENERATE, f"its compute time was zero in all of {steps} steps"
    if steps < LEAST_STEPS:
        return Verdict.THIN, f"only {steps} steps were seen"
    if shapes == 1:
        return Verdict.THIN, f"only one share was seen in {steps} steps, so its fixed part is assumed"
    if own.uncertainty_ratio > TRUSTED_ERROR:
        return Verdict.THIN, (
            f"{shapes} shares in {steps} steps predict other shares only to {min(own.uncertainty_ratio, 9.99):.0%}"
        )
    return Verdict.OK, f"{shapes} shares in {steps} steps predict other shares to {own.uncertainty_ratio:.1%}"


def _fitted(
    x_O: Floats, y_O: Floats, *, weight_O: Floats, steps_O: Floats, newest_O: Flags, assumed: FixedPart
) -> _Line:
    """Return the robust non-negative weighted line; ``weight_O`` are relative weights (of y / its mean).

    What the newest steps show far beyond all other sizes is no outlier if it can be true, however far it is from the line of
    all others: then the time is no line, as where small shares leave a GPU half idle, and shares are decided here.
    """
    positive = y_O > _NOTHING_S
    if not positive.any():
        return _Line(0.0, 0.0, 0.0)
    x_O, y_O, weight_O = x_O[positive], y_O[positive], weight_O[positive]
    steps_O, newest_O = steps_O[positive], newest_O[positive]
    w_O = weight_O / y_O**2
    slope, fixed = _least_squares(x_O, y_O, w_O, assumed)
    if len(y_O) > 3:  # noqa: PLR2004  # three points do not tell which of them is the outlier
        slope, fixed = _middle_line(x_O, y_O)
        robust_O = np.zeros_like(y_O)
        firm_O = _new_ground(x_O, y_O, newest_O) | _alone_in_its_range(x_O, y_O, steps_O)
        for _ in range(8):
            expected_O = np.maximum(slope * x_O + fixed, _NOTHING_S)
            miss_O = np.abs(y_O / expected_O - 1) * np.sqrt(weight_O)
            scale = max(1.0, 1.4826 * float(np.median(miss_O)))
            following_O = np.maximum(1 - (miss_O / (4.685 * scale)) ** 2, 0.0) ** 2
            following_O = np.where(firm_O, 1.0, following_O)
            if np.allclose(following_O, robust_O, atol=1e-3):
                break
            robust_O = following_O
            w_O = weight_O * robust_O / expected_O**2
            slope, fixed = _least_squares(x_O, y_O, w_O, assumed)
    return _Line(slope, fixed, _uncertainty(x_O, y_O, w_O, slope=slope, fixed=fixed))


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
    typical = float((w_O * y_O).sum() / w_O.sum())
    prior = 1.0 / (assumed.deviation * typical) ** 2
    sw, sy = float(w_O.sum()) + prior, float((w_O * y_O).sum()) + prior * assumed.ratio * typical
    sx, sxx, sxy = (float(v) for v in ((w_O * x_O).sum(), (w_O * x_O * x_O).sum(), (w_O * x_O * y_O).sum()))
    determinant = sw * sxx - sx * sx
    if determinant > 0:
        slope, fixed = (sw * sxy - sx * sy) / determinant, (sxx * sy - sx * sxy) / determinant
        if slope >= 0 and fixed >= 0:
            return slope, fixed
        if slope >= 0:
            return sxy / sxx, 0.0
    return 0.0, sy / sw


def _uncertainty(x_O: Floats, y_O: Floats, w_O: Floats, *, slope: float, fixed: float) -> float:
    """Return the relative standard error at half and twice the mean size, the worse one, from the data alone."""
    whole = float(w_O.sum())
    if whole <= 0:
        return math.inf
    centre = float((w_O * x_O).sum() / whole)
    spread = float((w_O * (x_O - centre) ** 2).sum())
    if spread <= 1e-9 * whole * centre**2:
        return math.inf
    degrees = max(1, len(x_O) - 2)
    excess = max(1.0, float((w_O * (y_O - slope * x_O - fixed) ** 2).sum()) / degrees)
    worst = 0.0
    for x in (centre / 2, centre * 2):
        expected = slope * x + fixed
        if expected <= 0:
            return math.inf
        worst = max(worst, math.sqrt(excess * (1 / whole + (x - centre) ** 2 / spread)) / expected)
    return worst


def _part(one: float, other: float, otherwise: float) -> float:
    return one / (one + other) if one + other > 0 else otherwise


def _at_mean(line: _Line, x_O: Floats) -> float:
    return line.slope * float(x_O.mean()) + line.fixed


def _own(observation: Observation) -> Moments | None:
    """Return the seconds that are paid per micro-batch: compute without the update."""
    if observation.compute is not None:
        update = observation.update.mean if observation.update is not None else 0.0
        mean = observation.compute.mean - update
        return Moments(mean=mean, variance=observation.compute.variance) if mean >= SHORTEST_STEP_S else None
    if observation.backward is None or observation.forward is None:
        return None
    whole = _sum(_sum(observation.load, observation.forward), observation.backward)
    return whole if whole is not None and whole.mean >= SHORTEST_STEP_S else None


def _sum(one: Moments | None, other: Moments | None) -> Moments | None:
    if one is None or other is None:
        return one or other
    known = one.variance is not None and other.variance is not None
    return Moments(
        mean=one.mean + other.mean, variance=(one.variance or 0.0) + (other.variance or 0.0) if known else None
    )


def _relative_deviation(moments: Moments) -> float | None:
    if moments.variance is None or moments.mean <= 0:
        return None
    return min(math.sqrt(moments.variance) / max(moments.mean, SHORTEST_STEP_S), _LARGEST_VARIATION)


def _usual_variation(seen: Sequence[Observation]) -> float:
    """Return the member's usual variation: the weighted median, which a hiccup in one scrape does not move."""
    calm = [o for o in seen if not o.warm_up] or list(seen)
    known = [(_relative_deviation(own), o.steps) for o in calm if (own := _own(o)) is not None]
    found = [(deviation, steps) for deviation, steps in known if deviation is not None]
    return _weighted_median(found) if found else _USUAL_VARIATION


def _error(observation: Observation, moments: Moments | None, usual: float) -> float:
    """Return the relative standard error of an observation's mean."""
    own = _relative_deviation(moments) if moments is not None else None
    if own is None:
        own = _WARM_UP_VARIATION if observation.warm_up else usual
    # Few steps estimate their own deviation badly: do not believe in less than half the usual one.
    return math.sqrt(max(own, usual / 2) ** 2 / observation.steps + _MODEL_ERROR**2)


def _point(observation: Observation, usual: float) -> Point:
    own = _own(observation)
    assert own is not None  # noqa: S101  # only observations with it come here
    deviation = _relative_deviation(own)
    if deviation is None:
        deviation = _WARM_UP_VARIATION if observation.warm_up else usual
    return Point(
        size=observation.share_samples / observation.micro_batches,
        seconds=own.mean / observation.micro_batches,
        variation=max(deviation, usual / 2),
        steps=observation.steps,
        scraped_s=observation.ended_s,
    )


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the value below and above which half of the weight lies."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    return ordered[-1][0]
