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
from typing import NamedTuple

from heterotrain_planner.allocate.candidate import Candidate
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import Size
from heterotrain_planner.allocate.value import Option


class WorkerSpan(NamedTuple):
    """The least and the most workers of a job over all its options.

    Attributes:
        sizes: the need of one worker in each of its pools.
        lowest, highest: of each pool, in the same order.
        least: over all pools.
        once: whether it uses each pool once only; otherwise there are no chains.
    """

    sizes: Mapping[str, Size]
    lowest: Sequence[int]
    highest: Sequence[int]
    least: int
    once: bool


def span_of(candidate: Candidate) -> WorkerSpan:
    """Return the span of a job that has options."""
    counts_OP, _ = candidate.arrays
    sizes = {job_pool.pool: job_pool.size for job_pool in candidate.job.pools}
    return WorkerSpan(
        sizes,
        counts_OP.min(axis=0).tolist(),
        counts_OP.max(axis=0).tolist(),
        int(counts_OP.sum(axis=1).min()),
        len(sizes) == len(candidate.job.pools),
    )


class _Workers:
    """The workers of all jobs that run, and of one more, while chains are sought.

    Attributes:
        moved: numbers of workers of the jobs whose workers have changed, in the order of their pools.
        free: free slots of each pool.
        holders: by pool, the jobs that may have workers there, each with the pool's position in its list, in order.
    """

    def __init__(self, chosen: Sequence[Option | None], new: int, spans: Mapping[int, WorkerSpan]) -> None:
        """Take the options of jobs that run, and the position of the job that does not."""
        self._chosen, self._new, self._spans = chosen, new, spans
        self.moved: dict[int, list[int]] = {new: [0] * len(spans[new].sizes)}
        self.free: dict[str, int] = {}
        self.holders: dict[str, list[tuple[int, int]]] = {}

    def count_free(self, capacity: PoolCapacity) -> bool:
        """Note free slots and holders; return whether each pool has workers of one size, of a job once only."""
        sizes = dict(self._spans[self._new].sizes)
        used = dict.fromkeys(sizes, 0)
        if not self._spans[self._new].once:
            return False
        for j, option in enumerate(self._chosen):
            if option is None or j == self._new:
                continue
            if not self._spans[j].once:
                return False
            for place, ((pool, size), count) in enumerate(
                zip(self._spans[j].sizes.items(), option.counts, strict=True)
            ):
                if sizes.setdefault(pool, size) != size:
                    return False
                used[pool] = used.get(pool, 0) + count
                self.holders.setdefault(pool, []).append((j, place))
        self.free = {pool: capacity.slots(pool, size) - used[pool] for pool, size in sizes.items()}
        return True

    def counts(self, j: int) -> Sequence[int]:
        """Return a job's numbers of workers, in the order of its pools."""
        if j in self.moved:
            return self.moved[j]
        option = self._chosen[j]
        return () if option is None else option.counts

    def add(self, j: int, pool: str, count: int) -> None:
        """Give a job workers in one of its pools; a negative count takes them."""
        if j not in self.moved:
            self.moved[j] = list(self.counts(j))
        self.moved[j][list(self._spans[j].sizes).index(pool)] += count

    def place_one(self, start: str) -> bool:
        """Give the new job a worker in ``start``, by the shortest chain; return whether there is one."""
        came_from: dict[str, tuple[str, int] | None] = {start: None}
        waiting = deque([start])
        given_up: tuple[str, int] | None = None
        end: str | None = None
        while waiting and end is None:
            pool = waiting.popleft()
            if self.free[pool] > 0:
                end = pool
                break
            for j, place in self.holders.get(pool, ()):
                if given_up is not None and len(came_from) == len(self.free):
                    break  # all pools are reached
                counts, span = self.counts(j), self._spans[j]
                if counts[place] <= span.lowest[place]:
                    continue
                if given_up is None and sum(counts) > span.least:
                    given_up = (pool, j)
                for other, count, most in zip(span.sizes, counts, span.highest, strict=True):
                    if count < most and other not in came_from:
                        came_from[other] = (pool, j)
                        waiting.append(other)
        if end is not None:
            self.free[end] -= 1
        elif given_up is not None:
            end, j = given_up
            self.add(j, end, -1)
        else:
            return False
        while (step := came_from[end]) is not None:
            before, j = step
            self.add(j, end, 1)
            self.add(j, before, -1)
            end = before
        self.add(self._new, start, 1)
        return True


def with_chains(
    candidates: Sequence[Candidate],
    capacity: PoolCapacity,
    chosen: Sequence[Option | None],
    new: int,
    spans: dict[int, WorkerSpan],
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
    for j, now in enumerate(chosen):
        if j not in spans and (now is not None or j == new):
            spans[j] = span_of(candidates[j])
    workers, span = _Workers(chosen, new, spans), spans[new]
    if not workers.count_free(capacity):
        return None
    forced = [pool for pool, lowest in zip(span.sizes, span.lowest, strict=True) for _ in range(lowest)]
    for unit in range(max(span.least, len(forced))):
        own = zip(span.sizes, workers.counts(new), span.highest, strict=True)
        starts = forced[unit : unit + 1] or [pool for pool, count, most in own if count < most]
        if not any(workers.place_one(start) for start in starts):
            return None
    # Each pool has workers of one size, and no more than its slots: so all of them fit.
    found = list(chosen)
    for j, counts in workers.moved.items():
        option = candidates[j].by_counts.get(tuple(counts))
        if option is None:
            return None
        found[j] = option
    return found
