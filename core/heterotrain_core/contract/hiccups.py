"""Rare long steps of single members, as a plan and the expected step contain them."""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_RATE = 0.5
"""Largest part of steps that are long: beyond it, the short ones are the rare ones."""
MOST_RATIO = 100.0
"""Largest length relative to the member's mean own time."""
MOST_PAUSE_S = 1e6
"""Longest pause in seconds: eleven days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiccups:
    """Rare long steps, independent between members: a mixture of two normal distributions with the member's mean.

    A long step is longer by ``ratio`` times the member's mean own time, plus ``pause_s`` whatever its share. So the
    three numbers also hold for another share, batch or number of members.

    Attributes:
        rate: part of a member's steps that are long, in [0, 0.5].
        ratio: by how much they are longer, relative to the member's mean own time, e.g. 2.0 for three times as long.
        pause_s: by how many seconds they are longer in addition.
    """

    rate: float = 0.0
    ratio: float = 0.0
    pause_s: float = 0.0

    def relative_to(self, own_s: float) -> Hiccups:
        """Return the same hiccups with times in units of the mean own time ``own_s``; positive where a pause counts."""
        return replace(self, pause_s=self.pause_s / own_s) if self.pause_s > 0 else self

    def variance(self, own_s: float) -> float:
        """Return their part of the variance of a step, relative to the square of the mean own time ``own_s``."""
        longer = self.ratio + (self.pause_s / own_s if self.pause_s > 0 else 0.0)
        return self.rate * (1 - self.rate) * longer**2

    def problem(self) -> str:
        """Return in one clause what is wrong with the numbers; empty when they are sound."""
        if not 0 <= self.rate <= MOST_RATE:
            return f"has a rate of long steps of {self.rate}, which has to lie in 0 to {MOST_RATE}"
        if not (0 <= self.ratio <= MOST_RATIO and 0 <= self.pause_s <= MOST_PAUSE_S):
            return f"has long steps beyond {MOST_RATIO:g} times the usual time or {MOST_PAUSE_S:g} s"
        return ""


NO_HICCUPS = Hiccups()
