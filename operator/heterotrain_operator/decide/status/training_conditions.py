"""Conditions about the training: whether its numbers are sound, steps are committed, and it ends by its deadline.

A rank reports for how long it has waited for others. The one that stops the training is the one that does not wait, or
does not report at all: the rank that looks stuck is never the one that is.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from heterotrain_core.contract.outcome import Cause

from heterotrain_operator.api.conditions import ConditionType, ConditionValue, condition_holds
from heterotrain_operator.api.text import duration_text, listed
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.cluster_state.telemetry import MemberGauges
from heterotrain_operator.decide.lifecycle import LifeStage
from heterotrain_operator.decide.plan.arrangement import identity_of
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.workers.state import WorkerState

_UNSOUND = (Cause.NOT_FINITE, Cause.COPIES_DIFFERED)
STEPS = 10
"""Mean steps without a commit after which training does not progress."""
LEAST_S = 10.0
"""Shorter pauses are not reported: changes of members and writing checkpoints take seconds."""
FIRST_STEP_S = 600.0
"""Time for the first steps, whose duration is not known: compilers and caches may take minutes."""
INTERVALS = 2
"""Scrapes that may pass until a commit is seen."""
_LISTED = 4
_OUT_OF_DANGER = 0.03
"""Fraction of the remaining time that has to be spare before a late job counts as in time again."""


def numbers_condition(context: JobContext) -> ConditionValue:
    """Return whether losses and gradients were finite and the copies equal; all ranks count alike.

    Counters tell while the job runs, and the workers' outcomes when it has failed.
    """
    kind, gauges = ConditionType.NUMERICALLY_SOUND, context.telemetry.gauges.values()
    if not context.runs:
        failed = [w for w in context.workers if w.state is WorkerState.FAILED and w.cause in _UNSOUND and w.pod.ended]
        if not failed:
            return kind.unknown("NotReported")
        newest = max(failed, key=lambda worker: worker.pod.ended.finished_s if worker.pod.ended else 0.0)
        reason = newest.cause.value if newest.cause is not None else ""
        return kind.false(reason, f"{newest.pod.name}: {newest.reason}")
    if context.telemetry.problem or not gauges:
        return kind.unknown("NotReported")
    differed, infinite = (max(n) for n in zip(*((g.divergences, g.non_finite_steps) for g in gauges), strict=True))
    if differed:
        message = (
            f"the workers' copies of weights or optimizer state differed in {differed} comparisons: look for code that "
            "changes them outside steps, and for a defective device; onDivergence: Resync makes them equal"
        )
        return kind.false(Cause.COPIES_DIFFERED.value, message)
    if infinite:
        message = (
            f"the loss or gradient of {infinite} steps was infinite or NaN{_where(gauges)}: lower the learning rate, "
            "clip gradients or use precision BF16; the workers' logs name the first step"
        )
        return kind.false(Cause.NOT_FINITE.value, message)
    return kind.true("Sound")


def diverging_condition(context: JobContext) -> ConditionValue:
    """Return whether the training loss climbs, although it is finite."""
    kind, newest, climb = ConditionType.DIVERGING, context.telemetry.newest, context.telemetry.loss_climb
    if not context.runs or context.telemetry.problem or newest is None or newest.loss is None:
        return kind.unknown("NotReported")
    if climb is None:
        return kind.false("NotClimbing")
    message = (
        f"the loss climbed from {climb.from_loss:.4g} at step {climb.from_step} to {climb.loss:.4g} at step "
        f"{climb.step}: lower the learning rate or clip gradients, and continue from a checkpoint before that; a rise "
        "that the script intends may be left alone"
    )
    return kind.true("LossClimbs", message)


def _where(gauges: Collection[MemberGauges]) -> str:
    """Return the newest such step and the last finite loss before it, where they are reported."""
    step = max((g.non_finite_step for g in gauges if g.non_finite_step is not None), default=None)
    if step is None:
        return ""
    loss = next((g.last_finite_loss for g in gauges if g.non_finite_step == step), None)
    return f", last in step {step}" + (f"; the last finite loss was {loss:.6g}" if loss is not None else "")


def progressing_condition(context: JobContext) -> ConditionValue:
    """Return whether the job commits steps at its own pace."""
    kind, plan, telemetry = ConditionType.PROGRESSING, context.plan, context.telemetry
    if not context.runs or plan is None or not plan.members:
        return kind.unknown("NotTraining")
    if telemetry.problem or not telemetry.gauges or not telemetry.commit_s:
        return kind.unknown("NotReported")
    step_s, limit_s = telemetry.rates.step_s, FIRST_STEP_S
    if step_s is not None:
        limit_s = max(STEPS * step_s, LEAST_S, INTERVALS * (telemetry.member_interval_s or 0.0))
    if telemetry.newest_sample_s - telemetry.commit_s <= limit_s:
        return kind.true("Committing")
    # The limit instead of the time so far: a message that grows would rewrite the status with each scrape.
    pace = f" (a step took {duration_text(step_s)} on average)" if step_s is not None and step_s >= 1 else ""
    none = f"no step was committed for over {duration_text(limit_s)}{pace}"
    awaited, waiting = _awaited(context)
    if awaited and waiting:
        message = (
            f"{none}: {listed(awaited, most=_LISTED)}; {len(waiting)} other ranks wait. The log of a waiting rank, "
            f"`kubectl logs {waiting[0]}`, has the stack of the rank that it waits for; delete that pod to go on "
            "without it"
        )
        return kind.false("WaitingForRank", message)
    if waiting:
        message = f"{none}: all ranks wait in an exchange; look for a network that drops connections, and at the logs"
        return kind.false("AllWait", message)
    message = f"{none}: no rank waits for another; all run code between steps, such as an evaluation or a checkpoint"
    return kind.false("NoCommit", message)


def _awaited(context: JobContext) -> tuple[list[str], list[str]]:
    """Return the ranks that do not wait, with what they do, and the workers of those that do."""
    awaited, waiting = [], []
    for rank in context.plan.ranks if context.plan is not None else ():
        gauges = context.telemetry.gauges.get(identity_of(rank))
        name = f"rank {rank.local_rank} of {rank.worker}"
        if gauges is None:
            awaited.append(f"{name} does not report")
        elif gauges.waiting_s is None:
            continue  # its image does not report waits, or it has no formation
        elif gauges.waiting_s > 0:
            waiting.append(rank.worker)
        else:
            awaited.append(f"{name} runs code of its own")
    return awaited, waiting


def deadline_condition(context: JobContext, deadline: datetime) -> ConditionValue:
    """Return whether the deadline is at risk, and how early or late the job ends, by the newest allocation."""
    kind, left_s = ConditionType.DEADLINE_AT_RISK, deadline.timestamp() - context.now_s
    name, stage, spare_s = rfc3339(deadline.timestamp()), context.life.stage, context.grant.spare_s
    if stage is LifeStage.SUCCEEDED:
        early_s = deadline.timestamp() - (seconds(context.job.status.completion_time) or context.now_s)
        if early_s >= 0:
            return kind.false("Met", f"ended {duration_text(early_s)} before {name}")
        return kind.true("Missed", f"ended {duration_text(-early_s)} after {name}")
    if left_s <= 0:
        return kind.true("Passed", f"the deadline {name} has passed: the job goes on and ends as soon as possible")
    if stage not in (LifeStage.ACTIVE, LifeStage.FINISHING):
        return kind.unknown(stage.value)
    if spare_s is None:
        message = f"no steps are measured yet, so it is unknown whether the job ends before {name}"
        return kind.unknown("NotMeasured", message)
    was_late = condition_holds(context.job.status.conditions, kind)
    if spare_s < (_OUT_OF_DANGER * left_s if was_late else 0.0):
        late = f"ends {duration_text(-spare_s)} after {name}" if spare_s < 0 else f"ends barely before {name}"
        message = f"{late} with all the workers that it may have: raise maxReplicas, add a pool, or move the deadline"
        return kind.true("Late", message)
    return kind.false("OnTrack", f"ends {duration_text(spare_s)} before {name}, including the expected cost of losses")
