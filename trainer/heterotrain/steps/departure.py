"""Decides when a rank leaves that has to: at once, or with the next plan, which no longer needs its part of the model.

A rank of a member of several workers takes that member with it. The operator sees the announced end as early as the
rank does, and divides the model anew for those that stay. Until that plan is there, the formation trains on in its old
layout. The other half of the grace period is left for the hand-over, or for a checkpoint.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from heterotrain.clock import Clock
from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.control import Column, one
from heterotrain.steps.ballot import Voting
from heterotrain.steps.shutdown import Shutdown

PATIENCE = 0.5
"""Part of the grace period in which a rank waits for a plan without it."""


WAITS = 0.5
"""Stands in place of 1 for a rank that has to leave, but still waits."""


class Leaving(NamedTuple):
    """Ranks in the group that have to leave.

    Attributes:
        now: those that leave after this step. Once one of them does, or all have to, none waits.
        waiting: those that wait for a plan without them.
    """

    now: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


def _leaving(leaving: list[float]) -> Leaving:
    asked = tuple([rank for rank, leaves in enumerate(leaving) if leaves > 0.0])
    return Leaving(now=asked) if 1.0 in leaving or len(asked) == len(leaving) else Leaving(waiting=asked)


LEAVING = Column("leaving", one(_leaving))
"""Whether this rank's pod leaves after the step (1), has to but waits for a plan without it (``WAITS``), or stays."""


class Departure:
    """The leave of this rank, from the request for it to the step after which it goes."""

    def __init__(self, shutdown: Shutdown, *, grace_s: float, operated: bool, clock: Clock = time.monotonic) -> None:
        """Describe a rank that stays.

        Args:
            shutdown: knows whether this rank was asked to end.
            grace_s: seconds between the announcement of an end and the end.
            operated: whether an operator makes plans.
            clock: that of ``shutdown``.
        """
        self._clock = clock
        self._shutdown = shutdown
        self._grace_s = grace_s
        self._operated = operated
        self._since_s: float | None = None

    def vote(self, voting: Voting) -> tuple[float]:
        """Return the number of ``LEAVING``; before hooks that may take long, a rank does not wait."""
        active_group = voting.active_group
        drain = active_group.agreed.plan.drain
        if not (self._shutdown.leaving or (drain and active_group.place.worker in drain)):
            self._since_s = None
            return (0.0,)
        if self._since_s is None:
            self._since_s = self._clock()
        return (WAITS if not voting.hooks_follow and self.waits(active_group, next_s=voting.next_s) else 1.0,)

    def waits(self, active_group: ActiveGroup, *, next_s: float) -> bool:
        """Return whether this rank, which was asked to leave, takes part in the step after the running one.

        Args:
            active_group: the formation.
            next_s: how long that step will take.
        """
        if not self._operated or not _breaks_members(active_group):
            return False
        left_s = self._shutdown.left_s
        if left_s is None:  # announced by the plan only
            now_s = self._clock()
            left_s = (self._since_s or now_s) + self._grace_s - now_s
        return left_s - next_s > (1.0 - PATIENCE) * self._grace_s


def _breaks_members(active_group: ActiveGroup) -> bool:
    """Return whether members were planned: some have stages, or ranks in several workers."""
    roster = active_group.roster
    workers = {(rank.member, rank.worker) for rank in roster.ranks}
    return len(workers) > len(roster.members) or any(member.layout.stages > 1 for member in roster.members)
