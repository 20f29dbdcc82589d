"""Measured steps over those that the models expect: noise of any shape shows in the mean of a step itself.

How long a step waits for its slowest member depends on the tails of all members' times, which a few hundred steps show
badly, and the mean of a step well. Both are compared at the same steps, and both relative to the members' own times at
these steps, so a pace that all share does not count. What is left is drawn towards 1 as far as chance explains it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from heterotrain_core.split.balance import Split

from heterotrain_planner.perf.counters import SHORTEST_STEP_S, Observation, usable
from heterotrain_planner.perf.line import persistence

LEAST_OBSERVATIONS = 8
"""Observations from which the mean of steps counts."""
MOST_VECTORS = 16
"""Different shares for which a step is expected, the newest: each takes a quadrature."""
_USUAL_ERROR = 0.05
"""Usual relative error of an expected step."""


class Expected(NamedTuple):
    """What the models expect of a step with some shares: the members' own seconds, and the mean seconds of a step."""

    split: Split
    step_s: float


def measured_ratio(
    observations: Sequence[Sequence[Observation]],
    expected: Callable[[tuple[int, ...]], Expected | None],
    *,
    steps: int,
) -> float:
    """Return how many times as long as expected steps are, without what all members share; 1 where too few are known.

    Args:
        observations: by member, oldest first.
        expected: by shares; ``None`` where these break a limit.
        steps: last steps that count, such as those since a member's speed changed.
    """
    tracks = [_newest(each, steps) for each in observations]
    if not all(tracks):
        return 1.0
    known: dict[tuple[int, ...], Expected | None] = {}
    rows: list[tuple[int, float, float]] = []
    for after, timed in tracks[0]:
        # Members make the same steps, and are scraped at different times.
        middle = after + timed.steps // 2
        there = [track[max(0, bisect_right(track, middle, key=lambda each: each[0]) - 1)][1] for track in tracks]
        shares = tuple(each.share_samples for each in there)
        if shares not in known and len(known) < MOST_VECTORS:
            known[shares] = expected(shares)
        if timed.step and timed.step.mean >= SHORTEST_STEP_S and (found := known.get(shares)) is not None:
            own = [(o.compute.mean, s) for o, s in zip(there, found.split.own_s, strict=True) if o.compute and s > 0]
            if (usual := sum(o / s for o, s in own) / max(1, len(own))) > 0:
                rows.append((timed.steps, timed.step.mean / found.step_s, usual))
    if len(rows) < LEAST_OBSERVATIONS:
        return 1.0
    steps_O, step_O, own_O = np.array(rows[::-1]).T
    ratio = float((steps_O @ step_O) / (steps_O @ own_O))
    missed_O = steps_O * (step_O - ratio * own_O) / float(steps_O @ own_O)
    error2 = float((missed_O**2).sum()) * persistence(missed_O)
    return 1 + (ratio - 1) * _USUAL_ERROR**2 / (_USUAL_ERROR**2 + error2)


def _newest(observations: Sequence[Observation], steps: int) -> list[tuple[int, Observation]]:
    """Return the last steps' observations, newest first, each with the number of steps that came after it."""
    found, after = [], 0
    for each in reversed(observations):
        if after >= steps:
            break
        if not each.warm_up and usable(each):
            found.append((after, each))
        after += each.steps
    return found
