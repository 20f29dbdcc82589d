"""Three allocators: the operator's, the same without mixed GPU types, and first come, first served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, Pool
from heterotrain_planner.allocate.propose import propose

Grants = Mapping[str, Mapping[str, int]]
"""Workers by job and pool."""
Allocator = Callable[[Sequence[Pool], Sequence[JobDemand]], Grants]


def any_mix(pools: Sequence[Pool], jobs: Sequence[JobDemand]) -> Grants:
    """Return the grants of the operator's allocation: any mix of pools for any job."""
    return {grant.key: grant.workers for grant in propose(PoolCapacity(pools), jobs).grants}


def one_pool_each(pools: Sequence[Pool], jobs: Sequence[JobDemand]) -> Grants:
    """Return grants with one pool for each job, as in schedulers without mixed GPU types (Sia's setting).

    The allocation is the operator's, with one pool for each job. A running job keeps its pool. A waiting one takes the
    pool with its highest rate, given the jobs placed before it.
    """
    placed: list[JobDemand] = []
    for job in sorted(jobs, key=lambda job: (not job.current, job.arrived_s, job.key)):
        holding = [job_pool for job_pool in job.pools if job.current.get(job_pool.pool)]
        trials = [replace(job, pools=(job_pool,)) for job_pool in (holding[:1] or job.pools)]
        rates = [(_granted_rate(pools, [*placed, trial]), -i, trial) for i, trial in enumerate(trials)]
        placed.append(max(rates, key=lambda item: item[:2])[2])
    return {grant.key: grant.workers for grant in propose(PoolCapacity(pools), placed).grants}


def first_come(pools: Sequence[Pool], jobs: Sequence[JobDemand]) -> Grants:
    """Return grants by arrival: running jobs keep their workers, and the first in the queue takes up to its maximum."""
    free = {pool.name: len(pool.usable) for pool in pools}
    grants: dict[str, dict[str, int]] = {}
    for job in jobs:
        if sum(job.current.values()) >= job.min_workers:
            grants[job.key] = {pool: min(count, free.get(pool, 0)) for pool, count in job.current.items()}
            for pool, count in grants[job.key].items():
                free[pool] -= count
    for job in sorted(jobs, key=lambda job: (job.arrived_s, job.key)):
        if job.key in grants:
            continue
        taken: dict[str, int] = {}
        for job_pool in job.pools:
            taken[job_pool.pool] = min(
                free.get(job_pool.pool, 0), job_pool.max_workers, job.max_workers - sum(taken.values())
            )
        if sum(taken.values()) < max(1, job.min_workers):
            break  # no later job overtakes
        grants[job.key] = {pool: count for pool, count in taken.items() if count}
        for pool, count in taken.items():
            free[pool] -= count
    return grants


def _granted_rate(pools: Sequence[Pool], jobs: Sequence[JobDemand]) -> float:
    return propose(PoolCapacity(pools), jobs).grants[-1].rate_per_s
