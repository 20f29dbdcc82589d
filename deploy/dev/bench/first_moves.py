"""Workers that the allocation moves while the speeds of new jobs become known one after another, by its margin.

Jobs of the kinds of ``lab.scale.workload`` fill a cluster without known speeds. In each round, a part of them gets the
granted workers, those of the round before are measured, and the allocation decides anew. A moved worker is a pod that
ends and another one that starts. The alternative is the margin that measured jobs have, 3 %. Rates are geometric means
over the jobs by the true speeds, relative to the allocation that knows all of them from the start.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate import value
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool
from heterotrain_planner.allocate.propose import propose

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
from lab.scale import workload

SECONDS = {"a100": 0.003, "v100": 0.006, "t4-spot": 0.012}
"""Seconds of a rank for one sample."""
FIXED_S, BATCH = 0.03, 512
SETTLING = 4
"""Rounds after all jobs have begun."""
MARGINS = (value.LEAST_GAIN, 0.1, value.LEAST_GAIN_UNMEASURED, 0.5)


def job(number: int) -> JobDemand:
    """Return a job without known speeds, which has just begun."""
    spec = workload.job(number)["spec"]
    pools = {each["name"]: each["maxReplicas"] for each in spec["workerPools"]}
    return JobDemand(
        key=f"job-{number}",
        pools=tuple(JobPool(pool=name, max_workers=most) for name, most in pools.items()),
        min_workers=spec["elasticPolicy"]["minReplicas"],
        max_workers=sum(pools.values()),
        batch_samples=BATCH,
        arrived_s=float(number),
        measured_soon=True,
    )


def measured(demand: JobDemand) -> JobDemand:
    """Return a job with its true speeds."""

    def member(pool: str) -> SplitMember:
        third = SECONDS[pool] / 3
        times = ComputeTime(
            per_sample_s=third, fixed_s=FIXED_S / 2, backward_per_sample_s=2 * third, backward_fixed_s=FIXED_S / 2
        )
        return SplitMember(compute=times)

    return replace(
        demand, pools=tuple(replace(each, member=member(each.pool)) for each in demand.pools), measured_soon=False
    )


def with_workers(demand: JobDemand, workers: Mapping[str, int]) -> JobDemand:
    """Return a job that has these workers."""
    return replace(demand, current=dict(workers), granted={})


def objective(demands: Sequence[JobDemand]) -> float:
    """Return the mean logarithm of the true rates of the jobs' current workers."""
    logarithms = []
    for demand in demands:
        known = measured(demand)
        counts = [[demand.current.get(each.key, 0) for each in known.pools]]
        logarithms.append(math.log(float(value.rates(known, np.array(counts))[0])))
    return sum(logarithms) / len(logarithms)


def run(jobs: int, rounds: int, margin: float, *, seed: int) -> tuple[int, float, float]:
    """Return the moved workers, and the mean rate over the rounds and after them, as parts of the best one."""
    size = workload.Size(jobs=jobs, pods=10 * jobs)
    each_node = (workload.GPUS_PER_NODE,)
    capacity = PoolCapacity([Pool(name=name, nodes=each_node * count) for name, count in size.nodes.items()])
    demands = [job(number) for number in range(jobs)]
    known = [measured(each) for each in demands]
    best = [with_workers(*each) for each in zip(known, granted(capacity, known), strict=True)]
    vars(value)["LEAST_GAIN_UNMEASURED"] = margin
    order = list(range(jobs))
    random.Random(seed).shuffle(order)  # noqa: S311  # an order of passes
    edges = [each * jobs // rounds for each in range(rounds + 1)]
    grants, moved, rates = granted(capacity, demands), 0, []
    for number in range(rounds + SETTLING):
        for i in order[slice(*edges[number - 1 : number + 1])] if 0 < number <= rounds else ():
            demands[i] = measured(demands[i])
        begun = set(order[: edges[min(number + 1, rounds)]])
        for i, grant in enumerate(grants):
            moved += sum(max(0, count - grant.get(key, 0)) for key, count in demands[i].current.items())
            demands[i] = (
                with_workers(demands[i], grant) if i in begun else replace(demands[i], current={}, granted=dict(grant))
            )
        grants = granted(capacity, demands)
        rates.append(objective([with_workers(*each) for each in zip(demands, grants, strict=True)]))
    ceiling = objective(best)
    return moved, math.exp(sum(rates) / len(rates) - ceiling), math.exp(rates[-1] - ceiling)


def granted(capacity: PoolCapacity, demands: Sequence[JobDemand]) -> list[Mapping[str, int]]:
    """Return the workers of each job in a proposal."""
    return [grant.workers for grant in propose(capacity, demands).grants]


def rows(jobs: int, rounds: int, seeds: int) -> Mapping[float, tuple[float, float, float]]:
    """Return by margin the means over all seeds."""
    found = {}
    for margin in MARGINS:
        each = [run(jobs, rounds, margin, seed=seed) for seed in range(seeds)]
        found[margin] = tuple(sum(column) / seeds for column in zip(*each, strict=True))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    print("| margin of unmeasured jobs | moved workers, of all | rate meanwhile | rate in the end |")
    print("| ---: | ---: | ---: | ---: |")
    for margin, (moved, meanwhile, end) in rows(options.jobs, options.rounds, options.seeds).items():
        print(f"| {margin:.0%} | {moved / (10 * options.jobs):.1%} | {meanwhile:.4f} | {end:.4f} |", flush=True)


if __name__ == "__main__":
    main()
