"""Telemetry as it arrives: cumulative counters per member and shape, and what lies between two scrapes of them.

Counters are raw sums, so that nothing is lost between scrapes however short a share's life was. What cannot be used
(a missing series, a value that is not a number, a mean that is negative) is missing, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from heterotrain_core.contract import metrics

LONGEST_STEP_S = 1e6
"""No phase of a step takes eleven days; what says so is not a measurement."""
SHORTEST_STEP_S = 1e-9
MOST_SAMPLES = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterKey:
    """Whose counters, for which shape of step.

    Attributes:
        member: names one process's rank for good: include the pod's uid, so that a successor is somebody else.
        share_samples: samples of the step.
        micro_batch_samples: its largest micro-batch.
    """

    member: str
    share_samples: int
    micro_batch_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Cumulative counters of one key; ``None`` where the series is missing.

    ``phase_s`` and ``phase_s2`` map the phases of ``contract.metrics`` to summed seconds and squared seconds. The last
    three carry no shape label: they are the member's, repeated in each of its shapes.
    """

    steps: float
    phase_s: Mapping[str, float]
    phase_s2: Mapping[str, float]
    first_bucket_fraction: float | None = None
    first_bucket_fraction_squared: float | None = None
    bucket_steps: float | None = None
    overlapped_s: float | None = None
    last_bucket_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanVariance:
    """Mean and variance of a quantity over steps; the variance is ``None`` where fewer than two steps were seen."""

    mean: float
    variance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one member did with one shape of step between two scrapes.

    Attributes:
        member: as in ``CounterKey``.
        share_samples: samples of each step.
        micro_batches: micro-batches of each step.
        steps: how many steps, at least 1.
        ended_s: when the later scrape was taken; only differences matter.
        warm_up: whether this is the first that was ever seen of the process: its first steps are slow.
        load, forward, backward, sync, update, compute, step: seconds per step in each phase (see ``contract.metrics``).
        first_bucket_fraction: gamma as this member saw it.
        bucket_steps: steps for which the exchange was timed.
        overlapped_s: T_o, mean seconds of all buckets but the last.
        last_bucket_s: T_u, mean seconds of the last bucket.
    """

    member: str
    share_samples: int
    micro_batches: int = 1
    steps: int
    ended_s: float
    warm_up: bool = False
    load: MeanVariance | None = None
    forward: MeanVariance | None = None
    backward: MeanVariance | None = None
    sync: MeanVariance | None = None
    update: MeanVariance | None = None
    compute: MeanVariance | None = None
    step: MeanVariance | None = None
    first_bucket_fraction: MeanVariance | None = None
    bucket_steps: int = 0
    overlapped_s: float | None = None
    last_bucket_s: float | None = None


def observe(
    previous: Mapping[CounterKey, Counters], current: Mapping[CounterKey, Counters], *, ended_s: float
) -> tuple[Observation, ...]:
    """Return what happened between two scrapes, by member and share; keys without a new step are left out.

    A counter that fell belongs to a process that started anew and counts from zero; so does a key that is new. With an
    empty ``previous`` (the first scrape, an operator that restarted) everything since the process began is one
    observation a key.

    Args:
        previous: counters of the earlier scrape.
        current: counters of the later scrape.
        ended_s: when the later one was taken, in seconds.
    """
    known = {key.member for key in previous}
    exchange_before = {key.member: counters for key, counters in previous.items()}
    found = []
    for key in sorted(current, key=lambda key: (key.member, key.share_samples, key.micro_batch_samples)):
        before = previous.get(key)
        anew = before is not None and current[key].steps < before.steps
        observation = _between(key, None if anew else before, current[key], exchange_before.get(key.member), ended_s)
        if observation is not None:
            found.append(replace(observation, warm_up=anew or key.member not in known))
    return tuple(found)


def _between(
    key: CounterKey, before: Counters | None, after: Counters, exchange_before: Counters | None, ended_s: float
) -> Observation | None:
    if not math.isfinite(after.steps) or key.share_samples < 0:
        return None
    steps = round(after.steps - (before.steps if before and math.isfinite(before.steps) else 0))
    if steps < 1:
        return None
    empty: Mapping[str, float] = {}
    sums, squares = (before.phase_s, before.phase_s2) if before else (empty, empty)
    phases = {
        phase: _moments(
            _grown(sums.get(phase, 0.0), after.phase_s.get(phase)),
            _grown(squares.get(phase, 0.0), after.phase_s2.get(phase)),
            steps,
        )
        for phase in metrics.PHASES
    }
    fraction = _moments(
        _grown(before.first_bucket_fraction if before else 0.0, after.first_bucket_fraction),
        _grown(before.first_bucket_fraction_squared if before else 0.0, after.first_bucket_fraction_squared),
        steps,
    )
    timed, overlapped_s, last_bucket_s = _exchange(exchange_before, after)
    micro = -(-key.share_samples // key.micro_batch_samples) if key.micro_batch_samples > 0 else 1
    return Observation(
        member=key.member,
        share_samples=key.share_samples,
        micro_batches=max(1, micro),
        steps=steps,
        ended_s=ended_s,
        load=phases[metrics.PHASE_LOAD],
        forward=phases[metrics.PHASE_FORWARD],
        backward=phases[metrics.PHASE_BACKWARD],
        sync=phases[metrics.PHASE_SYNC],
        update=phases[metrics.PHASE_UPDATE],
        compute=phases[metrics.PHASE_COMPUTE],
        step=phases[metrics.PHASE_STEP],
        first_bucket_fraction=fraction if fraction and fraction.mean <= 1 else None,
        bucket_steps=timed,
        overlapped_s=overlapped_s,
        last_bucket_s=last_bucket_s,
    )


def _grown(before: float | None, after: float | None) -> float | None:
    """Return by how much a sum grew, ``None`` where that is not known."""
    if after is None or not math.isfinite(after):
        return None
    grown = after - (before if before is not None and math.isfinite(before) else 0.0)
    return grown if grown >= 0 else None


def _moments(total: float | None, squares: float | None, steps: int) -> MeanVariance | None:
    if total is None:
        return None
    mean = total / steps
    if squares is None or steps < 2:  # noqa: PLR2004  # one step has no spread
        return MeanVariance(mean=mean)
    return MeanVariance(mean=mean, variance=max(0.0, squares - total * mean) / (steps - 1))


def _exchange(before: Counters | None, after: Counters) -> tuple[int, float | None, float | None]:
    """Return timed steps and mean T_o and T_u between two scrapes of one member."""
    steps = _grown(before.bucket_steps if before else 0.0, after.bucket_steps)
    if steps is None and after.bucket_steps is not None and math.isfinite(after.bucket_steps):
        before, steps = None, after.bucket_steps
    if not steps or round(steps) < 1:
        return 0, None, None
    overlapped = _grown(before.overlapped_s if before else 0.0, after.overlapped_s)
    last = _grown(before.last_bucket_s if before else 0.0, after.last_bucket_s)
    if overlapped is None or last is None:
        return 0, None, None
    return round(steps), overlapped / steps, last / steps


def usable(observation: Observation) -> bool:
    """Return whether every number of the observation can be true (whoever built it)."""
    phases = (
        observation.load, observation.forward, observation.backward, observation.sync, observation.update,
        observation.compute, observation.step, observation.first_bucket_fraction,
    )  # fmt: skip
    sound = all(
        0 <= phase.mean <= LONGEST_STEP_S and (phase.variance is None or 0 <= phase.variance <= LONGEST_STEP_S**2)
        for phase in phases
        if phase is not None
    ) and all(x is None or 0 <= x <= LONGEST_STEP_S for x in (observation.overlapped_s, observation.last_bucket_s))
    counted = observation.steps >= 1 and 0 <= observation.share_samples <= MOST_SAMPLES
    micro = 1 <= observation.micro_batches <= max(1, observation.share_samples)
    return sound and counted and micro and math.isfinite(observation.ended_s)
