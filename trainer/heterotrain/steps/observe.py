"""What a rank measures about its steps, and what it tells the others one step late."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from functools import cache

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.noise import estimate
from heterotrain_core.rates import Statistics

from heterotrain.data.progress import Progress
from heterotrain.membership.interface import Formed
from heterotrain.network.control import Squares, Verdict
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.noise import Measurement, Preconditioner
from heterotrain.numerics.reducer import Reducer, Timing
from heterotrain.state.training import Training
from heterotrain.steps.clock import Clock
from heterotrain.steps.step import Step
from heterotrain.steps.task import Task
from heterotrain.telemetry.report import Report

_log = logging.getLogger(__name__)

NOISE_EVERY_ELEMENTS = 5_000_000
"""|g_i|^2 costs a pass over the gradient: every step below this many elements, every tenth above."""


@dataclass(frozen=True, slots=True)
class Late:
    """A committed step whose times are told when the device has come that far."""

    task: Task
    clock: Clock
    timing: Timing
    step_s: float
    peak_bytes: int | None


class Observer:
    """Telemetry of one rank's steps; it also feeds the noise averages, which are part of the replicated state."""

    def __init__(self, report: Report, training: Training, numerics: Numerics) -> None:
        self._report = report
        self._training = training
        self._numerics = numerics
        self.buckets_s: tuple[float, ...] = ()
        self.plain = self.steered = Squares()
        self._measured_samples = 0
        self._committed_s: float | None = None
        self._pause_cause: str | None = None
        self._skip = True
        self._late: Late | None = None

    # -- around a step -----------------------------------------------------------------------------------------------

    def begin(self, reducer: Reducer, task: Task) -> Measurement | None:
        """Prepare for a step; return what measures its gradients, where that is wanted."""
        elements = sum(flat.numel() for flat in reducer.flats)
        if elements > NOISE_EVERY_ELEMENTS and task.number % 10:
            return None
        steered = Preconditioner(self._training.optimizers) if self._numerics.wants_preconditioned else None
        if steered is not None and not steered.is_known:
            steered = None
        return Measurement(
            reducer, micro_batches=len(task.micro_batches), loss_scale=self._numerics.loss_scale, preconditioner=steered
        )

    def membership_changed(self, cause: str) -> None:
        """Note why the next step comes late."""
        self._pause_cause = cause
        self._report.count(names.MEMBERSHIP_CHANGES, cause=cause)
        self.forget()

    def forget(self) -> None:
        """Drop what belongs to the formation or attempt that ended; the next step's times are no typical ones."""
        self.buckets_s, self.plain, self.steered = (), Squares(), Squares()
        self._skip = True
        self._late = None

    def evaluated(self) -> None:
        """Note that time was spent on an end-of-epoch hook, which is not part of the next step."""
        self._committed_s = time.perf_counter()

    def committed(self, step: Step, decision: Verdict, formed: Formed, *, now_s: float) -> None:
        """Count a committed step and keep what the next control vector will carry."""
        task = step.task
        self._noise(step, decision)
        if decision.buckets_s:
            self._report.buckets(decision.buckets_s)
        self.buckets_s = step.reducer.transfers_s()
        self._report_late()
        if self._pause_cause is not None:
            if self._committed_s is not None:
                self._report.count(names.PAUSE_SECONDS, now_s - self._committed_s, cause=self._pause_cause)
                _log.info("paused %.3f s (%s)", now_s - self._committed_s, self._pause_cause)
            self._pause_cause = None
        elif not self._skip and self._committed_s is not None:
            self._late = Late(task, step.clock, step.reducer.timing, now_s - self._committed_s, _peak_bytes())
            if step.clock.is_over():
                self._report_late()
        self._skip = False
        self._committed_s = now_s
        self._gauges(step, decision, formed, self._training.progress)

    def _report_late(self) -> None:
        """Tell about a step that the device has finished: on CUDA its update still runs when it is committed."""
        late, self._late = self._late, None
        if late is not None:
            self._report.step(
                share_samples=late.task.share_samples, micro_batch_samples=max(late.task.micro_batches, default=0),
                times=late.clock.read(late.timing, step_s=late.step_s), peak_bytes=late.peak_bytes,
            )  # fmt: skip

    def _noise(self, step: Step, decision: Verdict) -> None:
        """Average what arrived of the step before, and keep this step's own part for the next control vector."""
        kinds = ((Statistics.PLAIN, decision.plain), (Statistics.PRECONDITIONED, decision.steered))
        for kind, squares in kinds:
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
        self.plain = self.steered = Squares()
        if step.measurement is not None and not step.skipped:
            self._measured_samples = step.task.batch_samples
            self.plain, self.steered = step.measurement.squares(
                batch_samples=step.task.batch_samples, weight=decision.weight
            )

    def _gauges(self, step: Step, decision: Verdict, formed: Formed, progress: Progress) -> None:
        values = {
            names.EPOCH: float(progress.epoch),
            names.STEP: float(progress.steps),
            names.SAMPLES_COMMITTED: float(progress.samples),
            names.CURSOR: float(progress.cursor),
            names.EPOCH_STEP: float(progress.epoch_steps),
            names.GLOBAL_BATCH: float(formed.roster.plan.global_batch_samples),
            names.LEARNING_RATE_SCALE: self._numerics.learning_rate_scale,
        }
        if self._numerics.precision.scales_loss:
            values[names.LOSS_SCALE] = self._numerics.loss_scale
        if step.skipped:
            self._report.count(names.SKIPPED_STEPS)
        average = self._numerics.noise[Statistics.PLAIN]
        parts = average.corrected()
        optional = {
            names.DEVICE_MEMORY: _device_bytes(),
            names.LOSS: decision.loss,
            names.GRADIENT_SQUARED: parts.gradient_squared if parts else None,
            names.GRADIENT_VARIANCE: parts.variance if parts else None,
            names.NOISE_SCALE: average.scale(),
        }
        values |= {name: value for name, value in optional.items() if value is not None and math.isfinite(value)}
        self._report.gauges(values)
        if step.logged:
            self._report.user(step.logged)


@cache
def _device_bytes() -> float | None:
    """Return the memory of the accelerator in use, ``None`` on plain processors."""
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _peak_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    peak = int(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return peak
