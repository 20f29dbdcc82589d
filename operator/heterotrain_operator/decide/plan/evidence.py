"""What the telemetry of a job shows about each member of a plan, and about its other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterotrain_core.contract.choices import Parallelism
from heterotrain_core.contract.plan import Layout, Member, Plan
from heterotrain_planner.perf.memory import MemoryPeak, micro_batch_cap
from heterotrain_planner.perf.ranks import observations_of_member
from heterotrain_planner.planning.evidence import MemberEvidence

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Telemetry
from heterotrain_operator.decide.plan.arrangement import identities_of, names_of
from heterotrain_operator.decide.plan.speeds import MemberKey


def keys_of(draft: Plan) -> tuple[MemberKey, ...]:
    """Return what identifies each member among those whose speed is known, by index."""
    found = []
    for member, ranks in zip(draft.members, identities_of(draft), strict=True):
        divided = f", cut at {member.layout.cuts}" if member.layout.cuts else ""
        divided += f", recomputing {member.layout.recomputing}" if member.layout.recomputing else ""
        divided += f", parts {member.layout.state_weights}" if member.layout.state_weights else ""
        found.append(MemberKey(ranks, f"{member.pool}{divided}"))
    return tuple(found)


def evidence_of(
    spec: HeteroTrainJobSpec, draft: Plan, telemetry: Telemetry, *, observed: bool
) -> tuple[MemberEvidence, ...]:
    """Return the evidence about each member, by index.

    Args:
        spec: the job's spec.
        draft: the members and their ranks.
        telemetry: measurements of each rank.
        observed: whether the members' steps are part of it; limits are in any case.
    """
    members = draft.members
    floor = 1 if spec.training.base_batch_samples >= len(members) else 0
    limits = {pool.name: pool.micro_batch_size for pool in spec.worker_pools}
    return tuple(
        MemberEvidence(
            member=name,
            pool=key.pool,
            observations=observations_of_member([telemetry.observations.get(rank, ()) for rank in key.ranks])
            if observed
            else (),
            floor_samples=floor,
            cap_samples=member.cap_samples,
            micro_cap_samples=_micro_cap_of_member(spec, member, key.ranks, telemetry, limits.get(member.pool)),
            granularity_samples=member.granularity_samples,
        )
        for member, name, key in zip(members, names_of(draft), keys_of(draft), strict=True)
    )


def other_evidence(draft: Plan, telemetry: Telemetry) -> tuple[MemberEvidence, ...]:
    """Return the evidence about other ranks: those that have left, and those that are not in the plan yet."""
    names = {identity for member in identities_of(draft) for identity in member}
    return tuple(
        MemberEvidence(
            member=f"{identity.worker_uid}/{identity.local_rank}",
            pool=telemetry.pools[identity],
            observations=telemetry.observations[identity],
        )
        for identity in telemetry.observations
        if identity not in names and identity in telemetry.pools
    )


def _micro_cap_of_member(
    spec: HeteroTrainJobSpec,
    member: Member,
    ranks: Sequence[MemberId],
    telemetry: Telemetry,
    limit_samples: int | None,
) -> int | None:
    """Return the largest micro-batch of a member; ``limit_samples`` is that of one rank by the job's spec."""
    layout = member.layout
    scales = _scales(layout)
    caps = [math.floor(limit_samples * min(scales))] if limit_samples is not None else []
    by_mode = spec.parallelism.is_planned and spec.parallelism.mode is not Parallelism.AUTO
    if (by_mode or layout.cuts or layout.state_weights) and member.micro_batch_samples:
        caps.append(member.micro_batch_samples)  # it was planned together with what the ranks hold
    for index, gauges in enumerate(telemetry.gauges.get(rank) for rank in ranks):
        scale = scales[index % layout.shards]  # the ranks of each stage follow each other by shard
        if gauges is not None and (cap := _micro_cap(gauges, scale)) is not None:
            caps.append(cap)
    return min(caps, default=None)


def _scales(layout: Layout) -> tuple[float, ...]:
    """Return for each shard how many times as large as its own part a micro-batch of the member is."""
    weights = layout.sample_weights or (1,) * layout.shards
    return tuple(sum(weights) / max(1, weight) for weight in weights)


def _micro_cap(gauges: MemberGauges, scale: float) -> int | None:
    """Return the largest micro-batch of the member that is expected to fit into the rank's memory, ``None`` if unknown.

    Ranks report peaks by the member's micro-batch, and the size that ran out of memory by their own part of it.
    """
    peaks = [MemoryPeak(micro_batch_samples=size, peak_bytes=used) for size, used in gauges.peak_memory_bytes.items()]
    if (cap := gauges.micro_batch_cap_samples) is not None:
        ran_out = round(2 * cap * scale)  # the cap is half of the size that ran out
        peaks.append(MemoryPeak(micro_batch_samples=ran_out, ran_out=True))
    return micro_batch_cap(peaks, memory_bytes=gauges.device_memory_bytes).samples
