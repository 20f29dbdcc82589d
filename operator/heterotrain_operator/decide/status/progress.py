"""How training goes, from telemetry; what was known once stays until something newer is known."""

from __future__ import annotations

from typing import Any

from heterotrain_core.contract.outcome import decode_outcome

from heterotrain_operator.api.status import CheckpointStatus
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.lifecycle import Stage
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.workers.state import WorkerState

_HUNDRED = 100


def progress_fields(context: JobContext) -> dict[str, Any]:
    """Return the fields of the status that come from telemetry.

    Counts (epoch, step, samples) never fall, rates are dropped as soon as nothing trains.
    """
    old, gauges = context.job.status, list(context.telemetry.gauges.values())
    newest = context.telemetry.newest
    fields: dict[str, Any] = {
        "epoch": old.epoch,
        "step": old.step,
        "samples": old.samples,
        "loss": old.loss,
        "accuracy": old.accuracy,
        "global_batch_size": old.global_batch_size,
        "noise_scale_samples": old.noise_scale_samples,
        "metrics": old.metrics,
        "progress": old.progress,
        "progress_percentage": old.progress_percentage,
        "last_checkpoint": old.last_checkpoint,
    }
    if newest is not None and (newest.step or 0) >= (old.step or 0):
        user = {name: value for g in gauges for name, value in g.user_metrics.items()}
        fields |= {
            "epoch": newest.epoch if newest.epoch is not None else old.epoch,
            "step": newest.step if newest.step is not None else old.step,
            "samples": newest.samples_committed if newest.samples_committed is not None else old.samples,
            "loss": _rounded(newest.loss) if newest.loss is not None else old.loss,
            "accuracy": _rounded(user["accuracy"]) if "accuracy" in user else old.accuracy,
            "global_batch_size": newest.global_batch_samples or old.global_batch_size,
            "noise_scale_samples": (
                old.noise_scale_samples if newest.noise_scale_samples is None else _rounded(newest.noise_scale_samples)
            ),
            "metrics": {**old.metrics, **{k: _rounded(v) for k, v in sorted(user.items())[:16] if k != "accuracy"}},
        }
        fields |= _progress(context, newest.samples_committed, newest.epoch_samples)
    fields |= _last_words(context, fields["metrics"])
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


def _last_words(context: JobContext, metrics: dict[str, float]) -> dict[str, Any]:
    """Return what the workers that finished left in their outcome: nobody scrapes a process that has ended."""
    said = [
        decode_outcome(w.pod.ended.message) for w in context.workers if w.state is WorkerState.FINISHED and w.pod.ended
    ]
    outcomes = [outcome for outcome in said if outcome is not None]
    if not outcomes:
        return {}
    newest = max(outcomes, key=lambda outcome: outcome.step)
    last = {name: _rounded(value) for outcome in outcomes for name, value in sorted(outcome.metrics.items())}
    accuracy = {"accuracy": last.pop("accuracy")} if "accuracy" in last else {}
    return {
        "epoch": newest.epoch,
        "step": newest.step,
        "metrics": dict([*{**metrics, **last}.items()][:16]),
        **accuracy,
    }


def _progress(context: JobContext, samples: int | None, epoch_samples: int | None) -> dict[str, Any]:
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
    rates = context.telemetry.rates
    solo = sum(rates.solo_samples_per_s.values())
    complete = context.plan is not None and len(rates.solo_samples_per_s) >= len(context.plan.members) > 0
    found: dict[str, Any] = {}
    if rates.samples_per_s is not None:
        found["samples_per_second"] = _rounded(rates.samples_per_s)
        if complete and solo > 0:
            found["efficiency"] = _rounded(rates.samples_per_s / solo)
    if rates.step_s is not None:
        found["step_seconds"] = _rounded(rates.step_s)
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
