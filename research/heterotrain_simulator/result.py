"""The result of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A period of training under one decision.

    Attributes:
        from_s, until_s: simulated time.
        epoch: its first epoch, from 0.
        batch_samples: the global batch.
        members: names by rank.
        pools: their pools.
        shares: samples by rank.
        steps: committed steps.
        step_s: mean seconds of a step without probe steps; ``None`` if there was none.
        predicted_s: the policy's prediction; ``None`` without one.
        planned_s: true step time of these shares without noise.
        solo_samples_per_s: sum over ranks of share / own compute seconds.
        progress: steps of the base batch up to its end.
        cost: US dollars up to its end.
        reason: of the policy's decision.
    """

    from_s: float
    until_s: float
    epoch: int
    batch_samples: int
    members: tuple[str, ...]
    pools: tuple[str, ...]
    shares: tuple[int, ...]
    steps: int
    step_s: float | None
    predicted_s: float | None
    planned_s: float
    solo_samples_per_s: float
    progress: float
    cost: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A whole simulated run.

    Attributes:
        policy: its name.
        periods: in order of time.
        target_s: time of the target; ``None`` if it was not reached.
        end_s: end of the run.
        training_s: seconds of committed steps.
        worker_training_s: the same, summed over the workers that made them.
        paused_s: seconds lost to changes of members: pauses and lost steps in flight.
        idle_s: seconds without members.
        steps, samples: committed.
        repeated_steps: steps lost in flight and repeated.
        changes: changes of members while training.
        epochs: completed passes over the data.
        cost: US dollars.
        cost_at_target: US dollars until the target.
    """

    policy: str
    periods: tuple[Period, ...]
    target_s: float | None
    end_s: float
    training_s: float
    worker_training_s: float
    paused_s: float
    idle_s: float
    steps: int
    samples: int
    repeated_steps: int
    changes: int
    epochs: int
    cost: float
    cost_at_target: float | None

    @property
    def effective_part(self) -> float:
        """Fraction of the time with members that went into committed steps, in [0, 1]."""
        present_s = self.end_s - self.idle_s
        return self.training_s / present_s if present_s > 0 else 0.0

    @property
    def prediction_errors(self) -> tuple[float, ...]:
        """Relative difference of predicted and measured mean step, one for each period with both."""
        return tuple(
            row.predicted_s / row.step_s - 1
            for row in self.periods
            if row.predicted_s is not None and row.step_s is not None
        )
