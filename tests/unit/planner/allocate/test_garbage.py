"""Allocations leave no reference cycles, which the operator may keep for an hour (`engine.responsiveness`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool
from heterotrain_planner.allocate.propose import build_candidates, propose

POOLS = [Pool(name="p", nodes=(4, 4, 2)), Pool(name="q", nodes=(2, 2))]


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Leave cyclic garbage where it is."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def a_job(key: str, per_sample_s: float, **more: object) -> JobDemand:
    """Return a job that may have workers in both pools."""
    member = SplitMember(
        compute=ComputeTime(
            per_sample_s=per_sample_s, fixed_s=0.02, backward_per_sample_s=2 * per_sample_s, backward_fixed_s=0.02
        )
    )
    pools = tuple(JobPool(pool=pool.name, max_workers=4, member=member) for pool in POOLS)
    return JobDemand(key=key, pools=pools, max_workers=6, batch_samples=2048, **more)  # type: ignore[arg-type]  # any field


def test_an_allocation_leaves_no_cycle() -> None:
    jobs = [a_job(f"j{i}", 1e-3 / (i + 1), current={"p": 1}, pause_s=300.0) for i in range(14)]
    gc.collect()
    propose(PoolCapacity(POOLS), jobs)
    assert gc.collect() == 0


def test_the_position_of_each_option_is_found() -> None:
    for candidate in build_candidates(PoolCapacity(POOLS), [a_job(f"j{i}", 1e-3 / (i + 1)) for i in range(3)]):
        assert len(candidate.options) > 3
        assert [candidate.index_of(option.counts) for option in candidate.options] == list(
            range(len(candidate.options))
        )
