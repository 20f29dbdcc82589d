"""Carry out a decision in an order that makes a crash harmless at every point.

What pods need comes first, with the plan; then its delivery, new pods, the status, and last the removals. The status
counts the end of a failed worker, so its pod has to stay until the status is written.

A refusal by the API server (missing right, quota, a name in use) does not stop independent steps. The job's memory
keeps it, because the status has to report it, and because the step is tried again only after a pause. Pods are created
in growing batches that end with the first refusal: a full quota costs a few requests, not one for every missing worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog
from heterotrain_core.contract import keys

from heterotrain_operator.cluster_state.parse import parse_plan_object, parse_pod
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobView, PodView
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.objects.objects import build_network_policy, build_secret
from heterotrain_operator.decide.plugins import registry as plugins
from heterotrain_operator.decide.plugins.interface import PodEdit
from heterotrain_operator.decide.status.events import workers_created
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.memory import JobMemory
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.owned import check_owner, controls, has_all, name_in_use, without_label
from heterotrain_operator.engine.publisher import Publisher
from heterotrain_operator.engine.status_writer import StatusWriter
from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound, Rejected
from heterotrain_operator.kube.resources import CONFIG_MAPS, JOBS, PODS, SECRETS, Resource, resource_of
from heterotrain_operator.kube.verbs import Kube

_RELEASED = ""
"""Stands for the digest of an object that was deleted."""
FIRST_BATCH, LARGEST_BATCH = 8, 32
"""Pods that are created at the same time, at first and at most: the number doubles after each batch."""

_Call = Callable[[], Awaitable[None]]

log = structlog.get_logger()


class Actor:
    """Carries out decisions.

    Args:
        statuses: writes statuses.
        network_policy: whether each job gets a NetworkPolicy.
        egress: what its workers may reach besides each other and DNS; ``None`` for everything.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        metrics: OperatorMetrics,
        publisher: Publisher,
        *,
        statuses: StatusWriter,
        clocks: Clocks,
        network_policy: bool = False,
        egress: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._kube = kube
        self._store = store
        self._publisher = publisher
        self._statuses = statuses
        self._metrics = metrics
        self._clocks = clocks
        self._network_policy, self._egress = network_policy, egress

    async def act(self, job: JobView, decision: Decision, memory: JobMemory) -> float | None:
        """Carry out a decision.

        Returns:
            Seconds until the job needs another pass; ``None`` to wait for a change.

        Raises:
            KubeError: a call failed; earlier writes stand, and the next pass continues from there.
        """
        started_s = self._clocks.monotonic()
        memory.numbers_wait_s = None
        created: list[str] = []
        before = {step: refusal.message for step, refusal in memory.refusals.items()}
        # 1. Write what the pods need, all at the same time: the plan, the objects and the secrets need nothing else.
        policy = [build_network_policy(job, self._egress)] if self._network_policy and decision.active else []
        bodies = [*decision.apply, *policy]
        objects = [partial(self._apply, job, body, memory) for body in bodies]
        objects += [partial(self._release, job, body, memory) for body in decision.release]
        plan = [partial(self._write_plan, job, decision.plan)] if decision.plan is not None else []
        made = [partial(self._make_secret, job, memory)] if decision.create else []
        answers = await asyncio.gather(
            self._try("objects", memory, objects),
            self._try("plan", memory, plan) if plan else _nothing_to_do(),
            self._try("secret", memory, made) if made else _nothing_to_do(),
            return_exceptions=True,
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if isinstance(answers[1], BaseException):
            raise answers[1]
        if not answers[1]:
            return 0.0  # the rest assumes this plan (the status names its version): decide again without it
        if not plan and memory.may_try("plan", now_s=started_s):
            memory.refusals.pop("plan", None)
        # 2. Patch the pods so that their kubelets deliver the plan, and create pods, which mount the job's secret.
        try:
            if not failures:
                await self._deliver(job, decision, memory, created, with_secret=answers[2] is True, started_s=started_s)
        except KubeError as error:  # the status has to show what is the case, whatever else fails
            failures.append(error)
        # 3. Update the status; only then the rest.
        memory.numbers_wait_s = await self._statuses.write(job, decision.status, memory)
        if failures:
            raise failures[0]
        if decision.plan is not None or decision.create or decision.remove or decision.touch:
            memory.numbers_version = ""  # the next pass looks at what has been done
        removals = [partial(self._remove, pod) for pod in decision.remove]
        removals += [partial(self._edit, edit) for edit in decision.edits]
        await self._try("removals", memory, removals)
        # 4. Hand Events over, and delete an expired job.
        events = [*([workers_created(created)] if created else []), *decision.events]
        for event in events:
            self._publisher.add(job, event)
        if decision.delete_job:
            await self._kube.delete(JOBS, job.key.namespace, job.key.name, uid=job.uid)
        refused = {step: refusal.message for step, refusal in memory.refusals.items()}
        report_s = self._statuses.interval_s if refused != before else None
        return min((each for each in (report_s, decision.again_s) if each is not None), default=None)

    async def _deliver(
        self,
        job: JobView,
        decision: Decision,
        memory: JobMemory,
        created: list[str],
        *,
        with_secret: bool,
        started_s: float,
    ) -> None:
        """Patch pods for the newest plan, and create pods; a refusal stands until the next attempt."""
        touched = await self._try(
            "touch", memory, [partial(self._touch, pod, decision.plan_version) for pod in decision.touch]
        )
        if touched and decision.plan is not None:
            self._metrics.plan_delivery_seconds.observe(self._clocks.monotonic() - started_s)
        if decision.create and not with_secret:
            pass  # its refusal is in the status
        elif decision.create:
            creations = [partial(self._create, job, pod, memory, created) for pod in decision.create]
            await self._try("pods", memory, creations, first_batch=FIRST_BATCH)
        elif memory.may_try("pods", now_s=started_s) or not decision.active:  # the job wants no pods
            memory.refusals.pop("pods", None)

    async def _try(
        self, step: str, memory: JobMemory, calls: Sequence[_Call], *, first_batch: int | None = None
    ) -> bool:
        """Make the calls of a step, unless it was refused a short while ago; return whether none was refused.

        Args:
            step: name of the step.
            memory: keeps its refusal.
            calls: the calls; without ``first_batch`` all at the same time.
            first_batch: calls that are made first; each further batch is twice as large, and a refusal ends them.

        Raises:
            KubeError: a call failed for another reason; the calls of its batch were made.
        """
        if not memory.may_try(step, now_s=self._clocks.monotonic()):
            return False
        size, start, refusal = first_batch or len(calls), 0, ""
        while start < len(calls) and not refusal:
            answers = await asyncio.gather(*(call() for call in calls[start : start + size]), return_exceptions=True)
            refusal = next((str(answer) for answer in answers if isinstance(answer, Rejected)), "")
            if refusal:
                memory.refuse(step, refusal, now_s=self._clocks.monotonic())
            for answer in answers:
                if answer is not None and not isinstance(answer, Rejected):
                    raise answer
            start, size = start + size, min(2 * size, LARGEST_BATCH)
        if not refusal:
            memory.refusals.pop(step, None)
        return not refusal

    async def _apply(self, job: JobView, body: dict[str, Any], memory: JobMemory) -> None:
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if memory.applied.get(body["kind"]) == digest:
            return
        resource, metadata = resource_of(body), body["metadata"]
        # Applying takes over any object of this name whose values do not conflict, so its owner is read before.
        try:
            found = await self._kube.get(resource, metadata["namespace"], metadata["name"])
        except NotFound:
            await self._apply_new(resource, body)
        else:
            check_owner(job, found, body)
            # A body that has changed since may lack a field that it had.
            if body["kind"] in memory.applied or not has_all(found, body):
                await self._kube.apply(resource, body)  # overwrite edits of the operator's fields
        memory.applied[body["kind"]] = digest

    async def _apply_new(self, resource: Resource, body: dict[str, Any]) -> None:
        """Apply an object that does not exist.

        Raises:
            Rejected: the cluster has none of this kind.
        """
        try:
            await self._kube.apply(resource, body, force=False)
        except NotFound as error:
            if not (step := plugins.step_without(body["kind"])) or "namespaces" in str(error):
                raise
            missing = f"the cluster has no {body['kind']}s of {resource.api_version}: {step}"
            raise Rejected(missing, status_code=404) from None

    async def _release(self, job: JobView, body: dict[str, Any], memory: JobMemory) -> None:
        """Delete an object of the job, once."""
        if memory.applied.get(body["kind"]) == _RELEASED:
            return
        resource, metadata = resource_of(body), body["metadata"]
        with suppress(NotFound, Conflict):
            found = await self._kube.get(resource, metadata["namespace"], metadata["name"])
            if controls(job, found):
                uid = found["metadata"]["uid"]
                await self._kube.delete(resource, metadata["namespace"], metadata["name"], uid=uid)
        memory.applied[body["kind"]] = _RELEASED

    async def _make_secret(self, job: JobView, memory: JobMemory) -> None:
        """Create the job's Secret unless it has one. Its value is never read, written again or logged."""
        if "Secret" in memory.applied:
            return
        body, name = build_secret(job, secrets.token_bytes(keys.SECRET_BYTES)), keys.secret_name(job.key.name)
        try:
            await self._kube.create(SECRETS, body)
        except Conflict:
            check_owner(job, await self._kube.get(SECRETS, job.key.namespace, name), body)
        memory.applied["Secret"] = name

    async def _write_plan(self, job: JobView, body: dict[str, Any]) -> None:
        if "resourceVersion" in body["metadata"]:
            answer = await self._kube.replace(CONFIG_MAPS, body)
        else:
            try:
                answer = await self._kube.create(CONFIG_MAPS, body)
            except Conflict:
                await self._adopt_plan(job, body)
                raise
        if (plan := parse_plan_object(answer)) is not None:
            self._store.plans.put(plan)
        self._metrics.plans.inc()

    async def _adopt_plan(self, job: JobView, body: dict[str, Any]) -> None:
        """Put an existing plan that no watch has delivered into the store, so that the next pass starts from it."""
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        found = await self._kube.get(CONFIG_MAPS, namespace, name)
        check_owner(job, found, body)
        if parse_plan_object(found) is None:  # without its labels, no watch delivers it
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
            return  # it is gone, or another pod has its name; the watch will deliver that
        if (view := parse_pod(answer)) is not None and self._store.pods.get((pod.key.namespace, pod.name)) is not None:
            self._store.pods.put(view)

    async def _create(self, job: JobView, pod: dict[str, Any], memory: JobMemory, created: list[str]) -> None:
        """Create a pod and add its name to ``created``."""
        metadata = pod["metadata"]
        try:
            answer = await self._kube.create(PODS, pod)
        except Conflict:
            found = await self._kube.get(PODS, metadata["namespace"], metadata["name"])
            ours = controls(job, found) and (found["metadata"].get("labels") or {}).get(keys.LABEL_JOB) == job.key.name
            if not ours and "deletionTimestamp" not in found["metadata"]:
                memory.taken_indices.add(int(metadata["labels"][keys.LABEL_WORKER_INDEX]))  # the next one has another
                raise (without_label(pod) if controls(job, found) else name_in_use(pod)) from None
            raise
        created.append(metadata["name"])
        if (view := parse_pod(answer)) is not None:
            self._store.pods.put(view)
            self._metrics.pods_created.inc()

    async def edit(self, edits: Sequence[PodEdit]) -> None:
        """Change pods as plugins need it, of a job that is gone.

        Raises:
            KubeError: a call failed.
        """
        await asyncio.gather(*(self._edit(edit) for edit in edits))

    async def _remove(self, pod: PodView) -> None:
        try:
            await self._kube.delete(PODS, pod.key.namespace, pod.name, uid=pod.uid)
        except (NotFound, Conflict):
            return  # it is already gone

    async def _edit(self, edit: PodEdit) -> None:
        """Change annotations of a pod and remove a finalizer; other finalizers stay."""
        namespace, name = edit.pod.key.namespace, edit.pod.name
        patch: dict[str, Any] = {"uid": edit.pod.uid}
        if edit.annotations:
            patch["annotations"] = dict(edit.annotations)
        with suppress(NotFound, Conflict):  # it is gone, or has changed and comes again
            if edit.finalizer:
                metadata = (await self._kube.get(PODS, namespace, name))["metadata"]
                others = [each for each in metadata.get("finalizers") or () if each != edit.finalizer]
                patch |= {"resourceVersion": metadata["resourceVersion"], "finalizers": others}
            await self._kube.merge(PODS, namespace, name, {"metadata": patch})


async def _nothing_to_do() -> bool:
    return True
