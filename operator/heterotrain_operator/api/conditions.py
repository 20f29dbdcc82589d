"""Conditions of a job: their types, and the update of their times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from heterotrain_operator.api.status import MAX_MESSAGE_LENGTH, Condition


class ConditionType(StrEnum):
    """Types of conditions."""

    ACCEPTED = "Accepted"
    """The spec is valid, and the API server accepts the workers' pods."""
    SUSPENDED = "Suspended"
    TEMPLATE_APPLIED = "TemplateApplied"
    """All workers were made from the present template and pools."""
    SCHEDULED = "Scheduled"
    """At least the minimum of workers has nodes."""
    RUNNING = "Running"
    """The job trains."""
    RESIZING = "Resizing"
    """Workers join or leave."""
    RESTARTING = "Restarting"
    """Training began, but waits until enough workers are ready again."""
    DEGRADED = "Degraded"
    """The job trains with fewer workers than wanted."""
    PROGRESSING = "Progressing"
    """Steps are committed at the pace that was measured before."""
    PREFLIGHT_PASSED = "PreflightPassed"
    """What the workers check before they train has found nothing that would make it fail."""
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    NUMERICALLY_SOUND = "NumericallySound"
    """All losses and gradients were finite, and the ranks' copies of the state were equal."""
    DIVERGING = "Diverging"
    """The training loss climbs, beyond its noise."""
    PLAN_APPLIED = "PlanApplied"
    """Every worker uses the newest plan."""
    WORKERS_LIMITED = "WorkersLimited"
    """The job gets fewer workers than it could have: other jobs need the nodes more, or fewer workers are cheaper."""
    LAYOUT_PLANNED = "LayoutPlanned"
    """With parallelism Pipeline or Auto: it is decided which workers form a member and what each one holds."""
    DEADLINE_AT_RISK = "DeadlineAtRisk"
    """With objective: Deadline, the job ended too late or is expected to."""
    SPEEDS_LEARNED = "SpeedsLearned"
    """Every worker's speed is known well enough to predict the effect of other shares."""
    STRAGGLER_DETECTED = "StragglerDetected"
    """The other workers would be faster without a certain one."""
    MEMORY_SHORT = "MemoryShort"
    """Memory ran out: workers spare it, or pools hold less of the model."""
    TELEMETRY_AVAILABLE = "TelemetryAvailable"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    READY = "Ready"
    """The desired state is reached. kstatus (Helm, Flux, Argo CD) reads this and the next two."""
    RECONCILING = "Reconciling"
    STALLED = "Stalled"

    def true(self, reason: str, message: str = "") -> ConditionValue:
        """Return the condition, which holds."""
        return ConditionValue(self, True, reason, message)

    def false(self, reason: str, message: str = "") -> ConditionValue:
        """Return the condition, which does not hold."""
        return ConditionValue(self, False, reason, message)

    def unknown(self, reason: str, message: str = "") -> ConditionValue:
        """Return the condition where it is not known whether it holds."""
        return ConditionValue(self, None, reason, message)


class ConditionValue(NamedTuple):
    """A condition without its times. ``holds`` is ``None`` when it is not known."""

    type: ConditionType
    holds: bool | None
    reason: str
    message: str = ""


def value_of(condition: Condition) -> ConditionValue:
    """Return a condition as it was set."""
    holds = {"True": True, "False": False}.get(condition.status)
    return ConditionValue(ConditionType(condition.type), holds, condition.reason, condition.message)


def set_conditions(
    before: Sequence[Condition], values: Iterable[ConditionValue], *, generation: int, now: str
) -> tuple[Condition, ...]:
    """Return the conditions after this pass: ``lastTransitionTime`` moves only when the status flips."""
    known = {condition.type: condition for condition in before}
    result = []
    for value in values:
        status = {True: "True", False: "False", None: "Unknown"}[value.holds]
        old = known.get(value.type.value)
        result.append(
            Condition(
                type=value.type.value,
                status=status,
                reason=value.reason[:MAX_MESSAGE_LENGTH],
                message=value.message[:MAX_MESSAGE_LENGTH],
                last_transition_time=old.last_transition_time if old is not None and old.status == status else now,
                observed_generation=generation,
            )
        )
    return tuple(result)


def find_condition(conditions: Iterable[Condition], kind: ConditionType) -> Condition | None:
    """Return the condition of this type, ``None`` where it was never set."""
    return next((condition for condition in conditions if condition.type == kind.value), None)


def condition_holds(conditions: Iterable[Condition], kind: ConditionType) -> bool:
    """Return whether the condition of this type is ``True``."""
    found = find_condition(conditions, kind)
    return found is not None and found.status == "True"
