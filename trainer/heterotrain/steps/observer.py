"""What a rank measures about its steps, and what it tells the others one step late.

In every step its phases are noted, and told in batches: to count fifty steps at once costs a fifth of counting each while the
model's own work fills the processor's caches. Gradients and buckets are measured as often as ``telemetry/budget.py`` has it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from functools import cache
from typing import NamedTuple

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.noise_scale import estimate
from heterotrain_core.scaling_rules import Statistics

from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.control import Squares, StepDecision
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.noise import Measurement, Preconditioner
from heterotrain.numerics.reducer import Reducer
from heterotrain.numerics.transfers import ReductionTimestamps
from heterotrain.state.training import Training
from heterotrain.steps.clock import Clock
from heterotrain.steps.step import Step
from heterotrain.steps.task import Task
from heterotrain.telemetry.report import Report
from heterotrain.telemetry.sampling import MeasuringBudget, is_measured

_log = logging.getLogger(__name__)

LARGE_ELEMENTS = 5_000_000
"""From this many gradients on, a pass over them is no small thing,"""
LARGE_EVERY = 8
"""and is made so often at most where no clock says how often."""
LEARN_STEPS = 64
"""Of a formation, which measures this often: the first noise scale shall not be late,"""
LEARN_EVERY = 2
"""and what measuring costs shows in the steps between."""
FLUSH_S = 1.0
"""How long a step's times may wait to be counted, unless a scrape asks for them."""
UNKNOWN = Squares()


class PendingStep(NamedTuple):
    """A committed step whose times are told when the device has come that far."""

    task: Task
    clock: Clock
    timestamps: ReductionTimestamps
    step_s: float
    peak_bytes: int | None


class Observer:
    """Telemetry of one rank's steps; it also feeds the noise averages, which are part of the replicated state.

    Attributes:
        buckets_s: for the next control vector: seconds of each bucket's transfer in the last step; empty when not measured.
        plain: squares of the last step's gradients; NaN when not measured.
        preconditioned: the same, as an adaptive optimizer divides them.
        budget: what all of it costs.
    """

    def __init__(self, report: Report, training: Training, numerics: Numerics) -> None:
        """Let ``report`` ask for what is only looked up when somebody wants to know."""
        self.buckets_s: tuple[float, ...] = ()
        self.plain = self.preconditioned = UNKNOWN
        self.budget = MeasuringBudget()
        self._report = report
        self._training = training
        self._numerics = numerics
        self._every = 1
        self._formed_steps = 0
        self._measures = False
        self._measured_samples = 0
        self._committed_s: float | None = None
        self._step_s = math.nan
        self._pause_cause: str | None = None
        self._skip = True
        self._pending: deque[PendingStep] = deque()
        self._flush_lock = threading.Lock()
        self._flushed_s = 0.0
        self._last_commit: tuple[int, float | None] | None = None
        report.on_scrape, report.live, report.live_counters = self.flush, self._gauges, self._counters

    # -- around a step -----------------------------------------------------------------------------------------------

    def begin(self, reducer: Reducer, task: Task, *, alone: bool) -> Measurement | None:
        """Prepare for a step; return what measures its gradients, where that is wanted.

        The answer follows from what all ranks know alike. Where the learning rate follows the noise, no clock has a say
        in it: the same run gives the same weights.

        Args:
            reducer: where gradients arrive.
            task: the step.
            alone: whether there are no other ranks.
        """
        is_large = reducer.elements > LARGE_ELEMENTS
        learning_every = LARGE_EVERY if is_large else LEARN_EVERY
        self._measures = is_measured(task.number, self._every if self._formed_steps >= LEARN_STEPS else learning_every)
        takes_squares = self._measures
        if self._numerics.steers_by_noise:
            takes_squares = not is_large or is_measured(task.number, LARGE_EVERY)
        if not takes_squares or (alone and len(task.micro_batches) < 2):  # noqa: PLR2004 - one group has no spread
            return None
        began_s = time.perf_counter()
        preconditioned = Preconditioner(self._training.optimizers) if self._numerics.wants_preconditioned else None
        if preconditioned is not None and not preconditioned.is_known:
            preconditioned = None
        measurement = Measurement(
            reducer,
            micro_batches=len(task.micro_batches),
            loss_scale=self._numerics.loss_scale,
            preconditioner=preconditioned,
        )
        measurement.spent_s = time.perf_counter() - began_s
        return measurement

    def membership_changed(self, cause: str) -> None:
        """Note why the next step comes late."""
        self._pause_cause = cause
        self._report.count(names.MEMBERSHIP_CHANGES, cause=cause)
        self.forget()

    def forget(self) -> None:
        """Drop what belongs to the formation or attempt that ended; the next step's times are no typical ones."""
        self.flush()
        self.buckets_s, self.plain, self.preconditioned = (), UNKNOWN, UNKNOWN
        self._skip = True
        self._pending.clear()

    def active_group(self) -> None:
        """A formation begins: its members measure often for a while, since they have not agreed on anything else yet."""
        self.forget()
        self._every, self._formed_steps = 1, 0

    def evaluated(self) -> None:
        """Note that time was spent on an end-of-epoch hook, which is not part of the next step."""
        self._committed_s = time.perf_counter()

    def committed(self, step: Step, decision: StepDecision, active_group: ActiveGroup, *, now_s: float) -> None:
        """Count a committed step and keep what the next control vector will carry.

        Args:
            step: it.
            decision: what its control vectors said.
            active_group: the formation.
            now_s: ``time.perf_counter`` at the commit.
        """
        self._formed_steps += 1
        self._every = decision.measure_every
        _device_bytes()  # looked up here: which device is CUDA's current one, each thread has its own word on
        self._last_commit = (active_group.roster.plan.global_batch_samples, decision.loss)
        if decision.plain is not None or decision.preconditioned is not None:
            self._average(decision)
        self.plain = self.preconditioned = UNKNOWN
        if step.measurement is not None and not step.skipped:
            self._measured_samples = step.task.batch_samples
            self.plain, self.preconditioned = step.measurement.squares(
                batch_samples=step.task.batch_samples, weight=decision.weight
            )
        if decision.buckets_s:
            self._report.buckets(decision.buckets_s)
        self.buckets_s = step.reducer.transfers_s() if self._measures else ()
        if step.skipped:
            self._report.count(names.SKIPPED_STEPS)
        if step.logged:
            self._report.user(step.logged)
        self._step_s = math.nan
        if self._pause_cause is not None:
            if self._committed_s is not None:
                self._report.count(names.PAUSE_SECONDS, now_s - self._committed_s, cause=self._pause_cause)
                _log.info("paused %.3f s (%s)", now_s - self._committed_s, self._pause_cause)
            self._pause_cause = None
        elif not self._skip and self._committed_s is not None:
            self._step_s = now_s - self._committed_s
            self._pending.append(
                PendingStep(step.task, step.clock, step.reducer.timestamps, self._step_s, _peak_bytes())
            )
        self._skip = False
        self._committed_s = now_s
        if now_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = now_s
            self.flush(wait=False)

    def cost(self, step: Step, *, since_s: float) -> None:
        """Note what telemetry took of a committed step: since ``since_s``, and while gradients were measured."""
        if math.isnan(self._step_s):
            return  # a step that came late is no typical one
        spent_s = time.perf_counter() - since_s
        if step.measurement is not None:
            spent_s += step.measurement.spent_s
        self.budget.charge(spent_s, step_s=self._step_s, measured=self._measures)

    def flush(self, *, wait: bool = True) -> None:
        """Count the steps that the device has finished; on CUDA the last one's update still runs when it is committed.

        It may be called from any thread; without ``wait``, nothing happens while another one is at it.
        """
        if not self._flush_lock.acquire(blocking=wait):
            return
        try:
            while self._pending and self._pending[0].clock.is_over():
                task, clock, timestamps, step_s, peak_bytes = self._pending.popleft()
                self._report.step(
                    share_samples=task.share_samples, micro_batch_samples=max(task.micro_batches, default=0),
                    times=clock.read(timestamps, step_s=step_s), peak_bytes=peak_bytes,
                )  # fmt: skip
        finally:
            self._flush_lock.release()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _average(self, decision: StepDecision) -> None:
        """Average what arrived of the step before."""
        for kind, squares in ((Statistics.PLAIN, decision.plain), (Statistics.PRECONDITIONED, decision.preconditioned)):
            if squares is None:
                continue
            sample = estimate(
                weighted_squares=squares.weighted, total_squared=squares.total, samples=self._measured_samples,
                groups=squares.groups,
            )  # fmt: skip
            if sample is not None:
                self._numerics.noise[kind] = self._numerics.noise[kind].after(
                    sample, samples=self._measured_samples, base_samples=self._numerics.base_samples
                )

    def _gauges(self) -> dict[str, float]:
        """Return how far the training is; nothing before the first commit of this process."""
        if self._last_commit is None:
            return {}
        progress, (global_batch_samples, loss) = self._training.progress, self._last_commit
        values = {
            names.EPOCH: float(progress.epoch),
            names.STEP: float(progress.steps),
            names.SAMPLES_COMMITTED: float(progress.samples),
            names.CURSOR: float(progress.cursor),
            names.EPOCH_STEP: float(progress.epoch_steps),
            names.GLOBAL_BATCH: float(global_batch_samples),
            names.LEARNING_RATE_SCALE: self._numerics.learning_rate_scale,
            names.MEASUREMENT_INTERVAL: float(self._every),
        }
        if self._numerics.precision.scales_loss:
            values[names.LOSS_SCALE] = self._numerics.loss_scale
        average = self._numerics.noise[Statistics.PLAIN]
        parts = average.corrected()
        optional = {
            names.DEVICE_MEMORY: _device_bytes(),
            names.LOSS: loss,
            names.GRADIENT_SQUARED: parts.gradient_squared if parts else None,
            names.GRADIENT_VARIANCE: parts.variance if parts else None,
            names.NOISE_SCALE: average.scale(),
        }
        return values | {name: value for name, value in optional.items() if value is not None and math.isfinite(value)}

    def _counters(self) -> dict[str, float]:
        return {names.TELEMETRY_SECONDS: self.budget.spent_s} if self._last_commit is not None else {}


@cache
def _device_bytes() -> float | None:
    """Return the memory of the accelerator in use, ``None`` on plain processors."""
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _peak_bytes() -> int | None:
    """Return the most memory that tensors took since the last call, ``None`` on plain processors."""
    if _device_bytes() is None:
        return None
    peak = int(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return peak
