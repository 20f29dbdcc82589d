"""How many workers each job gets, against scipy's integer programme of all listed options, and what it takes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool
from heterotrain_planner.allocate.propose import build_candidates, propose
from heterotrain_planner.allocate.rate_cache import RateCache
from support.repeat import times
from unit.planner.allocate.oracle import a_speed, chosen, contending_jobs, rank, the_best, tight


def gap(pools: Sequence[Pool], jobs: Sequence[JobDemand]) -> float:
    """Return the mean logarithm by which the rates of running jobs are below the best."""
    candidates = build_candidates(PoolCapacity(pools), jobs)
    runs, score = rank(chosen(candidates, propose(PoolCapacity(pools), jobs)))
    best = the_best(candidates, pools, runs)
    assert score <= best + 1e-4 * max(1.0, abs(best))
    return (best - score) / max(1, sum(runs))


@pytest.mark.parametrize("seed", range(times(gate=20, every=60)))
def test_a_dozen_contending_jobs_share_in_the_best_way(seed: int) -> None:
    """Ten jobs to fourteen that contend for three pools."""
    assert gap(*contending_jobs(seed, jobs=10 + seed % 5, pools=3, nodes=14)) < 1e-4


@pytest.mark.parametrize("seed", range(times(gate=4, every=8)))
def test_fifty_contending_jobs_share_in_the_best_way(seed: int) -> None:
    assert gap(*contending_jobs(seed, jobs=50, pools=6, nodes=40)) < 1e-4


@pytest.mark.parametrize("seed", range(times(gate=1, every=4)))
def test_barely_more_nodes_than_jobs(seed: int) -> None:
    """A hundred jobs on some 120 nodes, where the choice of pools matters."""
    assert gap(*tight(seed)) < 2e-4


@pytest.mark.parametrize("seed", range(times(gate=1, every=3)))
def test_two_hundred_contending_jobs_share_in_the_best_way(seed: int) -> None:
    assert gap(*contending_jobs(seed, jobs=200, pools=10, nodes=100)) < 1e-4


def test_proposals_are_stable_once_carried_out() -> None:
    """Asking again after a proposal was carried out changes nothing, with deadlines, prices and pauses as well."""
    groups_of_jobs = [
        contending_jobs(seed, jobs=13 + seed % 5, pools=3, nodes=16) for seed in range(30, times(gate=40, every=60))
    ]
    for pools, jobs in (*groups_of_jobs, *map(tight, range(times(gate=1, every=2)))):
        proposal = propose(PoolCapacity(pools), jobs)
        assert any(grant.changed for grant in proposal.grants)
        then = [replace(job, current=grant.workers) for job, grant in zip(jobs, proposal.grants, strict=True)]
        assert not any(grant.changed for grant in propose(PoolCapacity(pools), then).grants)


def test_an_allocation_keeps_one_list_of_options_per_job() -> None:
    """Options take most of the memory; while the choice settles, those of the next round replace the last ones."""
    pools = [Pool(name=name, nodes=(1,) * 16) for name in "abc"]
    job_pools = tuple(JobPool(pool=pool.name, max_workers=10, member=a_speed(300.0)) for pool in pools)
    jobs = [
        JobDemand(key=f"j{i}", pools=job_pools, max_workers=30, batch_samples=512, arrived_s=float(i))
        for i in range(12)
    ]
    capacity, cache = PoolCapacity(pools), RateCache()
    propose(capacity, jobs, rate_cache=cache)  # rates are kept anyway
    gc.collect()  # it also empties the lists of freed tuples, whose reuse tracemalloc does not see
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        candidates = build_candidates(capacity, jobs, rate_cache=cache)
        for candidate in candidates:
            candidate.arrays, candidate.by_counts  # noqa: B018  # the tables that an allocation adds
        one_list = tracemalloc.get_traced_memory()[0] - before
        del candidates
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        propose(capacity, jobs, rate_cache=cache)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * one_list
