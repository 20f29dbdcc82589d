"""The formation that a rank steps in: how it is entered, whose plans it follows, and the two ways out of it.

A formation ends on purpose, when all its members know of a new generation or of somebody who leaves, or it breaks when a member
is lost. What it was is kept either way: it says who may go on with the same state.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from heterotrain_core.contract import metrics as names

from heterotrain.checkpoints.manager import CheckpointKeeper
from heterotrain.errors import PeerLost
from heterotrain.membership.interface import Formed, Membership
from heterotrain.membership.plan_source import Held
from heterotrain.membership.roster import may_adopt, roster_of, workers_of
from heterotrain.membership.standing import Standing
from heterotrain.network.control import StepDecision
from heterotrain.numerics.reducer import Reducer
from heterotrain.state.training import Training
from heterotrain.steps.observer import Observer
from heterotrain.steps.shutdown import Shutdown
from heterotrain.telemetry.report import Report

_log = logging.getLogger(__name__)


class Formations:
    """One formation after the other, from this rank's side.

    Attributes:
        formed: the formation that this rank is in; ``None`` between two.
        standing: who took part in the one before; ``None`` before the first has ended.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        shutdown: Shutdown,
        training: Training,
        keeper: CheckpointKeeper,
        observer: Observer,
        report: Report,
    ) -> None:
        self.formed: Formed | None = None
        self.standing: Standing | None = None
        self._membership = membership
        self._shutdown = shutdown
        self._training = training
        self._keeper = keeper
        self._observer = observer
        self._report = report

    @property
    def is_broken(self) -> bool:
        """Whether there is none in which a step could end."""
        return self.formed is None or (self.formed.group is not None and self.formed.group.is_cut)

    def require(self) -> Formed:
        """Return the running formation.

        Raises:
            PeerLost: there is none.
        """
        if self.formed is None:
            raise PeerLost("there is no formation")
        return self.formed

    # -- in ----------------------------------------------------------------------------------------------------------

    def enter(self) -> Formed | None:
        """Wait for the next formation; ``None`` when this rank leaves as announced or nobody needs it any more.

        Raises:
            PeerLost: a member was lost, and nobody replaces it.
            UsageError: the members cannot train together as they are configured.
        """
        formed = self.formed = self._membership.form(self.standing)
        if formed is not None:
            self._report.gauges({
                names.PLAN_GENERATION: float(formed.roster.formation.generation),
                names.PLAN_REVISION: float(formed.roster.plan.revision),
                names.FORMATION: float(formed.roster.formation.number),
                names.WORLD_SIZE: float(len(formed.roster.plan_ranks)),
            })  # fmt: skip
        return formed

    # -- plans -------------------------------------------------------------------------------------------------------

    def adopt(self, formed: Formed) -> None:
        """Put a newer revision into force when this is a boundary."""
        progress = self._training.progress
        if not may_adopt(formed.roster, formed.agreed.plan, epoch_step=progress.epoch_steps):
            return
        formed.roster = roster_of(
            formed.agreed.plan, plan_ranks=formed.roster.plan_ranks, formation=formed.roster.formation,
            epoch=progress.epoch, epoch_step=progress.epoch_steps,
        )  # fmt: skip
        plan = formed.roster.plan
        self._report.gauges({names.PLAN_REVISION: float(plan.revision)})
        _log.info("plan %d.%d in force: shares %s", plan.generation, plan.revision, list(formed.roster.shares))

    def newest(self, formed: Formed) -> Held:
        """Return the newest plan that this rank has heard of, at least the one that all members hold."""
        newest = self._membership.newest()
        return newest if newest is not None and newest.plan.version > formed.agreed.plan.version else formed.agreed

    def agreed(self, formed: Formed, held: Held) -> None:
        """Note that all members hold this plan now."""
        self._membership.offer(held.text)
        if held.plan.version > formed.agreed.plan.version:
            formed.agreed = held

    # -- out ---------------------------------------------------------------------------------------------------------

    def follow(self, formed: Formed, decision: StepDecision) -> None:
        """Act on what a committed step's control vectors said: who leaves, and whether a new generation begins."""
        newer = formed.agreed.plan.generation > formed.roster.formation.generation
        if not decision.leaving and not decision.checkpoint and not newer:
            return
        roster = formed.roster
        pods = workers_of(roster.plan, tuple(roster.plan_ranks[rank] for rank in decision.leaving))
        leaving = frozenset(rank for rank in roster.plan_ranks if roster.plan.members[rank].worker in pods)
        everybody_leaves = len(leaving) == len(roster.plan_ranks)
        if decision.checkpoint and not everybody_leaves:
            self._keeper.write_part(formed, self._training, mark=decision.mark)
        if not leaving and not newer:
            return
        joins = newer and len(formed.agreed.plan.members) > len(roster.plan_ranks)
        self._disband(formed, leaving=leaving, cause=names.CAUSE_JOIN if joins else names.CAUSE_LEAVE)
        if not leaving:
            return
        self._keeper.want()  # whole spot pools vanish together: a survivor keeps the state
        if roster.plan_ranks[formed.rank] in leaving:
            self._shutdown.leave_soon()
            if everybody_leaves:
                self._shutdown.rescue(formed, mark=decision.mark)

    def leave_broken(self, lost: Exception, reducer: Reducer | None) -> None:
        """Leave a formation that lost a member.

        Args:
            lost: what was noticed of that; raised again when there is no formation to leave.
            reducer: its buckets may still be on their way in this formation; ``None`` before there are any.
        """
        formed, self.formed = self.formed, None
        if formed is None:
            raise lost
        _log.warning("formation %s is over: %s", formed.roster.formation, lost)
        self._observer.membership_changed(names.CAUSE_LOSS)
        if formed.group is not None:
            formed.group.cut(str(lost))
            if reducer is not None:
                reducer.abandon()
            formed.group.close()
        self._keeper.lost_a_member()
        self._shutdown.announced = False
        self.standing = formed.standing

    def _disband(self, formed: Formed, *, leaving: frozenset[int], cause: str) -> None:
        """Close a formation that everybody leaves on purpose."""
        self._observer.membership_changed(cause)
        if formed.group is not None:
            try:
                formed.group.gather_now([0.0])  # nobody hangs up while another still waits for the end of the step
            except PeerLost as lost:
                formed.group.cut(str(lost))
            formed.group.close()
        self.formed = None
        self.standing = replace(formed.standing, leaving=leaving)
        self._shutdown.announced = formed.roster.plan_ranks[formed.rank] in leaving
