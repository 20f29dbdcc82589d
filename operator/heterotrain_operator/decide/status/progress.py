"""Training progress in the status, from telemetry. Values stay until newer ones are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heterotrain_core.contract.outcome import decode_outcome

from heterotrain_operator.api.status import CheckpointStatus, ContinuedStatus, HeteroTrainJobStatus
from heterotrain_operator.api.text import rounded
from heterotrain_operator.api.types import count
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.cluster_state.saved import SavedCheckpoint, saved_by
from heterotrain_operator.cluster_state.telemetry import MemberGauges
from heterotrain_operator.decide.lifecycle import LifeStage
from heterotrain_operator.decide.objects.training_settings import resume_source
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.work_left import work_left
from heterotrain_operator.decide.workers.state import WorkerState

_HUNDRED = 100
_MOST_METRICS = 16


def earlier_progress(old: HeteroTrainJobStatus) -> dict[str, Any]:
    """Return the progress of the previous status, without its rates."""
    return {
        "epoch": old.epoch,
        "step": old.step,
        "samples": old.samples,
        "loss": old.loss,
        "global_batch_size": old.global_batch_size,
        "noise_scale_samples": old.noise_scale_samples,
        "metrics": old.metrics,
        "progress": old.progress,
        "progress_percentage": old.progress_percentage,
        "last_checkpoint": old.last_checkpoint,
        "continued_from": old.continued_from,
    }


def progress_fields(context: JobContext) -> dict[str, Any]:
    """Return the fields of the status that come from telemetry.

    Counts (epoch, step, samples) never fall. Rates are dropped as soon as training stops.
    """
    old, gauges = context.job.status, list(context.telemetry.gauges.values())
    newest = context.telemetry.newest
    fields = earlier_progress(old)
    if newest is not None and (newest.step or 0) >= (old.step or 0):
        user = {name: value for g in gauges for name, value in sorted(g.user_metrics.items())}
        newer = {
            "epoch": _count(newest.epoch),
            "step": _count(newest.step),
            "samples": _count(newest.samples_committed),
            "loss": _number(newest.loss),
            "global_batch_size": _count(newest.global_batch_samples) or None,
            "noise_scale_samples": _number(newest.noise_scale_samples),
            "metrics": _bounded(user, old.metrics),
        }
        fields |= {name: value for name, value in newer.items() if value is not None}
        fields |= _completion(context, newest)
    fields |= _final_values(context, fields["metrics"])
    if context.life.stage is LifeStage.SUCCEEDED:
        fields |= {"progress": "100%", "progress_percentage": _HUNDRED}
    fields["continued_from"] = _continued(context)
    saved = _saved(context)
    if saved is not None:
        time_s, step = saved
        known = old.last_checkpoint
        # A worker's clock may be ahead: then the time at which the step is first seen counts, once.
        ahead = time_s > context.now_s and known is not None and known.step == count(step)
        time_s = min(time_s, context.now_s)
        if known is None or (time_s > seconds(known.time) and not ahead):
            fields["last_checkpoint"] = CheckpointStatus(step=count(step), time=rfc3339(time_s))
    if context.runs and context.life.stage is LifeStage.ACTIVE and not context.telemetry.problem:
        fields |= _rates(context)
    return fields


def _continued(context: JobContext) -> ContinuedStatus | None:
    """Return from which checkpoint of an earlier job training continued; it stays once it is known."""
    steps = [g.resumed_step for g in context.telemetry.gauges.values() if g.resumed_step is not None]
    source = resume_source(context.job)
    if not steps or source is None:
        return context.job.status.continued_from
    return ContinuedStatus(source=source, step=count(max(steps)))


def _saved(context: JobContext) -> SavedCheckpoint | None:
    """Return the newest checkpoint in telemetry, and in the outcomes of ended workers, whose pods may be gone."""
    gauges = context.telemetry.gauges.values()
    scraped = [
        SavedCheckpoint(g.checkpoint_time_s, g.checkpoint_step)
        for g in gauges
        if g.checkpoint_time_s and g.checkpoint_step is not None
    ]
    told = [context.inputs.saved, *(saved_by(worker.pod) for worker in context.workers)]
    return max([*scraped, *(saved for saved in told if saved is not None)], default=None)


def _final_values(context: JobContext, metrics: dict[str, float]) -> dict[str, Any]:
    """Return the values in the outcomes of finished workers: Prometheus cannot scrape an ended process."""
    finished = [worker for worker in context.workers if worker.state is WorkerState.FINISHED]
    decoded = [decode_outcome(worker.pod.ended.message) for worker in finished if worker.pod.ended]
    outcomes = [outcome for outcome in decoded if outcome is not None]
    if not outcomes:
        return {}
    newest = max(outcomes, key=lambda outcome: outcome.step)
    last = {name: value for outcome in outcomes for name, value in sorted(outcome.metrics.items())}
    return {
        "epoch": count(newest.epoch),
        "step": count(newest.step),
        "metrics": _bounded(last, metrics),
    }


def _bounded(newest: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, as many as the status may hold; names that are no longer reported go first."""
    known = {name: number for name, value in newest.items() if (number := _number(value)) is not None}
    return dict([*{**known, **before, **known}.items()][:_MOST_METRICS])


def _count(value: float | None) -> int | None:
    return None if value is None else count(value)


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else rounded(value)


def _completion(context: JobContext, newest: MemberGauges) -> dict[str, Any]:
    left = None if context.spec is None else work_left(context.spec.training, newest)
    if left is None or not newest.samples_committed or newest.samples_committed < 0:
        return {}
    found: dict[str, Any] = {"progress": f"{left.percent}%", "progress_percentage": left.percent}
    rate = context.telemetry.rates.samples_per_s
    if rate is not None and rate > 0 and context.runs and context.life.stage is LifeStage.ACTIVE:
        found["estimated_remaining_seconds"] = count(count(left.samples) / rate)
    return found


def _rates(context: JobContext) -> dict[str, Any]:
    rates, plan = context.telemetry.rates, context.plan
    members = context.solo_samples_per_s
    solo = sum(members.values())
    complete = plan is not None and len(members) == len(plan.members) > 0
    found: dict[str, Any] = {}
    found["samples_per_second"] = _number(rates.samples_per_s)
    if rates.samples_per_s is not None and complete and solo > 0:
        found["efficiency"] = _number(rates.samples_per_s / solo)
    found["step_seconds"] = _number(rates.step_s)
    return found
