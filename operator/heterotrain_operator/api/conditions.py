"""Conditions of a job: their types, and the rule by which their times move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from heterotrain_operator.api.status import MAX_MESSAGE_LENGTH, Condition


class ConditionType(StrEnum):
    """Aspects of a job's state."""

    ACCEPTED = "Accepted"
    """The spec is understood and the API server takes its pods."""
    SUSPENDED = "Suspended"
    SCHEDULED = "Scheduled"
    """At least the minimum of workers has nodes."""
    RUNNING = "Running"
    """Training goes on."""
    RESIZING = "Resizing"
    """A change of membership is under way."""
    RESTARTING = "Restarting"
    """Training has begun, and waits for enough workers to go on."""
    DEGRADED = "Degraded"
    """Training goes on with fewer workers than wanted."""
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    PLAN_APPLIED = "PlanApplied"
    """Every member uses the newest plan."""
    WORKERS_LIMITED = "WorkersLimited"
    """The job has fewer workers than it could, because others need its nodes more or because fewer are cheaper."""
    DEADLINE_AT_RISK = "DeadlineAtRisk"
    """With objective: Deadline, the job is expected to end too late, or has."""
    SPEEDS_LEARNED = "SpeedsLearned"
    """Every member's speed is known well enough to predict other shares."""
    STRAGGLER_DETECTED = "StragglerDetected"
    """Without a certain worker the others would be faster."""
    TELEMETRY_AVAILABLE = "TelemetryAvailable"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    READY = "Ready"
    """What was asked for is reached; with the next two, what kstatus (Helm, Flux, Argo) reads."""
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionValue:
    """A condition without its times. ``holds`` is ``None`` when it can't be told."""

    type: ConditionType
    holds: bool | None
    reason: str
    message: str = ""


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
                reason=value.reason,
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
