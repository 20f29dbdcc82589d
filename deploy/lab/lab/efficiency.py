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
    """One worker's part in the steps that were measured."""

    worker: str
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


def measure(prometheus: Prometheus, job_uid: str, shares: Mapping[str, int]) -> Efficiency | None:
    """Measure the steps in which the workers had exactly these shares; ``None`` when there were none.

    Args:
        prometheus: where the run was recorded.
        job_uid: whose run.
        shares: samples by worker (pod name), one rank a worker.
    """
    compute = prometheus.totals(job_uid, metrics.PHASE_COMPUTE)
    step = prometheus.totals(job_uid, metrics.PHASE_STEP)
    mine = [shape for shape in compute if shares.get(shape.worker) == shape.share_samples]
    if {shape.worker for shape in mine} != set(shares):
        return None
    rows = tuple(_row(shape, compute[shape]) for shape in sorted(mine, key=lambda shape: shape.worker))
    steps_s = [step[shape].mean_s for shape in mine if shape in step]
    if not steps_s:
        return None
    return Efficiency(rows=rows, step_s=math.fsum(steps_s) / len(steps_s), steps=min(row.steps for row in rows))


def _row(shape: Shape, totals: PhaseTotals) -> Row:
    return Row(
        worker=shape.worker,
        share_samples=shape.share_samples,
        steps=totals.steps,
        compute_s=totals.mean_s,
        deviation_s=totals.deviation_s,
    )


def splits(prometheus: Prometheus, job_uid: str) -> list[dict[str, int]]:
    """Return every combination of shares that the job's workers were seen with, as samples by worker.

    Prometheus tells which shares each worker had and for how many steps, not which ones were in force together; two
    shares of two workers belong together when they sum, with the others', to one of the job's global batches.
    """
    shapes = prometheus.totals(job_uid, metrics.PHASE_COMPUTE)
    of_worker: dict[str, dict[int, float]] = {}
    for shape, totals in shapes.items():
        of_worker.setdefault(shape.worker, {})[shape.share_samples] = totals.steps
    batch = prometheus.value(f'max(max_over_time({metrics.GLOBAL_BATCH}{{{metrics.LABEL_JOB_UID}="{job_uid}"}}[2h]))')
    workers = sorted(of_worker)
    return [
        dict(zip(workers, shares, strict=True))
        for shares in itertools.product(*(sorted(of_worker[worker]) for worker in workers))
        if sum(shares) == batch
    ]
