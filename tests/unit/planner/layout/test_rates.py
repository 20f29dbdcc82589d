"""The table of rates against the planner, which answers for one number of devices at a time."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import LayoutKind
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Objective, Pool
from heterotrain_planner.allocate.value import rates as value_rates
from heterotrain_planner.allocate.value import scored_options
from heterotrain_planner.layout import rates
from heterotrain_planner.layout.best import best_members
from heterotrain_planner.layout.cover import cover
from heterotrain_planner.layout.level import template_options
from heterotrain_planner.layout.problem import Link, Problem
from heterotrain_planner.layout.rates import LayoutRates
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.rough_cover import rough_cover
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from support.repeat import times
from unit.planner.layout.instances import a_problem
from unit.planner.layout.test_covers_against_brute_force import a_cluster

KINDS = frozenset({LayoutKind.REPLICATED, LayoutKind.PIPELINE})


def an_instance(seed: int) -> tuple[Problem, TemplateTable] | None:
    rng = random.Random(seed)
    problem = a_problem(rng, kinds=rng.randint(1, 3), units=rng.randint(3, 6), most=3, memory=(400, 2500))
    problem = replace(problem, batch_samples=256, links={}, default_link=Link(), least_members=rng.choice([1, 1, 2]))
    templates = template_table(problem)
    return (problem, templates) if isinstance(templates, TemplateTable) else None


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_every_number_of_devices_has_the_rate_of_its_best_members(seed: int) -> None:
    """Bounds of the planner's own search and of the table's times lie in between."""
    found = an_instance(seed)
    if found is None:
        return
    problem, templates = found
    names = [kind.name for kind in problem.kinds]
    counts = list(itertools.product(*(range(kind.count + 1) for kind in problem.kinds)))
    told = LayoutRates(templates, KINDS).of(names, np.array(counts))
    for row, rate in zip(counts, told.tolist(), strict=True):
        best = cover(templates, devices=row, kinds=KINDS) if any(row) else None
        if not isinstance(best, Cover):
            assert rate == 0, row
            continue
        # Simulated schedules may be shorter than the formula that both choose by.
        rough = rough_cover(templates, row, template_options(templates, (), KINDS, 1))
        assert rough is not None
        assert rate == pytest.approx(problem.batch_samples / rough.step_s, rel=0.05), row


def test_columns_of_one_kind_count_together_and_others_not_at_all() -> None:
    found = next(each for each in map(an_instance, range(40)) if each is not None and len(each[0].kinds) > 1)
    problem, templates = found
    table = LayoutRates(templates, KINDS)
    one, two = problem.kinds[0].name, problem.kinds[1].name
    counts = [kind.count for kind in problem.kinds[:2]]
    whole = table.of([one, two], np.array([counts]))
    split = table.of([one, "other", one, two], np.array([[counts[0] - 1, 7, 1, counts[1]]]))
    assert whole == split
    assert table.of([one, two], np.array([[c + 100 for c in counts]])) == whole, "devices beyond the table's are idle"


def test_more_devices_are_never_worth_less_where_exchanges_are_free() -> None:
    for problem, templates in filter(None, map(an_instance, range(20))):
        sizes = [kind.count + 1 for kind in problem.kinds]
        counts = np.array(list(itertools.product(*map(range, sizes))))
        table = LayoutRates(templates, KINDS).of([kind.name for kind in problem.kinds], counts).reshape(sizes)
        for axis in range(len(sizes)):
            assert (np.diff(table, axis=axis) >= -1e-9 * table.max()).all()


def test_a_large_table_counts_devices_in_groups_and_never_overrates(monkeypatch: pytest.MonkeyPatch) -> None:
    for problem, templates in filter(None, map(an_instance, range(20))):
        names = [kind.name for kind in problem.kinds]
        counts = np.array(list(itertools.product(*(range(kind.count + 1) for kind in problem.kinds))))
        fine = LayoutRates(templates, KINDS).of(names, counts)
        monkeypatch.setattr(rates, "MOST_WORK", 100)
        coarse = LayoutRates(templates, KINDS).of(names, counts)
        monkeypatch.undo()
        assert (coarse <= fine * (1 + 1e-9)).all()


def test_a_slow_exchange_makes_further_members_worth_less() -> None:
    problem, templates = next(each for each in map(an_instance, range(40)) if each is not None)
    slow = replace(problem, default_link=Link(bytes_per_s=1.0))
    again = template_table(slow)
    assert isinstance(again, TemplateTable)
    names, counts = [kind.name for kind in problem.kinds], np.array([[kind.count for kind in problem.kinds]])
    many = LayoutRates(templates, KINDS).of(names, counts)
    assert (LayoutRates(again, KINDS).of(names, counts) <= many).all()


@pytest.mark.parametrize("first", range(0, times(gate=10, every=400), 10))
def test_rates_count_the_exchange_of_the_owners(first: int) -> None:
    """Where links within kinds are faster than those between them: within a fifth of what the planner finds."""
    for seed in range(first, first + 10):
        problem = a_cluster(seed)
        templates = template_table(problem)
        found = best_members(templates, problem)
        if isinstance(templates, TemplateTable) and isinstance(found, Cover):
            counts = np.array([[kind.count for kind in problem.kinds]])
            rate = float(LayoutRates(templates, KINDS).of([kind.name for kind in problem.kinds], counts)[0])
            assert 0.8 < rate * found.step_s / problem.batch_samples < 1.1


def test_objectives_choose_among_layouts() -> None:
    """Speed takes all devices; cost and a late deadline the cheapest whole member; a close one enough of them."""
    problem = a_problem(random.Random(3), kinds=1, units=6, most=3, memory=(500, 500), batch_samples=256)
    kind = replace(problem.kinds[0], count=9)
    templates = template_table(replace(problem, kinds=(kind,), links={}, default_link=Link()))
    assert isinstance(templates, TemplateTable)
    table = LayoutRates(templates, KINDS)
    counts = np.arange(1, 10)[:, None]
    rate = table.of([kind.name], counts)
    least = int(np.flatnonzero(rate)[0]) + 1
    assert least > 1
    slow, fast = float(rate[least - 1]), float(rate[-1])

    def chosen(**fields: object) -> int:
        job = JobDemand(
            key="job",
            pools=(JobPool(pool=kind.name, max_workers=9, price_per_hour=1.0),),
            max_workers=9,
            batch_samples=256,
            pause_s=0.0,
            layouts=table,
            **fields,  # type: ignore[arg-type]  # tests pass what they mean
        )
        pools = {kind.name: Pool(name=kind.name, nodes=(9,))}
        return scored_options(job, pools, counts_OP=counts, rate_O=value_rates(job, counts))[0].workers

    def by(seconds: float) -> int:
        return chosen(objective=Objective.DEADLINE, remaining_samples=1e6, deadline_s=seconds)

    assert rate[chosen() - 1] == pytest.approx(fast)
    assert chosen(objective=Objective.COST) == int(np.argmax(rate / counts[:, 0])) + 1
    assert by(1e6 / slow * 10) == least
    assert least < by(1e6 / (slow + fast) * 2.3) <= 9
