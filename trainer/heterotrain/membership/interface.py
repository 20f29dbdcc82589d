"""What the loop knows of membership: a formation in which it can train, and where it gets the next one from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from heterotrain_core.contract.plan import Member

from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import Roster
from heterotrain.network.group import Group


@dataclass(slots=True)
class ActiveGroup:
    """A formation in which this rank can train.

    Attributes:
        membership: who takes part.
        roster: their shares.
        rank: this rank in the process group.
        group: the connections; ``None`` for a process that is alone.
        agreed: the newest plan that all ranks hold; its shares may still wait for a boundary.
    """

    membership: FormationMembership
    roster: Roster
    rank: int
    group: Group | None
    agreed: HeldPlan

    @property
    def member(self) -> Member:
        """This rank's entry in the plan."""
        return self.roster.members[self.rank]


class Membership(Protocol):
    """Finds formations."""

    def form(self, previous: FormationMembership | None) -> ActiveGroup | None:
        """Return the next formation, or ``None`` when this rank leaves as announced or nobody needs it any more."""

    def newest(self) -> HeldPlan | None:
        """Return the newest plan that this rank has heard of."""

    def offer(self, text: str) -> None:
        """Take a plan from a peer."""

    def leave_soon(self, within_s: float) -> None:
        """Do not wait longer than this for a formation."""

    def everything_committed(self) -> None:
        """From now on this rank is needed only by those who have not committed everything."""

    def close(self) -> None:
        """Let go of everything."""
