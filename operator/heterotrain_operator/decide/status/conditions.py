"""The conditions of a job, put into words: true at every moment, each with a reason that says what to do or wait for."""

from __future__ import annotations

from heterotrain_operator.api.conditions import ConditionType, ConditionValue
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.decide.grants.grant import why_limited
from heterotrain_operator.decide.lifecycle import Stage
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.deadline import deadline_condition
from heterotrain_operator.decide.status.speed_conditions import speed_conditions
from heterotrain_operator.decide.workers.state import WorkerState

_LATE_CHECKPOINTS = 2
_CHECKPOINT_SLACK_S = 60.0


def condition_values(context: JobContext) -> tuple[ConditionValue, ...]:
    """Return every condition of the job."""
    parts = [
        _accepted(context),
        ConditionValue(
            type=ConditionType.SUSPENDED,
            holds=context.life.stage is Stage.SUSPENDED,
            reason="Suspended" if context.life.stage is Stage.SUSPENDED else "NotSuspended",
        ),
        _scheduled(context),
        _running(context),
        _resizing(context),
        _restarting(context),
        _degraded(context),
        _limited(context),
        *(
            [deadline_condition(context, context.spec.deadline)]
            if context.spec is not None and context.spec.deadline is not None
            else []
        ),
        _shares_applied(context),
        *speed_conditions(context),
        _telemetry(context),
        *([_checkpoint(context)] if context.spec is not None and context.spec.checkpoint is not None else []),
        _ended(context, ConditionType.SUCCEEDED, Stage.SUCCEEDED),
        _ended(context, ConditionType.FAILED, Stage.FAILED),
        *_summary(context),
    ]
    return tuple(parts)


def _accepted(context: JobContext) -> ConditionValue:
    if context.spec is None:
        return ConditionValue(
            type=ConditionType.ACCEPTED, holds=False, reason="InvalidSpec", message=context.job.problem
        )
    if not context.acceptance.known:
        reason, message = (
            ("Checking", "the pod is being tried out")
            if context.acceptance.ok
            else (context.acceptance.reason, context.acceptance.message)
        )
        return ConditionValue(type=ConditionType.ACCEPTED, holds=None, reason=reason, message=message)
    return ConditionValue(
        type=ConditionType.ACCEPTED,
        holds=context.acceptance.ok,
        reason=context.acceptance.reason,
        message=context.acceptance.message,
    )


def _scheduled(context: JobContext) -> ConditionValue:
    kind = ConditionType.SCHEDULED
    if context.spec is None or context.life.stage is not Stage.ACTIVE:
        return ConditionValue(type=kind, holds=context.life.stage is Stage.FINISHING, reason=context.life.stage.value)
    placed, needed = len(context.placed), context.spec.elastic_policy.min_replicas
    short = [
        pool.name
        for pool in context.spec.worker_pools
        if sum(worker.pod.pool == pool.name for worker in context.placed) < pool.min_replicas
    ]
    have = f"{placed} of {sum(context.desired.values())} workers have nodes, {needed} are needed"
    if placed >= needed and not short:
        return ConditionValue(type=kind, holds=True, reason="EnoughWorkersPlaced", message=have)
    refused = context.refusal or context.blocked
    why = refused or context.shortage
    reason = "PodsRefused" if refused else ("Unschedulable" if why else "Placing")
    below = f"; pools below their minReplicas: {', '.join(short)}" if short else ""
    said = f"{f': {why}' if why else ''}{_describe_hint(context, WorkerState.WAITING)}"
    return ConditionValue(type=kind, holds=False, reason=reason, message=f"{have}{below}{said}")


def _running(context: JobContext) -> ConditionValue:
    kind = ConditionType.RUNNING
    if context.runs:
        return ConditionValue(
            type=kind, holds=True, reason="Training", message=f"{len(context.training)} workers train"
        )
    if context.life.stage is not Stage.ACTIVE:
        return ConditionValue(type=kind, holds=False, reason=context.life.stage.value, message=context.life.message)
    if context.blocked_worker is not None:
        worker = context.blocked_worker
        return ConditionValue(
            type=kind, holds=False, reason=worker.pod.waiting_reason, message=f"{worker.pod.name}: {worker.reason}"
        )
    message = f"{context.ready} workers are ready{_describe_hint(context, WorkerState.STARTING)}"
    return ConditionValue(type=kind, holds=False, reason="WaitingForWorkers", message=message)


def _describe_hint(context: JobContext, state: WorkerState) -> str:
    """Return where to look for what only Events of a pod tell, such as a volume that is missing."""
    name = next((worker.pod.name for worker in context.workers if worker.state is state and not worker.reason), "")
    return f"; {name} is {state.value.lower()}: kubectl describe pod {name} says what it needs" if name else ""


def _resizing(context: JobContext) -> ConditionValue:
    kind = ConditionType.RESIZING
    if not context.runs or context.plan is None:
        return ConditionValue(type=kind, holds=False, reason="NotTraining")
    if context.draining:
        names = ", ".join(worker.pod.name for worker in context.draining)
        return ConditionValue(
            type=kind, holds=True, reason="WorkersLeaving", message=f"{names}: {context.draining[0].reason}"
        )
    if context.applied is not None and context.applied[0] < context.plan.generation:
        return ConditionValue(
            type=kind,
            holds=True,
            reason="MembershipChanging",
            message=f"generation {context.plan.generation} is planned, {context.applied[0]} is in force",
        )
    return ConditionValue(type=kind, holds=False, reason="Stable")


def _restarting(context: JobContext) -> ConditionValue:
    kind = ConditionType.RESTARTING
    if context.life.stage is Stage.ACTIVE and context.began and not context.runs:
        message = f"{len(context.training)} members are left, and {context.ready} workers are ready"
        return ConditionValue(type=kind, holds=True, reason="TooFewWorkers", message=message)
    return ConditionValue(type=kind, holds=False, reason="NotRestarting")


def _degraded(context: JobContext) -> ConditionValue:
    kind = ConditionType.DEGRADED
    wanted, staying = sum(context.desired.values()), len(context.training) - len(context.draining)
    if not context.runs or context.life.stage is Stage.FINISHING or staying >= wanted:
        return ConditionValue(type=kind, holds=False, reason="Complete" if context.runs else "NotTraining")
    message = f"{staying} of {wanted} workers train" + (" on" if context.draining else "")
    if context.blocked_worker is not None:
        worker = context.blocked_worker
        return ConditionValue(
            type=kind,
            holds=True,
            reason=worker.pod.waiting_reason,
            message=f"{message}; {worker.pod.name}: {worker.reason}",
        )
    why = context.refusal or context.shortage
    return ConditionValue(
        type=kind,
        holds=True,
        reason="NoRoom" if why else "WorkersStarting",
        message=f"{message}{f'; {why}' if why else ''}",
    )


def _limited(context: JobContext) -> ConditionValue:
    kind, grant = ConditionType.LIMITED, context.grant
    if context.spec is None or context.life.stage is not Stage.ACTIVE:
        return ConditionValue(type=kind, holds=False, reason=context.life.stage.value)
    before = next((each for each in context.job.status.conditions if each.type == kind.value), None)
    if grant.undecided and before is not None:  # a new operator has not decided yet: what the one before said stands
        holds = {"True": True, "False": False}.get(before.status)
        return ConditionValue(type=kind, holds=holds, reason=before.reason, message=before.message)
    reason = why_limited(context.spec, grant)
    holds = None if grant.undecided else reason not in ("Free", "Granted")
    return ConditionValue(type=kind, holds=holds, reason=reason, message=grant.reason)


def _shares_applied(context: JobContext) -> ConditionValue:
    kind = ConditionType.SHARES_APPLIED
    if not context.runs or context.plan is None:
        return ConditionValue(type=kind, holds=False, reason="NotTraining")
    if context.applied is None:
        return ConditionValue(
            type=kind, holds=None, reason="NotReported", message="not every member has reported its plan yet"
        )
    if context.applied >= context.plan.version:
        return ConditionValue(
            type=kind,
            holds=True,
            reason="Applied",
            message=f"plan {context.plan.generation}.{context.plan.revision} is in force",
        )
    message = f"plan {context.plan.generation}.{context.plan.revision} waits for the next boundary; {context.applied[0]}.{context.applied[1]} is in force"
    return ConditionValue(type=kind, holds=False, reason="WaitingForBoundary", message=message)


def _telemetry(context: JobContext) -> ConditionValue:
    kind = ConditionType.TELEMETRY_AVAILABLE
    if context.telemetry.problem:
        return ConditionValue(
            type=kind, holds=False, reason=context.telemetry.reason, message=context.telemetry.problem
        )
    if not context.telemetry.gauges:
        return ConditionValue(type=kind, holds=None, reason="NothingYet", message="no worker has been scraped yet")
    return ConditionValue(type=kind, holds=True, reason=context.telemetry.reason)


def _checkpoint(context: JobContext) -> ConditionValue:
    kind = ConditionType.CHECKPOINT_HEALTHY
    assert context.spec is not None  # noqa: S101  # aspects_of asks only then
    assert context.spec.checkpoint is not None  # noqa: S101  # aspects_of asks only then
    if not context.runs or context.telemetry.problem or not context.telemetry.gauges:
        return ConditionValue(type=kind, holds=None, reason="NotKnown")
    newest_s = max((g.checkpoint_time_s or 0.0 for g in context.telemetry.gauges.values()), default=0.0)
    since_s = max(newest_s, seconds(context.job.status.training_since))
    limit_s = context.spec.checkpoint.interval_seconds * _LATE_CHECKPOINTS + _CHECKPOINT_SLACK_S
    if since_s and context.now_s - since_s > limit_s:
        message = (
            f"the last checkpoint is {(context.now_s - since_s) / 60:.0f} minutes old: look into the workers' logs"
        )
        return ConditionValue(type=kind, holds=False, reason="CheckpointLate", message=message)
    return ConditionValue(type=kind, holds=True, reason="Saved" if newest_s else "NotDueYet")


def _ended(context: JobContext, kind: ConditionType, stage: Stage) -> ConditionValue:
    if context.life.stage is stage:
        return ConditionValue(type=kind, holds=True, reason=context.life.reason, message=context.life.message)
    return ConditionValue(
        type=kind,
        holds=False,
        reason="NotEnded" if context.life.stage not in (Stage.SUCCEEDED, Stage.FAILED) else "Ended",
    )


def _summary(context: JobContext) -> tuple[ConditionValue, ConditionValue, ConditionValue]:
    """Return Ready, Reconciling and Stalled: at most one of them holds."""
    stage = context.life.stage
    reason, message = context.life.reason, context.life.message
    if stage is Stage.SUSPENDED:
        ready, stalled = not context.workers, False
        message = "" if ready else f"{len(context.workers)} pods are still there"
    elif stage in (Stage.SUCCEEDED, Stage.FAILED, Stage.REFUSED):
        ready, stalled = stage is Stage.SUCCEEDED, stage is not Stage.SUCCEEDED
    else:
        running = _running(context)
        ready, stalled = context.runs, not context.runs and context.blocked_worker is not None
        reason, message = running.reason, running.message
    if context.blocked and stage not in (Stage.FAILED, Stage.REFUSED) and not stalled:
        ready, reason, message = False, "WriteRefused", context.blocked
    return (
        ConditionValue(type=ConditionType.READY, holds=ready, reason=reason, message=message),
        ConditionValue(type=ConditionType.RECONCILING, holds=not ready and not stalled, reason=reason, message=message),
        ConditionValue(type=ConditionType.STALLED, holds=stalled, reason=reason, message=message),
    )
