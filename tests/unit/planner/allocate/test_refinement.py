"""Two jobs with more possible numbers of workers than are listed, against the best pair of all of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate import value
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool
from heterotrain_planner.allocate.propose import build_candidates, propose
from heterotrain_planner.allocate.sharing import SharedNodes, share
from support.repeat import times


def two_jobs(rng: random.Random, nodes: tuple[int, ...], most_workers: int) -> tuple[PoolCapacity, list[JobDemand]]:
    """Return pools of single-slot nodes and two jobs that may use all of them, each with its own speeds."""
    pools = [Pool(name=f"p{i}", nodes=(1,) * count) for i, count in enumerate(nodes)]

    def member() -> SplitMember:
        per_sample_s = 10 ** rng.uniform(-4, -2.3)
        return SplitMember(
            compute=ComputeTime(
                per_sample_s=0.35 * per_sample_s,
                fixed_s=rng.uniform(0.0, 0.02),
                backward_per_sample_s=0.65 * per_sample_s,
                backward_fixed_s=rng.uniform(0.0, 0.02),
            )
        )

    jobs = [
        JobDemand(
            key=f"j{j}",
            pools=tuple(JobPool(pool=pool.name, max_workers=most_workers, member=member()) for pool in pools),
            max_workers=most_workers,
            batch_samples=rng.choice([1024, 4096]),
            communication=CommunicationTime(overlapped_s=0.05, last_bucket_s=0.02, gamma=0.2),
            communication_members=3,
            arrived_s=float(j),
        )
        for j in range(2)
    ]
    return PoolCapacity(pools), jobs


def best_sum(scores: list[tuple[np.ndarray, np.ndarray]], nodes: tuple[int, ...]) -> float:
    """Return the best sum of scores of two options that fit together, by comparing all pairs."""
    (first_AP, score_A), (second_BP, score_B) = scores
    best = -np.inf
    for counts, score in zip(first_AP, score_A, strict=True):
        if score + score_B[0] <= best:
            break  # options come best first
        fits = (second_BP <= np.array(nodes) - counts).all(axis=1)
        if fits.any():
            best = max(best, float(score + score_B[int(fits.argmax())]))
    return best


@pytest.mark.parametrize(
    ("nodes", "most_workers", "cases"),
    [((16, 16, 16), 100, 4), ((12, 13, 12), 100, 4), ((14, 15, 16), 16, 3), ((8, 8, 8, 8), 16, 3), ((43, 44), 100, 3)],
)
def test_two_jobs_share_many_nodes_as_well_as_possible(
    nodes: tuple[int, ...], most_workers: int, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job's rate is within 0.2 % of the best sharing, although most numbers of workers are not listed."""
    rng = random.Random(78)
    for _ in range(times(gate=1, every=cases)):
        capacity, jobs = two_jobs(rng, nodes, most_workers)
        grants = propose(capacity, jobs).grants
        with monkeypatch.context() as unlimited:
            unlimited.setattr(value, "MOST_OPTIONS", 10**6)
            candidates = {c.job.key: c for c in build_candidates(capacity, jobs)}
        chosen = 0.0
        for job, grant in zip(jobs, grants, strict=True):
            counts = tuple(grant.workers.get(each.key, 0) for each in job.pools)
            chosen += candidates[job.key].by_counts[counts].score
        best = best_sum([candidates[job.key].arrays for job in jobs], nodes)
        assert (best - chosen) / 2 <= 0.002


def test_a_choice_of_listed_options_is_the_best_of_these() -> None:
    """Most numbers of workers are not listed, and the proposal says so."""
    capacity, jobs = two_jobs(random.Random(1), (16, 16, 16), 100)
    proposal = propose(capacity, jobs)
    assert not proposal.exact
    assert proposal.most_gain < 1e-3
    assert proposal.reason == "2 of 2 jobs run; no listed allocation for these is better"


@pytest.mark.parametrize(("tenants", "weight"), [(("a", "a"), 4.0), (("a", "b"), 5.0)])
def test_the_most_gain_counts_jobs_by_weight_and_exponent(
    monkeypatch: pytest.MonkeyPatch, tenants: tuple[str, str], weight: float
) -> None:
    """Rates of weights 1 and 3, all larger by a factor, raise the sum by its logarithm four times.

    With tenants of weights 1 and 3, the jobs' exponents are a half and one and a half.
    """

    def far(*arguments: Any) -> SharedNodes:
        found = share(*arguments)
        return found._replace(bound=found.value + 0.4)

    monkeypatch.setattr(f"{propose.__module__}.share", far)
    capacity, jobs = two_jobs(random.Random(3), (4, 4, 4), 4)
    weighted = [
        replace(job, weight=own, tenant=tenant, tenant_weight=1.0 if tenant == "a" else 3.0)
        for job, own, tenant in zip(jobs, (1.0, 3.0), tenants, strict=True)
    ]
    assert propose(capacity, weighted).most_gain == pytest.approx(math.expm1(0.4 / weight))


def test_refined_grants_come_to_rest() -> None:
    """Carried out and proposed again, the grants stay."""
    rng = random.Random(5)
    for _ in range(3):
        capacity, jobs = two_jobs(rng, (14, 16, 15), 100)
        for _ in range(6):
            grants = propose(capacity, jobs).grants
            settled = all(dict(job.current) == dict(g.workers) for job, g in zip(jobs, grants, strict=True))
            if settled:
                break
            jobs = [replace(job, current=g.workers) for job, g in zip(jobs, grants, strict=True)]
        assert settled
