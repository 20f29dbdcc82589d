"""Which jobs run, against an oracle that decides it by itself, from limits and nodes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, Pool
from heterotrain_planner.allocate.propose import in_order_of_admission, propose
from scipy.optimize import linprog
from unit.planner.allocate.oracle import contending_jobs


def run_together(jobs: Sequence[JobDemand], pools: Sequence[Pool]) -> bool:
    """Return whether all jobs can have their least workers at the same time.

    Workers flow from pools to jobs, with bounds on every edge, so the linear programme has whole solutions.
    """
    edges = [(row, pool.pool, float(pool.max_workers)) for row, job in enumerate(jobs) for pool in job.pools]
    of_jobs = np.array([[float(row == own) for own, _, _ in edges] for row in range(len(jobs))])
    of_pools = np.array([[float(pool.name == name) for _, name, _ in edges] for pool in pools])
    most = [float(job.max_workers) for job in jobs]
    least = [-float(max(1, job.min_workers)) for job in jobs]
    solved = linprog(
        np.zeros(len(edges)),
        A_ub=np.concatenate([of_jobs, -of_jobs, of_pools]),
        b_ub=[*most, *least, *(float(len(pool.usable)) for pool in pools)],
        bounds=[(0.0, limit) for *_, limit in edges],
    )
    assert solved.status in (0, 2), solved.message
    return bool(solved.status == 0)


def admitted(jobs: Sequence[JobDemand], pools: Sequence[Pool]) -> set[str]:
    """Return the jobs that run: in the order of admission, each job that can run beside the ones before it."""
    runs: list[JobDemand] = []
    for job in in_order_of_admission(jobs):
        if run_together([*runs, job], pools):
            runs.append(job)
    return {job.key for job in runs}


@pytest.mark.parametrize("seed", [*range(10), 50, 53, 55, 72, 95, 97, 107, 125])
def test_no_job_waits_that_could_run(seed: int) -> None:
    """Crowds of 14 to 22 jobs of equal weight, many of them gangs, on three pools of at most 10 nodes.

    In the last eight, a job runs only if two others or more move.
    """
    pools, jobs = contending_jobs(seed, jobs=14 + seed % 9, pools=3, nodes=10)
    jobs = [replace(job, weight=1.0) for job in jobs]
    grants = propose(PoolCapacity(pools), jobs).grants
    assert {grant.key for grant in grants if grant.workers} == admitted(jobs, pools)
