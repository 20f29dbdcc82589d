"""One pass over one job: from everything that is known to everything that has to be done, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import managed_by_us
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import CleanPodPolicy, HeteroTrainJobSpec
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.quantity import pod_requests
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobView, NodeView, PlanObject, PodView
from heterotrain_operator.decide.grants.grant import UNLIMITED, JobGrant
from heterotrain_operator.decide.lifecycle import ENDED_STAGES, Acceptance, Life, Stage, decide_life
from heterotrain_operator.decide.objects.objects import (
    build_disruption_budget,
    build_plan_object,
    build_service,
    version_text,
)
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.decide.plan.membership import MembershipDecision, decide_membership
from heterotrain_operator.decide.plan.plan import PlanInForce, next_plan, ranks_of, read_plan
from heterotrain_operator.decide.plan.shares import Shares, share_out
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.events import JobEvent, events_of
from heterotrain_operator.decide.status.status import status_of
from heterotrain_operator.decide.workers.capacity import FreeSlots, free_slots, shape_of
from heterotrain_operator.decide.workers.failures import Accounts, account, restart_delay_s
from heterotrain_operator.decide.workers.replicas import ReplicaDecision, decide_replicas, next_indices
from heterotrain_operator.decide.workers.state import Worker, WorkerState, worker_states

KEPT_FAILED_PODS = 5
"""Failed pods that are kept for their logs until the job ends; a failed pod takes no room."""
COOLING_S = 10.0
"""A worker that died at once from outside is not replaced before this long: whatever killed it may go on killing."""
_QUICK_DEATH_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInputs:
    """Everything that a pass over one job looks at.

    Attributes:
        pods: all that bear the job's labels.
        nodes: by name, all nodes of the cluster.
        used: by node, the sum of what running pods request, those of others included.
        acceptance: what the API server says to the job's pods in a dry run.
        refusal: the API server's answer when it refused to create a pod in the pass before; empty when it did not.
        blocked: its answer when it refused anything else; empty when it did not.
        keep_plan: whether no plan is to be written, because one was just refused.
        replan: whether telemetry holds anything that the plan in force does not rest on yet; what is asked for anew
            (another member) is shared out in any case.
        gather_s: longest time that a ready worker waits for others that start.
        grant: what the job may have of nodes that others want, too.
    """

    job: JobView
    pods: Sequence[PodView]
    nodes: Mapping[str, NodeView]
    used: Callable[[], Mapping[str, Mapping[str, float]]]
    plan: PlanObject | None
    telemetry: Telemetry
    acceptance: Acceptance
    refusal: str
    blocked: str
    replan: bool
    gather_s: float
    now_s: float
    grant: JobGrant = UNLIMITED
    keep_plan: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, in the order of the fields.

    Attributes:
        apply: objects to apply (Service, budget).
        plan: ConfigMap to write, by its ``resourceVersion`` or, without one, only if there is none.
        touch: pods whose annotation has to name ``plan_version``, so that the kubelet refreshes their plan at once.
        create: pods to create.
        status: status to write; ``None`` leaves it alone.
        remove: pods to delete; only after the status is written, because their end is counted there.
        delete_job: whether the job's time to live is over.
        events: Events to publish.
        again_s: seconds after which to decide again although nothing changes; ``None`` for never.
    """

    apply: tuple[dict[str, Any], ...] = ()
    plan: dict[str, Any] | None = None
    plan_version: str = ""
    touch: tuple[PodView, ...] = ()
    create: tuple[dict[str, Any], ...] = ()
    status: HeteroTrainJobStatus | None = None
    remove: tuple[PodView, ...] = ()
    delete_job: bool = False
    events: tuple[JobEvent, ...] = ()
    again_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derived:
    """What a pass has found out, before it decides what to do about it."""

    inputs: JobInputs
    workers: tuple[Worker, ...]
    force: PlanInForce
    accounts: Accounts
    life: Life


def decide(inputs: JobInputs) -> Decision:
    """Return what to do about a job now. Acting on it and deciding again gives nothing more to do."""
    job, now_s = inputs.job, inputs.now_s
    if job.deleting or (job.spec is not None and not managed_by_us(job.spec)):
        return Decision(reason="the job is being deleted" if job.deleting else "another controller manages the job")
    # Pods that only bear our labels (copied, or orphaned by a job of the same name) are nobody that we decide about.
    workers = worker_states([pod for pod in inputs.pods if pod.owner_uid == job.uid], inputs.nodes)
    force = read_plan(job, inputs.plan)
    accounts = account(job.status, workers, force.plan, counting=_counting(job, workers), now_s=now_s)
    life = decide_life(job, workers, accounts, inputs.acceptance, now_s=now_s)
    derived = _Derived(inputs=inputs, workers=workers, force=force, accounts=accounts, life=life)
    if job.spec is None or life.stage is not Stage.ACTIVE:
        return _decide_inactive(derived)
    return _decide_active(derived, job.spec)


def _counting(job: JobView, workers: Sequence[Worker]) -> bool:
    """Tell whether workers that end now say something about the job, rather than being told to go by it."""
    ended = any(
        c.type in (Stage.SUCCEEDED.value, Stage.FAILED.value) and c.status == "True" for c in job.status.conditions
    )
    suspended = job.spec is None or job.spec.suspend
    return not (ended or suspended or any(worker.state is WorkerState.FINISHED for worker in workers))


def _decide_active(derived: _Derived, spec: HeteroTrainJobSpec) -> Decision:
    inputs, workers, force, accounts, life = (
        derived.inputs,
        derived.workers,
        derived.force,
        derived.accounts,
        derived.life,
    )
    job, now_s = inputs.job, inputs.now_s
    membership = decide_membership(spec, workers, force.plan, gather_s=inputs.gather_s, now_s=now_s)
    shares = _shares(spec, membership, workers, force.plan, inputs)
    written = None if inputs.keep_plan else next_plan(job, spec, force, membership, shares)
    plan = written or force.plan
    newest = (max(force.newest[0], plan.generation), max(force.newest[1], plan.revision)) if plan else force.newest

    def free_slots_of(pool: WorkerPool) -> FreeSlots:
        manifest = build_pod(job, pool, 0, plan_version="")
        return free_slots(shape_of(manifest, pod_requests(manifest["spec"])), inputs.nodes.values(), inputs.used())

    replicas = decide_replicas(spec, workers, grant=inputs.grant, free_slots_of=free_slots_of, now_s=now_s)
    delay_s = max(restart_delay_s(accounts, now_s=now_s), _cooling_s(workers, now_s=now_s))
    may_create = inputs.acceptance.known and inputs.acceptance.ok and not delay_s and plan is not None  # pods mount it
    creating = replicas.create if may_create else ()
    version = version_text(plan) if plan else ""
    indices = next_indices(inputs.pods, len(creating))
    create = tuple(build_pod(job, pool, i, plan_version=version) for pool, i in zip(creating, indices, strict=True))
    # Workers that this pass removes are no disruption: their uids count as accounted from now on.
    uids = accounts.accounted | {worker.pod.uid for worker, _ in replicas.remove}
    accounts = replace(accounts, accounted=uids)
    context = _context_of(derived, accounts, plan, replicas, shares)
    status = status_of(context, newest=newest)
    budget = build_disruption_budget(job, workers)
    remove = (*(worker.pod for worker, _ in replicas.remove), *_unneeded_ended_pods(workers, accounts, now_s=now_s))
    return Decision(
        apply=(build_service(job), *([budget] if budget else [])),
        plan=_plan_object(inputs, written),
        plan_version=version,
        touch=_pods_to_touch(workers, version),
        create=create,
        status=status,
        remove=tuple(pod for pod in remove if not pod.deleting),
        events=events_of(
            context,
            status,
            created=[pod["metadata"]["name"] for pod in create],
            removed=[f"{worker.pod.name} ({why})" for worker, why in replicas.remove if not worker.pod.deleting],
            new_plan=written,
        ),
        again_s=_soonest(
            membership.again_s,
            replicas.again_s,
            life.again_s,
            delay_s if replicas.create else None,
            max(0.0, spec.deadline.timestamp() - now_s) if spec.deadline is not None else None,
        ),
        reason=written.reason if written else "",
    )


def _decide_inactive(derived: _Derived) -> Decision:
    """Return what to do about a job that no worker should be created for."""
    inputs, workers, force, accounts, life = (
        derived.inputs,
        derived.workers,
        derived.force,
        derived.accounts,
        derived.life,
    )
    job, spec = inputs.job, inputs.job.spec
    policy = spec.clean_pod_policy if spec is not None else CleanPodPolicy.RUNNING
    none = ReplicaDecision(create=(), remove=(), desired={}, reason="", again_s=None)
    context = _context_of(derived, accounts, force.plan, none, None)
    status = status_of(context, newest=force.newest)
    going = tuple(
        worker.pod for worker in workers if _is_deleted(worker, life.stage, policy) and not worker.pod.deleting
    )
    expires_s, expired = _time_to_live(job, life, now_s=inputs.now_s)
    return Decision(
        status=status,
        remove=going,
        delete_job=expired,
        events=events_of(context, status, created=(), removed=(), new_plan=None),
        again_s=_soonest(life.again_s, expires_s),
        reason=life.message,
    )


def _is_deleted(worker: Worker, stage: Stage, policy: CleanPodPolicy) -> bool:
    """Tell whether a pod is deleted in this stage."""
    if stage is Stage.SUSPENDED:
        return True
    if stage is Stage.FINISHING:
        return worker.state is WorkerState.WAITING  # it would start a training that is over
    if stage in ENDED_STAGES:
        return policy is CleanPodPolicy.ALL or (policy is CleanPodPolicy.RUNNING and not worker.pod.phase_ended)
    return False  # refused: what runs already is left alone


def _time_to_live(job: JobView, life: Life, *, now_s: float) -> tuple[float | None, bool]:
    ttl_s = job.spec.ttl_seconds_after_finished if job.spec is not None else None
    if ttl_s is None or life.stage not in ENDED_STAGES:
        return None, False
    left_s = (seconds(job.status.completion_time) or now_s) + ttl_s - now_s
    # The end has to be in the status first: what deletes the job must not race with what reports it.
    return max(left_s, 0.0), left_s <= 0 and job.status.completion_time is not None


def _context_of(
    derived: _Derived, accounts: Accounts, plan: Plan | None, replicas: ReplicaDecision, shares: Shares | None
) -> JobContext:
    inputs = derived.inputs
    return JobContext(
        job=inputs.job,
        spec=inputs.job.spec,
        workers=derived.workers,
        accounts=accounts,
        acceptance=inputs.acceptance,
        life=derived.life,
        plan=plan,
        shares=shares,
        desired=replicas.desired,
        shortage=replicas.reason,
        refusal=inputs.refusal or ("" if inputs.acceptance.ok else inputs.acceptance.message),
        blocked=inputs.blocked,
        grant=inputs.grant,
        telemetry=inputs.telemetry,
        now_s=inputs.now_s,
    )


def _shares(
    spec: HeteroTrainJobSpec,
    membership: MembershipDecision,
    workers: Sequence[Worker],
    plan: Plan | None,
    inputs: JobInputs,
) -> Shares | None:
    if membership.workers is not None:
        return share_out(spec, ranks_of(membership.workers), inputs.telemetry, plan=plan)
    if plan is None or not plan.members or not inputs.replan:
        return None
    going = {worker.pod.uid for worker in workers if worker.ended or worker.state is WorkerState.LEAVING}
    if any(member.worker_uid in going for member in plan.members):
        return None  # the job is finishing, or its membership changes next: shares among these members are moot
    return share_out(spec, plan.members, inputs.telemetry, plan=plan)


def _plan_object(inputs: JobInputs, written: Plan | None) -> dict[str, Any] | None:
    if written is None:
        return None
    return build_plan_object(
        inputs.job, written, resource_version=inputs.plan.resource_version if inputs.plan else None
    )


def _pods_to_touch(workers: Sequence[Worker], version: str) -> tuple[PodView, ...]:
    """Return pods that may still hold an older plan."""
    return tuple(
        w.pod for w in workers if (w.placed or w.state is WorkerState.LEAVING) and w.pod.plan_version != version
    )


def _unneeded_ended_pods(workers: Sequence[Worker], accounts: Accounts, *, now_s: float) -> tuple[PodView, ...]:
    """Return ended pods that nobody needs any more: all that were disrupted, and all but the newest that failed."""
    counted = [worker for worker in workers if worker.ended and worker.pod.uid in accounts.accounted]
    failed = sorted((w for w in counted if w.state is WorkerState.FAILED), key=lambda worker: worker.pod.created_s)
    old = failed[: max(0, len(failed) - KEPT_FAILED_PODS)]
    gone = [
        w for w in counted if w.state in (WorkerState.LEFT, WorkerState.DISRUPTED) and not _cooling_s([w], now_s=now_s)
    ]
    return tuple(worker.pod for worker in (*gone, *old))


def _cooling_s(workers: Sequence[Worker], *, now_s: float) -> float:
    """Return for how many more seconds no worker is created because one died at once."""
    may_wait = [0.0]
    for worker in workers:
        if worker.state is WorkerState.DISRUPTED and not worker.pod.disruption and not worker.pod.deleting:
            end_s = worker.pod.ended.finished_s if worker.pod.ended else worker.pod.created_s
            if end_s - worker.pod.created_s < _QUICK_DEATH_S:
                may_wait.append(end_s + COOLING_S - now_s)
    return max(may_wait)


def _soonest(*waits_s: float | None) -> float | None:
    return min((wait for wait in waits_s if wait), default=None)
