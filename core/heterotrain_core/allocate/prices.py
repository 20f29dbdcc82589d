"""What a pool is worth while these jobs contend for it: the prices at which each job alone would choose much as all have to.

Legend: ``O`` options of all jobs, one after another, ``P`` offers of a job, ``N`` pools.

Prices ``w`` are the multipliers of the pools' limits (Everett 1963). For any of them
``Σ_jobs max_O (score - w · part) + Σ_N w`` is at least the best sum of scores, where ``part`` is what an option takes of
each pool; the lowest such bound is sought along subgradients with Polyak's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from heterotrain_core.allocate.candidate import NOTHING, Candidate
from heterotrain_core.allocate.capacity import Room
from heterotrain_core.allocate.problem import Pool
from heterotrain_core.allocate.value import Floats, Ints, Option

_STEPS = 60
_PATIENCE = 5
"""Steps without a lower bound after which they become half as long, and start again from the best prices so far."""


class Prices:
    """A price for the whole of each pool, in units of score."""

    def __init__(self, room: Room, whole: Mapping[str, float]) -> None:
        """Note the prices.

        Args:
            room: any; only what it holds when it is empty counts.
            whole: by pool, not negative.
        """
        self._room, self._whole = room, whole

    def net_of(self, candidate: Candidate) -> Floats:
        """Return each option's score less the price of its workers."""
        counts_OP, score_O = candidate.arrays
        each_P = [
            self._whole.get(o.pool, 0.0) * part
            for o, part in zip(candidate.job.offers, _parts(candidate, self._room), strict=True)
        ]
        net_O: Floats = score_O - counts_OP @ np.array(each_P)
        return net_O

    def of_unused(self, candidates: Sequence[Candidate], chosen: Sequence[Option | None]) -> dict[str, float]:
        """Return the price of the part of each pool that nobody takes."""
        left = dict.fromkeys(self._whole, 1.0)
        for candidate, option in zip(candidates, chosen, strict=True):
            for (pool, size), count in candidate.need(option).items():
                left[pool] -= count / max(1, self._room.places(pool, size))
        return {pool: self._whole[pool] * max(0.0, part) for pool, part in left.items()}

    def seats(self, candidate: Candidate) -> Iterator[Option]:
        """Yield the job's options with the fewest workers first, of as many those that are worth most at these prices."""
        order = np.lexsort((-self.net_of(candidate), candidate.arrays[0].sum(axis=1)))
        return (candidate.options[k] for k in order.tolist())


def prices(candidates: Sequence[Candidate], chosen: Iterable[Option | None], pools: Sequence[Pool]) -> Prices:
    """Return prices for the jobs that run in a given choice.

    Args:
        candidates: the jobs.
        chosen: their options, which together fit; the better their scores, the better the length of the steps.
        pools: each name once.
    """
    room, place_of = Room(pools), {pool.name: n for n, pool in enumerate(pools)}
    running = [(c, option) for c, option in zip(candidates, chosen, strict=True) if option is not None]
    price_N = np.zeros(len(pools))
    best_N, lowest = price_N, float("inf")
    if running:
        part_OP, pool_OP, score_O, first_J = _stacked([c for c, _ in running], room, place_of)
        reached = sum(option.score for _, option in running)
        length, stale = 1.0, 0
        for _ in range(_STEPS):
            net_O = score_O - (part_OP * price_N[pool_OP]).sum(axis=1)
            most_J = np.maximum.reduceat(net_O, first_J)
            bound = float(most_J.sum() + price_N.sum())
            stale += 1
            if bound < lowest - NOTHING:
                lowest, best_N, stale = bound, price_N, 0
            elif stale >= _PATIENCE:
                length, stale, price_N = length / 2, 0, best_N
                continue
            best_O = _first_best(net_O, most_J, first_J)
            over_N = np.bincount(pool_OP[best_O].ravel(), part_OP[best_O].ravel(), minlength=len(pools)) - 1.0
            over_N = np.where((price_N <= 0) & (over_N < 0), 0.0, over_N)
            if bound - reached <= NOTHING or not over_N.any():
                break
            price_N = np.maximum(0.0, price_N + length * (bound - reached) / float(over_N @ over_N) * over_N)
    return Prices(room, {pool.name: float(price) for pool, price in zip(pools, best_N, strict=True)})


def _parts(candidate: Candidate, room: Room) -> list[float]:
    """Return which part of its pool a worker of each offer takes."""
    return [1.0 / max(1, room.places(offer.pool, offer.size)) for offer in candidate.job.offers]


def _stacked(
    candidates: Sequence[Candidate], room: Room, place_of: Mapping[str, int]
) -> tuple[Floats, Ints, Floats, Ints]:
    """Return the parts that options take, of which pools, their scores, and where each job's options begin."""
    widest = max(len(candidate.job.offers) for candidate in candidates)
    sizes = [len(candidate.options) for candidate in candidates]
    first_J: Ints = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
    part_OP, pool_OP = np.zeros((sum(sizes), widest)), np.zeros((sum(sizes), widest), dtype=np.int64)
    for candidate, first, size in zip(candidates, first_J.tolist(), sizes, strict=True):
        rows, columns = slice(first, first + size), slice(len(candidate.job.offers))
        part_OP[rows, columns] = candidate.arrays[0] * np.array(_parts(candidate, room))
        pool_OP[rows, columns] = [place_of.get(offer.pool, 0) for offer in candidate.job.offers]
    return part_OP, pool_OP, np.concatenate([candidate.arrays[1] for candidate in candidates]), first_J


def _first_best(net_O: Floats, most_J: Floats, first_J: Ints) -> Ints:
    """Return each job's first option that is worth most."""
    size_J = np.diff(np.append(first_J, len(net_O)))
    best_O = np.flatnonzero(net_O == np.repeat(most_J, size_J))
    found: Ints = best_O[np.searchsorted(best_O, first_J)]
    return found
