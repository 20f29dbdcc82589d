"""Reports whether steps are committed, and the rank that all others wait for when they are not.

A rank reports for how long it has waited for others. The one that stops the training is the one that does not wait, or
does not report at all: the rank that looks stuck is never the one that is.
"""

from __future__ import annotations

from heterotrain_operator.api.conditions import ConditionType, ConditionValue
from heterotrain_operator.api.text import duration_text, listed
from heterotrain_operator.decide.plan.arrangement import identity_of
from heterotrain_operator.decide.status.context import JobContext

STEPS = 10
"""Mean steps without a commit after which training does not progress."""
LEAST_S = 10.0
"""Shorter pauses are not reported: changes of members and writing checkpoints take seconds."""
FIRST_STEP_S = 600.0
"""Time for the first steps, whose duration is not known: compilers and caches may take minutes."""
INTERVALS = 2
"""Scrapes that may pass until a commit is seen."""
_LISTED = 4


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
