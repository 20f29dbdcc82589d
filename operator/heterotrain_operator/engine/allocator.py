"""One task for the whole cluster: who may have which nodes, decided again whenever something changed, but not all the time.

Deciding may take seconds for hundreds of jobs, so it runs in a thread on values that do not change, and rests in
proportion afterwards. It writes nothing to the API server: each job's own pass carries out what it may have. Whatever
goes wrong here, the last answer stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from heterotrain_core.allocate.propose import KnownRates

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.quantity import pod_requests
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.decide.allocation.allocate import decide_allocation
from heterotrain_operator.decide.allocation.competition import AllocationInput, Competition, competitions, takes_part
from heterotrain_operator.decide.grants.grant import UNLIMITED, JobGrant, why_limited
from heterotrain_operator.decide.grants.persisted import persisted_grant
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.decide.workers.capacity import Shape, shape_of
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue

SETTLE_S = 2.0
"""Least seconds between two decisions: what changes together is decided together."""
REST_FACTOR = 5.0
"""After a decision that took long, it rests this many times as long."""
LOOK_AGAIN_S = 15.0
"""Longest time between two decisions: time alone may show that a pool is out of stock."""
IDLE_FACTOR = 20.0
"""Where nothing changes, a decision that took long is made again only after this many times as long."""
PATIENCE_S = 5.0
"""A new job waits for a decision at most this long, then it takes what fits."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    """What is remembered of a job between decisions; what may not be lost is in the job's status, too."""

    uid: str
    generation: int
    shapes: dict[str, Shape]
    asked_s: float
    grant: JobGrant


class Allocator:
    """Keeps what each job may have.

    Args:
        telemetry_of: what is known of a job from Prometheus.
        clock: monotonic seconds.
        wall_clock_s: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        queue: Queue[JobKey],
        metrics: OperatorMetrics,
        *,
        telemetry_of: Callable[[JobView], Telemetry],
        clock: Callable[[], float],
        wall_clock_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._queue = queue
        self._metrics = metrics
        self._telemetry_of = telemetry_of
        self._clock = clock
        self._wall_clock_s = wall_clock_s
        self._known: dict[JobKey, _Known] = {}
        self._rates = KnownRates()
        self._first_s = float("inf")
        """When the first decision was made: until then nobody takes what another one may have been given before."""
        self._being_decided: frozenset[JobKey] = frozenset()
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def changed(self) -> None:
        """Note that something changed on which decisions rest."""
        self._changed.set()

    def of(self, job: JobView) -> JobGrant:
        """Return what a job may have; a new one is decided about at once."""
        if not takes_part(job):
            return UNLIMITED
        known = self._known.get(job.key)
        if known is None or known.uid != job.uid:
            known = self._known[job.key] = self._look_at(job)
        if known.grant.undecided:
            if self._clock() - max(known.asked_s, self._first_s) >= PATIENCE_S:
                return UNLIMITED
            if job.key not in self._being_decided:
                self._urgent.set()
                self._changed.set()
            self._queue.add_after(job.key, PATIENCE_S)
        return known.grant

    async def run(self) -> None:
        """Decide for ever."""
        while True:
            started_s = self._clock()
            await self.run_once()
            took_s = self._clock() - started_s
            rest_s = max(SETTLE_S, REST_FACTOR * took_s)
            await set_within(self._urgent, rest_s)
            await set_within(self._changed, max(LOOK_AGAIN_S, IDLE_FACTOR * took_s))
            # Even what is urgent comes in bursts: many new jobs are decided about together.
            await asyncio.sleep(max(0.0, REST_FACTOR * took_s - (self._clock() - started_s - took_s)))

    async def run_once(self) -> None:
        """Decide about every job."""
        await self._run_once()
        self._being_decided = frozenset()
        self._first_s = min(self._first_s, self._clock())

    async def _run_once(self) -> None:
        self._changed.clear()
        self._urgent.clear()
        started_s = self._clock()
        seen = self._seen()
        self._being_decided = frozenset(self._known)
        before = {key: known.grant for key, known in self._known.items()}
        nodes = dict(self._store.nodes.all())
        used = self._store.used()
        try:
            found = await asyncio.to_thread(competitions, seen, nodes, used, before.__getitem__)
        except Exception:
            log.exception("allocation failed by a bug: every job keeps what it has")
            self._metrics.allocations.labels(result="bug").inc()
            return
        for competition in found:
            await self._decide(competition)
        self._rates.forget_unused()
        self._metrics.allocation_seconds.observe(self._clock() - started_s)
        self._metrics.limited_jobs.set(sum(known.grant.limits is not None for known in self._known.values()))

    async def _decide(self, competition: Competition) -> None:
        keys = [competitor.job.key for competitor in competition.competitors]
        specs = {competitor.job.key: competitor.spec for competitor in competition.competitors}
        try:
            grants = await asyncio.to_thread(
                decide_allocation, competition, now_s=self._wall_clock_s(), known=self._rates
            )
        except Exception:
            log.exception(
                "allocation failed by a bug: these jobs keep what they have", jobs=["/".join(k) for k in keys]
            )
            self._metrics.allocations.labels(result="bug").inc()
            return
        self._metrics.allocations.labels(result="ok").inc()
        for key, grant in grants.items():
            known = self._known.get(key)
            if known is None:
                continue
            before, known.grant = known.grant, grant
            self._count_moves(specs[key], before, grant)
            if _matters(grant) != _matters(before):
                self._queue.add(key)
            if grant.limits != before.limits and grant.reason:
                log.info("allocated", job=key.name, namespace=key.namespace, reason=grant.reason)

    def _count_moves(self, spec: HeteroTrainJobSpec, before: JobGrant, after: JobGrant) -> None:
        """Count workers that are told to leave, and those that may come."""
        reason = why_limited(spec, after)
        taken = len(after.leave - before.leave)
        given = sum(max(0, n - (before.limits or {}).get(name, 0)) for name, n in (after.limits or {}).items())
        for change, count in (("taken", taken), ("given", given if before.limits is not None else 0)):
            if count:
                self._metrics.moved_workers.labels(change=change, reason=reason).inc(count)

    def _seen(self) -> list[AllocationInput]:
        """Return every job that takes part, and forget the others."""
        jobs = {key: job for key, job in self._store.jobs.all().items() if takes_part(job)}
        self._known = {key: known for key, job in jobs.items() if (known := self._known_now(job)) is not None}
        return [
            AllocationInput(
                job=jobs[key],
                pods=[pod for pod in self._store.pods.of_job(key) if pod.owner_uid == known.uid],
                plan=self._store.plans.get(key),
                telemetry=self._telemetry_of(jobs[key]),
                shapes=known.shapes,
            )
            for key, known in self._known.items()
        ]

    def _known_now(self, job: JobView) -> _Known | None:
        """Return what is known of a job as it is now; ``None`` for one whose pods can't be made: its own pass says why."""
        known = self._known.get(job.key)
        try:
            if known is None or known.uid != job.uid:
                known = self._look_at(job)
            elif known.generation != job.generation:
                known.generation, known.shapes = job.generation, shapes_of(job)
        except Exception:
            log.exception("a job is left out of the allocation by a bug", job=job.key.name, namespace=job.key.namespace)
            return None
        return known

    def _look_at(self, job: JobView) -> _Known:
        return _Known(
            uid=job.uid,
            generation=job.generation,
            shapes=shapes_of(job),
            asked_s=self._clock(),
            grant=persisted_grant(job.status),
        )


def shapes_of(job: JobView) -> dict[str, Shape]:
    """Return by pool what a worker of the job needs."""
    assert job.spec is not None  # noqa: S101  # only jobs that take part are asked about
    pods = {pool.name: build_pod(job, pool, 0, plan_version="") for pool in job.spec.worker_pools}
    return {name: shape_of(pod, pod_requests(pod["spec"])) for name, pod in pods.items()}


def _matters(grant: JobGrant) -> tuple[object, ...]:
    """Return what a job's pass acts on."""
    late = grant.spare_s is not None and grant.spare_s < 0
    return (grant.limits, grant.leave, grant.may_wait, grant.undecided, grant.reason, late)


async def set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, but no longer than this."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
