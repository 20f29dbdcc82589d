"""How far an allocation may be from the best one: the figure, and the words for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

USELESS = 1.0
"""Gains above it are not stated: twice as good would be possible as far as the bound shows."""
_EQUAL = 1e-6
"""Gains below it are not stated: rates are known less exactly."""
_WHOLE_TENTHS = 100
"""Gains of so many tenths of a per cent are stated in whole per cent."""
_STATED = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Gains that a status states, so that a small change of the figure does not change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far an allocation may be from the best one.

    Attributes:
        gain: the most that the best allocation for the same jobs could gain: 0.003 for 0.3 %; see ``bound``.
        proved: whether it is proved as well that no other jobs should run, or all jobs run.
    """

    gain: float
    proved: bool

    @property
    def text(self) -> str:
        """The same in words, rounded up."""
        of = "" if self.proved else " for the jobs that run"
        if self.gain < _EQUAL:
            return f"no allocation is better{of}"
        if self.gain > USELESS:
            return "no useful bound on the best possible is known"
        tenths = math.ceil(1000 * self.gain - 1e-9)
        percent = f"{tenths / 10:.1f}" if tenths < _WHOLE_TENTHS else f"{math.ceil(tenths / 10)}"
        return f"at most {percent} % from the best possible{of}"

    def covers(self, other: Distance) -> bool:
        """Return whether this statement is true where the other one is."""
        return self.gain >= other.gain and (other.proved or not self.proved)

    @property
    def coarse(self) -> Distance:
        """The same with a gain that is rounded up to one digit: 1, 2 or 5."""
        if self.gain < _EQUAL:
            return replace(self, gain=0.0)
        return replace(self, gain=next((step for step in _STATED if step >= self.gain), math.inf))
