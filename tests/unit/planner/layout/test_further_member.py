"""What one more member lacks, against all additions to the devices of small problems."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from heterotrain_core.contract.plan import LayoutKind
from heterotrain_planner.layout.further_member import lacking_devices
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from support.repeat import times
from unit.planner.layout.instances import a_problem

KINDS = frozenset({LayoutKind.REPLICATED, LayoutKind.PIPELINE})


def most_members(feasible: list[tuple[int, ...]], devices: tuple[int, ...]) -> int:
    """Return how many of these multisets fit into the devices side by side, by trying all of them."""
    found = 0
    for need in feasible:
        if all(a <= b for a, b in zip(need, devices, strict=True)):
            rest = tuple(b - a for a, b in zip(need, devices, strict=True))
            found = max(found, 1 + most_members(feasible, rest))
    return found


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_no_smaller_addition_allows_a_further_member(seed: int) -> None:
    rng = random.Random(seed)
    problem = a_problem(rng, kinds=rng.randint(1, 3), units=4, most=3, memory=(250, 900))
    templates = template_table(problem)
    if not isinstance(templates, TemplateTable):
        return
    counts = tuple(kind.count for kind in problem.kinds)
    feasible = [
        tuple(row) for row in templates.family.counts_UK[np.isfinite(templates.slowest_BU).any(axis=0)].tolist()
    ]
    for _ in range(3):
        have = tuple(rng.randint(0, count) for count in counts)
        before = most_members(feasible, have)
        better = [
            added
            for added in itertools.product(*(range(count - own + 1) for count, own in zip(counts, have, strict=True)))
            if most_members(feasible, tuple(a + b for a, b in zip(have, added, strict=True))) > before
        ]
        least = min(map(sum, better), default=0)
        found = lacking_devices(templates, have, counts, kinds=KINDS)
        assert sorted(found) == sorted(added for added in better if sum(added) == least)


def test_devices_beyond_the_possible_ones_are_not_named() -> None:
    problem = a_problem(random.Random(3), kinds=2, units=4, most=3)
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    have = [kind.count for kind in problem.kinds]
    assert lacking_devices(templates, have, have, kinds=KINDS) == ()
    assert lacking_devices(templates, have, [count + 5 for count in have], kinds=KINDS) == ()
