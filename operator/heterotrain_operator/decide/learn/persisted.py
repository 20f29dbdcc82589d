"""The persisted part of what is learned: speeds and the exchange, kept in the job's status for a new operator.

An operator learns everything else again from running workers; a pool without workers has none. A speed is kept as the
coefficients of the plan's time model, so its size does not grow with the length of the training.
"""

from __future__ import annotations

from heterotrain_core.contract.plan import CommunicationTime, ComputeTime, Plan
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.perf.counters import LONGEST_STEP_S
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen, MeasuredExchange, with_seen

from heterotrain_operator.api.internal_status import ExchangeSize, InternalExchange, InternalPool, PoolSpeed
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.text import rounded
from heterotrain_operator.decide.learn.throughput import ThroughputModel, median_member


def speed_of(pool: InternalPool, plan: Plan | None) -> PoolSpeed | None:
    """Return a pool's speed by the newest plan; the last known one if the plan has no members of the pool.

    Args:
        pool: the persisted values so far.
        plan: the newest plan.
    """
    member = median_member([m for m in plan.members if m.pool == pool.name]) if plan is not None else None
    if member is None or member.compute is None or not member.share_samples:
        return pool.speed
    compute = member.compute
    return PoolSpeed(
        samples=member.share_samples,
        per_sample_seconds=rounded(compute.per_sample_s),
        fixed_seconds=rounded(compute.fixed_s),
        backward_per_sample_seconds=rounded(compute.backward_per_sample_s),
        backward_fixed_seconds=rounded(compute.backward_fixed_s),
        update_seconds=rounded(compute.update_s),
    )


def exchange_of(before: InternalExchange | None, throughput: ThroughputModel) -> InternalExchange | None:
    """Return the job's exchange; the last known one where this operator has not seen any yet."""
    known, members = throughput.communication, throughput.communication_members
    if members < 2:  # noqa: PLR2004  # a single member exchanges nothing
        return before
    return InternalExchange(
        members=members,
        overlapped_seconds=rounded(known.overlapped_s),
        last_bucket_seconds=rounded(known.last_bucket_s),
        gamma=rounded(known.gamma),
        sizes=tuple(
            ExchangeSize(members=each.members, across=each.across, seconds=rounded(each.seconds), steps=each.steps)
            for each in throughput.exchange_seen
        ),
    )


def measured_exchange(found: InternalExchange | None) -> MeasuredExchange:
    """Return the persisted exchange; sizes that no operator would have kept are left out."""
    if found is None:
        return MeasuredExchange()
    seen: tuple[ExchangeSeen, ...] = ()
    for each in found.sizes:
        size = ExchangeSeen(members=each.members, across=each.across, seconds=each.seconds, steps=each.steps)
        seen = with_seen(seen, size)
    return MeasuredExchange(
        communication=CommunicationTime(
            overlapped_s=min(found.overlapped_seconds, LONGEST_STEP_S),
            last_bucket_s=min(found.last_bucket_seconds, LONGEST_STEP_S),
            gamma=found.gamma,
        ),
        members=found.members,
        seen=seen,
    )


def persisted_throughput(status: HeteroTrainJobStatus) -> ThroughputModel:
    """Return the job's throughput as far as the status keeps it."""
    exchange = measured_exchange(status.internal.exchange)
    return ThroughputModel(
        members={
            pool.name: SplitMember(compute=compute_time(pool.speed))
            for pool in status.internal.pools
            if pool.speed is not None
        },
        communication=exchange.communication,
        communication_members=exchange.members,
        exchange_seen=exchange.seen,
    )


def compute_time(speed: PoolSpeed) -> ComputeTime:
    """Return the time model."""
    return ComputeTime(
        per_sample_s=speed.per_sample_seconds,
        fixed_s=speed.fixed_seconds,
        backward_per_sample_s=speed.backward_per_sample_seconds,
        backward_fixed_s=speed.backward_fixed_seconds,
        update_s=speed.update_seconds,
    )
