"""Chooses how often to measure gradients and buckets, so that telemetry takes a bounded part of the training time.

Telemetry in every step is cheap. Costly measurements (squares of gradients for the noise scale, transfer times of
buckets) are made in one of n steps. n is the smallest power of two that keeps all telemetry within ``BUDGET_RATIO`` of
the time. The choice depends on times and step numbers only, never on measured values, so averages stay unbiased.

Two clocks measure the cost. Telemetry's own clock is exact but sees only its calls: on an accelerator, a pass over the
gradients runs after the call has returned, and on a busy machine it evicts other data from the caches. Therefore each
measured step is also compared with the unmeasured steps just before it. The difference counts as far as it is
statistically certain. ADR 17 has figures for a fixed interval and for the first clock alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BUDGET_RATIO = 0.005
"""Budget for telemetry on the training thread, as a part of the time from commit to commit."""
MOST_EVERY = 256
"""Upper limit of n, however short the steps are."""
FORGET = 0.98
"""Weight of the older values with each new value: averages cover about the last fifty."""
LEAST_PAIRS = 8.0
"""Comparisons that are needed before their spread is trusted."""
CERTAIN_ERRORS = 2.0
"""Standard errors that are subtracted from the mean difference of steps."""


def is_measured(step: int, every: int) -> bool:
    """Return whether a step is the measured one in its group of ``every`` steps.

    Its position in the group is pseudo-random (Knuth's multiplicative hash of the group's number). A fixed position
    would be the first step of each epoch if epochs have a multiple of ``every`` steps, and that step is not typical.

    Args:
        step: number of the step since the training began.
        every: steps in a group, a power of two.
    """
    lot = (step // every * 2654435769 & 0xFFFFFFFF) >> 16
    return step % every == lot % every


def measuring_interval(*, step_s: float, always_s: float, measured_s: float) -> int:
    """Return the smallest power of two n with ``always_s + (measured_s - always_s) / n <= BUDGET_RATIO step_s``.

    n is at most ``MOST_EVERY``, even if that exceeds the budget.

    Args:
        step_s: mean seconds from commit to commit.
        always_s: mean seconds of telemetry in a step without measurements.
        measured_s: mean seconds of telemetry in a measured step.
    """
    room_s, further_s = BUDGET_RATIO * step_s - always_s, measured_s - always_s
    if further_s <= 0:
        return 1
    if room_s * MOST_EVERY <= further_s:
        return MOST_EVERY
    return 1 << max(0, math.ceil(math.log2(further_s / room_s)))


@dataclass(slots=True)
class Mean:
    """An exponentially weighted mean.

    Attributes:
        total: weighted sum of the values.
        weight: sum of their weights.
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.total = FORGET * self.total + value
        self.weight = FORGET * self.weight + 1.0

    @property
    def value(self) -> float:
        """The mean; 0 before the first value."""
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class PairedDifference:
    """By how much a measured step is longer than the unmeasured steps just before it."""

    _mean: Mean = field(default_factory=Mean)
    _square: Mean = field(default_factory=Mean)
    _others: Mean = field(default_factory=Mean)
    _is_fresh: bool = False

    def step(self, seconds: float, *, measured: bool) -> None:
        """Add a step's time from commit to commit."""
        if not measured:
            if not self._is_fresh:
                self._others = Mean()
            self._others.add(seconds)
            self._is_fresh = True
        elif self._is_fresh:
            self._is_fresh = False
            longer_s = seconds - self._others.value
            self._mean.add(longer_s)
            self._square.add(longer_s**2)

    @property
    def lower_bound_s(self) -> float:
        """Lower confidence bound for the seconds that a measurement costs; 0 while unknown."""
        if self._mean.weight < LEAST_PAIRS:
            return 0.0
        variance = max(0.0, self._square.value - self._mean.value**2)
        return max(0.0, self._mean.value - CERTAIN_ERRORS * math.sqrt(variance / self._mean.weight))


@dataclass(slots=True)
class MeasuringBudget:
    """The cost of telemetry on this rank, and the interval that keeps it within the budget.

    Attributes:
        spent_s: seconds of the training thread since the process began.
        measure_every: this rank's choice of n: it measures in one of so many steps.
    """

    spent_s: float = 0.0
    measure_every: int = 1
    _step: Mean = field(default_factory=Mean)
    _always: Mean = field(default_factory=Mean)
    _measured: Mean = field(default_factory=Mean)
    _longer: PairedDifference = field(default_factory=PairedDifference)

    def charge(self, seconds: float, *, step_s: float, measured: bool) -> None:
        """Add the cost of telemetry in one step, and choose the interval again.

        Args:
            seconds: seconds of the training thread.
            step_s: seconds from commit to commit.
            measured: whether gradients and buckets were measured in the step.
        """
        self.spent_s += seconds
        self._step.add(step_s)
        self._longer.step(step_s, measured=measured)
        if not measured:
            self._always.add(seconds)
            return
        self._measured.add(seconds)
        always_s = self._always.value
        measured_s = max(self._measured.value, always_s + self._longer.lower_bound_s)
        self.measure_every = measuring_interval(step_s=self._step.value, always_s=always_s, measured_s=measured_s)
