"""Conditions about measured speeds: whether they are known, which worker is a straggler, how exact the prediction is.

Shares are decided only when telemetry brings new data. The passes in between repeat the previous statement.
"""

from __future__ import annotations

import math

from heterotrain_planner.perf.model import FitQuality, MemberModel
from heterotrain_planner.planning.evidence import settled

from heterotrain_operator.api.conditions import ConditionType, ConditionValue, find_condition, value_of
from heterotrain_operator.api.status import MAX_MESSAGE_LENGTH, PredictionStatus
from heterotrain_operator.api.text import listed, rounded
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.arrangement import identity_of, names_of
from heterotrain_operator.decide.status.context import JobContext

LEAST_STEPS = 10
"""Measured steps per rank below which a mean step time is not reported."""
_LISTED = 8


def speed_conditions(context: JobContext) -> tuple[ConditionValue, ConditionValue]:
    """Return whether speeds are known well enough, and whether a worker slows the others down."""
    return _speeds_learned(context), _straggler(context)


def prediction_of(context: JobContext) -> PredictionStatus | None:
    """Return predicted and measured step time of the plan in force."""
    before = context.job.status.prediction
    plan = context.plan
    if plan is None or not plan.members or not context.runs:
        return before if context.began else None
    if context.applied is None:
        return before
    if context.applied < plan.version:
        return _while_a_newer_one_waits(before, context.telemetry, context.applied)
    if plan.prediction is None:
        return None
    steps, seconds = 0, 0.0
    for rank in plan.ranks:
        done, share = context.telemetry.in_force.get(identity_of(rank)), plan.members[rank.member].share_samples
        if done is not None and done.version == plan.version:
            steps += done.steps.get(share, 0)
            seconds += done.step_s.get(share, 0.0)
    # Every rank counts every step, so the minimum applies to each of them.
    enough = steps >= LEAST_STEPS * len(plan.ranks) and math.isfinite(seconds)
    name = f"{plan.generation}.{plan.revision}"
    return _beside_each_other(name, plan.prediction.step_s, seconds / steps if enough else None)


def _while_a_newer_one_waits(
    before: PredictionStatus | None, telemetry: Telemetry, version: tuple[int, int]
) -> PredictionStatus | None:
    """Return the values of the plan in force, whose prediction only the status has, with its newest measurements.

    Where shares change at every boundary, a newer plan waits for most of the time.
    """
    if before is None or before.plan != f"{version[0]}.{version[1]}":
        return before
    done = [each for each in telemetry.in_force.values() if each.version == version and each.steps]
    shares = [max(each.steps, key=each.steps.__getitem__) for each in done]
    steps = sum(each.steps[share] for each, share in zip(done, shares, strict=True))
    seconds = sum(each.step_s[share] for each, share in zip(done, shares, strict=True))
    if not done or steps < LEAST_STEPS * len(done) or not math.isfinite(seconds):
        return before
    return _beside_each_other(before.plan, before.predicted_step_seconds, seconds / steps)


def _beside_each_other(plan: str, predicted_s: float, measured_s: float | None) -> PredictionStatus:
    return PredictionStatus(
        plan=plan,
        predicted_step_seconds=rounded(predicted_s, digits=3),
        measured_step_seconds=rounded(measured_s, digits=3) if measured_s is not None else None,
    )


def batch_reason_of(context: JobContext) -> str | None:
    """Return why an adaptive batch has its size; the previous reason while nothing new was decided."""
    if context.spec is None or context.spec.training.adaptive_batch is None:
        return None
    if context.shares is None or not context.shares.batch_reason:
        return context.job.status.batch_reason
    return context.shares.batch_reason[:MAX_MESSAGE_LENGTH]


def _speeds_learned(context: JobContext) -> ConditionValue:
    kind, shares = ConditionType.SPEEDS_LEARNED, context.shares
    if not context.runs or context.plan is None:
        return kind.false("NotTraining")
    if shares is None:
        return _as_before(context, kind)
    decision = shares.decision
    if decision is None:
        return kind.unknown("NoValidShares", shares.reason)
    models = dict(zip(names_of(shares.plan), decision.models, strict=True))
    if decision.relearn:
        changes = listed([f"{name} {_change(models[name])}" for name in decision.relearn], most=_LISTED, separator="; ")
        probing = "other shares are tried, and the best ones follow"
        then = probing if decision.probe else "its speed is being measured again"
        return kind.false("SpeedChanged", f"{changes}: {then}")
    unsure = [
        f"{name} ({model.quality.value}: {model.reason})"
        for name, model in models.items()
        if model.quality is not FitQuality.OK
    ]
    if unsure:
        # Constant shares or a very noisy rank never give a complete model: theirs holds only near the observed shares.
        learning = not all(map(settled, models.values()))
        known = "is not known well yet" if learning else "is known only near the shares that were used"
        which = listed(unsure, most=_LISTED, separator="; ")
        message = f"the speed of {len(unsure)} of {len(models)} ranks {known}: {which}"
        return kind.false("Learning" if learning else "PartlyLearned", message)
    return kind.true("Learned", f"the speed of {len(models)} ranks is known")


def _straggler(context: JobContext) -> ConditionValue:
    kind, shares = ConditionType.STRAGGLER_DETECTED, context.shares
    if not context.runs or context.plan is None:
        return kind.false("NotTraining")
    if shares is None:
        return _as_before(context, kind)
    decision = shares.decision
    if decision is None or not all(map(settled, decision.models)):
        return kind.unknown("Learning", "the workers' speeds are not known well enough yet")
    if not decision.stragglers:
        return kind.false("NoStraggler")
    names, members = names_of(shares.plan), shares.plan.members
    slow = [f"{names[s.member]} (pool {members[s.member].pool}): {s.reason}" for s in decision.stragglers]
    which = listed(slow, most=_LISTED, separator="; ")
    return kind.true("WorkerTooSlow", f"{which}; lower its pool's maxReplicas, or train with a larger batch")


def _as_before(context: JobContext, kind: ConditionType) -> ConditionValue:
    before = find_condition(context.job.status.conditions, kind)
    if before is not None and before.reason != "NotTraining":
        return value_of(before)
    return kind.unknown("NotScrapedYet", "Prometheus has not scraped any worker yet")


def _change(model: MemberModel) -> str:
    ratio = model.drift_ratio
    if ratio >= 1:
        return f"takes {ratio:.2g} times as long as before for the same samples"
    return f"is {1 / ratio:.2g} times as fast as before"
