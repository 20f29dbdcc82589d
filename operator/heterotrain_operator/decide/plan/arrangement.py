"""Which ranks form a member, without shares: what a plan is made of before the global batch is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The members of a plan and their ranks; what the members' shares are does not matter.

    Attributes:
        members: by index.
        ranks: by rank, member by member.
        communication: exchange between members as the layout planner expects it; ``None`` where it was not asked.
        prediction: the planner's; ``None`` where it was not asked.
    """

    members: tuple[Member, ...]
    ranks: tuple[Rank, ...]
    communication: CommunicationTime | None = None
    prediction: Prediction | None = None

    @property
    def identities(self) -> tuple[tuple[MemberId, ...], ...]:
        """The ranks of each member, by index, as telemetry names them."""
        found: list[list[MemberId]] = [[] for _ in self.members]
        for rank in self.ranks:
            found[rank.member].append(identity_of(rank))
        return tuple(map(tuple, found))

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each member: its pods; a rank that is not the first of its pod has its local rank added."""
        found: list[list[str]] = [[] for _ in self.members]
        for rank in self.ranks:
            alone = self.members[rank.member].layout.ranks == 1
            found[rank.member].append(f"{rank.worker}/{rank.local_rank}" if alone and rank.local_rank else rank.worker)
        return tuple("+".join(dict.fromkeys(pods)) for pods in found)

    def matches(self, other: Arrangement) -> bool:
        """Return whether the same ranks form the same members with the same layouts."""
        mine, theirs = ([member.layout for member in each.members] for each in (self, other))
        return self.identities == other.identities and mine == theirs


def identity_of(rank: Rank) -> MemberId:
    """Return the name of a rank in telemetry."""
    return MemberId(rank.worker_uid, rank.local_rank)


def device_name(worker_uid: str, local_rank: int) -> str:
    """Return the name of a rank's device for the layout planner."""
    return f"{worker_uid}/{local_rank}"


def arrangement_of(plan: Plan) -> Arrangement:
    """Return the arrangement of a plan."""
    return Arrangement(
        members=plan.members, ranks=plan.ranks, communication=plan.communication, prediction=plan.prediction
    )


def arrange(workers: Sequence[Worker], mode: Parallelism) -> Arrangement:
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
    return Arrangement(members=tuple(members), ranks=tuple(ranks))


def by_places(workers: Sequence[Worker], cover: Cover, places: Sequence[Sequence[str]]) -> Arrangement:
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
    return Arrangement(
        members=tuple(members),
        ranks=tuple(ranks),
        communication=CommunicationTime(last_bucket_s=cover.exchange_s),
        prediction=prediction,
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
