"""Records a committed step besides its weights: progress, logs, schedulers and telemetry."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.plan import Plan

from heterotrain.checkpoints.record import RunRecord
from heterotrain.data.progress import advance
from heterotrain.errors import UsageError
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.roster import Roster
from heterotrain.network.control import StepDecision
from heterotrain.numerics.non_finite import Action
from heterotrain.steps.attempt import Attempts
from heterotrain.steps.batch_loader import BatchLoader
from heterotrain.steps.job_parts import JobParts
from heterotrain.steps.observer import Observer
from heterotrain.steps.replicas import Replicas
from heterotrain.steps.step_passes import StepPasses
from heterotrain.telemetry.progress import Position, ProgressDisplay
from heterotrain.telemetry.tensorboard import TensorBoardWriter

_log = logging.getLogger(__name__)


class StepRecords:
    """Notes steps that all ranks finished, and those without a finite result.

    Attributes:
        schedulers: of learning rates; stepped once for each committed step.
        progress_display: the line on a terminal.
    """

    def __init__(
        self, job: JobParts, *, observer: Observer, record: RunRecord, replicas: Replicas, attempts: Attempts,
        display: ProgressDisplay, tensorboard: TensorBoardWriter | None = None,
    ) -> None:  # fmt: skip
        self.schedulers: list[Any] = []
        self.progress_display = display
        self._training, self._numerics, self._report = job.training, job.numerics, job.report
        self._epochs, self._steps = job.config.epochs, job.config.steps
        self._prices_per_hour = job.identity.prices_per_hour
        self._observer, self._record, self._replicas, self._attempts = observer, record, replicas, attempts
        self._tensorboard = tensorboard
        self._non_finite_steps = self._empty_steps = 0
        self._counts: list[int | None] = []
        self._noted: Roster | None = None

    def expect_schedules(self) -> None:
        """Note how often the schedulers were stepped, as they are now; for a state that has come from elsewhere."""
        self._counts = [_count(scheduler) for scheduler in self.schedulers]

    def _step_schedulers(self, times: int) -> None:
        """Step each scheduler.

        Raises:
            UsageError: the script has stepped one since the last step.
        """
        for scheduler, before in zip(self.schedulers, self._counts, strict=False):
            if _count(scheduler) != before:
                raise UsageError(
                    f"the script steps its {type(scheduler).__name__}, which job.scheduler steps as well, so the rate "
                    "changes twice as fast: leave out scheduler.step()"
                )
        for _ in range(times):
            for scheduler in self.schedulers:
                scheduler.step()
        self.expect_schedules()

    def committed(
        self, step: StepPasses, decision: StepDecision, active_group: ActiveGroup, loader: BatchLoader
    ) -> None:
        """Note a step that all ranks finished.

        Args:
            step: the step.
            decision: of all ranks.
            active_group: the formation that finished it.
            loader: of the job's data.
        """
        now_s = time.perf_counter()
        task = step.task
        self._training.progress = advance(
            self._training.progress, batch_samples=task.batch_samples, ends_epoch=task.ends_epoch
        )
        self._training.before_hooks = None
        loader.committed(task, active_group.membership)
        if active_group.roster is not self._noted:
            self._noted = active_group.roster
            self._record.note(self._noted, step=step.task.number)
        if not decision.weight:
            self._note_empty(step.task.number)
        skipped = bool(step.transaction.skip_reason)
        if skipped:
            self._attempts.undo()  # also running statistics, which a forward pass that is not finite has changed
        times = self._numerics.committed(step=step.task.number, loss=decision.loss, finite=not skipped)
        if self.schedulers:
            self._step_schedulers(times)
        telemetry_began_s = time.perf_counter()
        self._observer.committed(step, decision, active_group, now_s=now_s)
        if self._tensorboard is not None:
            self._tensorboard.committed(active_group, self._training.optimizers, step=self._training.progress.steps)
        self._replicas.clear()
        if step.is_measured and active_group.group is not None and step.part.second_phase is None:  # whole models
            self._replicas.measure()
        self.progress_display.committed(
            lambda: self._position(active_group, decision, loader), leads=active_group.rank == 0, now_s=now_s
        )
        self._observer.cost(step, since_s=telemetry_began_s)

    def _note_empty(self, number: int) -> None:
        """Log a step whose micro-batches all have weight zero: at first, and whenever the number of them doubles."""
        self._empty_steps += 1
        if not self._empty_steps & (self._empty_steps - 1):
            _log.warning(
                "step %d trains nothing, because the weights of all its micro-batches are 0 (%d such steps so far): a "
                "weight is the number of samples or tokens that the loss is a sum of", number, self._empty_steps,
            )  # fmt: skip

    def non_finite(self, what: str, action: Action) -> None:
        """Count and log a step whose loss or gradient is not finite, unless a smaller loss scale in fp16 may help."""
        if action is Action.SKIP and self._numerics.loss_scale > 1.0:
            return
        self._report.count(names.NON_FINITE_STEPS)
        self._report.gauges({names.NON_FINITE_STEP: float(self._training.progress.steps)})
        if (last := self._numerics.losses.last_finite) is not None:
            self._report.gauges({names.LAST_FINITE_LOSS: last})
        self._non_finite_steps += 1
        number = self._non_finite_steps
        if action is Action.FAIL or number & (number - 1):  # after the first, one line whenever their number doubles
            return
        done = "is skipped" if action is Action.SKIP else "is applied nevertheless (onNonFinite: Ignore)"
        _log.warning("%s; the step %s (%d such steps so far)", what, done, number)

    def _position(self, active_group: ActiveGroup, decision: StepDecision, loader: BatchLoader) -> Position:
        progress, roster = self._training.progress, active_group.roster
        return Position(
            epoch=progress.epoch, epochs=self._epochs, steps=progress.steps,
            steps_left=None if self._steps is None else max(0, self._steps - progress.steps),
            samples=progress.samples, epoch_done=progress.cursor, epoch_samples=loader.epoch_samples,
            loss=decision.loss, ranks=len(roster.plan_ranks),
            share_samples=roster.shares[roster.positions[active_group.rank]],
            batch_samples=roster.plan.global_batch_samples,
            price_per_hour=price_of(roster.plan, self._prices_per_hour),
        )  # fmt: skip


def _count(scheduler: Any) -> int | None:
    """Return how often a scheduler was stepped; ``None`` for one that does not count."""
    counts = (getattr(scheduler, name, None) for name in ("_step_count", "last_epoch"))
    return next((count for count in counts if isinstance(count, int)), None)


def price_of(plan: Plan, prices_per_hour: Mapping[str, float]) -> float | None:
    """Return the price of an hour of all workers that a plan gives a part to, by the prices of their pools.

    Pools without a price count nothing; ``None`` where no pool of the job has one.
    """
    pools = {rank.worker: plan.pool_of(rank) for rank in plan.ranks}
    return sum(prices_per_hour.get(pool, 0.0) for pool in pools.values()) if prices_per_hour else None
