"""A member's usable observations as arrays: the input of the regression, before any assumption on the fixed part.

Seconds of phases that every micro-batch repeats are divided by the number of micro-batches. Old observations count
less, and are scaled to the newest speed. Legend: ``O`` observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterotrain_planner.perf.counters import SHORTEST_STEP_S, MeanVariance, Observation, usable
from heterotrain_planner.perf.drift import PaceChange, Point, SpeedPhase, changes, without_phases
from heterotrain_planner.perf.line import ASSUMED, LEAST_STEPS, FittedLine, Flags, Floats, fit_line

NEWEST_STEPS = 20
"""Last steps that show the current speed."""
WARM_UP_STEPS = 3
"""First steps of a process, left out: they choose kernels, build buckets and fill caches."""
_HALF_LIFE_STEPS = 600
"""Steps after which an observation counts half. Fewer follow small changes faster; more average out more noise."""
_OLDEST_WEIGHT = 0.02
"""Least weight of old observations: those at other shares still show the slope, so they are never forgotten."""
_MODEL_ERROR = 0.005
"""Relative error of a time that a line cannot express, however many steps were averaged."""
_DEFAULT_VARIATION = 0.1
"""Relative standard deviation of a step while no variance was observed."""
_USUAL_STEPS = 8
"""Weight of the usual variation, in steps, next to an observation's own variance."""
_WARM_UP_VARIATION = 0.5
"""Relative standard deviation assumed for a process's first observation where it has no variance."""
_LARGEST_VARIATION = 10.0
"""Cap on relative standard deviations: more is a broken measurement."""
_RELEARNED_STEPS = 60
"""Steps at a new speed after which it counts as known even if only one size was observed."""
_NOW_STEPS = 40
"""Last steps whose most frequent share counts as the current one."""
_BACKWARD_PART = 2 / 3
"""Part of the time that is backward, where only the sum of phases is known: backward costs about two forward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSlowdown:
    """How many times as long as usual all members took at each time: interpolated between times, 1 outside of them."""

    at_s: Floats
    log_ratio: Floats

    def at(self, moment_s: float) -> float:
        """Return the ratio at a time."""
        return math.exp(float(np.interp(moment_s, self.at_s, self.log_ratio))) if len(self.at_s) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionData:
    """A member's usable observations, ready for a fit; arrays are ``_O``.

    Attributes:
        size_O: samples of a micro-batch.
        seconds_O: mean seconds of a micro-batch, scaled to the newest speed.
        precision_O: inverse squares of their relative errors.
        weight_O: the same times a weight that falls with age.
        steps_O: steps.
        micro_O: micro-batches of a step.
        spread_O: relative variance between the steps of an observation; NaN where it is unknown.
        era_O: lasting changes of speed before an observation.
        phase_O: factor by which it took longer than usual, in a phase that is over or soon will be; ``seconds_O`` are
            without it.
        newest_O: whether an observation shows the current speed.
        began_s_O, ended_s_O: when their steps began and when they were scraped.
        typical_samples: mean size; newer observations count more.
        of_slope, of_fixed: part of load and forward in the slope, and in the fixed part; the rest is backward.
        update_s: usual seconds of the update.
        variation: usual relative deviation of a step.
        largest_share_samples: largest share.
        share_now, size_now: the share of most of the last steps, and its micro-batch.
        drift_ratio: new over old seconds at the last change of speed, 1.0 without any.
        steps_at_speed: steps since then, all steps without any.
        drifted: whether only few steps of one size were observed since.
    """

    size_O: Floats
    seconds_O: Floats
    precision_O: Floats
    weight_O: Floats
    steps_O: Floats
    micro_O: Floats
    spread_O: Floats
    era_O: Floats
    phase_O: Floats
    newest_O: Flags
    began_s_O: Floats
    ended_s_O: Floats
    typical_samples: float
    of_slope: float
    of_fixed: float
    update_s: float
    variation: float
    largest_share_samples: int
    share_now: int
    size_now: float
    drift_ratio: float
    steps_at_speed: int
    drifted: bool


def summarize(
    observations: Sequence[Observation], *, shared: SharedSlowdown | None = None, steady: bool = False
) -> RegressionData | None:
    """Return a member's observations as arrays; ``None`` where none is usable.

    Args:
        observations: of one member, oldest first.
        shared: slowdown of all members at each time; it does not count as a change of this member's speed.
        steady: whether to skip the search for changes of speed.
    """
    seen = [o for o in sorted(filter(usable, observations), key=lambda o: o.ended_s) if _own(o) is not None]
    seen = _without_warm_up([o for o in seen if o.share_samples > 0])
    if not seen:
        return None
    usual = _usual_variation(seen)
    points = [_point(o, usual, shared) for o in seen]
    moved, phases = without_phases(() if steady else changes(points), points)
    weighed = _weighed(seen, moved, phases, usual)
    steps_O, size_O, trust_O = weighed.steps_O, weighed.size_O, weighed.trust_O
    of_slope, of_fixed = _parts_before(weighed)
    seconds_O, weight_O = weighed.points([_own(o) for o in seen])
    updates = [(o.update.mean, o.steps) for o in seen if o.update is not None]
    since = moved[-1].first if moved else 0
    at_speed = int(steps_O[since:].sum())
    # Shares that never vary show only one size, and then the old line at the new speed may hold.
    one_size = len(set(size_O[since:].tolist())) < 2  # noqa: PLR2004  # a line needs two sizes
    share_now, size_now = _current_shape(weighed)
    return RegressionData(
        size_O=size_O,
        seconds_O=seconds_O,
        precision_O=weight_O / trust_O,
        weight_O=weight_O,
        steps_O=steps_O,
        micro_O=weighed.micro_O,
        spread_O=np.array([_spread(o) for o in seen]),
        era_O=weighed.era_O,
        phase_O=weighed.phase_O,
        newest_O=weighed.newest_O,
        began_s_O=_began_s(seen),
        ended_s_O=np.array([o.ended_s for o in seen]),
        typical_samples=float((trust_O * steps_O) @ size_O / (trust_O @ steps_O)),
        of_slope=of_slope,
        of_fixed=of_fixed,
        update_s=_weighted_median(updates) if updates else 0.0,
        variation=usual,
        largest_share_samples=max(o.share_samples for o in seen),
        share_now=share_now,
        size_now=size_now,
        drift_ratio=moved[-1].ratio if moved else 1.0,
        steps_at_speed=at_speed,
        drifted=bool(moved) and one_size and at_speed < _RELEARNED_STEPS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    """Observations with what each of them counts.

    Attributes:
        seen: oldest first.
        usual: usual relative deviation of a step.
        size_O, micro_O, steps_O, era_O, phase_O, newest_O: as in ``RegressionData``.
        after_O: steps that came later.
        pace_O: newest speed's seconds over those of the time.
        trust_O: weight that falls with age.
    """

    seen: Sequence[Observation]
    usual: float
    size_O: Floats
    micro_O: Floats
    steps_O: Floats
    era_O: Floats
    phase_O: Floats
    newest_O: Flags
    after_O: Floats
    pace_O: Floats
    trust_O: Floats

    def points(self, phases: Sequence[MeanVariance | None]) -> tuple[Floats, Floats]:
        """Return seconds of a micro-batch and their weights."""
        means_O = np.array([p.mean if p else math.nan for p in phases])
        error_O = np.array([_error(o, p, self.usual) for o, p in zip(self.seen, phases, strict=True)])
        return means_O * self.pace_O / self.micro_O, self.trust_O / error_O**2

    def line(self, phases: Sequence[MeanVariance | None]) -> FittedLine:
        """Return the line of a phase's seconds by size, where it was measured."""
        y_O, weight_O = self.points(phases)
        have = np.isfinite(y_O)
        return fit_line(
            self.size_O[have],
            y_O[have],
            weight_O=weight_O[have],
            steps_O=self.steps_O[have],
            newest_O=self.newest_O[have],
            assumed=ASSUMED,
        )


def _weighed(
    seen: Sequence[Observation], moved: Sequence[PaceChange], phases: Sequence[SpeedPhase], usual: float
) -> _Weighed:
    steps_O = np.array([o.steps for o in seen], dtype=float)
    micro_O = np.array([o.micro_batches for o in seen], dtype=float)
    pace_O, era_O, phase_O = np.ones(len(seen)), np.zeros(len(seen)), np.ones(len(seen))
    for phase in phases:
        phase_O[phase.first : phase.end] = phase.ratio
    for change in moved:
        pace_O[: change.first] *= change.ratio
        era_O[change.first :] += 1
    after_O = np.cumsum(steps_O[::-1])[::-1] - steps_O
    later_O = np.array([o.ended_s > seen[0].ended_s for o in seen])
    return _Weighed(
        seen=seen,
        usual=usual,
        size_O=np.array([o.share_samples for o in seen]) / micro_O,
        micro_O=micro_O,
        steps_O=steps_O,
        era_O=era_O,
        phase_O=phase_O,
        newest_O=later_O & (after_O < NEWEST_STEPS) & (steps_O >= LEAST_STEPS),
        after_O=after_O,
        pace_O=pace_O / phase_O,
        trust_O=np.maximum(0.5 ** (after_O / _HALF_LIFE_STEPS), _OLDEST_WEIGHT),
    )


def _parts_before(weighed: _Weighed) -> tuple[float, float]:
    """Return the part of load and forward in the slope, and in the fixed part.

    The sum of phases is known best; single phases only divide its slope and its fixed part.
    """
    seen = weighed.seen
    if not all(o.backward is not None and (o.forward is not None or o.load is not None) for o in seen):
        return 1 - _BACKWARD_PART, 1 - _BACKWARD_PART
    before = weighed.line([_sum(o.load, o.forward) for o in seen])
    backward = weighed.line([o.backward for o in seen])
    mean = float(weighed.size_O.mean())
    before_s, backward_s = (line.slope * mean + line.fixed for line in (before, backward))
    by_mean = _part(before_s, backward_s, 1 - _BACKWARD_PART)
    return _part(before.slope, backward.slope, by_mean), _part(before.fixed, backward.fixed, by_mean)


def _current_shape(weighed: _Weighed) -> tuple[int, float]:
    """Return the share of most of the last steps, and its micro-batch size."""
    steps: dict[tuple[int, float], float] = {}
    for o, size, after in zip(weighed.seen, weighed.size_O.tolist(), weighed.after_O.tolist(), strict=True):
        if after < _NOW_STEPS:
            steps[o.share_samples, size] = steps.get((o.share_samples, size), 0.0) + o.steps
    return max(steps, key=lambda shape: (steps[shape], shape))


def _without_warm_up(seen: list[Observation]) -> list[Observation]:
    """Return the observations without those of only a process's first steps, if any others are left.

    A scrape may fall anywhere within the first steps. In a longer observation, the slow first steps show as a large
    variance, which reduces its weight.
    """
    warm: list[Observation] = []
    cold_steps = 0
    for o in seen:
        cold_steps = WARM_UP_STEPS if o.warm_up and not cold_steps else cold_steps
        if o.steps <= cold_steps:
            cold_steps -= o.steps
        else:
            cold_steps = 0
            warm.append(o)
    return warm or seen


def _began_s(seen: Sequence[Observation]) -> Floats:
    """Return when each observation's steps began, ``_O``: at the previous scrape, or their own duration before."""
    ends_s = sorted({o.ended_s for o in seen})
    first_s = sum(
        o.steps * mean.mean for o in seen if o.ended_s == ends_s[0] and (mean := o.step or _own(o)) is not None
    )
    began_s = dict(zip(ends_s, [ends_s[0] - first_s, *ends_s], strict=False))
    return np.array([began_s[o.ended_s] for o in seen])


def _part(one: float, other: float, otherwise: float) -> float:
    return one / (one + other) if one + other > 0 else otherwise


def _own(observation: Observation) -> MeanVariance | None:
    """Return the seconds that micro-batches take: compute without the update."""
    if observation.compute is not None:
        update = observation.update.mean if observation.update is not None else 0.0
        mean = observation.compute.mean - update
        return MeanVariance(mean=mean, variance=observation.compute.variance) if mean >= SHORTEST_STEP_S else None
    if observation.backward is None or observation.forward is None:
        return None
    whole = _sum(_sum(observation.load, observation.forward), observation.backward)
    return whole if whole is not None and whole.mean >= SHORTEST_STEP_S else None


def _sum(one: MeanVariance | None, other: MeanVariance | None) -> MeanVariance | None:
    if one is None or other is None:
        return one or other
    known = one.variance is not None and other.variance is not None
    return MeanVariance(
        mean=one.mean + other.mean, variance=(one.variance or 0.0) + (other.variance or 0.0) if known else None
    )


def _relative_deviation(moments: MeanVariance) -> float | None:
    if moments.variance is None or moments.mean <= 0:
        return None
    return min(math.sqrt(moments.variance) / max(moments.mean, SHORTEST_STEP_S), _LARGEST_VARIATION)


def _spread(observation: Observation) -> float:
    own = _own(observation)
    deviation = _relative_deviation(own) if own is not None else None
    return math.nan if deviation is None else deviation**2


def _usual_variation(seen: Sequence[Observation]) -> float:
    """Return the member's usual variation: the weighted median, which resists an outlier in one scrape."""
    calm = [o for o in seen if not o.warm_up] or list(seen)
    known = [(_relative_deviation(own), o.steps) for o in calm if (own := _own(o)) is not None]
    found = [(deviation / _median_deviation(steps), steps) for deviation, steps in known if deviation is not None]
    return _weighted_median(found) if found else _DEFAULT_VARIATION


def _median_deviation(steps: int) -> float:
    """Return the median of a standard deviation estimated from so many normal steps, if the true one is 1.

    By the cube-root approximation of Wilson and Hilferty (1931): 0.69 for two steps, 0.96 for ten.
    """
    return math.pow(1 - 2 / (9 * (steps - 1)), 1.5)


def _error(observation: Observation, moments: MeanVariance | None, usual: float) -> float:
    """Return the relative standard error of an observation's mean."""
    own = _relative_deviation(moments) if moments is not None else None
    if own is None:
        own = _WARM_UP_VARIATION if observation.warm_up else usual
    # Few steps estimate their own deviation badly, so the usual one counts as some more steps.
    own2 = ((observation.steps - 1) * own**2 + _USUAL_STEPS * usual**2) / (observation.steps - 1 + _USUAL_STEPS)
    return math.sqrt(own2 / observation.steps + _MODEL_ERROR**2)


def _point(observation: Observation, usual: float, shared: SharedSlowdown | None) -> Point:
    own = _own(observation)
    assert own is not None  # noqa: S101  # callers pass only observations with it
    deviation = _relative_deviation(own)
    if deviation is None:
        deviation = _WARM_UP_VARIATION if observation.warm_up else usual
    return Point(
        size=observation.share_samples / observation.micro_batches,
        seconds=own.mean / observation.micro_batches / (shared.at(observation.ended_s) if shared else 1.0),
        variation=max(deviation, usual / 2),
        steps=observation.steps,
        scraped_s=observation.ended_s,
    )


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the value with half of the weight below and half above it."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    return ordered[-1][0]
