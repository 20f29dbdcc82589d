"""Which ranks form a member: a draft of a plan, before the global batch is divided and the plan has a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterotrain_core.contract.choices import Parallelism
from heterotrain_core.contract.plan import (
    CommunicationTime,
    Layout,
    LayoutKind,
    Member,
    Plan,
    Rank,
)
from heterotrain_planner.layout.result import Cover

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

    Args:
        workers: all that may be used.
        cover: the members, with shares, micro-batches and time models by the planner until they are measured.
        places: by member, and by its stage or shard, the device (``device_name``) that takes it.
    """
    devices = {device_name(w.pod.uid, local): (w.pod, local) for w in workers for local in range(w.pod.ranks)}
    ranks: list[Rank] = []
    for member, names in zip(cover.members, places, strict=True):
        for position, name in enumerate(names):
            pod, local_rank = devices[name]
            own = pod.pool if pod.pool != member.pool else ""
            stage, shard = member.layout.place(position)
            ranks.append(
                _rank(pod, local_rank, rank=len(ranks), member=member.index, stage=stage, shard=shard, pool=own)
            )
    return replace(
        _draft(cover.members, ranks),
        communication=CommunicationTime(last_bucket_s=cover.exchange_s),
        prediction=cover.prediction,
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
