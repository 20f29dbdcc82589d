"""Whether a job will be done by its deadline, for people: by how much it is early or late, by the newest allocation."""

from __future__ import annotations

from datetime import datetime

from heterotrain_operator.api.conditions import ConditionType, ConditionValue
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.lifecycle import Stage
from heterotrain_operator.decide.status.context import JobContext

_OUT_OF_DANGER = 0.03
"""Part of the time left that has to be spare before a job that was late is told to be in time again."""
_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))


def deadline_condition(context: JobContext, deadline: datetime) -> ConditionValue:
    """Return whether the deadline is at risk."""
    kind, left_s = ConditionType.DEADLINE_AT_RISK, deadline.timestamp() - context.now_s
    name, stage, spare_s = rfc3339(deadline.timestamp()), context.life.stage, context.grant.spare_s
    if stage is Stage.SUCCEEDED:
        early_s = deadline.timestamp() - (seconds(context.job.status.completion_time) or context.now_s)
        if early_s >= 0:
            return ConditionValue(
                type=kind, holds=False, reason="Met", message=f"ended {duration_text(early_s)} before {name}"
            )
        return ConditionValue(
            type=kind, holds=True, reason="Missed", message=f"ended {duration_text(-early_s)} after {name}"
        )
    if left_s <= 0:
        message = f"{name} is over: the job goes on, and ends as soon as can be"
        return ConditionValue(type=kind, holds=True, reason="Passed", message=message)
    if stage not in (Stage.ACTIVE, Stage.FINISHING):
        return ConditionValue(type=kind, holds=None, reason=stage.value)
    if spare_s is None:
        message = f"how long it takes until {name} is not known before steps were measured"
        return ConditionValue(type=kind, holds=None, reason="NotMeasured", message=message)
    before = next((c for c in context.job.status.conditions if c.type == kind.value), None)
    was_late = before is not None and before.status == "True"
    if spare_s < (_OUT_OF_DANGER * left_s if was_late else 0.0):
        late = f"ends {duration_text(-spare_s)} after {name}" if spare_s < 0 else f"ends barely before {name}"
        message = f"{late} with all that it may have: raise maxReplicas, add a pool, or move the deadline"
        return ConditionValue(type=kind, holds=True, reason="TooLate", message=message)
    message = f"ends {duration_text(spare_s)} before {name}, what losses may cost included"
    return ConditionValue(type=kind, holds=False, reason="InTime", message=message)


def duration_text(seconds_: float) -> str:
    """Return a duration in words, in two digits: no more is known, and a status should not change with every look."""
    for unit_s, unit in _UNITS:
        if seconds_ >= unit_s:
            return f"{float(f'{seconds_ / unit_s:.2g}'):g} {unit}"
    return f"{seconds_:.0f} s"
