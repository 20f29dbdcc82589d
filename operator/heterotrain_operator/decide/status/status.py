"""The status of a job: counts, progress, worker rows, conditions, and its state as one word with one sentence."""

from __future__ import annotations

import math
from functools import partial

from heterotrain_core.contract.choices import Runtime

from heterotrain_operator.api.conditions import ConditionType, set_conditions
from heterotrain_operator.api.internal_status import InternalCost, InternalPool, InternalStatus
from heterotrain_operator.api.status import (
    MAX_MESSAGE_LENGTH,
    MAX_WORKER_ROWS,
    Condition,
    HeteroTrainJobStatus,
    NodeFailures,
    PlanStatus,
    PoolStatus,
    WorkerStatus,
)
from heterotrain_operator.api.text import rounded
from heterotrain_operator.api.types import count
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.faults import with_fault
from heterotrain_operator.decide.grant import with_exhaustion
from heterotrain_operator.decide.learn.persisted import exchange_of, speed_of
from heterotrain_operator.decide.lifecycle import ENDED_STAGES, LifeStage
from heterotrain_operator.decide.objects.objects import worker_selector
from heterotrain_operator.decide.plan.memory_limits import with_limits
from heterotrain_operator.decide.status.conditions import condition_values, ended_condition
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.cost import cost_so_far, cost_text, price_per_hour, price_text, step_cost_text
from heterotrain_operator.decide.status.layout_text import layout_text, units_by_worker
from heterotrain_operator.decide.status.progress import earlier_progress, progress_fields
from heterotrain_operator.decide.status.speed_conditions import batch_reason_of, prediction_of
from heterotrain_operator.decide.status.worker_conditions import memory_by_worker
from heterotrain_operator.decide.workers.state import WorkerState


def status_of(context: JobContext, *, newest: tuple[int, int]) -> HeteroTrainJobStatus:
    """Return the status after this pass; it also reports the unexpected errors of the pass.

    Args:
        context: inputs and decisions of this pass.
        newest: highest plan version that workers may have seen.
    """
    status = context.faults.guard(
        "its status",
        lambda: _whole_status(context, newest),
        lambda: _essential_status(context, newest),
        instead="the status keeps older values",
    )
    sentence = context.faults.sentence or context.inputs.model.fault
    if not sentence:
        return status
    return with_fault(status, sentence, generation=context.job.generation, now=rfc3339(context.now_s))


def _essential_status(context: JobContext, newest: tuple[int, int]) -> HeteroTrainJobStatus:
    """Return the old status with what a later pass relies on: counts, plan version, and the end of the job."""
    old, now, stage = context.job.status, rfc3339(context.now_s), context.life.stage
    ends = {
        condition.type: condition
        for condition in set_conditions(
            old.conditions,
            [ended_condition(context, kind) for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED)],
            generation=context.job.generation,
            now=now,
        )
    }
    others = (condition for condition in old.conditions if condition.type not in ends)
    lost = context.accounts.lost
    return old.model_copy(
        update={
            "observed_generation": context.job.generation,
            "state": stage.value if stage in ENDED_STAGES else old.state,
            "restarts": count(context.accounts.restarts),
            "disruptions": count(context.accounts.disruptions),
            "pools": tuple(
                pool.model_copy(update={"disruptions": count(pool.disruptions + lost.get(pool.name, 0))})
                for pool in old.pools
            ),
            "start_time": old.start_time or now,
            "completion_time": (old.completion_time or now) if stage in ENDED_STAGES else None,
            "plan": old.plan.model_copy(update={"desired": f"{newest[0]}.{newest[1]}"}),
            "conditions": (*others, *ends.values()),
            "internal": old.internal.model_copy(
                update={
                    "accounted_workers": tuple(sorted(context.accounts.accounted)),
                    "pools": tuple(with_limits(pool, context.derived.memory) for pool in old.internal.pools),
                }
            ),
        }
    )


def _whole_status(context: JobContext, newest: tuple[int, int]) -> HeteroTrainJobStatus:
    old, now = context.job.status, rfc3339(context.now_s)
    conditions = set_conditions(old.conditions, condition_values(context), generation=context.job.generation, now=now)
    state, reason = _state(context, conditions)
    measured = partial(context.faults.guard, instead="the status keeps older values")
    stage = context.life.stage
    idle = stage in (LifeStage.SUSPENDED, LifeStage.INVALID)
    start_time = None if idle else _not_after(old.start_time, context.now_s) or now
    names_members = context.plan is not None and bool(context.plan.members)
    since = _not_after(old.training_since, context.now_s)
    training_since = None if idle else since or (now if names_members and context.runs else None)
    progress = measured("its progress", lambda: progress_fields(context), lambda: earlier_progress(old))
    price = price_per_hour(context)
    cost = cost_so_far(context, price)
    return HeteroTrainJobStatus(
        observed_generation=context.job.generation,
        state=state,
        reason=reason[:MAX_MESSAGE_LENGTH],
        replicas=len(context.alive),
        selector=worker_selector(context.job),
        ready_replicas=context.ready,
        desired_replicas=context.desired,
        updated_replicas=len(context.alive) - len(context.renewal.older),
        ready=f"{context.ready}/{context.desired}",
        pools=_pools(context),
        price_per_hour=price_text(price),
        cost=cost_text(cost),
        cost_per_step=step_cost_text(price, progress.get("step_seconds")),
        restarts=count(context.accounts.restarts),
        disruptions=count(context.accounts.disruptions),
        last_failure=context.accounts.last_failure[:MAX_MESSAGE_LENGTH] if context.accounts.last_failure else None,
        last_failure_time=rfc3339(context.accounts.last_failure_s) if context.accounts.last_failure_s else None,
        nodes_with_failures=_nodes_with_failures(context),
        start_time=start_time,
        training_since=training_since,
        completion_time=(old.completion_time or now) if stage in ENDED_STAGES else None,
        plan=_plan(context, newest),
        prediction=measured("its prediction", lambda: prediction_of(context), lambda: None),
        batch_reason=measured("its batch", lambda: batch_reason_of(context), lambda: None),
        workers=measured("the workers' rows", lambda: _rows(context), lambda: old.workers),
        conditions=conditions,
        internal=_internal(context, cost),
        **progress,
    )


def _not_after(time: str | None, now_s: float) -> str | None:
    """Return a time of the status; one in the future is of a clock that was ahead, and becomes the present."""
    return rfc3339(now_s) if time is not None and seconds(time) > now_s else time


def _state(context: JobContext, conditions: tuple[Condition, ...]) -> tuple[str, str]:
    """Return the state as one word, and the reason in one sentence."""
    holds = {condition.type: condition.status == "True" for condition in conditions}
    messages = {condition.type: condition.message for condition in conditions}
    stage = context.life.stage
    if stage in (LifeStage.INVALID, LifeStage.SUSPENDED, LifeStage.SUCCEEDED, LifeStage.FAILED):
        return stage.value, context.life.message
    for word in (ConditionType.RESTARTING, ConditionType.RESIZING, ConditionType.DEGRADED, ConditionType.RUNNING):
        if holds[word]:
            return word.value, messages[word]
    if not holds[ConditionType.SCHEDULED]:
        return "Pending", messages[ConditionType.SCHEDULED]
    return "Starting", messages[ConditionType.RUNNING]


def _plan(context: JobContext, newest: tuple[int, int]) -> PlanStatus:
    plan, applied = context.plan, context.applied
    prediction = plan.prediction if plan else None
    return PlanStatus(
        desired=f"{newest[0]}.{newest[1]}",
        applied=f"{applied[0]}.{applied[1]}" if applied else None,
        members=len(plan.members) if plan else 0,
        layout=(layout_text(plan, context.telemetry)[:MAX_MESSAGE_LENGTH] or None) if plan else None,
        efficiency_ceiling=rounded(prediction.efficiency_ceiling) if prediction else None,
        reason=plan.reason[:MAX_MESSAGE_LENGTH] if plan else "",
    )


def _own_batch(context: JobContext) -> bool:
    """Return whether only the script has its batch, so that the plan's shares are not samples."""
    return context.spec is not None and context.spec.runtime is Runtime.TORCHRUN


def _pools(context: JobContext) -> tuple[PoolStatus, ...]:
    if context.spec is None:
        return ()
    rows = []
    before = {pool.name: pool for pool in context.job.status.pools}
    for pool in context.spec.worker_pools:
        own = [worker for worker in context.alive if worker.pod.pool == pool.name]
        known = before.get(pool.name)
        rows.append(
            PoolStatus(
                name=pool.name,
                desired=context.replicas.desired.get(pool.name, 0),
                replicas=len(own),
                placed=sum(worker.placed for worker in own),
                ready=sum(worker.state is WorkerState.READY for worker in own),
                granted=_granted(context, known, pool.name),
                disruptions=count((known.disruptions if known else 0) + context.accounts.lost.get(pool.name, 0)),
            )
        )
    return tuple(rows)


def _internal(context: JobContext, cost: InternalCost | None) -> InternalStatus:
    before = context.job.status.internal
    pools = []
    for pool in context.spec.worker_pools if context.spec is not None else ():
        row = InternalPool(name=pool.name, speed=speed_of(before.pool(pool.name), context.plan))
        pools.append(with_limits(with_exhaustion(row, context.grant), context.derived.memory))
    return InternalStatus(
        accounted_workers=tuple(sorted(context.accounts.accounted)),
        pools=tuple(pools),
        cost=cost,
        exchange=exchange_of(before.exchange, context.inputs.model.throughput),
        common_parts=before.common_parts if context.sources is None else context.sources.kept,
        stores=before.stores if context.sources is None else context.sources.stores,
        retried=before.retried,
        disruptions=context.accounts.row if context.accounts.row.incidents else None,
    )


def _nodes_with_failures(context: JobContext) -> tuple[NodeFailures, ...]:
    """Return the nodes with failures; a suspended job begins without any."""
    if context.spec is None or context.life.stage is LifeStage.SUSPENDED:
        return ()
    return context.accounts.blamed


def _granted(context: JobContext, known: PoolStatus | None, name: str) -> int | None:
    """Return the workers that the allocation grants in a pool; the previous grant until a new operator has decided."""
    if context.grant.undecided:
        return known.granted if known is not None else None
    return None if context.grant.limits is None else context.grant.limits.get(name, 0)


def _rows(context: JobContext) -> tuple[WorkerStatus, ...]:
    """Return a row for each worker; if there are too many, workers that are not ready take precedence."""
    training, runs = {worker.pod.uid for worker in context.training}, context.runs
    shares: dict[str, int] = {}
    solo: dict[str, float] = {}
    prediction = context.plan.prediction if context.plan else None
    bindings: dict[str, str] = {}
    plan, rates = context.plan, context.solo_samples_per_s
    for rank in plan.ranks if plan else ():
        if prediction is not None:
            bindings.setdefault(rank.worker_uid, prediction.bindings[rank.member].value)
    if plan is not None and not _own_batch(context):
        for uid, index in {(rank.worker_uid, rank.member) for rank in plan.ranks}:
            shares[uid] = shares.get(uid, 0) + plan.members[index].share_samples
            if index in rates:
                solo[uid] = solo.get(uid, 0.0) + rates[index]
    units = units_by_worker(plan, context.telemetry) if plan is not None else {}
    spared = memory_by_worker(context)
    chosen = sorted(context.workers, key=lambda worker: (worker.state is WorkerState.READY, worker.pod.index))[
        :MAX_WORKER_ROWS
    ]
    solo = {uid: rounded(rate) for uid, rate in solo.items() if not math.isnan(rate)}
    return tuple(
        WorkerStatus(
            name=worker.pod.name,
            pool=worker.pod.pool,
            state="Training" if worker.pod.uid in training and worker.placed and runs else worker.state.value,
            node=worker.pod.node or None,
            share_samples=shares.get(worker.pod.uid) if worker.pod.uid in training else None,
            binding=bindings.get(worker.pod.uid) if worker.pod.uid in training else None,
            units=units.get(worker.pod.uid) if worker.pod.uid in training else None,
            memory=spared.get(worker.pod.uid),
            samples_per_second=solo.get(worker.pod.uid) if worker.pod.uid in training else None,
            message=worker.reason[:MAX_MESSAGE_LENGTH] or None,
        )
        for worker in sorted(chosen, key=lambda worker: worker.pod.index)
    )
