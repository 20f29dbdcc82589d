"""What a rank measures about its steps, and what it tells the others one step late."""

from __future__ import annotations

import logging
import math
import time

import torch
from heterotrain_core.contract import metrics as names

from heterotrain import noise
from heterotrain.control import Verdict
from heterotrain.membership import Formed
from heterotrain.progress import Progress
from heterotrain.reducer import Reducer, squared_norm
from heterotrain.report import Report, StepTimes
from heterotrain.step import Step
from heterotrain.training import Training

_log = logging.getLogger(__name__)

NOISE_EVERY_SAMPLES = 5_000_000
"""|g_i|^2 costs a pass over the gradient: every step below this many elements, every tenth above."""


class Observer:
    """Telemetry of one rank's steps; its noise averages are part of the replicated state."""

    def __init__(self, report: Report, training: Training) -> None:
        self._report = report
        self._training = training
        self.averages = noise.NoiseAverages()
        self.buckets_s: tuple[float, ...] = ()
        self.small_squared = math.nan
        self._small: torch.Tensor | None = None
        self._big: tuple[float, int, int] | None = None
        self._committed_s: float | None = None
        self._pause_cause: str | None = None
        self._skip = True
        training.extras["heterotrain-noise"] = self

    def state_dict(self) -> dict[str, float]:
        """Return the noise averages."""
        return {"squared": self.averages.squared, "variance": self.averages.variance, "weight": self.averages.weight}

    def load_state_dict(self, state: dict[str, float], /) -> None:
        """Take noise averages over."""
        self.averages = noise.NoiseAverages(**state)

    # -- around a step -----------------------------------------------------------------------------------------------

    def begin(self, reducer: Reducer, number: int) -> bool:
        """Prepare for a step; return whether this step's gradient norms are wanted."""
        self._small = None
        elements = sum(flat.numel() for flat in reducer.flats)
        return elements <= NOISE_EVERY_SAMPLES or number % 10 == 0

    def on_launch(self, flat: torch.Tensor) -> None:
        """Add a bucket's own squared norm, before it is reduced."""
        part = squared_norm([flat])
        self._small = part if self._small is None else self._small + part

    def membership_changed(self, cause: str) -> None:
        """Note why the next step comes late."""
        self._pause_cause = cause
        self._report.count(names.MEMBERSHIP_CHANGES, cause=cause)
        self.forget()

    def forget(self) -> None:
        """Drop what belongs to the formation or attempt that ended; the next step's times are no typical ones."""
        self.buckets_s, self.small_squared, self._big = (), math.nan, None
        self._skip = True

    def evaluated(self) -> None:
        """Note that time was spent on an end-of-epoch hook, which is not part of the next step."""
        self._committed_s = time.perf_counter()

    def committed(self, step: Step, decision: Verdict, formed: Formed, *, now_s: float) -> None:
        """Count a committed step and keep what the next control vector will carry."""
        task = step.task
        self._noise(step, decision, ranks=sum(share > 0 for share in task.shares))
        if decision.buckets_s:
            self._report.buckets(decision.buckets_s)
        self.buckets_s = step.reducer.timing.buckets_s
        if self._pause_cause is not None:
            if self._committed_s is not None:
                self._report.count(names.PAUSE_SECONDS, now_s - self._committed_s, cause=self._pause_cause)
                _log.info("paused %.3f s (%s)", now_s - self._committed_s, self._pause_cause)
            self._pause_cause = None
        elif not self._skip and self._committed_s is not None:
            clock = step.clock
            times = StepTimes(
                load_s=clock.load_s, forward_s=clock.forward_s, backward_s=clock.backward_s, sync_s=clock.sync_s,
                update_s=clock.update_s, step_s=now_s - self._committed_s, first_bucket_ratio=clock.first_bucket_ratio,
            )  # fmt: skip
            largest = max(task.micro_batches, default=0)
            self._report.step(
                share_samples=task.share_samples, micro_batch_samples=largest, times=times, peak_bytes=_peak_bytes()
            )
        self._skip = False
        self._committed_s = now_s
        self._gauges(step, decision, formed, self._training.progress)

    def _noise(self, step: Step, decision: Verdict, *, ranks: int) -> None:
        """Join |g|^2 of the step before with the sum that arrived now, and keep this step's own terms."""
        if decision.small_squared is not None and self._big is not None:
            big_squared, batch_samples, big_ranks = self._big
            self.averages = noise.observe(
                self.averages, small_squared=decision.small_squared, big_squared=big_squared,
                batch_samples=batch_samples, ranks=big_ranks,
            )  # fmt: skip
        self._big, self.small_squared = None, math.nan
        batch, share = step.task.batch_samples, step.task.share_samples
        if share == 0:
            self.small_squared = 0.0
        elif self._small is not None and step.weight > 0:
            # The buffers hold (n_i / B) g_i, so b_i |g_i|^2 = |buffer|^2 B^2 / n_i.
            self.small_squared = float(self._small) * batch * batch / share
        if step.on_launch is not None:
            self._big = (float(step.reducer.squared_norm()), batch, ranks)

    def _gauges(self, step: Step, decision: Verdict, formed: Formed, progress: Progress) -> None:
        values = {
            names.EPOCH: float(progress.epoch),
            names.STEP: float(progress.steps),
            names.SAMPLES_COMMITTED: float(progress.samples),
            names.CURSOR: float(progress.cursor),
            names.GLOBAL_BATCH: float(formed.roster.plan.global_batch_samples),
        }
        averages = self.averages
        optional = {
            names.LOSS: decision.loss,
            names.GRADIENT_SQUARED: averages.gradient_squared,
            names.GRADIENT_VARIANCE: averages.gradient_variance,
            names.NOISE_SCALE: averages.noise_scale_samples,
        }
        values |= {name: value for name, value in optional.items() if value is not None and math.isfinite(value)}
        self._report.gauges(values)
        if step.logged:
            self._report.user(step.logged)


def _peak_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    peak = int(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return peak
