"""Room for a job by moving workers of other jobs from pool to pool, in chains.

A job may have to wait although all jobs could run: its pools are full, and the jobs there could only move into pools
that are full, too, but whose jobs could move on. Each of its workers therefore looks for a chain: a worker takes a
slot, the job that had it moves one worker into another of its pools, and so on, until a slot is free or a job gives up
a worker beyond its least number. These are the augmenting paths of a maximum flow (Ford and Fulkerson 1956), so where
workers of a pool have one size and all numbers within limits are options, the job runs if it can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heterotrain_core.allocate.candidate import Candidate
from heterotrain_core.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_core.allocate.problem import Size
from heterotrain_core.allocate.value import Option


class Span(NamedTuple):
    """The least and the most workers of a job over all its options.

    Attributes:
        lowest, highest: of each pool.
        least: over all pools.
    """

    lowest: Mapping[str, int]
    highest: Mapping[str, int]
    least: int


def span_of(candidate: Candidate) -> Span:
    """Return the span of a job that has options."""
    counts_OP, _ = candidate.arrays
    names = [job_pool.pool for job_pool in candidate.job.pools]
    lowest, highest = counts_OP.min(axis=0).tolist(), counts_OP.max(axis=0).tolist()
    return Span(
        dict(zip(names, lowest, strict=True)),
        dict(zip(names, highest, strict=True)),
        int(counts_OP.sum(axis=1).min()),
    )


@dataclass(slots=True)
class _Workers:
    """A job's workers by pool, while chains are sought."""

    counts: dict[str, int]
    span: Span

    @property
    def has_more_than_least(self) -> bool:
        """Whether it could give up a worker."""
        return sum(self.counts.values()) > self.span.least


def with_chains(
    candidates: Sequence[Candidate],
    capacity: PoolCapacity,
    chosen: Sequence[Option | None],
    new: int,
    spans: dict[int, Span],
) -> list[Option | None] | None:
    """Return options for the jobs that run and for one more, which together fit; ``None`` if no chains are found.

    Args:
        candidates: the jobs.
        capacity: of the pools.
        chosen: the options of jobs that run, which together fit.
        new: position of the job that does not run yet.
        spans: of the jobs by position; those that are missing are added.
    """
    if not candidates[new].options:
        return None
    workers = {}
    for j, now in enumerate(chosen):
        if now is None and j != new:
            continue
        if j not in spans:
            spans[j] = span_of(candidates[j])
        names = [job_pool.pool for job_pool in candidates[j].job.pools]
        counts = [0] * len(names) if now is None else now.counts
        workers[j] = _Workers(dict(zip(names, counts, strict=True)), spans[j])
    free = _free_slots(candidates, capacity, workers)
    if free is None:
        return None
    own, span = workers[new], spans[new]
    forced = [pool for pool, lowest in span.lowest.items() for _ in range(lowest)]
    for unit in range(max(span.least, len(forced))):
        starts = forced[unit : unit + 1] or [p for p, most in span.highest.items() if own.counts[p] < most]
        if not any(_place_one(workers, free, new, start) for start in starts):
            return None
    found = list(chosen)
    occupancy = Occupancy(capacity)
    for j, each in workers.items():
        option = candidates[j].by_counts.get(tuple(each.counts.values()))
        if option is None or not occupancy.fits(candidates[j].need(option)):
            return None
        occupancy.add(candidates[j].need(option))
        found[j] = option
    return found


def _free_slots(
    candidates: Sequence[Candidate], capacity: PoolCapacity, workers: dict[int, _Workers]
) -> dict[str, int] | None:
    """Return the free slots of each pool; ``None`` where workers of several sizes, or one job twice, share a pool."""
    sizes: dict[str, Size] = {}
    for j in workers:
        pools = candidates[j].job.pools
        if len({job_pool.pool for job_pool in pools}) < len(pools):
            return None
        for job_pool in pools:
            if sizes.setdefault(job_pool.pool, job_pool.size) != job_pool.size:
                return None
    used = {pool: sum(each.counts.get(pool, 0) for each in workers.values()) for pool in sizes}
    return {pool: capacity.slots(pool, size) - used[pool] for pool, size in sizes.items()}


def _place_one(workers: dict[int, _Workers], free: dict[str, int], new: int, start: str) -> bool:
    """Give the new job a worker in ``start``, by the shortest chain; return whether there is one."""
    came_from: dict[str, tuple[str, int] | None] = {start: None}
    waiting = deque([start])
    given_up: tuple[str, int] | None = None
    end: str | None = None
    while waiting and end is None:
        pool = waiting.popleft()
        if free[pool] > 0:
            end = pool
            break
        for j, each in workers.items():
            if j == new or each.counts.get(pool, 0) <= each.span.lowest.get(pool, 0):
                continue
            if given_up is None and each.has_more_than_least:
                given_up = (pool, j)
            for other, most in each.span.highest.items():
                if other not in came_from and each.counts[other] < most:
                    came_from[other] = (pool, j)
                    waiting.append(other)
    if end is not None:
        free[end] -= 1
    elif given_up is not None:
        end, j = given_up
        workers[j].counts[end] -= 1
    else:
        return False
    while (step := came_from[end]) is not None:
        before, j = step
        workers[j].counts[end] += 1
        workers[j].counts[before] -= 1
        end = before
    workers[new].counts[start] += 1
    return True
