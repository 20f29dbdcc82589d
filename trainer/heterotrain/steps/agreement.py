"""What the ranks of a formation do together in a step: vote, confirm, commit, and fail with the same error."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import NoReturn, cast

from heterotrain.checkpoints.manifest import new_mark
from heterotrain.data.progress import Progress
from heterotrain.errors import Diverged, PeerLost, UsageError
from heterotrain.exchange.gate import Gate
from heterotrain.membership.agreement import PLAN
from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.control import StepDecision
from heterotrain.numerics.non_finite import Action
from heterotrain.parts.interface import SecondPhase
from heterotrain.state.prepared import Confirmation, PreparedStep
from heterotrain.steps.attempt import Attempts
from heterotrain.steps.ballot import StepBallot, Voting
from heterotrain.steps.columns import BEFORE, CHECKPOINT, ENDS, SUMMED, UNUSED
from heterotrain.steps.departure import LEAVING, Departure
from heterotrain.steps.ending import End
from heterotrain.steps.formations import Formations
from heterotrain.steps.hooks import Hooks
from heterotrain.steps.job_parts import JobParts
from heterotrain.steps.late import Haste, Queued
from heterotrain.steps.observer import MEASURED, Observer
from heterotrain.steps.replicas import FINGERPRINTS, Replicas
from heterotrain.steps.resources import StepResources
from heterotrain.steps.script_exchanges import ScriptExchanges
from heterotrain.steps.shutdown import Shutdown
from heterotrain.steps.step_passes import StepPasses
from heterotrain.steps.step_records import StepRecords
from heterotrain.steps.usage import check_used
from heterotrain.steps.vote import exchange_votes

_log = logging.getLogger(__name__)


class Agreement:
    """The steps of this rank, as its formation agrees on them.

    Attributes:
        committed: the formation and decision of the last committed step, until the loop has acted on them.
        late: the step that the next vote confirms.
        uncommitted: a step that the others may have committed when this rank lost them.
    """

    def __init__(
        self, job: JobParts, *, formations: Formations, departure: Departure, shutdown: Shutdown, end: End,
        hooks: Hooks, observer: Observer, replicas: Replicas, records: StepRecords, resources: StepResources,
        attempts: Attempts, exchanges: ScriptExchanges,
    ) -> None:  # fmt: skip
        self.committed: tuple[ActiveGroup, StepDecision] | None = None
        self.uncommitted: StepPasses | None = None
        self._job_uid, self._grace_s = job.identity.job_uid, job.config.grace_s
        self._training, self._checkpoints, self._config = job.training, job.checkpoints, job.config
        self.late = resources.late
        self._formations, self._end, self._hooks, self._replicas = formations, end, hooks, replicas
        self._observer, self._records, self._resources = observer, records, resources
        self._attempts, self._exchanges = attempts, exchanges
        self._mark = new_mark()
        self._ballot = StepBallot({
            PLAN: attrgetter("held.identity"), ENDS: shutdown.vote, LEAVING: departure.vote,
            CHECKPOINT: self._checkpoint, MEASURED: observer.vote, FINGERPRINTS: replicas.vote,
        })  # fmt: skip

    def form(self) -> None:
        """Begin a formation: what an earlier one has named may be there already."""
        self._mark = new_mark()

    def hooks_follow(self, progress: Progress) -> bool:
        """Return whether end-of-epoch hooks come next that may take longer than the grace period.

        SIGTERM is heeded after the hooks, and they may change the state at any time: so it is saved before them.
        """
        return self._hooks.follow(progress) and self._checkpoints.outlasts_grace(
            self._hooks.epoch_hooks_s, self._training, step_s=self._resources.step_s, grace_s=self._grace_s
        )

    def _checkpoint(self, voting: Voting) -> tuple[float, float]:
        due = self._checkpoints.proposes(voting.active_group, self._training, before_hooks=voting.hooks_follow)
        return due, self._mark if voting.active_group.rank == 0 else 0  # only the lowest rank's mark is read

    def vote(self, step: StepPasses, *, ok: bool) -> StepDecision:
        """Exchange the votes and wait for the buckets; ``ok``: whether this rank has computed its part.

        With its vote, this rank says that it has committed all steps before this one. If it has not, because the
        gradient of the step before is not finite, it votes against this one, as all others do.

        Raises:
            PeerLost: the group broke meanwhile.
            Diverged: the ranks' copies of the state differ, and the job is to fail then.
            UsageError: as ``exchange_votes``.
        """
        active_group, task = self._formations.require(), step.task
        is_next = self.late.queued is None or self.late.confirm()
        hooks_follow = False
        if self._hooks.after_epochs and task.ends_epoch:
            hooks_follow = self.hooks_follow(self._resources.loader.advanced(self._training.progress, task))
        held = self._formations.newest(active_group)
        steps = self._training.progress.steps
        voting = Voting(step, active_group, held, hooks_follow, self._resources.step_s, steps)
        decision, held = exchange_votes(self._ballot, voting, ok=ok and is_next, job_uid=self._job_uid)
        if not is_next:
            self.late.drop()
        agreed = decision.agreed
        self._observer.every = agreed[MEASURED].every
        if held is not active_group.agreed:
            self._formations.agreed(active_group, held)
        if agreed[CHECKPOINT].is_due or agreed[LEAVING].now:
            self._mark = new_mark()
        if agreed[SUMMED]:
            step.summed.means.hear(agreed[SUMMED], step=task.number, tells=active_group.rank == 0)
        if agreed[ENDS] or self._end.all_end:
            self._end.voted(decision, more=step.more)
        if agreed[UNUSED] and decision.committed and decision.weight > 0 and not task.number:
            try:  # a later batch may have nothing to learn from, such as no positives
                check_used(step=task.number, unused=agreed[UNUSED], parameters=step.reducer.parameters)
            except UsageError as error:
                self.fail(error)
        if decision.committed and agreed[ENDS] != BEFORE:
            # Code of the script that adds noise to gradients, or an optimizer that draws numbers, does the same
            # on every rank.
            self._resources.seed_alike("update")
            if active_group.group is not None and not (step.passes or math.isnan(self._replicas.fingerprint)):
                try:
                    self._replicas.judge(agreed[FINGERPRINTS], active_group)
                except Diverged as error:
                    self.fail(error)
        return decision

    def confirm(
        self, step: StepPasses, second: SecondPhase, decision: StepDecision,
        finish: Callable[[Confirmation], None] | None,
    ) -> Confirmation:  # fmt: skip
        """Wait until every rank holds the sums of its own pieces of a divided model's gradient.

        From the moment when the others may have heard of this rank, the step can be finished later by ``finish``.

        Args:
            step: the step.
            second: the part's second phase.
            decision: of the first one.
            finish: applies the sums; ``None`` in a pass that is not the step's last.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        active_group = self._formations.require()

        def late(confirmation: Confirmation) -> None:
            cast("Callable[[Confirmation], None]", finish)(confirmation)
            self.uncommitted = None
            self._record(step, decision, active_group)
            self.committed = None  # the formation that it would change is over
            self._training.confirmed = step.number, confirmation
            _log.info("step %d is applied late: all ranks had been able to finish it", step.number)

        prepared = PreparedStep(step.number, finish=late, drop=self._attempts.undo) if finish is not None else None
        return second.confirm(active_group.group, prepared)

    def commit(self, step: StepPasses, decision: StepDecision) -> None:
        """Record a step that all ranks finished: progress, logs, schedulers, telemetry and changes of membership."""
        self._exchanges.open(are_open=False)  # a step that is committed is not repeated
        self._record(step, decision, self._formations.require())

    def may_wait(self, step: StepPasses, decision: StepDecision, *, changed: bool) -> bool:
        """Return whether a step whose update is queued may be confirmed by the next vote.

        ``changed``: whether the script has changed the gradient.
        """
        return self.late.is_wanted and not any(self._haste(step, decision, changed=changed))

    def _haste(self, step: StepPasses, decision: StepDecision, *, changed: bool) -> Haste:
        active_group, loader, agreed = self._formations.require(), self._resources.loader, decision.agreed
        after = loader.advanced(self._training.progress, step.task)
        return Haste(
            divided=step.part.second_phase is not None,
            on_the_host=step.group is not None and not step.group.is_queued,
            first_of_formation=step.task.number == self._observer.first_step,
            repeated=self.late.repeated == step.task.number,
            changed=changed,
            measured=step.is_measured or step.measurement is not None,
            scaled=step.numerics.precision.scales_loss,
            streamed=loader.is_streamed,
            last=step.task.ends_epoch or after.is_over(epochs=self._config.epochs, steps=self._config.steps),
            hooks=self._hooks.are_due(after.steps),
            agreed=agreed[CHECKPOINT].is_due or any(agreed[LEAVING]) or bool(agreed[ENDS]),
            ordered=step.group is not None and step.reducer.wants_order,
            planned=active_group.agreed.plan is not active_group.roster.plan,
            apart=self._replicas.donor is not None,
            registered=self._training.has_own,
        )

    def queue(self, step: StepPasses, decision: StepDecision, gate: Gate) -> None:
        """Let the next step begin before it is known whether this one has happened."""
        active_group, loader = self._formations.require(), self._resources.loader
        self._exchanges.open(are_open=False)  # what follows in the script runs again only after a loss
        self._resources.end()
        after = loader.advanced(self._training.progress, step.task)
        record = partial(self._records.committed, step, decision, active_group, loader)
        step.timestamps = step.reducer.exchange.timestamps
        settings = self._attempts.settings(self._training.optimizers)
        self.late.queued = Queued(step, gate, after, record, settings, bool(self._records.schedulers))

    def go_back(self) -> Queued | None:
        """Return the step that has waited and not happened, and is repeated next; ``None`` if there is none.

        Raises:
            UsageError: the script has changed parameters since.
        """
        dropped = self.late.take_dropped()
        if dropped is not None and (changed := dropped.changed):
            self.fail(UsageError(changed))
        return dropped

    def _record(self, step: StepPasses, decision: StepDecision, active_group: ActiveGroup) -> None:
        self._resources.end()
        self._records.committed(step, decision, active_group, self._resources.loader)
        self.committed = active_group, decision

    def non_finite(self, what: str, action: Action) -> None:
        """Report a step whose loss or gradient is not finite."""
        self._records.non_finite(what, action)

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error that all ranks have found in the same step, when all of them have.

        A rank that ended at once could look like a lost peer to one that is still waiting for the vote.
        """
        self._end.is_over = True
        active_group = self._formations.active_group
        if active_group is not None and active_group.group is not None:
            with contextlib.suppress(PeerLost):
                active_group.group.gather_now([0.0])
        raise error
