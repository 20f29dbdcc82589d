"""Jobs with very many pools: the options that are compared, and the memory for them, are bounded."""

from __future__ import annotations

import tracemalloc
from itertools import product

import pytest
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Objective, Pool, Proposal
from heterotrain_planner.allocate.propose import build_candidates, propose
from heterotrain_planner.allocate.value import MOST_OPTIONS, possible_counts
from support.repeat import times

MOST_BYTES = 50 * 1024 * 1024


def a_job(
    pools: int, *, each: int, current: dict[str, int] | None = None, objective: Objective = Objective.COST
) -> JobDemand:
    """Return an adaptive job with this many pools of equal size and different prices."""
    job_pools = [JobPool(pool=f"p{i}", max_workers=each, price_per_hour=1.0 + i % 7) for i in range(pools)]
    return JobDemand(
        key="a",
        pools=tuple(job_pools),
        min_workers=2,
        max_workers=1000,
        batch_samples=4096,
        largest_batch_samples=65536,
        noise_samples=5000.0,
        objective=objective,
        current=current or {},
    )


def measured(capacity: PoolCapacity, jobs: list[JobDemand]) -> tuple[Proposal, int]:
    """Return the proposal and the most bytes that it needed."""
    tracemalloc.start()
    try:
        return propose(capacity, jobs), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


SIZES = tuple(product([13, 16, 24, 32], [2, 31, 1000], Objective))


@pytest.mark.parametrize(("pools", "each", "objective"), SIZES[:: times(gate=7, every=1)])
def test_memory_and_options_are_bounded(pools: int, each: int, objective: Objective) -> None:
    """However many pools a job has: some options, but never more than the limit, and little memory."""
    job = a_job(pools, each=each, objective=objective)
    assert 0 < len(possible_counts(job, [each] * pools)[0]) <= MOST_OPTIONS
    capacity = PoolCapacity([Pool(name=f"p{i}", nodes=(1,) * each) for i in range(pools)])
    proposal, most_bytes = measured(capacity, [job])
    assert proposal.grants[0].workers
    assert most_bytes <= MOST_BYTES


def test_a_job_without_selector_among_forty_kinds_of_nodes() -> None:
    """All options are listed, because its few workers leave few combinations."""
    names = [f"k{i}" for i in range(40)]
    teams = [
        JobDemand(
            key=name, pools=(JobPool(pool=name, name="own", max_workers=4),), max_workers=4, batch_samples=64, pause_s=1
        )
        for name in names
    ]
    anywhere = JobDemand(
        key="anywhere",
        pools=tuple(JobPool(pool=name, name="any", max_workers=4) for name in names),
        max_workers=4,
        batch_samples=64,
        arrived_s=1.0,
    )
    capacity = PoolCapacity([Pool(name=name, nodes=(2,)) for name in names])
    options = build_candidates(capacity, [anywhere])[0].options
    assert len(options) == 40 + 40 * 39 // 2  # two workers in one kind, or in each of two kinds
    proposal, most_bytes = measured(capacity, [*teams, anywhere])
    assert all(grant.workers for grant in proposal.grants[:-1])
    assert most_bytes <= MOST_BYTES


def test_current_workers_their_neighbours_and_minimums_stay_options() -> None:
    """Thinning keeps them, gives unique rows within the limits, and is the same each time."""
    current = {f"p{i}": 3 + i for i in range(0, 24, 2)}
    job = a_job(24, each=40, current=current)
    rows = possible_counts(job, [40] * 24)[0].tolist()
    assert rows == possible_counts(job, [40] * 24)[0].tolist()
    assert len({*map(tuple, rows)}) == len(rows) <= MOST_OPTIONS
    assert all(2 <= sum(row) <= 1000 for row in rows)
    now = [current.get(f"p{i}", 0) for i in range(24)]
    assert now in rows
    for i in range(24):
        for step in (-1, 1):
            near = [*now[:i], now[i] + step, *now[i + 1 :]]
            assert near in rows or near[i] < 0
        assert [0] * i + [2] + [0] * (23 - i) in rows
    assert sum(max(rows, key=sum)) == 960


def test_pools_under_one_name_keep_their_common_limits() -> None:
    """Thinned options keep the minimum and the maximum of a pool that is split over node groups."""
    split = [JobPool(pool=f"g{i}", name="any", min_workers=5, max_workers=40) for i in range(20)]
    job = JobDemand(key="a", pools=tuple(split), min_workers=2, max_workers=100, batch_samples=4096)
    rows, _ = possible_counts(job, [8] * 20)
    assert 0 < len(rows) <= MOST_OPTIONS
    assert set(rows.sum(axis=1).tolist()) >= {5, 40}
    assert 5 <= rows.sum(axis=1).min() <= rows.sum(axis=1).max() <= 40


def test_very_many_pools_have_fewer_options() -> None:
    """Options times pools are bounded as well."""
    rows, _ = possible_counts(a_job(640, each=20), [20] * 640)
    assert 0 < rows.size <= 64 * 1024


@pytest.mark.parametrize("objective", [Objective.COST, Objective.THROUGHPUT])
def test_rivals_with_many_pools_share_and_come_to_rest(objective: Objective) -> None:
    """Two jobs that want everything both run, and repeated proposals end at the same workers."""
    capacity = PoolCapacity([Pool(name=f"p{i}", nodes=(1,) * 4) for i in range(18)])
    currents: list[dict[str, int]] = [{}, {}]
    for _ in range(20):
        jobs = [
            JobDemand(
                key=key,
                pools=tuple(JobPool(pool=f"p{i}", max_workers=4, price_per_hour=1.0) for i in range(18)),
                min_workers=2,
                max_workers=72,
                batch_samples=100_000,
                objective=objective,
                current=current,
            )
            for key, current in zip("ab", currents, strict=True)
        ]
        grants = propose(capacity, jobs).grants
        assert all(grant.workers for grant in grants)
        if not any(grant.changed for grant in grants):
            return
        currents = [dict(grant.workers) for grant in grants]
    pytest.fail("the proposals keep changing")
