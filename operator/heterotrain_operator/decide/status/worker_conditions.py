"""Conditions about the workers: the memory that they spare, what they found before training, and their template."""

from __future__ import annotations

from heterotrain_operator.api.conditions import ConditionType, ConditionValue, find_condition, value_of
from heterotrain_operator.api.text import listed
from heterotrain_operator.cluster_state.telemetry import PreflightProblem
from heterotrain_operator.decide.lifecycle import ENDED_STAGES
from heterotrain_operator.decide.status.context import JobContext

SMALLER_MICRO_BATCHES = "SmallerMicroBatches"
ACTIVATIONS_RECOMPUTED = "ActivationsRecomputed"
_SMALLER_PARTS = "SmallerParts"
_LISTED = 8
_MOST_NAMED = 3
_MOST_FINDINGS = 4


def memory_by_worker(context: JobContext) -> dict[str, str]:
    """Return, by uid, what each worker spares since one of its ranks ran out of memory; the others are left out."""
    found: dict[str, str] = {}
    for identity, gauges in context.telemetry.gauges.items():
        if gauges.recomputes_activations:
            found[identity.worker_uid] = ACTIVATIONS_RECOMPUTED
        elif gauges.out_of_memory:
            found.setdefault(identity.worker_uid, SMALLER_MICRO_BATCHES)
    return found


def _micro_batch_limits(context: JobContext) -> dict[str, int]:
    """Return, by uid, the least of the limits that the ranks of each worker report; the others are left out."""
    found: dict[str, int] = {}
    for identity, gauges in context.telemetry.gauges.items():
        if (limit := gauges.micro_batch_cap_samples) is not None:
            found[identity.worker_uid] = min(limit, found.get(identity.worker_uid, limit))
    return found


def memory_condition(context: JobContext) -> ConditionValue:
    """Return whether memory ran out; pools that hold less of the model come first, then recomputed activations."""
    kind = ConditionType.MEMORY_SHORT
    if text := context.derived.memory.text:
        return kind.true(_SMALLER_PARTS, text)
    if not context.runs:
        return kind.false("NotTraining")
    spared, limits = memory_by_worker(context), _micro_batch_limits(context)
    for reason, what in (
        (ACTIVATIONS_RECOMPUTED, "computes activations twice, because memory did not suffice for a single sample"),
        (SMALLER_MICRO_BATCHES, "computes smaller micro-batches since memory ran out"),
    ):
        names = [
            f"{worker.pod.name}{_size(limits.get(worker.pod.uid))} {what}"
            for worker in context.training
            if spared.get(worker.pod.uid) == reason
        ]
        if names:
            return kind.true(reason, listed(names, most=_LISTED, separator="; "))
    if not context.telemetry.gauges:
        return kind.unknown("NotReported")
    return kind.false("MemorySuffices")


def _size(limit: int | None) -> str:
    return "" if limit is None else f" (at most {limit} sample{'s' if limit > 1 else ''} at once)"


def template_condition(context: JobContext) -> ConditionValue:
    """Return the condition TemplateApplied, with the command that brings the workers up to date."""
    kind, sources, renewal = ConditionType.TEMPLATE_APPLIED, context.sources, context.renewal
    if sources is None:
        return kind.unknown("NoNewWorkers")
    older, workers = renewal.older, len(context.alive)
    command = f"`heterotrain restart {context.job.key.name}`"
    if renewal.remove or renewal.hold:
        message = f"workers are renewed; {workers - len(older)} of {workers} have the present template"
        return kind.false("Restarting", message)
    if renewal.problem:
        return kind.false("RestartBlocked", renewal.problem)
    if sources.changed:
        message = (
            f"{listed(sources.changed, most=_MOST_NAMED)} changed, which all workers must have in common: new workers "
            f"get what the {workers} others have, until {command} renews all together from their last checkpoint"
        )
        return kind.false("OlderCommonParts", message)
    if older:
        message = (
            f"{len(older)} of {workers} workers have an older template ({listed(older, most=_MOST_NAMED)}): {command} "
            "renews them one by one"
        )
        return kind.false("OlderTemplate", message)
    return kind.true("Applied")


def preflight_condition(context: JobContext) -> ConditionValue:
    """Return whether a check before training failed on a worker; limits are told, too, but fail nothing."""
    kind, gauges = ConditionType.PREFLIGHT_PASSED, context.telemetry.gauges.values()
    before = find_condition(context.job.status.conditions, kind)
    if before is not None and context.life.stage in ENDED_STAGES:  # its workers are gone, and what they found is not
        return value_of(before)
    workers: dict[PreflightProblem, set[str]] = {}
    for each in gauges:
        for problem in each.preflight_problems:
            workers.setdefault(problem, set()).add(each.worker)
    found = [
        f"{each.check}: {each.message} ({listed(sorted(workers[each]), most=_MOST_NAMED)})" for each in sorted(workers)
    ]
    message = listed(found, most=_MOST_FINDINGS, separator="; ")
    if any(not each.is_limit for each in workers):
        return kind.false("CheckFailed", message)
    if found:
        return kind.true("LimitsFound", message)
    if all(each.preflight_passed is None for each in gauges):
        return kind.unknown("NotReported")
    return kind.true("ChecksPassed")
