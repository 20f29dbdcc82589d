"""Which ranks form a member, without shares: what a plan is made of before the global batch is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Parallelism
from heterotrain_core.contract.plan import Layout, LayoutKind, Member, Plan, Rank

from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.workers.state import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The members of a plan and their ranks; what the members' shares are does not matter.

    Attributes:
        members: by index.
        ranks: by rank, member by member.
    """

    members: tuple[Member, ...]
    ranks: tuple[Rank, ...]

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


def arrangement_of(plan: Plan) -> Arrangement:
    """Return the arrangement of a plan."""
    return Arrangement(members=plan.members, ranks=plan.ranks)


def arrange(workers: Sequence[Worker], mode: Parallelism) -> Arrangement:
    """Return which ranks of these workers form which members.

    ``DATA`` gives one replicated member for each rank, ``SHARDED`` one sharded member for each worker. Members of
    several workers, with stages, belong here. Until they are planned, ``api/parallelism`` refuses their modes.
    """
    members: list[Member] = []
    ranks: list[Rank] = []
    for worker in workers:
        pod = worker.pod
        for local_rank in range(pod.ranks):
            if local_rank == 0 or mode is not Parallelism.SHARDED:
                members.append(Member(index=len(members), pool=pod.pool, share_samples=0, layout=_layout(pod, mode)))
            ranks.append(
                Rank(
                    rank=len(ranks),
                    member=members[-1].index,
                    worker=pod.name,
                    worker_uid=pod.uid,
                    address=pod.address,
                    peer_port=keys.PEER_PORT + local_rank,
                    on_demand=pod.on_demand,
                    local_rank=local_rank,
                    shard=local_rank if mode is Parallelism.SHARDED else 0,
                )
            )
    return Arrangement(members=tuple(members), ranks=tuple(ranks))


def _layout(pod: PodView, mode: Parallelism) -> Layout:
    return Layout(kind=LayoutKind.SHARDED, shards=pod.ranks) if mode is Parallelism.SHARDED else Layout()
