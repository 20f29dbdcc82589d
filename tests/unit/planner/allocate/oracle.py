"""Instances of allocations, and what their best allocation is: by all combinations, or by scipy's integer programme."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.candidate import Candidate, Choice
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Objective, Pool, Proposal, Size
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


def contending_jobs(seed: int, *, jobs: int, pools: int, nodes: int) -> tuple[list[Pool], list[JobDemand]]:
    """Return jobs of every objective, mostly running, with gangs, prices, deadlines and pauses; one worker per node."""
    rng = random.Random(seed)
    names = [f"p{i}" for i in range(pools)]
    found = [Pool(name=name, nodes=(1,) * rng.randint(nodes // 2, nodes), spot=rng.random() < 0.4) for name in names]
    occupancy = Occupancy(PoolCapacity(found))
    demands = []
    for j in range(jobs):
        job_pools = tuple(
            JobPool(
                pool=name,
                max_workers=rng.randint(2, 6),
                price_per_hour=rng.choice([0.3, 1.0, 3.0]),
                member=a_speed(rng.choice([200, 400, 800])),
            )
            for name in rng.sample(names, rng.randint(1, 3))
        )
        current = {}
        for job_pool in job_pools if rng.random() < 0.7 else ():
            current[job_pool.pool] = rng.randint(
                0, min(4, occupancy.free_slots(job_pool.pool, 1, job_pool.max_workers))
            )
            occupancy.add({(job_pool.pool, 1): current[job_pool.pool]})
        least = rng.choice([1, 1, 2, 3])
        demands.append(
            JobDemand(
                key=f"j{j:02d}",
                pools=job_pools,
                min_workers=least,
                max_workers=rng.randint(least + 1, 8),
                batch_samples=rng.choice([64, 256, 1024]),
                communication=CommunicationTime(overlapped_s=0.05, last_bucket_s=rng.choice([0.0, 0.02, 0.2])),
                communication_members=3,
                objective=rng.choice(list(Objective)),
                remaining_samples=rng.choice([None, 1e5, 1e6, 1e7]),
                deadline_s=rng.choice([300.0, 1800.0, 7200.0]),
                pause_s=rng.choice([2.0, 30.0, 300.0]),
                weight=rng.choice([1.0, 1.0, 2.0]),
                arrived_s=float(j),
                current=current,
            )
        )
    return found, demands


def a_speed(per_s: float) -> SplitMember:
    """Return a rank of so many samples per second."""
    third = 1 / per_s / 3
    return SplitMember(
        compute=ComputeTime(per_sample_s=third, fixed_s=0.02, backward_per_sample_s=2 * third, backward_fixed_s=0.01)
    )


def tight(seed: int) -> tuple[list[Pool], list[JobDemand]]:
    """Return ten kinds of ten jobs in three of ten pools each, with barely more nodes than jobs; no job runs yet."""
    rng = random.Random(seed)
    names = [f"p{i}" for i in range(10)]
    pools = [Pool(name=name, nodes=(1,) * rng.randint(10, 14)) for name in names]
    demands = []
    for kind in range(10):
        job_pools = tuple(
            JobPool(pool=name, max_workers=8, member=a_speed(rng.uniform(100, 1000))) for name in rng.sample(names, 3)
        )
        demands += [
            JobDemand(key=f"{kind}-{j}", pools=job_pools, max_workers=8, batch_samples=512, arrived_s=float(j))
            for j in range(10)
        ]
    return pools, demands


def the_best(candidates: Sequence[Candidate], pools: Sequence[Pool], running: Sequence[bool]) -> float:
    """Return the best sum of scores of these jobs, one option each, no pool with more workers than nodes."""
    row_of = {pool.name: row for row, pool in enumerate(pools)}
    limit = [float(len(pool.usable)) for pool in pools]
    entries = []
    costs: list[float] = []
    for candidate, runs in zip(candidates, running, strict=True):
        for option in candidate.options if runs else ():
            entries += [(row_of[pool], len(costs), count) for (pool, _), count in candidate.need(option).items()]
            entries.append((len(limit), len(costs), 1))
            costs.append(-option.score)
        limit += [1.0] if runs else []
    rows, columns, values = zip(*entries, strict=True)
    least = [0.0] * len(pools) + [1.0] * (len(limit) - len(pools))
    solved = milp(
        np.array(costs),
        constraints=LinearConstraint(
            csr_array((values, (rows, columns)), shape=(len(limit), len(costs))), least, limit
        ),
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-5},
    )
    assert solved.success, solved.message
    return -float(solved.fun)


def rank(choice: Choice) -> tuple[tuple[bool, ...], float]:
    """Return the sort key of choices: which jobs are admitted, in order, then the sum of scores."""
    return tuple(option is not None for option in choice), sum(option.score for option in choice if option is not None)


def chosen(candidates: Sequence[Candidate], proposal: Proposal) -> Choice:
    """Return the options of a proposal."""
    workers = {grant.key: grant.workers for grant in proposal.grants}
    return tuple(
        c.by_counts[tuple(workers[c.job.key].get(each.key, 0) for each in c.job.pools)] if workers[c.job.key] else None
        for c in candidates
    )


def best_of_all(candidates: Sequence[Candidate], pools: Sequence[Pool]) -> tuple[tuple[bool, ...], float]:
    """Return the rank of the best of all combinations of options."""
    best = ((False,) * len(candidates), 0.0)
    for choice in product(*[(None, *candidate.options) for candidate in candidates]):
        occupancy = Occupancy(PoolCapacity(pools))
        need = Counter[tuple[str, Size]]()
        for candidate, option in zip(candidates, choice, strict=True):
            need.update(candidate.need(option))
        if rank(choice) > best and occupancy.fits(need):
            best = rank(choice)
    return best
