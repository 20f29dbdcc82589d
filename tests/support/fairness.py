"""Jobs that share nodes by the operator's product of rates: who gains, who loses, who envies whom.

Instances are so small that the best allocation by any rule is found by dynamic programming over the nodes in use. So
the rules are compared at their own optimum, and no search is judged.

Legend: axes of arrays are the nodes in use of each of the two pools.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.candidate import Candidate
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool
from heterotrain_planner.allocate.propose import build_candidates

Workers = tuple[int, ...]


class Instance(NamedTuple):
    """Jobs that may all use two pools."""

    capacity: PoolCapacity
    jobs: list[JobDemand]

    @property
    def nodes(self) -> Workers:
        """Nodes of each pool."""
        return tuple(len(pool.nodes) for pool in self.capacity.pools.values())

    @property
    def equal(self) -> Workers:
        """An equal part of each pool."""
        return tuple(count // len(self.jobs) for count in self.nodes)

    def rates(self) -> list[dict[Workers, float]]:
        """Return each job's rate with any workers."""
        return [rates_of(candidate) for candidate in build_candidates(self.capacity, self.jobs)]


def an_instance(rng: random.Random, *, additive: bool) -> Instance:
    """Return two to four jobs, each open to two pools whose nodes they could share equally; none runs yet."""
    count = rng.randint(2, 4)
    pools = [Pool(name=name, nodes=(1,) * count * rng.randint(1, 2)) for name in "ab"]
    jobs = []
    for number in range(count):
        speeds = [rng.uniform(100, 1000) for _ in pools]
        jobs.append(
            JobDemand(
                key=f"j{number}",
                pools=tuple(
                    JobPool(
                        pool=pool.name,
                        max_workers=99,
                        member=_member(speed, 0.0 if additive else rng.uniform(0, 0.05)),
                    )
                    for pool, speed in zip(pools, speeds, strict=True)
                ),
                max_workers=99,
                batch_samples=4096,
                communication=CommunicationTime(last_bucket_s=0.0 if additive else rng.uniform(0, 1.0)),
                communication_members=4,
                arrived_s=float(number),
            )
        )
    return Instance(PoolCapacity(pools), jobs)


def _member(per_s: float, fixed_s: float) -> SplitMember:
    third = 1 / per_s / 3
    return SplitMember(
        compute=ComputeTime(per_sample_s=third, fixed_s=fixed_s, backward_per_sample_s=2 * third, backward_fixed_s=0.0)
    )


def rates_of(candidate: Candidate) -> dict[Workers, float]:
    """Return the job's rate with any workers."""
    return {option.counts: option.rate_per_s for option in candidate.options}


# -- rules -----------------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """A job as a rule sees it.

    Attributes:
        rates: by workers.
        equal_rate: with an equal part of each pool.
    """

    rates: dict[Workers, float]
    equal_rate: float


def product_of_rates(jobs: Sequence[Running], nodes: Workers) -> list[Workers]:
    """Return the allocation with the largest product of rates: what the operator's allocation maximises."""
    return _best(jobs, nodes, lambda _, rate: math.log(rate))


def product_above_equal(jobs: Sequence[Running], nodes: Workers) -> list[Workers]:
    """Return the same among those in which no job is slower than with an equal part."""
    return _best(jobs, nodes, lambda job, rate: math.log(rate) if rate >= job.equal_rate * (1 - 1e-9) else -math.inf)


def _best(jobs: Sequence[Running], nodes: Workers, score: Callable[[Running, float], float]) -> list[Workers]:
    """Return the workers of each job with the largest sum of scores; empty where none is finite."""
    shape = tuple(count + 1 for count in nodes)
    most = np.zeros(shape)
    picks = []
    for job in jobs:
        # The most with any nodes in use, this job included, and the workers of this job in it.
        after, pick = np.full(shape, -math.inf), np.zeros((*shape, 2), dtype=int)
        for (a, b), rate in job.rates.items():
            own = score(job, rate) if rate > 0 else -math.inf
            if a > nodes[0] or b > nodes[1] or own == -math.inf:
                continue
            reached = most[: shape[0] - a, : shape[1] - b] + own
            better = reached > after[a:, b:]
            after[a:, b:][better] = reached[better]
            pick[a:, b:][better] = (a, b)
        most = after
        picks.append(pick)
    if not math.isfinite(most[nodes]):
        return []
    found: list[Workers] = []
    at = nodes
    for pick in reversed(picks):
        a, b = (int(n) for n in pick[at])
        found.append((a, b))
        at = (at[0] - a, at[1] - b)
    return found[::-1]


# -- measures --------------------------------------------------------------------------------------------------------


class Fairness(NamedTuple):
    """Counts over instances.

    Attributes:
        jobs: all jobs.
        below_equal: jobs that are more than 1 % slower than with an equal part of each pool: no sharing incentive.
        worst_of_equal: least rate, as a part of the rate with an equal part of each pool.
        pairs: all ordered pairs of jobs.
        envious: pairs in which one job would be more than 1 % faster with the other's workers.
        beyond_one: of these, the pairs in which it still would be, whichever single worker the other one gave up.
        dominated: instances in which another allocation makes some job more than 0.1 % faster and no job slower.
    """

    jobs: int = 0
    below_equal: int = 0
    worst_of_equal: float = 1.0
    pairs: int = 0
    envious: int = 0
    beyond_one: int = 0
    dominated: int = 0


def measured(found: Fairness, instance: Instance, workers: Sequence[Workers]) -> Fairness:
    """Return the counts with one more instance, in which the jobs have these workers."""
    rates, equal = instance.rates(), instance.equal
    own = [rate[has] for rate, has in zip(rates, workers, strict=True)]
    parts = [rate / each[equal] for rate, each in zip(own, rates, strict=True)]
    envious = beyond = 0
    for i, j in permutations(range(len(own)), 2):
        if rates[i].get(workers[j], 0.0) > 1.01 * own[i]:
            envious += 1
            less = [tuple(n - (k == gone) for k, n in enumerate(workers[j])) for gone in (0, 1) if workers[j][gone]]
            beyond += min(rates[i].get(counts, 0.0) for counts in less) > 1.01 * own[i]
    return Fairness(
        jobs=found.jobs + len(own),
        below_equal=found.below_equal + sum(part < 0.99 for part in parts),
        worst_of_equal=min(found.worst_of_equal, *parts),
        pairs=found.pairs + len(own) * (len(own) - 1),
        envious=found.envious + envious,
        beyond_one=found.beyond_one + beyond,
        dominated=found.dominated + _dominated(rates, own, instance.nodes),
    )


def _dominated(rates: Sequence[dict[Workers, float]], own: Sequence[float], nodes: Workers) -> bool:
    """Return whether another allocation is no slower for any job and faster for one."""
    for faster in range(len(own)):
        least = [rate * (1.001 if i == faster else 1 - 1e-9) for i, rate in enumerate(own)]
        jobs = [Running(each, rate) for each, rate in zip(rates, least, strict=True)]
        if product_above_equal(jobs, nodes):
            return True
    return False
