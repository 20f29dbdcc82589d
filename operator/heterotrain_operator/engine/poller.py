"""Poll Prometheus for the telemetry of every training job, and queue a job when its telemetry is new.

Training never waits for this: while Prometheus is unavailable, the last good plan stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import structlog
from heterotrain_core.contract.plan import Plan
from heterotrain_planner.planning.kept_speed import KeptSpeed, speed_near

from heterotrain_operator.api.text import quoted
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.profiles import needs_profiles
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.decide.learn.persisted import compute_time
from heterotrain_operator.engine.clocks import BusyTime, Clocks
from heterotrain_operator.engine.learner import Learner
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.prom.errors import PromBadAnswer, PromError
from heterotrain_operator.prom.history import FORGET_S, TelemetryHistory
from heterotrain_operator.prom.queries import parse_scrapes, scrapes_of, series_and_times_of
from heterotrain_operator.prom.series_map import JobReader
from heterotrain_operator.prom.unit_profiles import parse_profile, profile_of
from heterotrain_operator.prom.vector import Vector
from heterotrain_operator.settings import PrometheusSettings
from heterotrain_operator.threads import Threads

PARALLEL_READS = 8
TAKING_PART = 0.15
"""Part of one core, in processor time, for taking what reads bring. Cutting an answer apart takes little more. With
the passes that follow, a thousand jobs of ten ranks keep half of a core busy, and each is read once a minute instead of
after every scrape.
Nothing is lost: series are sums, and the next read has the steps of all scrapes before it.
"""
MOST_TAKE_S = 0.2
"""A single large job delays the reads of others by no more than follows from this."""
JOBS_AT_ONCE = 50
"""Jobs that are looked at in one go; then passes and watches get their turn."""
REST_FACTOR = 1.0
"""After each round of reads, the poller rests at least this many times as long as the round took beyond its slots."""
JOBS_PER_QUERY = 500
"""Jobs that one query asks about: the uid of each has 36 characters."""
ROWS_AT_ONCE = 50
"""So many series are taken within a millisecond. More are taken in a thread, so that passes go on meanwhile."""
FAILING_S = 5.0
"""Seconds without a good answer after which a problem is reported: one late answer is not an outage."""

STALE_SCRAPES = 3
"""Samples are stale when this many scrapes are missing, whatever the interval that Prometheus is configured for."""
NO_SERIES = (
    "Prometheus has no series of this job: make it scrape the pods' ports ht-metrics-0, ht-metrics-1, …. "
    "The usual causes: kube-prometheus-stack selects PodMonitors by the label release (monitoring.podMonitor.labels), "
    "or the first scrape comes later than after {stale_s:.0f} s (prometheus.staleSeconds)"
)

log = structlog.get_logger()


class Prom(Protocol):
    """What the poller needs of Prometheus."""

    async def query(self, promql: str) -> Vector:
        """Return the answer to an instant query."""
        ...


@dataclass(slots=True)
class _Job:
    """What was read of one job.

    Attributes:
        history: its telemetry.
        reader: of its answers.
        good_s: when Prometheus last answered well, or failed first; ``None`` before both.
        scrapes: the number of ``scrapes_of`` before that answer; ``None`` where it is not known.
    """

    history: TelemetryHistory
    reader: JobReader = field(default_factory=JobReader)
    good_s: float | None = None
    scrapes: float | None = None


class Poller:
    """Keeps the telemetry of all jobs.

    Args:
        prom: ``None`` when telemetry is switched off.
        learner: learns from what is new.
        threads: take long answers.

    Attributes:
        busy: how long the current round has gone without progress.
    """

    def __init__(
        self,
        prom: Prom | None,
        store: Store,
        queue: Queue[JobKey],
        metrics: OperatorMetrics,
        settings: PrometheusSettings,
        *,
        learner: Learner,
        clocks: Clocks,
        threads: Threads,
    ) -> None:
        self._prom = prom
        self._store = store
        self._queue = queue
        self._metrics = metrics
        self._settings = settings
        self._learner = learner
        self._clocks = clocks
        self._threads = threads
        self.busy = BusyTime(clocks.monotonic)
        self._jobs: dict[str, _Job] = {}
        self._slot_s, self._take_s, self._reserved_s = 0.0, 0.0, 0.0
        """When the next read may begin, seconds that taking the last answer took, and those reserved in this round."""

    def telemetry_of(self, job: JobView) -> Telemetry:
        """Return a job's telemetry as of the newest read."""
        if self._prom is None:
            return Telemetry(problem="telemetry is switched off: set prometheus.url", reason="NotConfigured")
        known = self._jobs.get(job.uid)
        return known.history.telemetry if known is not None else Telemetry()

    @property
    def reads(self) -> bool:
        """Whether there is telemetry at all."""
        return self._prom is not None

    def start_with(self, job: JobView, speeds: Mapping[str, KeptSpeed]) -> None:
        """Take the speeds of an earlier job by pool, until this one shows others."""
        self._of(job).history.start_with(speeds)

    async def run(self) -> None:
        """Poll until cancelled."""
        assert self._prom is not None  # noqa: S101  # not started without Prometheus
        while True:
            started_s, self._reserved_s = self._clocks.monotonic(), 0.0
            self.busy.progress()
            jobs = [job for job in self._store.jobs.all().values() if _is_read(job)]
            gate = asyncio.Semaphore(PARALLEL_READS)
            scrapes = await self._scrapes_of(jobs, self._prom)
            for start in range(0, len(jobs), JOBS_AT_ONCE):
                some = jobs[start : start + JOBS_AT_ONCE]
                await asyncio.gather(
                    *(self._read_isolated(job, self._prom, gate, scrapes.get(job.uid)) for job in some)
                )
                await asyncio.sleep(0)  # where there is nothing to read, nothing has been awaited
            for job in self._store.jobs.all().values():
                if job.status.start_time is None and job.uid in self._jobs:
                    self._jobs[job.uid].history.forget_profiles()
            existing = {job.uid for job in self._store.jobs.all().values()}
            self._jobs = {uid: known for uid, known in self._jobs.items() if uid in existing}
            self.busy.rest()
            took_s = self._clocks.monotonic() - started_s
            hurried_s = max(0.0, took_s - self._reserved_s)
            await asyncio.sleep(max(self._settings.poll_s - took_s, hurried_s * REST_FACTOR))

    async def _scrapes_of(self, jobs: Sequence[JobView], prom: Prom) -> dict[str, float]:
        """Return by uid the number that changes with each scrape of the job, for all that Prometheus answers about.

        So only jobs with a new scrape need a query of their own, which brings everything.
        """
        found: dict[str, float] = {}
        for start in range(0, len(jobs), JOBS_PER_QUERY):
            uids = [job.uid for job in jobs[start : start + JOBS_PER_QUERY]]
            with suppress(Exception):  # each job's own read meets the problem, too, and reports it
                found |= parse_scrapes(await prom.query(scrapes_of(uids)))
        return found

    async def _read_isolated(self, job: JobView, prom: Prom, gate: asyncio.Semaphore, scrapes: float | None) -> None:
        """Read; an unexpected error is a problem of this job, and the other jobs are read as before."""
        known = self._of(job)
        history = known.history
        try:
            if (scrapes is not None and scrapes == known.scrapes) or await self._read(job, prom, gate):
                known.scrapes, known.good_s = scrapes, self._clocks.monotonic()
                self._set_problem(job, history, *self._freshness(job, history.telemetry))
        except Exception as error:  # one job's data must not end the operator
            reason = PromBadAnswer.reason
            if history.telemetry.reason != reason:
                log.warning("telemetry", job=job.key.name, namespace=job.key.namespace, exc_info=True)
            self._metrics.telemetry_reads.labels(result=reason).inc()
            problem = f"the answer of Prometheus can't be read: {quoted(repr(error))}"
            self._set_problem(job, history, reason=reason, problem=problem)
        self.busy.progress()

    async def _read(self, job: JobView, prom: Prom, gate: asyncio.Semaphore) -> bool:
        """Read what is new of a job; return whether Prometheus answered."""
        known = self._of(job)
        history = known.history
        await self._wait_for_slot()
        async with gate:
            try:
                answer = await prom.query(series_and_times_of(job.uid))
                take = partial(
                    _take,
                    history,
                    known.reader,
                    answer,
                    workers=self._workers_of(job),
                    pools={pod.uid: pod.pool for pod in self._store.pods.of_job(job.key)},
                    namespace=job.key.namespace,
                    # The clock of Prometheus may be ahead of the operator's, but not by this much.
                    latest_s=self._clocks.wall() + FORGET_S,
                    recut=needs_profiles(job),
                )
                timed = partial(self._clocks.timed, take)
                in_thread = len(answer.values) > ROWS_AT_ONCE
                taken, took_s = await self._threads.run(timed) if in_thread else timed()
                self._take_s = min(MOST_TAKE_S, took_s)
                if taken.news and not self._learner.note(job, history.telemetry):
                    self._queue.add_news(job.key)
            except PromError as error:
                self._metrics.telemetry_reads.labels(result=error.reason).inc()
                now_s = self._clocks.monotonic()
                known.good_s = now_s if known.good_s is None else known.good_s
                if now_s - known.good_s >= FAILING_S:
                    self._set_problem(job, history, reason=error.reason, problem=str(error))
                return False
        self._metrics.telemetry_reads.labels(result="ok").inc()
        if taken.scraped and needs_profiles(job):
            await self._read_profiles(job, history, prom, gate)
        return True

    async def _read_profiles(
        self, job: JobView, history: TelemetryHistory, prom: Prom, gate: asyncio.Semaphore
    ) -> None:
        """Read the profile of one rank of each pool that has none yet; a failed read is repeated after a scrape."""
        pods = {pod.uid: pod for pod in self._store.pods.of_job(job.key) if pod.owner_uid == job.uid}
        for member, gauges in sorted(history.telemetry.gauges.items(), key=lambda each: each[0]):
            pod = pods.get(member.worker_uid)
            if pod is None or not gauges.profile_complete or pod.pool in history.telemetry.profiles:
                continue
            async with gate:
                try:
                    rows = tuple(await prom.query(profile_of(job.uid, member)))
                except PromError as error:
                    self._metrics.telemetry_reads.labels(result=error.reason).inc()
                    return
            found = parse_profile(
                rows, member, gauges, pool=pod.pool, workers={pod.uid: pod.name}, namespace=job.key.namespace
            )
            history.set_profile(pod.pool, found)
            self._queue.add_news(job.key)

    async def _wait_for_slot(self) -> None:
        """Wait until ``TAKING_PART`` has room for one more answer, if it takes as long as the one before."""
        now_s = self._clocks.monotonic()
        begins_s = max(now_s, self._slot_s)
        reserved_s = self._take_s / TAKING_PART
        self._slot_s, self._reserved_s = begins_s + reserved_s, self._reserved_s + reserved_s
        if begins_s > now_s:
            await asyncio.sleep(begins_s - now_s)

    def _workers_of(self, job: JobView) -> dict[str, str]:
        """Return the names of the job's own workers by uid: its pods, and the members of its plan."""
        found = self._store.plans.get(job.key)
        plan = found.plan if found is not None else None
        members = {rank.worker_uid: rank.worker for rank in plan.ranks} if isinstance(plan, Plan) else {}
        return members | {pod.uid: pod.name for pod in self._store.pods.of_job(job.key) if pod.owner_uid == job.uid}

    def _of(self, job: JobView) -> _Job:
        """Return what is known of a job; a new one starts from the speeds in its status."""
        known = self._jobs.get(job.uid)
        if known is None:
            speeds = {pool.name: pool.speed for pool in job.status.internal.pools if pool.speed is not None}
            history = TelemetryHistory({name: speed_near(compute_time(s), s.samples) for name, s in speeds.items()})
            known = self._jobs[job.uid] = _Job(history)
        return known

    def _freshness(self, job: JobView, telemetry: Telemetry) -> tuple[str, str]:
        """Return reason and problem by the age of the newest sample."""
        began_s = seconds(job.status.training_since or job.status.start_time)
        waited_s = self._clocks.wall() - max(telemetry.newest_sample_s, began_s)
        interval_s = telemetry.member_interval_s
        stale_s = max(self._settings.stale_s, min(STALE_SCRAPES * (interval_s or 0.0), FORGET_S))
        if waited_s <= stale_s:
            return "Fresh", ""
        if not telemetry.gauges:
            return "NoSeries", NO_SERIES.format(stale_s=self._settings.stale_s)
        every = f", while Prometheus scraped every {interval_s:.0f} s" if interval_s else ""
        return "Stale", f"the newest sample is {waited_s:.0f} s old{every}: check that Prometheus reaches the workers"

    def _set_problem(self, job: JobView, history: TelemetryHistory, reason: str, problem: str) -> None:
        if history.set_problem(reason=reason, problem=problem):
            log.info("telemetry", job=job.key.name, namespace=job.key.namespace, state=reason, problem=problem)
            self._queue.add_news(job.key)


class _Taken(NamedTuple):
    """What an answer contained."""

    scraped: bool
    """Whether a scrape has taken place since the answer before."""
    news: bool


def _take(
    history: TelemetryHistory,
    reader: JobReader,
    answer: Vector,
    *,
    workers: Mapping[str, str],
    pools: Mapping[str, str],
    namespace: str,
    latest_s: float,
    recut: bool,
) -> _Taken:
    """Add an answer to a job's history."""
    snapshot = reader.read(answer, workers=workers, namespace=namespace, latest_s=latest_s)
    if history.has_taken(snapshot.times):
        return _Taken(scraped=False, news=False)
    return _Taken(scraped=True, news=history.take(snapshot, snapshot.times, pools=pools, recut=recut))


def _is_read(job: JobView) -> bool:
    """Return whether the job has started and not ended, so that there is telemetry to read.

    Where members are planned from profiles, these are read before the first members.
    """
    return (
        not job.deleting
        and job.status.start_time is not None
        and job.status.completion_time is None
        and (job.status.plan.newest[0] > 0 or needs_profiles(job))
    )
