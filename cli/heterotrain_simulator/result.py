"""What a simulated run came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A stretch of training under one set of decision.

    Attributes:
        from_s, until_s: simulated time.
        epoch: epoch in which it began, from 0.
        batch_samples: the global batch.
        members: names by rank.
        pools: their pools.
        shares: samples by rank.
        steps: committed steps.
        step_s: mean seconds of a step, steps with probe shares left out; ``None`` when there was none.
        predicted_s: what the policy expected; ``None`` when nothing.
        planned_s: the same shares' step if nothing varied.
        solo_samples_per_s: sum over ranks of share / own compute seconds.
        progress: steps of the base batch that have been made up to its end.
        cost: US dollars spent up to its end.
        reason: the policy's.
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
        policy: which.
        periods: by time.
        target_s: when the target was reached; ``None`` if it was not.
        end_s: when the run ended.
        training_s: seconds of committed steps.
        paused_s: seconds lost to changes of members: the pauses, and the steps in flight that were lost.
        idle_s: seconds without any member.
        steps, samples: committed.
        repeated_steps: steps that were lost in flight and made again.
        changes: changes of members while training.
        epochs: passes over the data that were completed.
        cost: US dollars, and at the target.
        cost_at_target: US dollars spent when the target was reached.
    """

    policy: str
    periods: tuple[Period, ...]
    target_s: float | None
    end_s: float
    training_s: float
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
        """Part of the time with members in which steps were made that count, in [0, 1]."""
        present_s = self.end_s - self.idle_s
        return self.training_s / present_s if present_s > 0 else 0.0

    @property
    def prediction_errors(self) -> tuple[float, ...]:
        """Relative difference of predicted and measured mean step, one for each row that has both."""
        return tuple(
            row.predicted_s / row.step_s - 1
            for row in self.periods
            if row.predicted_s is not None and row.step_s is not None
        )
