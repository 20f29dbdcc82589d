"""What holds for every allocation, and that the best one is found."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Objective, Pool, Proposal
from heterotrain_planner.allocate.propose import build_candidates, propose
from heterotrain_planner.allocate.rate_cache import RateCache
from heterotrain_planner.allocate.risk import losses_per_s
from heterotrain_planner.allocate.value import rates
from support.repeat import times
from unit.planner.allocate.oracle import best_of_all, chosen, rank, the_best

SIZES = (1, 1, 2, 4)


def a_member(rng: random.Random) -> SplitMember:
    """Return a rank of a random speed."""
    third = 1 / rng.choice([200, 400, 800]) / 3
    return SplitMember(
        compute=ComputeTime(
            per_sample_s=third,
            fixed_s=0.02,
            backward_per_sample_s=2 * third,
            backward_fixed_s=0.01,
        ),
        cap_samples=rng.choice([None, 200]),
        micro_cap_samples=rng.choice([None, 64]),
    )


def an_instance(seed: int) -> tuple[list[Pool], list[JobDemand]]:
    """Return up to three pools and five jobs, some of them running."""
    rng = random.Random(seed)
    pools = [
        Pool(
            name=f"p{i}",
            nodes=tuple(rng.choice([1, 2, 4, 8]) for _ in range(rng.randint(1, 3))),
            spot=rng.random() < 0.5,
            losses=rng.randint(0, 3),
            watched_s=rng.choice([0.0, 1e5]),
        )
        for i in range(rng.randint(1, 3))
    ]
    jobs = []
    for j in range(rng.randint(1, 5)):
        names = rng.sample([pool.name for pool in pools], rng.randint(1, len(pools)))
        least = rng.randint(1, 2)
        jobs.append(
            JobDemand(
                key=f"j{j}",
                pools=tuple(
                    JobPool(
                        pool=name,
                        min_workers=rng.choice([0, 0, 1]),
                        max_workers=rng.randint(1, 4),
                        accelerators=rng.choice(SIZES),
                        price_per_hour=rng.choice([0.0, 0.5, 3.0]),
                        member=rng.choice([None, a_member(rng), a_member(rng)]),
                    )
                    for name in names
                ),
                min_workers=least,
                max_workers=rng.randint(least, 6),
                batch_samples=rng.choice([64, 256, 512]),
                communication=CommunicationTime(overlapped_s=0.05, last_bucket_s=0.02, gamma=0.2),
                communication_members=3,
                objective=rng.choice(list(Objective)),
                remaining_samples=rng.choice([None, 1e5, 1e8]),
                deadline_s=rng.choice([None, None, 3600.0]),
                weight=rng.choice([1.0, 1.0, 2.0]),
                arrived_s=float(rng.randint(0, 9)),
                current={names[0]: rng.randint(1, 3)} if rng.random() < 0.4 else {},
                measured_soon=(seed + j) % 3 == 0,
            )
        )
    return pools, jobs


def carried_out(jobs: list[JobDemand], proposal: Proposal) -> list[JobDemand]:
    """Return the jobs as they stand afterwards."""
    return [replace(job, current=grant.workers) for job, grant in zip(jobs, proposal.grants, strict=True)]


def fits_by_trying(nodes: tuple[int, ...], sizes: list[int]) -> bool:
    """Return whether the workers fit, by trying every placement."""
    if not sizes:
        return True
    for i in sorted(set(range(len(nodes))), key=lambda i: nodes[i]):
        if nodes[i] >= sizes[0]:
            left = (*nodes[:i], nodes[i] - sizes[0], *nodes[i + 1 :])
            if fits_by_trying(left, sizes[1:]):
                return True
    return False


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_grants_keep_every_limit(seed: int) -> None:
    """Grants fit on the nodes; gangs, minimums and maximums are kept; every grant has a reason."""
    pools, jobs = an_instance(seed)
    proposal = propose(PoolCapacity(pools), jobs)
    held: dict[str, list[int]] = {}
    for job, grant in zip(jobs, proposal.grants, strict=True):
        assert grant.key == job.key
        assert grant.reason
        workers = sum(grant.workers.values())
        assert workers == 0 or job.min_workers <= workers <= job.max_workers
        assert grant.changed == (dict(grant.workers) != dict(job.current))
        for job_pool in job.pools:
            count = grant.workers.get(job_pool.pool, 0)
            assert count <= job_pool.max_workers
            held.setdefault(job_pool.pool, []).extend([job_pool.accelerators] * count)
            room = PoolCapacity(pools).slots(job_pool.pool, job_pool.accelerators)
            assert not workers or count >= min(job_pool.min_workers, room)
    for pool in pools:
        assert fits_by_trying(pool.nodes, sorted(held.get(pool.name, []), reverse=True))


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_a_proposal_is_stable_once_carried_out(seed: int) -> None:
    """The order of the jobs in the question does not matter, and asking again afterwards changes nothing."""
    pools, jobs = an_instance(seed)
    proposal = propose(PoolCapacity(pools), jobs)
    backwards = propose(PoolCapacity(pools), jobs[::-1])
    assert {g.key: dict(g.workers) for g in backwards.grants} == {g.key: dict(g.workers) for g in proposal.grants}
    again = propose(PoolCapacity(pools), carried_out(jobs, proposal))
    assert [dict(g.workers) for g in again.grants] == [dict(g.workers) for g in proposal.grants]
    assert not any(grant.changed for grant in again.grants)


def test_cached_rates_change_nothing_and_leave_with_their_jobs() -> None:
    """Kept from one proposal to the next they save time only, whatever the jobs have and still have to do by then."""
    cache = RateCache()
    for seed in range(20):
        pools, jobs = an_instance(seed)
        for _ in range(2):
            proposal = propose(PoolCapacity(pools), jobs, rate_cache=cache)
            assert proposal == propose(PoolCapacity(pools), jobs)
            jobs = [replace(job, remaining_samples=5e5) for job in carried_out(jobs, proposal)]
        cache.forget_unused()
        kept = len(cache)
        assert 0 < kept <= 2 * len(jobs), "of this instance only"


def jittered(jobs: list[JobDemand], rng: random.Random) -> list[JobDemand]:
    """Return the jobs with every known speed measured a little differently, by up to 0.4 % either way."""

    def other(job_pool: JobPool) -> JobPool:
        if job_pool.member is None or not isinstance(job_pool.member.compute, ComputeTime):
            return job_pool
        factor = 1 + 0.004 * (2 * rng.random() - 1)
        c = job_pool.member.compute
        compute = replace(
            c,
            per_sample_s=c.per_sample_s * factor,
            fixed_s=c.fixed_s * factor,
            backward_per_sample_s=c.backward_per_sample_s * factor,
            backward_fixed_s=c.backward_fixed_s * factor,
        )
        return replace(job_pool, member=replace(job_pool.member, compute=compute))

    return [replace(job, pools=tuple(other(job_pool) for job_pool in job.pools)) for job in jobs]


@pytest.mark.parametrize("seed", range(times(gate=10, every=300)))
def test_no_flip_flop(seed: int) -> None:
    """Speeds that are measured a little differently may move workers once, but moving back never pays again."""
    rng = random.Random(seed)
    pools, jobs = an_instance(seed)
    first = carried_out(jobs, propose(PoolCapacity(pools), jobs))
    second = carried_out(first, propose(PoolCapacity(pools), jittered(first, rng)))
    third = propose(PoolCapacity(pools), second)
    assert not any(grant.changed for grant in third.grants)


@pytest.mark.parametrize("seed", range(times(gate=12, every=400)))
def test_few_jobs_are_allocated_exactly(seed: int) -> None:
    """Against all combinations, with workers of several sizes on the same nodes."""
    pools, jobs = an_instance(seed)
    candidates = build_candidates(PoolCapacity(pools), jobs[:3])
    found, best = rank(chosen(candidates, propose(PoolCapacity(pools), jobs[:3]))), best_of_all(candidates, pools)
    assert found[0] == best[0]
    assert found[1] == pytest.approx(best[1], abs=1e-3)


def a_runner(key: str, **more: object) -> JobDemand:
    """Return a job that may have 16 workers of 400 samples/s in pool p, for steps of 2,048 samples."""
    member = SplitMember(
        compute=ComputeTime(per_sample_s=1 / 1200, fixed_s=0.02, backward_per_sample_s=1 / 600, backward_fixed_s=0.02)
    )
    values: dict[str, object] = {
        "pools": (JobPool(pool="p", max_workers=16, member=member),),
        "max_workers": 16,
        "batch_samples": 2048,
    }
    return JobDemand(key=key, **{**values, **more})  # type: ignore[arg-type]  # tests pass what they mean


def a_holder(key: str, count: int) -> JobDemand:
    """Return a job that barely needs its workers: a single one takes almost no more than the fixed time."""
    member = SplitMember(
        compute=ComputeTime(per_sample_s=1e-5, fixed_s=0.05, backward_per_sample_s=2e-5, backward_fixed_s=0.05)
    )
    job_pool = JobPool(pool="p", max_workers=16, member=member)
    return a_runner(key, pools=(job_pool,), batch_samples=256, current={"p": count}, pause_s=1.0)


@pytest.mark.parametrize("givers", [(), (8,), (4, 4), (6, 6)])
def test_gains_of_several_workers_at_once_are_found(givers: tuple[int, ...]) -> None:
    """One more worker does not pay for a long pause, but six do, free or from other jobs."""
    pools = [Pool(name="p", nodes=(1,) * (4 + sum(givers or (8,))))]
    slow = a_runner("a", current={"p": 4}, remaining_samples=2.4e6, pause_s=500.0)
    jobs = [slow, *(a_holder(f"g{i}", n) for i, n in enumerate(givers))]
    candidates = build_candidates(PoolCapacity(pools), jobs)
    now = candidates[0].by_counts[(4,)]
    assert candidates[0].by_counts[(5,)].score < now.score < candidates[0].by_counts[(8,)].score
    assert propose(PoolCapacity(pools), jobs).grants[0].workers["p"] >= 8

    # Beside jobs of another pool, it is found as well, and kept.
    others = [a_runner(f"o{i}", pools=(JobPool(pool="q", max_workers=1),)) for i in range(12)]
    many, both = [*jobs, *others], [*pools, Pool(name="q", nodes=(1,) * 12)]
    proposal = propose(PoolCapacity(both), many)
    assert proposal.grants[0].workers["p"] >= 8
    assert not any(grant.changed for grant in propose(PoolCapacity(both), carried_out(many, proposal)).grants)


def test_jobs_with_long_pauses_share_in_the_best_way() -> None:
    """Running jobs in up to two full pools, of which some need several workers for a change to pay.

    What pairs of jobs cannot do, three have to: in one of these cases a job gains 16 % by it, in others up to 37 % by
    pairs.
    """
    for seed in range(times(gate=60, every=300)):
        rng = random.Random(seed)
        pools = [Pool(name=name, nodes=(1,) * rng.randint(4, 8)) for name in ("p", "q")[: rng.randint(1, 2)]]
        free = {pool.name: len(pool.nodes) for pool in pools}
        jobs = []
        for j in range(rng.randint(2, 4)):
            current = {name: rng.randint(0, min(4, left)) for name, left in free.items()}
            free = {name: left - current[name] for name, left in free.items()}
            one = a_runner("any").pools[0]
            jobs.append(
                a_runner(
                    f"j{j}",
                    pools=tuple(replace(one, pool=pool.name, max_workers=8) for pool in pools),
                    batch_samples=rng.choice([64, 1024]),
                    current=current,
                    arrived_s=float(j),
                    communication=CommunicationTime(last_bucket_s=rng.choice([0.0, 0.3])),
                    communication_members=4,
                    pause_s=rng.choice([2.0, 300.0]),
                    remaining_samples=rng.choice([1e5, 1e6]),
                )
            )
        candidates = build_candidates(PoolCapacity(pools), jobs)
        runs, score = rank(chosen(candidates, propose(PoolCapacity(pools), jobs)))
        assert score == pytest.approx(the_best(candidates, pools, runs), abs=1e-3)


@pytest.mark.parametrize("seed", range(times(gate=6, every=200)))
def test_another_node_never_hurts(seed: int) -> None:
    """With one more node, as many jobs run in order, and the sum of scores is not lower (nothing runs yet)."""
    pools, jobs = an_instance(seed)
    jobs = [
        replace(job, current={}, pools=tuple(replace(job_pool, min_workers=0) for job_pool in job.pools))
        for job in jobs
    ]
    more = [replace(pools[0], nodes=(*pools[0].nodes, 4)), *pools[1:]]
    (runs, score), (runs_then, score_then) = (
        rank(chosen(build_candidates(PoolCapacity(own), jobs), propose(PoolCapacity(own), jobs)))
        for own in (pools, more)
    )
    assert runs_then >= runs
    if runs_then == runs:
        assert score_then >= score - 1e-3


def test_many_jobs_are_served_and_stable() -> None:
    """60 jobs on 120 nodes: every job that could run alone runs; deterministic, stable, accelerators accounted for."""
    rng = random.Random(5)
    pools = [Pool(name=f"p{i}", nodes=(4,) * 30, spot=i % 2 == 0) for i in range(4)]
    shapes = [an_instance(seed)[1][0] for seed in range(2000, 2010)]
    jobs = [
        replace(
            shape,
            key=f"j{j:02d}",
            arrived_s=float(j),
            current={},
            pools=tuple(replace(o, pool=f"p{rng.randrange(4)}") for o in shape.pools[:1]),
        )
        for j, shape in ((j, shapes[j % 10]) for j in range(60))
    ]
    proposal = propose(PoolCapacity(pools), jobs)
    assert propose(PoolCapacity(pools), jobs) == proposal
    assert sum(bool(grant.workers) for grant in proposal.grants) >= 40
    assert all(grant.workers or "jobs before it" not in grant.reason for grant in proposal.grants)
    assert not any(grant.changed for grant in propose(PoolCapacity(pools), carried_out(jobs, proposal)).grants)


def test_rates_agree_with_the_split() -> None:
    """The real-valued rate of many options at once equals that of the exact split, apart from whole samples."""
    rng = random.Random(3)
    job_pools = tuple(
        JobPool(pool=f"p{i}", max_workers=4, ranks=ranks, member=a_member(rng)) for i, ranks in enumerate((1, 2, 4))
    )
    exchange = CommunicationTime(overlapped_s=0.2, last_bucket_s=0.05, gamma=0.2)
    job = JobDemand(
        key="j", pools=job_pools, max_workers=12, batch_samples=3000, communication=exchange, communication_members=2
    )
    counts = np.array(list(product(range(3), repeat=3))[1:])
    found = rates(job, counts)
    compared = 0
    for row, rate in zip(counts.tolist(), found.tolist(), strict=True):
        members = [
            job_pool.member
            for job_pool, count in zip(job_pools, row, strict=True)
            for _ in range(count * job_pool.ranks)
            if job_pool.member is not None
        ]
        ring = (len(members) - 1) / len(members) / 0.5
        split = balance(
            3000,
            members,
            communication=replace(exchange, overlapped_s=0.2 * ring, last_bucket_s=0.05 * ring),
        )
        if isinstance(split, Split):
            compared += 1
            assert rate == pytest.approx(3000 / split.step_s, rel=0.02)
        else:
            assert rate == 0.0
    assert compared > 10


def test_capacity_is_exact_for_nested_sizes() -> None:
    """Counting by size equals trying every placement where larger sizes are multiples of smaller ones."""
    rng = random.Random(8)
    full = 0
    for _ in range(400):
        nodes = tuple(rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.randint(1, 4)))
        sizes = sorted((rng.choice([1, 2, 4]) for _ in range(rng.randint(1, 7))), reverse=True)
        occupancy = Occupancy(PoolCapacity([Pool(name="p", nodes=nodes)]))
        fits = occupancy.fits({("p", size): count for size, count in Counter(sizes).items()})
        assert fits == fits_by_trying(nodes, sizes)
        full += not fits
    assert 50 < full < 350
    mixed = Occupancy(PoolCapacity([Pool(name="p", nodes=(3, 2))]))
    assert mixed.fits({("p", 3): 1, ("p", 2): 1})
    assert not mixed.fits({("p", 3): 1, ("p", 2): 2})
    assert not mixed.fits({("nowhere", 1): 1})


def fits_in_vectors(nodes: tuple[tuple[int, ...], ...], needs: list[tuple[int, ...]]) -> bool:
    """Return whether workers with several needs fit, by trying every placement."""
    if not needs:
        return True
    for i, node in enumerate(nodes):
        left = tuple(have - one for have, one in zip(node, needs[0], strict=True))
        if min(left) >= 0 and fits_in_vectors((*nodes[:i], left, *nodes[i + 1 :]), needs[1:]):
            return True
    return False


def test_capacity_is_exact_for_several_resources() -> None:
    """Accelerators and processors: counting finds a packing where trying every placement finds one."""
    rng = random.Random(9)
    shapes = [(1, 2), (0, 3), (2, 1)]
    held = 0
    for _ in range(400):
        nodes = tuple((rng.choice([0, 2, 4]), rng.choice([4, 6, 9])) for _ in range(rng.randint(1, 3)))
        workers = [rng.choice(shapes) for _ in range(rng.randint(1, 6))]
        found = Occupancy(PoolCapacity([Pool(name="p", nodes=nodes)])).fits(
            {("p", need): n for need, n in Counter(workers).items()}
        )
        assert found == fits_in_vectors(nodes, workers)
        held += found
    assert 50 < held < 350
    beside = Occupancy(PoolCapacity([Pool(name="p", nodes=((4, 64),))]))
    assert beside.fits({("p", (4, 4)): 1, ("p", (0, 60)): 1}), "a job of processors stands beside one of accelerators"


def test_one_pool_of_a_job_on_two_sets_of_nodes_keeps_its_limits_together() -> None:
    """Three workers at most and one at least over both, wherever they are; the reason uses the job's own name."""
    job_pools = tuple(JobPool(pool=name, name="any", min_workers=1, max_workers=3) for name in ("left", "right"))
    pools = [Pool(name="left", nodes=(2,)), Pool(name="right", nodes=(4,))]
    job = JobDemand(key="j", pools=job_pools, max_workers=9, batch_samples=64)
    rows = [option.counts for option in build_candidates(PoolCapacity(pools), [job])[0].options]
    assert sorted(rows) == sorted(row for row in product(range(3), range(4)) if 1 <= sum(row) <= 3)
    grant = propose(PoolCapacity(pools), [job]).grants[0]
    assert sum(grant.workers.values()) == 3
    assert grant.reason == "starts with 3 any: speeds are not known yet"


def test_losses_start_from_a_prior() -> None:
    """Unseen spot capacity is taken to last a day; evidence takes over; on-demand capacity is trusted more."""
    day = 24 * 3600.0
    assert losses_per_s(Pool(name="p", spot=True)) == pytest.approx(1 / day)
    assert losses_per_s(Pool(name="p")) < losses_per_s(Pool(name="p", spot=True)) / 50
    seen = Pool(name="p", spot=True, losses=100, watched_s=100 * day / 8)
    assert losses_per_s(seen) == pytest.approx(8 / day, rel=0.05)
    calm = Pool(name="p", spot=True, losses=0, watched_s=50 * day)
    assert losses_per_s(calm) < 0.02 / day


@pytest.mark.parametrize("soon", [False, True])
def test_workers_of_a_job_that_is_about_to_be_measured_stay_for_a_small_gain(*, soon: bool) -> None:
    """A measured job is faster with one more worker; without measurements, the other one seems to lose little."""
    known = SplitMember(
        compute=ComputeTime(per_sample_s=1e-3, fixed_s=0.0, backward_per_sample_s=2e-3, backward_fixed_s=0.0)
    )
    new = JobDemand(
        key="new", pools=(JobPool(pool="p", max_workers=7),), max_workers=7, batch_samples=600,
        current={"p": 7}, measured_soon=soon,
    )  # fmt: skip
    old = JobDemand(
        key="old", pools=(JobPool(pool="p", max_workers=7, member=known),), max_workers=7, batch_samples=600,
        current={"p": 3},
    )  # fmt: skip
    capacity = PoolCapacity([Pool(name="p", nodes=(1,) * 10)])
    workers = {grant.key: dict(grant.workers) for grant in propose(capacity, [new, old]).grants}
    assert workers == ({"new": {"p": 7}, "old": {"p": 3}} if soon else {"new": {"p": 5}, "old": {"p": 5}})
    waiting = replace(old, key="waiting", current={}, min_workers=4)
    workers = {grant.key: dict(grant.workers) for grant in propose(capacity, [new, old, waiting]).grants}
    assert workers["waiting"]["p"] >= 4, "a minimum comes first"


@pytest.mark.parametrize("granted", [{}, {"p": 7}])
def test_a_granted_job_that_is_about_to_get_its_workers_keeps_its_grant(granted: dict[str, int]) -> None:
    known = SplitMember(
        compute=ComputeTime(per_sample_s=1e-3, fixed_s=0.0, backward_per_sample_s=2e-3, backward_fixed_s=0.0)
    )
    pool = JobPool(pool="p", max_workers=7)
    new = JobDemand(
        key="new", pools=(pool,), max_workers=7, batch_samples=600, granted=granted, measured_soon=True, arrived_s=1.0
    )
    old = JobDemand(key="old", pools=(replace(pool, member=known),), max_workers=7, batch_samples=600, current={"p": 3})
    capacity = PoolCapacity([Pool(name="p", nodes=(1,) * 10)])
    workers = [dict(grant.workers) for grant in propose(capacity, [new, old]).grants]
    assert workers == ([{"p": 7}, {"p": 3}] if granted else [{"p": 5}, {"p": 5}])
    late = replace(new, measured_soon=False)
    workers = [dict(grant.workers) for grant in propose(capacity, [late, old]).grants]
    assert workers == [{"p": 5}, {"p": 5}], "a job that could have begun long ago holds nothing"
