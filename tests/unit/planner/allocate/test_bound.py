"""The stated distance to the best allocation: never too small, and small where the allocation is good."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import SplitMember, TableTime
from heterotrain_planner.allocate import unlisted, value
from heterotrain_planner.allocate.bound import most_gain
from heterotrain_planner.allocate.candidate import Candidate, Choice
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.distance import Distance
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Objective, Pool
from heterotrain_planner.allocate.propose import build_candidates, propose
from heterotrain_planner.allocate.search import search
from heterotrain_planner.allocate.thinning import combine
from heterotrain_planner.allocate.unlisted import most_net_score
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen
from scipy.optimize import Bounds, LinearConstraint, milp
from support.repeat import times


def a_member(rng: random.Random) -> SplitMember:
    """Return a rank of any speed, sometimes with limits or a measured curve."""
    per_sample_s = 10 ** rng.uniform(-4, -2)
    if rng.random() < 0.2:
        points = tuple((x, 0.01 + per_sample_s * x * rng.uniform(0.9, 1.1)) for x in (1, 32, 64, 128, 256, 512, 1024))
        return SplitMember(compute=TableTime(points=points))
    return SplitMember(
        compute=ComputeTime(
            per_sample_s=0.4 * per_sample_s,
            fixed_s=rng.uniform(0.0, 0.02),
            backward_per_sample_s=0.6 * per_sample_s,
            backward_fixed_s=rng.uniform(0.0, 0.02),
            update_s=rng.choice([0.0, 0.005]),
        ),
        cap_samples=rng.choice([None, None, 400]),
        micro_cap_samples=rng.choice([None, 32, 100]),
        floor_samples=rng.choice([0, 0, 2]),
    )


def any_job(rng: random.Random, pools: int, most: int) -> JobDemand:
    """Return a job of any objective: prices, deadlines, noise, adaptive batches, several ranks a worker, minimums."""
    batch = rng.choice([512, 2048])
    return JobDemand(
        key="job",
        pools=tuple(
            JobPool(
                pool=f"p{i}",
                max_workers=most,
                ranks=rng.choice([1, 1, 2]),
                price_per_hour=rng.choice([0.0, 1.0, 1.0, 2.5]),
                member=a_member(rng),
            )
            for i in range(pools)
        ),
        min_workers=rng.choice([1, 3]),
        max_workers=rng.randint(4, most * pools),
        batch_samples=batch,
        largest_batch_samples=rng.choice([None, batch * 8]),
        noise_samples=rng.choice([None, 3000.0]),
        communication=CommunicationTime(overlapped_s=0.05, last_bucket_s=rng.choice([0.0, 0.05]), gamma=0.2),
        communication_members=rng.choice([0, 3]),
        variation=rng.choice([0.0, 0.1]),
        objective=rng.choice(list(Objective)),
        remaining_samples=rng.choice([None, 1e6, 1e7]),
        deadline_s=rng.choice([600.0, 7200.0, -1.0]),
        pause_s=rng.choice([2.0, 60.0]),
        weight=rng.choice([1.0, 2.0]),
        current=rng.choice([{}, {"p0": 2, "p1": 1}]),
    )


SIZES = tuple(
    ExchangeSeen(members=members, across=across, seconds=seconds, steps=100)
    for members, across, seconds in ((2, False, 0.3), (6, True, 0.1), (3, True, 0.04))
)
"""An exchange that grows fast across workers, and takes longer within one."""


@pytest.mark.heavy
@pytest.mark.parametrize("sizes", [(), SIZES])
def test_no_numbers_of_workers_exceed_the_bound_of_unlisted_ones(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[ExchangeSeen, ...]
) -> None:
    """Against every number of workers of jobs of any kind; where rates depend on speeds alone, it is close to them."""
    rng = random.Random(3)
    monkeypatch.setattr(unlisted, "MOST_COUNTED", 0)
    plain = []
    for _ in range(60):
        count = rng.choice([2, 3])
        job = replace(any_job(rng, count, 9), exchange_seen=sizes)
        pools = {f"p{i}": Pool(name=f"p{i}", nodes=(1,) * 9, spot=rng.random() < 0.5) for i in range(count)}
        rows_OP = combine(*value.limits(job, [9] * count), 10_000)
        assert rows_OP is not None
        score_O = value.scores(job, pools, counts_OP=rows_OP, rate_O=value.rates(job, rows_OP)).score_O
        cost_P = np.array([rng.choice([0.0, 0.02, 0.2]) * rng.random() for _ in range(count)])
        most = float((score_O - rows_OP @ cost_P).max())
        kept_O = (rows_OP == np.array([job.current.get(f"p{i}", 0) for i in range(count)])).all(axis=1)
        listed = float((score_O - rows_OP @ cost_P)[kept_O].max(initial=-1e9))  # the current workers are always listed
        found = most_net_score(job, pools, [9] * count, cost_P, listed=listed)
        assert found >= most - 1e-6
        if job.objective is Objective.THROUGHPUT and not job.variation and most > -1e8 and not job.current:
            plain.append((found - most) / job.weight)
    assert np.median(plain) < 0.05 or sizes


def test_the_largest_share_of_a_table_counts_in_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker that has to take the last point of its table: rounding does not exclude it."""
    monkeypatch.setattr(unlisted, "MOST_COUNTED", 0)
    rng = random.Random(5)
    for _ in range(40):
        seconds_s, exchange_s = rng.uniform(0.01, 0.05), rng.uniform(0.0, 0.1)
        member = SplitMember(compute=TableTime(points=((1, 0.01), (64, seconds_s))))
        job = JobDemand(
            key="job",
            pools=(JobPool(pool="p", max_workers=1, member=member),),
            max_workers=1,
            batch_samples=64,
            communication=CommunicationTime(overlapped_s=exchange_s),
            communication_members=rng.choice([0, 3]),
        )
        found = most_net_score(job, {}, [1], np.zeros(1), listed=-100.0)
        assert found >= np.log(64 / seconds_s) - 1e-9


def scores_of(candidates: Sequence[Candidate], choice: Choice) -> tuple[float, float]:
    """Return the sum of scores of the jobs that run, and the sum of their weights."""
    running = [(c, o) for c, o in zip(candidates, choice, strict=True) if o is not None]
    return sum(o.score for _, o in running), sum(c.job.weight * c.job.exponent for c, _ in running)


def mixed(seed: int) -> tuple[PoolCapacity, list[JobDemand]]:
    """Return two or three jobs with workers of different sizes on two pools of a few nodes of different sizes."""
    rng = random.Random(seed)
    pools = [Pool(name=f"p{i}", nodes=tuple(rng.choice([1, 2, 4]) for _ in range(3))) for i in range(2)]
    jobs = [
        replace(
            any_job(rng, 2, 4),
            key=f"j{j}",
            pools=tuple(
                JobPool(pool=f"p{i}", max_workers=4, accelerators=rng.choice([1, 2, 3]), member=a_member(rng))
                for i in range(2)
            ),
            min_workers=1,
            max_workers=5,
            objective=Objective.THROUGHPUT,
            current={},
        )
        for j in range(rng.randint(2, 3))
    ]
    return PoolCapacity(pools), jobs


@pytest.mark.parametrize("seed", range(times(gate=6, every=120)))
def test_the_bound_holds_where_sizes_mix(seed: int) -> None:
    """Slots of different sizes do not add up; every combination of options that fits is tried."""
    capacity, jobs = mixed(seed)
    candidates = build_candidates(capacity, jobs)
    choice = search(candidates, capacity)
    running = [candidate for candidate, option in zip(candidates, choice, strict=True) if option is not None]
    best = -np.inf
    for options in product(*(candidate.options for candidate in running)):
        occupancy = Occupancy(capacity)
        fits = True
        for candidate, option in zip(running, options, strict=True):
            fits = fits and occupancy.fits(candidate.need(option))
            occupancy.add(candidate.need(option))
        if fits:
            best = max(best, sum(option.score for option in options))
    reached, weight = scores_of(candidates, choice)
    assert (best - reached) / weight <= np.log1p(most_gain(candidates, choice, capacity)) + 1e-9


def line(rng: random.Random, *, fixed_s: float = 0.0) -> SplitMember:
    """Return a rank whose time is a line."""
    per_sample_s = 10 ** rng.uniform(-4, -2.3)
    return SplitMember(
        compute=ComputeTime(
            per_sample_s=0.35 * per_sample_s,
            fixed_s=fixed_s,
            backward_per_sample_s=0.65 * per_sample_s,
            backward_fixed_s=fixed_s,
        )
    )


def test_one_worker_s_rate_does_not_depend_on_slower_kinds() -> None:
    """It takes the whole batch at its own speed; at the level of a slower worker, its share would be the same."""
    rng = random.Random(1)
    job = open_to_all(rng, [2] * 5, 1, fixed_s=0.0)[0]
    alone = [value.rates(job, row[None])[0] for row in np.eye(5, dtype=np.int64)]
    speeds = [1 / (c.per_sample_s + c.backward_per_sample_s) for each in job.pools if (c := compute_of(each))]
    assert alone == pytest.approx(speeds, rel=1e-5)


def compute_of(job_pool: JobPool) -> ComputeTime:
    assert job_pool.member is not None
    assert isinstance(job_pool.member.compute, ComputeTime)
    return job_pool.member.compute


def open_to_all(rng: random.Random, nodes: Sequence[int], jobs: int, *, fixed_s: float) -> list[JobDemand]:
    return [
        JobDemand(
            key=f"j{j}",
            pools=tuple(
                JobPool(pool=f"p{i}", max_workers=99, member=line(rng, fixed_s=fixed_s)) for i in range(len(nodes))
            ),
            max_workers=sum(nodes),
            batch_samples=4096,
            communication=CommunicationTime(overlapped_s=0.05 * bool(fixed_s), gamma=0.2),
            communication_members=3,
            arrived_s=float(j),
        )
        for j in range(jobs)
    ]


def test_three_pools_of_sixteen_nodes() -> None:
    """All pairs of the 4,912 numbers of workers of two jobs are compared; half of them are not listed."""
    rng = random.Random(78)
    nodes = (16, 16, 16)
    capacity = PoolCapacity([Pool(name=f"p{i}", nodes=(1,) * count) for i, count in enumerate(nodes)])
    for _ in range(times(gate=1, every=3)):
        jobs = open_to_all(rng, nodes, 2, fixed_s=0.01)
        proposal = propose(capacity, jobs)
        rows_OP = combine(*value.limits(jobs[0], nodes), 5000)
        assert rows_OP is not None
        rate_JO = [value.rates(job, rows_OP) for job in jobs]
        # The best rate of the second job within any numbers of workers, for what the first one leaves.
        table = np.zeros((17, 17, 17))
        table[tuple(rows_OP.T)] = rate_JO[1]
        for axis in range(3):
            table = np.maximum.accumulate(table, axis=axis)
        left_OP = np.array(nodes) - rows_OP
        with np.errstate(divide="ignore"):
            best = float((np.log(rate_JO[0]) + np.log(table[tuple(left_OP.T)])).max())
        reached = sum(np.log(grant.rate_per_s) for grant in proposal.grants)
        assert (best - reached) / 2 <= np.log1p(proposal.most_gain) + 2e-4  # rates have expected losses left out here
        assert proposal.most_gain <= 0.005


def test_forty_kinds_of_nodes() -> None:
    """Three jobs on forty pools of two nodes, where speeds add up: as good as an integer programme of tangents."""
    rng = random.Random(1)
    nodes = [2] * 40
    capacity = PoolCapacity([Pool(name=f"p{i}", nodes=(1,) * count) for i, count in enumerate(nodes)])
    jobs = open_to_all(rng, nodes, 3, fixed_s=0.0)
    proposal = propose(capacity, jobs)
    speeds = np.array([[value.rates(job, row[None])[0] for row in np.eye(40, dtype=np.int64)] for job in jobs])
    best = best_product_of_sums(speeds, np.array(nodes))
    reached = sum(np.log(grant.rate_per_s) for grant in proposal.grants)
    assert best >= reached - 1e-3
    assert (best - reached) / 3 <= min(0.002, np.log1p(proposal.most_gain) + 1e-3)
    assert proposal.most_gain <= 0.08
    assert "% from the best possible" in proposal.reason


def best_product_of_sums(speed_JP: np.ndarray, nodes_P: np.ndarray) -> float:
    """Return the greatest sum of logarithms of the jobs' sums of speeds, to 1e-3; logarithms are cut by tangents."""
    jobs, pools = speed_JP.shape
    columns = jobs * pools + jobs
    rows, upper = [], []
    for j in range(jobs):
        most = float(speed_JP[j] @ nodes_P)
        for at in np.geomspace(most / 50, most, 60):
            row = np.zeros(columns)
            row[jobs * pools + j] = 1.0
            row[j * pools : (j + 1) * pools] = -speed_JP[j] / at
            rows.append(row)
            upper.append(np.log(at) - 1.0)
    for p in range(pools):
        row = np.zeros(columns)
        row[p : jobs * pools : pools] = 1.0
        rows.append(row)
        upper.append(float(nodes_P[p]))
    solved = milp(
        np.concatenate([np.zeros(jobs * pools), -np.ones(jobs)]),
        constraints=LinearConstraint(np.array(rows), -np.inf, np.array(upper)),
        integrality=np.concatenate([np.ones(jobs * pools), np.zeros(jobs)]),
        bounds=Bounds(np.concatenate([np.zeros(jobs * pools), np.full(jobs, -50.0)]), np.full(columns, 50.0)),
        options={"mip_rel_gap": 1e-4, "time_limit": 20},
    )
    return -float(solved.fun)


def test_distances_in_words_are_rounded_up() -> None:
    """Where it is not proved which jobs should run, the words say so."""

    def words(gain: float, *, proved: bool = True) -> str:
        return Distance(gain=gain, proved=proved).text

    assert words(0.0) == "no allocation is better"
    assert words(0.0, proved=False) == "no allocation is better for the jobs that run"
    assert words(0.00301) == "at most 0.4 % from the best possible"
    assert words(0.00301, proved=False) == "at most 0.4 % from the best possible for the jobs that run"
    assert words(0.0999) == "at most 10 % from the best possible"
    assert words(0.101) == "at most 11 % from the best possible"
    assert "no useful bound" in words(3.0)
