"""What the fair product gives and what it does not: sharing incentive, envy, Pareto efficiency and times to the end."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from heterotrain_planner.allocate.propose import propose
from support.fairness import (
    Fairness,
    Instance,
    Running,
    Workers,
    an_instance,
    finish_ratios,
    finish_time_fairness,
    measured,
    product_above_equal,
    product_of_rates,
)


def proposed(instance: Instance) -> list[Workers]:
    """Return the workers that the operator's allocation gives."""
    grants = propose(instance.capacity, instance.jobs).grants
    return [tuple(grant.workers.get(name, 0) for name in instance.capacity.pools) for grant in grants]


@pytest.mark.parametrize(
    ("additive", "below_equal", "worst", "envious", "beyond_one"),
    [(True, 0.2, 0.65, 0.25, 0.0), (False, 0.25, 0.65, 0.3, 0.06)],
)
def test_the_fair_product_is_efficient_and_nearly_fair(
    additive: bool, below_equal: float, worst: float, envious: float, beyond_one: float
) -> None:
    """Nothing is better for all. Where speeds add up, no envy is beyond one worker; docs/mathematics.md has more."""
    rng = random.Random(5)
    found = Fairness()
    for _ in range(12):
        instance = an_instance(rng, additive=additive)
        found = measured(found, instance, proposed(instance))
    assert found.dominated == 0
    assert found.below_equal <= below_equal * found.jobs
    assert found.worst_of_equal >= worst
    assert found.envious <= envious * found.pairs
    assert found.beyond_one <= beyond_one * found.pairs


def test_the_allocation_has_the_largest_product_of_rates() -> None:
    """Against dynamic programming over the nodes in use, an independent optimum."""
    rng = random.Random(8)
    for number in range(20):
        instance = an_instance(rng, additive=number % 2 == 0)
        rates = instance.rates()
        best = product_of_rates_of(instance)
        own = math.fsum(math.log(rate[has]) for rate, has in zip(rates, proposed(instance), strict=True))
        assert own == pytest.approx(math.fsum(math.log(r[h]) for r, h in zip(rates, best, strict=True)), abs=1e-9)


def product_of_rates_of(instance: Instance) -> list[Workers]:
    """Return the best allocation by that rule at the start."""
    rates = instance.rates()
    return product_of_rates([Running(each, each[instance.equal]) for each in rates], instance.nodes)


def test_the_product_ends_jobs_sooner_than_fairness_by_finish_times() -> None:
    """The trade-off: the least largest ratio is lower where it is the aim, and jobs take longer on average.

    Where no job may be slower than with an equal part, all rates together are lower, too.
    """
    rng = random.Random(9)
    instances = [an_instance(rng, additive=False) for _ in range(15)]
    product, fair, above = (
        [finish_ratios(instance, rule) for instance in instances]
        for rule in (product_of_rates, finish_time_fairness, product_above_equal)
    )
    mean = [statistics.mean(ratio for ratios in each for ratio in ratios) for each in (product, fair, above)]
    worst = [max(map(max, each)) for each in (product, fair, above)]
    assert mean[0] < mean[1]
    assert worst[1] <= 1 + 1e-9
    assert worst[1] < worst[0]
    assert worst[2] <= 1 + 1e-9
