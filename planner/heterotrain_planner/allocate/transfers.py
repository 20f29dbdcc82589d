"""Workers that go from one job to another, for jobs with more possible numbers of workers than are listed.

Such a job's options leave gaps: with forty pools, hardly two listed options differ in one worker. So the numbers of
workers that differ from a choice in one pool are scored as needed. The change of one job, or of two jobs that exchange
workers of a pool, that gains most is made, until none gains. Large steps are tried first, then half of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from heterotrain_planner.allocate.candidate import EPSILON, Candidate, Choice, difference
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.problem import Size
from heterotrain_planner.allocate.thinning import PoolLimit
from heterotrain_planner.allocate.value import Option, limits, rates, scored_options

_MOST_JOBS = 24
"""Jobs that not all options are listed of, beyond which nothing is tried: bounds time."""
_MOST_CHANGES = 250
"""Changes that are made at most."""
_MOST_VALUES = 400_000
"""Rows that are scored, times their pools and the jobs' batches, over all jobs."""
_MOST_PAIRS = 4
"""Jobs that may give workers of a pool, and jobs that may take them, which are tried for each pool: the best ones."""


class _Change(NamedTuple):
    """Another number of workers of one pool.

    Attributes:
        gain: of the score.
        job: position of the job.
        option: the job's option after the change.
    """

    gain: float
    job: int
    option: Option


class _Neighbours:
    """The options of one job that differ from its chosen one in one pool."""

    def __init__(self, candidate: Candidate, capacity: PoolCapacity) -> None:
        self._candidate, self._capacity = candidate, capacity
        slots = [capacity.slots(each.pool, each.size) for each in candidate.job.pools]
        self._axes, limits_of = limits(candidate.job, slots)
        self._limits: Sequence[PoolLimit] = limits_of
        self.found: dict[tuple[int, ...], Option] = dict(candidate.by_counts)
        self.values = 0

    @property
    def longest(self) -> int:
        """The most workers that a pool may gain."""
        return max((axis[-1] - axis[0] for axis in self._axes if axis), default=0)

    def around(self, now: Option, step: int) -> Iterator[tuple[int, Option]]:
        """Yield the position of each pool, with options that have up to ``step`` workers more or fewer in it."""
        places = []
        for index, axis in enumerate(self._axes):
            for count in (max(axis[0], now.counts[index] - step), min(axis[-1], now.counts[index] + step)):
                counts = (*now.counts[:index], count, *now.counts[index + 1 :])
                if count != now.counts[index] and all(limit.allows(counts) for limit in self._limits):
                    places.append((index, counts))
        self._score([counts for _, counts in places if counts not in self.found])
        for index, counts in places:
            option = self.found.get(counts)
            if option is not None:
                yield index, option

    def _score(self, rows: Sequence[tuple[int, ...]]) -> None:
        if not rows or self._candidate.complete:
            return
        job, rows_OP = self._candidate.job, np.array(rows, dtype=np.int64)
        self.values += rows_OP.size
        for option in scored_options(job, self._capacity.pools, counts_OP=rows_OP, rate_O=rates(job, rows_OP)):
            self.found[option.counts] = option

    def candidate(self) -> Candidate:
        """Return the job with all options that were scored."""
        known = self._candidate
        if known.complete or len(self.found) == len(known.options):
            return known
        options = sorted(self.found.values(), key=lambda each: (-each.score, sum(each.counts), each.counts))
        return Candidate(known.job, tuple(options), complete=False)


def transferred(
    candidates: Sequence[Candidate], choice: Choice, capacity: PoolCapacity
) -> tuple[Sequence[Candidate], Choice]:
    """Return the candidates with the options that were scored, and a choice among these that is at least as good.

    Args:
        candidates: in the order of admission.
        choice: their options, which together fit.
        capacity: of the pools.
    """
    running = [i for i, option in enumerate(choice) if option is not None]
    partial = [i for i in running if not candidates[i].complete]
    if not partial or len(partial) > _MOST_JOBS:
        return candidates, choice
    near = {i: _Neighbours(candidates[i], capacity) for i in running}
    chosen = list(choice)
    occupancy = Occupancy(capacity)
    for candidate, option in zip(candidates, chosen, strict=True):
        occupancy.add(candidate.need(option))
    step, left = max(1, max(near[i].longest for i in partial) // 4), _MOST_CHANGES
    changes: dict[int, list[tuple[int, _Change]]] = {}
    while step and left and sum(each.values for each in near.values()) < _MOST_VALUES:
        for i in running:
            now = chosen[i]
            if i not in changes and now is not None:
                changes[i] = [(p, _Change(o.score - now.score, i, o)) for p, o in near[i].around(now, step)]
        best = _best_changes(candidates, chosen, occupancy, changes)
        if not best:
            step, changes = step // 2, {}
            continue
        left -= 1
        for change in best:
            occupancy.add(difference(candidates[change.job], chosen[change.job], change.option))
            chosen[change.job] = change.option
            del changes[change.job]
    found = [near[i].candidate() if i in near else candidate for i, candidate in enumerate(candidates)]
    return found, tuple(chosen)


def _best_changes(
    candidates: Sequence[Candidate],
    chosen: Sequence[Option | None],
    occupancy: Occupancy,
    changes: dict[int, list[tuple[int, _Change]]],
) -> Sequence[_Change]:
    """Return the change, or the two changes, that gain most and fit; empty if none gains."""
    best: tuple[_Change, ...] = ()
    most = EPSILON
    more: dict[str, list[_Change]] = {}
    fewer: dict[str, list[_Change]] = {}
    for i, own in changes.items():
        now = chosen[i]
        for index, change in own:
            kept = now.counts[index] if now is not None else 0
            side = more if change.option.counts[index] > kept else fewer
            side.setdefault(candidates[i].job.pools[index].pool, []).append(change)

    def fits(*pair: _Change) -> bool:
        step: dict[tuple[str, Size], int] = {}
        for change in pair:
            for key, count in difference(candidates[change.job], chosen[change.job], change.option).items():
                step[key] = step.get(key, 0) + count
        return occupancy.fits(step)

    for pool in dict.fromkeys((*more, *fewer)):
        takers = sorted(more.get(pool, ()), key=lambda change: (-change.gain, change.job))[:_MOST_PAIRS]
        givers = sorted(fewer.get(pool, ()), key=lambda change: (-change.gain, change.job))[:_MOST_PAIRS]
        for change in (*takers, *givers):
            if change.gain > most and fits(change):
                best, most = (change,), change.gain
        for taker in takers:
            for giver in givers:
                gain = taker.gain + giver.gain
                if gain > most and taker.job != giver.job and fits(taker, giver):
                    best, most = (taker, giver), gain
    return best
