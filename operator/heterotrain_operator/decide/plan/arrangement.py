"""Which ranks form a member: a draft of a plan, before the global batch is divided and the plan has a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterotrain_core.contract.choices import Parallelism
from heterotrain_core.contract.plan import (
    Binding,
    CommunicationTime,
    ComputeTime,
    Layout,
    LayoutKind,
    Member,
    Plan,
    Prediction,
    Rank,
)
from heterotrain_planner.layout.result import Cover, MemberLimit
from heterotrain_planner.layout.result import Member as PlannedMember

from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.workers.state import Worker


def identities_of(plan: Plan) -> tuple[tuple[MemberId, ...], ...]:
    """Return the ranks of each member, by index, as telemetry names them."""
    return tuple(tuple(map(identity_of, ranks)) for ranks in plan.ranks_by_member)


def names_of(plan: Plan) -> tuple[str, ...]:
    """Return a name for each member: its pods; a rank that is not the first of its pod has its local rank added."""
    found: list[list[str]] = [[] for _ in plan.members]
    for rank in plan.ranks:
        alone = plan.members[rank.member].layout.ranks == 1
        found[rank.member].append(f"{rank.worker}/{rank.local_rank}" if alone and rank.local_rank else rank.worker)
    return tuple("+".join(dict.fromkeys(pods)) for pods in found)


def have_same_members(one: Plan, other: Plan) -> bool:
    """Return whether the same ranks form the same members with the same layouts."""
    mine, theirs = ([member.layout for member in each.members] for each in (one, other))
    return identities_of(one) == identities_of(other) and mine == theirs


def identity_of(rank: Rank) -> MemberId:
    """Return the name of a rank in telemetry."""
    return MemberId(rank.worker_uid, rank.local_rank)


def device_name(worker_uid: str, local_rank: int) -> str:
    """Return the name of a rank's device for the layout planner."""
    return f"{worker_uid}/{local_rank}"


def arrange(workers: Sequence[Worker], mode: Parallelism) -> Plan:
    """Return which ranks of these workers form which members.

    ``DATA`` gives one replicated member for each rank, ``SHARDED`` one sharded member for each worker. Members of
    several workers are planned (``decide/plan/stages``) and arranged by ``by_places``.
    """
    members: list[Member] = []
    ranks: list[Rank] = []
    for worker in workers:
        pod = worker.pod
        for local_rank in range(pod.ranks):
            if local_rank == 0 or mode is not Parallelism.SHARDED:
                members.append(Member(index=len(members), pool=pod.pool, share_samples=0, layout=_layout(pod, mode)))
            shard = local_rank if mode is Parallelism.SHARDED else 0
            ranks.append(_rank(pod, local_rank, rank=len(ranks), member=members[-1].index, shard=shard))
    return _draft(members, ranks)


def by_places(workers: Sequence[Worker], cover: Cover, places: Sequence[Sequence[str]]) -> Plan:
    """Return planned members on the devices that take their places.

    Shares, micro-batches and time models are the planner's, until the members are measured.

    Args:
        workers: all that may be used.
        cover: the members.
        places: by member, and by its stage or shard, the device (``device_name``) that takes it.
    """
    devices = {device_name(w.pod.uid, local): (w.pod, local) for w in workers for local in range(w.pod.ranks)}
    members: list[Member] = []
    ranks: list[Rank] = []
    for index, (planned, names) in enumerate(zip(cover.members, places, strict=True)):
        pool = "+".join(dict.fromkeys(devices[name][0].pool for name in names))
        members.append(
            Member(
                index=index,
                pool=pool,
                share_samples=planned.share_samples,
                micro_batch_samples=planned.micro_batch_samples,
                granularity_samples=planned.micro_batch_samples,
                compute=_compute(planned),
                layout=planned.layout.planned,
            )
        )
        for position, name in enumerate(names):
            pod, local_rank = devices[name]
            own = pod.pool if pod.pool != pool else ""
            stage, shard = members[-1].layout.place(position)
            ranks.append(_rank(pod, local_rank, rank=len(ranks), member=index, stage=stage, shard=shard, pool=own))
    prediction = Prediction(
        step_s=cover.step_s,
        efficiency=min(1.0, cover.flow_ratio),
        efficiency_ceiling=1.0,
        bindings=tuple(_BINDINGS[member.limit] for member in cover.members),
    )
    return replace(
        _draft(members, ranks),
        communication=CommunicationTime(last_bucket_s=cover.exchange_s),
        prediction=prediction,
    )


def _draft(members: Sequence[Member], ranks: Sequence[Rank]) -> Plan:
    return Plan(
        job_uid="",
        generation=0,
        revision=0,
        members=tuple(members),
        ranks=tuple(ranks),
        global_batch_samples=sum(member.share_samples for member in members),
    )


_BINDINGS = {
    MemberLimit.COMPUTE: Binding.COMPUTE,
    MemberLimit.LINK: Binding.COMMUNICATION,
    MemberLimit.FILL: Binding.FILL,
    MemberLimit.MEMORY: Binding.MEMORY,
}


def _compute(member: PlannedMember) -> ComputeTime:
    """Return a planned member's time: its slowest stage for each sample, and the fill of the pipeline once a step."""
    stages = member.layout.stages
    passes_s = member.compute_s - member.update_s
    slowest_s = max(stage.busy_s for stage in stages) if stages else passes_s / member.micro_batches
    return ComputeTime(
        per_sample_s=slowest_s / member.micro_batch_samples,
        fixed_s=0.0,
        backward_per_sample_s=0.0,
        backward_fixed_s=0.0,
        update_s=max(0.0, member.compute_s - member.micro_batches * slowest_s),
    )


def _rank(
    pod: PodView, local_rank: int, *, rank: int, member: int, stage: int = 0, shard: int = 0, pool: str = ""
) -> Rank:
    return Rank(
        rank=rank,
        member=member,
        worker=pod.name,
        worker_uid=pod.uid,
        address=pod.address,
        peer_port=pod.peer_port + local_rank,
        on_demand=pod.on_demand,
        local_rank=local_rank,
        stage=stage,
        shard=shard,
        pool=pool,
    )


def _layout(pod: PodView, mode: Parallelism) -> Layout:
    return Layout(kind=LayoutKind.SHARDED, shards=pod.ranks) if mode is Parallelism.SHARDED else Layout()
