"""The conditions of a job, put into words: true at every moment, each with a reason that says what to do or wait for."""

from __future__ import annotations

from heterotrain_operator.api.conditions import Aspect, ConditionType
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.decide.grants.grant import why_limited
from heterotrain_operator.decide.lifecycle import Stage
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.deadline import deadline_aspect
from heterotrain_operator.decide.status.speed_conditions import speed_aspects
from heterotrain_operator.decide.workers.state import WorkerState

_LATE_CHECKPOINTS = 2
_CHECKPOINT_SLACK_S = 60.0


def aspects_of(it: JobContext) -> tuple[Aspect, ...]:
    """Return every condition of the job."""
    parts = [
        _accepted(it),
        Aspect(
            type=ConditionType.SUSPENDED,
            holds=it.life.stage is Stage.SUSPENDED,
            reason="Suspended" if it.life.stage is Stage.SUSPENDED else "NotSuspended",
        ),
        _scheduled(it),
        _running(it),
        _resizing(it),
        _restarting(it),
        _degraded(it),
        _limited(it),
        *([deadline_aspect(it, it.spec.deadline)] if it.spec is not None and it.spec.deadline is not None else []),
        _shares_applied(it),
        *speed_aspects(it),
        _telemetry(it),
        *([_checkpoint(it)] if it.spec is not None and it.spec.checkpoint is not None else []),
        _ended(it, ConditionType.SUCCEEDED, Stage.SUCCEEDED),
        _ended(it, ConditionType.FAILED, Stage.FAILED),
        *_summary(it),
    ]
    return tuple(parts)


def _accepted(it: JobContext) -> Aspect:
    if it.spec is None:
        return Aspect(type=ConditionType.ACCEPTED, holds=False, reason="InvalidSpec", message=it.job.problem)
    if not it.acceptance.known:
        reason, message = (
            ("Checking", "the pod is being tried out")
            if it.acceptance.ok
            else (it.acceptance.reason, it.acceptance.message)
        )
        return Aspect(type=ConditionType.ACCEPTED, holds=None, reason=reason, message=message)
    return Aspect(
        type=ConditionType.ACCEPTED, holds=it.acceptance.ok, reason=it.acceptance.reason, message=it.acceptance.message
    )


def _scheduled(it: JobContext) -> Aspect:
    kind = ConditionType.SCHEDULED
    if it.spec is None or it.life.stage is not Stage.ACTIVE:
        return Aspect(type=kind, holds=it.life.stage is Stage.FINISHING, reason=it.life.stage.value)
    placed, needed = len(it.placed), it.spec.elastic_policy.min_replicas
    short = [
        pool.name
        for pool in it.spec.worker_pools
        if sum(worker.pod.pool == pool.name for worker in it.placed) < pool.min_replicas
    ]
    have = f"{placed} of {sum(it.desired.values())} workers have nodes, {needed} are needed"
    if placed >= needed and not short:
        return Aspect(type=kind, holds=True, reason="EnoughWorkersPlaced", message=have)
    refused = it.refusal or it.blocked
    why = refused or it.shortage
    reason = "PodsRefused" if refused else ("Unschedulable" if why else "Placing")
    below = f"; pools below their minReplicas: {', '.join(short)}" if short else ""
    said = f"{f': {why}' if why else ''}{_whom_to_ask(it, WorkerState.WAITING)}"
    return Aspect(type=kind, holds=False, reason=reason, message=f"{have}{below}{said}")


def _running(it: JobContext) -> Aspect:
    kind = ConditionType.RUNNING
    if it.runs:
        return Aspect(type=kind, holds=True, reason="Training", message=f"{len(it.training)} workers train")
    if it.life.stage is not Stage.ACTIVE:
        return Aspect(type=kind, holds=False, reason=it.life.stage.value, message=it.life.message)
    if it.trouble is not None:
        worker = it.trouble
        return Aspect(
            type=kind, holds=False, reason=worker.pod.waiting_reason, message=f"{worker.pod.name}: {worker.reason}"
        )
    message = f"{it.ready} workers are ready{_whom_to_ask(it, WorkerState.STARTING)}"
    return Aspect(type=kind, holds=False, reason="WaitingForWorkers", message=message)


def _whom_to_ask(it: JobContext, state: WorkerState) -> str:
    """Return where to look for what only Events of a pod tell, such as a volume that is missing."""
    name = next((worker.pod.name for worker in it.workers if worker.state is state and not worker.reason), "")
    return f"; {name} is {state.value.lower()}: kubectl describe pod {name} says what it needs" if name else ""


def _resizing(it: JobContext) -> Aspect:
    kind = ConditionType.RESIZING
    if not it.runs or it.plan is None:
        return Aspect(type=kind, holds=False, reason="NotTraining")
    if it.draining:
        names = ", ".join(worker.pod.name for worker in it.draining)
        return Aspect(type=kind, holds=True, reason="WorkersLeaving", message=f"{names}: {it.draining[0].reason}")
    if it.applied is not None and it.applied[0] < it.plan.generation:
        return Aspect(
            type=kind,
            holds=True,
            reason="MembershipChanging",
            message=f"generation {it.plan.generation} is planned, {it.applied[0]} is in force",
        )
    return Aspect(type=kind, holds=False, reason="Stable")


def _restarting(it: JobContext) -> Aspect:
    kind = ConditionType.RESTARTING
    if it.life.stage is Stage.ACTIVE and it.began and not it.runs:
        message = f"{len(it.training)} members are left, and {it.ready} workers are ready"
        return Aspect(type=kind, holds=True, reason="TooFewWorkers", message=message)
    return Aspect(type=kind, holds=False, reason="NotRestarting")


def _degraded(it: JobContext) -> Aspect:
    kind = ConditionType.DEGRADED
    wanted, staying = sum(it.desired.values()), len(it.training) - len(it.draining)
    if not it.runs or it.life.stage is Stage.FINISHING or staying >= wanted:
        return Aspect(type=kind, holds=False, reason="Complete" if it.runs else "NotTraining")
    message = f"{staying} of {wanted} workers train" + (" on" if it.draining else "")
    if it.trouble is not None:
        worker = it.trouble
        return Aspect(
            type=kind,
            holds=True,
            reason=worker.pod.waiting_reason,
            message=f"{message}; {worker.pod.name}: {worker.reason}",
        )
    why = it.refusal or it.shortage
    return Aspect(
        type=kind,
        holds=True,
        reason="NoRoom" if why else "WorkersStarting",
        message=f"{message}{f'; {why}' if why else ''}",
    )


def _limited(it: JobContext) -> Aspect:
    kind, grant = ConditionType.LIMITED, it.grant
    if it.spec is None or it.life.stage is not Stage.ACTIVE:
        return Aspect(type=kind, holds=False, reason=it.life.stage.value)
    before = next((each for each in it.job.status.conditions if each.type == kind.value), None)
    if grant.held and before is not None:  # a new operator has not decided yet: what the one before said stands
        holds = {"True": True, "False": False}.get(before.status)
        return Aspect(type=kind, holds=holds, reason=before.reason, message=before.message)
    reason = why_limited(it.spec, grant)
    holds = None if grant.held else reason not in ("Free", "Granted")
    return Aspect(type=kind, holds=holds, reason=reason, message=grant.reason)


def _shares_applied(it: JobContext) -> Aspect:
    kind = ConditionType.SHARES_APPLIED
    if not it.runs or it.plan is None:
        return Aspect(type=kind, holds=False, reason="NotTraining")
    if it.applied is None:
        return Aspect(type=kind, holds=None, reason="NotReported", message="not every member has reported its plan yet")
    if it.applied >= it.plan.version:
        return Aspect(
            type=kind, holds=True, reason="Applied", message=f"plan {it.plan.generation}.{it.plan.revision} is in force"
        )
    message = f"plan {it.plan.generation}.{it.plan.revision} waits for the next boundary; {it.applied[0]}.{it.applied[1]} is in force"
    return Aspect(type=kind, holds=False, reason="WaitingForBoundary", message=message)


def _telemetry(it: JobContext) -> Aspect:
    kind = ConditionType.TELEMETRY_AVAILABLE
    if it.telemetry.problem:
        return Aspect(type=kind, holds=False, reason=it.telemetry.reason, message=it.telemetry.problem)
    if not it.telemetry.gauges:
        return Aspect(type=kind, holds=None, reason="NothingYet", message="no worker has been scraped yet")
    return Aspect(type=kind, holds=True, reason=it.telemetry.reason)


def _checkpoint(it: JobContext) -> Aspect:
    kind = ConditionType.CHECKPOINT_HEALTHY
    assert it.spec is not None  # noqa: S101  # aspects_of asks only then
    assert it.spec.checkpoint is not None  # noqa: S101  # aspects_of asks only then
    if not it.runs or it.telemetry.problem or not it.telemetry.gauges:
        return Aspect(type=kind, holds=None, reason="NotKnown")
    newest_s = max((g.checkpoint_time_s or 0.0 for g in it.telemetry.gauges.values()), default=0.0)
    since_s = max(newest_s, seconds(it.job.status.training_since))
    limit_s = it.spec.checkpoint.every_minutes * 60 * _LATE_CHECKPOINTS + _CHECKPOINT_SLACK_S
    if since_s and it.now_s - since_s > limit_s:
        message = f"the last checkpoint is {(it.now_s - since_s) / 60:.0f} minutes old: look into the workers' logs"
        return Aspect(type=kind, holds=False, reason="CheckpointLate", message=message)
    return Aspect(type=kind, holds=True, reason="Saved" if newest_s else "NotDueYet")


def _ended(it: JobContext, kind: ConditionType, stage: Stage) -> Aspect:
    if it.life.stage is stage:
        return Aspect(type=kind, holds=True, reason=it.life.reason, message=it.life.message)
    return Aspect(
        type=kind, holds=False, reason="NotEnded" if it.life.stage not in (Stage.SUCCEEDED, Stage.FAILED) else "Ended"
    )


def _summary(it: JobContext) -> tuple[Aspect, Aspect, Aspect]:
    """Return Ready, Reconciling and Stalled: at most one of them holds."""
    stage = it.life.stage
    reason, message = it.life.reason, it.life.message
    if stage is Stage.SUSPENDED:
        ready, stalled = not it.workers, False
        message = "" if ready else f"{len(it.workers)} pods are still there"
    elif stage in (Stage.SUCCEEDED, Stage.FAILED, Stage.REFUSED):
        ready, stalled = stage is Stage.SUCCEEDED, stage is not Stage.SUCCEEDED
    else:
        running = _running(it)
        ready, stalled = it.runs, not it.runs and it.trouble is not None
        reason, message = running.reason, running.message
    if it.blocked and stage not in (Stage.FAILED, Stage.REFUSED) and not stalled:
        ready, reason, message = False, "WriteRefused", it.blocked
    return (
        Aspect(type=ConditionType.READY, holds=ready, reason=reason, message=message),
        Aspect(type=ConditionType.RECONCILING, holds=not ready and not stalled, reason=reason, message=message),
        Aspect(type=ConditionType.STALLED, holds=stalled, reason=reason, message=message),
    )
