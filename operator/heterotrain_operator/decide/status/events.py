"""Kubernetes events of a job: derived from the difference between old and new status, so each is published once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract.outcome import Cause
from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.conditions import ConditionType
from heterotrain_operator.api.status import Condition, HeteroTrainJobStatus
from heterotrain_operator.api.text import listed
from heterotrain_operator.decide.lifecycle import LifeStage
from heterotrain_operator.decide.plan.arrangement import names_of
from heterotrain_operator.decide.status.context import HOPELESS, JobContext

_LONGEST_MESSAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """A Kubernetes event to publish."""

    warning: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """Which changes of a condition to a status become an event."""

    reason: str
    warning: bool = False
    each_reason: bool = False
    """Published again when the condition's reason changes while its status stays."""
    only: frozenset[str] = frozenset()
    """Reasons of the condition that are published; empty means all."""
    never: frozenset[str] = frozenset()
    """Reasons of the condition that are not published."""
    after: frozenset[str] = frozenset({"", "True", "False", "Unknown"})
    """Statuses of the condition before this pass for which the event is published; empty stands for the first pass."""


_RULES = {
    (ConditionType.ACCEPTED, "False"): _Rule(reason="Invalid", warning=True, each_reason=True),
    (ConditionType.SCHEDULED, "False"): _Rule(
        reason="WorkersUnschedulable", warning=True, each_reason=True, only=frozenset({"Unschedulable", "PodsRejected"})
    ),
    (ConditionType.RUNNING, "True"): _Rule(reason="TrainingStarted"),
    (ConditionType.RESTARTING, "True"): _Rule(reason="TrainingInterrupted", warning=True),
    (ConditionType.STALLED, "True"): _Rule(
        reason="WorkerCannotStart",
        warning=True,
        each_reason=True,
        only=frozenset({*HOPELESS, Cause.VERSION_MISMATCH.value}),
    ),
    (ConditionType.RECONCILING, "True"): _Rule(
        reason="WriteRejected", warning=True, each_reason=True, only=frozenset({"WriteRejected"})
    ),
    (ConditionType.DEGRADED, "True"): _Rule(
        reason="Degraded", warning=True, each_reason=True, never=frozenset({"WorkersStarting"})
    ),
    (ConditionType.TELEMETRY_AVAILABLE, "False"): _Rule(
        reason="TelemetryUnavailable", warning=True, each_reason=True, never=frozenset({"NotConfigured"})
    ),
    (ConditionType.TELEMETRY_AVAILABLE, "True"): _Rule(reason="TelemetryAvailable", after=frozenset({"False"})),
    (ConditionType.DEADLINE_AT_RISK, "True"): _Rule(reason="DeadlineAtRisk", warning=True, each_reason=True),
    (ConditionType.DEADLINE_AT_RISK, "False"): _Rule(reason="DeadlineOnTrack", after=frozenset({"True"})),
    (ConditionType.SPEEDS_LEARNED, "False"): _Rule(
        reason="WorkerSpeedChanged", each_reason=True, only=frozenset({"SpeedChanged"})
    ),
    (ConditionType.STRAGGLER_DETECTED, "True"): _Rule(reason="StragglerDetected", warning=True),
    (ConditionType.MEMORY_SHORT, "True"): _Rule(
        reason="MemoryShort", warning=True, each_reason=True, never=frozenset({"SmallerParts"})
    ),
    (ConditionType.CHECKPOINT_HEALTHY, "False"): _Rule(reason="CheckpointOverdue", warning=True),
    (ConditionType.NUMERICALLY_SOUND, "False"): _Rule(reason="NumbersUnsound", warning=True, each_reason=True),
    (ConditionType.PREFLIGHT_PASSED, "False"): _Rule(reason="PreflightFailed", warning=True),
    (ConditionType.PROGRESSING, "False"): _Rule(
        reason="NotProgressing", warning=True, only=frozenset({"WaitingForRank"}), each_reason=True
    ),
    (ConditionType.SUSPENDED, "True"): _Rule(reason="Suspended"),
    (ConditionType.SUSPENDED, "False"): _Rule(reason="Resumed", after=frozenset({"True"})),
    (ConditionType.SUCCEEDED, "True"): _Rule(reason="Succeeded"),
    (ConditionType.FAILED, "True"): _Rule(reason="Failed", warning=True),
}


def events_of(
    context: JobContext,
    after: HeteroTrainJobStatus,
    *,
    removed: Sequence[str],
    new_plan: Plan | None,
) -> tuple[JobEvent, ...]:
    """Return the events of this pass.

    Args:
        context: inputs and decisions of this pass.
        after: the status after this pass; the status before it is the job's.
        removed: names of surplus workers that this pass removes, each with the reason.
        new_plan: the plan that this pass writes.
    """
    before = context.job.status
    found = []
    if removed:
        found.append(_event("WorkersRemoved", f"removed {listed(removed)}"))
    found += [_event("WorkerFailed", f"{w.pod.name}: {w.reason}", warning=True) for w in context.accounts.failed]
    found += [_event("ModelCutSmaller", sentence, warning=True) for sentence in context.accounts.answered]
    if context.accounts.state_lost:
        found.append(_event("TrainingBeginsAgain", context.accounts.state_lost, warning=True))
    for name, why in context.accounts.disrupted.items():
        found.append(_event("WorkerDisrupted", f"{name}: {why}" if why else name, warning=True))
    avoided = {node.name for node in before.nodes_with_failures if node.avoided}
    for node in after.nodes_with_failures:
        if node.avoided and node.name not in avoided:
            why = f"no more workers on node {node.name} for a day after {node.failures} failures; {node.reason}"
            found.append(_event("NodeAvoided", why, warning=True))
    found += _allocation_events(context, before, after)
    if new_plan is not None and new_plan.members:
        found += _plan_events(context, new_plan)
    found += _condition_events(before.conditions, after.conditions)
    if after.last_checkpoint is not None and after.last_checkpoint != before.last_checkpoint:
        found.append(_event("CheckpointSaved", f"step {after.last_checkpoint.step}"))
    if after.continued_from is not None and after.continued_from != before.continued_from:
        source = after.continued_from
        found.append(_event("Continued", f"training continues from step {source.step} of {source.source}"))
    if after.plan.applied not in (None, before.plan.applied) and after.plan.applied == after.plan.desired:
        found.append(_event("PlanApplied", f"plan {after.plan.applied} is in force in every worker"))
    return tuple(found)


def workers_created(names: Sequence[str]) -> JobEvent:
    """Return the event about workers that the API server has created; it may have refused others."""
    return _event("WorkersCreated", f"created {listed(names)}")


def _allocation_events(
    context: JobContext, before: HeteroTrainJobStatus, after: HeteroTrainJobStatus
) -> list[JobEvent]:
    had = {pool.name: pool.granted for pool in before.pools if pool.granted is not None}
    has = {pool.name: pool.granted for pool in after.pools if pool.granted is not None}
    if had == has or context.grant.undecided or context.life.stage is not LifeStage.ACTIVE:
        return []
    return [
        _event(
            "WorkersAllocated", context.grant.message or "no other job wants its nodes any more: it uses all that fit"
        )
    ]


def _condition_events(before: Sequence[Condition], after: Sequence[Condition]) -> list[JobEvent]:
    known = {condition.type: condition for condition in before}
    found = []
    for condition in after:
        rule = _RULES.get((ConditionType(condition.type), condition.status))
        old = known.get(condition.type)
        if rule is None or (old.status if old else "") not in rule.after:
            continue
        flipped = old is None or old.status != condition.status
        changed = old is not None and old.reason != condition.reason
        named = not rule.only or condition.reason in rule.only
        if (flipped or (changed and rule.each_reason)) and named and condition.reason not in rule.never:
            found.append(_event(rule.reason, condition.message or condition.reason, warning=rule.warning))
    return found


def _plan_events(context: JobContext, plan: Plan) -> list[JobEvent]:
    version, before = f"{plan.generation}.{plan.revision}", context.job.status.plan
    shares = listed([f"{name} {share}" for name, share in zip(names_of(plan), plan.shares, strict=True)])
    if plan.generation > before.newest[0]:
        return [_event("MembershipPlanned", f"plan {version}: {plan.reason} ({shares})")]
    if plan.drain:
        return [_event("WorkersLeaving", f"plan {version}: {plan.reason}", warning=True)]
    in_force = context.derived.in_force.plan
    if in_force is not None and in_force.global_batch_samples != plan.global_batch_samples:
        change = f"{in_force.global_batch_samples} -> {plan.global_batch_samples} samples a step"
        return [_event("BatchPlanned", f"plan {version}: {change}: {plan.reason} ({shares})")]
    if before.applied is not None and before.applied != before.desired:
        return []  # the previous plan still waits for its boundary, and each scrape may replace it
    return [_event("SharesPlanned", f"plan {version}: {plan.reason} ({shares})")]


def _event(reason: str, message: str, *, warning: bool = False) -> JobEvent:
    return JobEvent(warning=warning, reason=reason, message=message[:_LONGEST_MESSAGE])
