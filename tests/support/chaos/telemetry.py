"""Prometheus in memory: it scrapes the simulated workers, and may be away, slow, or lie."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from heterotrain_core.contract import metrics
from heterotrain_operator.prom.errors import PromBadAnswer, PromUnavailable
from heterotrain_operator.prom.vector import Vector, VectorSample

from support.chaos.machines import Cluster
from support.chaos.training import JobTraining

SCRAPE_S = 10.0
WILD = (-1.0, 1e308, 1e15, 0.0, 3.7e-310)


class ChaosPrometheus:
    """Answers the operator's two queries.

    Attributes:
        away: whether it answers at all.
        lie: how it lies now: ``wild`` values, ``foreign`` workers, ``old`` scrapes, ``future`` scrapes, ``mixed`` up
            labels, ``garbage``, or an empty string for the truth.
        skew_s: seconds by which its clock is ahead.
        slowness: factor on the seconds of a step, by pool.
    """

    def __init__(self, cluster: Cluster, rng: random.Random, now_s: Callable[[], float], *, skew_s: float) -> None:
        self.away = False
        self.lie = ""
        self.skew_s = skew_s
        self.slowness: Mapping[str, float] = {}
        self._cluster = cluster
        self._rng = rng
        self._now_s = now_s

    async def query(self, promql: str) -> Vector:
        """Return the answer to an instant query."""
        await asyncio.sleep(self._rng.uniform(0.01, 0.05))
        if self.away:
            raise PromUnavailable("Prometheus can't be reached")
        if self.lie == "garbage" and self._rng.random() < 0.5:
            raise PromBadAnswer("its answer is not an answer to a query")
        job = next((t for t in self._cluster.trainings.values() if f'"{t.job_uid}"' in promql), None)
        if job is None:
            return Vector()
        times = self._times(job)
        if promql.startswith("sum by"):
            return Vector.of([VectorSample({metrics.LABEL_JOB_UID: job.job_uid}, sum(row.value for row in times))])
        rows = [*self._everything(job), *times]
        return Vector.of(self._lied(row) for row in rows)

    def _times(self, job: JobTraining) -> list[VectorSample]:
        scraped_s = self._now_s() // SCRAPE_S * SCRAPE_S + self.skew_s
        scraped_s += {"old": -600.0, "future": 86_400.0}.get(self.lie, 0.0)
        return [VectorSample(_identity(job, uid), scraped_s) for uid in sorted(job.processes)]

    def _everything(self, job: JobTraining) -> list[VectorSample]:
        rows = []
        for uid, process in sorted(job.processes.items()):
            if process.plan is None:
                continue
            own = _identity(job, uid)
            pools = {rank.worker_uid: process.plan.pool_of(rank) for rank in process.plan.ranks}
            slow = self.slowness.get(pools.get(uid, ""), 1.0)
            for name, value in (
                (metrics.PLAN_GENERATION, process.plan.generation),
                (metrics.PLAN_REVISION, process.plan.revision),
                (metrics.EPOCH, 0),
                (metrics.STEP, job.steps),
                (metrics.EPOCH_SAMPLES, 100 * job.total_steps),
                (metrics.SAMPLES_COMMITTED, 100 * job.steps),
                (metrics.LOSS, 1.0 / (1 + job.steps)),
            ):
                rows.append(VectorSample({**own, "__name__": name}, float(value)))
            for share, steps in sorted(job.counters.get(uid, {}).items()):
                rows += _shape(own, share, steps, slow)
        return rows

    def _lied(self, row: VectorSample) -> VectorSample:
        if not self.lie or self._rng.random() < 0.5:
            return row
        labels, value = dict(row.labels), row.value
        if self.lie == "wild":
            value = self._rng.choice(WILD)
        elif self.lie == "foreign":
            labels[metrics.LABEL_WORKER_UID] = self._rng.choice(["", "uid-of-another", "x" * 5000])
        elif self.lie == "mixed":
            labels[self._rng.choice(sorted(labels))] = self._rng.choice(["9" * 5000, "-1", "NaN", "١"])
        return VectorSample(labels, value)


def _identity(job: JobTraining, uid: str) -> dict[str, str]:
    return {
        metrics.LABEL_JOB_UID: job.job_uid,
        metrics.LABEL_WORKER: job.processes[uid].name,
        metrics.LABEL_WORKER_UID: uid,
        metrics.LABEL_LOCAL_RANK: "0",
    }


def _shape(own: dict[str, str], share: int, steps: int, slow: float) -> list[VectorSample]:
    labels = {**own, metrics.LABEL_SHARE: str(share), metrics.LABEL_MICRO_BATCH: str(share)}
    forward_s, backward_s = 0.002 * slow * share, 0.004 * slow * share
    seconds = {
        metrics.PHASE_LOAD: 0.0,
        metrics.PHASE_FORWARD: forward_s,
        metrics.PHASE_BACKWARD: backward_s,
        metrics.PHASE_UPDATE: 0.01,
        metrics.PHASE_COMPUTE: forward_s + backward_s + 0.01,
        metrics.PHASE_STEP: forward_s + backward_s + 0.02,
    }
    rows = [VectorSample({**labels, "__name__": metrics.STEPS}, float(steps))]
    for phase, each_s in seconds.items():
        named = {**labels, metrics.LABEL_PHASE: phase}
        rows.append(VectorSample({**named, "__name__": metrics.PHASE_SECONDS}, steps * each_s))
        rows.append(VectorSample({**named, "__name__": metrics.PHASE_SECONDS_SQUARED}, steps * each_s**2 * 1.0001))
    return rows
