"""The ranks of one formation, and the result of a rendezvous. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain_core.contract.plan import Plan, Rank

from heterotrain.membership.devices import DeviceIds
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import FormationId
from heterotrain.network.connection_setup import HostedStore
from heterotrain.network.heartbeat import PeerKey, key_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FormationMembership:
    """The ranks of a formation that a rank was in or tried to enter: where its search for the next one starts.

    Attributes:
        held: a plan of the formation's generation.
        formation: its name.
        plan_ranks: its ranks, as ranks of the plan.
        leaving: those of its ranks that announced their leave.
    """

    held: HeldPlan
    formation: FormationId
    plan_ranks: tuple[int, ...]
    leaving: frozenset[int] = frozenset()

    @property
    def plan(self) -> Plan:
        """The plan that names the ranks."""
        return self.held.plan

    @property
    def ranks(self) -> list[Rank]:
        """The ranks of the formation, by rank in its process group."""
        return [self.plan.ranks[rank] for rank in self.plan_ranks]

    @property
    def next_formation(self) -> FormationId:
        """The formation on which the survivors of this one vote."""
        return FormationId(generation=self.formation.generation, number=self.formation.number + 1)

    def key(self, rank: int) -> PeerKey:
        """Return the key of a rank of the plan."""
        return key_of(self.plan.ranks[rank])

    def others(self, me: PeerKey) -> list[Rank]:
        """Return all ranks except ``me``."""
        return [rank for rank in self.ranks if key_of(rank) != me]

    def mates(self, me: PeerKey) -> list[Rank]:
        """Return the other ranks of ``me``'s member; none if the plan does not name ``me``."""
        own = next((rank.member for rank in self.plan.ranks if key_of(rank) == me), None)
        return [rank for rank in self.plan.ranks if rank.member == own and key_of(rank) != me]

    def takes_part(self, key: PeerKey) -> bool:
        """Return whether this rank is in the formation."""
        return any(key_of(rank) == key for rank in self.ranks)

    def leaves(self, key: PeerKey) -> bool:
        """Return whether this rank announced its leave."""
        return any(self.key(rank) == key for rank in self.leaving)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousResult:
    """A formation whose ranks have all arrived, and its store."""

    membership: FormationMembership
    store_number: int
    """Number of the store on the lowest rank, which hosts it."""
    devices: tuple[DeviceIds, ...]
    """The devices of every rank, by rank in the process group."""
    hosted: HostedStore | None = None
    """The store itself, on the rank that hosts it."""


def first_membership(held: HeldPlan) -> FormationMembership:
    """Return the first formation of a plan: all ranks that it names."""
    ranks = tuple(range(len(held.plan.ranks)))
    return FormationMembership(
        held=held, formation=FormationId(generation=held.plan.generation, number=0), plan_ranks=ranks
    )
