"""The loop under ``job.steps``: runs steps as transactions, in the current formation (``formations.py``)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.config import TrainingConfig

from heterotrain.checkpoints.manager import CheckpointManager, WriteReason
from heterotrain.checkpoints.record import RunRecord
from heterotrain.clock import Clock
from heterotrain.data.loader_process import Workers
from heterotrain.data.progress import Progress, shared_seed
from heterotrain.data.slices import Source
from heterotrain.errors import Diverged, EndedBefore, PeerLost, RepeatStep, UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.membership.interface import ActiveGroup, Membership
from heterotrain.network.control import BEFORE, StepDecision
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.noise import Measurement
from heterotrain.numerics.non_finite import Action
from heterotrain.parts.batches import inputs_and_targets
from heterotrain.parts.interface import SecondPhase, Wrapped
from heterotrain.state.prepared import Confirmation, PreparedStep
from heterotrain.state.training import TrainState
from heterotrain.steps.attempt import SEEDS, Attempts, seed_step
from heterotrain.steps.ballot import StepBallot
from heterotrain.steps.batch_loader import BatchLoader
from heterotrain.steps.data_agreement import DataAgreement
from heterotrain.steps.departure import Departure
from heterotrain.steps.ending import End
from heterotrain.steps.final_check import check_result
from heterotrain.steps.first_line import say_where_it_begins
from heterotrain.steps.formations import Formations
from heterotrain.steps.hooks import Hooks
from heterotrain.steps.observer import Observer
from heterotrain.steps.phases import TrainingPhase
from heterotrain.steps.replicas import Replicas
from heterotrain.steps.script_exchanges import ScriptExchanges
from heterotrain.steps.shutdown import Shutdown
from heterotrain.steps.states import StepState
from heterotrain.steps.step import Step
from heterotrain.steps.step_passes import StepPasses
from heterotrain.steps.step_records import StepRecords
from heterotrain.steps.summed_loss import SummedLosses
from heterotrain.steps.task import Task
from heterotrain.steps.usage import refuse_update
from heterotrain.steps.vote import exchange_votes
from heterotrain.telemetry.progress import ProgressDisplay
from heterotrain.telemetry.report import RankMetrics
from heterotrain.telemetry.tensorboard import TensorBoardWriter
from heterotrain.termination_message import TerminationMessage

_log = logging.getLogger(__name__)


_UPDATES = (StepState.APPLIED, StepState.COMMITTED)


class NotNeeded(Exception):  # noqa: N818  # names the event; it never leaves this file
    """Everything is committed, and no other rank needs this rank's state any more."""


class Loop:
    """Drives one rank from its first formation to its end."""

    def __init__(
        self,
        *,
        identity: Identity,
        config: TrainingConfig,
        device: torch.device,
        training: TrainState,
        membership: Membership,
        checkpoints: CheckpointManager,
        numerics: Numerics,
        observer: Observer,
        report: RankMetrics,
        termination_message: TerminationMessage,
        record: RunRecord,
        replicas: Replicas,
        hooks: Hooks,
        wrapped: Wrapped,
        display: ProgressDisplay,
        tensorboard: TensorBoardWriter | None = None,
        formed: Callable[[int], None] = lambda _rank: None,
        micro_batch_samples: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock, operated = clock, identity.mode is Mode.OPERATED
        self.shutdown = Shutdown(
            config=config,
            training=training,
            membership=membership,
            checkpoints=checkpoints,
            termination_message=termination_message,
            operated=operated,
            clock=clock,
        )
        self._formations = Formations(
            membership=membership, shutdown=self.shutdown, training=training, checkpoints=checkpoints,
            observer=observer, report=report, wrapped=wrapped,
        )  # fmt: skip
        self._departure = Departure(self.shutdown, grace_s=config.grace_s, operated=operated, clock=clock)
        self.exchanges = ScriptExchanges(self._formations)
        self._wrapped, self._formed = wrapped, formed
        self._identity = identity
        self._config = config
        self._device = device
        self._training = training
        self._checkpoints = checkpoints
        self._numerics = numerics
        self._observer = observer
        self._report = report
        self._attempts = Attempts(report, numerics.forward_state, cap_samples=micro_batch_samples)
        self._loader: BatchLoader | None = None
        self._uncommitted: Step | None = None
        self._committed: tuple[ActiveGroup, StepDecision] | None = None
        self._repeating: int | None = None
        self._open: StepPasses | None = None
        self._lockstep = False
        self._summed = SummedLosses()
        self._exchanges = False
        self._end = End(self.shutdown, training, config)
        self._phase = TrainingPhase()
        self._joined: ActiveGroup | None = None
        self._is_new_phase = False
        self._first_steps: int | None = None
        self._data: DataAgreement | None = None
        self._is_over = False
        self._began_s = self._clock()
        self._step_s = 0.0
        self._replicas = replicas
        self._hooks = hooks
        self._ballot = StepBallot(
            training=training, checkpoints=checkpoints, numerics=numerics, observer=observer, replicas=replicas,
            shutdown=self.shutdown,
        )  # fmt: skip
        self.records = StepRecords(
            training=training, numerics=numerics, observer=observer, report=report, record=record, replicas=replicas,
            attempts=self._attempts, epochs=config.epochs, steps=config.steps, prices_per_hour=identity.prices_per_hour,
            display=display, tensorboard=tensorboard,
        )  # fmt: skip

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
        self, source: Source, *, workers: Workers, lockstep: bool = False, phase: TrainingPhase | None = None
    ) -> Iterator[Step]:
        """Yield steps until everything of the phase is committed.

        Args:
            source: the data set.
            workers: processes that load samples ahead.
            lockstep: whether every rank gets the same number of micro-batches.
            phase: of the training; all of it by default.

        Raises:
            UsageError: as ``TrainingPhase.may_begin``.
        """
        if not self._begin(source, workers=workers, lockstep=lockstep, phase=phase or TrainingPhase()):
            return
        while True:
            try:
                self._follow()
                active_group = self._formations.active_group or self._form()
                if self._phase.is_past(self._training.progress):
                    if self._joined is not active_group:
                        return  # a rank that resumes or joins goes on to its phase
                    if self.is_between_phases:
                        self._checkpoints.write(WriteReason.END, self._training, active_group)
                        return
                if self._joined is not active_group or self._is_new_phase:
                    self._join(active_group)
                self._call_hooks(active_group)
                if self.is_between_phases:
                    continue
                if self._end.is_reached:
                    self.records.progress_display.clear()
                    self._check_result(active_group)
                    self.shutdown.conclude(active_group, loss=self._numerics.losses.last_finite)
                    self._is_over = True
                    return
                self._checkpoints.write(WriteReason.DUE, self._training, active_group)
                step = self._prepare(active_group, self._loader or self._require_loader())
            except PeerLost as lost:
                self._leave_broken(lost)
                continue
            except NotNeeded:
                self._check_result(None)
                self.shutdown.finish_alone(self._formations.last_membership)
                self._is_over = True
                return
            if self._withdraws(step):
                step.withdraw()
            else:
                yield step
            if not step.committed:
                self._repeat(step)
            self._exchanges = step.has_exchanged

    def _begin(self, source: Source, *, workers: Workers, lockstep: bool, phase: TrainingPhase) -> bool:
        """Prepare for the script's loop; return whether there may be anything to train in it."""
        self._phase, self._is_new_phase = phase, True
        over = self._first_steps is not None and self._end.is_reached
        if not phase.may_begin(is_over=over, has_phases=self._wrapped.part.has_phases):
            return False
        self._lockstep, self._is_over = lockstep, False
        self._training.enter_phase(phase.is_past)
        self._loader = BatchLoader(
            source, config=self._config, device=self._device, identity=self._identity, report=self._report,
            workers=workers, training=self._training, phase=phase,
        )  # fmt: skip
        if self._identity.mode is not Mode.ALONE:
            self._data = DataAgreement(source, seed=self._config.seed)
        loader = self._loader
        self._wrapped.part.look(lambda samples: inputs_and_targets(loader.example(samples))[0])
        self._report.gauges({names.READY: 1.0})  # from now on peers may wait for this rank, because its loaders are up
        return True

    def _call_hooks(self, active_group: ActiveGroup) -> None:
        """Call the hooks that are due, and agree on whether they have ended the training.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        if self._replicas.resync(active_group):
            self.records.expect_schedules()
        if self._hooks.after_epochs and self._hooks_follow(self._training.progress):
            self._checkpoints.write(WriteReason.HOOKS, self._training, active_group)
        if self._hooks.finish_step(self):
            self._observer.evaluated()
        if self._hooks.finish_epoch(self):
            self._observer.evaluated()
            self._end.agree(active_group.group)
        self._end.note(alone=active_group.group is None)

    def finish(self, reason: str) -> None:
        """End the training after the current step, or the last one where none runs."""
        running = self._open is not None and self._open.is_open and not self._open.committed
        self.shutdown.end_after(reason, steps=self._training.progress.steps + int(running))

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
        committed, self._committed = self._committed, None
        if committed is None:
            return
        group, reducer = committed[0].group, self._wrapped.part.gradients
        if group is not None and reducer.wants_order:
            reducer.agree_on_order(group)
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
            self._data.check(active_group.group, self.fail)
        if self._joined is active_group:
            self._is_new_phase = False
            self.records.expect_schedules()
            return
        self._observer.formation_began()
        self._numerics.form(active_group.group)
        self._attempts.cap_samples = self._wrapped.part.form(active_group, self._attempts.cap_samples)
        self._replicas.form(active_group.group, self._device)
        self._formed(active_group.rank)
        self.records.expect_schedules()
        if self._first_steps is None:
            self._first_steps = self._training.progress.steps
            say_where_it_begins(
                active_group, self._training.progress, device=self._device, limit=self._end.limit,
                epoch_samples=self._require_loader().epoch_samples, is_over=self._end.is_reached,
            )  # fmt: skip
        self._joined, self._is_new_phase = active_group, False

    # -- steps -------------------------------------------------------------------------------------------------------

    def _prepare(self, active_group: ActiveGroup, loader: BatchLoader) -> Step:
        self._formations.adopt(active_group)
        self._began_s = self._clock()
        task = loader.task(active_group, self._training.progress, cap_samples=self._attempts.cap_samples)
        part = self._wrapped.part
        self.seed_alike("step")
        return Step(
            task=task,
            part=part,
            reducer=part.gradients,
            numerics=self._numerics,
            group=active_group.group,
            context=self,
            attempts=self._attempts,
            is_retry=self._repeating == task.number,
            lockstep=self._lockstep,
            summed=self._summed,
        )

    def _repeat(self, step: Step) -> None:
        """Undo an attempt; the next iteration of the loop yields the same step again."""
        self._repeating = step.number
        if self._training.prepared is None:  # else it may still be finished, by the next formation's members
            self._attempts.undo()
        failure = step.transaction.failure
        if isinstance(failure, PeerLost):
            self._uncommitted, self._end.all_end = step, False
            self._leave_broken(failure)
        elif isinstance(failure, torch.OutOfMemoryError):
            self._attempts.use_less_memory(step.task, failure, self._wrapped.part.spare_memory)
            self._observer.forget()
            if step.group is not None and (step.is_awaited or step.task.is_joint):
                # The others may have committed it, and have the state then; or wait for the script's next exchange. The
                # other ranks of a divided member have left the step, and learn of the smaller micro-batches.
                self._uncommitted = step
                self._leave_broken(PeerLost("out of memory after exchanges of a step"))
        elif not isinstance(failure, RepeatStep):
            raise UsageError(
                f"step {step.number} ended without a result: run each step inside `with step:` and end it with "
                "step.apply(optimizer)"
            )
        if not isinstance(failure, EndedBefore):
            self._report.count(names.REPEATED_STEPS)

    def _leave_broken(self, lost: Exception) -> None:
        """Leave a formation that lost a member, and whatever pass over the model this rank is in."""
        self.leave_pass(str(lost))
        self._formations.leave_broken(lost)

    def _hooks_follow(self, progress: Progress) -> bool:
        """Return whether end-of-epoch hooks come next that may take longer than the grace period.

        SIGTERM is heeded after the hooks, and they may change the state at any time: so it is saved before them.
        """
        return self._hooks.follow(progress) and self._checkpoints.outlasts_grace(
            self._hooks.epoch_hooks_s, self._training, step_s=self._step_s, grace_s=self._config.grace_s
        )

    # -- the context of a step (StepContext) -------------------------------------------------------------------------

    def check_update(self, *_arguments: object) -> None:
        """Refuse an optimizer's step that ``step.apply`` has not called."""
        running = self._open
        if running is not None and running.is_open and running.transaction.state not in _UPDATES:
            refuse_update(running.number)

    def enter(self, step: StepPasses) -> None:
        """Prepare for a pass: its random numbers and, before the first one, copies for another attempt."""
        seed_step(((self._loader or self._require_loader()).seed_of(step.task) + step.passes) % SEEDS, self._device)
        if not step.passes:
            self._open = step
            self._attempts.begin(self._training.model)

    def measure(self, step: StepPasses) -> Measurement | None:
        """Return the measurement of the step's gradients, or ``None`` if they are not measured."""
        return self._observer.begin(step.reducer, step.task, alone=step.group is None)

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task, starting at its ``offset``-th, as a batch on the device."""
        left_s = self.shutdown.left_s
        if left_s is not None and self.active_group is not None:
            # Only buffers have changed since the last committed step, and ``Attempts`` holds their earlier values.
            self._checkpoints.write(
                WriteReason.SLOW_STEP,
                self._training,
                self.active_group,
                buffers=self._attempts.kept,
                left_s=left_s,
                step_left_s=max(0.0, self._step_s - (self._clock() - self._began_s)),
            )
        return (self._loader or self._require_loader()).fetch(task, offset, size)

    def look_ahead(self, task: Task) -> bool:
        """Load samples of the next step while the device computes; return whether any were loaded."""
        loader = self._loader or self._require_loader()
        return loader.looks_ahead and self.shutdown.left_s is None and loader.look_ahead(task)

    def leave_pass(self, reason: str) -> None:
        """Leave a forward or backward pass in the middle, on all ranks of this rank's member."""
        if (part := self._wrapped.known) is not None:
            part.leave_pass(reason, keep_gradients=self._training.prepared is not None)

    def open_exchanges(self, *, are_open: bool) -> None:
        """Allow or refuse exchanges of the script with other ranks."""
        self.exchanges.open(are_open=are_open)

    def repeated_on_loss(self) -> AbstractContextManager[None]:
        """Allow exchanges in hooks, which are called again after a loss."""
        return self.exchanges.repeated_on_loss()

    def rest(self) -> None:
        """Give up what hooks have gathered of the model."""
        self._wrapped.part.rest()

    def vote(self, step: StepPasses, *, ok: bool) -> StepDecision:
        """Exchange the control vectors and wait for the buckets.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        active_group, reducer = self._formations.require(), step.reducer
        held = self._formations.newest(active_group)
        hooks_follow = False
        if self._hooks.after_epochs and step.task.ends_epoch:
            hooks_follow = self._hooks_follow(self._require_loader().advanced(self._training.progress, step.task))
        asked = self._departure.is_asked(active_group)
        waits = asked and not hooks_follow and self._departure.waits(active_group, next_s=self._step_s)
        slot = self._ballot.slot(
            step, active_group, reducer, held,
            ok=ok, leaving=asked and not waits, waiting=waits, hooks_follow=hooks_follow,
        )  # fmt: skip
        state = self._numerics.forward_state
        decision, held = exchange_votes(active_group, reducer, state, slot, held, job_uid=self._identity.job_uid)
        self._formations.agreed(active_group, held)
        self._end.voted(decision, more=step.more)
        if decision.committed:
            # Code of the script that adds noise to gradients, or an optimizer that draws numbers, does the same
            # on every rank.
            self.seed_alike("update")
            if active_group.group is not None:
                try:
                    self._replicas.judge(decision.fingerprints, active_group)
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
            self._uncommitted = None
            self._record_step(step, decision, active_group)
            self._committed = None  # the formation that it would change is over
            self._training.confirmed = step.number, confirmation
            _log.info("step %d is applied late: all ranks had been able to finish it", step.number)

        prepared = PreparedStep(step.number, finish=late, drop=self._attempts.undo) if finish is not None else None
        return second.confirm(active_group.group, prepared)

    def commit(self, step: StepPasses, decision: StepDecision) -> None:
        """Record a step that all ranks finished: progress, logs, schedulers, telemetry and changes of membership."""
        self._record_step(step, decision, self._formations.require())

    def _record_step(self, step: StepPasses, decision: StepDecision, active_group: ActiveGroup) -> None:
        self._step_s = self._clock() - self._began_s
        compares = step.part.second_phase is None
        loader = self._loader or self._require_loader()
        self.records.committed(step, decision, active_group, loader, compares=compares)
        self._committed = active_group, decision

    def non_finite(self, what: str, action: Action) -> None:
        """Report a step whose loss or gradient is not finite."""
        self.records.non_finite(what, action)

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error that all ranks have found in the same step, when all of them have.

        A rank that ended at once could look like a lost peer to one that is still waiting for the vote.
        """
        self._is_over = True
        active_group = self.active_group
        if active_group is not None and active_group.group is not None:
            with contextlib.suppress(PeerLost):
                active_group.group.gather_now([0.0])
        raise error

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _check_result(self, active_group: ActiveGroup | None) -> None:
        replicas = self._replicas if self._wrapped.part.second_phase is None else None
        check_result(self._training, active_group, replicas, fail=self.fail)

    def _log_late_commit(self, active_group: ActiveGroup) -> None:
        """Log a step that the other ranks had committed when this rank lost them."""
        step, self._uncommitted = self._uncommitted, None
        if step is not None and active_group.group is not None and self._training.progress.steps > step.task.number:
            self._require_loader().log(step.task, self._formations.last_membership or active_group.membership)

    def leave_early(self) -> None:
        """Write a checkpoint because the script leaves the loop before the end, by ``break`` or an error.

        Without an operator, nothing else would keep the committed steps. One rank writes it.
        """
        running, progress = self._open, self._training.progress
        if self._identity.mode is Mode.OPERATED or self._identity.rank or self._is_over:
            return
        if self._first_steps in (None, progress.steps):
            return  # a script that fails at once would find the checkpoint of a model that is not the corrected one
        self._is_over = True
        if running is not None and not running.committed:
            if running.transaction.state is StepState.APPLIED and not running.passes:
                _log.error("no checkpoint is written: the error came while an optimizer changed the weights")
                return
            self._attempts.undo()
        last = self._formations.last_membership if self.active_group is None else self.active_group.membership
        if last is not None:
            self.shutdown.leave_early(generation=last.formation.generation)

    def seed_alike(self, place: str) -> None:
        """Let all ranks draw the same random numbers from here on."""
        steps = self._training.progress.steps
        seed_step(shared_seed(seed=self._config.seed, steps=steps, place=place), self._device)

    def _require_loader(self) -> BatchLoader:
        if self._loader is None:
            raise UsageError("call job.steps first")
        return self._loader
