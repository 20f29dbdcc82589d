"""The conditions of a job: correct after every pass, each with a reason and what to do or wait for."""

from __future__ import annotations

from heterotrain_core.contract.choices import Runtime
from heterotrain_core.contract.outcome import Cause
from heterotrain_core.contract.plan import SCHEMA_VERSION

from heterotrain_operator.api.conditions import ConditionType, ConditionValue, find_condition, value_of
from heterotrain_operator.api.text import duration_text, listed
from heterotrain_operator.api.v1alpha1 import Checkpoint
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.decide.grant import why_limited
from heterotrain_operator.decide.lifecycle import ENDED_STAGES, LifeStage
from heterotrain_operator.decide.plan.arrangement import identity_of
from heterotrain_operator.decide.plan.stages import LayoutState
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.layout_text import layout_text
from heterotrain_operator.decide.status.speed_conditions import speed_conditions
from heterotrain_operator.decide.status.training_conditions import (
    deadline_condition,
    diverging_condition,
    numbers_condition,
    progressing_condition,
)
from heterotrain_operator.decide.status.worker_conditions import (
    memory_condition,
    preflight_condition,
    template_condition,
)
from heterotrain_operator.decide.workers.disruptions import described, repeated
from heterotrain_operator.decide.workers.failures import mismatch_of
from heterotrain_operator.decide.workers.state import Worker, WorkerState

_MISMATCH = Cause.VERSION_MISMATCH.value
_REPEATED = "DisruptedRepeatedly"
_MOST_NAMED = 3
_LASTING = frozenset(
    {
        *(ConditionType.PROGRESSING, ConditionType.PREFLIGHT_PASSED, ConditionType.CHECKPOINT_HEALTHY),
        *(ConditionType.NUMERICALLY_SOUND, ConditionType.PLAN_APPLIED, ConditionType.SPEEDS_LEARNED),
        *(ConditionType.STRAGGLER_DETECTED, ConditionType.MEMORY_SHORT, ConditionType.TELEMETRY_AVAILABLE),
        *(ConditionType.LAYOUT_PLANNED, ConditionType.TEMPLATE_APPLIED, ConditionType.DIVERGING),
    }
)
"""What the workers have shown: after the end of the job, the last answer stands."""
_LATE_CHECKPOINTS = 2
_CHECKPOINT_SLACK_S = 60.0


def condition_values(context: JobContext) -> tuple[ConditionValue, ...]:
    """Return every condition of the job."""
    values = (
        _accepted(context),
        _suspended(context),
        template_condition(context),
        _scheduled(context),
        _running(context),
        _resizing(context),
        _restarting(context),
        _degraded(context),
        _limited(context),
        *([_layout(context, context.layout)] if context.layout is not None else []),
        *context.faults.guard(
            "conditions about speed", lambda: _measured(context), lambda: (), instead="they are left out"
        ),
        ended_condition(context, ConditionType.SUCCEEDED),
        ended_condition(context, ConditionType.FAILED),
        *_summary(context),
    )
    if context.life.stage not in ENDED_STAGES:
        return values
    return tuple(_last_answer(context, each) if each.type in _LASTING else each for each in values)


def _last_answer(context: JobContext, now: ConditionValue) -> ConditionValue:
    before = find_condition(context.job.status.conditions, now.type)
    if before is None or (now.holds is not None and now.reason != "NotTraining"):
        return now
    return value_of(before)


def _measured(context: JobContext) -> tuple[ConditionValue, ...]:
    """Return the conditions that follow from measurements."""
    spec = context.spec
    if spec is not None and spec.runtime is Runtime.TORCHRUN:  # its launchers report the plan, and the script nothing
        return (_shares_applied(context), _telemetry(context))
    return (
        *([deadline_condition(context, spec.deadline)] if spec is not None and spec.deadline is not None else []),
        _shares_applied(context),
        *speed_conditions(context),
        memory_condition(context),
        _telemetry(context),
        progressing_condition(context),
        numbers_condition(context),
        diverging_condition(context),
        preflight_condition(context),
        *([_checkpoint(context, spec.checkpoint)] if spec is not None and spec.checkpoint is not None else []),
    )


def _accepted(context: JobContext) -> ConditionValue:
    kind, acceptance = ConditionType.ACCEPTED, context.inputs.acceptance
    if context.spec is None:
        return kind.false("InvalidSpec", context.job.problem)
    if acceptance.known:
        return ConditionValue(kind, acceptance.ok, acceptance.reason, acceptance.message)
    if acceptance.ok:
        return kind.unknown("DryRunPending", "the API server checks the worker pods in a dry run")
    return kind.unknown(acceptance.reason, acceptance.message)


def _suspended(context: JobContext) -> ConditionValue:
    suspended = context.life.stage is LifeStage.SUSPENDED
    reason = "Suspended" if suspended else "NotSuspended"
    return ConditionValue(ConditionType.SUSPENDED, suspended, reason)


def _scheduled(context: JobContext) -> ConditionValue:
    kind = ConditionType.SCHEDULED
    if context.spec is None or context.life.stage is not LifeStage.ACTIVE:
        finishing = context.life.stage is LifeStage.FINISHING
        return ConditionValue(kind, finishing, context.life.stage.value)
    placed, needed = len(context.placed), context.spec.elastic_policy.min_replicas
    short = [
        pool.name
        for pool in context.spec.worker_pools
        if sum(worker.pod.pool == pool.name for worker in context.placed) < pool.min_replicas
    ]
    have = f"{placed} of {context.desired} workers have nodes, {needed} are needed"
    if placed >= needed and not short:
        return kind.true("EnoughWorkersScheduled", have)
    refused = context.refusal or context.inputs.blocked
    row = context.accounts.row
    why = refused or (described(row, context.now_s) if repeated(row) else context.replicas.reason)
    reason = "PodsRejected" if refused else ("Unschedulable" if why and _is_stuck(context) else "Scheduling")
    if (gated := _gated(context)) and not refused:
        reason, why = "SchedulingGated", "; ".join(filter(None, (gated, why)))
    below = f"; pools below their minReplicas: {', '.join(short)}" if short else ""
    detail = f"{f': {why}' if why else ''}{_describe_hint(context, WorkerState.WAITING)}"
    return kind.false(reason, f"{have}{below}{detail}")


def _is_stuck(context: JobContext) -> bool:
    """Return whether the workers that have a node, or may get one at once, are too few to train."""
    spec, hopeful = context.spec, _hopeful(context)
    return spec is not None and (
        len(hopeful) < spec.elastic_policy.min_replicas
        or any(hopeful.count(pool.name) < pool.min_replicas for pool in spec.worker_pools)
    )


def _hopeful(context: JobContext) -> list[str]:
    """Return the pools of all workers that have a node, are created now, or wait for the scheduler's first answer."""
    waiting = [w for w in context.workers if w.state is WorkerState.WAITING and not w.pod.unschedulable]
    found = [worker.pod.pool for worker in (*context.placed, *waiting)]
    return found + [pool.name for pool in context.replicas.create]


def _gated(context: JobContext) -> str:
    """Return which workers wait behind scheduling gates, and why; empty without any."""
    found = [worker for worker in context.workers if worker.state is WorkerState.WAITING and worker.pod.gated]
    names = listed(sorted(worker.pod.name for worker in found), most=_MOST_NAMED)
    return f"{names}: {found[0].reason}" if found else ""


def _running(context: JobContext) -> ConditionValue:
    kind = ConditionType.RUNNING
    if context.runs:
        count = len(context.training)
        message = f"{count} workers train" if count > 1 else "1 worker trains" if count else context.life.message
        beside = next((w for w in context.workers if w.state is WorkerState.READY and w.reason), None)
        message += f"; {beside.pod.name}: {beside.reason}" if beside is not None else ""
        return kind.true("Training", message)
    if context.life.stage is not LifeStage.ACTIVE:
        return kind.false(context.life.stage.value, context.life.message)
    if (worker := mismatch_of(context.workers)) is not None:
        return kind.false(_MISMATCH, _mismatch(worker))
    if (worker := context.blocked_worker) is not None:
        return kind.false(worker.pod.waiting_reason, f"{worker.pod.name}: {worker.reason}")
    if repeated(row := context.accounts.row):
        return kind.false(_REPEATED, described(row, context.now_s))
    ready = f"{context.ready} workers are ready"
    if context.ready and context.layout is not None and context.layout.message and not context.layout.holds:
        return kind.false(context.layout.reason, f"{ready}, but none trains: {context.layout.message}")
    return kind.false("WaitingForWorkers", f"{ready}{_describe_hint(context, WorkerState.STARTING)}")


def _mismatch(worker: Worker) -> str:
    image = f" (its image is {worker.pod.image})" if worker.pod.image else ""
    return f"{worker.pod.name}: {worker.reason}{image}; this counts as no failure, and is tried again every minute"


def _describe_hint(context: JobContext, state: WorkerState) -> str:
    """Return why a worker does not start, or where to look for the cause."""
    found = next((w for w in context.workers if w.state is state is WorkerState.STARTING and w.reason), None)
    if found is not None:
        return f"; {found.pod.name}: {found.reason}"
    name = next((worker.pod.name for worker in context.workers if worker.state is state and not worker.reason), "")
    return f"; {name} is {state.value.lower()}: see `kubectl describe pod {name}` for the cause" if name else ""


def _resizing(context: JobContext) -> ConditionValue:
    kind, plan, applied = ConditionType.RESIZING, context.plan, context.applied
    if not context.runs or plan is None:
        return kind.false("NotTraining")
    if context.draining:
        names = ", ".join(worker.pod.name for worker in context.draining)
        return kind.true("WorkersLeaving", f"{names}: {context.draining[0].reason}")
    if applied is not None and applied[0] < plan.generation:
        message = f"generation {plan.generation} is planned, generation {applied[0]} is in force"
        return kind.true("MembershipChanging", message)
    return kind.false("Stable")


def _restarting(context: JobContext) -> ConditionValue:
    kind = ConditionType.RESTARTING
    if context.life.stage is LifeStage.ACTIVE and context.began and not context.runs:
        message = f"{len(context.training)} members are left, and {context.ready} workers are ready"
        if repeated(row := context.accounts.row):
            return kind.true(_REPEATED, f"{message}: {described(row, context.now_s)}")
        if context.replicas.reason and _is_stuck(context):
            message = f"{message}: {context.replicas.reason}"
        return kind.true("TooFewWorkers", message)
    return kind.false("NotRestarting")


def _degraded(context: JobContext) -> ConditionValue:
    kind = ConditionType.DEGRADED
    staying = len(context.training) - len(context.draining) + len(context.spares)
    if not context.runs or context.life.stage is LifeStage.FINISHING or staying >= context.desired:
        return kind.false("AllWorkersTraining" if context.runs else "NotTraining")
    message = f"{staying} of {context.desired} workers " + ("continue training" if context.draining else "train")
    if (worker := mismatch_of(context.workers)) is not None:
        return kind.true(_MISMATCH, f"{message}; {_mismatch(worker)}")
    if (worker := context.blocked_worker) is not None:
        return kind.true(worker.pod.waiting_reason, f"{message}; {worker.pod.name}: {worker.reason}")
    if repeated(row := context.accounts.row):
        return kind.true(_REPEATED, f"{message}; {described(row, context.now_s)}")
    why = context.refusal or context.replicas.reason
    # A job that only grows has a reason for it as well, but lacks nothing.
    lacks = context.refusal or len(_hopeful(context)) < context.desired
    reason = "InsufficientCapacity" if why and lacks else "WorkersStarting"
    if (gated := _gated(context)) and not context.refusal:
        reason, why = "SchedulingGated", "; ".join(filter(None, (gated, why)))
    return kind.true(reason, f"{message}{f'; {why}' if why else ''}")


def _limited(context: JobContext) -> ConditionValue:
    kind, grant = ConditionType.WORKERS_LIMITED, context.grant
    if context.spec is None or context.life.stage is not LifeStage.ACTIVE:
        return kind.false(context.life.stage.value)
    before = find_condition(context.job.status.conditions, kind)
    if grant.undecided and before is not None:  # until a new operator has decided, the previous answer stands
        return value_of(before)
    reason = why_limited(context.spec, grant)
    holds = None if grant.undecided else reason not in ("NotLimited", "FullyGranted")
    return ConditionValue(kind, holds, reason, grant.message)


def _layout(context: JobContext, state: LayoutState) -> ConditionValue:
    drawn = layout_text(context.plan, context.telemetry) if context.plan is not None else ""
    message = "; ".join(filter(None, (drawn if state.holds else "", state.message)))
    return ConditionValue(ConditionType.LAYOUT_PLANNED, state.holds, state.reason, message)


def _shares_applied(context: JobContext) -> ConditionValue:
    kind, plan, applied = ConditionType.PLAN_APPLIED, context.plan, context.applied
    gauges = context.telemetry.gauges
    if not context.runs or plan is None:
        return kind.false("NotTraining")
    if applied is None:
        return kind.unknown("NotReported", "not every member has reported its plan yet")
    version = f"{plan.generation}.{plan.revision}"
    behind = [r for r in plan.ranks if (g := gauges.get(identity_of(r))) is not None and g.plan_schema < SCHEMA_VERSION]
    if behind and applied < plan.version:
        reads = gauges[identity_of(behind[0])].plan_schema
        message = (
            f"the image of {behind[0].worker} reads plans up to schema {reads}, and this operator writes schema "
            f"{SCHEMA_VERSION}: training goes on with plan {applied[0]}.{applied[1]} until "
            "the image in spec.template has the operator's version"
        )
        return kind.false(_MISMATCH, message)
    if applied >= plan.version:
        return kind.true("Applied", f"plan {version} is in force")
    message = f"plan {version} waits for the next boundary; {applied[0]}.{applied[1]} is in force"
    return kind.false("WaitingForBoundary", message)


def _telemetry(context: JobContext) -> ConditionValue:
    kind, telemetry = ConditionType.TELEMETRY_AVAILABLE, context.telemetry
    also = f"; {telemetry.dropped}" if telemetry.dropped else ""
    if telemetry.problem:
        return kind.false(telemetry.reason, telemetry.problem + also)
    if not telemetry.gauges:
        return kind.unknown("NotScrapedYet", f"Prometheus has not scraped any worker yet{also}")
    return kind.true(telemetry.reason, telemetry.dropped)


def _checkpoint(context: JobContext, checkpoint: Checkpoint) -> ConditionValue:
    kind, gauges = ConditionType.CHECKPOINT_HEALTHY, context.telemetry.gauges
    if not context.runs or context.telemetry.problem or not gauges:
        return kind.unknown("NotReported")
    newest_s = min(context.now_s, max((each.checkpoint_time_s or 0.0 for each in gauges.values()), default=0.0))
    since_s = max(newest_s, seconds(context.job.status.training_since))
    limit_s = checkpoint.interval_seconds * _LATE_CHECKPOINTS + _CHECKPOINT_SLACK_S
    if since_s and context.now_s - since_s > limit_s:
        age = duration_text(context.now_s - since_s)
        message = f"no checkpoint was written for {age}: look for the cause in the workers' logs"
        return kind.false("CheckpointOverdue", message)
    return kind.true("Saved" if newest_s else "NotDueYet")


def ended_condition(context: JobContext, kind: ConditionType) -> ConditionValue:
    """Return whether the job has ended in this way (``Succeeded`` or ``Failed``)."""
    life, stage = context.life, LifeStage.SUCCEEDED if kind is ConditionType.SUCCEEDED else LifeStage.FAILED
    if life.stage is stage:
        return kind.true(life.reason, life.message)
    return kind.false("Ended" if life.stage in ENDED_STAGES else "NotEnded")


def _nothing_helps(context: JobContext) -> bool:
    """Return whether the ready workers form no member, and no further worker is about to start."""
    if context.layout is None or not context.layout.stuck:
        return False
    coming = (WorkerState.WAITING, WorkerState.STARTING)
    return not any(worker.state in coming and not worker.pod.unschedulable for worker in context.workers)


def _summary(context: JobContext) -> tuple[ConditionValue, ConditionValue, ConditionValue]:
    """Return Ready, Reconciling and Stalled: exactly one of them holds."""
    stage, blocked = context.life.stage, context.inputs.blocked
    reason, message = context.life.reason, context.life.message
    if stage is LifeStage.SUSPENDED:
        ready, stalled = not context.workers, False
        message = "" if ready else f"{len(context.workers)} pods still exist"
    elif stage in (LifeStage.SUCCEEDED, LifeStage.FAILED, LifeStage.INVALID):
        ready, stalled = stage is LifeStage.SUCCEEDED, stage is not LifeStage.SUCCEEDED
    else:
        running = _running(context)
        hopeless = context.blocked_worker is not None or mismatch_of(context.workers) is not None
        hopeless = hopeless or repeated(context.accounts.row)
        ready, stalled = context.runs, not context.runs and (hopeless or _nothing_helps(context))
        reason, message = running.reason, running.message
    if blocked and stage not in (LifeStage.FAILED, LifeStage.INVALID) and not stalled:
        ready, reason, message = False, "WriteRejected", blocked
    return (
        ConditionValue(ConditionType.READY, ready, reason, message),
        ConditionValue(ConditionType.RECONCILING, not ready and not stalled, reason, message),
        ConditionValue(ConditionType.STALLED, stalled, reason, message),
    )
