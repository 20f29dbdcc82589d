"""The cluster's exchange model from every member's observations.

T_o and T_u arrive as minima over ranks for each step, so they are the same on every rank and only have to be averaged.
(An early rank measures its waiting as well, the last one only the transfer.) gamma is measured by each member with
its own noise and combined by inverse variance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from heterotrain_core.contract.plan import CommunicationTime

from heterotrain_planner.perf.counters import Observation, usable
from heterotrain_planner.perf.model import ExchangeModel

LEAST_EXCHANGES = 10
"""Timed steps of a generation from which its exchange counts."""
_HALF_LIFE_STEPS = 600
"""Steps of the same member after which an observation counts half."""
_GAMMA_ERROR = 0.01
"""Least standard error of one member's fraction."""
_GAMMA_VARIANCE_ALONE = 0.05
"""Variance of one step's fraction where only one step was observed."""


def fit_exchange(observations: Sequence[Observation]) -> ExchangeModel:
    """Return the exchange model from all members' observations, in any order. Never raises on telemetry.

    T_o and T_u depend on the members. So they are those of the newest generation of the plan that has
    ``LEAST_EXCHANGES``; without one, of all observations.
    """
    seen = sorted(filter(usable, observations), key=lambda o: o.ended_s)
    timed = [o for o in seen if o.bucket_steps > 0 and o.overlapped_s is not None and o.last_bucket_s is not None]
    overhead_s = _overhead_s(seen)
    if not timed:
        return ExchangeModel(
            communication=None, overhead_s=overhead_s, reason="the gradient exchange has not been timed yet"
        )
    generation = _newest_measured(timed)
    if generation is not None:
        timed = [o for o in timed if o.generation == generation]
    weights = _recent(timed)
    gamma, deviation = _gamma(seen)
    overlapped_s = _interquartile_mean([o.overlapped_s or 0.0 for o in timed], weights)
    last_bucket_s = _interquartile_mean([o.last_bucket_s or 0.0 for o in timed], weights)
    return ExchangeModel(
        communication=CommunicationTime(overlapped_s=overlapped_s, last_bucket_s=last_bucket_s, gamma=gamma),
        gamma_deviation=deviation,
        overhead_s=overhead_s,
        generation=generation,
        reason=f"{sum(o.bucket_steps for o in timed)} timed exchanges: {overlapped_s:.3g} s can hide behind backward, "
        f"{last_bucket_s:.3g} s cannot, first bucket at {gamma:.0%} of backward",
    )


def _newest_measured(timed: Sequence[Observation]) -> int | None:
    """Return the newest generation in which some member timed enough exchanges, ``None`` without one."""
    steps: Counter[tuple[int, str]] = Counter()
    for o in timed:
        if o.generation is not None:
            steps[o.generation, o.member] += o.bucket_steps
    return max((generation for (generation, _), seen in steps.items() if seen >= LEAST_EXCHANGES), default=None)


def _gamma(seen: Sequence[Observation]) -> tuple[float, float]:
    """Return gamma and its standard error, combined over observations by inverse variance."""
    top = bottom = 0.0
    for observation in seen:
        fraction = observation.first_bucket_fraction
        if fraction is None or fraction.mean > 1:
            continue
        variance = fraction.variance if fraction.variance is not None else _GAMMA_VARIANCE_ALONE
        weight = 1.0 / (variance / observation.steps + _GAMMA_ERROR**2)
        top += weight * fraction.mean
        bottom += weight
    return (top / bottom, math.sqrt(1 / bottom)) if bottom else (0.0, 0.0)


def _overhead_s(seen: Sequence[Observation]) -> float:
    """Return the usual seconds of a step outside of all phases, at least 0."""
    found = [
        (o, o.step.mean - o.compute.mean - o.sync.mean)
        for o in seen
        if o.step is not None and o.compute is not None and o.sync is not None
    ]
    if not found:
        return 0.0
    return max(0.0, _interquartile_mean([rest for _, rest in found], _recent([o for o, _ in found])))


def _recent(observations: Sequence[Observation]) -> list[float]:
    """Return weights by steps that halve every ``_HALF_LIFE_STEPS`` of the same member's later steps."""
    later: dict[str, int] = {}
    weights = []
    for observation in reversed(observations):
        age = later.get(observation.member, 0)
        weights.append(observation.steps * 0.5 ** (age / _HALF_LIFE_STEPS))
        later[observation.member] = age + observation.steps
    return weights[::-1]


def _interquartile_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of the middle half: as robust as a median, but smoother with few observations."""
    ordered = sorted(zip(values, weights, strict=True))
    whole = sum(weights)
    passed = total = kept = 0.0
    for value, weight in ordered:
        inside = max(0.0, min(passed + weight, 0.75 * whole) - max(passed, 0.25 * whole))
        total += inside * value
        kept += inside
        passed += weight
    return total / kept if kept > 0 else ordered[-1][0]
