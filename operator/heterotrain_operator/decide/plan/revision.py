"""When a better plan is worth a new revision: each one is written, delivered to every pod and looked at by every worker.

Shares change at a boundary, and only the newest revision counts there. While it is far the next scrape will know better, so
only a large gain that is no chance is written down, in case it is the last that gets through. Close to it, what is known
then decides.
"""

from __future__ import annotations

import math
from enum import StrEnum

from heterotrain_core.contract.plan import BoundaryKind, Plan
from heterotrain_core.planning.shares import SharesDecision

from heterotrain_operator.cluster_state.telemetry import MemberId, Telemetry

FAR_GAIN_RATIO = 0.1
PENDING_TRUST_RATIO = 0.3
"""Of what chance could promise, for shares that wait: high enough that they do not follow each scrape's noise."""
OTHER_PREDICTION_RATIO = 0.1
"""A prediction that moved by more than this is told although the shares stay: survivors divide by the plan's models."""
_NEAR_SCRAPES = 2
"""So that one scrape at least, and mostly two, fall into the time that counts as near."""
_DELIVERY_S = 2.0


class BoundaryDistance(StrEnum):
    """What a new revision would meet."""

    FAR = "far"
    """There will be more scrapes before the boundary."""
    NEAR = "near"
    """The boundary is close, or nobody knows how far."""


def distance_to_boundary(plan: Plan, telemetry: Telemetry) -> BoundaryDistance:
    """Return what a revision of this plan would meet."""
    left_s = seconds_to_boundary(plan, telemetry)
    interval_s = telemetry.scrape_interval_s
    if left_s is None or interval_s is None:
        return BoundaryDistance.NEAR
    return BoundaryDistance.NEAR if left_s <= _NEAR_SCRAPES * interval_s + _DELIVERY_S else BoundaryDistance.FAR


def seconds_to_boundary(plan: Plan, telemetry: Telemetry) -> float | None:
    """Return about how long it takes until other shares may take effect; ``None`` when unknown.

    By the rate of late or, where that is faster, by the steps since the plan in force: a job that has just sped up arrives
    sooner than its rate says, and what comes after the boundary waits for the next one.
    """
    newest, rate = telemetry.newest, telemetry.rates.samples_per_s
    if newest is None or newest.cursor_samples is None or not newest.epoch_samples or not rate:
        return None
    steps = sum(sum(each.steps.values()) for each in telemetry.in_force.values())
    took_s = sum(sum(each.step_s.values()) for each in telemetry.in_force.values())
    if took_s > 0 and newest.global_batch_samples is not None:
        rate = max(rate, newest.global_batch_samples * steps / took_s)
    left = newest.epoch_samples - newest.cursor_samples
    if plan.boundary.kind is BoundaryKind.STEPS:
        if newest.global_batch_samples is None or newest.epoch_step is None:
            return None
        every = plan.boundary.every_steps
        left = min(left, (every - newest.epoch_step % every) * newest.global_batch_samples)
    return left / rate


def least_gain(distance: BoundaryDistance, *, chosen: float) -> float:
    """Return the part of a step that other shares have to save however certain it is; ``chosen`` is the user's ``minGainPercent``."""
    return max(chosen, FAR_GAIN_RATIO) if distance is BoundaryDistance.FAR else chosen


def trust_ratio(plan: Plan | None, telemetry: Telemetry, distance: BoundaryDistance) -> float:
    """Return how much of what chance could promise speaks for the newest plan's shares (``SharesRequest.trust_ratio``).

    All of it for shares in use, part of it near the boundary for some that wait: they were decided on less evidence.
    """
    if plan is None or distance is BoundaryDistance.FAR:
        return 1.0
    gauges = [telemetry.gauges.get(MemberId(member.worker_uid, member.local_rank)) for member in plan.members]
    used = all(g is not None and (g.generation, g.revision) == plan.version for g in gauges)
    return 1.0 if used else PENDING_TRUST_RATIO


def worth_writing(decision: SharesDecision, plan: Plan, distance: BoundaryDistance) -> bool:
    """Tell whether a decision for the plan's members deserves a new revision.

    Args:
        decision: made with ``least_gain`` of this moment, so that changed shares are worth it by themselves.
        plan: the newest plan, of the same members.
        distance: what the revision would meet.
    """
    known = [member.compute is not None for member in plan.members]
    old = [_micro_batches(member.micro_batch_samples, member.share_samples) for member in plan.members]
    new = [
        _micro_batches(*will)
        for will in zip(decision.division.micro_batch_samples, decision.division.shares, strict=True)
    ]
    if decision.changed or any(will > was for was, will in zip(old, new, strict=True)):
        return True  # other shares, or one that does not fit into memory in as few pieces
    if any(known) and not any(decision.division.compute):
        return False  # telemetry that went missing is no reason to forget what the plan rests on
    if not all(known) and any(decision.division.compute):
        return True  # a first model: without one, survivors could only divide by the old shares
    if distance is BoundaryDistance.FAR:
        return False
    return new != old or bool(decision.division.probe) != bool(plan.probe) or _predicts_otherwise(decision, plan)


def _micro_batches(micro_batch_samples: int, share_samples: int) -> int:
    """Return the micro-batches that a share is cut into; 0 samples a piece stands for the whole share at once."""
    return -(-share_samples // micro_batch_samples) if micro_batch_samples else min(share_samples, 1)


def _predicts_otherwise(decision: SharesDecision, plan: Plan) -> bool:
    new, old = decision.division.prediction, plan.prediction
    if new is None or old is None:
        return new is not None
    return abs(math.log(new.step_s / old.step_s)) > math.log1p(OTHER_PREDICTION_RATIO)
