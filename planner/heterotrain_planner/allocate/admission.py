"""Which jobs run: in order of admission, each job takes the first of its options that fits, smaller ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import le

from heterotrain_planner.allocate.candidate import Candidate, difference
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.chains import WorkerSpan, with_chains
from heterotrain_planner.allocate.value import Option

_ALTERNATIVES = 16
"""Options of another job that are tried to make space for a job that does not fit."""
_MOST_MOVES = 1000
"""Such trials over all jobs: bounds the time where many jobs do not fit."""
_MOST_VISITS = 40_000
"""Jobs that are visited for such trials, over all jobs."""


TrialOrder = Callable[[Candidate], Iterable[Option]]
"""Returns a job's options in the order in which they are tried."""


def smallest_first(candidate: Candidate) -> Iterable[Option]:
    """Return the job's options with the fewest workers first."""
    return candidate.smallest_first


def admit(
    candidates: Sequence[Candidate],
    capacity: PoolCapacity,
    *,
    keep_running: bool,
    trial_order: TrialOrder = smallest_first,
) -> list[Option | None]:
    """Return each job's first option that fits, in order of admission; ``None`` for a job that has to wait.

    Args:
        candidates: the jobs.
        capacity: of the pools.
        keep_running: whether running jobs keep their workers before any job is placed.
        trial_order: the order in which a job's options are tried.
    """
    occupancy = Occupancy(capacity)
    chosen: list[Option | None] = [None] * len(candidates)
    if keep_running:
        for i, candidate in enumerate(candidates):
            current = tuple(candidate.job.current.get(job_pool.key, 0) for job_pool in candidate.job.pools)
            option = candidate.by_counts.get(current)
            if option is not None and occupancy.fits(candidate.need(option)):
                chosen[i] = option
                occupancy.add(candidate.need(option))
    moves, visits = _MOST_MOVES, _MOST_VISITS
    spans: dict[int, WorkerSpan] = {}
    for i in range(len(candidates)):
        if chosen[i] is None and not _place(candidates, occupancy, chosen, i, trial_order) and visits > 0:
            moves -= _place_by_moving_one(candidates, occupancy, chosen, i, trial_order=trial_order, most_moves=moves)
            visits -= len(candidates)
        if chosen[i] is None and visits > 0:
            visits -= len(candidates)
            rearranged = with_chains(candidates, capacity, chosen, i, spans)
            if rearranged is not None:
                for candidate, before, after in zip(candidates, chosen, rearranged, strict=True):
                    if before is not after:
                        occupancy.add(difference(candidate, before, after))
                chosen = rearranged
    return chosen


def _place(
    candidates: Sequence[Candidate],
    occupancy: Occupancy,
    chosen: list[Option | None],
    i: int,
    trial_order: TrialOrder,
) -> bool:
    """Give the job its first option that fits; return whether there is one."""
    candidate = candidates[i]
    most = [occupancy.free_slots(each.pool, each.size, each.max_workers) for each in candidate.job.pools]
    for option in trial_order(candidate) if any(most) else ():
        if not all(map(le, option.counts, most)):
            continue
        need = candidate.need(option)
        if occupancy.fits(need):
            occupancy.add(need)
            chosen[i] = option
            return True
    return False


def _place_by_moving_one(
    candidates: Sequence[Candidate],
    occupancy: Occupancy,
    chosen: list[Option | None],
    i: int,
    *,
    trial_order: TrialOrder,
    most_moves: int,
) -> int:
    """Give the job its first option that fits once one other job takes another option; the latest job moves first.

    Return the number of options tried for other jobs.
    """
    moves = 0
    if not candidates[i].options:
        return moves
    pools = {job_pool.pool for job_pool in candidates[i].job.pools}
    for j in range(len(candidates) - 1, -1, -1):
        now = chosen[j]
        if now is None or j == i or pools.isdisjoint(pool for pool, _ in candidates[j].need(now)):
            continue
        occupancy.add(candidates[j].freed(now))
        for other in islice(trial_order(candidates[j]), _ALTERNATIVES):
            need = candidates[j].need(other)
            if moves >= most_moves or not occupancy.fits(need):
                continue
            moves += 1
            occupancy.add(need)
            chosen[j] = other
            if _place(candidates, occupancy, chosen, i, trial_order):
                return moves
            occupancy.add(candidates[j].freed(other))
        chosen[j] = now
        occupancy.add(candidates[j].need(now))
        if moves >= most_moves:
            break
    return moves
