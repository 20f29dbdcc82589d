"""No job waits without end: nodes are kept free for one that has waited long, whatever comes later."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate import propose as propose_module
from heterotrain_planner.allocate import reservation
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool
from heterotrain_planner.allocate.propose import propose
from heterotrain_planner.allocate.reservation import RESERVE_AFTER_S
from support.repeat import times

HOUR_S = 3600.0


ONE_A_SECOND = SplitMember(
    compute=ComputeTime(per_sample_s=0.5, fixed_s=0.0, backward_per_sample_s=0.5, backward_fixed_s=0.0)
)


def a_job(
    key: str, *, arrived_s: float, pools: Sequence[str] = ("p",), least: int = 1, most: int | None = None
) -> JobDemand:
    """Return a job with a sample a second of each worker; without ``most``, it always has ``least`` of them."""
    most = least if most is None else most
    return JobDemand(
        key=key,
        pools=tuple(JobPool(pool=pool, max_workers=most, member=ONE_A_SECOND) for pool in pools),
        min_workers=least,
        max_workers=most,
        batch_samples=5040,
        arrived_s=arrived_s,
    )


@dataclass
class Simulated:
    """A cluster in simulated time: jobs take workers as proposed, at once, and work in proportion to them.

    Attributes:
        pools: nodes by pool.
        jobs: all jobs, with the worker-seconds of work that each one has.
        ran_before: for each job, the first pass in which it had waited long and was the first to wait, and the jobs
            that ran before that pass: the promise is computed from the events alone.
        stated_s: for each job that waited, all times by which proposals said that it starts.
    """

    pools: dict[str, int]
    jobs: list[tuple[JobDemand, float]]
    now_s: float = 0.0
    running: dict[str, dict[str, int]] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    started_s: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    ran_before: dict[str, tuple[float, set[str]]] = field(default_factory=dict)
    stated_s: dict[str, list[float]] = field(default_factory=dict)

    def run(self, until_s: float = math.inf) -> Simulated:
        """Run until no job is left or until a time."""
        coming = sorted(self.jobs, key=lambda each: each[0].arrived_s)
        active: list[JobDemand] = []
        while (coming or active) and self.now_s < until_s:
            ends = [self.now_s + self.left[key] / sum(workers.values()) for key, workers in self.running.items()]
            next_s = min([*ends, *(job.arrived_s for job, _ in coming[:1])])
            for key, workers in self.running.items():
                self.left[key] -= (next_s - self.now_s) * sum(workers.values())
            self.now_s = next_s
            for key in [key for key in self.running if self.left[key] <= 1e-6]:
                del self.running[key]
                self.ended_s[key] = self.now_s
            active = [job for job in active if job.key not in self.ended_s]
            while coming and coming[0][0].arrived_s <= self.now_s:
                job, work = coming.pop(0)
                active.append(job)
                self.left[job.key] = work
            self._allocate(active)
        return self

    def _allocate(self, active: Sequence[JobDemand]) -> None:
        waiting = [job for job in active if job.key not in self.running]
        if waiting:
            first = min(waiting, key=lambda job: (job.arrived_s, job.key))
            if self.now_s - first.arrived_s >= RESERVE_AFTER_S:
                self.ran_before.setdefault(first.key, (self.now_s, set(self.running)))
        demands = [
            replace(
                job,
                waited_s=self.now_s - job.arrived_s,
                current=self.running.get(job.key, {}),
                remaining_samples=self.left[job.key],
            )
            for job in active
        ]
        grants = propose(PoolCapacity([Pool(name=n, nodes=(1,) * count) for n, count in self.pools.items()]), demands)
        before = set(self.running)
        self.running = {grant.key: dict(grant.workers) for grant in grants.grants if grant.workers}
        assert before <= self.running.keys(), "no running job is stopped"
        for key in self.running.keys() - before:
            self.started_s[key] = self.now_s
        for grant in grants.grants:
            if grant.kept_for:
                assert grant.starts_within_s is not None
                self.stated_s.setdefault(grant.key, []).append(self.now_s + grant.starts_within_s)


def a_gang_among_small_jobs(seed: int) -> Simulated:
    """Return eight nodes on which small jobs come and go; a gang of eight comes early. There is much work."""
    rng = random.Random(seed)
    jobs = [(a_job("gang", arrived_s=100.0, least=8), 8 * 600.0)]
    at_s = 0.0
    while at_s < 12 * HOUR_S:
        size = rng.choice([1, 1, 2])
        jobs.append((a_job(f"small-{len(jobs)}", arrived_s=at_s, least=size), size * rng.uniform(1200, 2400)))
        at_s += rng.expovariate(1 / 280)
    return Simulated({"p": 8}, jobs)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [1, 0, 3][: times(gate=1, every=3)])
def test_a_gang_of_all_nodes_starts_among_small_jobs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits ten minutes and the rest of one small job; without the rule, it waits for twelve hours and more."""
    kept = a_gang_among_small_jobs(seed).run(until_s=12 * HOUR_S)
    assert kept.started_s["gang"] <= 100.0 + RESERVE_AFTER_S + 2400 + 600
    assert len(kept.started_s) > 60
    monkeypatch.setattr(propose_module, "reserve", lambda *_: reservation.Reservations())
    assert "gang" not in a_gang_among_small_jobs(seed).run(until_s=12 * HOUR_S).started_s


def a_crowd(seed: int) -> Simulated:
    """Return a crowd of gangs and small, rigid and elastic jobs, more than two or three pools can run at a time."""
    rng = random.Random(seed)
    pools = {name: rng.randint(3, 8) for name in "abc"[: rng.randint(1, 3)]}
    jobs = []
    at_s = 0.0
    for number in range(40):
        open_to = rng.sample(sorted(pools), rng.randint(1, len(pools)))
        reach = sum(pools[name] for name in open_to)
        least = rng.randint(max(1, reach // 2), reach) if rng.random() < 0.2 else rng.randint(1, 2)
        most = min(reach, least + rng.choice([0, 0, 2, 4]))
        job = a_job(f"j{number:02d}", arrived_s=at_s, pools=open_to, least=least, most=most)
        jobs.append((job, rng.uniform(600, 3600) * least))
        at_s += rng.expovariate(len(pools) / 900)
    return Simulated(pools, jobs)


@pytest.mark.parametrize("seed", [11, 157, *range(times(gate=1, every=80))])
def test_every_wait_is_within_the_proved_bound(seed: int) -> None:
    """Once it is the first that waits, and has waited long, a job starts when those that ran then have ended."""
    run = a_crowd(seed).run()
    assert len(run.ended_s) == len(run.jobs)
    assert run.ran_before
    for key, (since_s, before) in run.ran_before.items():
        assert run.started_s[key] <= max([since_s, *(run.ended_s[other] for other in before)]) + 1e-6


@pytest.mark.parametrize("seed", [11, 157, *range(times(gate=2, every=80))])
def test_no_job_starts_later_than_a_proposal_said(seed: int) -> None:
    """Every proposal states a time for each job for which nodes are kept; the times hold, and do not get later."""
    run = a_crowd(seed).run()
    assert run.stated_s
    for key, stated_s in run.stated_s.items():
        assert run.started_s[key] <= min(stated_s) + 1e-6
        assert stated_s == sorted(stated_s, reverse=True)


def a_gang_behind_a_queue(seed: int, nodes: int, gang: int, every_s: float, most: int) -> Simulated:
    """Return a stream of jobs of half an hour, more than the nodes can run, and a gang that comes to a long queue."""
    rng = random.Random(seed)
    jobs = [(a_job("gang", arrived_s=1800.0, least=gang), gang * 600.0)]
    at_s = 0.0
    while at_s < 2.5 * HOUR_S:
        size = rng.randint(1, most)
        jobs.append((a_job(f"small-{len(jobs)}", arrived_s=at_s, least=size), size * (120 + rng.expovariate(1 / 1800))))
        at_s += rng.expovariate(1 / every_s)
    return Simulated({"p": nodes}, jobs)


@pytest.mark.parametrize("case", [(3, 12, 12, 180.0, 5), (5, 20, 17, 120.0, 7)][: times(gate=1, every=2)])
def test_no_later_job_delays_a_gang_that_waits_behind_others(
    case: tuple[int, int, int, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one reservation at a time, those before it have it first, and later jobs take the gang's nodes."""

    def started() -> tuple[float, list[str]]:
        _, nodes, gang, *_ = case
        run = a_gang_behind_a_queue(*case).run(until_s=2.5 * HOUR_S)
        gang_s = run.started_s["gang"]
        held = range(int(1800.0 + RESERVE_AFTER_S), int(gang_s))
        size = {job.key: job.min_workers for job, _ in run.jobs if job.arrived_s > 1800.0}
        return gang_s, [k for k, at_s in run.started_s.items() if int(at_s) in held and size.get(k, 0) > nodes - gang]

    at_s, later = started()
    assert later == []
    monkeypatch.setattr(reservation, "MOST_HOLDERS", 1)
    alone_s, later_then = started()
    assert at_s < alone_s - 900.0
    assert later_then


def pool_of(nodes: int) -> PoolCapacity:
    return PoolCapacity([Pool(name="p", nodes=(1,) * nodes)])


def crowded(waited_s: float) -> list[JobDemand]:
    """Return a job on three nodes, a gang of six on eight nodes that waits behind it, and later single workers."""
    runs = replace(a_job("runs", arrived_s=0.0, least=3), current={"p": 3})
    gang = replace(a_job("gang", arrived_s=1.0, least=6), waited_s=waited_s)
    return [runs, gang, *(a_job(f"small-{i}", arrived_s=10.0 + i) for i in range(5))]


def test_later_jobs_start_beside_the_kept_nodes() -> None:
    """Two of eight nodes are not the gang's: two later jobs start there, and the others are told why they wait."""
    early = propose(pool_of(8), crowded(RESERVE_AFTER_S - 1)).grants
    assert [bool(grant.workers) for grant in early] == [True, False, True, True, True, True, True]
    late = propose(pool_of(8), crowded(RESERVE_AFTER_S)).grants
    assert [bool(grant.workers) for grant in late] == [True, False, True, True, False, False, False]
    assert late[4].reason == (
        "waits: gang came first and has waited for more than 10 minutes, so the nodes that it needs are kept for it"
    )


def test_another_namespace_s_job_is_not_named() -> None:
    jobs = [replace(job, tenant="mine" if job.key.startswith("small") else "theirs") for job in crowded(1e4)]
    jobs = [replace(job, tenant_weight=1.0 if job.tenant == "mine" else 9.0) for job in jobs]
    reasons = [grant.reason for grant in propose(pool_of(8), jobs).grants if not grant.workers]
    assert not any("gang" in reason for reason in reasons)


def test_running_jobs_use_kept_nodes_until_they_are_needed() -> None:
    """An elastic job that runs grows into them, and shrinks again; no later job starts."""
    elastic = replace(a_job("elastic", arrived_s=0.0, least=1, most=8), current={"p": 2})
    rigid = replace(a_job("rigid", arrived_s=0.0, least=2), current={"p": 2})
    gang = replace(a_job("gang", arrived_s=1.0, least=7), waited_s=RESERVE_AFTER_S)
    late = a_job("late", arrived_s=2.0)
    grants = {grant.key: dict(grant.workers) for grant in propose(pool_of(8), [elastic, rigid, gang, late]).grants}
    assert grants == {"elastic": {"p": 6}, "rigid": {"p": 2}, "gang": {}, "late": {}}
    elastic = replace(elastic, current={"p": 6})
    grants = {grant.key: dict(grant.workers) for grant in propose(pool_of(8), [elastic, gang, late]).grants}
    assert grants == {"elastic": {"p": 1}, "gang": {"p": 7}, "late": {}}


def test_a_job_that_no_empty_cluster_could_run_keeps_no_nodes() -> None:
    gang = replace(a_job("gang", arrived_s=0.0, least=9), waited_s=1e6)
    small = a_job("small", arrived_s=1.0)
    assert propose(pool_of(8), [gang, small]).grants[1].workers == {"p": 1}


def test_jobs_on_other_pools_start() -> None:
    capacity = PoolCapacity([Pool(name="p", nodes=(1,) * 8), Pool(name="q", nodes=(1,) * 2)])
    elsewhere = a_job("elsewhere", arrived_s=99.0, pools=("q",), least=2)
    grants = propose(capacity, [*crowded(RESERVE_AFTER_S), elsewhere]).grants
    assert grants[-1].workers == {"q": 2}


@pytest.mark.parametrize("seed", range(times(gate=5, every=100)))
def test_asking_again_changes_nothing(seed: int) -> None:
    """In each state of a crowd: after a proposal was carried out, the next one has the same workers."""
    run = a_crowd(seed)
    rng = random.Random(seed)
    reach = PoolCapacity([Pool(name=name, nodes=(1,) * count) for name, count in run.pools.items()])
    for _ in range(4):
        jobs = [replace(job, waited_s=rng.choice([0.0, 1e4])) for job, _ in rng.sample(run.jobs, 9)]
        first = propose(reach, jobs[:5]).grants
        jobs = [replace(job, current=dict(grant.workers)) for job, grant in zip(jobs[:5], first, strict=True)] + jobs[
            5:
        ]
        second = propose(reach, jobs)
        then = [replace(job, current=dict(grant.workers)) for job, grant in zip(jobs, second.grants, strict=True)]
        assert not any(grant.changed for grant in propose(reach, then).grants)


def test_a_holder_waits_for_the_end_of_one_before_it_that_has_still_to_start() -> None:
    """After 1000 s, the first holder starts and runs for 500 s; the light job counts for the second holder only."""

    def job(key: str, *, workers: int, seconds: float, weight: float, arrived_s: float, runs: bool) -> JobDemand:
        demand = replace(
            a_job(key, arrived_s=arrived_s, least=workers), weight=weight, pause_s=0.0,
            remaining_samples=workers * seconds,
        )  # fmt: skip
        return replace(demand, current={"p": workers}) if runs else replace(demand, waited_s=1e4)

    jobs = [
        job("long", workers=3, seconds=3000.0, weight=2.0, arrived_s=0.0, runs=True),
        job("short", workers=3, seconds=1000.0, weight=2.0, arrived_s=1.0, runs=True),
        job("light", workers=2, seconds=5000.0, weight=1.0, arrived_s=2.0, runs=True),
        job("first", workers=4, seconds=500.0, weight=2.0, arrived_s=3.0, runs=False),
        job("second", workers=1, seconds=100.0, weight=1.0, arrived_s=4.0, runs=False),
    ]
    stated_s = {grant.key: grant.starts_within_s for grant in propose(pool_of(8), jobs).grants if grant.kept_for}
    assert stated_s == pytest.approx({"first": 1000.0, "second": 1500.0})


@pytest.mark.parametrize(("workers", "starts"), [(1, True), (2, False)])
def test_later_jobs_leave_room_for_those_that_still_run_when_the_holder_starts(workers: int, starts: bool) -> None:
    """A short job behind the gang ends first, with a pause of its own; a late one would sit on its nodes then."""

    def job(key: str, *, workers: int, seconds: float, arrived_s: float) -> JobDemand:
        demand = replace(a_job(key, arrived_s=arrived_s, least=workers), remaining_samples=workers * seconds)
        return replace(demand, current={"p": workers}, pause_s=50.0)

    jobs = [
        job("long", workers=4, seconds=3000.0, arrived_s=0.0),
        replace(job("gang", workers=5, seconds=100.0, arrived_s=1.0), current={}, waited_s=1e4),
        job("short", workers=3, seconds=100.0, arrived_s=2.0),
        replace(job("late", workers=workers, seconds=3000.0, arrived_s=3.0), current={}),
    ]
    grants = {grant.key: grant for grant in propose(pool_of(10), jobs).grants}
    assert grants["gang"].starts_within_s == pytest.approx(150.0, abs=0.1)
    assert bool(grants["late"].workers) is starts


def test_what_may_run_next_to_a_waiting_job_is_searched_together() -> None:
    """Each running job could shrink to either pool; only one combination leaves the gang its nodes."""
    capacity = PoolCapacity([Pool(name="p", nodes=(1,) * 3), Pool(name="q", nodes=(1,) * 3)])
    gang = replace(a_job("gang", arrived_s=0.0, pools=("p",), least=3), waited_s=1e4)
    first = replace(a_job("first", arrived_s=-1.0, pools=("p",)), current={"p": 1})
    both = [
        replace(a_job(f"both-{i}", arrived_s=1.0 + i, pools=("p", "q"), most=2), current={"p": 1, "q": 1})
        for i in range(2)
    ]
    late = [a_job(f"late-{i}", arrived_s=9.0 + i, pools=("p", "q")) for i in range(2)]
    grants = {grant.key: grant for grant in propose(capacity, [gang, first, *both, *late]).grants}
    assert {key for key, grant in grants.items() if grant.kept_out} == {"late-1"}
    assert grants["gang"].kept_for
    assert grants["late-0"].workers
