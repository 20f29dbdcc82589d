"""One pass over one job: from everything that is known about it to everything that has to be done, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.parallelism import PLANNED_MODES
from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import managed_by_us
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import CleanPodPolicy
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.quantity import pod_requests
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobView, PodView, ValidJob
from heterotrain_operator.decide.faults import Fault, Faults
from heterotrain_operator.decide.inputs import DerivedState, JobInputs, derive
from heterotrain_operator.decide.lifecycle import ENDED_STAGES, Life, Stage
from heterotrain_operator.decide.objects.objects import (
    build_disruption_budget,
    build_plan_object,
    build_service,
    plan_size_problem,
    version_text,
)
from heterotrain_operator.decide.objects.pods import build_pod, is_encrypted
from heterotrain_operator.decide.plan.arrangement import Arrangement, arrange, arrangement_of
from heterotrain_operator.decide.plan.membership import MembershipDecision, decide_membership
from heterotrain_operator.decide.plan.plan import next_plan
from heterotrain_operator.decide.plan.shares import Shares, share_out
from heterotrain_operator.decide.plan.stages import LayoutState, plan_members
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.events import JobEvent, events_of
from heterotrain_operator.decide.status.status import status_of
from heterotrain_operator.decide.waits import left_s
from heterotrain_operator.decide.workers.capacity import FreeSlots, admits, free_slots, less_slots, shape_of
from heterotrain_operator.decide.workers.failures import mismatch_delay_s, restart_delay_s
from heterotrain_operator.decide.workers.forced import to_force
from heterotrain_operator.decide.workers.replicas import (
    NO_REPLICAS,
    ReplicaDecision,
    decide_replicas,
    next_indices,
    same_replicas,
)
from heterotrain_operator.decide.workers.state import Worker, WorkerState

MOST_AVOIDED = 16
"""Nodes that a pod excludes by name."""
KEPT_FAILED_PODS = 5
"""So many failed pods are kept for their logs until the job ends; they use no resources once all containers ended."""
SIDECAR_S = 30.0
"""Time for the other containers of a failed worker to end; then the pod is deleted, because it still holds its node."""
MESSENGERS = 2
"""Members whose kubelets deliver a revision at once: one of them may be about to end."""
COOLING_S = 10.0
"""Time before a worker that was killed from outside right after its start is replaced: the cause may persist."""
_QUICK_DEATH_S = 30.0
"""A worker that ends within this time of its creation counts as killed right after its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, in the order of the fields.

    Attributes:
        apply: objects to apply (Service, disruption budget).
        plan: ConfigMap to write: a replacement for its ``resourceVersion`` or, without one, only if there is none yet.
        plan_version: version that the pods in ``touch`` have to name.
        touch: pods whose annotation gets ``plan_version``, so that the kubelet refreshes their mounted plan at once.
        secret: whether ``create`` needs the job's Secret.
        certificate: whether ``create`` needs the Secret with the job's certificate as well.
        create: pods to create.
        status: status to write; ``None`` leaves it as it is.
        remove: pods to delete, only after the status is written, because their ends are counted there.
        force: pods on lost nodes to delete without their kubelets.
        delete_job: whether the job's time to live is over.
        events: Kubernetes events to publish, besides the one about the pods that could be created.
        again_s: seconds after which to decide again although nothing changes; ``None`` for never.
        reason: why, in one sentence; empty when there is nothing to explain.
        faults: parts of the pass that met an unexpected error; the rest of the decision does not depend on them.
    """

    apply: tuple[dict[str, Any], ...] = ()
    plan: dict[str, Any] | None = None
    plan_version: str = ""
    touch: tuple[PodView, ...] = ()
    secret: bool = False
    certificate: bool = False
    create: tuple[dict[str, Any], ...] = ()
    status: HeteroTrainJobStatus | None = None
    remove: tuple[PodView, ...] = ()
    force: tuple[PodView, ...] = ()
    delete_job: bool = False
    events: tuple[JobEvent, ...] = ()
    again_s: float | None = None
    reason: str = ""
    faults: tuple[Fault, ...] = ()


def decide(inputs: JobInputs) -> Decision:
    """Return what to do about a job now. Once that is done, deciding again returns nothing more to do."""
    job = inputs.job
    # 1. Leave alone what is not this operator's to decide.
    if job.deleting:
        return Decision(reason="the job is being deleted")
    if job.spec is not None and not managed_by_us(job.spec):
        return Decision(reason="another controller manages the job")
    # 2. Derive the workers' states, the plan in force, the failures and the stage of the job's life.
    derived = derive(inputs)
    # 3. Only an active job gets workers and plans.
    faults = Faults()
    if isinstance(job, ValidJob) and derived.life.stage is Stage.ACTIVE:
        decision = _decide_active(inputs, derived, job, faults)
    else:
        decision = _decide_inactive(inputs, derived, faults)
    # 4. Pods on lost nodes may be kept by nobody's confirmation, whatever the stage of the job's life.
    force, force_s = to_force(derived.workers, after_s=inputs.force_delete_s, now_s=inputs.now_s)
    again_s = _soonest(decision.again_s, force_s)
    return replace(decision, force=force, again_s=again_s, faults=tuple(faults.found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """The shares of the members (``None`` when not decided), and the plan to write with its ConfigMap, if any.

    ``problem`` says why a plan that was decided can't be written.
    """

    shares: Shares | None = None
    plan: Plan | None = None
    body: dict[str, Any] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ActivePass:
    """What a pass over an active job has decided.

    Attributes:
        membership: members of the plan.
        layout: what is known about their layouts; ``None`` where these are not planned.
        planned: their shares and the plan to write.
        replicas: workers that should exist.
        create: manifests of the pods to create now.
        with_secret: whether they mount the job's Secret.
        delay_s: seconds for which no pod may be created because workers failed or were killed.
    """

    membership: MembershipDecision
    layout: LayoutState | None
    planned: _Planned
    replicas: ReplicaDecision
    create: tuple[dict[str, Any], ...]
    with_secret: bool
    delay_s: float


def _decide_active(inputs: JobInputs, derived: DerivedState, job: ValidJob, faults: Faults) -> Decision:
    """Return what to do about a job that trains or may begin to."""
    spec, workers, in_force, now_s = job.spec, derived.workers, derived.in_force, inputs.now_s

    # 1. Members: who takes part in training.
    membership = decide_membership(spec, workers, in_force.plan, gather_s=inputs.gather_s, now_s=now_s)
    members = _plan_members_safely(inputs, derived, job, membership, faults)
    membership = members.membership

    # 2. Shares of the global batch, and a new generation or revision of the plan if anything differs.
    planned = _plan_safely(inputs, derived, job, members, faults)
    plan = planned.plan or in_force.plan

    # 3. Replicas: how many workers each pool should have.
    def free_slots_of(pool: WorkerPool) -> FreeSlots:
        if (admitted := inputs.admitted.get(pool.name)) is not None:
            shape = admitted.shape
        else:
            manifest = build_pod(job, pool, 0, plan_version="")
            try:
                shape = shape_of(manifest, pod_requests(manifest["spec"]))
            except ValueError:  # the template is refused with a sentence, before any worker is created
                return FreeSlots(slots=0, matching_nodes=0, possible=False)
        if inputs.slots_of is None:
            found = free_slots(shape, inputs.nodes.values(), inputs.used())
        else:
            found = inputs.slots_of(shape)
        avoided = [inputs.nodes[name] for name in blamed.get(pool.name, ())]
        return less_slots(found, shape, avoided, inputs.used()) if avoided else found

    blamed = _blamed_nodes(inputs, derived, job)
    avoid = _nodes_to_avoid(inputs, job, blamed)
    # A pod's affinity can't be changed, so one that still waits and excludes other nodes is made again.
    outdated = [w for w in workers if _waits(w) and set(w.pod.avoids) != set(avoid.get(w.pod.pool, ()))]
    current = [worker for worker in workers if worker not in outdated]
    replicas = faults.guard(
        "the number of workers",
        lambda: decide_replicas(spec, current, grant=inputs.grant, free_slots_of=free_slots_of, now_s=now_s),
        lambda: same_replicas(spec, current),
        instead="the job keeps the workers that it has",
    )
    replicas = replace(replicas, remove=(*replicas.remove, *((w, "other nodes are to be avoided") for w in outdated)))

    # 4. Pods: create what is missing, once the template is accepted, no delay is due and there is a plan to mount.
    delay_s = max(
        restart_delay_s(derived.accounts, now_s=now_s),
        _cooling_s(workers, now_s=now_s),
        mismatch_delay_s(workers, now_s=now_s),
    )
    may_create = inputs.acceptance.known and inputs.acceptance.ok and not delay_s and plan is not None
    creating = replicas.create if may_create and not inputs.keep_pods else ()
    if inputs.refusal:
        creating = creating[:1]  # a single pod shows whether the quota or the policy still refuses
    indices = next_indices(inputs.pods, len(creating), taken=inputs.taken_indices)
    version = version_text(plan) if plan else ""
    # Ranks with a secret and ranks without one refuse each other: a job that an older operator began goes on without.
    with_secret = all(worker.pod.has_secret for worker in workers if not worker.ended)
    create = tuple(
        build_pod(job, pool, index, plan_version=version, avoid=avoid.get(pool.name, ()), with_secret=with_secret)
        for pool, index in zip(creating, indices, strict=True)
    )

    # 5. Status, events and everything to write.
    return _build_active(
        inputs,
        derived,
        job,
        _ActivePass(
            membership=membership,
            layout=members.state,
            planned=planned,
            replicas=replicas,
            create=create,
            with_secret=with_secret,
            delay_s=delay_s,
        ),
        faults,
    )


def _blamed_nodes(inputs: JobInputs, derived: DerivedState, job: ValidJob) -> dict[str, tuple[str, ...]]:
    """Return by pool the nodes that the job avoids because its workers failed there.

    Where none of a pool's nodes were left, the job would wait for nothing: then they are used all the same.
    """
    names = [node.name for node in derived.accounts.blamed if node.avoided(job.spec.failure_policy)]
    present = [inputs.nodes[name] for name in names if name in inputs.nodes]
    if not present:
        return {}
    found = {}
    for pool in job.spec.worker_pools:
        shape = shape_of(build_pod(job, pool, 0, plan_version=""), {})
        those = tuple(node.name for node in present if admits(shape, node))[:MOST_AVOIDED]
        if any(admits(shape, node) for node in inputs.nodes.values() if node.name not in those):
            found[pool.name] = those
    return found


def _nodes_to_avoid(
    inputs: JobInputs, job: ValidJob, blamed: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return by pool the nodes that its workers must not be placed on, at most ``MOST_AVOIDED``.

    These are nodes that are held down and would otherwise take them, and those that the job avoids.
    """
    if not inputs.held:
        return dict(blamed)
    found = {}
    for pool in job.spec.worker_pools:
        shape = shape_of(build_pod(job, pool, 0, plan_version=""), {})
        held = (name for name, node in inputs.held.items() if admits(shape, node))
        names = sorted({*held, *blamed.get(pool.name, ())})
        found[pool.name] = tuple(names[:MOST_AVOIDED])
    return found


def _waits(worker: Worker) -> bool:
    return worker.state is WorkerState.WAITING and not worker.pod.gated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Members:
    """Members of the next plan.

    Attributes:
        membership: workers of the next generation; ``None`` in it keeps the generation in force.
        arrangement: how they form members, where that is planned; otherwise ``None``.
        state: what is known about planned layouts; ``None`` where layouts are not planned.
    """

    membership: MembershipDecision
    arrangement: Arrangement | None = None
    state: LayoutState | None = None


def _plan_members_safely(
    inputs: JobInputs, derived: DerivedState, job: ValidJob, membership: MembershipDecision, faults: Faults
) -> _Members:
    """Return the members; where layouts are planned and that fails, the generation in force stays."""
    if job.spec.parallelism.mode not in PLANNED_MODES:
        return _Members(membership=membership)

    def planned() -> _Members:
        found = plan_members(
            job.spec,
            membership,
            derived.in_force.plan,
            inputs.telemetry,
            cover_of=inputs.cover_of,
            now_s=inputs.now_s,
        )
        return _Members(membership=found.membership, arrangement=found.arrangement, state=found.state)

    return faults.guard(
        "the layouts of members",
        planned,
        lambda: _Members(membership=replace(membership, workers=None)),
        instead="the plan in force stays",
    )


def _plan_safely(
    inputs: JobInputs, derived: DerivedState, job: ValidJob, members: _Members, faults: Faults
) -> _Planned:
    """Return the plan; if measurements can't be used, one without them, because members may have to change."""

    def planned(telemetry: Telemetry, *, replan: bool) -> _Planned:
        usable = replace(inputs, telemetry=telemetry, replan=replan)
        shares = _decide_shares(usable, derived, job, members)
        plan = None if inputs.keep_plan else next_plan(job, job.spec, derived.in_force, members.membership, shares)
        body = _plan_object(inputs, derived, plan)
        if plan is not None and body is not None and (problem := plan_size_problem(plan, body["data"][keys.PLAN_KEY])):
            return _Planned(problem=problem)
        return _Planned(shares=shares, plan=plan, body=body)

    return faults.guard(
        "shares",
        lambda: planned(inputs.telemetry, replan=inputs.replan),
        lambda: faults.guard(
            "a plan", lambda: planned(Telemetry(), replan=False), _Planned, instead="the plan in force stays"
        ),
        instead="training goes on without new measurements",
    )


def _build_active(
    inputs: JobInputs, derived: DerivedState, job: ValidJob, decided: _ActivePass, faults: Faults
) -> Decision:
    """Return the decision as objects, status and events."""
    now_s, replicas, deadline = inputs.now_s, decided.replicas, job.spec.deadline
    new_plan = decided.planned.plan
    plan, newest = new_plan or derived.in_force.plan, derived.in_force.newest
    if plan is not None:
        newest = (max(newest[0], plan.generation), max(newest[1], plan.revision))
    # Workers that this pass removes are not disruptions: from now on their uids count as accounted.
    uids = derived.accounts.accounted | {worker.pod.uid for worker, _ in replicas.remove}
    derived = replace(derived, accounts=replace(derived.accounts, accounted=uids))
    inputs = replace(inputs, blocked=inputs.blocked or decided.planned.problem)
    context = JobContext(
        inputs=inputs,
        derived=derived,
        plan=plan,
        shares=decided.planned.shares,
        replicas=replicas,
        faults=faults,
        layout=decided.layout,
    )
    status = status_of(context, newest=newest)
    planning = decided.layout is not None and decided.layout.holds is None
    budget = build_disruption_budget(job, derived.workers, plan, planning=planning)
    version = version_text(plan) if plan else ""
    remove = (*(worker.pod for worker, _ in replicas.remove), *_unneeded_ended_pods(context))
    return Decision(
        apply=(build_service(job), *([budget] if budget else [])),
        plan=decided.planned.body,
        plan_version=version,
        touch=_pods_to_touch(derived.workers, plan),
        secret=decided.with_secret and bool(decided.create),
        certificate=decided.with_secret and bool(decided.create) and is_encrypted(job.spec),
        create=decided.create,
        status=status,
        remove=tuple(pod for pod in remove if not pod.deleting),
        events=_events(
            context,
            status,
            removed=[f"{worker.pod.name} ({why})" for worker, why in replicas.remove if not worker.pod.deleting],
            new_plan=new_plan,
        ),
        again_s=_soonest(
            decided.membership.again_s,
            replicas.again_s,
            derived.life.again_s,
            decided.delay_s if replicas.create else None,
            *(_sidecar_wait_s(worker, now_s=now_s) for worker in derived.workers),
            max(0.0, deadline.timestamp() - now_s) if deadline is not None else None,
        ),
        reason=new_plan.reason if new_plan else "",
    )


def _events(
    context: JobContext,
    status: HeteroTrainJobStatus,
    *,
    removed: Sequence[str],
    new_plan: Plan | None,
) -> tuple[JobEvent, ...]:
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
            if _is_deleted(worker, life.stage, policy) and not worker.pod.deleting
        ),
        delete_job=expired,
        events=_events(context, status, removed=(), new_plan=None),
        again_s=_soonest(life.again_s, expires_s),
        reason=life.message,
    )


def _decide_shares(inputs: JobInputs, derived: DerivedState, job: ValidJob, members: _Members) -> Shares | None:
    """Return the shares of new members, or new shares of the same ones; ``None`` when there is nothing to decide on."""
    plan, workers = derived.in_force.plan, members.membership.workers
    if workers is not None:
        arrangement = members.arrangement or arrange(workers, job.spec.parallelism.mode)
        return share_out(job.spec, arrangement, inputs.telemetry, plan=plan)
    if plan is None or not plan.members or not inputs.replan:
        return None
    leaving = {worker.pod.uid for worker in derived.workers if worker.ended or worker.state is WorkerState.LEAVING}
    if any(rank.worker_uid in leaving for rank in plan.ranks):
        return None  # the job is finishing, or its members change next: these members need no other shares
    return share_out(job.spec, arrangement_of(plan), inputs.telemetry, plan=plan)


def _is_deleted(worker: Worker, stage: Stage, policy: CleanPodPolicy) -> bool:
    """Return whether a worker's pod is deleted in this stage."""
    if stage is Stage.SUSPENDED:
        return True
    if stage is Stage.FINISHING:
        return worker.state is WorkerState.WAITING  # it would start a training that is over
    if stage in ENDED_STAGES:
        runs = not (worker.pod.phase_ended or worker.pod.all_ended)
        return policy is CleanPodPolicy.ALL or (policy is CleanPodPolicy.RUNNING and runs)
    return False  # refused: running workers stay


def _time_to_live(job: JobView, life: Life, *, now_s: float) -> tuple[float | None, bool]:
    """Return the seconds until an ended job is deleted (``None`` for never), and whether they are over."""
    ttl_s = job.spec.ttl_seconds_after_finished if job.spec is not None else None
    if ttl_s is None or life.stage not in ENDED_STAGES:
        return None, False
    rest_s = (seconds(job.status.completion_time) or now_s) + ttl_s - now_s
    # The status has to report the end first, so that the deletion cannot overtake the report.
    return max(rest_s, 0.0), rest_s <= 0 and job.status.completion_time is not None


def _plan_object(inputs: JobInputs, derived: DerivedState, new_plan: Plan | None) -> dict[str, Any] | None:
    if new_plan is None:
        return None
    return build_plan_object(
        inputs.job,
        new_plan,
        resource_version=inputs.plan.resource_version if inputs.plan else None,
        departed=derived.accounts.departed,
    )


def _pods_to_touch(workers: Sequence[Worker], plan: Plan | None) -> tuple[PodView, ...]:
    """Return running pods whose kubelets have to deliver the plan.

    A new generation goes to all of them, and so does a plan with members that leave: it has to arrive before they end.
    Other revisions go to ``MESSENGERS`` members: they pass the plan on in their next step's vote.
    """
    version = version_text(plan) if plan else ""
    running = [w for w in workers if w.placed or w.state is WorkerState.LEAVING]
    outdated = [w for w in running if w.pod.plan_version != version]
    if plan is None or plan.drain or not plan.members:
        return tuple(w.pod for w in outdated)
    named = {rank.worker_uid for rank in plan.ranks}
    in_step = [
        w
        for w in running
        if w.state is WorkerState.READY and w.pod.uid in named and _generation(w.pod) == plan.generation
    ]
    told = sum(w.pod.plan_version == version for w in in_step)
    others = [w for w in outdated if w not in in_step]
    messengers = [w for w in outdated if w in in_step][: max(0, MESSENGERS - told)]
    return tuple(w.pod for w in (*messengers, *others))


def _generation(pod: PodView) -> int | None:
    """Return the generation of the plan that a pod's kubelet was told to deliver; ``None`` for an unreadable one."""
    text = pod.plan_version.partition(".")[0]
    return int(text) if text.isascii() and text.isdecimal() else None


def _unneeded_ended_pods(context: JobContext) -> tuple[PodView, ...]:
    """Return ended pods that are not needed any more: all disrupted ones, and all failed ones but the newest."""
    counted = [w for w in context.workers if w.ended and w.pod.uid in context.accounts.accounted]
    failed = sorted((w for w in counted if w.state is WorkerState.FAILED), key=lambda worker: worker.pod.created_s)
    old = failed[: max(0, len(failed) - KEPT_FAILED_PODS)]
    held = [w for w in failed if w not in old and _sidecar_wait_s(w, now_s=context.now_s) == 0]
    gone = [
        w
        for w in counted
        if w.state in (WorkerState.LEFT, WorkerState.DISRUPTED) and not _cooling_s([w], now_s=context.now_s)
    ]
    return tuple(worker.pod for worker in (*gone, *old, *held))


def _sidecar_wait_s(worker: Worker, *, now_s: float) -> float | None:
    """Return for how long the other containers of a failed worker may still run; ``None`` when all have ended."""
    if worker.state is not WorkerState.FAILED or worker.pod.phase_ended:
        return None
    end_s = worker.pod.ended.finished_s if worker.pod.ended else worker.pod.created_s
    return min(SIDECAR_S, max(0.0, end_s + SIDECAR_S - now_s))


def _cooling_s(workers: Sequence[Worker], *, now_s: float) -> float:
    """Return for how many more seconds no worker is created because one was killed right after its start."""
    waits = [0.0]
    for worker in workers:
        if worker.state is WorkerState.DISRUPTED and not worker.pod.disruption and not worker.pod.deleting:
            end_s = worker.pod.ended.finished_s if worker.pod.ended else worker.pod.created_s
            if end_s - worker.pod.created_s < _QUICK_DEATH_S:
                waits.append(left_s(end_s, COOLING_S, now_s=now_s))
    return max(waits)


def _soonest(*waits_s: float | None) -> float | None:
    return min((wait for wait in waits_s if wait), default=None)
