"""The accounting of a simulated run: time, steps, progress towards the target, cost, and periods of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heterotrain_simulator.convergence import gain, noise_scale
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.policy import PolicyDecision
from heterotrain_simulator.result import Period, RunResult
from heterotrain_simulator.workloads import Workload

Floats = NDArray[np.float64]
_HOUR_S = 3600.0


@dataclass(slots=True)
class _OpenPeriod:
    """The sums of the current period."""

    from_s: float
    epoch: int
    steps: int = 0
    plain_steps: int = 0
    plain_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Accounting:
    """The accounts so far.

    Attributes:
        workload: the model and its data.
        truth: true times, for the step times of shares without noise.
        prices: US dollars per hour by pool.
        now_s: simulated time; only ``train``, ``lose`` and ``idle`` advance it.
        progress: all steps so far, in steps of the base batch.
        target_s, cost_at_target: time and cost at the target; ``None`` before.
        changes, repeated_steps: as in ``RunResult``; the engine counts them.
    """

    workload: Workload
    truth: GroundTruth
    prices: dict[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    progress: float = 0.0
    target_s: float | None = None
    cost_at_target: float | None = None
    changes: int = 0
    repeated_steps: int = 0
    _cost: float = 0.0
    _training_s: float = 0.0
    _worker_training_s: float = 0.0
    _paused_s: float = 0.0
    _idle_s: float = 0.0
    _steps: int = 0
    _samples: int = 0
    _periods: list[Period] = field(default_factory=list)
    _current: _OpenPeriod = field(default_factory=lambda: _OpenPeriod(from_s=0.0, epoch=0))

    def train(self, workers: Sequence[Worker], batch: int, finish_N: Floats, *, is_probe: bool) -> None:
        """Enter committed steps.

        Args:
            workers: the workers of these steps.
            batch: samples of each step.
            finish_N: seconds of each step.
            is_probe: whether the shares differ from the decision's; such steps do not count in the period's step time.
        """
        count, seconds = len(finish_N), float(finish_N.sum())
        worth = gain(
            batch, base_batch=self.workload.base_batch, noise_samples=noise_scale(self.workload, self.progress)
        )
        before, self.progress = self.progress, self.progress + worth * count
        if self.target_s is None and before < self.workload.target_steps <= self.progress:
            needed = math.ceil((self.workload.target_steps - before) / worth - 1e-9)
            spent = float(finish_N[:needed].sum())
            self.target_s = self.now_s + spent
            self.cost_at_target = self._cost + self._price(workers) * spent / _HOUR_S
        self._pass(workers, seconds)
        self._training_s += seconds
        self._worker_training_s += seconds * len(workers)
        self._steps += count
        self._samples += count * batch
        self._current.steps += count
        if not is_probe:
            self._current.plain_steps += count
            self._current.plain_s += seconds

    def lose(self, workers: Sequence[Worker], seconds: float) -> None:
        """Enter time of workers without a committed step: a pause, or a lost step in flight."""
        self._pass(workers, seconds)
        self._paused_s += seconds

    def idle(self, seconds: float) -> None:
        """Enter time without workers."""
        self.now_s += seconds
        self._idle_s += seconds

    def open_period(self, epoch: int) -> None:
        """Begin a new period."""
        self._current = _OpenPeriod(from_s=self.now_s, epoch=epoch)

    def close_period(self, workers: Sequence[Worker], decision: PolicyDecision | None, epoch: int) -> None:
        """End the current period, if it has any step, and begin the next."""
        period = self._current
        if decision is None or not period.steps:
            return
        self._periods.append(
            Period(
                from_s=period.from_s,
                until_s=self.now_s,
                epoch=period.epoch,
                batch_samples=decision.batch_samples,
                members=tuple(w.name for w in workers),
                pools=tuple(w.pool for w in workers),
                shares=decision.shares,
                steps=period.steps,
                step_s=period.plain_s / period.plain_steps if period.plain_steps else None,
                predicted_s=decision.predicted_step_s,
                planned_s=self.truth.planned_s(workers, decision.shares, self.now_s),
                solo_samples_per_s=self.truth.solo_samples_per_s(workers, decision.shares, self.now_s),
                progress=self.progress,
                cost=self._cost,
                reason=decision.reason,
            )
        )
        self.open_period(epoch)

    def result(self, policy: str, epochs: int) -> RunResult:
        """Return the result of the run."""
        return RunResult(
            policy=policy,
            periods=tuple(self._periods),
            target_s=self.target_s,
            end_s=self.now_s,
            training_s=self._training_s,
            worker_training_s=self._worker_training_s,
            paused_s=self._paused_s,
            idle_s=self._idle_s,
            steps=self._steps,
            samples=self._samples,
            repeated_steps=self.repeated_steps,
            changes=self.changes,
            epochs=epochs,
            cost=self._cost,
            cost_at_target=self.cost_at_target,
        )

    def _pass(self, workers: Sequence[Worker], seconds: float) -> None:
        """Advance the time and pay for the workers."""
        self._cost += self._price(workers) * seconds / _HOUR_S
        self.now_s += seconds

    def _price(self, workers: Sequence[Worker]) -> float:
        return sum(self.prices[w.pool] for w in workers)
