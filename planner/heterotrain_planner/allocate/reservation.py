"""Nodes that are kept free for a job that has waited long, so that later jobs never make it wait indefinitely.

Running jobs are not stopped, and small jobs fit where a gang does not. Without a rule, a stream of small jobs would
therefore keep a gang waiting for ever. The first job in the order of admission that has waited ``RESERVE_AFTER_S`` gets
a reservation, as in batch schedulers with backfilling (Lifka 1995, EASY). No estimate of run times is needed:

- A job behind it starts only if one of its options, the *footprint*, fits on the empty pools next to one option of the
  waiting job and the footprints of all jobs behind it that run.
- Until the waiting job starts, jobs behind it that run keep their footprints. They may have more workers, and return
  them.

So once the jobs that ran before the reservation have ended, the waiting job fits: its wait is bounded by their run
times, whatever comes later. docs/mathematics.md has the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from heterotrain_planner.allocate.candidate import Candidate, Choice
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.fair_share import runs
from heterotrain_planner.allocate.problem import JobDemand
from heterotrain_planner.allocate.value import Option

RESERVE_AFTER_S = 600.0
"""Seconds that a job waits before nodes are kept for it: time to start nodes on demand, and to let short jobs pass."""
_ALTERNATIVES = 16
"""Options of one job that are tried."""
_MOST_TRIALS = 5000
"""Options that are tried for one reservation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What jobs behind a waiting job may do until it starts.

    Attributes:
        holder: the waiting job.
        footprints: workers, by ``JobPool.key``, that jobs behind it keep; running ones, and those that may start.
        excluded: keys of the jobs behind it that may not start.
    """

    holder: JobDemand
    footprints: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()

    def allows(self, candidates: Sequence[Candidate], choice: Choice) -> bool:
        """Return whether a choice leaves the waiting job its nodes."""
        for candidate, option in zip(candidates, choice, strict=True):
            if option is None:
                continue
            least = self.footprints.get(candidate.job.key, {})
            keys = (job_pool.key for job_pool in candidate.job.pools)
            if candidate.job.key in self.excluded or any(
                count < least.get(key, 0) for key, count in zip(keys, option.counts, strict=True)
            ):
                return False
        return True


def reserve(candidates: Sequence[Candidate], choice: Choice, capacity: PoolCapacity) -> Reservation | None:
    """Return the reservation of the first job that waits too long in this choice, ``None`` where no job does.

    Args:
        candidates: the jobs, in the order of admission.
        choice: their options without any reservation.
        capacity: of the pools.
    """
    pairs = list(zip(candidates, choice, strict=True))
    holder = next((c for c, o in pairs if o is None and c.options and c.job.waited_s >= RESERVE_AFTER_S), None)
    if holder is None:
        return None
    wanted = {job_pool.pool for job_pool in holder.job.pools}
    behind = {
        candidate.job.key: candidate
        for candidate in candidates
        if _comes_after(candidate.job, holder.job) and not wanted.isdisjoint(each.pool for each in candidate.job.pools)
    }
    waiting = [candidate for candidate in behind.values() if not runs(candidate.job)]
    going_on = {c.job.key: option for c, option in pairs if option is not None and runs(c.job)}
    # A job before the holder that starts now may need nodes of running jobs, so these keep what the choice leaves them.
    others_start = any(o is not None and not runs(c.job) and not _comes_after(c.job, holder.job) for c, o in pairs)
    menus = {
        c.job.key: _possible_footprints(c, going_on[c.job.key].counts if others_start else _current(c.job))
        for c in candidates
        if c.job.key in going_on
    }

    # 1. Find an option of the waiting job next to footprints of all jobs behind it that run.
    occupancy = Occupancy(capacity)
    running = [candidate for key, candidate in behind.items() if key in going_on]
    first = list(islice(holder.smallest_first, _ALTERNATIVES))
    found = _fitting([holder, *running], [first, *(menus[candidate.job.key] for candidate in running)], occupancy)
    if found is None:
        # Some of them started before there was a reservation; until they end, no further job starts behind it.
        return Reservation(holder=holder.job, excluded=frozenset(candidate.job.key for candidate in waiting))
    footprints = {c.job.key: _by_key(c, option) for c, option in zip(running, found[1:], strict=True)}

    # 2. Add jobs before it that run and can go on beside these, so that it does not have to wait for them as well.
    for candidate in candidates:
        if candidate.job.key in going_on and candidate.job.key not in behind:
            menu = menus[candidate.job.key]
            occupancy.add(candidate.need(next((o for o in menu if occupancy.fits(candidate.need(o))), None)))

    # 3. Let jobs behind it start that fit beside all of these.
    excluded = set()
    for candidate in waiting:
        option = next((each for each in candidate.smallest_first if occupancy.fits(candidate.need(each))), None)
        if option is None:
            excluded.add(candidate.job.key)
        else:
            occupancy.add(candidate.need(option))
            footprints[candidate.job.key] = _by_key(candidate, option)
    return Reservation(holder=holder.job, footprints=footprints, excluded=frozenset(excluded))


def _current(job: JobDemand) -> tuple[int, ...]:
    return tuple(job.current.get(job_pool.key, 0) for job_pool in job.pools)


def _comes_after(job: JobDemand, holder: JobDemand) -> bool:
    """Return whether a job would be admitted after the holder if neither ran."""
    return (-job.weight, job.arrived_s, job.key) > (-holder.weight, holder.arrived_s, holder.key)


def _possible_footprints(candidate: Candidate, most: Sequence[int]) -> list[Option]:
    """Return the smallest options within these numbers of workers; any options where none is."""
    within = (
        option
        for option in candidate.smallest_first
        if all(count <= limit for count, limit in zip(option.counts, most, strict=True))
    )
    return list(islice(within, _ALTERNATIVES)) or list(islice(candidate.smallest_first, _ALTERNATIVES))


def _fitting(
    candidates: Sequence[Candidate], menus: Sequence[Sequence[Option]], occupancy: Occupancy
) -> list[Option] | None:
    """Place one option of each menu, so that all fit together; ``None``, with nothing placed, where none was found."""
    chosen: list[Option] = []
    tries: list[Iterator[Option]] = [iter(menus[0])]
    trials = 0
    while tries and trials < _MOST_TRIALS:
        candidate = candidates[len(chosen)]
        for option in tries[-1]:
            trials += 1
            if occupancy.fits(candidate.need(option)):
                occupancy.add(candidate.need(option))
                chosen.append(option)
                break
        else:
            tries.pop()
            if chosen:
                occupancy.add(candidates[len(chosen) - 1].freed(chosen.pop()))
            continue
        if len(chosen) == len(candidates):
            return chosen
        tries.append(iter(menus[len(chosen)]))
    while chosen:
        occupancy.add(candidates[len(chosen) - 1].freed(chosen.pop()))
    return None


def _by_key(candidate: Candidate, option: Option) -> dict[str, int]:
    return {job_pool.key: n for job_pool, n in zip(candidate.job.pools, option.counts, strict=True) if n}
