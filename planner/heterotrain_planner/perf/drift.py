"""Finds changes of a member's speed: throttling, a noisy neighbour, and the recovery from them.

Observations are processed in time order. The last ones, about ``LATEST_STEPS`` steps in two scrapes or more, are
compared with a line fitted to all earlier ones. A common ratio that noise does not explain is a change; from then on,
earlier observations are scaled to the new speed. Points of one scrape stay together, because shares take turns within
it. Three rules keep noise apart from changes:

- The tested ratio lies between ``IGNORED_RATIO`` and ``NOTICED_RATIO``, so chance decides neither of the two. A change
  of 1.2 or more is noticed within 20 full steps or two full scrapes, whichever is longer. Until some 100 steps have
  shown the noise, this holds from 1.3 on. Forgetting follows smaller changes.
- Noise that goes on from step to step moves the mean of 20 steps as well. How much, is learned from the distances
  between earlier means of as many steps. What such noise explains is not a change, even beyond 1.2.
- A change lasts. A burst of 10 steps moves the mean of 20, but not three quarters of its steps.

docs/mathematics.md has measured delays and false alarms.

Real times are not linear (small shares leave a GPU half idle), and a line that misses a curve does not show a change of
speed. So a change also has to contradict the observations themselves: at nearly the same size by its time, elsewhere by
taking less time for more samples, or more time per sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

LATEST_STEPS = 20
"""Steps of a test for a change. Fewer notice changes sooner, but let noise pass as a change more often."""
NOTICED_RATIO = 1.2
"""Ratio of new to old seconds, or of old to new, from which on a change is noticed in time."""
IGNORED_RATIO = 1.1
"""Ratio up to which a lasting difference is not a change."""
_NOTICED = (math.log(NOTICED_RATIO) + math.log(IGNORED_RATIO)) / 2
"""Tested logarithm of a ratio: equally far from both, so that chance decides neither."""
_NOTICED_EARLY = math.log(NOTICED_RATIO)
"""The same while noise that goes on is not known; 1.3 is then noticed in time."""
_DEVIATIONS = 4.0
"""Standard errors that a change has to exceed as well."""
_HALF_LIFE_STEPS = 600
"""Steps after which an observation counts half in the line."""
_MODEL_ERROR = 0.02
"""Relative error of a time that a line cannot express, however many steps were averaged."""
_TRUST_IN_THE_PAST = 0.3
"""Weight of observations before a change, relative to those after it."""
_SAME_SIZE_RATIO = 1.25
"""Micro-batch sizes within this ratio count as one size."""
_LEAST_SCRAPES = 2
"""Scrapes of a test: where one holds ``LATEST_STEPS`` or more, half of it may be a burst."""
_LASTING_PART = 0.25
"""Part of the latest steps that may lie far from a change; a burst of half the steps is none."""
_APART = 2
"""Means from one to the other of a compared pair."""
_UNSURE = 2.0
"""Factor on the learned variance: it comes from few means, and means two apart are still alike in slow noise."""
_KNOWN_MEANS = 2.5
"""Compared pairs of means, newer ones counting more, from which on noise that goes on is known."""
_ASSUMED_EXCESS = 2.0
"""Assumed variance of such a mean beyond independent steps, relative to theirs: a correlation of 0.5 between steps."""
_ASSUMED_MEANS = 2.0
"""Weight of that assumption, in means."""
_SEEN_STEPS = 40
"""Steps over which the time at one size is averaged."""
LONGEST_PHASE = 120
"""Steps within which a change is undone that counts as a phase."""
_ALIKE = 0.1
"""Logarithmic distance up to which a change undoes another one, or is like it."""
_KNOWN_PHASES = 2
"""Phases after which another change like them is expected to be one."""
_LONGER = 2
"""Factor on the longest of them, up to which it may still be one."""
_FIXED_PART = 0.1
"""Assumed fixed part of a member's time where only one size was observed."""
_FIXED_PART_DEVIATION = 0.3
"""Standard error of that assumption: it counts as one observation with this relative error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Mean seconds per micro-batch at a micro-batch size, over some steps.

    Attributes:
        size: samples per micro-batch.
        seconds: mean seconds per micro-batch.
        variation: standard deviation of a step relative to the mean.
        steps: steps.
        scraped_s: time of their scrape.
    """

    size: float
    seconds: float
    variation: float
    steps: int
    scraped_s: float

    @property
    def error(self) -> float:
        """Relative standard error of the mean, with a floor for the deviation from a straight line."""
        return math.sqrt(self.variation**2 / self.steps + _MODEL_ERROR**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceChange:
    """From point ``first`` on, the member took ``ratio`` times as long."""

    first: int
    ratio: float


def changes(points: Sequence[Point]) -> tuple[PaceChange, ...]:
    """Return the changes of speed in time-ordered points, oldest first."""
    line, wander = _RunningLine(), _Wander()
    latest: list[tuple[int, list[Point]]] = []
    found: list[PaceChange] = []
    first = 0
    for _, scrape in groupby(points, key=lambda point: point.scraped_s):
        latest.append((first, list(scrape)))
        first += len(latest[-1][1])
        if line.known and _changed(line, wander, [group for _, group in latest]):
            start, ratio = _located(line, [group for _, group in latest])
            for _, group in latest[:start]:
                wander.take(line, group)
                line.take(group)
            latest = latest[start:]
            line.rescale(ratio)
            found.append(PaceChange(first=latest[0][0], ratio=ratio))
        # Hold back only the points of a test, so that the line does not learn a change before it is noticed.
        while latest and (not line.known or _enough([group for _, group in latest[1:]])):
            _, group = latest.pop(0)
            if line.known:
                wander.take(line, group)
            line.take(group)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPhase:
    """From point ``first`` to before ``end``, the member took ``ratio`` times as long, and then as long as before."""

    first: int
    end: int
    ratio: float


def without_phases(
    found: Sequence[PaceChange], points: Sequence[Point]
) -> tuple[tuple[PaceChange, ...], tuple[SpeedPhase, ...]]:
    """Return the changes that last, and the phases that others begin and end, oldest first.

    Neighbours and clocks slow a member again and again. A change that is soon undone is such a phase. So is the last
    change after ``_KNOWN_PHASES`` like it, until it has lasted for longer than these.
    """
    before = [0, *accumulate(point.steps for point in points)]
    lasting: list[PaceChange] = []
    phases: list[SpeedPhase] = []
    for change in found:
        last = lasting[-1] if lasting else None
        if last and _alike(last.ratio * change.ratio, 1) and before[change.first] - before[last.first] <= LONGEST_PHASE:
            phases.append(SpeedPhase(first=last.first, end=change.first, ratio=last.ratio))
            lasting.pop()
        else:
            lasting.append(change)
    if lasting:
        last = lasting[-1]
        like = [before[each.end] - before[each.first] for each in phases if _alike(each.ratio, last.ratio)]
        if len(like) >= _KNOWN_PHASES and before[-1] - before[last.first] <= _LONGER * max(like):
            phases.append(SpeedPhase(first=last.first, end=len(points), ratio=last.ratio))
            lasting.pop()
    return tuple(lasting), tuple(phases)


def _alike(one: float, other: float) -> bool:
    return abs(math.log(one / other)) <= _ALIKE


def _steps(groups: Iterable[Sequence[Point]]) -> int:
    return sum(point.steps for group in groups for point in group)


def _enough(groups: Sequence[Sequence[Point]]) -> bool:
    """Return whether scrapes suffice for a test: fewer than two could be a burst."""
    return len(groups) >= _LEAST_SCRAPES and _steps(groups) >= LATEST_STEPS


def _changed(line: _RunningLine, wander: _Wander, groups: Sequence[Sequence[Point]]) -> bool:
    """Return whether the latest scrapes took significantly longer or shorter than the line predicts, to their end."""
    for start in range(len(groups)):
        if not _enough(groups[start:]):
            return False
        run = [point for group in groups[start:] for point in group]
        shift, independent = _shift(line, run)
        doubt = math.sqrt(wander.variance(independent))
        noticed = _NOTICED if wander.known else _NOTICED_EARLY
        if abs(shift) <= max(noticed, _DEVIATIONS * doubt) or abs(_contradiction(line, run)) <= noticed:
            continue
        if not _lasts(line, run, shift):
            continue
        if abs(shift) > _DEVIATIONS * math.hypot(doubt, max(line.error_at(p.size) for p in run)):
            return True
    return False


def _lasts(line: _RunningLine, points: Sequence[Point], shift: float) -> bool:
    """Return whether all but ``_LASTING_PART`` of the steps moved by half of the shift, as far as noise shows it."""
    sign = math.copysign(1.0, shift)
    moved = sorted((sign * math.log(p.seconds / line.at(p.size)) + p.error, p.steps) for p in points)
    allowed = _LASTING_PART * sum(steps for _, steps in moved)
    passed = 0
    for distance, steps in moved:
        passed += steps
        if passed >= allowed:
            return distance >= abs(shift) / 2
    return False


def _located(line: _RunningLine, groups: Sequence[Sequence[Point]]) -> tuple[int, float]:
    """Return the scrape where the change began, and its ratio: older scrapes fit the line, newer ones are shifted."""
    best = (math.inf, 0, 0.0)
    for start in range(len(groups)):
        shift, _ = _shift(line, [point for group in groups[start:] for point in group])
        miss = sum(
            ((math.log(p.seconds / line.at(p.size)) - (shift if place >= start else 0.0)) / p.error) ** 2
            for place, group in enumerate(groups)
            for p in group
        )
        best = min(best, (miss, start, shift))
    return best[1], math.exp(best[2])


def _shift(line: _RunningLine, points: Sequence[Point]) -> tuple[float, float]:
    """Return the points' common logarithmic distance from the line and its standard error; noisy points count less."""
    whole = shift = 0.0
    for point in points:
        weight = 1.0 / point.error**2
        whole += weight
        shift += weight * math.log(point.seconds / line.at(point.size))
    return shift / whole, math.sqrt(1.0 / whole)


def _contradiction(line: _RunningLine, points: Sequence[Point]) -> float:
    """Return the points' common logarithmic distance from the plausible times at the earlier speed."""
    whole = distance = 0.0
    for point in points:
        least, most = line.possible(point.size)
        weight = 1.0 / point.error**2
        whole += weight
        distance += weight * math.log(point.seconds / min(max(point.seconds, least), most))
    return distance / whole


class _Wander:
    """How far means of about ``LATEST_STEPS`` steps stray beyond the noise of independent steps.

    Half the squared difference of two means is the variance of one. The mean between them is left out, because noise
    that goes on makes neighbours alike. A change too small to notice enters twice, not forever.
    """

    def __init__(self) -> None:
        self._run: list[tuple[float, float]] = []
        """Weighted distances from the line, and their weights, of the mean in progress."""
        self._steps = 0
        self._means: list[tuple[float, float]] = []
        """The last means and their variances, by the noise of independent steps."""
        self._excess = self._weight = 0.0

    @property
    def known(self) -> bool:
        return self._weight >= _KNOWN_MEANS

    def take(self, line: _RunningLine, points: Iterable[Point]) -> None:
        """Learn from points that the line does not know yet."""
        for point in points:
            weight = 1.0 / point.error**2
            self._run.append((weight * math.log(point.seconds / line.at(point.size)), weight))
            self._steps += point.steps
        if self._steps < LATEST_STEPS:
            return
        whole = sum(weight for _, weight in self._run)
        self._means.append((sum(distance for distance, _ in self._run) / whole, 1.0 / whole))
        keep = 0.5 ** (self._steps / _HALF_LIFE_STEPS)
        self._run, self._steps = [], 0
        if len(self._means) > _APART:
            (before, error2), (after, other2) = self._means.pop(0), self._means[-1]
            self._excess = keep * self._excess + ((after - before) ** 2 - error2 - other2) / 2
            self._weight = keep * self._weight + 1.0

    def variance(self, independent: float) -> float:
        """Return the variance of a mean; ``independent`` is its standard error for independent steps."""
        assumed = _ASSUMED_MEANS * _ASSUMED_EXCESS * independent**2
        return independent**2 + max(0.0, (_UNSURE * self._excess + assumed) / (self._weight + _ASSUMED_MEANS))


class _RunningLine:
    """A running weighted straight line with forgetting; a weak assumption stands in for an unobserved slope."""

    def __init__(self) -> None:
        self.w = self.wx = self.wy = self.wxx = self.wxy = 0.0
        self._solution: tuple[float, float, float, float, float] | None = None
        """Solved once for each state of the sums, because every point of every window is compared with it."""
        self._seen: dict[float, tuple[float, int]] = {}
        """Mean seconds by size, and over how many steps."""

    @property
    def known(self) -> bool:
        return self.w > 0

    def take(self, points: Iterable[Point]) -> None:
        for point in points:
            self._take(point)

    def _take(self, point: Point) -> None:
        self._solution = None
        keep = 0.5 ** (point.steps / _HALF_LIFE_STEPS)
        weight = 1.0 / (point.seconds * point.error) ** 2
        x, y = point.size, point.seconds
        self.w = self.w * keep + weight
        self.wx = self.wx * keep + weight * x
        self.wy = self.wy * keep + weight * y
        self.wxx = self.wxx * keep + weight * x * x
        self.wxy = self.wxy * keep + weight * x * y
        seconds, steps = self._seen.get(x, (y, 0))
        part = point.steps / (min(steps, _SEEN_STEPS) + point.steps)
        self._seen[x] = (seconds + part * (y - seconds), steps + point.steps)

    def rescale(self, ratio: float) -> None:
        self._solution = None
        trust = _TRUST_IN_THE_PAST / ratio**2
        self.w, self.wx, self.wxx = self.w * trust, self.wx * trust, self.wxx * trust
        self.wy, self.wxy = self.wy * trust * ratio, self.wxy * trust * ratio
        self._seen = {x: (ratio * seconds, steps) for x, (seconds, steps) in self._seen.items()}

    def possible(self, x: float) -> tuple[float, float]:
        """Return the least and the most seconds at a size that agree with the observations."""
        near = min(self._seen, key=lambda seen: abs(math.log(seen / x)))
        if max(near / x, x / near) < _SAME_SIZE_RATIO:
            expected = self._seen[near][0] * self.at(x) / self.at(near)
            return expected, expected
        as_long = {seen: seconds for seen, (seconds, _) in self._seen.items()}
        as_fast = {seen: seconds * x / seen for seen, seconds in as_long.items()}
        least = max(as_long[seen] if seen <= x else as_fast[seen] for seen in as_long)
        most = min(as_fast[seen] if seen <= x else as_long[seen] for seen in as_long)
        # Where old times of other sizes contradict each other, all times between them are plausible.
        return min(least, most), max(least, most)

    def _solved(self) -> tuple[float, float, float, float, float]:
        if self._solution is None:
            self._solution = self._solve()
        return self._solution

    def _solve(self) -> tuple[float, float, float, float, float]:
        """Return slope, fixed part and their covariance (xx, x, 1 entries of the inverse), assumption included."""
        typical = self.wy / self.w
        weight = 1.0 / (_FIXED_PART_DEVIATION * typical) ** 2
        w, wy = self.w + weight, self.wy + weight * _FIXED_PART * typical
        determinant = w * self.wxx - self.wx**2
        if determinant <= 1e-12 * w * self.wxx:
            return 0.0, typical, 0.0, 0.0, 1.0 / self.w
        slope = max(0.0, (w * self.wxy - self.wx * wy) / determinant)
        fixed = (wy - slope * self.wx) / w
        return slope, fixed, w / determinant, -self.wx / determinant, self.wxx / determinant

    def at(self, x: float) -> float:
        slope, fixed, *_ = self._solved()
        return max(slope * x + fixed, 1e-3 * self.wy / self.w)

    def error_at(self, x: float) -> float:
        _, _, xx, x1, one = self._solved()
        return math.sqrt(max(0.0, x * x * xx + 2 * x * x1 + one)) / self.at(x)
