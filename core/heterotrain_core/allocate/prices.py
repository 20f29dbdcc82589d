"""Prices of the pools: at these, each job alone would choose about what all jobs together can have.

Legend: ``O`` options of all jobs, one after another, ``P`` pools of a job, ``N`` pools of the cluster, ``J`` jobs.

Prices ``w`` are the multipliers of the pools' limits (Everett 1963). For any of them
``Σ_jobs max_O (score - w · part) + Σ_N w`` is at least the best sum of scores, where ``part`` is the part of each pool
that an option takes. The lowest such bound is sought along subgradients with Polyak's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from heterotrain_core.allocate.candidate import EPSILON, Candidate
from heterotrain_core.allocate.capacity import PoolCapacity
from heterotrain_core.allocate.problem import Size
from heterotrain_core.allocate.value import Floats, Ints, Option

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
        order = np.lexsort((-self.net_scores(candidate), candidate.arrays[0].sum(axis=1)))
        return (candidate.options[k] for k in order.tolist())


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
        part_OP, pool_OP, score_O, first_J = _stacked([c for c, _ in running], parts, index_of)
        reached = sum(option.score for _, option in running)
        length, stale = 1.0, 0
        for _ in range(_STEPS_OF_BOUND if valid else _STEPS):
            net_O = score_O - (part_OP * price_N[pool_OP]).sum(axis=1)
            most_J = np.maximum.reduceat(net_O, first_J)
            bound = float(most_J.sum() + price_N.sum())
            stale += 1
            if bound < lowest - EPSILON:
                lowest, best_N, stale = bound, price_N, 0
            elif stale >= _PATIENCE:
                length, stale, price_N = length / 2, 0, best_N
                continue
            best_O = _first_best(net_O, most_J, first_J)
            over_N = np.bincount(pool_OP[best_O].ravel(), part_OP[best_O].ravel(), minlength=len(index_of)) - 1.0
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


def _stacked(
    candidates: Sequence[Candidate], parts: Parts, index_of: Mapping[str, int]
) -> tuple[Floats, Ints, Floats, Ints]:
    """Return the parts that options take, the pools they take them from, their scores, and each job's first row."""
    widest = max(len(candidate.job.pools) for candidate in candidates)
    sizes = [len(candidate.options) for candidate in candidates]
    first_J: Ints = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
    part_OP, pool_OP = np.zeros((sum(sizes), widest)), np.zeros((sum(sizes), widest), dtype=np.int64)
    for candidate, first, size in zip(candidates, first_J.tolist(), sizes, strict=True):
        rows, columns = slice(first, first + size), slice(len(candidate.job.pools))
        own = [parts.get((each.pool, each.size), 0.0) for each in candidate.job.pools]
        part_OP[rows, columns] = candidate.arrays[0] * np.array(own)
        pool_OP[rows, columns] = [index_of.get(job_pool.pool, 0) for job_pool in candidate.job.pools]
    return part_OP, pool_OP, np.concatenate([candidate.arrays[1] for candidate in candidates]), first_J


def _first_best(net_O: Floats, most_J: Floats, first_J: Ints) -> Ints:
    """Return each job's first option with the highest net score."""
    size_J = np.diff(np.append(first_J, len(net_O)))
    best_O = np.flatnonzero(net_O == np.repeat(most_J, size_J))
    found: Ints = best_O[np.searchsorted(best_O, first_J)]
    return found
