"""One pass over one job: from everything that is known about it to everything that has to be done, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import managed_by_us
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import CleanPodPolicy
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.quantity import pod_requests
from heterotrain_operator.cluster_state.views import JobView, ValidJob
from heterotrain_operator.decide.avoided_nodes import nodes_to_blame
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.ended_pods import cooling_s, is_deleted, sidecar_wait_s, unneeded_ended_pods
from heterotrain_operator.decide.faults import Faults
from heterotrain_operator.decide.inputs import DerivedState, JobInputs, derive
from heterotrain_operator.decide.lifecycle import ENDED_STAGES, Life, LifeStage, asks_for_retry, tried_again
from heterotrain_operator.decide.next_plan import PlannedShares, members_of_next_plan, shares_of_next_plan
from heterotrain_operator.decide.objects.common_parts import PodSources, pod_sources
from heterotrain_operator.decide.objects.objects import (
    build_disruption_budget,
    build_plugin_objects,
    version_text,
)
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.decide.plan.membership import decide_membership
from heterotrain_operator.decide.plan.stages import PlannedMembers
from heterotrain_operator.decide.plan_delivery import pods_to_touch
from heterotrain_operator.decide.plugins import registry as plugins
from heterotrain_operator.decide.renewal import CORRECTED, Renewal, corrected, decide_renewal
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.events import JobEvent, events_of
from heterotrain_operator.decide.status.status import status_of
from heterotrain_operator.decide.workers.capacity import FreeSlots, less_slots, shape_of
from heterotrain_operator.decide.workers.disruptions import row_delay_s
from heterotrain_operator.decide.workers.failures import mismatch_delay_s, restart_delay_s
from heterotrain_operator.decide.workers.replicas import (
    NO_REPLICAS,
    ReplicaDecision,
    decide_replicas,
    next_indices,
    same_replicas,
)
from heterotrain_operator.decide.workers.state import Worker, WorkerState


def decide(inputs: JobInputs) -> Decision:
    """Return what to do about a job now. Once that is done, deciding again returns nothing more to do."""
    job = inputs.job
    # 1. Leave alone what is not this operator's to decide.
    if job.deleting:
        edits = plugins.edits([pod for pod in inputs.pods if pod.owner_uid == job.uid], ended=False)
        return Decision(reason="the job is being deleted", edits=edits)
    if job.spec is not None and not managed_by_us(job.spec):
        return Decision(reason="another controller manages the job")
    if asks_for_retry(job):
        if own := [pod for pod in inputs.pods if pod.owner_uid == job.uid]:
            return Decision(
                remove=tuple(pod for pod in own if not pod.deleting),
                edits=plugins.edits(own, ended=False),
                reason="the job is tried again once the pods of the last try are gone",
            )
        job = tried_again(job)
        inputs = replace(inputs, job=job)
    # 2. Derive the workers' states, the plan in force, the failures and the stage of the job's life.
    derived = derive(inputs)
    # 3. Only an active job gets workers and plans.
    faults = Faults()
    if isinstance(job, ValidJob) and derived.life.stage is LifeStage.ACTIVE:
        decision = _decide_active(inputs, derived, job, faults)
    else:
        decision = _decide_inactive(inputs, derived, faults)
    # 4. Plugins may have to change pods at any stage of the job's life.
    edits = plugins.edits([worker.pod for worker in derived.workers], ended=derived.life.stage in ENDED_STAGES)
    return replace(decision, edits=edits, faults=tuple(faults.found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workers:
    """Which workers an active job should have.

    Attributes:
        replicas: how many of each pool, and those that leave.
        avoid: by pool, nodes that new pods avoid.
        sources: what new pods are made from.
        renewal: workers that are renewed, or wait for it.
        delay_s: seconds for which no pod may be created because workers failed or were killed.
        create: manifests of the pods to create now.
    """

    replicas: ReplicaDecision
    avoid: Mapping[str, tuple[str, ...]]
    sources: PodSources
    renewal: Renewal
    delay_s: float
    create: tuple[dict[str, Any], ...] = ()


def _decide_active(inputs: JobInputs, derived: DerivedState, job: ValidJob, faults: Faults) -> Decision:
    """Return what to do about a job that trains or may begin to."""
    spec, in_force = job.spec, derived.in_force.plan
    # 1. Members: who takes part in training.
    wanted = decide_membership(spec, derived.workers, in_force, gather_s=inputs.gather_s, now_s=inputs.now_s)
    members = members_of_next_plan(inputs, derived, job, wanted, faults)
    # 2. Shares of the global batch, and a new generation or revision of the plan if anything differs.
    planned = shares_of_next_plan(inputs, derived, job, members, faults)
    plan = planned.plan or in_force
    # 3. Replicas: how many workers each pool should have.
    workers = _decide_workers(inputs, derived, job, faults)
    # 4. Pods: create what is missing.
    workers = _with_pods(inputs, derived, job, plan, workers)
    # 5. Status, events and everything to write.
    return _build_active(inputs, derived, job, faults, members=members, planned=planned, workers=workers)


def _decide_workers(inputs: JobInputs, derived: DerivedState, job: ValidJob, faults: Faults) -> _Workers:
    """Return how many workers each pool should have, and who leaves."""
    spec, workers, in_force, now_s = job.spec, derived.workers, derived.in_force.plan, inputs.now_s
    avoid = nodes_to_blame(inputs, derived, job)
    # A pod's affinity can't be changed, so one that still waits and excludes other nodes is made again.
    outdated = [w for w in workers if _waits(w) and set(w.pod.avoids) != set(avoid.get(w.pod.pool, ()))]
    sources, accepted = pod_sources(job, workers), inputs.acceptance.known and inputs.acceptance.ok
    stale = [w for w in corrected(job, workers, sources) if accepted and w not in outdated]
    outdated_uids = {worker.pod.uid for worker in (*outdated, *stale)}
    current = [worker for worker in workers if worker.pod.uid not in outdated_uids]
    free_slots_of = partial(_free_slots, inputs, job, avoid)
    replicas = faults.guard(
        "the number of workers",
        lambda: decide_replicas(spec, current, grant=inputs.grant, free_slots_of=free_slots_of, now_s=now_s),
        lambda: same_replicas(spec, current),
        instead="the job keeps the workers that it has",
    )
    remade = (*((w, "other nodes are to be avoided") for w in outdated), *((w, CORRECTED) for w in stale))
    creating = bool(replicas.create or inputs.refusal) or not accepted
    renewal = decide_renewal(job, current, sources, in_force, creating=creating)
    leaving = {worker.pod.uid for worker, _ in replicas.remove}
    renewed = tuple((worker, why) for worker, why in renewal.remove if worker.pod.uid not in leaving)
    delays_s = (
        restart_delay_s(derived.accounts, now_s=now_s),
        cooling_s(workers, now_s=now_s),
        row_delay_s(derived.accounts.row, now_s),
        mismatch_delay_s(workers, now_s=now_s),
    )
    return _Workers(
        replicas=replace(replicas, remove=(*replicas.remove, *remade, *renewed)),
        avoid=avoid,
        sources=sources,
        renewal=renewal,
        delay_s=max(delays_s),
    )


def _free_slots(inputs: JobInputs, job: ValidJob, blamed: Mapping[str, Collection[str]], pool: WorkerPool) -> FreeSlots:
    """Return how many more workers of a pool fit, without the nodes that are to blame for failures."""
    if (admitted := inputs.admitted.get(pool.name)) is not None:
        shape = admitted.shape
    else:
        manifest = build_pod(job, pool, 0, plan_version="")
        try:
            shape = shape_of(manifest, pod_requests(manifest["spec"]))
        except ValueError:  # the template is refused with a sentence, before any worker is created
            return FreeSlots(slots=0, matching_nodes=0, possible=False)
    avoided = [inputs.nodes[name] for name in blamed.get(pool.name, ())]
    found = inputs.slots_of(shape)
    return less_slots(found, shape, avoided, inputs.used()) if avoided else found


def _with_pods(
    inputs: JobInputs, derived: DerivedState, job: ValidJob, plan: Plan | None, decided: _Workers
) -> _Workers:
    """Return the decision with pods, once the template is accepted, no delay is due and there is a plan to mount."""
    workers, replicas, accepted = derived.workers, decided.replicas, inputs.acceptance.known and inputs.acceptance.ok
    may_create = accepted and not decided.delay_s and plan is not None and not decided.renewal.hold
    creating = replicas.create if may_create and not inputs.keep_pods else ()
    leaving = {worker.pod.name for worker in workers if not worker.alive}
    places = plugins.free_slots(job, [worker.pod for worker in workers], leaving)
    if places is not None and len(replicas.create) > places.free:
        creating = creating[: places.free]
        replicas = replace(replicas, reason="; ".join(filter(None, (replicas.reason, places.reason))))
    if inputs.refusal:
        creating = creating[:1]  # a single pod shows whether the quota or the policy still refuses
    indices = next_indices(inputs.pods, len(creating), taken=inputs.taken_indices)
    create = tuple(
        build_pod(
            job,
            pool,
            index,
            plan_version=version_text(plan) if plan else "",
            avoid=decided.avoid.get(pool.name, ()),
            source=decided.sources.by_pool[pool.name],
            requests=admitted.shape.requests if (admitted := inputs.admitted.get(pool.name)) is not None else {},
        )
        for pool, index in zip(creating, indices, strict=True)
    )
    return replace(decided, replicas=replicas, create=create)


def _waits(worker: Worker) -> bool:
    return worker.state is WorkerState.WAITING and not worker.pod.gated


def _build_active(
    inputs: JobInputs,
    derived: DerivedState,
    job: ValidJob,
    faults: Faults,
    *,
    members: PlannedMembers,
    planned: PlannedShares,
    workers: _Workers,
) -> Decision:
    """Return the decision as objects, status and events."""
    now_s, replicas, deadline = inputs.now_s, workers.replicas, job.spec.deadline
    new_plan = planned.plan
    plan, newest = new_plan or derived.in_force.plan, derived.in_force.newest
    if plan is not None:
        newest = (max(newest[0], plan.generation), max(newest[1], plan.revision))
    # Workers that this pass removes are not disruptions: from now on their uids count as accounted.
    uids = derived.accounts.accounted | {worker.pod.uid for worker, _ in replicas.remove}
    derived = replace(derived, accounts=replace(derived.accounts, accounted=uids))
    inputs = replace(inputs, blocked=inputs.blocked or planned.problem)
    context = JobContext(
        inputs=inputs,
        derived=derived,
        plan=plan,
        shares=planned.shares,
        replicas=replicas,
        faults=faults,
        layout=members.state,
        sources=workers.sources,
        renewal=workers.renewal,
    )
    status = status_of(context, newest=newest)
    planning = members.state is not None and members.state.holds is None
    # Before the first members, an eviction stops no training: a budget would be applied twice for nothing.
    trained = newest[0] > 0
    budget = build_disruption_budget(job, derived.workers, plan, planning=planning) if trained else None
    version = version_text(plan) if plan else ""
    remove = (*(worker.pod for worker, _ in replicas.remove), *unneeded_ended_pods(context))
    return Decision(
        active=True,
        apply=tuple(body for body in (budget, *build_plugin_objects(job)) if body is not None),
        plan=planned.body,
        plan_version=version,
        touch=pods_to_touch(derived.workers, plan, job.spec.runtime),
        create=workers.create,
        status=status,
        remove=tuple(pod for pod in remove if not pod.deleting),
        events=_events(context, status, new_plan),
        again_s=_soonest(
            members.membership.again_s,
            replicas.again_s,
            derived.life.again_s,
            workers.delay_s if replicas.create else None,
            *(sidecar_wait_s(worker, now_s=now_s) for worker in derived.workers),
            max(0.0, deadline.timestamp() - now_s) if deadline is not None else None,
        ),
        reason=new_plan.reason if new_plan else "",
        questions=members.questions,
    )


def _events(context: JobContext, status: HeteroTrainJobStatus, new_plan: Plan | None) -> tuple[JobEvent, ...]:
    leaving = [(worker, why) for worker, why in context.replicas.remove if not worker.pod.deleting]
    removed = [f"{worker.pod.name} ({why})" for worker, why in leaving]
    return context.faults.guard(
        "its events",
        lambda: events_of(context, status, removed=removed, new_plan=new_plan),
        tuple,
        instead="none are published",
    )


def _decide_inactive(inputs: JobInputs, derived: DerivedState, faults: Faults) -> Decision:
    """Return what to do about a job that gets no workers: refused, suspended, finishing or ended."""
    job, life = inputs.job, derived.life
    policy = job.spec.clean_pod_policy if job.spec is not None else CleanPodPolicy.RUNNING
    plan = derived.in_force.plan
    context = JobContext(inputs=inputs, derived=derived, plan=plan, shares=None, replicas=NO_REPLICAS, faults=faults)
    status = status_of(context, newest=derived.in_force.newest)
    expires_s, expired = _time_to_live(job, life, now_s=inputs.now_s)
    return Decision(
        status=status,
        remove=tuple(
            worker.pod
            for worker in derived.workers
            if is_deleted(worker, life.stage, policy) and not worker.pod.deleting
        ),
        release=_released(job, life.stage),
        delete_job=expired,
        events=_events(context, status, None),
        again_s=_soonest(life.again_s, expires_s),
        reason=life.message,
    )


def _released(job: JobView, stage: LifeStage) -> tuple[dict[str, Any], ...]:
    """Return what an inactive job gives back: a group without pods would still count in its queue."""
    if not isinstance(job, ValidJob) or stage not in (LifeStage.SUSPENDED, *ENDED_STAGES):
        return ()
    return build_plugin_objects(job)


def _time_to_live(job: JobView, life: Life, *, now_s: float) -> tuple[float | None, bool]:
    """Return the seconds until an ended job is deleted (``None`` for never), and whether they are over."""
    ttl_s = job.spec.ttl_seconds_after_finished if job.spec is not None else None
    if ttl_s is None or life.stage not in ENDED_STAGES:
        return None, False
    rest_s = (seconds(job.status.completion_time) or now_s) + ttl_s - now_s
    # The status has to report the end first, so that the deletion cannot overtake the report.
    return max(rest_s, 0.0), rest_s <= 0 and job.status.completion_time is not None


def _soonest(*waits_s: float | None) -> float | None:
    return min((wait for wait in waits_s if wait), default=None)
