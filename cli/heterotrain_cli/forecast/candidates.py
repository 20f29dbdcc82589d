"""The allocations that a forecast compares: all that the job allows, or some of them and what is near the best ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from heterotrain_cli.forecast.job import Allocation, JobInput, PoolInput

MAX_CANDIDATES = 2000
"""Most allocations to compare; beyond it, fewer counts of each pool are tried."""
MOST_MOVES = 400
"""Most allocations that one climb compares."""


def candidate_allocations(job: JobInput) -> tuple[list[Allocation], bool]:
    """Return the allocations to compare: all that the job allows, or fewer counts of each pool if they are too many.

    The second value says whether they are all.
    """
    limits = [_all_counts(pool) if pool.rank is not None else range(1) for pool in job.pools]
    found = list(itertools.islice(_allowed(limits, job.least_workers, job.most_workers), MAX_CANDIDATES + 1))
    complete = len(found) <= MAX_CANDIDATES
    if not complete:
        found = [counts for counts in _fewer(job) if job.least_workers <= sum(counts) <= job.most_workers]
    return found, complete


def climb(job: JobInput, start: Allocation, loss: Callable[[Allocation], float]) -> Allocation:
    """Return an allocation that no move of workers improves: a pool gets more or fewer, or two pools exchange some.

    Half of the most workers move at first, single ones in the end. At most ``MOST_MOVES`` allocations are compared.

    Args:
        job: pools and limits.
        start: workers of each pool, within the limits.
        loss: of an allocation; lower is better.
    """
    known = [i for i, pool in enumerate(job.pools) if pool.rank is not None]
    best, best_loss, left = start, loss(start), MOST_MOVES
    moved = max([1, *(job.pools[i].most_workers // 2 for i in known)])
    while moved:
        better = True
        while better and left:
            better = False
            for change in _moves(known, moved):
                there = tuple(count + change.get(i, 0) for i, count in enumerate(best))
                if not left or not _allows(job, there):
                    continue
                left -= 1
                found = loss(there)
                if found < best_loss * (1 - 1e-9) if best_loss > 0 else found < best_loss * (1 + 1e-9):
                    best, best_loss, better = there, found, True
        moved //= 2
    return best


def _moves(known: Sequence[int], moved: int) -> Iterator[dict[int, int]]:
    for i in known:
        yield {i: moved}
        yield {i: -moved}
    for giver, taker in itertools.permutations(known, 2):
        yield {giver: -moved, taker: moved}


def _allows(job: JobInput, workers: Sequence[int]) -> bool:
    """Return whether the job's limits allow these workers."""
    if not job.least_workers <= sum(workers) <= job.most_workers:
        return False
    return all(p.least_workers <= n <= p.most_workers for p, n in zip(job.pools, workers, strict=True))


def _allowed(limits: Sequence[range], least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the counts within limits whose sum is between ``least`` and ``most``; no time is spent on others."""
    if not limits:
        if least <= 0 <= most:
            yield ()
        return
    fewest, largest = sum(own[0] for own in limits[1:]), sum(own[-1] for own in limits[1:])
    first = limits[0]
    for count in range(max(first[0], least - largest), min(first[-1], most - fewest) + 1):
        for rest in _allowed(limits[1:], least - count, most - count):
            yield (count, *rest)


def _fewer(job: JobInput) -> Iterator[tuple[int, ...]]:
    """Return fewer counts, whatever their sum."""
    ranges: list[list[int]] = []
    for wanted in (_halved_counts, _extreme_counts):
        ranges = [wanted(pool) if pool.rank is not None else [0] for pool in job.pools]
        if math.prod(map(len, ranges)) <= MAX_CANDIDATES:
            return itertools.product(*ranges)
    return _without_or_only_each_pool(ranges)


def _all_counts(pool: PoolInput) -> range:
    return range(pool.least_workers, pool.most_workers + 1)


def _halved_counts(pool: PoolInput) -> list[int]:
    halves = {pool.most_workers >> shift for shift in range(pool.most_workers.bit_length() + 1)}
    return sorted({pool.least_workers, *(n for n in halves if n > pool.least_workers)})


def _extreme_counts(pool: PoolInput) -> list[int]:
    return sorted({pool.least_workers, pool.most_workers})


def _without_or_only_each_pool(ranges: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    least, most = [values[0] for values in ranges], [values[-1] for values in ranges]
    yield tuple(most)
    for index in range(len(ranges)):
        yield (*most[:index], least[index], *most[index + 1 :])
        yield (*least[:index], most[index], *least[index + 1 :])
