"""Tells whether the training loss climbs, from what each scrape shows of it. Pure.

The newest losses are kept as means of 4, 16, 64, … of them, 32 means of each. So a climb of minutes shows in the first
row and one of days in a later row, at the same cost. In each row, the means since the lowest level are judged:

- Mann and Kendall's S counts pairs that rise, less pairs that fall. Without a trend its standard score is normal. It
  has to reach ``LEAST_SCORE``, which a climb without noise does from 15 means on.
- The slope is Theil and Sen's, the median of those of all pairs. What it adds up to has to exceed the noise around it,
  and a part of all that the loss has ever moved: a plateau that drifts is no divergence.

The score assumes that means are independent, but losses that are near in time often are alike. So two neighbouring rows
have to agree: what wanders within one is noise in the next, which is four times as coarse.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from itertools import combinations
from statistics import median

from heterotrain_operator.cluster_state.telemetry import LossClimb, MemberGauges

ROWS, KEPT, WIDTH = 6, 32, 4
LEAST_SCORE, LEAST_MEANS = 5.0, 15
LEAST_NOISES, LEAST_PART = 3.0, 0.1
_SMOOTH = 5
_TO_SIGMA = 1.4826
"""Standard deviation of normal numbers over the median of their distances from the median."""


class LossTrend:
    """The losses of one job, from one start or resumption of its training on."""

    def __init__(self) -> None:
        self._rows = [(array("d"), array("d"), array("d")) for _ in range(ROWS)]
        """Steps and means, and losses that form no mean yet."""
        self._climbs = [False] * ROWS
        self.step, self._low, self._high = -1, math.inf, -math.inf
        self.climb: LossClimb | None = None

    def after(self, gauges: Iterable[MemberGauges]) -> LossTrend:
        """Return the trend with the newest loss; that of a job that was resumed from a checkpoint begins again."""
        known = [(each.step, each.loss) for each in gauges if each.step is not None and each.loss is not None]
        step, loss = max(known, default=(self.step, math.nan))
        trend = self if step >= self.step else LossTrend()
        if step > trend.step and math.isfinite(loss):
            trend.note(step, loss)
        return trend

    def note(self, step: int, loss: float) -> None:
        """Take the loss of a later step than the one before."""
        self.step = step
        for row, (steps, means, waiting) in enumerate(self._rows):
            waiting.append(loss)
            if len(waiting) < WIDTH:
                return
            loss = sum(waiting) / WIDTH
            del waiting[:]
            steps.append(step)
            means.append(loss)
            del steps[:-KEPT], means[:-KEPT]
            if len(means) >= _SMOOTH:
                self._judge(row, steps, means)

    def _judge(self, row: int, steps: array[float], means: array[float]) -> None:
        levels = [median(means[at : at + _SMOOTH]) for at in range(len(means) - _SMOOTH + 1)]
        self._low, self._high = min(self._low, *levels), max(self._high, *levels)
        first = min(range(len(levels)), key=levels.__getitem__)
        self._climbs[row] = _climbs(steps[first:], means[first:], least=LEAST_PART * (self._high - self._low))
        if row and self._climbs[row] and self._climbs[row - 1]:
            self.climb = LossClimb(int(steps[first]), levels[first], int(steps[-1]), levels[-1])
        elif self.climb is not None and levels[-1] <= (self.climb.from_loss + self.climb.loss) / 2:
            self.climb = None


def _climbs(steps: array[float], means: array[float], *, least: float) -> bool:
    """Return whether means climb beyond their noise and by ``least``."""
    n = len(means)
    if n < LEAST_MEANS:
        return False
    pairs = list(combinations(zip(steps, means, strict=True), 2))
    score = sum((late > early) - (late < early) for (_, early), (_, late) in pairs)
    if score < LEAST_SCORE * math.sqrt(n * (n - 1) * (2 * n + 5) / 18):
        return False
    slope = median((late - early) / (b - a) for (a, early), (b, late) in pairs)
    flat = [mean - slope * step for step, mean in zip(steps, means, strict=True)]
    middle = median(flat)
    noise = _TO_SIGMA * median(abs(each - middle) for each in flat)
    return slope * (steps[-1] - steps[0]) >= max(LEAST_NOISES * noise, least)
