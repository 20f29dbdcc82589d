"""The training loop's view of membership: an active group to train in, and the source of the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from heterotrain_core.contract.choices import Backend
from heterotrain_core.contract.plan import Member, Plan, Rank

from heterotrain.clock import Clock
from heterotrain.identity import Identity
from heterotrain.membership.agreement import Checkpoints
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import Roster
from heterotrain.network.group import Group
from heterotrain.network.hang import LIMIT_FACTOR, Activity, HangWatch
from heterotrain.state.training import TrainState

Place = Callable[[Plan, int], None]
"""Gives this rank the part of the model that a plan says."""


def everywhere_alike(_plan: Plan, _plan_rank: int) -> None:
    """Leave the model as it is: each rank has the same part in every formation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSide:
    """What a rank brings into its formations.

    Attributes:
        identity: of this rank.
        training: the state that ranks send to each other.
        checkpoints: where a cold start begins.
        device: of this rank.
        backend: for gradients.
        timeout_s: silence of a host after which its ranks count as lost.
        place: gives this rank the part of the model that a plan says.
        clock: measures how long peers are silent, and waits for them.
    """

    identity: Identity
    training: TrainState
    checkpoints: Checkpoints
    device: torch.device
    backend: Backend
    timeout_s: float
    place: Place = everywhere_alike
    clock: Clock = time.monotonic

    def watch_waits(self, group: Callable[[], Group | None], ask: Callable[[], Sequence[Activity]]) -> HangWatch:
        """Log long waits of the calling thread, which trains; see ``HangWatch``."""
        return HangWatch(
            limit_s=LIMIT_FACTOR * self.timeout_s, group=group, steps=lambda: self.training.progress.steps, ask=ask,
            name=self.identity.name, clock=self.clock,
        )  # fmt: skip


@dataclass(slots=True)
class ActiveGroup:
    """A formation in which this rank can train.

    Attributes:
        membership: the ranks of the formation.
        roster: its members and their shares.
        rank: this rank in the process group.
        group: the connections; ``None`` for a process that is alone.
        agreed: the newest plan that all ranks hold; its shares may not take effect until a boundary.
    """

    membership: FormationMembership
    roster: Roster
    rank: int
    group: Group | None
    agreed: HeldPlan

    @property
    def member(self) -> Member:
        """The member that this rank is part of."""
        return self.roster.members[self.roster.positions[self.rank]]

    @property
    def place(self) -> Rank:
        """This rank's entry in the plan."""
        return self.roster.plan.ranks[self.roster.plan_ranks[self.rank]]


class Membership(Protocol):
    """Finds formations; in each new one, this rank takes its place in the plan before the state is compared."""

    def form(self, previous: FormationMembership | None) -> ActiveGroup | None:
        """Return the next group, or ``None`` when this rank leaves as announced or no peer needs it any more."""

    def adopt(self, membership: FormationMembership) -> bool:
        """Take a new generation with the same members as the current formation; return whether that is intact."""

    def newest(self) -> HeldPlan | None:
        """Return the newest plan that this rank has received."""

    def offer(self, text: str) -> None:
        """Take a plan from a peer."""

    def leave_soon(self, within_s: float) -> None:
        """Wait no longer than ``within_s`` seconds for a formation."""

    def everything_committed(self) -> None:
        """Note that only ranks that have not committed everything still need this rank."""

    def abandon(self, reason: str) -> None:
        """Break all connections at once, so that peers notice immediately that this rank takes no further step."""

    def close(self) -> None:
        """Release threads and connections."""
