"""The members of a formation and how they divide the samples of a step. Pure: the same on every rank.

A *formation* ``g.k`` is the process group of generation ``g`` after ``k`` losses or leaves; ``g.0`` has the ranks
named by the operator. They keep the ranks that the plan gave them (``plan_ranks``); the rank in the process group
is the position in that tuple. A formation consists of whole members, and shares are theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from heterotrain_core.contract.plan import BoundaryKind, CommunicationTime, LayoutKind, Member, Plan, Rank
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember
from heterotrain_core.split.proportion import evenly, in_proportion

from heterotrain.data.progress import slice_of


class FormationId(NamedTuple):
    """``g.k``; ordered, and a row of two numbers in messages."""

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The members of a formation and the shares in force.

    Attributes:
        formation: ``g.k``.
        plan: the plan in force: generation ``g``, the revision whose shares are used.
        plan_ranks: ranks of the plan, ascending.
        members: the members of the formation, by index in the plan.
        positions: the position of each rank's member in ``members``, by rank in the process group.
        shares: samples of a full step, by member of the formation.
        since_epoch: epoch in which the plan was adopted.
        since_epoch_step: committed steps of that epoch at the adoption. Probes count from there.
    """

    formation: FormationId
    plan: Plan
    plan_ranks: tuple[int, ...]
    members: tuple[Member, ...]
    positions: tuple[int, ...]
    shares: tuple[int, ...]
    since_epoch: int = 0
    since_epoch_step: int = 0

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks, by rank in the process group."""
        return tuple(self.plan.ranks[rank] for rank in self.plan_ranks)

    @property
    def is_complete(self) -> bool:
        """Whether every member that the plan names takes part."""
        return len(self.plan_ranks) == len(self.plan.ranks)


def roster_of(
    plan: Plan, *, plan_ranks: tuple[int, ...], formation: FormationId, epoch: int = 0, epoch_step: int = 0
) -> Roster:
    """Return the roster of a formation: the plan's shares when it is complete, else shares for the remaining members.

    Args:
        plan: names all members and the global batch.
        plan_ranks: the ranks that take part: whole members.
        formation: the name of the formation.
        epoch: the epoch in which it starts, from 0.
        epoch_step: committed steps of that epoch.
    """
    indices = plan.whole_members(plan_ranks)
    at = {index: position for position, index in enumerate(indices)}
    shares = plan.shares if len(indices) == len(plan.members) else survivors_shares(plan, indices)
    return Roster(
        formation=formation,
        plan=plan,
        plan_ranks=plan_ranks,
        members=tuple(_within_cap(plan.members[index], share) for index, share in zip(indices, shares, strict=True)),
        positions=tuple(at[plan.ranks[rank].member] for rank in plan_ranks),
        shares=shares,
        since_epoch=epoch,
        since_epoch_step=epoch_step,
    )


def _within_cap(member: Member, share_samples: int) -> Member:
    """Return the member with micro-batches so small that its stages keep no more samples than its cap was planned for.

    A stage of a pipeline keeps at most as many micro-batches as the member has stages.
    """
    stages = member.layout.stages
    if stages == 1 or member.cap_samples is None or share_samples <= member.cap_samples:
        return member
    most = max(1, member.cap_samples // stages)
    return replace(member, micro_batch_samples=min(member.micro_batch_samples or most, most))


def survivors_shares(plan: Plan, indices: tuple[int, ...]) -> tuple[int, ...]:
    """Divide the global batch, in samples, among the members that are left, given by index.

    The plan's throughput models and caps decide; without them, the old shares in proportion. Every survivor computes
    this from the same plan, so all agree without a message.
    """
    members = [plan.members[index] for index in indices]
    total = plan.global_batch_samples
    if plan.boundary.kind is BoundaryKind.NEVER:
        return evenly(total, len(members))
    curves = [
        SplitMember(
            compute=member.compute,
            floor_samples=0 if member.share_samples == 0 else member.granularity_samples,
            cap_samples=member.cap_samples,
            micro_cap_samples=member.micro_batch_samples or None,
            granularity_samples=member.granularity_samples,
        )
        for member in members
        if member.compute is not None
    ]
    if len(curves) == len(members):
        split = balance(total, curves, communication=plan.communication or CommunicationTime())
        if isinstance(split, Split):
            return split.shares
    if not any(member.share_samples for member in members):
        return evenly(total, len(members))
    return in_proportion(total, tuple(member.share_samples for member in members))


def step_shares(roster: Roster, epoch: int, epoch_step: int, batch_samples: int) -> tuple[int, ...]:
    """Return the members' shares of one step: a probe's, those in force, or a smaller last step's in proportion.

    Args:
        roster: the members and the shares in force.
        epoch: from 0.
        epoch_step: committed steps of the epoch.
        batch_samples: of the step over all members; the shares' sum.
    """
    shares = (roster.plan.probe and _probe(roster, epoch=epoch, epoch_step=epoch_step)) or roster.shares
    if batch_samples == sum(shares):
        return shares
    return in_proportion(batch_samples, shares)


def slice_of_rank(roster: Roster, shares: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return the slice ``[start, stop)`` of the global batch that a rank works on.

    Args:
        roster: the members and their ranks.
        shares: samples of the step, by member of the formation.
        rank: a rank in the process group.
    """
    position = roster.positions[rank]
    start, stop = slice_of(shares, position)
    shard = roster.plan.ranks[roster.plan_ranks[rank]].shard
    first, last = roster.members[position].layout.sample_part(stop - start, shard)
    return start + first, start + last


def parts_of_member(roster: Roster, rank: int, samples: int) -> tuple[tuple[int, int], ...]:
    """Return the stretches of a data set that the ranks of a rank's member take, the rank's own one first.

    Args:
        roster: the members and their shares, in proportion to which the data set is divided.
        rank: a rank in the process group.
        samples: of the data set.
    """
    position = roster.positions[rank]
    first, last = slice_of(roster.shares, position)
    whole = sum(roster.shares)
    start, stop = samples * first // whole, samples * last // whole
    layout, own = roster.members[position].layout, roster.ranks[rank].shard
    shards = [own, *(shard for shard in range(layout.shards) if shard != own)]
    parts = (layout.sample_part(stop - start, shard) for shard in shards)
    return tuple((start + a, start + b) for a, b in parts)


def rounds_of(member: Member, share_samples: int, *, learned_cap_samples: int | None) -> int:
    """Return how many micro-batches each rank of a sharded member makes of its part of the share; 0 for other members.

    Args:
        member: the member.
        share_samples: of the member.
        learned_cap_samples: largest micro-batch of one rank that is known to fit; ``None`` for no limit.
    """
    layout = member.layout
    if layout.kind is not LayoutKind.SHARDED or layout.shards == 1:
        return 0
    rounds = min(share_samples, 1)
    for shard in range(layout.shards):
        start, stop = layout.sample_part(share_samples, shard)
        size = micro_batch_samples(member, shard, learned_cap_samples=learned_cap_samples)
        rounds = max(rounds, -(-(stop - start) // size) if size else 0)
    return rounds


def micro_batch_samples(member: Member, shard: int = 0, *, learned_cap_samples: int | None) -> int:
    """Return the largest micro-batch for a rank of a member; 0 when its share goes in one piece."""
    layout, whole = member.layout, member.micro_batch_samples
    weights = layout.sample_weights or (1,) * layout.shards
    planned = max(1, -(-whole * weights[shard] // sum(weights))) if whole else 0
    if learned_cap_samples is None:
        return planned
    return min(planned, learned_cap_samples) if planned else learned_cap_samples


def may_adopt(roster: Roster, newer: Plan, *, epoch_step: int) -> bool:
    """Return whether a newer revision of the same generation takes effect after ``epoch_step`` steps of an epoch.

    Membership is not decided here: a newer generation is taken at once, whatever the boundary.
    """
    if newer.generation != roster.formation.generation or newer.version <= roster.plan.version:
        return False
    if epoch_step == 0:
        return True
    boundary = newer.boundary
    return boundary.kind is BoundaryKind.STEPS and epoch_step % boundary.every_steps == 0


def workers_of(plan: Plan, plan_ranks: tuple[int, ...]) -> frozenset[str]:
    """Return the pods of these ranks."""
    return frozenset(plan.ranks[rank].worker for rank in plan_ranks)


def _probe(roster: Roster, *, epoch: int, epoch_step: int) -> tuple[int, ...] | None:
    plan = roster.plan
    if not roster.is_complete:
        return None
    since = roster.since_epoch_step if epoch == roster.since_epoch else 0
    index = (epoch_step - since) // plan.probe_steps
    return plan.probe[index] if 0 <= index < len(plan.probe) else None
