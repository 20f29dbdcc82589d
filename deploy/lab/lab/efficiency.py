"""Efficiency of a run, from its own telemetry: achieved rate against the sum of solo rates, and the ceiling.

The solo rate of a worker is its samples per second on its own work, without exchange and without waiting, measured
while the others are as busy as in the job: that is share / mean compute seconds of the very steps of the run. The
maximum of noisy workers is longer than any mean, so even a perfect split stays below 1: the ceiling is what perfectly
balanced workers with the measured variances reach.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from heterotrain_core.contract import metrics
from heterotrain_core.perf.expected import efficiency_ceiling

from lab.telemetry import PhaseTotals, Prometheus, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pool's worker's part in the steps that were measured."""

    pool: str
    share_samples: int
    steps: float
    compute_s: float
    deviation_s: float

    @property
    def solo_samples_per_s(self) -> float:
        """Samples a second on its own work."""
        return self.share_samples / self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """One split of one run, measured over ``steps`` steps."""

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
        """The efficiency of a perfect split under the measured variances, with no exchange at all."""
        return efficiency_ceiling([row.deviation_s / row.compute_s for row in self.rows])


def measure(prometheus: Prometheus, job_uid: str, pools: Mapping[str, str]) -> list[Efficiency]:
    """Measure every split that a job's workers were seen with, one worker in each of all its pools; best proved first.

    Prometheus tells which shares each worker had and for how many steps, not which ones were in force together: shares
    of all pools belong together when they sum to the job's global batch.

    Args:
        prometheus: where the run was recorded.
        job_uid: whose run.
        pools: pool by worker (pod name); workers that followed each other in a pool count as one.
    """
    compute = _by_pool(prometheus.totals(job_uid, metrics.PHASE_COMPUTE), pools)
    step = _by_pool(prometheus.totals(job_uid, metrics.PHASE_STEP), pools)
    batch = prometheus.value(f'max(max_over_time({metrics.GLOBAL_BATCH}{{{metrics.LABEL_JOB_UID}="{job_uid}"}}[2h]))')
    names = sorted({pool for pool, _ in compute})
    seen = [sorted(share for pool, share in compute if pool == name) for name in names]
    found = []
    for shares in itertools.product(*seen):
        keys = list(zip(names, shares, strict=True))
        if sum(shares) != batch or any(key not in step for key in keys):
            continue
        rows = tuple(_row(pool, share, compute[pool, share]) for pool, share in keys)
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


def _row(pool: str, share_samples: int, totals: PhaseTotals) -> Row:
    return Row(
        pool=pool,
        share_samples=share_samples,
        steps=totals.steps,
        compute_s=totals.mean_s,
        deviation_s=totals.deviation_s,
    )
