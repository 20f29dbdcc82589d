"""How often to measure what is not needed in every step, so that measuring costs a bounded part of the time.

What telemetry does in every step is small; what it does in some (the gradients' squares for the noise scale, the buckets' transfer
times) is done in one of n steps, with the least power of two for n that keeps all of it together within ``BUDGET_RATIO`` of
the time. Which steps those are depends on times and on a step's number alone, never on what is measured, so averages stay unbiased.

Two clocks tell the cost. Telemetry's own is exact, but sees only the calls: on an accelerator a pass over the gradients runs after the
call returned, and on a busy machine it empties the caches for what comes next. So a step that was measured is compared with those
just before it that were not, and the difference counts as far as it is certain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BUDGET_RATIO = 0.005
"""Of the time from commit to commit, for telemetry on the training thread."""
MOST_EVERY = 256
"""Steps from one measurement to the next, however short they are."""
FORGET = 0.98
"""Of what was seen, by each further step: costs are those of the last fifty or so."""
LEAST_PAIRS = 8.0
"""So many comparisons before their spread is believed."""
CERTAIN_ERRORS = 2.0
"""Standard errors by which a difference of steps has to be beyond what is counted of it."""


def is_measured(step: int, every: int) -> bool:
    """Return whether a step is the one of its ``every`` steps that is measured.

    Which one is as good as drawn by lot (Knuth's multiplicative hash of the group's number): always the same would be the first of each
    epoch wherever an epoch has a multiple of ``every`` steps, and that one is no typical step.

    Args:
        step: number of the step since the training began.
        every: steps in a group, a power of two.
    """
    lot = (step // every * 2654435769 & 0xFFFFFFFF) >> 16
    return step % every == lot % every


def measuring_interval(*, step_s: float, always_s: float, measured_s: float) -> int:
    """Return n, a power of two up to ``MOST_EVERY``, with ``always_s + (measured_s - always_s) / n <= BUDGET_RATIO step_s``.

    Args:
        step_s: mean seconds from commit to commit.
        always_s: mean seconds of telemetry in a step that measures nothing.
        measured_s: mean seconds of telemetry in a step that measures everything.
    """
    room_s, further_s = BUDGET_RATIO * step_s - always_s, measured_s - always_s
    if further_s <= 0:
        return 1
    if room_s * MOST_EVERY <= further_s:
        return MOST_EVERY
    return 1 << max(0, math.ceil(math.log2(further_s / room_s)))


@dataclass(slots=True)
class Mean:
    """A mean that forgets.

    Attributes:
        total: of the values, the older the less.
        weight: how many they stand for.
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """Take one more value."""
        self.total = FORGET * self.total + value
        self.weight = FORGET * self.weight + 1.0

    @property
    def value(self) -> float:
        """The mean; 0 before the first value."""
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class PairedDifference:
    """By how much a measured step is longer than those before it that were not measured."""

    _mean: Mean = field(default_factory=Mean)
    _square: Mean = field(default_factory=Mean)
    _others: Mean = field(default_factory=Mean)
    _is_fresh: bool = False

    def step(self, seconds: float, *, measured: bool) -> None:
        """Take one more step, from commit to commit."""
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
        """Seconds that a measurement costs at least, but for chance; 0 while that is not known."""
        if self._mean.weight < LEAST_PAIRS:
            return 0.0
        variance = max(0.0, self._square.value - self._mean.value**2)
        return max(0.0, self._mean.value - CERTAIN_ERRORS * math.sqrt(variance / self._mean.weight))


@dataclass(slots=True)
class MeasuringBudget:
    """What telemetry costs on this rank.

    Attributes:
        spent_s: seconds of the training thread since the process began.
        measure_every: in every how many steps this rank would measure.
    """

    spent_s: float = 0.0
    measure_every: int = 1
    _step: Mean = field(default_factory=Mean)
    _always: Mean = field(default_factory=Mean)
    _measured: Mean = field(default_factory=Mean)
    _longer: PairedDifference = field(default_factory=PairedDifference)

    def charge(self, seconds: float, *, step_s: float, measured: bool) -> None:
        """Note what telemetry took in one step.

        Args:
            seconds: of the training thread.
            step_s: from commit to commit.
            measured: whether everything was measured in it.
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
