"""Reports memory: the workers that spare it since it ran out, and the pools that hold less of the model."""

from __future__ import annotations

from heterotrain_operator.api.conditions import ConditionType, ConditionValue
from heterotrain_operator.api.text import listed
from heterotrain_operator.decide.status.context import JobContext

SMALLER_MICRO_BATCHES = "SmallerMicroBatches"
ACTIVATIONS_RECOMPUTED = "ActivationsRecomputed"
_SMALLER_PARTS = "SmallerParts"
_LISTED = 8


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
