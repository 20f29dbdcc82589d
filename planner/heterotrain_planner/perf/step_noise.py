"""Models the variation of a member's steps: noise that goes on from step to step, skew, and rare long steps.

A scrape shows the mean and the variance of its steps. Noise that goes on moves whole scrapes, so it shows between their
means and hardly within them: a step's variance is the mean of ``(steps - 1) / steps * variance + (mean - usual)²``,
however long the scrapes and however the noise goes on.

Rare long steps and skew make scrapes with a large mean also spread widely. Let ``x`` be the mean of a scrape of k
steps over the usual one, less 1, and ``y`` the term above. For independent steps

    k cov(x, y) = third cumulant of a step          k var(y) - 2 var(step)² = fourth cumulant of a step

With the part p of steps longer by h these are ``pq (1 - 2p) h³`` and ``pq (1 - 6pq) h⁴`` (q = 1 - p), which gives p and
h. Normal noise has neither cumulant, also where it goes on from step to step: a normal mean and a normal spread are
uncorrelated. The cumulants of all members are averaged, since a member alone has few long steps.

Some long steps are longer by a part of the step (a slow clock, a shared core), others by a pause of fixed length (a
garbage collection, a file). Shares of one size cannot tell them apart. Where own times differ, ``h``, which is nearly
``fourth / third`` however rare long steps are, falls with the own time for pauses and stays for parts of a step.

Legend: ``O`` observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.contract.plan import ComputeTime

from heterotrain_planner.perf.line import TINY_S, Floats
from heterotrain_planner.perf.model import MemberModel
from heterotrain_planner.perf.regression_data import RegressionData

LEAST_OBSERVATIONS = 8
"""Observations from which a spread between them counts; with fewer, the usual spread within them does."""
_LARGEST_RATIO = 10.0
"""Cap on a mean or a deviation, relative to the usual mean: a longer pause is not noise."""
_SURE_DEVIATIONS = 3.0
"""Hiccups count where the third cumulant of normal noise would be so large in 1 of 1,000 cases."""
_NEAR_RATIO = 1.25
"""Sizes within this ratio of the current one show how far the line is from the mean."""
_MOST_EXCESS = 0.5
"""Cap on what long steps add to the mean, relative to it."""
_MOST_UNUSUAL = 1.5
"""Cap on a variance, relative to the one by medians: that of log-normal noise of 30 % is 1.25 times as large."""
_TELLING_RATIO = 1.2
"""Ratio of own times from which long steps of fixed length differ from those that scale."""
_MEDIAN_OF_SQUARE = 0.455
"""Median of a squared standard normal variable."""
_CLEAR_EXCESS = 0.5
"""Excess of the variance of scrapes' means, relative to that of independent steps, from which long steps have runs."""
_RATE_TABLE = np.linspace(1e-5, 0.2, 2000)
_MIXED = _RATE_TABLE * (1 - _RATE_TABLE)
_CUMULANT_TABLE = _MIXED * (1 - 2 * _RATE_TABLE) ** 4 / (1 - 6 * _MIXED) ** 3
"""``third⁴ / fourth³`` by the rate; it rises over the table, and does not depend on the ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """The noise of a job's members.

    Attributes:
        variations: standard deviation of a step relative to its mean, without hiccups, by member.
        within_parts: how much of the variance within an observation is in that of a step: less than 1 because the
            rest is between observations; 1 where these were too few.
        hiccups: of every member.
        excess_ratio: how much longer the mean step is than the fitted line, which leaves out long steps, where these
            are longer by a part of the step; otherwise 0.
        excess_s: the same in seconds where they are longer by a pause; otherwise 0.
        hiccup_variances: what hiccups add to the variance of each member's observed steps, relative to the mean.
    """

    variations: tuple[float, ...]
    within_parts: tuple[float, ...]
    hiccups: Hiccups
    excess_ratio: float
    excess_s: float
    hiccup_variances: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments:
    """One member's noise, by moments; ``usual_variance`` is the one by medians, ``excess`` the mean over the line.

    ``third_O`` and ``fourth_O`` sum to the cumulants of a step, relative to its mean, and ``error2_O`` to the variance
    of the third one under normal noise; ``own_O`` are the mean own seconds of each observation's shape, and ``own_s``
    those of the last steps.
    """

    weight: float
    within_part: float
    variance: float
    usual_variance: float
    third_O: Floats
    error2_O: Floats
    fourth_O: Floats
    own_O: Floats
    own_s: float
    weight_O: Floats
    excess: float

    def variance_of(self, hiccups: Hiccups) -> float:
        """Return what long steps add to the variance of a step, relative to the square of its mean."""
        longer_O = hiccups.ratio + hiccups.pause_s / self.own_O
        return hiccups.rate * (1 - hiccups.rate) * float(self.weight_O @ longer_O**2)


def step_noise(data: Sequence[RegressionData | None], models: Sequence[MemberModel]) -> StepNoise:
    """Return the noise of steps.

    Args:
        data: by member, without the pace that all members share; ``None`` without observations.
        models: their lines, in the same order.
    """
    found = [_moments(seen, model) for seen, model in zip(data, models, strict=True)]
    known = [moments for moments in found if moments is not None]
    hiccups = _hiccups(known)
    excess = excess_s = 0.0
    if hiccups is not NO_HICCUPS:
        weight = sum(m.weight for m in known)
        if hiccups.pause_s > 0:
            # A pause adds the same seconds to every member's steps, whatever their length.
            excess_s = max(0.0, sum(m.weight * min(m.excess, _MOST_EXCESS) * m.own_s for m in known) / weight)
        else:
            excess = min(_MOST_EXCESS, max(0.0, sum(m.weight * m.excess for m in known) / weight))
    variations = []
    for moments, model in zip(found, models, strict=True):
        if moments is None:
            variations.append(model.variation)
            continue
        # The usual variance resists single broken scrapes, but is too small for skewed noise, and too large where most
        # scrapes have a hiccup.
        most = moments.usual_variance * (_MOST_UNUSUAL if hiccups is NO_HICCUPS else 1.0)
        normal = min(most, moments.variance - moments.variance_of(hiccups))
        variations.append(math.sqrt(max(normal, (0.1 * model.variation) ** 2)))
    return StepNoise(
        variations=tuple(variations),
        within_parts=tuple(1.0 if moments is None else moments.within_part for moments in found),
        hiccups=hiccups,
        excess_ratio=excess,
        excess_s=excess_s,
        hiccup_variances=tuple(0.0 if moments is None else moments.variance_of(hiccups) for moments in found),
    )


def _moments(seen: RegressionData | None, model: MemberModel) -> _Moments | None:
    """Return one member's noise; ``None`` where it has too few observations."""
    if seen is None or model.compute is None:
        return None
    chosen_O = np.isfinite(seen.spread_O) & (seen.steps_O > 1)
    size_O, steps_O = seen.size_O[chosen_O], seen.steps_O[chosen_O]
    # A change of speed may be one of some sizes only, or a bend that was taken for one: then its ratio is not noise.
    sizes, place_O = np.unique(size_O + 1j * seen.era_O[chosen_O], return_inverse=True)
    count = int(chosen_O.sum())
    if count - len(sizes) < LEAST_OBSERVATIONS:
        return None
    line_O = _usual_s(model, model.compute, size_O)
    mean_O = np.clip(seen.seconds_O[chosen_O] * seen.phase_O[chosen_O] / line_O, 1 / _LARGEST_RATIO, 1 + _LARGEST_RATIO)
    weight_O = steps_O * seen.weight_O[chosen_O] / np.maximum(seen.precision_O[chosen_O], TINY_S)
    weight_O /= float(weight_O.sum())
    # Compared with the mean at the same size and speed, because times are not quite a line.
    of_size = np.bincount(place_O, weights=weight_O * mean_O) / np.bincount(place_O, weights=weight_O)
    x_O = mean_O / of_size[place_O] - 1
    free = count / (count - len(sizes))
    part_O = (steps_O - 1) / steps_O
    within_O = part_O * np.minimum(seen.spread_O[chosen_O] * (1 + x_O) ** 2, _LARGEST_RATIO**2)
    y_O = within_O + free * x_O**2
    variance = float(weight_O @ y_O)
    between = _median(x_O**2, weight_O) / _MEDIAN_OF_SQUARE * free
    within_part = float(weight_O @ part_O)
    usual = model.variation**2 * within_part + between
    # A pause is a larger part of a shorter step, so y differs between sizes without being noise.
    off_O = y_O - (np.bincount(place_O, weights=weight_O * y_O) / np.bincount(place_O, weights=weight_O))[place_O]
    alike, rest = _phases(x_O, steps_O, within_O, weight_O, free=free, variance=variance)
    third_O = weight_O * (steps_O * x_O * off_O) * free / alike
    fourth_O = weight_O * ((steps_O * off_O**2 * free - 2 * usual**2) / alike - 2 * rest**2 * (1 - 1 / alike))
    own_O = seen.micro_O[chosen_O] * line_O * of_size[place_O]
    now = float(_usual_s(model, model.compute, np.array(seen.size_now))) * seen.share_now / seen.size_now
    # Noise that goes on moves means and spreads by more than independent steps do.
    lasting = max(1.0, float(weight_O @ steps_O) * between / usual) if usual > 0 else 1.0
    error2_O = 2 * weight_O**2 * usual**3 * (lasting / alike) ** 2
    near_O = np.abs(np.log(size_O / seen.size_now)) <= math.log(_NEAR_RATIO)
    excess = float(weight_O[near_O] @ mean_O[near_O]) / float(weight_O[near_O].sum()) - 1 if near_O.any() else 0.0
    return _Moments(
        weight=float(seen.steps_O.sum()),
        within_part=within_part,
        variance=variance,
        usual_variance=usual,
        third_O=third_O,
        error2_O=error2_O,
        fourth_O=fourth_O,
        own_O=own_O,
        own_s=max(now, TINY_S),
        weight_O=weight_O,
        excess=excess,
    )


def _phases(
    x_O: Floats, steps_O: Floats, within_O: Floats, weight_O: Floats, *, free: float, variance: float
) -> tuple[float, float]:
    """Return how many steps are long together in the mean, within a scrape, and the variance of those.

    With such runs, the mean of a scrape varies as if it had so many times fewer steps. The ordinary noise is that
    within most scrapes. Runs count where means show them clearly: otherwise long steps are taken to be single.
    """
    runs = free * float(weight_O @ (steps_O * x_O**2)) / variance if variance > 0 else 0.0
    rest = variance - min(variance, _median(within_O * steps_O / (steps_O - 1), weight_O))
    if rest <= 0 or runs < 1 + max(_CLEAR_EXCESS, _SURE_DEVIATIONS * math.sqrt(2 / len(x_O))):
        return 1.0, 0.0
    return min(float(weight_O @ steps_O), 1 + (runs - 1) * variance / rest), rest


def _usual_s(model: MemberModel, line: ComputeTime, size_O: Floats) -> Floats:
    """Return the model's seconds of a micro-batch: by the curve where there is one, otherwise by the line."""
    rate, fixed = line.per_sample_s + line.backward_per_sample_s, line.fixed_s + line.backward_fixed_s
    seconds_O = rate * size_O + fixed
    if model.curve is not None:
        sizes, seconds = zip(*model.curve.points, strict=True)
        seconds_O = np.where(size_O <= sizes[-1], np.interp(size_O, sizes, seconds), seconds_O)
    return np.maximum(seconds_O, TINY_S)


def _hiccups(members: Sequence[_Moments]) -> Hiccups:
    """Return rate and length of the long steps of all members together."""
    total = sum(m.weight for m in members)
    if not members or total <= 0:
        return NO_HICCUPS
    third_O = np.concatenate([m.weight / total * m.third_O for m in members])
    fourth_O = np.concatenate([m.weight / total * m.fourth_O for m in members])
    own_O = np.concatenate([m.own_O for m in members])
    error2_O = np.concatenate([(m.weight / total) ** 2 * m.error2_O for m in members])
    if fourth_O.sum() <= 0 or third_O.sum() <= _SURE_DEVIATIONS * math.sqrt(error2_O.sum()):
        return NO_HICCUPS
    if _pauses(third_O, fourth_O, error2_O, own_O):
        rate, pause_s = _mixture(float((third_O * own_O**3).sum()), float((fourth_O * own_O**4).sum()))
        return Hiccups(rate=rate, pause_s=min(pause_s, _LARGEST_RATIO * float(own_O.max())))
    rate, ratio = _mixture(float(third_O.sum()), float(fourth_O.sum()))
    return Hiccups(rate=rate, ratio=min(ratio, _LARGEST_RATIO))


def _mixture(third: float, fourth: float) -> tuple[float, float]:
    """Return part and length of long steps with these cumulants, the length in the cumulants' unit."""
    rate = float(np.interp(third**4 / fourth**3, _CUMULANT_TABLE, _RATE_TABLE))
    mixed = rate * (1 - rate)
    return rate, fourth / third * (1 - 2 * rate) / (1 - 6 * mixed)


def _pauses(third_O: Floats, fourth_O: Floats, error2_O: Floats, own_O: Floats) -> bool:
    """Return whether long steps are longer by as many seconds where own times are short as where they are long.

    Their relative lengths in the shorter and in the longer half of own times are compared. Where these halves differ by
    less than ``_TELLING_RATIO``, or one of them shows no long step, the answer is no.
    """
    middle = math.sqrt(float(own_O.min()) * float(own_O.max()))
    short_O = own_O < middle
    halves = []
    for half_O in (short_O, ~short_O):
        third, fourth = float(third_O[half_O].sum()), float(fourth_O[half_O].sum())
        weight_O = np.maximum(fourth_O[half_O], 0.0)
        if fourth <= 0 or third <= _SURE_DEVIATIONS * math.sqrt(error2_O[half_O].sum()):
            return False
        halves.append((fourth / third, float(weight_O @ own_O[half_O] / weight_O.sum())))
    (short, short_s), (long, long_s) = halves
    # A length that stays in seconds falls, relative to the own time, by the ratio of own times.
    return long_s > _TELLING_RATIO * short_s and short / long > math.sqrt(long_s / short_s)


def _median(values_O: Floats, weight_O: Floats) -> float:
    order = np.argsort(values_O, kind="stable")
    passed = np.cumsum(weight_O[order])
    return float(values_O[order][np.searchsorted(passed, passed[-1] / 2)])
