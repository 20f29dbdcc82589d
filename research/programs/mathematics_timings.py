"""`make bench-mathematics`: duration of decisions, and epochs until shares are optimal. Prints Markdown.

Pure computation on one core, for docs/benchmarks.md. Other work on the machine affects the wall seconds, but hardly the
CPU seconds. The last two tables are simulated, on clusters whose times are true lines;
simulated_comparison.py has tables of real GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from heterotrain_core.contract import metrics
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance_many
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool
from heterotrain_planner.allocate.propose import propose
from heterotrain_planner.allocate.rate_cache import RateCache
from heterotrain_planner.goodput import candidate_batches
from heterotrain_planner.perf.counters import CounterKey, Counters, Observation, observe
from heterotrain_planner.perf.fit import fit_member
from heterotrain_planner.planning.shares import MemberEvidence, SharesRequest, decide_shares
from heterotrain_simulator.baselines import Even, Proportional
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.cannikin import Cannikin
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.heterotrain_policy import HeterotrainPolicy
from heterotrain_simulator.policy import Policy
from heterotrain_simulator.scenario import Group, Noise, Scenario
from heterotrain_simulator.workloads import Workload

NEAR = 1.02
CLUSTERS = 100
EPOCHS = 6
EPOCH_STEPS = 60
LEARNING_NOISES = (Noise(variation=0.05), Noise(variation=0.05, correlation=0.5))
REST_MEMBERS, REST_RUNS, REST_EPOCHS = 3, 5, 51
REST_NOISES = (
    *LEARNING_NOISES,
    Noise(variation=0.1),
    Noise(variation=0.1, correlation=0.5),
    Noise(variation=0.1, correlation=0.8),
)
EXCHANGE = CommunicationTime(overlapped_s=0.03, last_bucket_s=0.01, gamma=0.15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one call, the best of several, to exclude other work on the machine."""

    cpu_s: float
    wall_s: float


def cost(call: Callable[[], object], *, repeats: int) -> Cost:
    """Return the cost of a call."""
    found = []
    for _ in range(repeats):
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        call()
        found.append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    return Cost(cpu_s=min(cpu_s for cpu_s, _ in found), wall_s=min(wall_s for _, wall_s in found))


def members(count: int, rng: np.random.Generator) -> list[SplitMember]:
    """Return members whose speeds lie within a factor of ten, a quarter of them with a memory cap and accumulation."""
    return [
        SplitMember(
            compute=ComputeTime(
                per_sample_s=pace / 3,
                fixed_s=float(rng.uniform(0.005, 0.03)),
                backward_per_sample_s=2 * pace / 3,
                backward_fixed_s=float(rng.uniform(0.005, 0.03)),
            ),
            floor_samples=1,
            micro_cap_samples=64 if i % 4 == 0 else None,
        )
        for i, pace in enumerate(np.exp(rng.uniform(np.log(2e-4), np.log(2e-3), count)).tolist())
    ]


def solver() -> None:
    """Print the time of one pass over 50 candidate batches, by number of members."""
    print("| split, 50 candidate batches | CPU | wall | CPU a member |")
    print("| --- | ---: | ---: | ---: |")
    for count in (16, 64, 250, 1000, 4000):
        group = members(count, np.random.default_rng(1))
        batches = candidate_batches(least=16 * count, most=256 * count)
        answers = balance_many(batches, group, communication=EXCHANGE)
        if not all(isinstance(answer, Split) for answer in answers):
            raise SystemExit(f"{count} members: a batch could not be split")
        took = cost(lambda g=group, b=batches: balance_many(b, g, communication=EXCHANGE), repeats=7)  # type: ignore[misc]  # bound now
        print(
            f"| {count} members | {_ms(took.cpu_s)} | {_ms(took.wall_s)} | {1e6 * took.cpu_s / count:.0f} µs |",
            flush=True,
        )


def observations(member: str, count: int, rng: np.random.Generator) -> tuple[Observation, ...]:
    """Return scrapes of ten steps each at several shares, with 5 % noise."""
    known = CounterKey(member=member, share_samples=1, micro_batch_samples=1)
    nothing = Counters(steps=0, phase_s={}, phase_s2={})
    parts = {metrics.PHASE_FORWARD: 1 / 3, metrics.PHASE_BACKWARD: 2 / 3, metrics.PHASE_COMPUTE: 1.0}
    found: list[Observation] = []
    for number in range(count):
        share = int(rng.choice([24, 28, 32, 36, 40]))
        seconds = (0.02 + 0.001 * share) * (1 + 0.05 * rng.standard_normal(10))
        counters = Counters(
            steps=10,
            phase_s={phase: float(part * seconds.sum()) for phase, part in parts.items()},
            phase_s2={phase: float((part * seconds) ** 2 @ np.ones(10)) for phase, part in parts.items()},
        )
        key = CounterKey(member=member, share_samples=share, micro_batch_samples=share)
        found.extend(observe({known: nothing}, {known: nothing, key: counters}, ended_s=float(number)))
    return tuple(found)


def fits() -> None:
    """Print the time of fits, and of a whole decision over shares."""
    rng = np.random.default_rng(2)
    print("| what | CPU | wall |")
    print("| --- | ---: | ---: |")
    for count in (10, 80):
        seen = observations("m", count, rng)
        took = cost(lambda s=seen: fit_member(s), repeats=20)  # type: ignore[misc]  # bound now
        print(f"| fit of one member, {count} observations | {_ms(took.cpu_s)} | {_ms(took.wall_s)} |", flush=True)
    for ranks in (8, 64):
        evidence = tuple(
            MemberEvidence(member=f"m{i}", pool=f"p{i % 3}", observations=observations(f"m{i}", 80, rng))
            for i in range(ranks)
        )
        request = SharesRequest(total_samples=32 * ranks, members=evidence)
        took = cost(lambda r=request: decide_shares(r), repeats=3)  # type: ignore[misc]  # bound now
        print(
            f"| decision over shares, {ranks} ranks of 80 observations | {_ms(took.cpu_s)} | {_ms(took.wall_s)} |",
            flush=True,
        )


def allocation() -> None:
    """Print the time of one allocation: the first one, and the next one with unchanged grants, as in the operator."""
    print("| what | CPU | wall |")
    print("| --- | ---: | ---: |")
    for jobs, kinds, nodes in ((200, 8, 500), (200, 200, 500), (1000, 8, 2000), (1000, 1000, 2000), (1000, 8, 500)):
        pools, demands = contenders(jobs, kinds=kinds, nodes=nodes)
        what = f"{jobs:,} jobs of {kinds:,} kinds on {nodes:,} nodes of 10 pools"
        _allocations(what, pools, demands, repeats=3 if jobs < 1000 else 1)  # noqa: PLR2004  # it takes long
    for jobs, sizes in ((2, (16,) * 3), (3, (2,) * 40), (2, (40, 40))):
        pools, demands = open_to_all(jobs, sizes)
        _allocations(f"{jobs} jobs open to {len(sizes)} pools of {sizes[0]} nodes", pools, demands, repeats=3)


def _allocations(what: str, pools: Sequence[Pool], demands: Sequence[JobDemand], *, repeats: int) -> None:
    first = cost(lambda: propose(PoolCapacity(pools), demands), repeats=repeats)
    cache = RateCache()
    grants = propose(PoolCapacity(pools), demands, rate_cache=cache).grants
    running = [replace(job, current=grant.workers) for job, grant in zip(demands, grants, strict=True)]
    again = cost(lambda: propose(PoolCapacity(pools), running, rate_cache=cache), repeats=3)
    for which, took in (("first", first), ("again, nothing has changed", again)):
        print(f"| allocation, {what}, {which} | {_ms(took.cpu_s)} | {_ms(took.wall_s)} |", flush=True)


def open_to_all(jobs: int, nodes: Sequence[int]) -> tuple[list[Pool], list[JobDemand]]:
    """Return pools with so many nodes, and jobs that may have all of them: more options than are listed."""
    rng = np.random.default_rng(4)
    pools = [Pool(name=f"pool-{i}", nodes=(1,) * count) for i, count in enumerate(nodes)]
    return pools, [
        JobDemand(
            key=f"job-{number}",
            pools=tuple(
                JobPool(pool=pool.name, max_workers=len(pool.nodes), member=member)
                for pool, member in zip(pools, members(len(pools), rng), strict=True)
            ),
            max_workers=sum(nodes),
            batch_samples=4096,
            communication=EXCHANGE,
            communication_members=8,
            remaining_samples=1e6,
            arrived_s=float(number),
        )
        for number in range(jobs)
    ]


def contenders(jobs: int, *, kinds: int, nodes: int) -> tuple[list[Pool], list[JobDemand]]:
    """Return ten pools, and jobs that may have up to eight workers in three of them each."""
    rng = np.random.default_rng(3)
    names = [f"pool-{i}" for i in range(10)]
    pools = [Pool(name=name, nodes=(1,) * (nodes // 10), spot=i % 2 == 1) for i, name in enumerate(names)]
    known = [(rng.choice(names, 3, replace=False).tolist(), members(3, rng)) for _ in range(kinds)]
    return pools, [
        JobDemand(
            key=f"job-{number}",
            pools=tuple(JobPool(pool=pool, max_workers=8, member=one) for pool, one in zip(*of_kind, strict=True)),
            max_workers=8,
            batch_samples=512,
            communication=EXCHANGE,
            communication_members=8,
            remaining_samples=1e6,
            arrived_s=float(number),
        )
        for number, of_kind in enumerate(known[number % kinds] for number in range(jobs))
    ]


def lines(seed: int) -> Scenario:
    """Return a random cluster of three to twelve members with linear times and a significant exchange."""
    rng = np.random.default_rng(seed)
    kinds = int(rng.integers(2, 5))
    tables = {}
    for kind in range(kinds):
        pace_ms, fixed_ms = float(np.exp(rng.uniform(np.log(0.5), np.log(5)))), float(rng.uniform(5, 40))
        tables[f"gpu-{kind}"] = ((1, fixed_ms + pace_ms), (4096, fixed_ms + 4096 * pace_ms))
    groups = tuple(Group(pool=gpu, gpu=gpu, count=int(rng.integers(1, 4))) for gpu in tables)
    batch = 64 * sum(group.count for group in groups)
    workload = Workload(
        name="lines",
        what="a random cluster",
        source="drawn",
        step_ms=tables,
        backward_part=2 / 3,
        gradient_bytes=100e6,
        epoch_samples=EPOCH_STEPS * batch,
        base_batch=batch,
        most_batch=batch,
        noise=(),
        target="none",
        target_steps=1e12,
        restart_s=0,
    )
    return Scenario(
        name=f"lines-{seed}",
        workload=workload,
        groups=groups,
        network=Network(bytes_per_s=float(10 ** rng.uniform(8.8, 10)), latency_s=2e-5),
        noise=Noise(variation=0.05),
        batch_samples=batch,
        end_epochs=EPOCHS,
    )


def epochs_until_near(of: Scenario, policy: Policy, *, seed: int) -> tuple[float, float]:
    """Return the epochs until shares stay within 2 % of the true optimum, and their relative excess in the last epoch.

    The number of epochs is infinite if shares never stay there.
    """
    truth = GroundTruth(of)
    workers = [Worker(name=f"{g.pool}-{i}", pool=g.pool, gpu=g.gpu, index=i) for g in of.groups for i in range(g.count)]
    best = truth.optimum(workers, of.batch_samples, 0.0)
    if best is None:
        raise SystemExit(f"{of.name} has more members than samples")
    by_epoch: dict[int, float] = {}
    for row in simulate(of, policy, seed=seed).periods:
        by_epoch[row.epoch] = max(by_epoch.get(row.epoch, 0.0), row.planned_s)
    far = [epoch for epoch, planned_s in by_epoch.items() if planned_s > NEAR * best.step_s]
    after = max(far, default=-1) + 1
    return (after if after < EPOCHS else float("inf")), by_epoch[EPOCHS - 1] / best.step_s - 1


def learning() -> None:
    """Print the epochs until each policy's shares are optimal."""
    kinds: dict[str, Callable[[], Policy]] = {
        "even": Even,
        "proportional (LB-BSP)": Proportional,
        "Cannikin as published": Cannikin,
        "heterotrain": HeterotrainPolicy,
    }
    print(f"Simulated: {CLUSTERS} random clusters of true lines, {EPOCH_STEPS} steps an epoch.\n")
    print(
        "| shares within 2 % of the optimum | noise, its correlation | after one epoch | after two | median | worst "
        "| off at the end, worst |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for (name, policy), noise in itertools.product(kinds.items(), LEARNING_NOISES):
        scenarios = [(seed, replace(lines(seed), noise=noise)) for seed in range(1, CLUSTERS + 1)]
        found = [epochs_until_near(of, policy(), seed=seed) for seed, of in scenarios]
        after = sorted(epochs for epochs, _ in found)
        one, two = (sum(epochs <= limit for epochs in after) / CLUSTERS for limit in (1, 2))
        print(
            f"| {name} | {noise.variation:.0%}, {noise.correlation:.0%} | {one:.0%} | {two:.0%} "
            f"| {_epochs(statistics.median(after))} | {_epochs(after[-1])} "
            f"| {max(off for _, off in found):.1%} |",
            flush=True,
        )


def rest() -> None:
    """Print the changes of shares by the heterotrain policy on an unchanged cluster, and their largest cost."""
    seeds = range(1, REST_RUNS + 1)
    print(f"Simulated: {REST_RUNS} jobs of {REST_MEMBERS} equal workers, {REST_EPOCHS} epochs.\n")
    print("| noise, its correlation | pools | changes of shares in 100 epochs | longest step beyond the optimum |")
    print("| --- | --- | ---: | ---: |")
    for noise in REST_NOISES:
        for alone in (False, True):
            found = [_at_rest(REST_MEMBERS, noise, alone=alone, seed=seed) for seed in seeds]
            changes = 100 * sum(changed for changed, _ in found) / (REST_EPOCHS * REST_RUNS)
            pools = "one each" if alone else "one for all"
            print(
                f"| {noise.variation:.0%}, {noise.correlation:.0%} | {pools} | {changes:.2f} "
                f"| {max(off for _, off in found):.1%} |",
                flush=True,
            )


def _at_rest(members: int, noise: Noise, *, alone: bool, seed: int) -> tuple[int, float]:
    """Return the number of changes of shares of equal workers, and the largest relative excess of a step."""
    batch = 64 * members
    gpu = {"gpu": ((1, 21.0), (4096, 4116.0))}
    workload = replace(
        lines(1).workload, step_ms=gpu, epoch_samples=EPOCH_STEPS * batch, base_batch=batch, most_batch=batch
    )
    pools = {f"pool-{i}": 1 for i in range(members)} if alone else {"pool": members}
    of = replace(
        lines(1),
        workload=workload,
        groups=tuple(Group(pool=pool, gpu="gpu", count=count) for pool, count in pools.items()),
        noise=noise,
        batch_samples=batch,
        end_epochs=REST_EPOCHS,
    )
    rows = simulate(of, HeterotrainPolicy(), seed=seed).periods
    best_s = rows[0].planned_s  # even shares
    changed = sum(new.shares != old.shares for old, new in itertools.pairwise(rows))
    return changed, max(row.planned_s for row in rows) / best_s - 1


def _epochs(count: float) -> str:
    return f"not within {EPOCHS}" if count > EPOCHS else f"{count:g}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the chosen tables, all by default."""
    parts: dict[str, Callable[[], None]] = {
        "solver": solver,
        "fit": fits,
        "allocation": allocation,
        "learning": learning,
        "rest": rest,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []])
    chosen = parser.parse_args(arguments).parts or list(parts)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for name, part in parts.items():
        if name in chosen:
            part()
            print()


if __name__ == "__main__":
    main()
