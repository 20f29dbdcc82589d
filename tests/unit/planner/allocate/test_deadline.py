"""A deadline as objective: against brute force, and in a loop of decisions until the work is done."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Objective, Pool
from heterotrain_planner.allocate.propose import propose
from support.repeat import times

HOUR_S = 3600.0
STARTS_IN_S = 30.0
KINDS = {"fast": (800.0, 3.67), "middle": (400.0, 2.48), "spot": (200.0, 0.35)}


GAVE_BACK_ONE_BY_ONE = (17, 26, 37, 38, 41, 52, 63, 67)


def member(samples_per_s: float) -> SplitMember:
    """Return a rank whose speed is the same at every share, so that speeds of a set add up."""
    third = 1 / samples_per_s / 3
    return SplitMember(
        compute=ComputeTime(per_sample_s=third, fixed_s=0.0, backward_per_sample_s=2 * third, backward_fixed_s=0.0)
    )


def job_pools(rng: random.Random, *, off: float = 0.0) -> tuple[JobPool, ...]:
    """Return the kinds as job_pools, with speeds that are wrong by up to ``off``."""
    return tuple(
        JobPool(pool=name, max_workers=4, price_per_hour=price, member=member(rate * (1 + rng.uniform(-off, off))))
        for name, (rate, price) in KINDS.items()
    )


def pools(*, spot_nodes: int = 4, losses: float = 0.0) -> tuple[Pool, ...]:
    """Return four nodes of each kind."""
    return tuple(
        Pool(
            name=name,
            nodes=(1,) * (spot_nodes if name == "spot" else 4),
            spot=name == "spot",
            losses=losses if name == "spot" else 0.0,
            watched_s=1e5 if name == "spot" else 0.0,
        )
        for name in KINDS
    )


def a_job(rng: random.Random, **more: object) -> JobDemand:
    """Return a job that may use all kinds."""
    values: dict[str, object] = {
        "key": "job",
        "pools": job_pools(rng),
        "max_workers": 12,
        "batch_samples": 4096,
        "objective": Objective.DEADLINE,
    }
    return JobDemand(**{**values, **more})  # type: ignore[arg-type]  # tests pass what they mean


def needed_s(job: JobDemand, counts: tuple[int, ...], losses_per_s: tuple[float, ...]) -> float:
    """Return how long the job takes with these workers: the formula of the documentation, written down once more."""
    assert job.remaining_samples is not None
    speed = sum(n * rate for n, (rate, _) in zip(counts, KINDS.values(), strict=True)) * job.pace
    loss = sum(n * each for n, each in zip(counts, losses_per_s, strict=True))
    bare_s = job.remaining_samples / (speed * (1 - loss * job.pause_s))
    mean = loss * bare_s
    changed = counts != tuple(job.current.get(kind, 0) for kind in KINDS)
    return bare_s + (mean + 2 * math.sqrt(mean)) * 600 / sum(counts) + (job.pause_s if changed else 0.0)


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_the_cheapest_set_in_time_or_else_the_fastest(seed: int) -> None:
    """Every combination of workers is tried; the risk of losses and the pace count."""
    rng = random.Random(seed)
    losses = rng.choice([0.0, 3.0, 30.0])
    job = a_job(
        rng,
        remaining_samples=10 ** rng.uniform(4, 8),
        deadline_s=rng.choice([600.0, HOUR_S, 8 * HOUR_S]),
        pace=rng.choice([1.0, 0.8]),
    )
    places = pools(losses=losses)
    quarter = 0.5 / (0.5 * 90 * 24 * HOUR_S)
    spot = (losses + 0.5) / (1e5 + 0.5 * 24 * HOUR_S)
    per_s = (quarter, quarter, spot)
    counts = [each for each in product(range(5), repeat=3) if any(each)]
    price = {c: sum(n * dear for n, (_, dear) in zip(c, KINDS.values(), strict=True)) for c in counts}
    needs = {c: needed_s(job, c, per_s) for c in counts}
    speed = {
        c: sum(n * rate for n, (rate, _) in zip(c, KINDS.values(), strict=True))
        * (1 - job.pause_s * sum(n * each for n, each in zip(c, per_s, strict=True)))
        for c in counts
    }
    assert job.deadline_s is not None
    enough = [c for c in counts if needs[c] <= 0.9 * job.deadline_s - 60]
    (grant,) = propose(PoolCapacity(places), [job]).grants
    found = tuple(grant.workers.get(kind, 0) for kind in KINDS)
    assert grant.spare_s == pytest.approx(job.deadline_s - needs[found], abs=0.1)
    assert grant.in_time == bool(enough)
    if enough:
        assert price[found] / speed[found] == pytest.approx(min(price[c] / speed[c] for c in enough))
    else:
        assert speed[found] == pytest.approx(max(speed.values()), rel=1e-5)
        assert "too late for its deadline" in grant.reason


def test_a_deadline_comes_before_another_job_s_speed_but_not_its_minimum() -> None:
    """A job that would be late takes workers from one without a deadline, down to that job's minimum."""
    rng = random.Random(1)
    hurry = a_job(rng, key="hurry", remaining_samples=6 * 800 * HOUR_S, deadline_s=2 * HOUR_S)
    other = a_job(rng, key="other", objective=Objective.THROUGHPUT, min_workers=4, current={"fast": 4})
    grants = {grant.key: grant for grant in propose(PoolCapacity(pools()), [hurry, other]).grants}
    assert grants["hurry"].in_time
    assert sum(grants["other"].workers.values()) >= 4


@pytest.mark.parametrize("seed", [*range(times(gate=2, every=80)), *GAVE_BACK_ONE_BY_ONE])
def test_until_its_end_a_job_is_in_time_and_rarely_changes(seed: int) -> None:
    """Speeds are known to 3 %, workers take a while to start, spot workers are lost: it neither is late nor wavers.

    Among the first 80 seeds are eight in which it once gave its workers back one by one, in five to eight changes.
    """
    rng = random.Random(seed)
    pace = rng.uniform(0.8, 1.05)
    deadline_s = rng.choice([900.0, HOUR_S, 4 * HOUR_S])
    every_s = deadline_s / 100
    most = 4 * sum(rate for rate, _ in KINDS.values()) * pace
    left = most * deadline_s * rng.uniform(0.1, 0.7)
    now_s, changes, lost = 0.0, [], []
    has: dict[str, int] = {}
    starting: dict[str, float] = {}
    while left > 0:
        assert now_s < deadline_s, f"late with {left:.0f} samples left; changed at {changes}, lost at {lost}"
        spot = 4
        if has.get("spot") and rng.random() < has["spot"] * every_s / (6 * HOUR_S):
            has["spot"] -= 1
            lost.append(now_s)
            spot = has["spot"]
        job = a_job(
            rng,
            pools=job_pools(rng, off=0.03),
            remaining_samples=left,
            deadline_s=deadline_s - now_s,
            waited_s=now_s,
            pace=pace * (1 + rng.uniform(-0.03, 0.03)) if now_s > 60 else 1.0,
            current={kind: count for kind, count in has.items() if count},
        )
        (grant,) = propose(PoolCapacity(pools(spot_nodes=spot, losses=len(lost) + 1)), [job]).grants
        if dict(grant.workers) != dict(job.current):
            changes.append(now_s)
            starting = {kind: now_s + STARTS_IN_S for kind in grant.workers if grant.workers[kind] > has.get(kind, 0)}
            before, has = has, dict(grant.workers)
            fresh = {kind: has[kind] - before.get(kind, 0) for kind in starting}
            left += job.pause_s * most / 2
        working = {kind: count - (fresh[kind] if starting.get(kind, 0.0) > now_s else 0) for kind, count in has.items()}
        left -= every_s * pace * sum(count * KINDS[kind][0] for kind, count in working.items())
        now_s += every_s
    assert len(changes) <= 4 + 2 * len(lost), f"changed at {changes}, lost at {lost}"


def test_cheaper_workers_have_to_save_two_per_cent_of_the_whole_price() -> None:
    """Two of four fast workers are not needed: they go while that saves enough, and stay nearer to the end."""
    now = {"fast": 4, "spot": 4}
    for part, saves in ((0.6, True), (0.3, False)):
        job = a_job(
            random.Random(1),
            remaining_samples=2000 * part * HOUR_S,
            deadline_s=part * HOUR_S,
            waited_s=(1 - part) * HOUR_S,
            current=now,
        )
        (grant,) = propose(PoolCapacity(pools()), [job]).grants
        assert grant.in_time
        assert (dict(grant.workers) != now) == saves, part


def test_a_late_job_changes_to_cheaper_workers_at_any_saving() -> None:
    """Spot workers are cheaper and, together, faster than the one that is late: that change is not only for money."""
    job = a_job(
        random.Random(1), remaining_samples=700 * 600.0, deadline_s=900.0, waited_s=100 * HOUR_S, current={"middle": 1}
    )
    (grant,) = propose(PoolCapacity(pools()), [job]).grants
    assert grant.in_time
    assert set(grant.workers) == {"spot"}


def test_reason_and_spare_time_agree() -> None:
    """A quarter of an hour too late is stated as such; without known work, nothing is stated."""
    rng = random.Random(2)
    job = a_job(rng, remaining_samples=5600.0 * HOUR_S, deadline_s=0.75 * HOUR_S)
    (late,) = propose(PoolCapacity(pools()), [job]).grants
    assert late.spare_s is not None
    assert -0.35 * HOUR_S < late.spare_s < -0.25 * HOUR_S
    (unknown,) = propose(PoolCapacity(pools()), [replace(job, remaining_samples=None)]).grants
    assert (unknown.spare_s, unknown.in_time) == (None, False)
    (over,) = propose(PoolCapacity(pools()), [replace(job, deadline_s=-60.0)]).grants
    assert over.workers == late.workers, "after the deadline: as soon as can be"
