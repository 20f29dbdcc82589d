"""Efficiency of a run, from its own telemetry: achieved rate divided by the sum of solo rates, and the ceiling.

The solo rate of a worker is its samples per second on its own work, without exchange and waiting, while the others are
as busy as in the job: share / mean compute seconds in the steps of the run itself. The maximum of noisy times is longer
than their mean, so even the best shares stay below 1. The ceiling is the efficiency that no shares exceed with the
measured variations, without the shared ones (`perf.shared_pace`): no worker waits for another in a step that is slow
for all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from heterotrain_core.contract import metrics
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.shared_pace import own_variations
from heterotrain_planner.split.expected import efficiency_ceiling

from lab.telemetry import PhaseTotals, Prometheus, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pool's worker in the measured steps.

    ``own_variation`` is the standard deviation of a step's own seconds relative to their mean, without the variation
    that all workers share.
    """

    pool: str
    share_samples: int
    steps: float
    compute_s: float
    own_variation: float

    @property
    def solo_samples_per_s(self) -> float:
        """Samples a second on its own work."""
        return self.share_samples / self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """One set of shares in one run, measured over ``steps`` steps."""

    rows: tuple[Row, ...]
    step_s: float
    steps: float

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batch a second, achieved."""
        return sum(row.share_samples for row in self.rows) / self.step_s

    @property
    def solo_samples_per_s(self) -> float:
        """Sum of the workers' solo rates."""
        return sum(row.solo_samples_per_s for row in self.rows)

    @property
    def efficiency(self) -> float:
        """Achieved / sum of solo rates."""
        return self.samples_per_s / self.solo_samples_per_s

    @property
    def ceiling(self) -> float:
        """The efficiency that no shares exceed with the workers' own variations, without any exchange."""
        return efficiency_ceiling(
            [row.own_variation for row in self.rows], [row.solo_samples_per_s for row in self.rows]
        )


def measure(prometheus: Prometheus, job_uid: str, pools: Mapping[str, str]) -> list[Efficiency]:
    """Measure each set of shares of a job with one worker in each of its pools; the one with most steps comes first.

    Prometheus has each worker's shares and their numbers of steps, but not the combinations in force. Shares of all
    pools belong together if their sum is the job's global batch.

    Args:
        prometheus: the Prometheus that scraped the run.
        job_uid: the job.
        pools: pool by worker (pod name); successive workers of a pool count as one.
    """
    compute, step, sync = (
        _by_pool(prometheus.totals(job_uid, phase), pools)
        for phase in (metrics.PHASE_COMPUTE, metrics.PHASE_STEP, metrics.PHASE_SYNC)
    )
    batch = prometheus.value(f'max(max_over_time({metrics.GLOBAL_BATCH}{{{metrics.LABEL_JOB_UID}="{job_uid}"}}[2h]))')
    names = sorted({pool for pool, _ in compute})
    seen = [sorted(share for pool, share in compute if pool == name) for name in names]
    found = []
    for shares in itertools.product(*seen):
        keys = list(zip(names, shares, strict=True))
        if sum(shares) != batch or any(key not in step or key not in sync for key in keys):
            continue
        own = own_variations(
            [[_observation(key, compute=compute[key], step=step[key], sync=sync[key])] for key in keys],
            [compute[key].deviation_s / compute[key].mean_s for key in keys],
        )
        rows = tuple(
            Row(
                pool=key[0],
                share_samples=key[1],
                steps=compute[key].steps,
                compute_s=compute[key].mean_s,
                own_variation=variation,
            )
            for key, variation in zip(keys, own, strict=True)
        )
        step_s = math.fsum(step[key].mean_s for key in keys) / len(keys)
        found.append(Efficiency(rows=rows, step_s=step_s, steps=min(row.steps for row in rows)))
    return sorted(found, key=lambda split: -split.steps)


def _by_pool(totals: Mapping[Shape, PhaseTotals], pools: Mapping[str, str]) -> dict[tuple[str, int], PhaseTotals]:
    """Return totals by pool and share."""
    sums: dict[tuple[str, int], PhaseTotals] = {}
    for shape, one in totals.items():
        key = (pools.get(shape.worker, shape.worker), shape.share_samples)
        other = sums.get(key, PhaseTotals(steps=0.0, seconds=0.0, squared_seconds=0.0))
        sums[key] = PhaseTotals(
            steps=one.steps + other.steps,
            seconds=one.seconds + other.seconds,
            squared_seconds=one.squared_seconds + other.squared_seconds,
        )
    return sums


def _observation(key: tuple[str, int], *, compute: PhaseTotals, step: PhaseTotals, sync: PhaseTotals) -> Observation:
    """Return a whole run's totals of one pool and share as one observation."""

    def moments(totals: PhaseTotals) -> MeanVariance:
        return MeanVariance(mean=totals.mean_s, variance=totals.deviation_s**2)

    return Observation(
        member=key[0],
        share_samples=key[1],
        steps=round(compute.steps),
        ended_s=0.0,
        compute=moments(compute),
        step=moments(step),
        sync=moments(sync),
    )
