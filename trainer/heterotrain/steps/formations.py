"""The rank's current formation: entering it, following its plans, and the two ways out of it.

A formation ends as agreed when all members know of a new generation or of a leaving member. It breaks when a member is
lost. Either way its membership is kept, because that decides which members may continue with the same state. A new
generation with the same members keeps the connections.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.plan import Layout, Rank

from heterotrain.checkpoints.manager import WriteReason
from heterotrain.errors import PeerLost
from heterotrain.membership.formation import FormationMembership, first_membership
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import may_adopt, roster_of, workers_of
from heterotrain.network.control import Agreed, StepDecision
from heterotrain.network.heartbeat import PeerKey, key_of
from heterotrain.state.hand_over import hand_over
from heterotrain.steps.columns import CHECKPOINT, CheckpointVote
from heterotrain.steps.departure import LEAVING
from heterotrain.steps.job_parts import JobParts
from heterotrain.steps.observer import Observer
from heterotrain.steps.shutdown import Shutdown

_log = logging.getLogger(__name__)


class Formations:
    """The sequence of formations that this rank takes part in.

    Attributes:
        active_group: the current formation; ``None`` between two formations.
        last_membership: the members of the previous formation; ``None`` before the first one has ended.
        calm: what all ranks have agreed on in a step after which there was nothing to do, and as long as they agree on
            the same, there is nothing to do either.
    """

    def __init__(self, job: JobParts, *, shutdown: Shutdown, observer: Observer) -> None:
        self.active_group: ActiveGroup | None = None
        self.last_membership: FormationMembership | None = None
        self.calm: Agreed | None = None
        self._membership, self._training, self._checkpoints = job.membership, job.training, job.checkpoints
        self._report, self._wrapped = job.report, job.wrapped
        self._shutdown, self._observer = shutdown, observer
        self._checkpoint_request = ""

    @property
    def is_broken(self) -> bool:
        """Whether there is no formation in which a step could finish."""
        return self.active_group is None or (self.active_group.group is not None and self.active_group.group.is_over())

    def require(self) -> ActiveGroup:
        """Return the current formation.

        Raises:
            PeerLost: there is no formation.
        """
        if self.active_group is None:
            raise PeerLost("there is no formation")
        return self.active_group

    # -- in ----------------------------------------------------------------------------------------------------------

    def enter(self) -> ActiveGroup | None:
        """Wait for the next formation; return ``None`` when this rank leaves as announced or is no longer needed.

        Raises:
            PeerLost: a member was lost and is not replaced.
            UsageError: the members cannot train together with their configuration.
        """
        active_group = self.active_group = self._membership.form(self.last_membership)
        self.calm = None
        if active_group is not None:
            self._report_formation(active_group)
            self._membership.offer(active_group.agreed.text)
            self._note_request(active_group)
        return active_group

    def _report_formation(self, active_group: ActiveGroup) -> None:
        self._report.gauges({
            names.PLAN_GENERATION: float(active_group.roster.formation.generation),
            names.PLAN_REVISION: float(active_group.roster.plan.revision),
            names.FORMATION: float(active_group.roster.formation.number),
            names.WORLD_SIZE: float(len(active_group.roster.plan_ranks)),
        })  # fmt: skip

    # -- plans -------------------------------------------------------------------------------------------------------

    def adopt(self, active_group: ActiveGroup) -> None:
        """Switch to a newer revision of the plan if this is a boundary."""
        progress = self._training.progress
        if not may_adopt(active_group.roster, active_group.agreed.plan, epoch_step=progress.epoch_steps):
            return
        active_group.roster = roster_of(
            active_group.agreed.plan,
            plan_ranks=active_group.roster.plan_ranks,
            formation=active_group.roster.formation,
            epoch=progress.epoch,
            epoch_step=progress.epoch_steps,
        )
        plan = active_group.roster.plan
        self._report.gauges({names.PLAN_REVISION: float(plan.revision)})
        _log.info("plan %d.%d in force: shares %s", plan.generation, plan.revision, list(active_group.roster.shares))

    def newest(self, active_group: ActiveGroup) -> HeldPlan:
        """Return the newest plan that this rank has received, at least the one that all members hold."""
        newest, agreed = self._membership.newest(), active_group.agreed
        if newest is None or newest is agreed:
            return agreed
        return newest if newest.plan.version > agreed.plan.version else agreed

    def agreed(self, active_group: ActiveGroup, held: HeldPlan) -> None:
        """Record that all members hold this plan."""
        self._membership.offer(held.text)
        if held.plan.version > active_group.agreed.plan.version:
            active_group.agreed = held
            self._note_request(active_group)

    def _note_request(self, active_group: ActiveGroup) -> None:
        """Request a checkpoint that the plan of all members asks for, once; it does not wait for a boundary."""
        request = active_group.agreed.plan.checkpoint_request
        if request and request != self._checkpoint_request:
            self._checkpoints.request()
        self._checkpoint_request = request

    # -- out ---------------------------------------------------------------------------------------------------------

    def follow(self, active_group: ActiveGroup, decision: StepDecision) -> None:
        """Act on the control vectors of a committed step: leaving members, checkpoints and new generations."""
        newer = active_group.agreed.plan.generation > active_group.roster.formation.generation
        checkpoint, (asked, waiting) = decision.agreed[CHECKPOINT], decision.agreed[LEAVING]
        if not asked and not checkpoint.is_due and not newer:
            self.calm = decision.agreed
            return
        roster = active_group.roster
        if newer:  # those that have waited for a plan without them
            asked += tuple(rank for rank in waiting if not _is_named(roster.ranks[rank], active_group.agreed))
        pods = workers_of(roster.plan, tuple(roster.plan_ranks[rank] for rank in asked))
        leaving = frozenset(rank for rank in roster.plan_ranks if roster.plan.ranks[rank].worker in pods)
        all_leave = len(leaving) == len(roster.plan_ranks)
        if checkpoint.is_due and not all_leave:
            self._checkpoints.write(WriteReason.VOTED, self._training, active_group, mark=checkpoint.mark)
        if not leaving and (not newer or self._continues(active_group)):
            return
        if not all_leave:
            self._hand_over(active_group, checkpoint, leaving=leaving, newer=active_group.agreed if newer else None)
        joins = newer and len(active_group.agreed.plan.ranks) > len(roster.plan_ranks)
        self._disband(active_group, leaving=leaving, cause=names.CAUSE_JOIN if joins else names.CAUSE_LEAVE)
        if not leaving:
            return
        self._checkpoints.request()  # all nodes of a spot pool may vanish together: a survivor has to keep the state
        if roster.plan_ranks[active_group.rank] in leaving:
            self._shutdown.leave_soon()
            if all_leave:
                self._shutdown.write_on_shutdown(active_group, mark=checkpoint.mark)

    def _hand_over(
        self, active_group: ActiveGroup, checkpoint: CheckpointVote, *, leaving: frozenset[int], newer: HeldPlan | None
    ) -> None:
        """Let the ranks that stay take over what they do not hold of a divided model, before the others are gone.

        Args:
            active_group: the formation, which ends after this.
            checkpoint: that of the last step.
            leaving: ranks of the plan in force that leave.
            newer: the next plan, if it is known; ranks that it does not name stay out of the next formation.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        roster, group = active_group.roster, active_group.group
        if group is None or not self._training.holdings:
            return
        stays = [
            rank not in leaving and (newer is None or _is_named(roster.plan.ranks[rank], newer))
            for rank in roster.plan_ranks
        ]
        if not any(stays):
            return
        own = key_of(active_group.place)
        number = None
        if newer is not None:
            number = next((i for i, rank in enumerate(newer.plan.ranks) if key_of(rank) == own), None)
        part = self._wrapped.part
        wants = part.wants(newer.plan, number) if newer is not None and number is not None else ()
        staying = [rank for rank, one_stays in enumerate(stays) if one_stays]
        if hand_over(group, self._training, staying=staying, wants=wants, room_bytes=part.room_bytes()):
            return
        _log.warning("the ranks that stay have no room for what the others hold: a checkpoint is written")
        if checkpoint.is_due:  # it is being written already
            self._checkpoints.wait(self._shutdown.left_s)
        else:
            self._shutdown.write_on_shutdown(active_group, mark=checkpoint.mark)

    def _continues(self, active_group: ActiveGroup) -> bool:
        """Adopt a newer generation with the members of this formation, and return whether that was possible.

        Members that hold the model in another way, such as with other cuts, are not the same ones. Connections and
        state stay. Every member that has committed the step does the same; one that has lost its last
        message finds the others in the new generation's first formation, and votes with them on the next one.
        """
        before, after = active_group.membership, first_membership(active_group.agreed)
        if _places(before) != _places(after):
            return False
        if self.is_broken or not self._membership.adopt(after):
            return False
        progress = self._training.progress
        active_group.membership = after
        active_group.roster = roster_of(
            after.plan,
            plan_ranks=after.plan_ranks,
            formation=after.formation,
            epoch=progress.epoch,
            epoch_step=progress.epoch_steps,
        )
        self._report_formation(active_group)
        _log.info(
            "formation %s: the members of formation %s continue with their connections, shares %s",
            after.formation, before.formation, list(active_group.roster.shares),
        )  # fmt: skip
        return True

    def leave_broken(self, lost: Exception) -> None:
        """Leave a formation that lost a member.

        Args:
            lost: the error that revealed the loss; raised again if there is no formation to leave.
        """
        active_group, self.active_group = self.active_group, None
        if active_group is None:
            raise lost
        _log.warning("formation %s is over: %s", active_group.roster.formation, lost)
        self._observer.membership_changed(names.CAUSE_LOSS)
        if active_group.group is not None:
            active_group.group.cut(str(lost))
            if (part := self._wrapped.known) is not None:
                part.abandon()  # reductions may still be in flight
            active_group.group.close()
        self._checkpoints.on_member_lost()
        self._shutdown.announced = False
        self.last_membership = active_group.membership

    def _disband(self, active_group: ActiveGroup, *, leaving: frozenset[int], cause: str) -> None:
        """Close a formation that all members leave as agreed."""
        self._observer.membership_changed(cause)
        if active_group.group is not None:
            try:
                # no rank disconnects while a peer still waits for the end of the step
                active_group.group.gather_now([0.0])
            except PeerLost as lost:
                active_group.group.cut(str(lost))
            active_group.group.close()
        self.active_group = None
        self.last_membership = replace(active_group.membership, leaving=leaving)
        self._shutdown.announced = active_group.roster.plan_ranks[active_group.rank] in leaving


def _places(membership: FormationMembership) -> list[tuple[PeerKey, int, int, Layout]]:
    """Return each rank with its member, counted in the order of ranks, its stage, and the member's layout."""
    members = list(dict.fromkeys(rank.member for rank in membership.ranks))
    layouts = {member.index: member.layout for member in membership.plan.members}
    return [(key_of(rank), members.index(rank.member), rank.stage, layouts[rank.member]) for rank in membership.ranks]


def _is_named(rank: Rank, held: HeldPlan) -> bool:
    """Return whether a plan has a place for this rank."""
    return any(key_of(other) == key_of(rank) for other in held.plan.ranks)
