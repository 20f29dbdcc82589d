"""Prices of the pools: at these, each job alone would choose about what all jobs together can have.

Legend: ``O`` options of different jobs, one after another, ``J`` these jobs, ``C`` all candidates, ``P`` pools of a
job, ``N`` pools of the cluster.

Prices ``w`` are the multipliers of the pools' limits (Everett 1963). For any of them
``Σ_jobs max_O (score - w · part) + Σ_N w`` is at least the best sum of scores, where ``part`` is the part of each pool
that an option takes. The lowest such bound is sought along subgradients with Polyak's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from heterotrain_planner.allocate.candidate import EPSILON, Candidate
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import Size
from heterotrain_planner.allocate.value import Floats, Ints, Option

Parts = Mapping[tuple[str, Size], float]
"""Part of a pool that one worker takes, by pool and size."""

_STEPS = 60
"""Subgradient steps; more lower the bound further, in proportionally more time."""
_STEPS_OF_BOUND = 200
"""The same where the bound is stated."""
_PATIENCE = 5
"""Steps without a lower bound after which they become half as long, and start again from the best prices so far."""


class Prices:
    """A price for the whole of each pool, in units of score."""

    def __init__(self, parts: Parts, whole: Mapping[str, float], bound: float = math.inf) -> None:
        """Note the prices.

        Args:
            parts: part of its pool that one worker takes, by pool and size.
            whole: price of each pool by name, not negative.
            bound: what the listed options of the jobs score at most together, by these prices.
        """
        self._parts, self._whole, self.bound = parts, whole, bound
        self._orders: dict[int, tuple[Candidate, list[int]]] = {}
        """By the identity of a candidate, which is kept so that no other one gets it."""

    def of_workers(self, candidate: Candidate) -> Floats:
        """Return the price of one worker in each of the job's pools, ``_P``."""
        pools = candidate.job.pools
        each_P: Floats = np.array(
            [self._whole.get(o.pool, 0.0) * self._parts.get((o.pool, o.size), 0.0) for o in pools]
        )
        return each_P

    @property
    def of_all_pools(self) -> float:
        """The sum of the pools' prices."""
        return sum(self._whole.values())

    def net_scores(self, candidate: Candidate) -> Floats:
        """Return each option's score less the price of its workers."""
        counts_OP, score_O = candidate.arrays
        net_O: Floats = score_O - counts_OP @ self.of_workers(candidate)
        return net_O

    def of_unused(self, candidates: Sequence[Candidate], chosen: Sequence[Option | None]) -> dict[str, float]:
        """Return the price of the unused part of each pool."""
        left = dict.fromkeys(self._whole, 1.0)
        for candidate, option in zip(candidates, chosen, strict=True):
            for (pool, size), count in candidate.need(option).items():
                left[pool] -= count * self._parts.get((pool, size), 0.0)
        return {pool: self._whole[pool] * max(0.0, part) for pool, part in left.items()}

    def smallest_first(self, candidate: Candidate) -> Iterator[Option]:
        """Yield the job's options with the fewest workers first; of equally many, the best at these prices first."""
        if id(candidate) not in self._orders:
            order = np.lexsort((-self.net_scores(candidate), candidate.arrays[0].sum(axis=1)))
            self._orders[id(candidate)] = (candidate, order.tolist())
        return (candidate.options[k] for k in self._orders[id(candidate)][1])


def find_prices(
    candidates: Sequence[Candidate], chosen: Iterable[Option | None], capacity: PoolCapacity, *, valid: bool = False
) -> Prices:
    """Return prices for the jobs that run in a given choice.

    Args:
        candidates: the jobs.
        chosen: their options, which together fit; the better their scores, the better the length of the steps.
        capacity: of the pools.
        valid: whether ``bound`` has to hold where workers of several sizes share a pool; the prices are then less
            exact there.
    """
    index_of = {name: n for n, name in enumerate(capacity.pools)}
    running = [(c, option) for c, option in zip(candidates, chosen, strict=True) if option is not None]
    parts = _valid_parts([c for c, _ in running], capacity) if valid else _slot_parts(candidates, capacity)
    price_N = np.zeros(len(index_of))
    best_N, lowest = price_N, float("inf")
    if running:
        stack = _stacked([c for c, _ in running], parts, index_of)
        reached = sum(option.score for _, option in running)
        length, stale = 1.0, 0
        for _ in range(_STEPS_OF_BOUND if valid else _STEPS):
            net_O = stack.net_scores(price_N)
            most_J = np.maximum.reduceat(net_O, stack.first_J)
            bound = float(most_J[stack.like_C].sum() + price_N.sum())
            stale += 1
            if bound < lowest - EPSILON:
                lowest, best_N, stale = bound, price_N, 0
            elif stale >= _PATIENCE:
                length, stale, price_N = length / 2, 0, best_N
                continue
            best_O = _first_best(net_O, most_J, stack)[stack.like_C]
            taken = (stack.pool_PO[:, best_O].T.ravel(), stack.part_PO[:, best_O].T.ravel())
            over_N = np.bincount(*taken, minlength=len(index_of)) - 1.0
            over_N = np.where((price_N <= 0) & (over_N < 0), 0.0, over_N)
            if bound - reached <= EPSILON or not over_N.any():
                break
            price_N = np.maximum(0.0, price_N + length * (bound - reached) / float(over_N @ over_N) * over_N)
    return Prices(parts, {name: float(price) for name, price in zip(index_of, best_N, strict=True)}, lowest)


def _slot_parts(candidates: Sequence[Candidate], capacity: PoolCapacity) -> Parts:
    """Return one slot's part of the pool for each size, as if it had no workers of other sizes."""
    used = {(each.pool, each.size) for candidate in candidates for each in candidate.job.pools}
    return {(pool, size): 1.0 / max(1, capacity.slots(pool, size)) for pool, size in used}


def _valid_parts(candidates: Sequence[Candidate], capacity: PoolCapacity) -> Parts:
    """Return parts of which all workers in a pool have 1 at most, whatever their sizes."""
    sizes: dict[str, set[Size]] = {}
    for candidate in candidates:
        for each in candidate.job.pools:
            if capacity.slots(each.pool, each.size):
                sizes.setdefault(each.pool, set()).add(each.size)
    return {(pool, size): part for pool, own in sizes.items() for size, part in capacity.parts(pool, own).items()}


class _Stack(NamedTuple):
    """The options of different jobs, one after another. Jobs with the same options are listed once.

    Attributes:
        part_PO: parts of pools that options take; one row for each position in the jobs' lists of pools.
        pool_PO: the pools that they take them from.
        score_O: their scores.
        first_J: each listed job's first option.
        size_J: each listed job's number of options.
        like_C: the listed job that each candidate is like.
    """

    part_PO: Floats
    pool_PO: Ints
    score_O: Floats
    first_J: Ints
    size_J: Ints
    like_C: Ints

    def net_scores(self, price_N: Floats) -> Floats:
        """Return each option's score less the price of its workers."""
        cost_O = self.part_PO[0] * price_N[self.pool_PO[0]]
        for part_O, pool_O in zip(self.part_PO[1:], self.pool_PO[1:], strict=True):
            cost_O += part_O * price_N[pool_O]
        net_O: Floats = self.score_O - cost_O
        return net_O


def _stacked(candidates: Sequence[Candidate], parts: Parts, index_of: Mapping[str, int]) -> _Stack:
    """Return the stacked options of candidates that have options."""
    listed: list[Candidate] = []
    like: list[int] = []
    at: dict[tuple[object, ...], int] = {}
    for candidate in candidates:
        counts_OP, score_O = candidate.arrays
        pools = tuple((each.pool, each.size) for each in candidate.job.pools)
        key = (pools, score_O.tobytes(), counts_OP.tobytes())
        if key not in at:
            at[key] = len(listed)
            listed.append(candidate)
        like.append(at[key])
    widest = max(len(candidate.job.pools) for candidate in listed)
    size_J = np.array([len(candidate.options) for candidate in listed], dtype=np.int64)
    first_J: Ints = np.cumsum(size_J) - size_J
    part_PO = np.zeros((widest, int(size_J.sum())))
    pool_PO = np.zeros(part_PO.shape, dtype=np.int64)
    for candidate, first, size in zip(listed, first_J.tolist(), size_J.tolist(), strict=True):
        rows, columns = slice(len(candidate.job.pools)), slice(first, first + size)
        own_P = np.array([parts.get((each.pool, each.size), 0.0) for each in candidate.job.pools])
        part_PO[rows, columns] = candidate.arrays[0].T * own_P[:, None]
        pool_PO[rows, columns] = np.array([[index_of.get(job_pool.pool, 0)] for job_pool in candidate.job.pools])
    score_O = np.concatenate([candidate.arrays[1] for candidate in listed])
    return _Stack(part_PO, pool_PO, score_O, first_J, size_J, np.array(like, dtype=np.int64))


def _first_best(net_O: Floats, most_J: Floats, stack: _Stack) -> Ints:
    """Return each listed job's first option with the highest net score."""
    best_O = np.flatnonzero(net_O == np.repeat(most_J, stack.size_J))
    found: Ints = best_O[np.searchsorted(best_O, stack.first_J)]
    return found
