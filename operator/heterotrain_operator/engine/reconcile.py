"""Workers that take dirty jobs from the queue: look at everything, decide, act. A bad job only delays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from heterotrain_operator.api.conditions import ConditionType
from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.decide.grants.grant import JobGrant
from heterotrain_operator.decide.job import Decision, JobInputs, decide
from heterotrain_operator.decide.lifecycle import Acceptance
from heterotrain_operator.decide.objects.pods import build_pod, template_problem
from heterotrain_operator.engine.act import RETRY_REFUSED_S, Actor, JobMemory
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound, Refused, Throttled, Unavailable
from heterotrain_operator.kube.resources import PODS
from heterotrain_operator.kube.verbs import Kube

LONGEST_RETRY_S = 320.0
"""A template that is refused again and again is tried out twice as late each time, but no later than this."""
PLANNING_PART = 20
"""Deciding shares anew on new telemetry takes at most this part of a processor, however large the job."""
_FORBIDDEN = 403

log = structlog.get_logger()


class Reconciler:
    """Passes over jobs.

    Args:
        telemetry_of: what is known of a job from Prometheus.
        grant_of: what a job may have of nodes that others want, too.
        gather_s: longest time that a ready worker waits for others that start.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: Queue[JobKey],
        actor: Actor,
        metrics: OperatorMetrics,
        *,
        telemetry_of: Callable[[JobView], Telemetry],
        grant_of: Callable[[JobView], JobGrant],
        gather_s: float,
        clock: Callable[[], float],
        wall_clock_s: Callable[[], float],
    ) -> None:
        self._kube = kube
        self._store = store
        self._queue = queue
        self._actor = actor
        self._metrics = metrics
        self._telemetry_of = telemetry_of
        self._grant_of = grant_of
        self._gather_s = gather_s
        self._clock = clock
        self._wall_clock_s = wall_clock_s
        self._memories: dict[JobKey, JobMemory] = {}

    async def work(self) -> None:
        """Handle keys for ever."""
        while True:
            key = await self._queue.get()
            self._metrics.queue.set(len(self._queue))
            started_s = self._clock()
            result = await self._handle(key)
            self._metrics.passes.labels(result=result).inc()
            self._metrics.pass_seconds.observe(self._clock() - started_s)

    def reapply(self) -> None:
        """Forget what was applied, so that the next pass over each job repairs what somebody changed or deleted."""
        for memory in self._memories.values():
            memory.applied.clear()

    async def _handle(self, key: JobKey) -> str:
        """Make one pass and hand the key back; whatever goes wrong stays with this key."""
        try:
            again_s = await self.run_once(key)
        except Conflict:
            # Somebody was faster: look again as soon as the watch has brought what they did.
            self._queue.failed(key)
            return "conflict"
        except Throttled as error:
            self._queue.failed(key, at_least_s=error.retry_after_s)
            return "throttled"
        except KubeError as error:
            delay_s = self._queue.failed(key)
            log.warning(
                "pass failed", job=key.name, namespace=key.namespace, error=str(error), again_in_s=round(delay_s, 1)
            )
            return "failed"
        except Exception:
            delay_s = self._queue.failed(key)
            log.exception("pass failed by a bug", job=key.name, namespace=key.namespace, again_in_s=round(delay_s, 1))
            return "bug"
        self._queue.done(key)
        if again_s is not None:
            self._queue.add_after(key, again_s)
        return "ok"

    async def run_once(self, key: JobKey) -> float | None:
        """Make one pass over a job; return seconds after which to look again.

        Raises:
            KubeError: a call failed.
        """
        job = self._store.jobs.get(key)
        if job is None:
            self._queue.forget(key)
            self._forget(key)
            return None
        memory = self._memories.get(key)
        if memory is None or memory.uid != job.uid:
            self._forget(key)
            memory = self._memories[key] = JobMemory(uid=job.uid)
        acceptance, ask_again_s = await self._acceptance(job, memory)
        decision, replan_again_s = self._decide(job, acceptance, memory)
        self._metrics.of_jobs.show(key, job.uid, decision.status, job.spec)
        if decision.reason and decision.reason != memory.reason:
            log.info("decided", job=key.name, namespace=key.namespace, reason=decision.reason)
            memory.reason = decision.reason
        try:
            again_s = await self._actor.act(job, decision, memory)
        except NotFound:
            if self._store.jobs.get(key) is None or job.deleting:
                return None  # the job went away while we acted
            raise
        if memory.refusals:
            ask_again_s = RETRY_REFUSED_S if ask_again_s is None else min(ask_again_s, RETRY_REFUSED_S)
        return min((each for each in (again_s, ask_again_s, replan_again_s) if each is not None), default=None)

    def _forget(self, key: JobKey) -> None:
        memory = self._memories.pop(key, None)
        if memory is not None:
            self._metrics.of_jobs.show(key, memory.uid, None)

    def _decide(self, job: JobView, acceptance: Acceptance, memory: JobMemory) -> tuple[Decision, float | None]:
        """Decide; return the seconds after which telemetry that had to wait may be looked at, too."""
        started_s = self._clock()
        telemetry = self._telemetry_of(job)
        news = memory.planned != (job.generation, telemetry.sequence)
        due = started_s >= memory.replan_s
        nodes = self._store.nodes.all()
        decision = decide(
            JobInputs(
                job=job,
                pods=self._store.pods.of_job(job.key),
                nodes=nodes,
                used=self._store.used,
                plan=self._store.plans.get(job.key),
                telemetry=telemetry,
                acceptance=acceptance,
                refusal=memory.refusal,
                blocked=memory.blocked,
                keep_plan=started_s < memory.plan_again_s,
                replan=news and due,
                gather_s=self._gather_s,
                now_s=self._wall_clock_s(),
                grant=self._grant_of(job),
            )
        )
        took_s = self._clock() - started_s
        self._metrics.decide_seconds.observe(took_s)
        if news and due:
            memory.planned = (job.generation, telemetry.sequence)
            memory.replan_s = started_s + took_s * PLANNING_PART
        return decision, memory.replan_s - started_s if news and not due else None

    async def _acceptance(self, job: JobView, memory: JobMemory) -> tuple[Acceptance, float | None]:
        """Return what the API server says to the job's pods; asked once for every generation of the spec."""
        if job.spec is None or job.deleting:
            return Acceptance(known=False), None
        now_s = self._clock()
        if memory.accepted_generation == job.generation and (memory.acceptance.ok or now_s < memory.ask_again_s):
            return memory.acceptance, None if memory.acceptance.ok else memory.ask_again_s - now_s
        asked_before_us = not memory.accepted_generation and _accepted_before(job)
        memory.acceptance = Acceptance(known=True) if asked_before_us else await self._try_out(job)
        again = memory.accepted_generation == job.generation
        retry_s = memory.retry_s = min(LONGEST_RETRY_S, 2 * memory.retry_s) if again else RETRY_REFUSED_S
        memory.accepted_generation, memory.ask_again_s = job.generation, now_s + retry_s
        return memory.acceptance, None if memory.acceptance.ok else retry_s

    async def _try_out(self, job: JobView) -> Acceptance:
        assert job.spec is not None  # noqa: S101  # _acceptance asks only then
        if problem := template_problem(job.template, job.spec.worker_pools):
            return Acceptance(known=True, ok=False, reason="InvalidTemplate", message=problem)
        said = await asyncio.gather(*(self._try_pool(job, pool) for pool in job.spec.worker_pools))
        return next((answer for answer in said if answer is not None), Acceptance(known=True))

    async def _try_pool(self, job: JobView, pool: WorkerPool) -> Acceptance | None:
        """Return the refusal of a worker of this pool, ``None`` where there is none."""
        pod = build_pod(job, pool, 0, plan_version="")
        pod["metadata"]["name"] = f"{job.key.name}-try-{pool.name}"[:63].rstrip("-")
        try:
            with suppress(Conflict):
                await self._kube.create(PODS, pod, dry_run=True)
        except Refused as error:
            if "exceeded quota" in str(error):
                return None  # it says nothing about the pod, and may be different when the pod is created
            reason = "PodsForbidden" if error.status_code == _FORBIDDEN else "InvalidTemplate"
            message = f"a worker of pool {pool.name} can't be created: {error}"
            return Acceptance(known=True, ok=False, reason=reason, message=message)
        except Unavailable as error:  # such as an admission webhook that does not answer
            message = f"whether a worker of pool {pool.name} can be created is not known: {error}"
            return Acceptance(known=False, ok=False, reason="NoAnswer", message=message)
        return None


def _accepted_before(job: JobView) -> bool:
    return any(
        c.type == ConditionType.ACCEPTED.value and c.status == "True" and c.observed_generation == job.generation
        for c in job.status.conditions
    )
