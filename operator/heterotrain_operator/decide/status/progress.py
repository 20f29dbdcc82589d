"""Training progress in the status, from telemetry. Values stay until newer ones are known."""

from __future__ import annotations

from typing import Any

from heterotrain_core.contract.outcome import decode_outcome

from heterotrain_operator.api.status import CheckpointStatus
from heterotrain_operator.api.text import rounded
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.lifecycle import Stage
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.workers.state import WorkerState

_HUNDRED = 100
_MOST_METRICS = 16


def progress_fields(context: JobContext) -> dict[str, Any]:
    """Return the fields of the status that come from telemetry.

    Counts (epoch, step, samples) never fall. Rates are dropped as soon as training stops.
    """
    old, gauges = context.job.status, list(context.telemetry.gauges.values())
    newest = context.telemetry.newest
    fields: dict[str, Any] = {
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
    }
    if newest is not None and (newest.step or 0) >= (old.step or 0):
        user = {name: value for g in gauges for name, value in g.user_metrics.items()}
        metrics = {name: rounded(value) for name, value in sorted(user.items())}
        noise = newest.noise_scale_samples
        fields |= {
            "epoch": newest.epoch if newest.epoch is not None else old.epoch,
            "step": newest.step if newest.step is not None else old.step,
            "samples": newest.samples_committed if newest.samples_committed is not None else old.samples,
            "loss": rounded(newest.loss) if newest.loss is not None else old.loss,
            "global_batch_size": newest.global_batch_samples or old.global_batch_size,
            "noise_scale_samples": old.noise_scale_samples if noise is None else rounded(noise),
            "metrics": _bounded(metrics, old.metrics),
        }
        fields |= _completion(context, newest.samples_committed, newest.epoch_samples)
    fields |= _final_values(context, fields["metrics"])
    if context.life.stage is Stage.SUCCEEDED:
        fields |= {"progress": "100%", "progress_percentage": _HUNDRED}
    saved = [
        (g.checkpoint_time_s, g.checkpoint_step)
        for g in gauges
        if g.checkpoint_time_s and g.checkpoint_step is not None
    ]
    if saved:
        time_s, step = max(saved)
        if old.last_checkpoint is None or time_s > seconds(old.last_checkpoint.time):
            fields["last_checkpoint"] = CheckpointStatus(step=step, time=rfc3339(time_s))
    if context.runs and context.life.stage is Stage.ACTIVE and not context.telemetry.problem:
        fields |= _rates(context)
    return fields


def _final_values(context: JobContext, metrics: dict[str, float]) -> dict[str, Any]:
    """Return the values in the outcomes of finished workers: Prometheus cannot scrape an ended process."""
    finished = [worker for worker in context.workers if worker.state is WorkerState.FINISHED]
    decoded = [decode_outcome(worker.pod.ended.message) for worker in finished if worker.pod.ended]
    outcomes = [outcome for outcome in decoded if outcome is not None]
    if not outcomes:
        return {}
    newest = max(outcomes, key=lambda outcome: outcome.step)
    last = {name: rounded(value) for outcome in outcomes for name, value in sorted(outcome.metrics.items())}
    return {
        "epoch": newest.epoch,
        "step": newest.step,
        "metrics": _bounded(last, metrics),
    }


def _bounded(newest: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return the metrics, as many as the status may hold; names that are no longer reported go first."""
    return dict([*{**newest, **before, **newest}.items()][:_MOST_METRICS])


def _completion(context: JobContext, samples: int | None, epoch_samples: int | None) -> dict[str, Any]:
    if not samples or not epoch_samples or context.spec is None:
        return {}
    total = context.spec.training.epochs * epoch_samples
    percent = min(_HUNDRED, _HUNDRED * samples // total)
    found: dict[str, Any] = {"progress": f"{percent}%", "progress_percentage": percent}
    rate = context.telemetry.rates.samples_per_s
    if rate and context.runs and context.life.stage is Stage.ACTIVE:
        found["estimated_remaining_seconds"] = int(max(0, total - samples) / rate)
    return found


def _rates(context: JobContext) -> dict[str, Any]:
    rates, plan = context.telemetry.rates, context.plan
    solo = sum(rates.solo_samples_per_s.values())
    complete = plan is not None and len(rates.solo_samples_per_s) >= len(plan.members) > 0
    found: dict[str, Any] = {}
    if rates.samples_per_s is not None:
        found["samples_per_second"] = rounded(rates.samples_per_s)
        if complete and solo > 0:
            found["efficiency"] = rounded(rates.samples_per_s / solo)
    if rates.step_s is not None:
        found["step_seconds"] = rounded(rates.step_s)
    return found
