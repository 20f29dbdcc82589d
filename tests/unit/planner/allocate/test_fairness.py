"""What the fair product gives and what it does not: sharing incentive, envy, Pareto efficiency and times to the end."""

from __future__ import annotations

import math
import random

import pytest
from heterotrain_planner.allocate.propose import propose
from support.fairness import (
    Fairness,
    Instance,
    Running,
    Workers,
    an_instance,
    measured,
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
