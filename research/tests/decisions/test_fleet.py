"""Many jobs: conserved work, grants within capacity, and mixed pools at least as good as single ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from decisions.scenarios import a_workload
from heterotrain_planner.allocate.problem import JobDemand, Pool
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.fleet import Fleet, FleetJob, run_fleet
from heterotrain_simulator.scenario import Change, Group
from heterotrain_simulator.schedulers import Grants, any_mix, first_come, one_pool_each

NETWORK = Network(bytes_per_s=1e12)
WORKLOAD = a_workload()


def a_job(key: str, *, arrived_s: float = 0.0, samples: float = 100_000.0, **changes: int) -> FleetJob:
    """Return a job of a few minutes."""
    fields = {"batch_samples": 400, "max_workers": 6, "min_workers": 1, **changes}
    return FleetJob(key=key, workload=WORKLOAD, samples=samples, arrived_s=arrived_s, **fields)


def a_fleet(*jobs: FleetJob, changes: tuple[Change, ...] = ()) -> Fleet:
    """Return two fast and four slow nodes."""
    groups = (
        Group(pool="fast", gpu="fast", count=2, price_per_hour=4.0),
        Group(pool="slow", gpu="slow", count=4, price_per_hour=1.0),
    )
    return Fleet(groups=groups, spot=frozenset({"slow"}), changes=changes, network=NETWORK, jobs=jobs)


def test_one_job_takes_its_maximum_and_ends_with_its_work() -> None:
    """400 samples on two fast and four slow workers: the true optimum's rate, plus one pause at the start."""
    outcome = run_fleet(a_fleet(a_job("a", arrived_s=10.0)), any_mix)
    # Two fast at b ms + 10 and four slow at 4 b ms + 10: 133 and 33.5 samples, about 144 ms a step.
    assert outcome.finished_s["a"] == pytest.approx(10 + 2 + 250 * 0.1434, rel=0.01)
    assert outcome.waited_s["a"] == 0
    assert outcome.cost == pytest.approx(12 * (outcome.finished_s["a"] - 10) / 3600, rel=1e-6)


def test_grants_never_exceed_the_capacity() -> None:
    """At every call, with nodes and jobs that join and leave."""
    capacity = {"fast": 2, "slow": 4}
    asked: list[dict[str, int]] = []

    def watched(pools: Sequence[Pool], jobs: Sequence[JobDemand]) -> Grants:
        grants = any_mix(pools, jobs)
        there = {pool.name: len(pool.usable) for pool in pools}
        held = {name: sum(g.get(name, 0) for g in grants.values()) for name in there}
        assert all(held[name] <= there[name] for name in there)
        asked.append(there)
        return grants

    changes = (
        Change(pool="slow", at_s=20.0, lost=3),
        Change(pool="fast", at_s=40.0, lost=1),
        Change(pool="slow", at_s=60.0, joined=3),
    )
    jobs = [a_job(f"j{i}", arrived_s=15.0 * i) for i in range(4)]
    outcome = run_fleet(a_fleet(*jobs, changes=changes), watched)
    assert set(outcome.finished_s) == {job.key for job in jobs}
    assert asked[0] == capacity
    assert {"fast": 1, "slow": 1} in asked


def test_the_allocation_learns_the_exchange_from_the_sizes_that_a_job_has_had() -> None:
    """As in the operator: with every number of workers that it trained with, the newest last."""
    asked: list[tuple[int, list[int]]] = []

    def watched(pools: Sequence[Pool], jobs: Sequence[JobDemand]) -> Grants:
        asked.extend((job.communication_members, [each.members for each in job.exchange_seen]) for job in jobs)
        return any_mix(pools, jobs)

    changes = (
        Change(pool="slow", at_s=20.0, lost=3),
        Change(pool="slow", at_s=60.0, joined=2),
        Change(pool="slow", at_s=80.0, lost=1),
    )
    run_fleet(a_fleet(a_job("a", samples=400_000.0), changes=changes), watched)
    assert asked == [(2, [2]), (3, [2, 3]), (3, [2, 3]), (4, [2, 3, 4])]


def test_work_is_conserved() -> None:
    """Samples done per worker-second never exceed the fastest worker's own rate."""
    jobs = [a_job(f"j{i}", arrived_s=5.0 * i) for i in range(3)]
    outcome = run_fleet(a_fleet(*jobs), any_mix)
    assert sum(job.samples for job in jobs) < outcome.worker_s * 1000


def test_a_job_below_its_minimum_waits() -> None:
    """A job with a minimum of three does not run on two, and its waiting time counts."""
    changes = (Change(pool="slow", at_s=0.0, lost=3), Change(pool="slow", at_s=50.0, joined=1))
    gang = a_job("gang", min_workers=4, max_workers=4)
    outcome = run_fleet(a_fleet(gang, changes=changes), any_mix)
    assert outcome.waited_s["gang"] == pytest.approx(50.0)


def test_a_fleet_ends_without_events() -> None:
    """A job without a possible allocation is not among the finished."""
    outcome = run_fleet(a_fleet(a_job("big", min_workers=7, max_workers=8)), any_mix)
    assert outcome.finished_s == {}


def test_mixed_pools_are_at_least_as_good() -> None:
    """The mean time of jobs with any mix of pools is at most that with one pool each."""
    jobs = [a_job(f"j{i}", arrived_s=20.0 * i, samples=60_000.0) for i in range(5)]
    fleet = a_fleet(*jobs)

    def mean_s(outcome_s: dict[str, float]) -> float:
        return sum(outcome_s[job.key] - job.arrived_s for job in jobs) / len(jobs)

    mixed = mean_s(dict(run_fleet(fleet, any_mix).finished_s))
    single = mean_s(dict(run_fleet(fleet, one_pool_each).finished_s))
    assert mixed <= single * 1.001


def test_first_come_first_served() -> None:
    """The second job waits for the first, however short it is; with the operator's allocation it does not."""
    fleet = a_fleet(a_job("long", samples=400_000.0), a_job("short", arrived_s=5.0, samples=4_000.0))
    queued, shared = run_fleet(fleet, first_come), run_fleet(fleet, any_mix)
    assert queued.waited_s["short"] == pytest.approx(queued.finished_s["long"] - 5.0)
    assert shared.waited_s["short"] == 0
    assert shared.finished_s["short"] < 0.5 * queued.finished_s["short"]


def test_one_pool_each_never_mixes() -> None:
    """No job ever holds two pools."""

    def watched(pools: Sequence[Pool], jobs: Sequence[JobDemand]) -> Grants:
        grants = one_pool_each(pools, jobs)
        assert all(len([n for n in workers.values() if n]) <= 1 for workers in grants.values())
        return grants

    run_fleet(a_fleet(*(a_job(f"j{i}", arrived_s=10.0 * i) for i in range(4))), watched)
