"""Allocate the cluster's nodes to jobs: one task for all jobs, which decides after changes and rests in between.

A decision may take seconds for hundreds of jobs, so it runs in a thread on immutable values, and the task then rests
in proportion. It writes nothing to the API server: each job's own pass acts on the job's grant. After an error here,
the last grants stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from heterotrain_planner.allocate.rate_cache import RateCache

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.quantity import pod_requests
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView, PodView, ValidJob
from heterotrain_operator.decide.allocation.allocate import decide_allocation
from heterotrain_operator.decide.allocation.competition import AllocationInput, Competition, competitions, takes_part
from heterotrain_operator.decide.allocation.layout_values import LayoutValues
from heterotrain_operator.decide.grant import UNLIMITED, JobGrant, persisted_grant, why_limited
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.decide.workers.capacity import AdmittedPod, Shape, shape_of
from heterotrain_operator.engine.admitted import AdmittedPods
from heterotrain_operator.engine.clocks import BusyTime, Clocks
from heterotrain_operator.engine.learner import Learner
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.engine.responsiveness import Turns
from heterotrain_operator.threads import Threads

SETTLE_S = 2.0
"""Least seconds between two decisions, so that changes that come together are decided together."""
REST_FACTOR = 5.0
"""After a long decision, the task rests this many times as long."""
LONGEST_PAUSE_S = 15.0
"""Longest pause between two decisions: the passage of time alone may show that a pool is out of capacity."""
IDLE_FACTOR = 20.0
"""Without changes, a long decision is repeated only after this many times as long."""
PATIENCE_S = 5.0
"""A new job waits this long for a decision; then it takes all nodes that fit."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Entry:
    """A job between two decisions; the parts that must survive a restart are in the job's status, too.

    Attributes:
        uid: the job's uid, because a new job may take the name of a deleted one.
        generation: of the spec that ``shapes`` come from.
        admitted: what admission makes of the pods, as far as ``shapes`` have it.
        shapes: by pool, the size of a worker.
        added_s: when the job was first considered, on the monotonic clock.
        grant: the job's newest grant.
    """

    uid: str
    generation: int
    admitted: Mapping[str, AdmittedPod]
    shapes: dict[str, Shape]
    added_s: float
    grant: JobGrant


class Allocator:
    """Keeps every job's grant.

    Args:
        telemetry_of: a job's telemetry from Prometheus.
        learner: what is learned from it.
        threads: decide.
        namespace_weights: weights of namespaces; others have weight 1.
        admitted: what admission makes of the pods of each job.
        pods_of: a job's pods, with what the kubelet says about those that do not start; those of the store by default.

    Attributes:
        busy: how long the current decision has gone without progress.
    """

    def __init__(
        self,
        store: Store,
        queue: Queue[JobKey],
        metrics: OperatorMetrics,
        *,
        telemetry_of: Callable[[JobView], Telemetry],
        learner: Learner,
        clocks: Clocks,
        threads: Threads,
        namespace_weights: Mapping[str, float] | None = None,
        admitted: AdmittedPods | None = None,
        pods_of: Callable[[JobKey], Sequence[PodView]] | None = None,
    ) -> None:
        self._store = store
        self._queue = queue
        self._metrics = metrics
        self._telemetry_of = telemetry_of
        self._learner = learner
        self._clocks = clocks
        self._threads = threads
        self._namespace_weights = namespace_weights or {}
        self._admitted = admitted or AdmittedPods()
        self._pods_of = pods_of or store.pods.of_job
        self.busy = BusyTime(clocks.monotonic)
        self._entries: dict[JobKey, _Entry] = {}
        self._rates = RateCache()
        self._layouts = LayoutValues()
        self._first_decision_s = float("inf")
        """When the first decision was made. Before it, no job takes nodes that may have been granted to another one."""
        self._being_decided: frozenset[JobKey] = frozenset()
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def changed(self) -> None:
        """Note a change that may affect decisions."""
        self._changed.set()

    def grant_of(self, job: JobView) -> JobGrant:
        """Return a job's grant; a job without one makes the next decision urgent."""
        if not takes_part(job):
            return UNLIMITED
        entry = self._entries.get(job.key)
        if entry is None or entry.uid != job.uid:
            entry = self._entries[job.key] = self._new_entry(job)
        if entry.grant.undecided:
            if self._clocks.monotonic() - max(entry.added_s, self._first_decision_s) >= PATIENCE_S:
                return UNLIMITED
            if job.key not in self._being_decided:
                self._urgent.set()
                self._changed.set()
            self._queue.add_after(job.key, PATIENCE_S)
        return entry.grant

    async def run(self) -> None:
        """Decide until cancelled."""
        while True:
            started_s = self._clocks.monotonic()
            await self.run_once()
            took_s = self._clocks.monotonic() - started_s
            rest_s = max(SETTLE_S, REST_FACTOR * took_s)
            await wait_at_most(self._urgent, rest_s)
            await wait_at_most(self._changed, max(LONGEST_PAUSE_S, IDLE_FACTOR * took_s))
            # Urgent decisions come in bursts, too: many new jobs are decided about together.
            await asyncio.sleep(max(0.0, REST_FACTOR * took_s - (self._clocks.monotonic() - started_s - took_s)))

    async def run_once(self) -> None:
        """Decide about every job."""
        self.busy.progress()
        try:
            await self._run_once()
        finally:
            self.busy.rest()
        self._being_decided = frozenset()
        self._first_decision_s = min(self._first_decision_s, self._clocks.monotonic())

    async def _run_once(self) -> None:
        self._changed.clear()
        self._urgent.clear()
        started_s = self._clocks.monotonic()
        await self._refresh_entries()
        inputs = self._inputs()
        self._being_decided = frozenset(self._entries)
        before = {key: entry.grant for key, entry in self._entries.items()}
        nodes = dict(self._store.nodes.all())
        used = self._store.used()
        try:
            found = await self._threads.run(competitions, inputs, nodes, used, before.__getitem__, self._leave_out)
        except Exception:
            log.exception("allocation failed by a bug: every job keeps its grant")
            self._count_bug()
            return
        for competition in found:
            await self._decide(competition)
            self.busy.progress()
        self._rates.forget_unused()
        self._layouts.forget_unused()
        self._metrics.allocation_seconds.observe(self._clocks.monotonic() - started_s)
        self._metrics.limited_jobs.set(sum(entry.grant.limits is not None for entry in self._entries.values()))

    def _leave_out(self, key: JobKey, error: Exception) -> None:
        log.error("a job is left out of the allocation by a bug", job=key.name, namespace=key.namespace, exc_info=error)
        self._count_bug()

    def _count_bug(self) -> None:
        self._metrics.allocations.labels(result="bug").inc()
        self._metrics.internal_errors.labels(part="the allocation").inc()

    async def _decide(self, competition: Competition) -> None:
        competitors = {competitor.job.key: competitor for competitor in competition.competitors}
        try:
            grants = await self._threads.run(
                decide_allocation,
                competition,
                now_s=self._clocks.wall(),
                rate_cache=self._rates,
                namespace_weights=self._namespace_weights,
                layout_values=self._layouts,
            )
        except Exception:
            names = ["/".join(key) for key in competitors]
            log.exception("allocation failed by a bug: these jobs keep their grants", jobs=names)
            self._count_bug()
            return
        self._metrics.allocations.labels(result="ok").inc()
        turns = Turns()
        for key, grant in grants.items():
            await turns.give()
            entry = self._entries.get(key)
            if entry is None:
                continue
            before, entry.grant = entry.grant, grant
            self._count_moves(competitors[key].spec, before, grant)
            if _relevant(grant) != _relevant(before):
                self._queue.add(key)
            elif grant.message != before.message:  # other words for the same, often in the grant of every job at once
                self._queue.add_news(key)
            if grant.limits != before.limits and grant.reason:
                log.info("allocated", job=key.name, namespace=key.namespace, reason=grant.message)

    def _count_moves(self, spec: HeteroTrainJobSpec, before: JobGrant, after: JobGrant) -> None:
        """Count workers that have to leave, and new workers that are granted."""
        reason = why_limited(spec, after)
        taken = len(after.leave - before.leave)
        given = sum(max(0, n - (before.limits or {}).get(name, 0)) for name, n in (after.limits or {}).items())
        for change, count in (("taken", taken), ("given", given if before.limits is not None else 0)):
            if count:
                self._metrics.moved_workers.labels(change=change, reason=reason).inc(count)

    async def _refresh_entries(self) -> None:
        """Bring all entries up to date in short pieces; ``_inputs`` then has little to do at once."""
        turns = Turns()
        for job in list(self._store.jobs.all().values()):
            if takes_part(job) and (entry := self._current_entry(job)) is not None:
                self._entries[job.key] = entry
            await turns.give()

    def _inputs(self) -> list[AllocationInput]:
        """Return the inputs of every job that takes part; drop the entries of all others."""
        jobs = {key: job for key, job in self._store.jobs.all().items() if takes_part(job)}
        self._entries = {key: entry for key, job in jobs.items() if (entry := self._current_entry(job)) is not None}
        return [
            AllocationInput(
                job=jobs[key],
                pods=[pod for pod in self._pods_of(key) if pod.owner_uid == entry.uid],
                plan=self._store.plans.get(key),
                telemetry=self._telemetry_of(jobs[key]),
                throughput=self._learner.model_of(jobs[key]).throughput,
                shapes=entry.shapes,
                admitted=entry.admitted,
            )
            for key, entry in self._entries.items()
        ]

    def _current_entry(self, job: ValidJob) -> _Entry | None:
        """Return the entry for a job's current spec; ``None`` without valid pods, which the job's own pass reports."""
        entry = self._entries.get(job.key)
        try:
            if entry is None or entry.uid != job.uid:
                entry = self._new_entry(job)
            elif (entry.generation, entry.admitted) != (job.generation, admitted := self._admitted.of(job)):
                entry.generation, entry.admitted, entry.shapes = job.generation, admitted, shapes_of(job, admitted)
        except Exception:
            log.exception("a job is left out of the allocation by a bug", job=job.key.name, namespace=job.key.namespace)
            return None
        return entry

    def _new_entry(self, job: ValidJob) -> _Entry:
        admitted = self._admitted.of(job)
        return _Entry(
            uid=job.uid,
            generation=job.generation,
            admitted=admitted,
            shapes=shapes_of(job, admitted),
            added_s=self._clocks.monotonic(),
            grant=persisted_grant(job.status),
        )


def shapes_of(job: ValidJob, admitted: Mapping[str, AdmittedPod] | None = None) -> dict[str, Shape]:
    """Return by pool the size of one of the job's workers: as admitted, where that is known."""
    known = admitted or {}
    return {
        pool.name: known[pool.name].shape if pool.name in known else _declared_shape(job, pool)
        for pool in job.spec.worker_pools
    }


def _declared_shape(job: ValidJob, pool: WorkerPool) -> Shape:
    pod = build_pod(job, pool, 0, plan_version="")
    return shape_of(pod, pod_requests(pod["spec"]))


def _relevant(grant: JobGrant) -> tuple[object, ...]:
    """Return the parts of a grant that a job's pass acts on."""
    late = grant.spare_s is not None and grant.spare_s < 0
    return (grant.limits, grant.leave, grant.may_wait, grant.undecided, late)


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, but not longer than ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
