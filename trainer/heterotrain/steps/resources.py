"""What the passes of a step draw on: samples, random numbers, copies for another attempt, and a measurement."""

from __future__ import annotations

from typing import Any

from heterotrain.checkpoints.manager import WriteReason
from heterotrain.data.progress import shared_seed, step_seed
from heterotrain.data.rng import SEEDS, reseed
from heterotrain.numerics.noise import Measurement
from heterotrain.steps.attempt import Attempts
from heterotrain.steps.batch_loader import BatchLoader
from heterotrain.steps.clock import Phase
from heterotrain.steps.formations import Formations
from heterotrain.steps.job_parts import JobParts
from heterotrain.steps.late import LateSteps
from heterotrain.steps.observer import Observer
from heterotrain.steps.shutdown import Shutdown
from heterotrain.steps.states import StepState
from heterotrain.steps.step_passes import StepPasses
from heterotrain.steps.task import Task
from heterotrain.steps.usage import refuse_update

_UPDATES = (StepState.APPLIED, StepState.COMMITTED)


class StepResources:
    """The resources of this rank's steps.

    Attributes:
        loader: of the current phase's samples; there is none before the first phase.
        running: the newest step that the script has entered.
        step_s: seconds of the last step.
        late: the step whose update is queued.
    """

    loader: BatchLoader

    def __init__(
        self, job: JobParts, *, formations: Formations, shutdown: Shutdown, observer: Observer, attempts: Attempts
    ) -> None:
        self.running: StepPasses | None = None
        self.late = LateSteps()
        self.step_s = 0.0
        self._config, self._device, self._training, self._clock = job.config, job.device, job.training, job.clock
        self._checkpoints, self._wrapped, self._formations = job.checkpoints, job.wrapped, formations
        self._shutdown, self._observer, self._attempts = shutdown, observer, attempts
        self._began_s, self._newest = job.clock(), -1

    def begin(self, number: int) -> bool:
        """Begin a step: what is drawn from here on is the same on all ranks. Return whether it has begun before."""
        self._began_s = self._clock()
        self.late.begin(number)
        self.seed_alike("step", number)
        before, self._newest = self._newest, max(number, self._newest)
        return number <= before

    def end(self) -> None:
        """End a step that is committed, or queued."""
        self.step_s = self._clock() - self._began_s

    def seed_alike(self, place: str, number: int | None = None) -> None:
        """Let all ranks draw the same random numbers from here on; ``number``: of the step, the next one by default."""
        steps = self._training.progress.steps if number is None else number
        reseed(shared_seed(seed=self._config.seed, steps=steps, place=place), self._device)

    def enter(self, step: StepPasses) -> None:
        """Prepare for a pass: its random numbers and, before the first one, copies for another attempt."""
        task = step.task
        if not step.passes:
            self.running = step
            self._attempts.begin(self._training.model, self.late.queued)
            began = step.clock.now()
            if not self._shutdown.is_requested and self.loader.load_first(task):
                step.clock.spent(Phase.LOAD, began)
        seed = step_seed(seed=self._config.seed, epoch=task.epoch, position=task.position)
        reseed((seed + step.passes) % SEEDS, self._device)

    def check_update(self, *_arguments: object) -> None:
        """Refuse an optimizer's step that ``step.apply`` has not called."""
        running = self.running
        if running is not None and running.is_open and running.transaction.state not in _UPDATES:
            if running.transaction.state is not StepState.QUEUED:
                refuse_update(running.number)
            self.late.is_confirmed()

    def measure(self, step: StepPasses) -> Measurement | None:
        """Return the measurement of the step's gradients, or ``None`` if they are not measured."""
        found = self._observer.begin(step.reducer, step.task, alone=step.group is None)
        step.is_measured = self._observer.measures
        return found

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task, starting at its ``offset``-th, as a batch on the device."""
        active_group = self._formations.active_group
        if self._shutdown.is_requested and active_group is not None and self.late.is_confirmed():
            # Only buffers have changed since the last committed step, and ``Attempts`` holds their earlier values.
            self._checkpoints.write(
                WriteReason.SLOW_STEP,
                self._training,
                active_group,
                buffers=self._attempts.kept,
                left_s=self._shutdown.left_s,
                step_left_s=max(0.0, self.step_s - (self._clock() - self._began_s)),
            )
        return self.loader.fetch(task, offset, size)

    def look_ahead(self, task: Task) -> bool:
        """Load samples of the next step while the device computes; return whether any were loaded."""
        loader = self.loader
        return loader.looks_ahead and not self._shutdown.is_requested and loader.look_ahead(task)

    def leave_pass(self, reason: str) -> None:
        """Leave a forward or backward pass in the middle, on all ranks of this rank's member."""
        if (part := self._wrapped.known) is not None:
            part.leave_pass(reason, keep_gradients=self._training.prepared is not None)
