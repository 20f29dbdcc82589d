"""The operator's way to the core loses nothing: what it asks for has an answer as good as the best of all combinations.

The oracle knows nothing of node groups or options: it tries every number of workers for every pool of every job,
places them on the real nodes by trying every placement, and adds up speeds that are exactly additive by construction.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from heterotrain_core.split.member import SplitMember
from heterotrain_operator.decide.allocation.allocate import problem_of
from heterotrain_operator.decide.learn.throughput import ThroughputModel
from heterotrain_planner.allocate.propose import propose
from support.fake_cluster import NOW_S, pool
from support.multi_job_cluster import MultiJobCluster, even_time
from support.repeat import times

Workers = tuple[tuple[str, int], ...]
"""Per worker, the pool of nodes that it fits on (empty for any), and its cores."""


def an_instance(seed: int) -> tuple[MultiJobCluster, dict[str, list[tuple[str, str, int, int, float]]], dict[str, int]]:
    """Return a cluster, each job's pools as (name, nodes, most workers, cores, samples/s), and each job's minimum."""
    rng = random.Random(seed)  # noqa: S311  # oracles need reproducible random numbers
    multi = MultiJobCluster(seed)
    for kind in ("a", "b"):
        for number in range(rng.randint(1, 2)):
            multi.with_nodes(f"{kind}{number}", cpu=str(rng.randint(1, 3)))
    jobs: dict[str, list[tuple[str, str, int, int, float]]] = {}
    least: dict[str, int] = {}
    for j in range(rng.randint(2, 3)):
        name = f"j{j}"
        rows = []
        for pool_name in rng.sample(["a", "b"], rng.randint(1, 2)):
            nodes = rng.choice([pool_name, pool_name, ""])
            rows.append((pool_name, nodes, rng.randint(1, 3), rng.choice([1, 1, 2]), rng.choice([50.0, 100.0, 300.0])))
        jobs[name] = rows
        least[name] = rng.randint(1, 2)
        least[name] = min(least[name], sum(row[2] for row in rows))
        cluster = multi.add(
            name,
            *(
                pool(
                    pool_name,
                    maxReplicas=most,
                    nodeSelector={"pool": nodes} if nodes else {},
                    resources={"limits": {"cpu": str(cores)}},
                )
                for pool_name, nodes, most, cores, _ in rows
            ),
            elasticPolicy={"minReplicas": least[name]},
        )
        members = {row[0]: SplitMember(compute=even_time(row[4])) for row in rows}
        cluster.model = replace(cluster.model, throughput=ThroughputModel(members=members))
    return multi, jobs, least


def best_of_all(
    nodes: dict[str, int], jobs: dict[str, list[tuple[str, str, int, int, float]]], least: dict[str, int]
) -> tuple[tuple[bool, ...], float]:
    """Return which jobs run in the best combination, by order of arrival, and the sum of the logarithms of speeds."""

    @cache
    def placeable(free: tuple[int, ...], wanted: Workers) -> bool:
        if not wanted:
            return True
        (where, cores), rest = wanted[0], wanted[1:]
        return any(
            room >= cores and name.startswith(where) and placeable((*free[:i], room - cores, *free[i + 1 :]), rest)
            for i, (name, room) in enumerate(zip(nodes, free, strict=True))
        )

    choices = []
    for name, rows in jobs.items():
        counts = list(product(*(range(row[2] + 1) for row in rows)))
        choices.append([n for n in counts if sum(n) >= least[name]] + [(0,) * len(rows)])
    best: tuple[tuple[bool, ...], float] = ((), 0.0)
    for choice in product(*choices):
        rates = [
            sum(n * row[4] for n, row in zip(counts, rows, strict=True))
            for counts, rows in zip(choice, jobs.values(), strict=True)
        ]
        value = (tuple(rate > 0 for rate in rates), sum(math.log(rate) for rate in rates if rate > 0))
        if value <= best:
            continue
        wanted = [
            (row[1], row[3])
            for counts, rows in zip(choice, jobs.values(), strict=True)
            for n, row in zip(counts, rows, strict=True)
            for _ in range(n)
        ]
        if placeable(tuple(nodes.values()), tuple(sorted(wanted, key=lambda each: (not each[0], -each[1])))):
            best = value
    return best


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_no_combination_is_better_than_the_operator_s(seed: int) -> None:
    multi, jobs, least = an_instance(seed)
    nodes = {name: int(body["status"]["allocatable"]["cpu"]) for name, body in multi.nodes.items()}
    given: dict[str, dict[str, int]] = {name: {} for name in jobs}
    for competition in multi.competitions():
        problem = problem_of(competition, now_s=NOW_S)
        answer = propose(problem.capacity, problem.demands)
        assert answer.exact
        for demand, grant in zip(problem.demands, answer.grants, strict=True):
            own = given[demand.key.partition("/")[2]]
            for job_pool in demand.pools:
                own[job_pool.label] = own.get(job_pool.label, 0) + grant.workers.get(job_pool.key, 0)
    rates = [sum(given[name][row[0]] * row[4] for row in rows) for name, rows in jobs.items()]
    found = (tuple(rate > 0 for rate in rates), sum(math.log(rate) for rate in rates if rate > 0))
    best = best_of_all(nodes, jobs, least)
    assert found[0] == best[0]
    assert found[1] == pytest.approx(best[1], abs=1e-4)
