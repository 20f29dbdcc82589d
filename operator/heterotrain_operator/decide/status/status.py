"""The status of a job: counts, progress, rows of workers, conditions, and one word with one sentence for people."""

from __future__ import annotations

from decimal import Decimal

from heterotrain_operator.api.conditions import ConditionType, set_conditions
from heterotrain_operator.api.status import (
    MAX_MESSAGE_LENGTH,
    MAX_WORKER_ROWS,
    Condition,
    HeteroTrainJobStatus,
    PlanStatus,
    PoolStatus,
    WorkerStatus,
)
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.decide.grants.persisted import speed_of, stock_of
from heterotrain_operator.decide.lifecycle import ENDED_STAGES, Stage
from heterotrain_operator.decide.status.conditions import aspects_of
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.progress import measured
from heterotrain_operator.decide.status.speed_conditions import batch_reason_of, prediction_of
from heterotrain_operator.decide.workers.state import Worker, WorkerState


def status_of(it: JobContext, *, newest: tuple[int, int]) -> HeteroTrainJobStatus:
    """Return the status after this pass.

    Args:
        it: what is, and what this pass does.
        newest: highest version of the plan that workers may have seen.
    """
    old, now = it.job.status, rfc3339(it.now_s)
    conditions = set_conditions(old.conditions, aspects_of(it), generation=it.job.generation, now=now)
    state, reason = _state(it, conditions)
    stage = it.life.stage
    idle = stage in (Stage.SUSPENDED, Stage.REFUSED)
    start_time = None if idle else old.start_time or now
    names_members = it.plan is not None and bool(it.plan.members)
    training_since = None if idle else old.training_since or (now if names_members and it.runs else None)
    return HeteroTrainJobStatus(
        observed_generation=it.job.generation,
        state=state,
        reason=reason[:MAX_MESSAGE_LENGTH],
        replicas=len(it.alive),
        ready_replicas=it.ready,
        desired_replicas=sum(it.desired.values()),
        ready=f"{it.ready}/{sum(it.desired.values())}",
        pools=_pools(it),
        price_per_hour=_price(it),
        restarts=it.accounts.restarts,
        disruptions=it.accounts.disruptions,
        last_failure=it.accounts.last_failure[:MAX_MESSAGE_LENGTH] if it.accounts.last_failure else None,
        last_failure_time=rfc3339(it.accounts.last_failure_s) if it.accounts.last_failure_s else None,
        accounted_workers=tuple(sorted(it.accounts.accounted)),
        start_time=start_time,
        training_since=training_since,
        completion_time=(old.completion_time or now) if stage in ENDED_STAGES else None,
        plan=_plan(it, newest),
        prediction=prediction_of(it),
        batch_reason=batch_reason_of(it),
        workers=_rows(it),
        conditions=conditions,
        **measured(it),
    )


def _state(it: JobContext, conditions: tuple[Condition, ...]) -> tuple[str, str]:
    """Return the one word and the one sentence."""
    holds = {condition.type: condition.status == "True" for condition in conditions}
    said = {condition.type: condition.message for condition in conditions}
    stage = it.life.stage
    if stage in (Stage.REFUSED, Stage.SUSPENDED, Stage.SUCCEEDED, Stage.FAILED):
        return stage.value, it.life.message
    for word in (ConditionType.RESTARTING, ConditionType.RESIZING, ConditionType.DEGRADED, ConditionType.RUNNING):
        if holds[word]:
            return word.value, said[word]
    if not holds[ConditionType.SCHEDULED]:
        return "Pending", said[ConditionType.SCHEDULED]
    return "Starting", said[ConditionType.RUNNING]


def _plan(it: JobContext, newest: tuple[int, int]) -> PlanStatus:
    plan, applied = it.plan, it.applied
    prediction = plan.prediction if plan else None
    return PlanStatus(
        desired=f"{newest[0]}.{newest[1]}",
        desired_generation=newest[0],
        desired_revision=newest[1],
        applied=f"{applied[0]}.{applied[1]}" if applied else None,
        applied_generation=applied[0] if applied else None,
        applied_revision=applied[1] if applied else None,
        members=len(plan.members) if plan else 0,
        global_batch_size=plan.global_batch_samples if plan else None,
        predicted_step_seconds=_rounded(prediction.step_s) if prediction else None,
        predicted_efficiency=_rounded(prediction.efficiency) if prediction else None,
        efficiency_ceiling=_rounded(prediction.efficiency_ceiling) if prediction else None,
        reason=plan.reason[:MAX_MESSAGE_LENGTH] if plan else "",
    )


def _pools(it: JobContext) -> tuple[PoolStatus, ...]:
    if it.spec is None:
        return ()
    rows = []
    before = {pool.name: pool for pool in it.job.status.pools}
    for pool in it.spec.worker_pools:
        own = [worker for worker in it.alive if worker.pod.pool == pool.name]
        known = before.get(pool.name)
        dry_since, tries = stock_of(it.grant, pool.name)
        rows.append(
            PoolStatus(
                name=pool.name,
                desired=it.desired.get(pool.name, 0),
                replicas=len(own),
                placed=sum(worker.placed for worker in own),
                ready=sum(worker.state is WorkerState.READY for worker in own),
                granted=_granted(it, known, pool.name),
                disruptions=(known.disruptions if known else 0) + it.accounts.lost.get(pool.name, 0),
                speed=speed_of(known, it.plan, pool.name),
                out_of_stock_since=dry_since,
                out_of_stock_tries=tries,
            )
        )
    return tuple(rows)


def _granted(it: JobContext, known: PoolStatus | None, name: str) -> int | None:
    """Return what the allocation grants in a pool; until a new operator has decided, what the one before did."""
    if it.grant.held:
        return known.granted if known is not None else None
    return None if it.grant.limits is None else it.grant.limits.get(name, 0)


def _price(it: JobContext) -> str | None:
    prices = {p.name: Decimal(p.price_per_hour) for p in it.spec.worker_pools if p.price_per_hour} if it.spec else {}
    if not prices:
        return None
    total = sum((prices.get(worker.pod.pool, Decimal(0)) for worker in it.workers if _occupies(worker)), Decimal(0))
    return str(total)


def _occupies(worker: Worker) -> bool:
    return worker.placed or worker.state is WorkerState.LEAVING


def _rows(it: JobContext) -> tuple[WorkerStatus, ...]:
    """Return a row for each worker, the ones that need attention first when there are too many."""
    training = {worker.pod.uid for worker in it.training}
    shares: dict[str, int] = {}
    solo: dict[str, float] = {}
    prediction = it.plan.prediction if it.plan else None
    bindings: dict[str, str] = {}
    for member in it.plan.members if it.plan else ():
        if prediction is not None:
            bindings.setdefault(member.worker_uid, prediction.bindings[member.rank].value)
        shares[member.worker_uid] = shares.get(member.worker_uid, 0) + member.share_samples
        rate = it.telemetry.rates.solo_samples_per_s.get(MemberId(member.worker_uid, member.local_rank))
        if rate is not None:
            solo[member.worker_uid] = solo.get(member.worker_uid, 0.0) + rate
    chosen = sorted(it.workers, key=lambda worker: (worker.state is WorkerState.READY, worker.pod.index))[
        :MAX_WORKER_ROWS
    ]
    return tuple(
        WorkerStatus(
            name=worker.pod.name,
            pool=worker.pod.pool,
            state="Training" if worker.pod.uid in training and worker.placed and it.runs else worker.state.value,
            node=worker.pod.node or None,
            share_samples=shares.get(worker.pod.uid) if worker.pod.uid in training else None,
            binding=bindings.get(worker.pod.uid) if worker.pod.uid in training else None,
            samples_per_second=_rounded(solo.get(worker.pod.uid)) if worker.pod.uid in training else None,
            message=worker.reason[:MAX_MESSAGE_LENGTH] or None,
        )
        for worker in sorted(chosen, key=lambda worker: worker.pod.index)
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
