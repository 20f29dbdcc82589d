"""Estimates whether a job ends by its deadline, and how early or late, by the newest allocation."""

from __future__ import annotations

from datetime import datetime

from heterotrain_operator.api.conditions import ConditionType, ConditionValue, condition_holds
from heterotrain_operator.api.text import duration_text
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.lifecycle import LifeStage
from heterotrain_operator.decide.status.context import JobContext

_OUT_OF_DANGER = 0.03
"""Fraction of the remaining time that has to be spare before a late job counts as in time again."""


def deadline_condition(context: JobContext, deadline: datetime) -> ConditionValue:
    """Return whether the deadline is at risk."""
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
