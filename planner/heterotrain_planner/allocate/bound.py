"""How far an allocation may be from the best one: the duality gap at the pools' prices.

For any prices ``w`` of the pools, no options that fit together score more than ``Σ_jobs max (score - w · part) + Σ w``
(see ``prices``), as long as parts of workers that fit together are 1 at most. For jobs whose options are not all
listed, ``unlisted`` bounds the maximum over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterotrain_planner.allocate.candidate import Candidate, Choice
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.prices import find_prices
from heterotrain_planner.allocate.unlisted import most_net_score


def most_gain(candidates: Sequence[Candidate], choice: Choice, capacity: PoolCapacity) -> float:
    """Return the most that the best options for the jobs that run could gain: 0.003 for 0.3 %.

    The gain is that of the weighted geometric mean of the jobs' objectives: rate, or rate for the price.

    Args:
        candidates: the jobs.
        choice: their options, which together fit; only jobs that run in it count.
        capacity: of the pools.
    """
    running = [(candidate, option) for candidate, option in zip(candidates, choice, strict=True) if option is not None]
    if not running:
        return 0.0
    prices = find_prices(candidates, choice, capacity, valid=True)
    most = prices.of_all_pools
    for candidate, _ in running:
        listed = float(prices.net_scores(candidate).max())
        if not candidate.complete:
            slots = [capacity.slots(job_pool.pool, job_pool.size) for job_pool in candidate.job.pools]
            cost_P = prices.of_workers(candidate)
            listed = most_net_score(candidate.job, capacity.pools, slots, cost_P, listed=listed)
        most += listed
    reached = sum(option.score for _, option in running)
    weight = sum(candidate.job.weight * candidate.job.exponent for candidate, _ in running)
    return math.expm1(min(700.0, max(0.0, most - reached) / max(weight, 1e-300)))
