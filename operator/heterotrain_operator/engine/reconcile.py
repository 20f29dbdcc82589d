"""Reconcile jobs: take a key from the work queue, read the store, decide, act. A bad job only delays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from heterotrain_operator.api.conditions import ConditionType, find_condition
from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.cluster_state.saved import saved_by
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView, PodView, ValidJob
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.faults import Fault, with_fault
from heterotrain_operator.decide.grant import JobGrant
from heterotrain_operator.decide.inputs import JobInputs
from heterotrain_operator.decide.job import decide
from heterotrain_operator.decide.lifecycle import Acceptance
from heterotrain_operator.decide.objects.common_parts import size_problem
from heterotrain_operator.decide.objects.pods import build_pod, problem_of_templates
from heterotrain_operator.decide.plugins import registry as plugins
from heterotrain_operator.decide.workers.capacity import AdmittedPod, admitted_pod
from heterotrain_operator.engine.act import Actor
from heterotrain_operator.engine.admitted import AdmittedPods, digest_of_any_job
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.layout_planner import LayoutPlanner
from heterotrain_operator.engine.learner import Learner
from heterotrain_operator.engine.memory import FIRST_RETRY_S, JobMemory
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.engine.slot_index import SlotIndex
from heterotrain_operator.engine.speed_keeper import SpeedKeeper
from heterotrain_operator.engine.status_writer import StatusWriter
from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound, Rejected, Throttled, Unavailable
from heterotrain_operator.kube.resources import JOBS, PODS
from heterotrain_operator.kube.verbs import Body, Kube

LONGEST_RETRY_S = 320.0
"""The pause between dry runs of a refused template doubles each time, up to this many seconds."""
FAULT_RETRY_S = 60.0
"""Seconds until a part of a pass that failed by a bug is computed again, if nothing changes before."""
ACCEPTED_S = 300.0
"""Seconds for which the answer to a dry run holds for pods of other jobs that are the same otherwise."""
RELEARN_S = 60.0
"""A new leader looks up what admission makes of pods that an earlier one had checked only after so many seconds."""
RELEARN_EVERY_S = 1.0
"""Seconds between two such jobs: nothing depends on the answer but an estimate."""
_FORBIDDEN = 403

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInputSources:
    """Sources of a decision's inputs besides the store.

    Attributes:
        telemetry_of: a job's telemetry from Prometheus.
        learner: what is learned from it.
        speeds: what earlier jobs have learned.
        layouts: plans layouts.
        grant_of: a job's grant of nodes for which several jobs compete.
        admitted: what admission makes of the pods of each job.
        gather_s: longest time in seconds that a ready worker waits for starting ones.
    """

    telemetry_of: Callable[[JobView], Telemetry]
    learner: Learner
    speeds: SpeedKeeper
    grant_of: Callable[[JobView], JobGrant]
    layouts: LayoutPlanner
    gather_s: float
    admitted: AdmittedPods = field(default_factory=AdmittedPods)


class Reconciler:
    """Reconciles jobs, several at a time but each job only once at a time."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: Queue[JobKey],
        actor: Actor,
        metrics: OperatorMetrics,
        *,
        sources: JobInputSources,
        statuses: StatusWriter,
        more_requests: Callable[[str, Body], Awaitable[Mapping[str, float]]],
        clocks: Clocks,
    ) -> None:
        self._kube = kube
        self._store = store
        self._queue = queue
        self._actor = actor
        self._metrics = metrics
        self._sources = sources
        self._statuses = statuses
        self._clocks = clocks
        self._memories: dict[JobKey, JobMemory] = {}
        self._slots = SlotIndex(store)
        self._more_requests = more_requests
        self._accepted_pods: dict[bytes, tuple[float, AdmittedPod | None]] = {}
        """When the API server accepted a dry run, and what it made of the pod, by its digest without names."""
        self._relearn_due_s = clocks.monotonic() + RELEARN_S
        self._begun_s: dict[JobKey, float] = {}
        """When each pass in progress began."""

    async def work(self, get: Callable[[], Awaitable[JobKey]]) -> None:
        """Reconcile jobs from the queue, which ``get`` takes one from, until cancelled."""
        while True:
            key = await get()
            self._metrics.workqueue_depth.set(len(self._queue))
            started_s = self._clocks.monotonic()
            self._begun_s[key] = started_s
            try:
                result = await self.handle(key)
            finally:
                del self._begun_s[key]
            self._metrics.reconciles.labels(result=result).inc()
            self._metrics.reconcile_seconds.observe(self._clocks.monotonic() - started_s)

    @property
    def longest_pass_s(self) -> float:
        """Seconds for which the oldest pass in progress has run; 0 without one."""
        return self._clocks.monotonic() - min(self._begun_s.values(), default=self._clocks.monotonic())

    def reapply(self) -> None:
        """Forget the applied objects, so that the next pass over each job repairs edited and deleted ones."""
        self._statuses.forget_undeclared()
        for memory in self._memories.values():
            memory.applied.clear()
            memory.taken_indices.clear()

    async def handle(self, key: JobKey) -> str:
        """Reconcile a job, give its key back to the queue and return the result; an error concerns this key alone."""
        try:
            again_s = await self.run_once(key)
        except Conflict as error:
            # The object has changed meanwhile: the watch will deliver the change shortly.
            if (memory := self._memories.get(key)) is not None and memory.conflicted(
                str(error), self._clocks.monotonic()
            ):
                log.warning("writes conflict again and again", job=key.name, namespace=key.namespace, error=str(error))
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
        except Exception as error:  # noqa: BLE001  # reported; it must not end the operator
            await self._report_failed_pass(key, error)
            self._queue.failed(key)
            return "bug"
        self._queue.done(key)
        if again_s is not None:
            self._queue.add_after(key, again_s)
        memory = self._memories.get(key)
        if memory is not None:
            memory.conflicts = 0
            memory.refusals.pop("conflicts", None)
        return "bug" if memory is not None and memory.logged_fault else "ok"

    async def _report_failed_pass(self, key: JobKey, error: Exception) -> None:
        """Log a pass that failed by a bug, and let the job's status report it."""
        job = self._store.jobs.get(key)
        if job is None:
            return
        memory = self._memory_of(job)
        fault = Fault(part="what to do", error=error, instead="the job stays as it is, and the operator tries again")
        self._note_faults(job, (fault,), memory)
        now = rfc3339(self._clocks.wall())
        status = with_fault(job.status, fault.sentence, generation=job.generation, now=now)
        try:
            await self._statuses.write(job, status, memory)
        except Exception as second:  # noqa: BLE001  # it is reported already, and the next pass tries again
            log.warning("status not written", job=key.name, namespace=key.namespace, error=str(second))

    def _note_faults(self, job: JobView, faults: Sequence[Fault], memory: JobMemory) -> None:
        """Count unexpected errors in parts of a pass; log the first one with its traceback whenever it changes."""
        for fault in faults:
            self._metrics.internal_errors.labels(part=fault.part).inc()
        sentence = faults[0].sentence if faults else ""
        if sentence and sentence != memory.logged_fault:
            log.error(
                "pass failed by a bug",
                job=job.key.name,
                namespace=job.key.namespace,
                problem=sentence,
                exc_info=faults[0].error,
            )
        memory.logged_fault = sentence

    async def run_once(self, key: JobKey) -> float | None:
        """Reconcile a job.

        Returns:
            Seconds until the job needs another pass; ``None`` to wait for a change.

        Raises:
            KubeError: a call failed.
        """
        # 1. Find the job, and what earlier passes noted about it.
        job = self._store.jobs.get(key)
        if job is None:
            self._queue.forget(key)
            self._forget(key)
            self._sources.learner.forget(key)
            # The garbage collector has deleted the job's pods, but finalizers may keep some.
            owned = [pod for pod in self._store.pods.of_job(key) if pod.owner_uid]
            await self._actor.edit(plugins.edits(owned, ended=False))
            return None
        memory = self._memory_of(job)
        memory.retry_after_change(job.generation)
        # 2. Let the API server check the job's pods, once for each generation of the spec.
        acceptance, dry_run_s = await self._acceptance(job, memory)
        look_s = await memory.start_problems.look(
            self._kube,
            key,
            self._store.pods.of_job(key),
            may_read=not self._queue.is_urgent(key),
            wall_s=self._clocks.wall(),
            now_s=self._clocks.monotonic(),
        )
        await self._sources.speeds.look_up(job)
        # 3. Decide.
        decision = self._decide(job, acceptance, memory)
        self._note_faults(job, decision.faults, memory)
        # 4. Show the decision.
        self._metrics.job_gauges.show(key, job.uid, decision.status, job.spec)
        if decision.reason and decision.reason != memory.logged_reason:
            log.info("decided", job=key.name, namespace=key.namespace, reason=decision.reason)
            memory.logged_reason = decision.reason
        # 5. Act.
        try:
            again_s = await self._actor.act(job, decision, memory)
        except NotFound:
            if self._store.jobs.get(key) is None or job.deleting or await self._is_gone(job):
                return None  # the job was deleted in the meantime
            raise
        # 6. Choose the time of the next pass; what brings only new numbers comes after all other jobs.
        if memory.numbers_wait_s is not None:
            self._queue.add_routine_after(key, memory.numbers_wait_s)
        due_s = memory.retry_due_s()
        refused_s = None if due_s is None else max(0.0, due_s - self._clocks.monotonic())
        fault_s = FAULT_RETRY_S if decision.faults else None
        waits_s = (again_s, dry_run_s, look_s, refused_s, fault_s)
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def pods_of(self, key: JobKey) -> Sequence[PodView]:
        """Return a job's pods, with the warnings about those that do not start."""
        memory, pods = self._memories.get(key), self._store.pods.of_job(key)
        return pods if memory is None else memory.start_problems.added_to(pods)

    def wrote_numbers(self, key: JobKey, version: str) -> bool:
        """Return whether this state of a job is one that a pass wrote, and nothing but numbers changed by it."""
        memory = self._memories.get(key)
        return memory is not None and memory.numbers_version == version

    def note_gone(self, pod: PodView) -> None:
        """Note what a deleted pod reported at its end: it may be gone before a pass has seen that it ended."""
        job, saved = self._store.jobs.get(pod.key), saved_by(pod)
        if job is None or job.uid != pod.owner_uid or saved is None:
            return
        memory = self._memory_of(job)
        memory.saved = saved if memory.saved is None else max(memory.saved, saved)

    async def _is_gone(self, job: JobView) -> bool:
        """Return whether a job was deleted while its watch was interrupted; then remove it from the store."""
        try:
            await self._kube.get(JOBS, job.key.namespace, job.key.name)
        except NotFound:
            self._store.jobs.discard(job.key)
            self._store.plans.discard(job.key)
            self._forget(job.key)
            return True
        return False

    def _memory_of(self, job: JobView) -> JobMemory:
        memory = self._memories.get(job.key)
        if memory is None or memory.uid != job.uid:
            self._forget(job.key)
            memory = self._memories[job.key] = JobMemory(uid=job.uid)
        return memory

    def _forget(self, key: JobKey) -> None:
        self._sources.admitted.forget(key)
        memory = self._memories.pop(key, None)
        if memory is not None:
            self._metrics.job_gauges.show(key, memory.uid, None)

    def _decide(self, job: JobView, acceptance: Acceptance, memory: JobMemory) -> Decision:
        """Decide from values that are known: nothing here waits, and models were fitted before."""
        started_s = self._clocks.monotonic()
        telemetry = self._sources.telemetry_of(job)
        self._sources.learner.note(job, telemetry)  # the spec may be new
        decision = decide(
            JobInputs(
                job=job,
                pods=memory.start_problems.added_to(self._store.pods.of_job(job.key)),
                nodes=self._store.nodes.all(),
                used=self._store.used,
                plan=self._store.plans.get(job.key),
                telemetry=telemetry,
                model=self._sources.learner.model_of(job),
                acceptance=acceptance,
                refusal=memory.pod_refusal,
                blocked=memory.other_refusal,
                keep_plan=not memory.may_try("plan", now_s=started_s),
                keep_pods=not memory.may_try("pods", now_s=started_s),
                taken_indices=frozenset(memory.taken_indices),
                saved=memory.saved,
                gather_s=self._sources.gather_s,
                now_s=self._clocks.wall(),
                grant=self._sources.grant_of(job),
                slots_of=self._slots.free_slots,
                admitted=self._sources.admitted.of(job),
                cover_of=self._sources.layouts.cover_of(job.key),
            )
        )
        self._metrics.decision_seconds.observe(self._clocks.monotonic() - started_s)
        for question in decision.questions:
            self._sources.layouts.ask(job.key, question)
        return decision

    async def _acceptance(self, job: JobView, memory: JobMemory) -> tuple[Acceptance, float | None]:
        """Return the API server's answer to dry runs of the job's pods, and the seconds until the next dry run."""
        if not isinstance(job, ValidJob) or job.deleting:
            return Acceptance(known=False), None
        now_s = self._clocks.monotonic()
        if memory.accepted_generation == job.generation and (memory.acceptance.ok or now_s < memory.dry_run_due_s):
            if memory.relearns and now_s >= self._relearn_due_s and not self._queue.is_urgent(job.key):
                self._relearn_due_s, memory.relearns = now_s + RELEARN_EVERY_S, False
                await self._dry_run(job)  # for what admission adds: an earlier leader had the job accepted
            return memory.acceptance, None if memory.acceptance.ok else memory.dry_run_due_s - now_s
        persisted = memory.relearns = not memory.accepted_generation and _accepted_before(job)
        memory.acceptance = Acceptance(known=True) if persisted else await self._dry_run(job)
        retried = memory.accepted_generation == job.generation
        pause_s = min(LONGEST_RETRY_S, 2 * memory.dry_run_pause_s) if retried else FIRST_RETRY_S
        memory.accepted_generation = job.generation
        memory.dry_run_pause_s, memory.dry_run_due_s = pause_s, now_s + pause_s
        return memory.acceptance, None if memory.acceptance.ok else pause_s

    async def _dry_run(self, job: ValidJob) -> Acceptance:
        if problem := problem_of_templates(job.template, job.spec, job.patches) or size_problem(job):
            return Acceptance(known=True, ok=False, reason="InvalidTemplate", message=problem)
        pools = job.spec.worker_pools
        answers = await asyncio.gather(*(self._dry_run_of_pool(job, pool) for pool in pools))
        known = {pool.name: each for pool, each in zip(pools, answers, strict=True) if isinstance(each, AdmittedPod)}
        self._sources.admitted.put(job, known)
        return next((each for each in answers if isinstance(each, Acceptance)), Acceptance(known=True))

    async def _dry_run_of_pool(self, job: ValidJob, pool: WorkerPool) -> Acceptance | AdmittedPod | None:
        """Return the API server's refusal of a worker of this pool, or what it makes of it; ``None`` if unknown.

        A pod that differs only by its job from one that was accepted a short while ago needs no request.
        """
        now_s, digest = self._clocks.monotonic(), digest_of_any_job(job, pool)
        accepted_s, admitted = self._accepted_pods.get(digest, (float("-inf"), None))
        if now_s - accepted_s < ACCEPTED_S:
            return admitted
        pod = build_pod(job, pool, 0, plan_version="")
        pod["metadata"]["name"] = f"{job.key.name}-try-{pool.name}"[:63].rstrip("-")
        try:
            with suppress(Conflict):
                body = await self._kube.create(PODS, pod, dry_run=True)
                admitted = admitted_pod(body, await self._more_requests(job.key.namespace, body["spec"]))
        except Rejected as error:
            if "exceeded quota" in str(error):
                return None  # not about the pod, and the quota may have changed when the pod is created
            reason = "PodsForbidden" if error.status_code == _FORBIDDEN else "InvalidTemplate"
            message = f"a worker of pool {pool.name} can't be created: {error}"
            return Acceptance(known=True, ok=False, reason=reason, message=message)
        except Unavailable as error:  # such as an admission webhook that does not answer
            message = f"the API server could not check whether a worker of pool {pool.name} can be created: {error}"
            return Acceptance(known=False, ok=False, reason="DryRunFailed", message=message)
        self._accepted_pods = {key: each for key, each in self._accepted_pods.items() if now_s - each[0] < ACCEPTED_S}
        self._accepted_pods[digest] = (now_s, admitted)
        return admitted


def _accepted_before(job: JobView) -> bool:
    """Return whether the status already records that this generation of the spec was accepted."""
    found = find_condition(job.status.conditions, ConditionType.ACCEPTED)
    return found is not None and found.status == "True" and found.observed_generation == job.generation
