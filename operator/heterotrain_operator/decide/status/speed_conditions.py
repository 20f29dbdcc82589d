"""What was learned of the members' speeds and of the plan's prediction, for people.

Shares are decided only when telemetry brought something new; in passes between, what was said last still holds.
"""

from __future__ import annotations

from heterotrain_core.perf.model import FitQuality, MemberModel
from heterotrain_core.planning.evidence import settled

from heterotrain_operator.api.conditions import ConditionType, ConditionValue
from heterotrain_operator.api.status import MAX_MESSAGE_LENGTH, PredictionStatus
from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.decide.status.context import JobContext

LEAST_STEPS = 10
"""Fewer measured steps are no mean worth telling."""
_LISTED = 8


def speed_conditions(context: JobContext) -> tuple[ConditionValue, ConditionValue]:
    """Return whether speeds are known well enough, and whether somebody holds the others up."""
    return _learned(context), _straggler(context)


def prediction_of(context: JobContext) -> PredictionStatus | None:
    """Return predicted against measured step time of the plan in force; what was known last while a newer plan waits."""
    before = context.job.status.prediction
    plan = context.plan
    if plan is None or not plan.members or not context.runs:
        return before if context.began else None
    if context.applied is None or context.applied < plan.version:
        return before
    if plan.prediction is None:
        return None
    steps, seconds = 0, 0.0
    for member in plan.members:
        done = context.telemetry.in_force.get(MemberId(member.worker_uid, member.local_rank))
        if done is not None and done.version == plan.version:
            steps += done.steps.get(member.share_samples, 0)
            seconds += done.step_s.get(member.share_samples, 0.0)
    predicted_s = plan.prediction.step_s
    # Every member counts every step, so each one has to have seen so many of them.
    measured_s = seconds / steps if steps >= LEAST_STEPS * len(plan.members) else None
    return PredictionStatus(
        plan=f"{plan.generation}.{plan.revision}",
        predicted_step_seconds=_rounded(predicted_s),
        measured_step_seconds=_rounded(measured_s) if measured_s is not None else None,
        measured_over_predicted=_rounded(measured_s / predicted_s) if measured_s is not None else None,
    )


def batch_reason_of(context: JobContext) -> str | None:
    """Return why an adaptive batch is what it is; what was said last while nothing new was decided."""
    if context.spec is None or context.spec.training.adaptive_batch is None:
        return None
    if context.shares is None or not context.shares.batch_reason:
        return context.job.status.batch_reason
    return context.shares.batch_reason[:MAX_MESSAGE_LENGTH]


def _learned(context: JobContext) -> ConditionValue:
    kind = ConditionType.SPEEDS_LEARNED
    if not context.runs or context.plan is None:
        return ConditionValue(type=kind, holds=False, reason="NotTraining")
    if context.shares is None:
        return _as_before(context, kind)
    decision = context.shares.decision
    if decision is None:
        return ConditionValue(type=kind, holds=None, reason="NotShared", message=context.shares.reason)
    names = [f"{m.worker}/{m.local_rank}" if m.local_rank else m.worker for m in context.shares.members]
    models = dict(zip(names, decision.models, strict=True))
    if decision.relearn:
        said = [f"{name} {_slower(models[name])}" for name in decision.relearn]
        then = (
            "other shares are tried, and the best ones follow"
            if decision.division.probe
            else "it is being learned anew"
        )
        return ConditionValue(type=kind, holds=False, reason="SpeedChanged", message=f"{_listed(said)}: {then}")
    unsure = [
        f"{name} ({model.quality.value}: {model.reason})"
        for name, model in models.items()
        if model.quality is not FitQuality.OK
    ]
    if unsure:
        # A baseline that never varies its shares, or a rank that is too noisy, stays so: its model holds where it was seen.
        learning = not all(map(settled, models.values()))
        known = "is not known well yet" if learning else "is known only near the shares that were used"
        message = f"the speed of {len(unsure)} of {len(models)} ranks {known}: {_listed(unsure)}"
        return ConditionValue(type=kind, holds=False, reason="Learning" if learning else "Unclear", message=message)
    return ConditionValue(type=kind, holds=True, reason="Learned", message=f"the speed of {len(models)} ranks is known")


def _straggler(context: JobContext) -> ConditionValue:
    kind = ConditionType.HELD_UP
    if not context.runs or context.plan is None:
        return ConditionValue(type=kind, holds=False, reason="NotTraining")
    if context.shares is None:
        return _as_before(context, kind)
    decision = context.shares.decision
    if decision is None or not all(map(settled, decision.models)):
        return ConditionValue(
            type=kind, holds=None, reason="Learning", message="speeds are not known well enough to tell"
        )
    stragglers = decision.stragglers
    if not stragglers:
        return ConditionValue(type=kind, holds=False, reason="NobodyTooSlow")
    members = [context.shares.members[straggler.member] for straggler in stragglers]
    said = [
        f"{member.worker} (pool {member.pool}): {straggler.reason}"
        for member, straggler in zip(members, stragglers, strict=True)
    ]
    return ConditionValue(
        type=kind,
        holds=True,
        reason="WorkerTooSlow",
        message=f"{_listed(said)}; lower its pool's maxReplicas, or train with a larger batch",
    )


def _as_before(context: JobContext, kind: ConditionType) -> ConditionValue:
    for condition in context.job.status.conditions:
        if condition.type == kind.value and condition.reason != "NotTraining":
            holds = {"True": True, "False": False}.get(condition.status)
            return ConditionValue(type=kind, holds=holds, reason=condition.reason, message=condition.message)
    return ConditionValue(type=kind, holds=None, reason="NothingYet", message="no worker has been scraped yet")


def _slower(model: MemberModel) -> str:
    ratio = model.drift_ratio
    if ratio >= 1:
        return f"takes {ratio:.2g} times as long as before for the same samples"
    return f"is {1 / ratio:.2g} times as fast as before"


def _listed(said: list[str]) -> str:
    shown = "; ".join(said[:_LISTED])
    return f"{shown}; and {len(said) - _LISTED} more" if len(said) > _LISTED else shown


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
