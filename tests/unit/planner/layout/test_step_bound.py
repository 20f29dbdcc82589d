"""The bound of a step: no pipeline and no members that were found are below it. Covers' tests have brute force."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import LayoutKind
from heterotrain_planner.layout.best import allowed_kinds, best_members
from heterotrain_planner.layout.problem import Link, Problem
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.step_bound import Pipelines, least_step
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from support.repeat import times
from unit.planner.layout.instances import a_problem
from unit.planner.layout.test_covers_against_brute_force import played
from unit.planner.layout.test_exchange import with_updates


@pytest.mark.parametrize("first", range(0, times(gate=40, every=4000), 40))
def test_no_pipeline_has_more_micro_batches_than_its_multiset_permits(first: int) -> None:
    """Any order and cut that memory permits, with few and many micro-batches, by playing the trainer's passes."""
    reached = 0
    for seed in range(first, first + 40):
        rng = random.Random(seed)
        problem = a_problem(rng, kinds=3, units=6, most=3, memory=(200, 1500), batch_samples=40)
        templates = template_table(problem)
        if not isinstance(templates, TemplateTable):
            continue
        rows = templates.family.counts_UK.tolist()
        bounds = [Pipelines(templates, row, np.arange(len(rows)), 16) for row in range(len(templates.costs))]
        for index in rng.sample(range(len(rows)), min(6, len(rows))):
            names = [kind.name for kind, n in zip(problem.kinds, rows[index], strict=True) for _ in range(n)]
            for _ in range(5 if len(names) <= len(problem.units) else 0):
                rng.shuffle(names)
                edges = (0, *sorted(rng.sample(range(1, 6), len(names) - 1)), 6)
                count = rng.choice((1, 2, 3, 5, 8, 20))
                share_s = played(problem, tuple(zip(names, edges, edges[1:], strict=False)), count)
                if math.isfinite(share_s):
                    left_J = np.full(len(rows), share_s)
                    most = max(float(each.most(left_J)[index]) for each in bounds)
                    assert most >= count, (seed, names, edges, count)
                    reached += most == count
    assert reached > 0


def a_larger_problem(seed: int) -> Problem:
    """Return up to eighteen devices, some of which may divide the model's tensors; links and updates differ."""
    rng = random.Random(seed)
    sizes = rng.choice(((1,), (1, 2), (2, 4)))
    problem = a_problem(
        rng, kinds=rng.choice((1, 2, 3)), units=rng.choice((4, 8, 12)), most=6, memory=(400, 4000),
        micro_batches=sizes, batch_samples=rng.choice((9, 32, 200)),
    )  # fmt: skip
    slow = Link(bytes_per_s=rng.choice((20.0, 200.0, math.inf)), latency_s=rng.choice((0.0, 0.02)))
    fast = Link(bytes_per_s=slow.bytes_per_s * 10)
    links = {(kind.name, kind.name): fast for kind in problem.kinds}
    problem = replace(
        problem, links=links, default_link=slow, least_members=rng.choice((1, 2)), may_recompute=rng.random() < 0.3,
        may_shard=rng.random() < 0.5, reduces_late=rng.random() < 0.5, may_cut=rng.random() < 0.8,
    )  # fmt: skip
    return with_updates(problem, rng) if rng.random() < 0.5 else problem


@pytest.mark.parametrize("first", range(0, times(gate=24, every=2400), 24))
def test_no_members_that_are_found_are_below_the_bound(first: int) -> None:
    ratios = []
    for seed in range(first, first + 24):
        problem = a_larger_problem(seed)
        templates = template_table(problem)
        found = best_members(templates, problem)
        if isinstance(found, Cover) and isinstance(templates, TemplateTable):
            devices = [kind.count for kind in problem.kinds]
            kinds = allowed_kinds(problem)
            bound_s = least_step(templates, devices, kinds, known_s=found.step_s * 4)
            assert 0 < bound_s <= found.step_s * (1 + 1e-9), seed
            assert least_step(templates, devices, kinds, known_s=found.step_s) <= found.step_s
            ratios.append(found.step_s / bound_s)
    assert len(ratios) > 12
    assert sorted(ratios)[len(ratios) // 2] < 1.3, "the bound says something"


def test_whole_models_on_single_devices_are_bounded_closely() -> None:
    """Nothing but whole micro-batches is lost then."""
    problem = a_problem(random.Random(3), kinds=2, memory=(1e5, 1e5), batch_samples=60)
    kinds = tuple(replace(kind, count=2) for kind in problem.kinds)
    problem = replace(problem, kinds=kinds, links={}, default_link=Link(), may_cut=False)
    templates = template_table(problem)
    found = best_members(templates, problem)
    assert isinstance(templates, TemplateTable)
    assert isinstance(found, Cover)
    bound_s = least_step(templates, [2, 2], allowed_kinds(problem), known_s=2 * found.step_s)
    assert bound_s == pytest.approx(found.step_s, rel=2e-3)


def test_sharded_members_have_no_larger_micro_batches_than_the_planner_tries() -> None:
    """Without the limit, tables of each size take gigabytes."""
    problem = a_problem(random.Random(3), kinds=1, micro_batches=(70_000,), batch_samples=70_000)
    kinds = tuple(replace(kind, count=4, memory_bytes=10**9) for kind in problem.kinds)
    problem = replace(problem, kinds=kinds, links={}, default_link=Link(), may_cut=False, may_shard=True)
    templates = template_table(problem)
    found = best_members(templates, problem)
    assert isinstance(templates, TemplateTable)
    assert isinstance(found, Cover)
    bound_s = least_step(templates, [4], allowed_kinds(problem), known_s=2 * found.step_s)
    assert bound_s == pytest.approx(found.step_s, rel=2e-3)


def test_more_devices_never_raise_the_bound() -> None:
    templates = template_table(a_larger_problem(5))
    assert isinstance(templates, TemplateTable)
    counts = [kind.count for kind in templates.problem.kinds]
    bounds = [
        least_step(templates, [max(1, count - less) for count in counts], frozenset(LayoutKind), known_s=1e4)
        for less in (2, 1, 0)
    ]
    assert all(a >= b * (1 - 1e-3) for a, b in itertools.pairwise(bounds))


def test_links_that_count_as_slower_ones_prove_nothing() -> None:
    """A fourth different link joins a slower one, and members on their true links may be faster than any found."""
    problem = a_problem(random.Random(1), kinds=3, units=4, most=2, memory=(4000, 8000), batch_samples=8)
    names = [kind.name for kind in problem.kinds]
    pairs = [*itertools.combinations_with_replacement(names, 2)]
    for different, is_proved in ((3, True), (4, False)):
        links = {pair: Link(bytes_per_s=100.0 + min(i, different - 1)) for i, pair in enumerate(pairs)}
        own = replace(problem, links=links)
        templates = template_table(own)
        found = best_members(templates, own)
        assert isinstance(templates, TemplateTable)
        assert isinstance(found, Cover)
        devices = [kind.count for kind in own.kinds]
        least_s = least_step(templates, devices, allowed_kinds(own), known_s=2 * found.step_s)
        assert (least_s > 0) is is_proved
