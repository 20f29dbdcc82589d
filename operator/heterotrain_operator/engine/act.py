"""Carries a decision out, in an order in which every prefix is harmless: a crash in between loses nothing.

A refusal of the API server (no right, quota, a name that is taken) stops nothing that can be done without: it is
remembered, because the status has to tell it. What the pods need comes first, then the plan and its delivery, new pods, the status, and only then removals: a failed
worker's end is counted in the status, so its pod has to stay until that is written.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from heterotrain_core.contract import keys

from heterotrain_operator.api.status import HeteroTrainJobStatus, as_body
from heterotrain_operator.cluster_state.parse import parse_job, parse_plan_object, parse_pod, rfc3339
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobView, PodView
from heterotrain_operator.decide.job import Decision
from heterotrain_operator.decide.lifecycle import Acceptance
from heterotrain_operator.decide.status.events import JobEvent
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound, Refused
from heterotrain_operator.kube.events import publish
from heterotrain_operator.kube.resources import BY_KIND, CONFIG_MAPS, JOBS, PODS
from heterotrain_operator.kube.verbs import Kube

# Fields of the status that change with every step; they are written at most every ``status_interval_s``.
_FAST = frozenset(
    {
        "reason", "step", "samples", "loss", "accuracy", "metrics", "samplesPerSecond", "stepSeconds", "efficiency", "prediction", "batchReason", "noiseScaleSamples", "progress",
        "progressPercentage", "estimatedRemainingSeconds", "workers",
    }
)  # fmt: skip

RETRY_REFUSED_S = 20.0
"""A refusal by policy or quota may be lifted without any change of the job: it is asked again after this long."""

log = structlog.get_logger()


@dataclass(slots=True)
class JobMemory:
    """What is remembered of a job between passes; all of it may be lost without harm.

    Attributes:
        uid: the job's, because another one may come under its name.
        acceptance: what the API server says to the job's pods, asked for generation ``accepted_generation`` of the spec
            (0 for never); a refusal is asked again at ``ask_again_s`` on the actor's clock, ``retry_s`` after the last.
        applied: by kind, a hash of what was applied last, so that nothing is applied twice in a row.
        refusals: by step, the API server's answer when it refused something in the last attempt.
        plan_again_s: when a plan that was refused may be written again, on the actor's clock.
        status_s: when the status was written last, on the actor's clock.
        reason: the decision's reason that was logged last.
        planned: generation of the spec and sequence of the telemetry that shares were decided on last.
        replan_s: when they may be decided anew because of telemetry, on the actor's clock.
    """

    uid: str
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(known=False))
    accepted_generation: int = 0
    ask_again_s: float = 0.0
    retry_s: float = 0.0
    applied: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    plan_again_s: float = float("-inf")
    status_s: float = float("-inf")
    reason: str = ""
    planned: tuple[int, int] = (0, 0)
    replan_s: float = float("-inf")

    @property
    def refusal(self) -> str:
        """The answer when a pod was refused; empty when the last creation went well."""
        return self.refusals.get("pods", "")

    @property
    def blocked(self) -> str:
        """The answer when anything else was refused; empty when all went well."""
        return next((said for step, said in self.refusals.items() if step != "pods"), "")


class Actor:
    """Carries decisions out.

    Args:
        clock: monotonic seconds.
        wall_clock_s: seconds since the epoch.
        status_interval_s: least seconds between two status writes that only bring new numbers.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        metrics: OperatorMetrics,
        *,
        clock: Callable[[], float],
        wall_clock_s: Callable[[], float],
        status_interval_s: float,
    ) -> None:
        self._kube = kube
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._wall_clock_s = wall_clock_s
        self._status_interval_s = status_interval_s

    async def act(self, job: JobView, decision: Decision, memory: JobMemory) -> float | None:
        """Carry a decision out; return seconds after which to look again, ``None`` for only when something changes.

        Raises:
            KubeError: a call failed; what was done before stands, and the next pass goes on from there.
        """
        started_s, before = self._clock(), dict(memory.refusals)
        await self._try("objects", memory, *(self._apply(job, body, memory) for body in decision.apply))
        if decision.plan is not None:
            if not await self._try("plan", memory, self._write_plan(job, decision.plan)):
                # All else rests on it, its number in the status above all: the next pass decides without a new plan.
                memory.plan_again_s = self._clock() + RETRY_REFUSED_S
                return 0.0
        elif self._clock() >= memory.plan_again_s:
            memory.refusals.pop("plan", None)
        touched = await self._try("touch", memory, *(self._touch(pod, decision.plan_version) for pod in decision.touch))
        if touched and decision.plan is not None:
            self._metrics.plan_delivery_seconds.observe(self._clock() - started_s)
        if decision.create:  # a refusal stands until another creation is tried
            await self._try("pods", memory, *(self._create(job, pod) for pod in decision.create))
        elif not decision.apply:  # a job at rest wants none
            memory.refusals.pop("pods", None)
        wait_s = await self._write_status(job, decision.status, memory)
        await self._try("removals", memory, *(self._remove(pod) for pod in decision.remove))
        await self._publish(job, decision.events)
        if decision.delete_job:
            await self._kube.delete(JOBS, job.key.namespace, job.key.name, uid=job.uid)
        told_s = self._status_interval_s if memory.refusals != before else None
        return min((each for each in (wait_s, told_s, decision.again_s) if each is not None), default=None)

    async def _try(self, step: str, memory: JobMemory, *calls: Awaitable[None]) -> bool:
        """Make the calls of a step; tell whether none was refused.

        Raises:
            KubeError: one failed otherwise; all were made.
        """
        answers = await asyncio.gather(*calls, return_exceptions=True)
        memory.refusals.pop(step, None)
        other: BaseException | None = None
        for answer in answers:
            if isinstance(answer, Refused):
                memory.refusals[step] = str(answer)
            elif answer is not None:
                other = answer
        if other is not None:
            raise other
        return step not in memory.refusals

    async def _apply(self, job: JobView, body: dict[str, Any], memory: JobMemory) -> None:
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if memory.applied.get(body["kind"]) == digest:
            return
        resource, metadata = BY_KIND[body["kind"]], body["metadata"]
        try:
            await self._kube.apply(resource, body, force=False)
        except Conflict:
            found = await self._kube.get(resource, metadata["namespace"], metadata["name"])
            if not _controls(job, found):
                raise _taken(body) from None
            await self._kube.apply(resource, body)  # somebody has edited what is ours
        memory.applied[body["kind"]] = digest

    async def _write_plan(self, job: JobView, body: dict[str, Any]) -> None:
        if "resourceVersion" in body["metadata"]:
            answer = await self._kube.replace(CONFIG_MAPS, body)
        else:
            try:
                answer = await self._kube.create(CONFIG_MAPS, body)
            except Conflict:
                await self._look_at_plan(job, body)
                raise
        if (plan := parse_plan_object(answer)) is not None:
            self._store.plans.put(plan)
        self._metrics.plans.inc()

    async def _look_at_plan(self, job: JobView, body: dict[str, Any]) -> None:
        """Take a plan that the watch has not brought into the store, so that the next pass begins with it.

        Raises:
            Refused: the ConfigMap is another one's.
        """
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        found = await self._kube.get(CONFIG_MAPS, namespace, name)
        if not _controls(job, found):
            raise _taken(body)
        if parse_plan_object(found) is None:  # without its labels no watch ever brings it
            found = await self._kube.merge(
                CONFIG_MAPS, namespace, name, {"metadata": {"labels": body["metadata"]["labels"]}}
            )
        if (plan := parse_plan_object(found)) is not None:
            self._store.plans.put(plan)

    async def _touch(self, pod: PodView, version: str) -> None:
        patch = {"metadata": {"uid": pod.uid, "annotations": {keys.ANNOTATION_PLAN: version}}}
        try:
            answer = await self._kube.merge(PODS, pod.key.namespace, pod.name, patch)
        except (NotFound, Conflict):
            return  # it is gone, or another pod took its name; the watch will tell
        if (view := parse_pod(answer)) is not None and self._store.pods.get((pod.key.namespace, pod.name)) is not None:
            self._store.pods.put(view)

    async def _create(self, job: JobView, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        try:
            answer = await self._kube.create(PODS, pod)
        except Conflict:
            found = await self._kube.get(PODS, metadata["namespace"], metadata["name"])
            if not _controls(job, found) and "deletionTimestamp" not in found["metadata"]:
                raise _taken(pod) from None
            raise
        if (view := parse_pod(answer)) is not None:
            self._store.pods.put(view)
            self._metrics.pods_created.inc()

    async def _write_status(self, job: JobView, status: HeteroTrainJobStatus | None, memory: JobMemory) -> float | None:
        """Write the status if it differs; return seconds after which to write numbers that had to wait."""
        if status is None:
            return None
        wanted = as_body(status)
        changed = {name for name in {*wanted, *job.status_body} if wanted.get(name) != job.status_body.get(name)}
        if not changed:
            return None
        if _without_messages(wanted) == _without_messages(job.status_body):
            changed.discard("conditions")  # the same is said with newer numbers
        left_s = memory.status_s + self._status_interval_s - self._clock()
        if changed <= _FAST and left_s > 0:
            return left_s
        body = {
            "apiVersion": JOBS.api_version,
            "kind": keys.KIND,
            # Only over what was read: a job that was deleted and made again must not inherit the old one's end. (The API
            # server does not compare the uid when a status is applied.)
            "metadata": {
                "name": job.key.name,
                "namespace": job.key.namespace,
                "uid": job.uid,
                "resourceVersion": job.resource_version,
            },
            "status": wanted,
        }
        answer = await self._kube.apply(JOBS, body, subresource="status")
        memory.status_s = self._clock()
        self._metrics.failures.inc(max(0, status.restarts - job.status.restarts))
        self._metrics.disruptions.inc(max(0, status.disruptions - job.status.disruptions))
        if self._store.jobs.get(job.key) is not None:
            self._store.jobs.put(parse_job(answer))
        return None

    async def _remove(self, pod: PodView) -> None:
        try:
            await self._kube.delete(PODS, pod.key.namespace, pod.name, uid=pod.uid)
        except (NotFound, Conflict):
            return  # it is gone already

    async def _publish(self, job: JobView, events: tuple[JobEvent, ...]) -> None:
        await asyncio.gather(*(self._tell(job, event) for event in events))

    async def _tell(self, job: JobView, event: JobEvent) -> None:
        """Publish an Event; one that does not get through is only logged, because nothing depends on it."""
        try:
            await publish(
                self._kube,
                namespace=job.key.namespace,
                name=job.key.name,
                uid=job.uid,
                warning=event.warning,
                reason=event.reason,
                message=event.message,
                now=rfc3339(self._wall_clock_s()),
            )
        except KubeError as error:
            log.warning("event not published", job=job.key.name, namespace=job.key.namespace, error=str(error))


def _controls(job: JobView, body: Mapping[str, Any]) -> bool:
    """Tell whether an object is the job's."""
    owners = body["metadata"].get("ownerReferences") or ()
    return any(each["uid"] == job.uid and each.get("controller") for each in owners)


def _taken(body: Mapping[str, Any]) -> Refused:
    kind, name = body["kind"], body["metadata"]["name"]
    return Refused(
        f"a {kind} named {name} is there already and does not belong to this job: delete or rename it, or give the job "
        "another name",
        status_code=409,
    )


def _without_messages(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions without what they say to people."""
    return [{key: value for key, value in each.items() if key != "message"} for each in status.get("conditions", ())]
