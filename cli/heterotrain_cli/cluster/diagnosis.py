"""Diagnoses a job that waits or is slow, and says what to do: sentences from its status. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from heterotrain_operator.api.conditions import ConditionType
from heterotrain_operator.api.status import WorkerStatus

from heterotrain_cli.cluster.values import duration, number, seconds_since
from heterotrain_cli.cluster.view import JobSummary

_DONE = ("Finished", "Left")
"""States of workers that ended as they should."""
GOOD_FRACTION = 0.9
"""Of the ceiling: an efficiency above it is not called slow."""
SLOW_FRACTION = 0.8
"""Of the ceiling: an efficiency below it is a problem, also while speeds are still being learned."""
WAITED_S = 60
"""Seconds after which a job that does not train waits for something that somebody may have to do."""
PATIENCE_S = 30
"""Seconds after which an operator that has not answered is a problem."""
_BAD_WHEN_FALSE = (
    ConditionType.ACCEPTED, ConditionType.TEMPLATE_APPLIED, ConditionType.SCHEDULED, ConditionType.TELEMETRY_AVAILABLE,
    ConditionType.PREFLIGHT_PASSED, ConditionType.CHECKPOINT_HEALTHY, ConditionType.PROGRESSING,
    ConditionType.NUMERICALLY_SOUND,
)  # fmt: skip
_BAD_WHEN_TRUE = (
    ConditionType.STALLED, ConditionType.RESTARTING, ConditionType.DEGRADED, ConditionType.WORKERS_LIMITED,
    ConditionType.DEADLINE_AT_RISK, ConditionType.STRAGGLER_DETECTED, ConditionType.MEMORY_SHORT,
    ConditionType.DIVERGING,
)  # fmt: skip
_REMEDIES = {
    "Compute": "its computation takes the whole step: give it a smaller share, a faster device, or bf16",
    "Communication": "the gradient exchange takes longer than its computation: a larger batch, compressed gradients "
    "(training.communication.compression) or a faster network help",
    "Memory": "its memory allows no larger share: a smaller microBatchSize or activation checkpointing help",
    "Floor": "it is too slow even for the smallest share: leave its pool out, or train with a larger batch",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation.

    Attributes:
        what: one sentence.
        is_problem: whether somebody should act.
    """

    what: str
    is_problem: bool = True


def findings(view: JobSummary) -> tuple[Finding, ...]:
    """Return what holds a job up, the gravest first; a single reassuring sentence when nothing does."""
    if view.has_ended:
        return (Finding(view.status.reason, is_problem=view.status.state == "Failed"),)
    found = [*_conditions(view), *_workers(view), *_speed(view)]
    if not view.status.conditions:
        is_late = (view.age_s or 0.0) > PATIENCE_S
        why = ": check that it runs and watches this namespace (`heterotrain-operator check`)" if is_late else ""
        found.append(Finding(f"the operator has not answered yet{why}", is_problem=is_late))
    if view.status.state == "Suspended":
        name = view.body["metadata"]["name"]
        found.append(Finding(f"suspended: `heterotrain resume {name}` continues it", is_problem=False))
    elif not any(each.is_problem for each in found):
        found.append(_waits(view) or Finding("nothing is wrong", is_problem=False))
    return tuple(found)


def _waits(view: JobSummary) -> Finding | None:
    """Return for how long a job has not trained, and what its status says; ``None`` where it trains, or is new."""
    running = view.condition(ConditionType.RUNNING)
    if running is None or running.status == "True":
        return None
    waited_s = seconds_since(running.last_transition_time, view.now)
    if waited_s is None or waited_s < WAITED_S:
        return None
    said = view.status.reason or running.message or running.reason
    where = "see `kubectl describe pod` of its workers" if view.status.workers else "see `kubectl describe htj`"
    return Finding(f"it has not trained for {duration(waited_s)}: {said}; {where}")


def _conditions(view: JobSummary) -> list[Finding]:
    found = []
    for kinds, bad in ((_BAD_WHEN_FALSE, "False"), (_BAD_WHEN_TRUE, "True")):
        for kind in kinds:
            condition = view.condition(kind)
            if condition is not None and condition.status == bad and condition.reason != "Suspended":
                said = condition.message or condition.reason
                found.append(Finding(f"{kind.value} is {bad.lower()} ({condition.reason}): {said}"))
    return found


def _workers(view: JobSummary) -> list[Finding]:
    return [
        Finding(f"worker {each.name}: {each.message}")
        for each in view.status.workers
        if each.message and each.state not in _DONE
    ]


def _speed(view: JobSummary) -> list[Finding]:
    status = view.status
    efficiency, ceiling = status.efficiency, status.plan.efficiency_ceiling
    if efficiency is None or status.state not in ("Running", "Degraded"):
        return []
    learned = view.condition(ConditionType.SPEEDS_LEARNED)
    best = ceiling or 1.0
    if learned is not None and learned.status != "True":
        slow = efficiency < SLOW_FRACTION * best
        busy = f"the workers are only {100 * efficiency:.0f} % busy while " if slow else ""
        words = f"{busy}speeds are still being learned: {learned.message or learned.reason}"
        return [Finding(words, is_problem=slow)]
    if efficiency >= GOOD_FRACTION * best:
        text = (
            f"the workers are {100 * efficiency:.0f} % busy; the measured noise of step times allows {100 * best:.0f} %"
        )
        return [Finding(text, is_problem=False)]
    return [
        Finding(f"the workers are only {100 * efficiency:.0f} % busy, where {100 * best:.0f} % are possible"),
        *_bindings(status.workers),
    ]


def _bindings(workers: tuple[WorkerStatus, ...]) -> list[Finding]:
    """Return what limits the workers, once for each limit."""
    counts = Counter(each.binding for each in workers if each.binding in _REMEDIES)
    found = []
    for binding, count in counts.most_common():
        names = [each.name for each in workers if each.binding == binding]
        slowest = min(
            (each for each in workers if each.binding == binding),
            key=lambda each: each.samples_per_second if each.samples_per_second is not None else float("inf"),
        )
        which = names[0] if count == 1 else f"{count} workers, the slowest {slowest.name}"
        rate = f" ({number(slowest.samples_per_second)} samples/s)" if slowest.samples_per_second is not None else ""
        found.append(Finding(f"{which}{rate}: {_REMEDIES[str(binding)]}"))
    return found
