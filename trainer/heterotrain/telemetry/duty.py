"""How often to measure what is not needed in every step, so that measuring costs a bounded part of the time.

Telemetry watches its own clock. What it does in every step is small; what it does in some (the gradients' squares for the noise
scale, the buckets' transfer times) is done in every n-th step, with the least power of two for n that keeps all of it together within
``BUDGET_RATIO`` of the time. Which steps those are depends on times alone, never on what is measured, so averages stay unbiased.
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


def every(*, step_s: float, always_s: float, measured_s: float) -> int:
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
class Duty:
    """What telemetry costs on this rank.

    Attributes:
        spent_s: seconds of the training thread since the process began.
        wanted_every: in every how many steps this rank would measure.
    """

    spent_s: float = 0.0
    wanted_every: int = 1
    _step: Mean = field(default_factory=Mean)
    _always: Mean = field(default_factory=Mean)
    _measured: Mean = field(default_factory=Mean)

    def spent(self, seconds: float, *, step_s: float, measured: bool) -> None:
        """Note what telemetry took in one step.

        Args:
            seconds: of the training thread.
            step_s: from commit to commit.
            measured: whether everything was measured in it.
        """
        self.spent_s += seconds
        self._step.add(step_s)
        if not measured:
            self._always.add(seconds)
            return
        self._measured.add(seconds)
        self.wanted_every = every(step_s=self._step.value, always_s=self._always.value, measured_s=self._measured.value)
