"""The formation that a rank steps in: how it is entered, whose plans it follows, and the two ways out of it.

A formation ends on purpose, when all its members know of a new generation or of somebody who leaves, or it breaks when a member
is lost. What it was is kept either way: it says who may go on with the same state.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from heterotrain_core.contract import metrics as names

from heterotrain.checkpoints.manager import CheckpointManager
from heterotrain.errors import PeerLost
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.interface import ActiveGroup, Membership
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import may_adopt, roster_of, workers_of
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
        active_group: the formation that this rank is in; ``None`` between two.
        last_membership: who took part in the one before; ``None`` before the first has ended.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        shutdown: Shutdown,
        training: Training,
        checkpoints: CheckpointManager,
        observer: Observer,
        report: Report,
    ) -> None:
        self.active_group: ActiveGroup | None = None
        self.last_membership: FormationMembership | None = None
        self._membership = membership
        self._shutdown = shutdown
        self._training = training
        self._checkpoints = checkpoints
        self._observer = observer
        self._report = report

    @property
    def is_broken(self) -> bool:
        """Whether there is none in which a step could end."""
        return self.active_group is None or (self.active_group.group is not None and self.active_group.group.is_cut)

    def require(self) -> ActiveGroup:
        """Return the running formation.

        Raises:
            PeerLost: there is none.
        """
        if self.active_group is None:
            raise PeerLost("there is no formation")
        return self.active_group

    # -- in ----------------------------------------------------------------------------------------------------------

    def enter(self) -> ActiveGroup | None:
        """Wait for the next formation; ``None`` when this rank leaves as announced or nobody needs it any more.

        Raises:
            PeerLost: a member was lost, and nobody replaces it.
            UsageError: the members cannot train together as they are configured.
        """
        active_group = self.active_group = self._membership.form(self.last_membership)
        if active_group is not None:
            self._report.gauges({
                names.PLAN_GENERATION: float(active_group.roster.formation.generation),
                names.PLAN_REVISION: float(active_group.roster.plan.revision),
                names.FORMATION: float(active_group.roster.formation.number),
                names.WORLD_SIZE: float(len(active_group.roster.plan_ranks)),
            })  # fmt: skip
        return active_group

    # -- plans -------------------------------------------------------------------------------------------------------

    def adopt(self, active_group: ActiveGroup) -> None:
        """Put a newer revision into force when this is a boundary."""
        progress = self._training.progress
        if not may_adopt(active_group.roster, active_group.agreed.plan, epoch_step=progress.epoch_steps):
            return
        active_group.roster = roster_of(
            active_group.agreed.plan, plan_ranks=active_group.roster.plan_ranks, formation=active_group.roster.formation,
            epoch=progress.epoch, epoch_step=progress.epoch_steps,
        )  # fmt: skip
        plan = active_group.roster.plan
        self._report.gauges({names.PLAN_REVISION: float(plan.revision)})
        _log.info("plan %d.%d in force: shares %s", plan.generation, plan.revision, list(active_group.roster.shares))

    def newest(self, active_group: ActiveGroup) -> HeldPlan:
        """Return the newest plan that this rank has heard of, at least the one that all members hold."""
        newest = self._membership.newest()
        return (
            newest
            if newest is not None and newest.plan.version > active_group.agreed.plan.version
            else active_group.agreed
        )

    def agreed(self, active_group: ActiveGroup, held: HeldPlan) -> None:
        """Note that all members hold this plan now."""
        self._membership.offer(held.text)
        if held.plan.version > active_group.agreed.plan.version:
            active_group.agreed = held

    # -- out ---------------------------------------------------------------------------------------------------------

    def follow(self, active_group: ActiveGroup, decision: StepDecision) -> None:
        """Act on what a committed step's control vectors said: who leaves, and whether a new generation begins."""
        newer = active_group.agreed.plan.generation > active_group.roster.formation.generation
        if not decision.leaving and not decision.checkpoint and not newer:
            return
        roster = active_group.roster
        pods = workers_of(roster.plan, tuple(roster.plan_ranks[rank] for rank in decision.leaving))
        leaving = frozenset(rank for rank in roster.plan_ranks if roster.plan.members[rank].worker in pods)
        everybody_leaves = len(leaving) == len(roster.plan_ranks)
        if decision.checkpoint and not everybody_leaves:
            self._checkpoints.write_part(active_group, self._training, mark=decision.mark)
        if not leaving and not newer:
            return
        joins = newer and len(active_group.agreed.plan.members) > len(roster.plan_ranks)
        self._disband(active_group, leaving=leaving, cause=names.CAUSE_JOIN if joins else names.CAUSE_LEAVE)
        if not leaving:
            return
        self._checkpoints.request()  # whole spot pools vanish together: a survivor keeps the state
        if roster.plan_ranks[active_group.rank] in leaving:
            self._shutdown.leave_soon()
            if everybody_leaves:
                self._shutdown.write_on_shutdown(active_group, mark=decision.mark)

    def leave_broken(self, lost: Exception, reducer: Reducer | None) -> None:
        """Leave a formation that lost a member.

        Args:
            lost: what was noticed of that; raised again when there is no formation to leave.
            reducer: its buckets may still be on their way in this formation; ``None`` before there are any.
        """
        active_group, self.active_group = self.active_group, None
        if active_group is None:
            raise lost
        _log.warning("formation %s is over: %s", active_group.roster.formation, lost)
        self._observer.membership_changed(names.CAUSE_LOSS)
        if active_group.group is not None:
            active_group.group.cut(str(lost))
            if reducer is not None:
                reducer.abandon()
            active_group.group.close()
        self._checkpoints.on_member_lost()
        self._shutdown.announced = False
        self.last_membership = active_group.membership

    def _disband(self, active_group: ActiveGroup, *, leaving: frozenset[int], cause: str) -> None:
        """Close a formation that everybody leaves on purpose."""
        self._observer.membership_changed(cause)
        if active_group.group is not None:
            try:
                active_group.group.gather_now(
                    [0.0]
                )  # nobody hangs up while another still waits for the end of the step
            except PeerLost as lost:
                active_group.group.cut(str(lost))
            active_group.group.close()
        self.active_group = None
        self.last_membership = replace(active_group.membership, leaving=leaving)
        self._shutdown.announced = active_group.roster.plan_ranks[active_group.rank] in leaving
