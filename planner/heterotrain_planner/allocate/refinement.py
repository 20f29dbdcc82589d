"""Options close to a choice, for jobs with more possible numbers of workers than are listed.

Thinned options leave gaps: a job that holds nine workers may only be offered eight or ten. So the numbers close to each
job's chosen ones are added, and the choice is made again among all of them, until that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterotrain_planner.allocate.candidate import Candidate
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.value import Option, counts_near, rates, scored_options

_MOST_JOBS = 24
"""Jobs whose close options are listed, in the order of admission: bounds time and memory."""


def with_close_options(
    candidates: Sequence[Candidate], choice: Sequence[Option], capacity: PoolCapacity
) -> list[Candidate]:
    """Return the jobs with the options close to their chosen ones, in addition to their own.

    Args:
        candidates: in the order of admission.
        choice: their options.
        capacity: of the pools.
    """
    found = []
    refined_jobs = 0
    for candidate, option in zip(candidates, choice, strict=True):
        if refined_jobs >= _MOST_JOBS or candidate.complete:
            found.append(candidate)
            continue
        refined_jobs += 1
        found.append(_with_options_near(candidate, option, capacity))
    return found


def _with_options_near(candidate: Candidate, option: Option, capacity: PoolCapacity) -> Candidate:
    slots = [capacity.slots(job_pool.pool, job_pool.size) for job_pool in candidate.job.pools]
    rows_OP = counts_near(candidate.job, slots, option.counts)
    new = [k for k, row in enumerate(map(tuple, rows_OP.tolist())) if row not in candidate.by_counts]
    if not new:
        return candidate
    more_OP = rows_OP[np.array(new)]
    more = scored_options(candidate.job, capacity.pools, counts_OP=more_OP, rate_O=rates(candidate.job, more_OP))
    options = sorted((*candidate.options, *more), key=lambda each: (-each.score, sum(each.counts), each.counts))
    return Candidate(candidate.job, tuple(options), complete=False)
