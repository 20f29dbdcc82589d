"""Each tenant's share of the nodes, whatever the number and the minimums of its jobs.

A tenant's weight is divided among its jobs: they become exponents of the fair product ``prod(rate ** exponent)``. A
tenant that splits one job into three therefore gets no more nodes. Where rates grow with the workers, the greatest
product gives each job workers in proportion to its exponent (weighted proportional fairness: Kelly, Maulloo and Tan,
1998, "Rate control for communication networks").

Minimums come before the product, so they need a rule of their own. The minimums of a tenant's jobs may take nodes on
which others train only up to the tenant's share. A waiting job beyond that starts on nodes that nobody uses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from heterotrain_planner.allocate.candidate import Candidate
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand

_ROUNDING = 1e-9


def beyond_share(capacity: PoolCapacity, jobs: Sequence[JobDemand]) -> dict[str, str]:
    """Return the waiting jobs whose minimum exceeds what is left of their tenant's share, each with the reason.

    A single tenant has no limit. A share that is a fraction of a worker is rounded up.

    Args:
        capacity: of the pools.
        jobs: in the order of admission.
    """
    weight_of = {job.tenant: job.tenant_weight for job in jobs}
    if len(weight_of) <= 1:
        return {}
    total = sum(weight_of.values())
    used = dict.fromkeys(weight_of, 0.0)
    beyond: dict[str, str] = {}
    for job in sorted(jobs, key=lambda job: not runs(job)):
        reachable, least = _reachable(job, capacity), least_workers(job)
        share = weight_of[job.tenant] / total
        left = math.ceil((share - used[job.tenant]) * reachable - _ROUNDING)
        if not runs(job) and left < least <= reachable:
            beyond[job.key] = (
                f"its minimum of {least} workers is more than the {max(0, left)} of {reachable} that are left of its "
                f"namespace's share ({share:.0%}), and too few nodes are free"
            )
        else:
            used[job.tenant] += least / max(1, reachable)
    return beyond


def starting_on_free_nodes(
    candidates: Sequence[Candidate], capacity: PoolCapacity, beyond: Collection[str]
) -> frozenset[str]:
    """Return the jobs of ``beyond`` that can start on nodes that no other job uses; earlier ones come first."""
    occupancy = Occupancy(capacity)
    for candidate in candidates:
        if candidate.job.key not in beyond:
            for job_pool in candidate.job.pools:
                occupancy.add({(job_pool.pool, job_pool.size): candidate.job.current.get(job_pool.key, 0)})
    found = set()
    for candidate in candidates:
        if candidate.job.key not in beyond:
            continue
        option = next((each for each in candidate.smallest_first if occupancy.fits(candidate.need(each))), None)
        if option is not None:
            occupancy.add(candidate.need(option))
            found.add(candidate.job.key)
    return frozenset(found)


def exponents(jobs: Sequence[JobDemand]) -> dict[str, float]:
    """Return each job's exponent of the fair product: its part of its tenant's weight, 1 on average over the jobs."""
    weight_of = {job.tenant: job.tenant_weight for job in jobs}
    if len(weight_of) <= 1:
        return {job.key: 1.0 for job in jobs}
    count = Counter(job.tenant for job in jobs)
    unit = len(jobs) / sum(weight_of.values())
    return {job.key: weight_of[job.tenant] / count[job.tenant] * unit for job in jobs}


def least_workers(job: JobDemand) -> int:
    """Return with how many workers a job starts at least."""
    by_label = {job_pool.label: job_pool.min_workers for job_pool in job.pools}
    return max(1, job.min_workers, sum(by_label.values()))


def runs(job: JobDemand) -> bool:
    """Return whether a job trains; a job that waits may have some of its workers already."""
    return sum(job.current.values()) >= least_workers(job)


def _reachable(job: JobDemand, capacity: PoolCapacity) -> int:
    """Return how many workers of the job all its pools hold when they are empty."""
    return sum({job_pool.pool: capacity.slots(job_pool.pool, job_pool.size) for job_pool in job.pools}.values())
