"""Reads every training job's telemetry again and again, and wakes a job when something new came.

Training never waits for any of this: while Prometheus is away, the last good plan stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.decide.grants.persisted import compute_time
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.prom.errors import PromError
from heterotrain_operator.prom.history import Speed, TelemetryHistory
from heterotrain_operator.prom.queries import (
    Series,
    everything_of,
    parse_everything,
    parse_scrape_times,
    scrape_times_of,
)
from heterotrain_operator.settings import PrometheusSettings

PARALLEL_READS = 8
REST_FACTOR = 1.0
"""Reading rests at least this many times as long as it took: with very many jobs it is late rather than in the way."""
FAILING_S = 5.0
"""One late answer is no outage: a problem is told after this long without a good one."""

log = structlog.get_logger()


class Prom(Protocol):
    """What is needed of Prometheus."""

    async def query(self, promql: str) -> tuple[Series, ...]:
        """Return the answer to an instant query."""
        ...


class Poller:
    """Keeps the telemetry of all jobs.

    Args:
        prom: ``None`` when telemetry is switched off.
        clock: monotonic seconds.
        wall_clock_s: seconds since the epoch.
    """

    def __init__(
        self,
        prom: Prom | None,
        store: Store,
        queue: Queue[JobKey],
        metrics: OperatorMetrics,
        settings: PrometheusSettings,
        *,
        clock: Callable[[], float],
        wall_clock_s: Callable[[], float],
    ) -> None:
        self._prom = prom
        self._store = store
        self._queue = queue
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._wall_clock_s = wall_clock_s
        self._jobs: dict[str, TelemetryHistory] = {}
        self._good_s: dict[str, float] = {}

    def of(self, job: JobView) -> Telemetry:
        """Return what is known of a job."""
        if self._prom is None:
            return Telemetry(problem="telemetry is switched off: set prometheus.url", reason="NotConfigured")
        known = self._jobs.get(job.uid)
        return known.telemetry if known else Telemetry()

    async def run(self) -> None:
        """Read for ever."""
        assert self._prom is not None  # noqa: S101  # it is not started without
        while True:
            started_s = self._clock()
            jobs = [job for job in self._store.jobs.all().values() if _trains(job)]
            gate = asyncio.Semaphore(PARALLEL_READS)
            await asyncio.gather(*(self._read(job, self._prom, gate) for job in jobs))
            living = {job.uid for job in self._store.jobs.all().values()}
            self._jobs = {uid: known for uid, known in self._jobs.items() if uid in living}
            self._good_s = {uid: good_s for uid, good_s in self._good_s.items() if uid in living}
            took_s = self._clock() - started_s
            await asyncio.sleep(max(self._settings.poll_s - took_s, took_s * REST_FACTOR))

    async def _read(self, job: JobView, prom: Prom, gate: asyncio.Semaphore) -> None:
        known = self._jobs.get(job.uid)
        if known is None:
            speeds = {pool.name: pool.speed for pool in job.status.pools if pool.speed is not None}
            known = self._jobs[job.uid] = TelemetryHistory(
                {name: Speed(s.samples, compute_time(s)) for name, s in speeds.items()}
            )
        async with gate:
            try:
                times = parse_scrape_times(await prom.query(scrape_times_of(job.uid)))
                # Nothing can be new before the next scrape, and most reads find none.
                news = not known.knows(times)
                snapshot = parse_everything(await prom.query(everything_of(job.uid))) if news else None
            except PromError as error:
                self._metrics.telemetry_reads.labels(result=error.reason).inc()
                if self._clock() - self._good_s.setdefault(job.uid, self._clock()) >= FAILING_S:
                    self._judge(job, known, reason=error.reason, problem=str(error))
                return
        self._good_s[job.uid] = self._clock()
        self._metrics.telemetry_reads.labels(result="ok").inc()
        pools = {pod.uid: pod.pool for pod in self._store.pods.of_job(job.key)}
        if snapshot is not None and known.take(snapshot, times, pools=pools):
            self._queue.add(job.key)
        self._judge(job, known, *self._verdict(job, known.telemetry))

    def _verdict(self, job: JobView, telemetry: Telemetry) -> tuple[str, str]:
        now_s = self._wall_clock_s()
        waited_s = now_s - max(telemetry.newest_sample_s, seconds(job.status.training_since))
        if waited_s <= self._settings.stale_s:
            return "Fresh", ""
        if not telemetry.gauges:
            return (
                "NoSeries",
                "Prometheus has no series of this job: let it scrape the pods' ports named ht-metrics-0, ht-metrics-1, …",
            )
        return "Stale", f"the newest sample is {waited_s:.0f} s old: Prometheus does not reach the workers"

    def _judge(self, job: JobView, known: TelemetryHistory, reason: str, problem: str) -> None:
        if known.judge(reason=reason, problem=problem):
            log.info("telemetry", job=job.key.name, namespace=job.key.namespace, state=reason, problem=problem)
            self._queue.add(job.key)


def _trains(job: JobView) -> bool:
    """Tell whether the job has been started and has not ended: there is something to read."""
    return (
        not job.deleting
        and job.status.start_time is not None
        and job.status.completion_time is None
        and job.status.plan.desired_generation > 0
    )
