"""Joint improvement of two or three jobs: their workers, and the free capacity, are shared in the best way of all.

It finds improvements that no change of one job brings, and no single worker that changes hands: a job gives up all but
its minimum because every change costs it one pause; two jobs swap pools; one job makes space for several workers at
once. docs/adr/0017 has the measured gain.

Legend: ``O`` a job's options.

Prices show where to look. ``slack`` is an option's net score at the prices below the job's best one, and ``free`` the
price of unused capacity. New options in place of old ones gain at most ``Σ slack(old) - Σ slack(new) + free``: nothing
for jobs with their best options, and nothing by an option with more slack than that. (Exact where a pool's workers have
one size. Where sizes mix, the parts of a pool are approximate, and so is the bound.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice

import numpy as np
from numpy.typing import NDArray

from heterotrain_planner.allocate.candidate import EPSILON, Candidate
from heterotrain_planner.allocate.capacity import Occupancy
from heterotrain_planner.allocate.prices import Prices
from heterotrain_planner.allocate.value import Floats, Ints, Option

Bools = NDArray[np.bool_]

_PARTNERS = 32
"""Other jobs that one job is paired with, those with the most slack first."""
_MOST_PAIRS = 600
"""Pairs over all jobs."""
_JOBS_IN_TRIPLES = 8
"""Jobs with the most slack, of which all triples are tried once no pair improves: 56 triples."""
_MOST_TRIALS_PER_GROUP = 3000
"""Options that are tried for one group."""
_MOST_TRIALS = 20_000
"""The same over all pairs, and over all triples: some tens of milliseconds."""
_BLOCK = 256
"""Options of one job that are compared with all of the other job at once; bounds memory."""
_COMPARED_PER_TRIAL = 500
"""Compared combinations of a pair that take about as long as one trial."""
UNLIMITED_SLOTS = 2**31


def share_jointly(
    candidates: Sequence[Candidate], occupancy: Occupancy, chosen: list[Option | None], prices: Prices
) -> None:
    """Give small groups of jobs their best options that fit together next to the other jobs.

    Args:
        candidates: the jobs.
        occupancy: holds the chosen options.
        chosen: their options; changed in place where that is better, never to less. A job that waits stays waiting.
        prices: of the pools; jobs furthest from their choice at these prices come first.
    """
    groups = _Groups(candidates, occupancy, chosen, prices)
    before = tuple(chosen)
    groups.improve(islice(groups.pairs(), _MOST_PAIRS))
    if tuple(chosen) == before:
        groups.improve(combinations(groups.most_slack[:_JOBS_IN_TRIPLES], 3))


class _Groups:
    """Running jobs with the slack of each of their options."""

    def __init__(
        self, candidates: Sequence[Candidate], occupancy: Occupancy, chosen: list[Option | None], prices: Prices
    ) -> None:
        self._candidates, self._occupancy, self._chosen, self._prices = candidates, occupancy, chosen, prices
        self._slack_O: dict[int, Floats] = {}
        for i, candidate in enumerate(candidates):
            if chosen[i] is not None:
                net_O = prices.net_scores(candidate)
                self._slack_O[i] = net_O.max() - net_O
        self._pools = {i: frozenset({job_pool.pool for job_pool in candidates[i].job.pools}) for i in self._slack_O}
        self._slack: dict[int, float] = {}
        self._unused: dict[str, float] = {}
        self._update(self._slack_O)
        self.most_slack = sorted(self._slack, key=lambda i: (-self._slack[i], i))

    def _update(self, changed: Iterable[int]) -> None:
        """Note the slack of these jobs' chosen options, and the price of unused capacity."""
        for i in changed:
            if (option := self._chosen[i]) is not None:
                self._slack[i] = float(self._slack_O[i][self._candidates[i].index_of(option)])
        self._unused = self._prices.of_unused(self._candidates, self._chosen)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs with a pool in common, those of the job with the most slack first."""
        for position, i in enumerate(self.most_slack):
            partners = (j for j in self.most_slack[position + 1 :] if not self._pools[i].isdisjoint(self._pools[j]))
            for j in islice(partners, _PARTNERS):
                yield i, j

    def improve(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Share jointly in one group after another, until all are done or the trials are used up."""
        trials = _MOST_TRIALS
        for group in groups:
            if trials <= 0:
                break
            pools = sorted({pool for i in group for pool in self._pools[i]})
            gain = sum(self._slack[i] for i in group) + sum(self._unused.get(pool, 0.0) for pool in pools)
            if gain > EPSILON:
                before = [self._chosen[i] for i in group]
                trials -= self._share(group, gain, min(trials, _MOST_TRIALS_PER_GROUP))
                if any(self._chosen[i] is not had for i, had in zip(group, before, strict=True)):
                    self._update(group)

    def _share(self, group: Sequence[int], gain: float, most_trials: int) -> int:
        """Give the jobs the best options that fit together, by branch and bound; return the number of trials."""
        chosen, occupancy = self._chosen, self._occupancy
        for i in group:
            occupancy.add(self._candidates[i].freed(chosen[i]))
        best = sum(option.score for i in group if (option := chosen[i]) is not None)
        possible = [self._possible(i, gain) for i in group]
        if len(group) == 2 and (room := self._room(group)) is not None:  # noqa: PLR2004  # a pair
            found, trials = _best_pair(possible[0], possible[1], room, best)
            for i, option in zip(group, found, strict=False):
                chosen[i] = option
            for i in group:
                occupancy.add(self._candidates[i].need(chosen[i]))
            return trials
        search = _Search([self._candidates[i] for i in group], possible, occupancy, best, most_trials)
        search.visit(0, 0.0, ())
        for i, option in zip(group, search.found, strict=False):
            chosen[i] = option
        for i in group:
            occupancy.add(self._candidates[i].need(chosen[i]))
        return search.trials

    def _room(self, group: Sequence[int]) -> tuple[Ints, Ints, Ints] | None:
        """Return positions of the pools that both jobs of a pair use, in each job, and the free slots of these pools.

        ``None`` where their workers differ in size, or one job uses a pool twice: then slots alone do not decide.
        """
        first, second = (self._candidates[i].job.pools for i in group)
        at = {each.pool: k for k, each in enumerate(second)}
        if len(at) < len(second) or len({each.pool for each in first}) < len(first):
            return None
        shared = [(k, at[each.pool]) for k, each in enumerate(first) if each.pool in at]
        if any(first[k].size != second[m].size for k, m in shared):
            return None
        free = [self._occupancy.free_slots(first[k].pool, first[k].size, UNLIMITED_SLOTS) for k, _ in shared]
        one, other = (np.array(positions, dtype=np.int64) for positions in zip(*shared, strict=True))
        return one, other, np.array(free, dtype=np.int64)

    def _possible(self, i: int, gain: float) -> list[Option]:
        """Return the job's options that can be part of a gain and would fit in each pool alone, best first."""
        candidate = self._candidates[i]
        most = [self._occupancy.free_slots(each.pool, each.size, each.max_workers) for each in candidate.job.pools]
        within_O = (self._slack_O[i] < gain) & (candidate.arrays[0] <= np.array(most)).all(axis=1)
        return [candidate.options[k] for k in np.flatnonzero(within_O).tolist()]


class _Search:
    """Finds the options of a group that fit together with the best sum.

    A function that calls itself by its own name would be part of a cycle, and keep candidates until garbage is
    collected.

    Attributes:
        found: one option for each candidate; empty if no sum exceeds the one to exceed.
        trials: options that were tried.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        possible: Sequence[Sequence[Option]],
        occupancy: Occupancy,
        best: float,
        most_trials: int,
    ) -> None:
        self._candidates = candidates
        self._possible = possible
        self._occupancy = occupancy
        self._best = best
        self._most_trials = most_trials
        self._best_after = [0.0] * (len(candidates) + 1)
        for k in range(len(candidates) - 1, -1, -1):
            most = max((option.score for option in possible[k][:1]), default=0.0)
            self._best_after[k] = self._best_after[k + 1] + most
        self.found: tuple[Option, ...] = ()
        self.trials = 0

    def visit(self, k: int, score: float, picked: tuple[Option, ...]) -> None:
        """Try all options of the candidates from ``k`` on, best first."""
        if k == len(self._candidates):
            self._best, self.found = score, picked
            return
        candidate = self._candidates[k]
        for option in self._possible[k]:
            hopeful = score + option.score + self._best_after[k + 1] > self._best + EPSILON
            if not hopeful or self.trials >= self._most_trials:
                return
            self.trials += 1
            need = candidate.need(option)
            if self._occupancy.fits(need):
                self._occupancy.add(need)
                self.visit(k + 1, score + option.score, (*picked, option))
                self._occupancy.add(candidate.freed(option))


def _best_pair(
    first: Sequence[Option], second: Sequence[Option], room: tuple[Ints, Ints, Ints], best: float
) -> tuple[tuple[Option, ...], int]:
    """Return the two options that fit together with the best sum, empty if none exceeds ``best``, and the trials.

    All combinations are compared, a block of rows at a time. Each option fits alone.

    Args:
        first: options of one job, best first.
        second: options of the other job, best first.
        room: positions of the shared pools in either job, and their free slots.
        best: sum of scores to exceed.
    """
    if not first or not second:
        return (), 0
    one, other, free_P = room
    counts_AP = np.array([option.counts for option in first], dtype=np.int64)[:, one]
    left_AP = free_P - counts_AP
    counts_BP = np.array([option.counts for option in second], dtype=np.int64)[:, other]
    score_A, score_B = (np.array([option.score for option in options]) for options in (first, second))
    found: tuple[Option, ...] = ()
    compared = 0
    for start in range(0, len(first), _BLOCK):
        rows = slice(start, start + _BLOCK)
        hopeful = int(np.searchsorted(-score_A[rows], -(best + EPSILON - score_B[0])))
        if not hopeful:
            break
        rows = slice(start, start + hopeful)
        fits_AB: Bools = np.all(counts_BP[None, :, :] <= left_AP[rows, None, :], axis=2)
        compared += fits_AB.size
        first_fit_A = fits_AB.argmax(axis=1)
        sum_A = np.where(fits_AB.any(axis=1), score_A[rows] + score_B[first_fit_A], -np.inf)
        k = int(sum_A.argmax())
        if sum_A[k] > best + EPSILON:
            best, found = float(sum_A[k]), (first[start + k], second[int(first_fit_A[k])])
    return found, 1 + compared // _COMPARED_PER_TRIAL
