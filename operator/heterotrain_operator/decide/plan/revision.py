"""Decides when new shares are worth a new revision, which is written, delivered to every pod and read by every worker.

Shares change at a boundary, and only the newest revision counts there. Far from the boundary, the next scrape will
bring better evidence. So only a large, significant gain is written, in case no later revision arrives in time. Close to
the boundary, the evidence at hand decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from heterotrain_core.contract.plan import Boundary, BoundaryKind, Plan, Prediction
from heterotrain_planner.planning.boundary import steps_to_boundary

from heterotrain_operator.api.training import Rebalance, RebalanceBoundary
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.arrangement import identity_of

LEAST_GAIN_RATIO = 0.01
"""Least fraction of a step that new shares have to save; uncertain measurements raise it."""
FAR_GAIN_RATIO = 0.1
"""Least fraction of a step that new shares have to save far from the boundary."""
PENDING_TRUST_RATIO = 0.3
"""Trust in shares that still wait for their boundary: high enough that they do not follow each scrape's noise."""
OTHER_PREDICTION_RATIO = 0.1
"""A prediction that changes by more than this is written even with the same shares: survivors use the plan's models."""
_NEAR_SCRAPES = 2
"""Scrape intervals that count as near: at least one scrape, and usually two, fall into this time."""
_DELIVERY_S = 2.0
"""Time for the delivery of a revision to the workers."""
BURST = 12
"""Revisions that may follow each other at once."""
INTERVAL_S = 10.0
"""Seconds after which one more revision is allowed, up to ``BURST``."""


class BoundaryDistance(StrEnum):
    """How far training is from the boundary at which a new revision takes effect."""

    FAR = "far"
    """More scrapes will follow before the boundary."""
    NEAR = "near"
    """The boundary is close, or its distance is unknown."""


def next_boundary(rebalance: Rebalance, plan: Plan | None, telemetry: Telemetry) -> Boundary:
    """Return the boundary that a revision of this plan would get if it was written now.

    Where it follows the job, the boundary of a plan that still waits stays, so that refinements do not put it off.
    """
    if rebalance.boundary is not RebalanceBoundary.AUTO:
        return Boundary(kind=BoundaryKind(rebalance.boundary), every_steps=rebalance.every_steps)
    steps, took_s = 0, 0.0
    if plan is not None and plan.members:
        if not is_used(plan, telemetry) and plan.boundary.kind is BoundaryKind.STEPS:
            return plan.boundary
        steps, took_s = _in_force(telemetry)
    return Boundary(kind=BoundaryKind.STEPS, every_steps=steps_to_boundary(steps, took_s / steps if steps else 0.0))


def is_used(plan: Plan, telemetry: Telemetry) -> bool:
    """Return whether every rank of the plan reports it as the one in force."""
    gauges = [telemetry.gauges.get(identity_of(rank)) for rank in plan.ranks]
    return all(g is not None and (g.generation, g.revision) == plan.version for g in gauges)


def _in_force(telemetry: Telemetry) -> tuple[int, float]:
    """Return steps and seconds under the plan in force, of the member that has seen most of them."""
    sums = [(sum(each.steps.values()), sum(each.step_s.values())) for each in telemetry.in_force.values()]
    return max(sums, default=(0, 0.0))


def distance_to_boundary(boundary: Boundary, telemetry: Telemetry) -> BoundaryDistance:
    """Return how far this boundary is."""
    left_s = seconds_to_boundary(boundary, telemetry)
    interval_s = telemetry.scrape_interval_s
    if left_s is None or interval_s is None:
        return BoundaryDistance.NEAR
    return BoundaryDistance.NEAR if left_s <= _NEAR_SCRAPES * interval_s + _DELIVERY_S else BoundaryDistance.FAR


def seconds_to_boundary(boundary: Boundary, telemetry: Telemetry) -> float | None:
    """Return the expected time until new shares may take effect; ``None`` when unknown.

    It follows from the recent rate or, where that is faster, from the steps since the plan in force. A job that has
    just become faster reaches the boundary sooner than its rate suggests, and a late revision waits for the next one.
    """
    newest, rate = telemetry.newest, telemetry.rates.samples_per_s
    if newest is None or newest.cursor_samples is None or not newest.epoch_samples or not rate:
        return None
    steps, took_s = _in_force(telemetry)
    if took_s > 0 and newest.global_batch_samples is not None:
        rate = max(rate, newest.global_batch_samples * steps / took_s)
    left = newest.epoch_samples - newest.cursor_samples
    if boundary.kind is BoundaryKind.STEPS:
        if newest.global_batch_samples is None or newest.epoch_step is None:
            return None
        every = boundary.every_steps
        left = min(left, (every - newest.epoch_step % every) * newest.global_batch_samples)
    return left / rate


def least_gain(distance: BoundaryDistance) -> float:
    """Return the least fraction of a step that new shares have to save."""
    return FAR_GAIN_RATIO if distance is BoundaryDistance.FAR else LEAST_GAIN_RATIO


def trust_ratio(plan: Plan | None, telemetry: Telemetry, distance: BoundaryDistance) -> float:
    """Return the fraction of the noise-induced gain by which new shares must beat the current plan.

    It is 1 for shares in use, and less for shares that are still waiting for a near boundary: they were decided on less
    evidence. See ``SharesRequest.trust_ratio``.
    """
    if plan is None or distance is BoundaryDistance.FAR:
        return 1.0
    return 1.0 if is_used(plan, telemetry) else PENDING_TRUST_RATIO


def worth_writing(new: Plan, plan: Plan, distance: BoundaryDistance) -> bool:
    """Return whether other shares of a plan's members are worth a new revision.

    Args:
        new: the same members with shares that were decided with ``least_gain`` for this distance, so that changed ones
            are always worth it.
        plan: the newest plan.
        distance: how far the boundary is.
    """
    then, now = ([member.compute is not None for member in each.members] for each in (plan, new))
    batches = [
        (before.micro_batches, after.micro_batches) for before, after in zip(plan.members, new.members, strict=True)
    ]
    if new.shares != plan.shares or any(after > before for before, after in batches):
        return True  # other shares, or a share that needs more micro-batches to fit into memory
    if any(then) and not any(now):
        return False  # lost telemetry does not invalidate the models of the plan
    if not all(then) and any(now):
        return True  # a first model: without one, survivors could divide the batch only by the old shares
    if distance is BoundaryDistance.FAR:
        return False
    fewer = any(after != before for before, after in batches)
    return fewer or bool(new.probe) != bool(plan.probe) or _predicts_otherwise(new.prediction, plan.prediction)


def _predicts_otherwise(new: Prediction | None, old: Prediction | None) -> bool:
    if new is None or old is None:
        return new is not None
    return abs(math.log(new.step_s / old.step_s)) > math.log1p(OTHER_PREDICTION_RATIO)


@dataclass(frozen=True, slots=True)
class RevisionBudget:
    """Revisions that are left at a time, as in a token bucket, because each one patches pods of the job.

    Speeds that alternate would otherwise cause a revision for each scrape. Some revisions may follow each other
    quickly, as a job's first minutes need them. Changes of membership are never delayed.

    Attributes:
        left: revisions that may be written at ``at_s``; a fraction is on the way to the next one.
        at_s: time in seconds on the caller's clock.
    """

    left: float = float(BURST)
    at_s: float = 0.0

    def refilled(self, now_s: float) -> RevisionBudget:
        """Return the budget at a later time."""
        return RevisionBudget(min(float(BURST), self.left + max(0.0, now_s - self.at_s) / INTERVAL_S), now_s)

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a revision is allowed; 0 when one is allowed now."""
        return max(0.0, (1.0 - self.refilled(now_s).left) * INTERVAL_S)

    def spent(self, now_s: float) -> RevisionBudget:
        """Return the budget after one more revision; a change of membership may overdraw it."""
        return RevisionBudget(max(0.0, self.refilled(now_s).left - 1.0), now_s)
