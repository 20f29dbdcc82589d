"""The batch at which an option of an adaptive job is judged, against the best of all whole batches."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance_many
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Objective
from heterotrain_planner.allocate.value import exchange_scale, rates
from support.repeat import times

MOST_BATCHES = 250
"""Batches that are tried, at even distances if there are more."""


def accumulating_job(rng: random.Random) -> JobDemand:
    """Return an adaptive job whose members accumulate, with fixed parts of a micro-batch up to 1.5 times the rest."""
    pools = []
    for i in range(rng.randint(1, 3)):
        per_sample_s = 10 ** rng.uniform(-3.5, -2.2)
        fixed_s = rng.uniform(0.0, 1.5) * per_sample_s * 16
        compute = ComputeTime(
            per_sample_s=0.4 * per_sample_s,
            fixed_s=0.4 * fixed_s,
            backward_per_sample_s=0.6 * per_sample_s,
            backward_fixed_s=0.6 * fixed_s,
        )
        member = SplitMember(
            compute=compute,
            micro_cap_samples=rng.choice([None, 16, 16, 32, 64]),
            cap_samples=rng.choice([None, None, 400]),
        )
        pools.append(JobPool(pool=f"p{i}", max_workers=3, ranks=rng.choice([1, 1, 2]), member=member))
    batch = rng.choice([32, 64, 128])
    return JobDemand(
        key="job",
        pools=tuple(pools),
        max_workers=9,
        batch_samples=batch,
        largest_batch_samples=batch * rng.choice([4, 8, 16]),
        noise_samples=rng.choice([100.0, 500.0, 3000.0]),
        communication=CommunicationTime(overlapped_s=rng.choice([0, 0.02, 0.1]), last_bucket_s=0.005, gamma=0.2),
        communication_members=3,
        objective=Objective.GOODPUT,
    )


def best_goodput(job: JobDemand, workers: list[int]) -> float:
    """Return the goodput of the best whole batch, 0 if none can be shared."""
    members = [
        pool.member
        for pool, count in zip(job.pools, workers, strict=True)
        for _ in range(count * pool.ranks)
        if pool.member is not None
    ]
    scale = float(exchange_scale(job, np.array([len(members)]), np.array([sum(workers)]))[0])
    exchange = replace(
        job.communication,
        overlapped_s=job.communication.overlapped_s * scale,
        last_bucket_s=job.communication.last_bucket_s * scale,
    )
    assert job.largest_batch_samples is not None
    assert job.noise_samples is not None
    largest, phi = job.largest_batch_samples, job.noise_samples
    batches = range(job.batch_samples, largest + 1, max(1, largest // MOST_BATCHES))
    found = zip(batches, balance_many(batches, members, communication=exchange), strict=True)
    return max(
        (
            batch / split.step_s * (phi + job.batch_samples) / (phi + batch)
            for batch, split in found
            if isinstance(split, Split)
        ),
        default=0.0,
    )


def losses(seeds: range, objective: Objective) -> list[float]:
    """Return the parts of the best goodput that are missing in the rates of random options."""
    lost = []
    for seed in seeds:
        rng = random.Random(seed)
        job = replace(accumulating_job(rng), objective=objective)
        rows_OP = np.array([[rng.randint(0, 3) for _ in job.pools] for _ in range(4)])
        rows_OP = rows_OP[rows_OP.sum(axis=1) > 0]
        for workers, rate in zip(rows_OP.tolist(), rates(job, rows_OP).tolist() if len(rows_OP) else [], strict=True):
            best = best_goodput(job, workers)
            if best > 0 and rate > 0:
                lost.append(1 - rate / best)
    return lost


@pytest.mark.parametrize("objective", [Objective.GOODPUT, Objective.COST])
def test_the_batch_is_close_to_the_best_of_all(objective: Objective) -> None:
    """Rates are those of real-valued shares, so whole samples make them up to about 1 % better than any whole batch."""
    seeds = times(gate=6, every=15)
    lost = losses(range(seeds), objective)
    assert len(lost) > 2.5 * seeds
    assert np.mean(lost) < 0.006
    assert max(lost) < 0.06
    assert min(lost) > -0.02
