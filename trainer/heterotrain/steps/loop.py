"""The loop under ``job.steps``: runs steps as transactions, in the current formation (``formations.py``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from heterotrain_core.contract import metrics as names

from heterotrain.checkpoints.manager import WriteReason
from heterotrain.data.loader_process import Workers
from heterotrain.data.slices import Source
from heterotrain.errors import EndedBefore, PeerLost, UsageError
from heterotrain.identity import Mode
from heterotrain.membership.interface import ActiveGroup
from heterotrain.parts.batches import inputs_and_targets
from heterotrain.steps.agreement import Agreement
from heterotrain.steps.attempt import Attempts
from heterotrain.steps.batch_loader import BatchLoader
from heterotrain.steps.columns import BEFORE
from heterotrain.steps.data_agreement import DataAgreement
from heterotrain.steps.ending import End
from heterotrain.steps.final_check import check_result
from heterotrain.steps.first_line import say_where_it_begins
from heterotrain.steps.formations import Formations
from heterotrain.steps.hooks import Hooks
from heterotrain.steps.job_parts import JobParts
from heterotrain.steps.observer import Observer
from heterotrain.steps.phases import TrainingPhase
from heterotrain.steps.replicas import Replicas
from heterotrain.steps.resources import StepResources
from heterotrain.steps.script_exchanges import ScriptExchanges
from heterotrain.steps.shutdown import Shutdown
from heterotrain.steps.states import ENDED, StepState
from heterotrain.steps.step import Step
from heterotrain.steps.step_passes import StepPasses
from heterotrain.steps.step_records import StepRecords
from heterotrain.steps.summed_loss import SummedLosses

_log = logging.getLogger(__name__)


class NotNeeded(Exception):  # noqa: N818  # names the event; it never leaves this file
    """Everything is committed, and no other rank needs this rank's state any more."""


class Loop:
    """Drives one rank from its first formation to its end."""

    def __init__(
        self, job: JobParts, *, shutdown: Shutdown, formations: Formations, exchanges: ScriptExchanges,
        resources: StepResources, agreement: Agreement, end: End, observer: Observer, replicas: Replicas, hooks: Hooks,
        records: StepRecords, attempts: Attempts, formed: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.shutdown, self.exchanges, self.resources, self.records = shutdown, exchanges, resources, records
        self._identity, self._config, self._device, self._training = job.identity, job.config, job.device, job.training
        self._checkpoints, self._numerics, self._report = job.checkpoints, job.numerics, job.report
        self._wrapped, self._formations, self.agreement, self._end = job.wrapped, formations, agreement, end
        self._observer, self._replicas, self._hooks, self._attempts = observer, replicas, hooks, attempts
        self._formed = formed
        self._lockstep = self._exchanges = self._is_new_phase = False
        self._summed = SummedLosses()
        self._phase = TrainingPhase()
        self._joined: ActiveGroup | None = None
        self._first_steps: int | None = None
        self._data: DataAgreement | None = None

    @property
    def active_group(self) -> ActiveGroup | None:
        """The current formation; ``None`` between two formations."""
        return self._formations.active_group

    def require_group(self) -> ActiveGroup:
        """Return the current formation.

        Raises:
            PeerLost: there is none.
        """
        return self._formations.require()

    @property
    def is_between_phases(self) -> bool:
        """Whether the last loop has ended with its phase, and the training goes on."""
        return self._phase.is_past(self._training.progress) and not self._end.is_reached

    def steps(
        self,
        source: Source,
        *,
        workers: Workers,
        lockstep: bool = False,
        late: bool = False,
        phase: TrainingPhase | None = None,
    ) -> Iterator[Step]:
        """Yield steps until everything of the phase is committed.

        Args:
            source: the data set.
            workers: processes that load samples ahead.
            lockstep: whether every rank gets the same number of micro-batches.
            late: whether a step may begin before the one before it is confirmed.
            phase: of the training; all of it by default.

        Raises:
            UsageError: as ``TrainingPhase.may_begin``.
        """
        if not self._begin(source, workers=workers, lockstep=lockstep, phase=phase or TrainingPhase()):
            return
        self.agreement.late.is_wanted = late
        while True:
            try:
                step = self._next()
            except PeerLost as lost:
                self._undo(None, lost)
                self._leave_broken(lost)
                continue
            except NotNeeded:
                self._check_result(None)
                self.shutdown.finish_alone(self._formations.last_membership)
                self._end.is_over, step = True, None
            if step is None:
                return
            if self.shutdown.reason and self._withdraws(step):
                step.withdraw()
            else:
                yield step
            if step.transaction.state not in ENDED:
                self._repeat(step)
            self._exchanges = step.group is not None and step.has_exchanged

    def _next(self) -> Step | None:
        """Return the next step, when all that comes before it is done; ``None`` if nothing of the phase is left.

        Raises:
            PeerLost: the group broke meanwhile.
            NotNeeded: the training is over, and the other ranks have ended.
        """
        if self.agreement.late.queued is not None and self._goes_on():
            return self._prepare(self._formations.require(), self.resources.loader)
        while True:
            self._follow()
            active_group = self._formations.active_group or self._form()
            if not self._phase.is_last and self._phase.is_past(self._training.progress):
                if self._joined is not active_group:
                    return None  # a rank that resumes or joins goes on to its phase
                if self.is_between_phases:
                    self._checkpoints.write(WriteReason.END, self._training, active_group)
                    return None
            if self._joined is not active_group or self._is_new_phase:
                self._join(active_group)
            self._call_hooks(active_group)
            if self._phase.is_last or not self.is_between_phases:
                break
        if self._end.is_reached:
            self.records.progress_display.clear()
            self._check_result(active_group)
            self.shutdown.conclude(active_group, loss=self._numerics.losses.last_finite)
            self._end.is_over = True
            return None
        self._checkpoints.write(WriteReason.DUE, self._training, active_group)
        return self._prepare(active_group, self.resources.loader)

    def _goes_on(self) -> bool:
        """Return whether a step begins while the one before it waits: nothing has come up for this rank.

        Or the one before is not finite. Then this rank takes part in the vote against the next one, which tells all.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        comes_up = self.shutdown.leaving or self.shutdown.reason
        if not (comes_up or self._checkpoints.is_due(self._formations.require(), self._training)):
            return True
        return not self.agreement.late.confirm()

    def _begin(self, source: Source, *, workers: Workers, lockstep: bool, phase: TrainingPhase) -> bool:
        """Prepare for the script's loop; return whether there may be anything to train in it."""
        self._phase, self._is_new_phase = phase, True
        over = self._first_steps is not None and self._end.is_reached
        if not phase.may_begin(is_over=over, has_phases=self._wrapped.part.has_phases):
            return False
        self._lockstep, self._end.is_over = lockstep, False
        self._training.enter_phase(phase.is_past)
        loader = BatchLoader(
            source, config=self._config, device=self._device, identity=self._identity, report=self._report,
            workers=workers, training=self._training, phase=phase,
        )  # fmt: skip
        if self._identity.mode is not Mode.ALONE:
            self._data = DataAgreement(source, seed=self._config.seed)
        self.resources.loader = loader
        self._wrapped.part.look(lambda samples: inputs_and_targets(loader.example(samples))[0])
        self._report.gauges({names.READY: 1.0})  # from now on peers may wait for this rank, because its loaders are up
        return True

    def _call_hooks(self, active_group: ActiveGroup) -> None:
        """Call the hooks that are due, and agree on whether they have ended the training.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        if self._replicas.donor is not None and self._replicas.resync(active_group):
            self.records.expect_schedules()
        if self._hooks.after_epochs and self.agreement.hooks_follow(self._training.progress):
            self._checkpoints.write(WriteReason.HOOKS, self._training, active_group)
        if self._hooks.after_steps and self._hooks.finish_step(self):
            self._observer.evaluated()
        progress = self._training.progress
        if progress.evaluated < progress.epoch and self._hooks.finish_epoch(self):
            self._observer.evaluated()
        if self._end.all_end or self.shutdown.reason:
            self._end.note(alone=active_group.group is None)

    def finish(self, reason: str) -> None:
        """End the training after the current step, or the last one where none runs."""
        running, queued = self.resources.running, self.agreement.late.queued
        is_running = running is not None and running.is_open and running.transaction.state not in ENDED
        self.shutdown.end_after(reason, steps=self._training.progress.steps + (queued is not None) + is_running)

    def _withdraws(self, step: Step) -> bool:
        """Return whether this rank, whose script has ended the training, tells the others without computing the step.

        Where ranks exchange data while they compute it, the others need this rank for that, and the script gets the
        step once more.
        """
        if self.shutdown.ends(step.task.number) != BEFORE:
            return False
        return not (self._lockstep or self._exchanges or step.task.is_joint or self._numerics.needs_all_ranks)

    def _follow(self) -> None:
        """Act on the last step's control vectors, now that the script has finished its own part of the step.

        State that the script changes after ``step.apply``, such as averaged weights, is then in every checkpoint.
        """
        committed, self.agreement.committed = self.agreement.committed, None
        if committed is None:
            return
        group = committed[0].group
        if group is not None and (reducer := self._wrapped.part.gradients).wants_order:
            reducer.agree_on_order(group)
        if committed[1].agreed is not self._formations.calm:
            self._formations.follow(*committed)

    def _form(self) -> ActiveGroup:
        active_group = self._formations.enter()
        if active_group is None:
            if self._end.is_reached:
                raise NotNeeded
            self.shutdown.leave(self._formations.last_membership)
        self._log_late_commit(active_group)
        self._joined = None
        return active_group

    def _join(self, active_group: ActiveGroup) -> None:
        """Prepare what this rank needs to train in a formation that is new, or with the data of a new phase."""
        self._training.settle()
        if self._data is not None and active_group.group is not None:
            self._data.check(active_group.group, self.agreement.fail)
        if self._joined is active_group:
            self._is_new_phase = False
            self.records.expect_schedules()
            return
        self._observer.formation_began()
        self.agreement.form()
        self._numerics.form(active_group.group)
        self._attempts.cap_samples = self._wrapped.part.form(active_group, self._attempts.cap_samples)
        self._replicas.form(active_group.group, self._device)
        self._formed(active_group.rank)
        self.records.expect_schedules()
        if self._first_steps is None:
            self._first_steps = self._training.progress.steps
            say_where_it_begins(
                active_group, self._training.progress, device=self._device, limit=self._end.limit,
                epoch_samples=self.resources.loader.epoch_samples, is_over=self._end.is_reached,
            )  # fmt: skip
        self._joined, self._is_new_phase = active_group, False

    # -- steps -------------------------------------------------------------------------------------------------------

    def _prepare(self, active_group: ActiveGroup, loader: BatchLoader) -> Step:
        if active_group.roster.plan is not active_group.agreed.plan:
            self._formations.adopt(active_group)
        queued = self.agreement.late.queued
        progress = self._training.progress if queued is None else queued.progress
        task = loader.task(active_group, progress, cap_samples=self._attempts.cap_samples)
        part = self._wrapped.part
        return Step(
            task=task,
            part=part,
            reducer=part.gradients,
            numerics=self._numerics,
            group=active_group.group,
            context=self.resources,
            agreement=self.agreement,
            exchanges=self.exchanges,
            attempts=self._attempts,
            is_retry=self.resources.begin(task.number),
            lockstep=self._lockstep,
            summed=self._summed,
        )

    def _repeat(self, step: Step) -> None:
        """Undo an attempt; the next iteration of the loop yields the same step again."""
        failure = step.transaction.failure
        if failure is None:
            raise UsageError(
                f"step {step.number} ended without a result: run each step inside `with step:` and end it with "
                "step.apply(optimizer)"
            )
        lost = failure if isinstance(failure, PeerLost) else None
        self._undo(step, lost)
        if lost is not None:
            self._leave_broken(lost)
        elif isinstance(failure, torch.OutOfMemoryError):
            self._wrapped.part.release_memory()
            self._attempts.use_less_memory(step.task, failure, self._wrapped.part.spare_memory)
            self._observer.forget()
            if step.group is not None and (step.is_awaited or step.task.is_joint):
                # The others may have committed it, and have the state then; or wait for the script's next exchange. The
                # other ranks of a divided member have left the step, and learn of the smaller micro-batches.
                lost = PeerLost("out of memory after exchanges of a step")
                self._undo(step, lost)
                self._leave_broken(lost)
        if not isinstance(failure, EndedBefore):
            self._report.count(names.REPEATED_STEPS)

    def _undo(self, step: StepPasses | None, lost: PeerLost | None) -> None:
        """Undo an attempt, if there is one, and the step before it, if that waited behind a gate that was closed."""
        if lost is not None:
            self.agreement.late.end(lost)
        if (dropped := self.agreement.go_back()) is not None:
            step = dropped.step
        if (
            step is not None and self._training.prepared is None
        ):  # else it may still be finished, by the next formation's members
            self._attempts.undo(dropped)
        if step is not None and lost is not None:
            self.agreement.uncommitted, self._end.all_end = step, False

    def _leave_broken(self, lost: Exception) -> None:
        """Leave a formation that lost a member, and whatever pass over the model this rank is in."""
        self.resources.leave_pass(str(lost))
        self._formations.leave_broken(lost)

    # -- the context of hooks (HookContext) --------------------------------------------------------------------------

    def seed_alike(self, place: str) -> None:
        """Let all ranks draw the same random numbers from here on."""
        self.resources.seed_alike(place)

    def repeated_on_loss(self) -> AbstractContextManager[None]:
        """Allow exchanges in hooks, which are called again after a loss."""
        return self.exchanges.repeated_on_loss()

    def rest(self) -> None:
        """Give up what hooks have gathered of the model."""
        self._wrapped.part.rest()

    def agree_on_end(self) -> None:
        """Wait until all ranks have called the hooks of an epoch, and agree on whether one has ended the training."""
        group = self._formations.require().group
        self._end.agree(group)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _check_result(self, active_group: ActiveGroup | None) -> None:
        replicas = self._replicas if self._wrapped.part.second_phase is None else None
        check_result(self._training, active_group, replicas, fail=self.agreement.fail)

    def _log_late_commit(self, active_group: ActiveGroup) -> None:
        """Log a step that the other ranks had committed when this rank lost them."""
        step, self.agreement.uncommitted = self.agreement.uncommitted, None
        if step is not None and active_group.group is not None and self._training.progress.steps > step.task.number:
            self.resources.loader.log(step.task, self._formations.last_membership or active_group.membership)

    def leave_early(self) -> None:
        """Write a checkpoint because the script leaves the loop before the end, by ``break`` or an error.

        Without an operator, nothing else would keep the committed steps. One rank writes it.
        """
        running = self.resources.running
        if self._identity.mode is Mode.OPERATED or self._end.is_over:
            return
        if (dropped := self.agreement.late.leave()) is not None:
            if changed := dropped.changed:
                _log.error("no checkpoint is written: %s", changed)
                return
            self._attempts.undo(dropped)
        if self._identity.rank or self._first_steps in (None, self._training.progress.steps):
            return  # a script that fails at once would find the checkpoint of a model that is not the corrected one
        self._end.is_over = True
        if running is not None and running.transaction.state is not StepState.COMMITTED:
            if running.transaction.state is StepState.APPLIED and not running.passes:
                _log.error("no checkpoint is written: the error came while an optimizer changed the weights")
                return
            self._attempts.undo(dropped)
        last = self._formations.last_membership if self.active_group is None else self.active_group.membership
        if last is not None:
            self.shutdown.leave_early(generation=last.formation.generation)
