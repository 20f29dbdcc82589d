"""A good joint choice of options where there are too many for branch and bound.

Jobs are admitted in order: a job never waits for one that comes later, and no job is stopped for a later one, but a
running job may shrink to its minimum to let another one run. Among equal admissions the sum of scores counts. Scores
are logarithms of rates, so the sum is the proportionally fair one (Nash). The same input always gives
the same output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from heterotrain_planner.allocate.admission import admit
from heterotrain_planner.allocate.candidate import EPSILON, Candidate, Choice, difference
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.joint_sharing import share_jointly
from heterotrain_planner.allocate.prices import Prices, find_prices
from heterotrain_planner.allocate.value import Option

_ROUNDS = 4
"""Most rounds of improvement; a choice that no longer changes ends them earlier."""


def search(candidates: Sequence[Candidate], capacity: PoolCapacity) -> Choice:
    """Return a good choice: the better one of two starts, then improved jointly in small groups of jobs.

    One start keeps what running jobs have, the other one places all jobs by the prices of the pools.
    """
    kept = _improve(candidates, capacity, admit(candidates, capacity, keep_running=True))
    prices = find_prices(candidates, kept, capacity)
    by_price = admit(candidates, capacity, keep_running=False, trial_order=prices.smallest_first)
    best = max(kept, _improve(candidates, capacity, by_price), key=rank)
    return _improve(candidates, capacity, best, prices)


def search_from(candidates: Sequence[Candidate], capacity: PoolCapacity, start: Choice) -> Choice:
    """Return a choice at least as good as the start, which has to fit."""
    return max(start, _improve(candidates, capacity, start, find_prices(candidates, start, capacity)), key=rank)


def rank(choice: Choice) -> tuple[tuple[bool, ...], float]:
    """Return the sort key of choices: which jobs are admitted, in order, then the sum of scores."""
    return tuple(option is not None for option in choice), sum(option.score for option in choice if option is not None)


def _improve(
    candidates: Sequence[Candidate],
    capacity: PoolCapacity,
    start: Sequence[Option | None],
    prices: Prices | None = None,
) -> Choice:
    """Return the start after workers were added, single jobs changed options and groups shared, until nothing changes.

    Args:
        candidates: the jobs.
        capacity: of the pools.
        start: their options, which together fit.
        prices: show which groups of jobs are worth a look; ``None`` skips groups.
    """
    chosen = list(start)
    occupancy = Occupancy(capacity)
    for candidate, option in zip(candidates, chosen, strict=True):
        occupancy.add(candidate.need(option))
    tables = [candidate.by_counts for candidate in candidates]
    for _ in range(_ROUNDS):
        before = tuple(chosen)
        if prices is not None:
            share_jointly(candidates, occupancy, chosen, prices)
            if tuple(chosen) == before:
                break
        _add_workers(candidates, tables, occupancy, chosen)
        _take_best_options(candidates, occupancy, chosen)
        if tuple(chosen) == before:
            break
    return tuple(chosen)


def _add_workers(
    candidates: Sequence[Candidate],
    tables: Sequence[Mapping[tuple[int, ...], Option]],
    occupancy: Occupancy,
    chosen: list[Option | None],
) -> None:
    """Give one worker at a time to the job with the greatest gain, per part of a node."""
    gains: list[tuple[float, int, Option]] = []

    def push_best(i: int) -> None:
        best = _best_step(candidates[i], tables[i], occupancy, chosen[i])
        if best is not None:
            heappush(gains, (-best[0], i, best[1]))

    for i in range(len(candidates)):
        push_best(i)
    while gains:
        _, i, option = heappop(gains)
        step = difference(candidates[i], chosen[i], option)
        if occupancy.fits(step):
            occupancy.add(step)
            chosen[i] = option
        push_best(i)  # meanwhile other jobs may have taken the capacity for the best step


def _best_step(
    candidate: Candidate, table: Mapping[tuple[int, ...], Option], occupancy: Occupancy, now: Option | None
) -> tuple[float, Option] | None:
    """Return the best addition of one worker that fits, as (gain per part of a node, option)."""
    if now is None:
        return None
    best: tuple[float, Option] | None = None
    for index, job_pool in enumerate(candidate.job.pools):
        counts = (*now.counts[:index], now.counts[index] + 1, *now.counts[index + 1 :])
        option = table.get(counts)
        if option is None or option.score <= now.score + EPSILON:
            continue
        gain = (option.score - now.score) * occupancy.capacity.slots_per_node(job_pool.pool, job_pool.size)
        if (best is None or gain > best[0] + EPSILON) and occupancy.fits(difference(candidate, now, option)):
            best = (gain, option)
    return best


def _take_best_options(candidates: Sequence[Candidate], occupancy: Occupancy, chosen: list[Option | None]) -> None:
    """Let each job in order take its best option that fits next to the other jobs' workers."""
    for i, candidate in enumerate(candidates):
        now = chosen[i]
        occupancy.add(candidate.freed(now))
        most = [occupancy.free_slots(each.pool, each.size, each.max_workers) for each in candidate.job.pools]
        if candidate.options and any(most):
            counts_OP, score_O = candidate.arrays
            least = -np.inf if now is None else now.score + EPSILON
            better = np.flatnonzero((score_O > least) & (counts_OP <= np.array(most)).all(axis=1))
            for k in better.tolist():  # options come best first
                option = candidate.options[k]
                if occupancy.fits(candidate.need(option)):
                    chosen[i] = option
                    break
        occupancy.add(candidate.need(chosen[i]))
