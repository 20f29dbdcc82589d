"""Telemetry as it arrives: cumulative counters per member and shape, and their differences between two scrapes.

Counters are raw sums, so nothing is lost between scrapes, however briefly a share was in use. Unusable values (a
missing series, a value that is not a number, a negative mean) are treated as missing, never as zero.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from heterotrain_core.contract import metrics

LONGEST_STEP_S = 1e6
"""Eleven days: a longer phase of a step is not a measurement."""
SHORTEST_STEP_S = 1e-9
"""Shorter compute times are not measurements."""
MOST_SAMPLES = 2**31
"""Larger shares are not measurements."""
_PLACE = {phase: place for place, phase in enumerate(metrics.PHASES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterKey:
    """The member and the shape of step that counters belong to.

    Attributes:
        member: permanent name of one process's rank; includes the pod's uid, so that a successor has another name.
        share_samples: samples of the step.
        micro_batch_samples: its largest micro-batch.
    """

    member: str
    share_samples: int
    micro_batch_samples: int


class PhaseSums(Mapping[str, float]):
    """A sum of each phase, in less than half of a dictionary's memory; a phase without a finite sum is missing."""

    __slots__ = ("_values",)

    def __init__(self, sums: Mapping[str, float]) -> None:
        self._values = array("d", [sums.get(phase, math.nan) for phase in metrics.PHASES])

    def __getitem__(self, phase: str) -> float:
        value = self._values[_PLACE[phase]]
        if not math.isfinite(value):
            raise KeyError(phase)
        return value

    def __iter__(self) -> Iterator[str]:
        return (phase for phase, value in zip(metrics.PHASES, self._values, strict=True) if math.isfinite(value))

    def __len__(self) -> int:
        return sum(map(math.isfinite, self._values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Cumulative counters of one key; ``None`` where the series is missing.

    ``phase_s`` and ``phase_s2`` map the phases of ``contract.metrics`` to summed seconds and squared seconds. The last
    three have no shape label: they belong to the member and are repeated in each of its shapes.
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
    """Mean and variance of a quantity over steps; the variance is ``None`` for fewer than two steps."""

    mean: float
    variance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One member's steps of one shape between two scrapes.

    Attributes:
        member: as in ``CounterKey``.
        share_samples: samples of each step.
        micro_batches: micro-batches of each step.
        steps: number of steps, at least 1.
        ended_s: time of the later scrape; only differences matter.
        warm_up: whether this is the first observation of the process, whose first steps are slow.
        load, forward, backward, sync, update, compute, step: seconds per step in each phase (see ``contract.metrics``).
        first_bucket_fraction: gamma as measured by this member.
        bucket_steps: steps for which the exchange was timed.
        overlapped_s: T_o, mean seconds of all buckets but the last.
        last_bucket_s: T_u, mean seconds of the last bucket.
        generation: of the plan under which all these exchanges took place: between its members; ``None`` where that is
            unknown, or where they are of several.
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
    generation: int | None = None


def observe(
    previous: Mapping[CounterKey, Counters], current: Mapping[CounterKey, Counters], *, ended_s: float
) -> tuple[Observation, ...]:
    """Return the observations between two scrapes, by member and share; keys without a new step are left out.

    A counter that fell belongs to a restarted process and counts from zero, and so does a new key. With an empty
    ``previous`` (at the first scrape, or after a restart of the operator), each key gives one observation of everything
    since its process began.

    Args:
        previous: counters of the earlier scrape.
        current: counters of the later scrape.
        ended_s: time of the later scrape in seconds.
    """
    known = {key.member for key in previous}
    exchange_before = {key.member: counters for key, counters in previous.items()}
    found = []
    for key in sorted(current, key=lambda key: (key.member, key.share_samples, key.micro_batch_samples)):
        before = previous.get(key)
        restarted = before is not None and current[key].steps < before.steps
        observation = _between(
            key, None if restarted else before, current[key], exchange_before.get(key.member), ended_s
        )
        if observation is not None:
            found.append(replace(observation, warm_up=restarted or key.member not in known))
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
        phase: _mean_and_variance(
            _grown(sums.get(phase, 0.0), after.phase_s.get(phase)),
            _grown(squares.get(phase, 0.0), after.phase_s2.get(phase)),
            steps,
        )
        for phase in metrics.PHASES
    }
    fraction = _mean_and_variance(
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
    """Return the growth of a sum, ``None`` where it is not known."""
    if after is None or not math.isfinite(after):
        return None
    grown = after - (before if before is not None and math.isfinite(before) else 0.0)
    return grown if grown >= 0 else None


def _mean_and_variance(total: float | None, squares: float | None, steps: int) -> MeanVariance | None:
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
    """Return whether every number of the observation is plausible."""
    # Plain loops, because each decision asks this of thousands of observations.
    for phase in (
        observation.load,
        observation.forward,
        observation.backward,
        observation.sync,
        observation.update,
        observation.compute,
        observation.step,
        observation.first_bucket_fraction,
    ):
        if phase is None:
            continue
        if not 0 <= phase.mean <= LONGEST_STEP_S:
            return False
        if phase.variance is not None and not 0 <= phase.variance <= LONGEST_STEP_S**2:
            return False
    for seconds in (observation.overlapped_s, observation.last_bucket_s):
        if seconds is not None and not 0 <= seconds <= LONGEST_STEP_S:
            return False
    counted = observation.steps >= 1 and 0 <= observation.share_samples <= MOST_SAMPLES
    micro = 1 <= observation.micro_batches <= max(1, observation.share_samples)
    return counted and micro and math.isfinite(observation.ended_s)
