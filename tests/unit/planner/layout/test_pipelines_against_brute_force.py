"""Pipelines and cuts against all orders of kinds and all cuts, on hundreds of random problems."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_planner.layout.best_pipelines import Least, best_pipelines, trace
from heterotrain_planner.layout.costs import MOST_CLASSES, MOST_CUTS, costs_of, link_classes
from heterotrain_planner.layout.cut import cut, finalists, layout_of, memory_reach, slowest_with_room
from heterotrain_planner.layout.family import family_of, parts_of
from heterotrain_planner.layout.problem import DeviceKind, Link
from support.repeat import times
from unit.planner.layout.instances import a_problem, pipelines

SIZE = 3


def some_problem(rng: random.Random, **changes: int) -> tuple:
    """Return a problem measured at some sizes of micro-batch, with the costs of one size, measured or not."""
    measured = rng.choice([(1,), (1, 2), (2, 5)])
    problem = a_problem(rng, kinds=rng.randint(1, 3), units=rng.randint(2, 6), micro_batches=measured, **changes)
    return problem, costs_of(problem, SIZE), [kind.count for kind in problem.kinds]


@pytest.mark.parametrize("seed", range(times(gate=24, every=1200)))
@pytest.mark.parametrize("least", Least)
def test_the_table_has_the_best_pipeline_of_every_multiset(seed: int, least: Least) -> None:
    problem, costs, counts = some_problem(random.Random(seed), batch_samples=9 if seed % 5 == 0 else 64)
    family = parts_of(counts)
    found = best_pipelines(costs, family, least=least, keep=True)
    goal = max if least is Least.SLOWEST else sum
    for index, devices in enumerate(family.counts_UK.tolist()):
        times = {(order, cuts): busy for order, cuts, busy in pipelines(problem, devices, size=SIZE)}
        slowest_s, fill_s = float(found.slowest_U[index]), float(found.fill_U[index])
        if not times:
            assert math.isinf(slowest_s)
            continue
        best = min(goal(busy) for busy in times.values())
        assert (slowest_s if least is Least.SLOWEST else fill_s) == pytest.approx(best, rel=1e-9)
        stages = trace(costs, family, found, least=least, index=index)
        busy = times[tuple(kind for kind, _, _ in stages), tuple(edge for _, edge, _ in stages[1:])]
        assert (max(busy), sum(busy)) == pytest.approx((slowest_s, fill_s), rel=1e-9)


def test_random_problems_are_feasible_and_infeasible() -> None:
    """The oracle tests would show little if memory never bound, or if nothing ever fitted."""
    fits = [
        bool(list(pipelines(problem, counts, size=SIZE)))
        for problem, _, counts in map(some_problem, map(random.Random, range(200)))
    ]
    assert 40 < sum(fits) < 160


@pytest.mark.parametrize("seed", range(times(gate=40, every=2000)))
def test_a_cut_is_the_best_for_its_number_of_micro_batches(seed: int) -> None:
    rng = random.Random(seed)
    problem, costs, counts = some_problem(rng)
    micro_batches = rng.choice([1, 2, 3, 5, 8, 20])
    times = [sum(busy) + (micro_batches - 1) * max(busy) for _, _, busy in pipelines(problem, counts, size=SIZE)]
    found = cut(costs, counts, micro_batches, tolerance=1e-9)
    if found is None or not times:
        assert found is None
        assert not times
        return
    assert found.share_s(micro_batches) == pytest.approx(min(times), rel=1e-6)
    layout = layout_of(problem, costs, found.stages)
    assert sum(stage.busy_s for stage in layout.stages) == pytest.approx(found.fill_s)
    assert max(stage.busy_s for stage in layout.stages) == pytest.approx(found.slowest_s)
    assert [stage.first_unit for stage in layout.stages][1:] == list(layout.cuts)
    memory = {kind.name: kind.memory_bytes for kind in problem.kinds}
    assert all(stage.memory_bytes <= memory[stage.kind] for stage in layout.stages)
    assert dict(layout.devices) == {kind.name: kind.count for kind in problem.kinds if kind.count}


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_no_cut_is_shorter_than_the_first_one_by_more_than_the_tolerance(seed: int) -> None:
    rng = random.Random(seed)
    problem, costs, counts = some_problem(rng, most=3)
    times = [sum(busy) + 6 * max(busy) for _, _, busy in pipelines(problem, counts, size=SIZE)]
    found = finalists(costs, counts, 7, tolerance=0.2)
    assert bool(found) == bool(times)
    if found:
        assert found[0].share_s(7) * (1 - 0.2) <= min(times) * (1 + 1e-9)
        shares = [each.share_s(7) for each in found]
        assert shares == sorted(shares)


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_a_level_limits_every_stage(seed: int) -> None:
    rng = random.Random(seed)
    problem, costs, counts = some_problem(rng)
    busy = [each for _, _, each in pipelines(problem, counts, size=SIZE)]
    level_s = rng.choice([max(each) for each in busy]) if busy else 1.0
    within = [sum(each) for each in busy if max(each) <= level_s * (1 + 1e-12)]
    found = best_pipelines(costs, parts_of(counts), least=Least.FILL, level_s=level_s * (1 + 1e-12))
    assert float(found.fill_U[-1]) == pytest.approx(min(within, default=math.inf), rel=1e-9)


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_memory_reach_is_the_longest_suffix_that_any_arrangement_holds(seed: int) -> None:
    rng = random.Random(seed)
    problem, costs, counts = some_problem(rng)
    family = parts_of(counts)
    last = len(costs.unit_E) - 1

    def longest(devices: tuple[int, ...]) -> int:
        """Return the same by trying all suffixes as models of their own."""
        for start in range(last):
            units = problem.units[start:]
            shorter = replace(problem, units=units)
            parts = parts_of(devices).counts_UK.tolist()
            if any(True for row in parts for _ in pipelines(shorter, row, size=SIZE)):
                return last - start
        return 0

    reached = memory_reach(costs, family)
    for index, devices in enumerate(family.counts_UK.tolist()):
        assert reached[index] == longest(tuple(devices))


def test_more_memory_never_slows_the_slowest_stage() -> None:
    for seed in range(40):
        _, costs, counts = some_problem(random.Random(seed))
        found = best_pipelines(costs, parts_of(counts))
        assert slowest_with_room(costs, counts) <= found.slowest_U[-1] * (1 + 1e-12)


def test_units_of_a_deep_model_form_groups() -> None:
    problem = a_problem(random.Random(1), units=300)
    costs = costs_of(problem, 1)
    assert len(costs.unit_E) <= MOST_CUTS + 1
    assert (costs.unit_E[0], costs.unit_E[-1]) == (0, 300)
    assert (np.diff(costs.unit_E) > 0).all()
    assert costs.state_E[-1] == sum(unit.parameter_bytes for unit in problem.units) * 4


def test_many_different_links_form_classes_that_are_never_too_fast() -> None:
    problem = a_problem(random.Random(2), kinds=3)
    names = [kind.name for kind in problem.kinds]
    links = {
        (one, other): Link(bytes_per_s=10.0 ** (3 + i + 2 * j), latency_s=0.001 * i)
        for i, one in enumerate(names)
        for j, other in enumerate(names[: i + 1])
    }
    problem = replace(problem, links=links)
    classes, class_KK = link_classes(problem)
    assert len(classes) <= MOST_CLASSES
    for i, one in enumerate(names):
        for j, other in enumerate(names):
            assert classes[class_KK[i, j]].seconds(1e6) >= problem.link(one, other).seconds(1e6)


@pytest.mark.parametrize("seed", range(times(gate=6, every=200)))
def test_a_family_has_all_parts_of_each_of_its_multisets(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.randint(0, 9) for _ in range(rng.randint(1, 6))] + [1]
    family = family_of(counts, most_stages=rng.randint(1, 12), most_entries=rng.choice([1, 50, 400, 10**6]))
    rows = [tuple(row) for row in family.counts_UK.tolist()]
    assert len(set(rows)) == len(rows)
    for index, row in enumerate(rows):
        assert all(0 <= number <= count for number, count in zip(row, counts, strict=True))
        for kind, number in enumerate(row):
            fewer = (*row[:kind], number - 1, *row[kind + 1 :])
            before = int(family.before_UK[index, kind])
            assert (before >= 0) == (number > 0 and sum(row) > 1)
            assert before < 0 or rows[before] == fewer
    sizes = family.counts_UK.sum(axis=1)
    assert [int(sizes[start]) for start in family.starts[:-1]] == list(range(1, int(sizes[-1]) + 1))


def test_a_family_stays_small_for_many_kinds_of_many_devices() -> None:
    family = family_of([1000] * 32, most_stages=64, most_entries=20_000)
    assert int((family.counts_UK > 0).sum()) <= 20_000
    assert family.most_by_kinds[0] == 64
    assert len(family.most_by_kinds) >= 2


def test_a_kind_without_devices_is_in_no_multiset() -> None:
    problem = a_problem(random.Random(3))
    kinds = (replace(problem.kinds[0], count=0), DeviceKind(name="k1", count=2, memory_bytes=5000))
    costs = costs_of(replace(problem, kinds=kinds), 1)
    family = parts_of([0, 2])
    assert family.counts_UK[:, 0].sum() == 0
    assert np.isfinite(best_pipelines(costs, family).slowest_U).all()
