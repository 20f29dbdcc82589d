"""Whether a training's numbers are sound: by counters and losses while it runs, by workers' outcomes when it failed."""

from __future__ import annotations

from collections.abc import Collection

from heterotrain_core.contract.outcome import Cause

from heterotrain_operator.api.conditions import ConditionType, ConditionValue
from heterotrain_operator.cluster_state.telemetry import MemberGauges
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.workers.state import WorkerState

_UNSOUND = (Cause.NOT_FINITE, Cause.COPIES_DIFFERED)


def numbers_condition(context: JobContext) -> ConditionValue:
    """Return whether losses and gradients were finite and the copies equal; all ranks count alike."""
    kind, gauges = ConditionType.NUMERICALLY_SOUND, context.telemetry.gauges.values()
    if not context.runs:
        failed = [w for w in context.workers if w.state is WorkerState.FAILED and w.cause in _UNSOUND and w.pod.ended]
        if not failed:
            return kind.unknown("NotReported")
        newest = max(failed, key=lambda worker: worker.pod.ended.finished_s if worker.pod.ended else 0.0)
        reason = newest.cause.value if newest.cause is not None else ""
        return kind.false(reason, f"{newest.pod.name}: {newest.reason}")
    if context.telemetry.problem or not gauges:
        return kind.unknown("NotReported")
    differed, infinite = (max(n) for n in zip(*((g.divergences, g.non_finite_steps) for g in gauges), strict=True))
    if differed:
        message = (
            f"the workers' copies of weights or optimizer state differed in {differed} comparisons: look for code that "
            "changes them outside steps, and for a defective device; onDivergence: Resync makes them equal"
        )
        return kind.false(Cause.COPIES_DIFFERED.value, message)
    if infinite:
        message = (
            f"the loss or gradient of {infinite} steps was infinite or NaN{_where(gauges)}: lower the learning rate, "
            "clip gradients or use precision BF16; the workers' logs name the first step"
        )
        return kind.false(Cause.NOT_FINITE.value, message)
    return kind.true("Sound")


def diverging_condition(context: JobContext) -> ConditionValue:
    """Return whether the training loss climbs, although it is finite."""
    kind, newest, climb = ConditionType.DIVERGING, context.telemetry.newest, context.telemetry.loss_climb
    if not context.runs or context.telemetry.problem or newest is None or newest.loss is None:
        return kind.unknown("NotReported")
    if climb is None:
        return kind.false("NotClimbing")
    message = (
        f"the loss climbed from {climb.from_loss:.4g} at step {climb.from_step} to {climb.loss:.4g} at step "
        f"{climb.step}: lower the learning rate or clip gradients, and continue from a checkpoint before that; a rise "
        "that the script intends may be left alone"
    )
    return kind.true("LossClimbs", message)


def _where(gauges: Collection[MemberGauges]) -> str:
    """Return the newest such step and the last finite loss before it, where they are reported."""
    step = max((g.non_finite_step for g in gauges if g.non_finite_step is not None), default=None)
    if step is None:
        return ""
    loss = next((g.last_finite_loss for g in gauges if g.non_finite_step == step), None)
    return f", last in step {step}" + (f"; the last finite loss was {loss:.6g}" if loss is not None else "")
