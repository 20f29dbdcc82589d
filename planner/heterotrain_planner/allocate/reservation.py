"""Nodes that are kept free for jobs that have waited long, so that later jobs never make them wait indefinitely.

Running jobs are not stopped, and small jobs fit where a gang does not. Without a rule, a stream of small jobs would
therefore keep a gang waiting for ever. The first ``MOST_HOLDERS`` jobs in the order of admission that have waited
``RESERVE_AFTER_S`` get a reservation each, as in batch schedulers with backfilling (Lifka 1995; Mu'alem and Feitelson
2001). Which later jobs may start needs no estimate of run times:

- A job behind a waiting one starts only if both fit on the empty pools together with all jobs behind the waiting one
  that run, and with as many jobs before it as fit beside these.
- Every job may be given its smallest number of workers for that, as it may be when the waiting job starts.

So once the jobs that ran before the reservation and the jobs before it have ended, the waiting job fits, whatever comes
later. Where run times can be predicted, it fits by the earliest time at which the jobs that may still be there leave it
room; later jobs that would exceed that do not start either, so the time holds. docs/mathematics.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heterotrain_planner.allocate.admission import Admission, Counts
from heterotrain_planner.allocate.candidate import Candidate
from heterotrain_planner.allocate.fair_share import runs
from heterotrain_planner.allocate.problem import JobDemand

RESERVE_AFTER_S = 600.0
"""Seconds that a job waits before nodes are kept for it: time to start nodes on demand, and to let short jobs pass."""
MOST_HOLDERS = 16
"""Waiting jobs for which nodes are kept at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservations:
    """What jobs behind waiting ones may do until these start.

    Attributes:
        starts_s: by key of the waiting job, seconds from now by which it fits, as far as run times can be predicted;
            infinite where they cannot.
        excluded: keys of jobs that may not start, each with the waiting job that forbids it.
    """

    starts_s: Mapping[str, float] = field(default_factory=dict)
    excluded: Mapping[str, JobDemand] = field(default_factory=dict)


def reserve(candidates: Sequence[Candidate], admitted: Mapping[int, Counts], admission: Admission) -> Reservations:
    """Return the reservations of the first jobs that wait too long.

    Args:
        candidates: the jobs, in the order of admission.
        admitted: jobs that run or start without any reservation.
        admission: of the same candidates.
    """
    line = sorted(range(len(candidates)), key=lambda i: _turn(candidates[i].job))
    running = [i for i in line if i in admitted and runs(candidates[i].job)]
    starting = [i for i in line if i in admitted and i not in running]
    waiting = [i for i in line if i not in admitted and candidates[i].options]
    holders = waiting[: _last_long(candidates, waiting)]
    over_s = {i: _most_left_s(candidates[i]) for i in line}
    starts_s: dict[int, float] = {}
    excluded: dict[int, int] = {}
    for holder in holders:
        turn = _turn(candidates[holder].job)
        before = [i for i in waiting if i in starts_s]
        # 1. By when does it fit next to what may be there then? A job before it may start at any time.
        ends_s = {i: over_s[i] for i in running if candidates[i].job.weight >= candidates[holder].job.weight}
        ends_s |= {i: over_s[i] for i in starting if _turn(candidates[i].job) < turn}
        ends_s |= {i: starts_s[i] + over_s[i] for i in before}
        starts_s[holder] = _earliest(holder, ends_s, admission)
        # 2. Which jobs behind it leave it room, whenever they end?
        behind = [i for i in line if _turn(candidates[i].job) > turn and not (i in running or i in excluded)]
        behind.sort(key=lambda i: i not in admitted)
        if not behind or candidates[holder].job.waited_s < RESERVE_AFTER_S:
            continue
        there = [holder, *(i for i in running if _turn(candidates[i].job) > turn)]
        still = [i for i, end_s in ends_s.items() if end_s > starts_s[holder]]
        others = [i for i in (*before, *running, *starting) if i not in there and i not in behind]
        others.sort(key=lambda i: i not in still)
        room = admission.first(there, others)
        # Some of them started before there was a reservation; until they end, no further job starts behind it.
        allowed = [] if room is None else _kept(admission.first([*room], behind), behind)
        if math.isfinite(starts_s[holder]):
            allowed = _kept(admission.first([holder, *(i for i in still if i != holder)], allowed), allowed)
        excluded |= {i: holder for i in behind if i not in allowed}
    return Reservations(
        starts_s={
            candidates[i].job.key: start_s
            for i, start_s in starts_s.items()
            if candidates[i].job.waited_s >= RESERVE_AFTER_S
        },
        excluded={candidates[i].job.key: candidates[holder].job for i, holder in excluded.items()},
    )


def _turn(job: JobDemand) -> tuple[float, float, str]:
    """Return the sort key of the order of admission if no job ran."""
    return (-job.weight, job.arrived_s, job.key)


def _last_long(candidates: Sequence[Candidate], waiting: Sequence[int]) -> int:
    """Return how many of the first waiting jobs are before, or are, one that has waited long."""
    long = [n for n, i in enumerate(waiting[:MOST_HOLDERS], 1) if candidates[i].job.waited_s >= RESERVE_AFTER_S]
    return max(long, default=0)


def _kept(chosen: Mapping[int, Counts] | None, jobs: Sequence[int]) -> list[int]:
    return [] if chosen is None else [i for i in jobs if i in chosen]


def _most_left_s(candidate: Candidate) -> float:
    """Return the seconds after which the job has ended with whatever workers it has; infinite where it is unknown."""
    job = candidate.job
    known = job.layouts is not None or any(each.member is not None for each in job.pools)
    if job.remaining_samples is None or not known or not candidate.options:
        return math.inf
    slowest_per_s = min(option.rate_per_s for option in candidate.options) * job.pace
    return job.remaining_samples / slowest_per_s + job.pause_s


def _earliest(holder: int, ends_s: Mapping[int, float], admission: Admission) -> float:
    """Return the seconds after which the holder fits next to the jobs that have not ended by then."""
    times = [0.0, *sorted({end_s for end_s in ends_s.values() if math.isfinite(end_s)})]
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        there = [holder, *(i for i, end_s in ends_s.items() if end_s > times[middle])]
        low, high = (low, middle) if admission.first(there, []) is not None else (middle + 1, high)
    return times[low] if low < len(times) else math.inf
