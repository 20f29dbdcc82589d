"""Telemetry of one rank's steps, and the measurements that it sends to the other ranks one step late.

The phases of every step are recorded and counted in batches. Counting fifty steps at once costs a fifth of counting
each one while the model's own work fills the processor's caches. Gradients and buckets are measured as often as the
measuring budget allows (``telemetry/sampling.py``).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.scaling_rules import Statistics

from heterotrain.exchange.interface import Gradients
from heterotrain.exchange.timeline import ReductionTimestamps
from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.control import Column, Rows, StepDecision
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.noise import Measurement, Preconditioner, Squares
from heterotrain.numerics.outlier_samples import RankSquares
from heterotrain.state.training import TrainState
from heterotrain.steps.ballot import Voting
from heterotrain.steps.clock import Clock
from heterotrain.steps.step_passes import StepPasses
from heterotrain.steps.task import Task
from heterotrain.telemetry.report import RankMetrics
from heterotrain.telemetry.sampling import MeasuringBudget, is_measured

_log = logging.getLogger(__name__)

LARGE_ELEMENTS = 5_000_000
"""Models with more parameters than this count as large: a pass over their gradients takes noticeable time."""
LARGE_EVERY = 8
"""Large models without a time budget measure noise in one of this many steps."""
LEARN_STEPS = 64
"""The first steps of each formation measure more often, so that a first noise scale is available early."""
LEARN_EVERY = 2
"""During those steps, one of this many is measured; the others show what measuring costs."""
FLUSH_S = 1.0
"""Longest time before a step's times are counted, unless a scrape asks for them earlier."""
UNKNOWN = Squares()


class Measurements(NamedTuple):
    """Measurements of all ranks in the step before.

    Attributes:
        plain: squared norms of each rank in the group; empty when a rank does not know its own. The total to use is
            that of the lowest rank, because devices of different kinds may differ in its last digit.
        preconditioned: the same norms as scaled by an adaptive optimizer.
        every: all ranks measure every this many steps: the largest number among theirs.
        buckets_s: minimum over ranks per bucket; a rank that arrives early measures mostly its wait.
    """

    plain: tuple[Squares, ...]
    preconditioned: tuple[Squares, ...]
    every: int
    buckets_s: tuple[float, ...]


def _squares(rows: Rows) -> tuple[Squares, ...]:
    if not all(math.isfinite(row[0] + row[2]) for row in rows):
        return ()
    return tuple([Squares(weighted=row[0], groups=int(row[1]), total=row[2]) for row in rows])


def _measured(rows: Rows) -> Measurements:
    buckets = [row[7:] for row in rows]
    return Measurements(
        _squares(rows), _squares([row[3:6] for row in rows]), int(max(row[6] for row in rows)),
        () if any(math.isnan(sum(row)) for row in buckets) else tuple(map(min, zip(*buckets, strict=True))),
    )  # fmt: skip


MEASURED = Column("measured", _measured)
"""Squares of a rank's gradients (weighted, groups, total), plain and preconditioned; in one of how many steps it would
measure, at least 1; and seconds of each bucket's transfer. All one step late; NaN when unknown."""


PendingStep: TypeAlias = tuple[Task, Clock, ReductionTimestamps, float, int | None]
"""A committed step whose times are counted once the device has finished it: with its seconds, and its peak memory."""


class Observer:
    """Telemetry of one rank's steps; also updates the noise averages, which are part of the replicated state.

    Attributes:
        buckets_s: for the next control vector: transfer seconds of each bucket in the last step; empty if not measured.
        plain: for the next control vector: squares of the last step's gradients; NaN if not measured.
        preconditioned: the same for gradients as an adaptive optimizer divides them.
        budget: the cost of telemetry, and how often to measure.
        measures: whether the newest step is one of those with costly measurements.
        first_step: the formation's first one.
        every: the ranks measure in one of this many steps, as they have agreed in the newest vote.
    """

    def __init__(self, report: RankMetrics, training: TrainState, numerics: Numerics) -> None:
        """Register with ``report`` the values that are looked up only on a scrape."""
        self.buckets_s: tuple[float, ...] = ()
        self.plain = self.preconditioned = UNKNOWN
        self.budget = MeasuringBudget()
        self._report = report
        self._training = training
        self._numerics = numerics
        self.every = 1
        self.first_step = self._gradient_bytes = 0
        self.measures = False
        self._measured_samples = 0
        self._measured_weights: tuple[float, ...] = ()
        self._committed_s: float | None = None
        self._step_s = math.nan
        self._pause_cause: str | None = None
        self._skip = True
        self._pending: deque[PendingStep] = deque()
        self._flush_lock = threading.Lock()
        self._flushed_s = 0.0
        self._last_commit: tuple[int, float | None] | None = None
        report.look_up(before=self.flush, gauges=self._gauges, counters=self._counters)

    def vote(self, voting: Voting) -> tuple[float, ...]:
        """Return the numbers of ``MEASURED``.

        Layers may have been frozen since the last step, and there are other buckets now, as many on every rank.
        """
        buckets = len(voting.step.reducer.buckets)
        plain, scaled, buckets_s = self.plain, self.preconditioned, self.buckets_s
        return (
            plain.weighted, plain.groups, plain.total, scaled.weighted, scaled.groups, scaled.total,
            self.budget.measure_every, *(buckets_s if len(buckets_s) == buckets else (math.nan,) * buckets),
        )  # fmt: skip

    # -- around a step -----------------------------------------------------------------------------------------------

    def begin(self, reducer: Gradients, task: Task, *, alone: bool) -> Measurement | None:
        """Prepare for a step; return the measurement of its gradients, or ``None`` if they are not measured.

        The choice depends only on values that all ranks share, also while some have not confirmed the step before.
        Where the learning rate follows the noise, it does not depend on any clock, so that the same run gives the same
        weights.

        Args:
            reducer: the buckets that receive the gradients.
            task: this rank's part of the step.
            alone: whether this rank has no peers.
        """
        is_large = reducer.elements > LARGE_ELEMENTS
        learning_every = LARGE_EVERY if is_large else LEARN_EVERY
        is_learning = task.number - self.first_step < LEARN_STEPS
        self.measures = is_measured(task.number, learning_every if is_learning else self.every)
        takes_squares = self.measures
        if self._numerics.steers_by_noise:
            takes_squares = not is_large or is_measured(task.number, LARGE_EVERY)
        if not reducer.is_measurable or not takes_squares or (alone and len(task.micro_batches) < 2):  # noqa: PLR2004  # one group has no spread
            return None
        began_s = time.perf_counter()
        preconditioner = Preconditioner(self._training.optimizers) if self._numerics.wants_preconditioned else None
        if preconditioner is not None and not preconditioner.is_known:
            preconditioner = None
        measurement = Measurement(
            reducer,
            micro_batches=len(task.micro_batches),
            loss_scale=self._numerics.loss_scale,
            preconditioner=preconditioner,
        )
        measurement.spent_s = time.perf_counter() - began_s
        return measurement

    def membership_changed(self, cause: str) -> None:
        """Record why the next step is late."""
        self._pause_cause = cause
        self._report.count(names.MEMBERSHIP_CHANGES, cause=cause)
        self.forget()

    def forget(self) -> None:
        """Drop measurements of the formation or attempt that ended; the next step's times are not typical."""
        self.flush()
        self.buckets_s, self.plain, self.preconditioned = (), UNKNOWN, UNKNOWN
        self._skip = True
        with self._flush_lock:  # a scrape may be counting the first of them
            self._pending.clear()

    def formation_began(self) -> None:
        """Start a formation: its members measure often at first, because they have not agreed on an interval yet."""
        self.forget()
        self.every, self.first_step = 1, self._training.progress.steps

    def evaluated(self) -> None:
        """Record the end of the end-of-epoch hooks, whose time is not part of the next step."""
        self._committed_s = time.perf_counter()

    def committed(self, step: StepPasses, decision: StepDecision, active_group: ActiveGroup, *, now_s: float) -> None:
        """Count a committed step and keep its measurements for the next control vector.

        Args:
            step: the step.
            decision: the result of its control vectors.
            active_group: the formation.
            now_s: ``time.perf_counter`` at the commit.
        """
        measured = decision.agreed[MEASURED]
        exchange = step.reducer.exchange
        self._gradient_bytes, exchange.bytes_sent = self._gradient_bytes + exchange.bytes_sent, 0
        device_bytes = _device_bytes()  # looked up in this thread, because CUDA's current device differs by thread
        self._last_commit = (active_group.roster.plan.global_batch_samples, decision.loss)
        if measured.plain or measured.preconditioned:
            self._average(measured)
        self.plain = self.preconditioned = UNKNOWN
        skipped = bool(step.transaction.skip_reason)
        if step.measurement is not None and not skipped:
            self._measured_samples, self._measured_weights = step.task.batch_samples, decision.weights
            self.plain, self.preconditioned = step.measurement.squares(
                batch_samples=step.task.batch_samples, weight=decision.weight
            )
        if measured.buckets_s:
            self._report.buckets(measured.buckets_s)
        self.buckets_s = step.reducer.transfers_s() if step.is_measured else ()
        if skipped:
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
            peak_bytes = None if device_bytes is None else _peak_bytes()
            timestamps = step.timestamps or exchange.timestamps
            self._pending.append((step.task, step.clock, timestamps, self._step_s, peak_bytes))
        self._skip = False
        self._committed_s = now_s
        if now_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = now_s
            self.flush(wait=False)

    def cost(self, step: StepPasses, *, since_s: float) -> None:
        """Charge a committed step's telemetry to the budget: the time since ``since_s``, and of measuring gradients."""
        if math.isnan(self._step_s):
            return  # a late step is not typical
        spent_s = time.perf_counter() - since_s
        if step.measurement is not None:
            spent_s += step.measurement.spent_s
        self.budget.charge(spent_s, step_s=self._step_s, measured=step.is_measured)

    def flush(self, *, wait: bool = True) -> None:
        """Count the steps that the device has finished; on CUDA the last update still runs when its step is committed.

        Any thread may call this. Without ``wait``, the call does nothing while another thread is counting.
        """
        if not self._flush_lock.acquire(blocking=wait):
            return
        try:
            while self._pending:
                task, clock, timestamps, step_s, peak_bytes = self._pending[0]
                times = clock.read(timestamps, step_s=step_s)
                if times is None:
                    break
                self._pending.popleft()
                samples = 0 if task.stage else task.share_samples
                self._report.step(shape=task.shape, samples=samples, times=times, peak_bytes=peak_bytes)
        finally:
            self._flush_lock.release()

    # -- internals ---------------------------------------------------------------------------------------------------

    def _average(self, found: Measurements) -> None:
        """Update the noise averages with the previous step's squares; tokens count as samples of average length."""
        per_weight = self._measured_samples / math.fsum(self._measured_weights)
        for kind, squares in ((Statistics.PLAIN, found.plain), (Statistics.PRECONDITIONED, found.preconditioned)):
            if squares:
                ranks = [
                    RankSquares(weighted=own.weighted, groups=own.groups, samples=weight * per_weight)
                    for own, weight in zip(squares, self._measured_weights, strict=True)
                ]
                self._numerics.measured(kind, ranks, total_squared=squares[0].total)

    def _gauges(self) -> dict[str, float]:
        """Return the gauges of the training's progress; empty before this process's first commit."""
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
            names.MEASUREMENT_INTERVAL: float(self.every),
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
        found = {names.TELEMETRY_SECONDS: self.budget.spent_s, names.GRADIENT_BYTES: float(self._gradient_bytes)}
        return found if self._last_commit is not None else {}


@cache
def _device_bytes() -> float | None:
    """Return the memory of the accelerator in use; ``None`` on CPUs."""
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _peak_bytes() -> int:
    """Return the peak memory of tensors on the accelerator since the last call."""
    # ``max_memory_allocated`` sorts all 160 statistics to find this one, which takes 0.4 ms.
    every: Any = torch.cuda.memory_stats_as_nested_dict()
    torch.cuda.reset_peak_memory_stats()
    return int(every["allocated_bytes"]["all"]["peak"])
