"""Tenants' shares: neither more jobs nor larger minimums give a tenant more than its weight."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.fair_share import exponents
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool, Proposal
from heterotrain_planner.allocate.propose import build_candidates, propose
from support.repeat import times


def a_job(
    key: str, tenant: str, *, least: int = 1, weight: float = 1.0, now: int = 0, arrived_s: float = 0
) -> JobDemand:
    """Return a job whose rate grows in proportion to its workers."""
    return JobDemand(
        key=key,
        pools=(JobPool(pool="p", max_workers=60),),
        min_workers=least,
        max_workers=60,
        batch_samples=5040,
        tenant=tenant,
        tenant_weight=weight,
        arrived_s=arrived_s,
        current={"p": now} if now else {},
    )


def a_pool(workers: int) -> PoolCapacity:
    return PoolCapacity([Pool(name="p", nodes=(1,) * workers)])


def by_tenant(jobs: list[JobDemand], proposal: Proposal) -> Counter[str]:
    """Return the workers of each tenant."""
    workers: Counter[str] = Counter()
    for job, grant in zip(jobs, proposal.grants, strict=True):
        workers[job.tenant] += sum(grant.workers.values())
    return workers


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_a_tenant_that_splits_its_job_gets_no_more_workers(parts: int) -> None:
    jobs = [a_job("one", "a"), *(a_job(f"part-{i}", "b") for i in range(parts))]
    assert by_tenant(jobs, propose(a_pool(12), jobs)) == {"a": 6, "b": 6}


def test_tenants_get_workers_in_proportion_to_their_weights() -> None:
    jobs = [a_job("a", "a", weight=3.0), a_job("b", "b")]
    assert by_tenant(jobs, propose(a_pool(20), jobs)) == {"a": 15, "b": 5}


def test_a_minimum_above_the_share_takes_no_node_on_which_others_train() -> None:
    jobs = [a_job("trains", "a", now=20), a_job("greedy", "b", least=11, arrived_s=1.0)]
    trains, greedy = propose(a_pool(20), jobs).grants
    assert trains.workers == {"p": 20}
    assert not greedy.workers
    assert "its minimum of 11 workers is more than the 10 of 20 that are left of its namespace's share" in greedy.reason


def test_a_minimum_within_the_share_gets_its_nodes_from_others() -> None:
    jobs = [a_job("trains", "a", now=20), a_job("modest", "b", least=10, arrived_s=1.0)]
    trains, modest = propose(a_pool(20), jobs).grants
    assert (trains.workers, modest.workers) == ({"p": 10}, {"p": 10})


def test_many_jobs_with_small_minimums_do_not_add_up_to_more_than_the_share() -> None:
    jobs = [a_job("trains", "a", now=20), *(a_job(f"part-{i}", "b", least=4, arrived_s=1.0 + i) for i in range(5))]
    proposal = propose(a_pool(20), jobs)
    assert by_tenant(jobs, proposal)["a"] >= 10
    assert [bool(grant.workers) for grant in proposal.grants] == [True, True, True, False, False, False]


def test_a_minimum_above_the_share_is_met_by_nodes_that_nobody_uses() -> None:
    jobs = [a_job("trains", "a", now=5), a_job("large", "b", least=11, arrived_s=1.0)]
    trains, large = propose(a_pool(20), jobs).grants
    assert trains.workers.get("p", 0) >= 5
    assert large.workers.get("p", 0) >= 11


def test_workers_that_wait_for_a_minimum_do_not_make_a_job_count_as_running() -> None:
    jobs = [a_job("trains", "a", now=19), a_job("greedy", "b", least=11, now=1, arrived_s=1.0)]
    trains, greedy = propose(a_pool(20), jobs).grants
    assert trains.workers.get("p", 0) >= 19
    assert not greedy.workers


def test_a_running_job_is_not_stopped_because_another_tenant_arrives() -> None:
    jobs = [a_job("large", "a", least=15, now=20), a_job("new", "b", arrived_s=1.0)]
    large, new = propose(a_pool(20), jobs).grants
    assert large.workers.get("p", 0) >= 15
    assert new.workers


def an_instance(seed: int) -> tuple[PoolCapacity, list[JobDemand]]:
    """Return up to four jobs of up to three tenants on one small pool, some of them running."""
    rng = random.Random(seed)
    capacity = rng.randint(3, 8)
    weights = {tenant: rng.choice([0.5, 1.0, 3.0]) for tenant in "abc"}
    free, jobs = capacity, []
    for number in range(rng.randint(1, 4)):
        tenant, least = rng.choice("abc"), rng.randint(1, 4)
        now = least if rng.random() < 0.4 and least <= free else 0
        free -= now
        job = a_job(f"j{number}", tenant, least=least, weight=weights[tenant], now=now, arrived_s=float(number))
        jobs.append(job)
    return a_pool(capacity), jobs


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_the_proposal_is_the_best_of_all_by_brute_force(seed: int) -> None:
    """Of all numbers of workers that fit: the first admissions, then the greatest weighted product of rates."""
    capacity, jobs = an_instance(seed)
    grants = {grant.key: grant for grant in propose(capacity, jobs).grants}
    taking_part = [job for job in jobs if "namespace's share" not in grants[job.key].reason]
    exponent_of = exponents(taking_part)
    candidates = build_candidates(capacity, [replace(job, exponent=exponent_of[job.key]) for job in taking_part])

    def value(choice: tuple[object, ...]) -> tuple[tuple[bool, ...], float]:
        scores = [getattr(option, "score", 0.0) for option in choice]
        return tuple(option is not None for option in choice), math.fsum(scores)

    best = max(
        value(choice)
        for choice in product(*([None, *candidate.options] for candidate in candidates))
        if _fits(capacity, choice)
    )
    chosen = tuple(
        candidate.by_counts.get((grants[candidate.job.key].workers.get("p", 0),)) for candidate in candidates
    )
    assert value(chosen)[0] == best[0]
    assert value(chosen)[1] == pytest.approx(best[1])


def _fits(capacity: PoolCapacity, choice: tuple[object, ...]) -> bool:
    workers = sum(getattr(option, "counts", (0,))[0] for option in choice)
    return Occupancy(capacity).fits({("p", 1): workers})


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_no_tenant_s_waiting_jobs_push_others_below_their_shares(seed: int) -> None:
    """A tenant that used at most its share before loses workers only down to that share, or to other minimums."""
    capacity, jobs = an_instance(seed)
    grants = {grant.key: grant for grant in propose(capacity, jobs).grants}
    weights = {job.tenant: job.tenant_weight for job in jobs}
    slots = capacity.slots("p", 1)
    for tenant, weight in weights.items():
        running = sum(job.min_workers for job in jobs if job.tenant == tenant and job.current)
        started = sum(
            job.min_workers for job in jobs if job.tenant == tenant and not job.current and grants[job.key].workers
        )
        free = slots - sum(sum(job.current.values()) for job in jobs)
        assert started <= max(0, math.ceil(weight / sum(weights.values()) * slots - 1e-9) - running) + free


def test_a_job_beyond_its_share_that_finds_no_free_node_does_not_divide_its_tenant_s_weight() -> None:
    """Nodes are free for one more job, and the first one takes them: its tenant's weight is then its own at once."""
    jobs = [
        a_job("first", "b", least=2, weight=3.0),
        a_job("second", "b", least=2, weight=3.0, arrived_s=1.0),
        a_job("other", "a", now=1),
    ]
    first, second, other = propose(a_pool(4), jobs).grants
    assert (first.workers, second.workers, other.workers) == ({"p": 3}, {}, {"p": 1})
    assert "namespace's share" in second.reason


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_proposing_again_after_a_proposal_was_carried_out_changes_nothing(seed: int) -> None:
    capacity, jobs = an_instance(seed)
    first = propose(capacity, jobs).grants
    then = [replace(job, current=dict(grant.workers)) for job, grant in zip(jobs, first, strict=True)]
    assert [grant.workers for grant in propose(capacity, then).grants] == [grant.workers for grant in first]


def test_the_jobs_of_a_single_tenant_are_decided_as_before() -> None:
    jobs = [a_job("trains", "a", now=20), a_job("greedy", "a", least=11, arrived_s=1.0)]
    assert propose(a_pool(20), jobs).grants[1].workers
    assert set(exponents(jobs).values()) == {1.0}
