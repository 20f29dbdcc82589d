"""How fast a job is with any workers, from all of its plans so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.contract.plan import CommunicationTime, LayoutKind, Member, Plan, Rank
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.perf.exchange import LEAST_EXCHANGES
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen, MeasuredExchange, with_seen
from heterotrain_planner.perf.expected_maximum import common_variation

from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.arrangement import identity_of

LEAST_PACE, MOST_PACE = 0.25, 1.25
"""Bounds of a job's pace: values beyond them come from the measurement, not from the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputModel:
    """How fast a job is, from all of its plans so far; a single plan describes only its own members.

    Attributes:
        members: by pool, a rank of median speed.
        communication: the exchange model.
        communication_members: number of ranks when the exchange was measured; 0 before.
        exchange_seen: the exchange as measured with each number of members, the newest last.
        variation: relative standard deviation of a rank's step time, without hiccups.
        hiccups: rare long steps of a rank.
        pace: ratio of measured to predicted samples per second, over the whole time of a membership.
    """

    members: Mapping[str, SplitMember] = field(default_factory=dict)
    communication: CommunicationTime = field(default_factory=CommunicationTime)
    communication_members: int = 0
    exchange_seen: tuple[ExchangeSeen, ...] = ()
    variation: float = 0.0
    hiccups: Hiccups = NO_HICCUPS
    pace: float = 1.0

    @property
    def exchange(self) -> MeasuredExchange:
        """What is known of the exchange."""
        return MeasuredExchange(
            communication=self.communication, members=self.communication_members, seen=self.exchange_seen
        )


def throughput_of(before: ThroughputModel, plan: Plan | None, telemetry: Telemetry) -> ThroughputModel:
    """Return a job's throughput model: from its newest plan and, for pools without members in it, from before."""
    if plan is None or not plan.members:
        return before
    members = dict(before.members)
    ranks = plan.ranks_by_member
    for pool in {member.pool for member in plan.members}:
        member = median_member([member for member in plan.members if member.pool == pool])
        if member is not None and member.compute is not None:
            members[pool] = SplitMember(
                compute=member.compute,
                cap_samples=member.cap_samples,
                micro_cap_samples=_micro_cap(member, ranks[member.index], telemetry),
            )
    throughput = replace(before, members=members)
    if plan.communication is not None:
        throughput = replace(throughput, communication=plan.communication, communication_members=len(plan.members))
    measured = telemetry.exchange
    if measured is not None and measured.generation == plan.generation and measured.steps >= LEAST_EXCHANGES:
        seen = ExchangeSeen(
            members=len(plan.members),
            across=len({rank.worker_uid for rank in plan.ranks}) > 1,
            seconds=measured.seconds,
            steps=measured.steps,
        )
        throughput = replace(throughput, exchange_seen=with_seen(throughput.exchange_seen, seen))
    if plan.prediction is not None and len(plan.members) > 1:
        found = plan.prediction
        relative = found.hiccups.relative_to(found.own_s)
        variation = common_variation(found.efficiency_ceiling, len(plan.members), relative)
        throughput = replace(throughput, variation=variation, hiccups=found.hiccups)
    sustained = telemetry.rates.sustained
    if plan.prediction is not None and sustained is not None and sustained.generation == plan.generation:
        pace = sustained.samples_per_s * plan.prediction.step_s / plan.global_batch_samples
        throughput = replace(throughput, pace=min(MOST_PACE, max(LEAST_PACE, pace)))
    return throughput


def _micro_cap(member: Member, ranks: Sequence[Rank], telemetry: Telemetry) -> int | None:
    found = [telemetry.gauges.get(identity_of(rank)) for rank in ranks]
    learned = [g.micro_batch_cap_samples for g in found if g is not None and g.micro_batch_cap_samples is not None]
    caps = [member.micro_batch_samples or None, *(cap * member.layout.shards for cap in learned)]
    return min((cap for cap in caps if cap is not None), default=None)


def median_member(members: Sequence[Member]) -> Member | None:
    """Return the member of median speed among those of known speed (the slower of two); ``None`` without one.

    Stages on several workers are left out: their speed is not that of a worker of the pool.
    """
    known = [
        (m.compute.per_sample_s + m.compute.backward_per_sample_s, m)
        for m in members
        if m.compute is not None and m.layout.kind is not LayoutKind.PIPELINE
    ]
    return sorted(known, key=lambda each: each[0])[len(known) // 2][1] if known else None
