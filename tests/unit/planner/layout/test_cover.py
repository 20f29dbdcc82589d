"""Covers: members against enumeration, and what has to hold for any problem."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import Binding, LayoutKind, Member
from heterotrain_planner.layout.best import best_cover
from heterotrain_planner.layout.cover import cover, drawing
from heterotrain_planner.layout.exchange import exchange_seconds
from heterotrain_planner.layout.level import FINE, Level, Search, TemplateOptions, template_options
from heterotrain_planner.layout.problem import Link, Problem
from heterotrain_planner.layout.result import Cover, DeviceLayout, NoLayout, PlannedShard, Template
from heterotrain_planner.layout.schedule import passes, share_seconds
from heterotrain_planner.layout.sharded import sharded_templates
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from heterotrain_planner.perf.model import compute_s
from hypothesis import given
from hypothesis import strategies as st
from support.repeat import times
from unit.planner.layout.instances import a_problem

EVERY = frozenset(LayoutKind)


def a_book(seed: int, **changes: object) -> tuple[Problem, TemplateTable | NoLayout]:
    rng = random.Random(seed)
    sizes = rng.choice([(1,), (2, 1), (1, 3)])
    problem = a_problem(
        rng, kinds=rng.randint(1, 3), units=rng.randint(2, 6), most=3, memory=(400, 2500), micro_batches=sizes
    )
    problem = replace(problem, **{"batch_samples": rng.choice([12, 31, 64]), **changes})  # type: ignore[arg-type]  # changes of any field
    return problem, template_table(problem)


def by_enumeration(options: TemplateOptions, counts: list[int], least: int) -> float:
    """Return the least time of any members: try every candidate time with every set of members."""
    columns = [j for j in range(len(options.need_JK)) if np.isfinite(options.first_BJ[:, j]).any()]

    def most(level_s: float) -> float:
        """Return the most samples within a time, by a search over all sets of members."""
        samples_J, choice_J = options.samples(level_s)
        floors = [int(options.samples_BJ[choice_J[j], j]) for j in range(len(samples_J))]

        def best(start: int, left: tuple[int, ...], room: int, members: int) -> float:
            value = 0.0 if members >= least else -math.inf
            for place in range(start, len(columns)):
                column = columns[place]
                need = options.need_JK[column].tolist()
                if (
                    samples_J[column] > 0
                    and floors[column] <= room
                    and all(a <= b for a, b in zip(need, left, strict=True))
                ):
                    rest = tuple(b - a for a, b in zip(need, left, strict=True))
                    value = max(value, samples_J[column] + best(place, rest, room - floors[column], members + 1))
            return value

        # Each member fills at least one micro-batch, and of all members one may be filled up with a single sample.
        return best(0, tuple(counts), options.batch_samples + int(options.samples_BJ.max()) - 1, 0)

    times = {
        float(options.first_BJ[b, j] + n * options.next_BJ[b, j])
        for b in range(len(options.first_BJ))
        for j in columns
        if np.isfinite(options.first_BJ[b, j])
        for n in range(math.ceil(options.batch_samples / options.samples_BJ[b, j]))
    }
    ordered = sorted(times)
    low, high = 0, len(ordered)
    while low < high:  # the most samples never fall with time, except where a larger size has a larger floor
        middle = (low + high) // 2
        low, high = (low, middle) if most(ordered[middle]) >= options.batch_samples else (middle + 1, high)
    return ordered[low] if low < len(ordered) else math.inf


@pytest.mark.parametrize("seed", range(times(gate=24, every=1200)))
def test_members_take_the_batch_in_the_least_time(seed: int) -> None:
    problem, templates = a_book(seed)
    if isinstance(templates, NoLayout):
        return
    counts = [kind.count for kind in problem.kinds]
    if sum(counts) > 6:
        counts = [min(2, count) for count in counts]
    options = template_options(templates, (), EVERY, 1)
    for least in (1, 2):
        best_s = by_enumeration(options, counts, least)
        found = least_level(options, counts, least)
        if found is None:
            assert math.isinf(best_s)
            continue
        assert best_s * (1 - 1e-9) <= found.level_s <= best_s * (1 + 2 * FINE.close)
        assert found.bound_s <= best_s * (1 + 1e-9)
        used = sum(number * options.need_JK[column] for column, number in found.amounts.items())
        assert (used <= np.array(counts)).all()
        assert sum(found.amounts.values()) >= least


def test_two_members_share_a_batch_that_does_not_fill_their_micro_batches() -> None:
    """Ten samples in micro-batches of eight: two members with one each take half as long as one member with two."""
    problem = a_problem(random.Random(1), kinds=1, memory=(1e5, 1e5), micro_batches=(8,), batch_samples=10)
    problem = replace(
        problem, kinds=(replace(problem.kinds[0], count=2, memory_bytes=10**5),), default_link=Link(), links={}
    )
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    found = cover(templates, kinds=frozenset({LayoutKind.REPLICATED}))
    assert isinstance(found, Cover)
    assert [member.micro_batches for member in found.members] == [1, 1]
    assert sum(member.share_samples for member in found.members) == 10


def least_level(options: TemplateOptions, counts: list[int], least: int) -> Level | None:
    search = Search(options, np.array(counts), least)
    least_s = search.relaxed_s()
    return None if least_s is None else search.whole(least_s)


def share_s(member: Member) -> float:
    assert member.compute is not None
    return compute_s(member.compute, member.micro_batches * member.micro_batch_samples)


def check(problem: Problem, templates: TemplateTable, found: Cover, counts: list[int]) -> None:
    """Assert what holds for every cover."""
    assert sum(member.share_samples for member in found.members) == problem.batch_samples
    assert len(found.members) >= problem.least_members
    used = {kind.name: 0 for kind in problem.kinds}
    memory = {kind.name: kind.memory_bytes for kind in problem.kinds}
    for member, layout in zip(found.members, found.layouts, strict=True):
        stages = layout.stages
        assert [stage.first_unit for stage in stages] == [0, *(stage.last_unit + 1 for stage in stages[:-1])]
        assert stages[-1].last_unit == len(problem.units) - 1
        assert all(stage.memory_bytes <= memory[stage.kind] for stage in stages)
        assert (member.layout.kind is LayoutKind.REPLICATED) == (len(stages) == 1)
        assert 0 < member.share_samples <= member.micro_batches * member.micro_batch_samples
        assert (member.micro_batches - 1) * member.micro_batch_samples < member.share_samples
        total = -(-problem.batch_samples // member.micro_batch_samples)
        assert member.micro_batches >= len(stages) or total < problem.most_stages
        assert share_s(member) == pytest.approx(share_seconds(passes(stages), member.micro_batches))
        for name, number in layout.devices.items():
            used[name] += number
    left = {kind.name: count - used[kind.name] for kind, count in zip(problem.kinds, counts, strict=True)}
    assert {name: count for name, count in left.items() if count} == dict(found.unused)
    assert min(left.values()) >= 0
    slowest_s = max(share_s(member) for member in found.members)
    layouts = found.layouts
    assert found.exchange_s == pytest.approx(exchange_seconds(problem, layouts))
    assert found.step_s == pytest.approx(slowest_s + found.exchange_s)
    assert found.samples_per_s == pytest.approx(problem.batch_samples / found.step_s)
    assert 0 < found.prediction.efficiency <= 1 + 1e-9
    assert found.reason


@given(seed=st.integers(0, 10**6), least=st.integers(1, 3))
def test_a_cover_keeps_every_limit(seed: int, least: int) -> None:
    problem, templates = a_book(seed, least_members=least)
    if isinstance(templates, NoLayout):
        assert templates.reason
        return
    found = cover(templates)
    counts = [kind.count for kind in problem.kinds]
    if isinstance(found, NoLayout):
        assert "least_members" in found.reason
        assert least > 1
    else:
        check(problem, templates, found, counts)


@given(seed=st.integers(0, 10**6), data=st.data())
def test_what_is_left_after_a_loss_is_a_look_up(seed: int, data: st.DataObject) -> None:
    """The table of all devices covers the rest as well as a table made for the rest."""
    problem, templates = a_book(seed)
    if isinstance(templates, NoLayout):
        return
    left = [data.draw(st.integers(0, kind.count)) for kind in problem.kinds]
    if not any(left):
        return
    rest = replace(
        problem, kinds=tuple(replace(kind, count=count) for kind, count in zip(problem.kinds, left, strict=True))
    )
    fresh = template_table(rest)
    found = cover(templates, devices=left)
    if isinstance(fresh, NoLayout):
        assert found == fresh
        return
    again = cover(fresh)
    assert isinstance(found, Cover)
    assert isinstance(again, Cover)
    check(rest, templates, found, left)
    assert found.step_s == pytest.approx(again.step_s, rel=0.01)


def test_the_named_remedy_makes_the_model_fit() -> None:
    problems, helped = times(gate=75, every=300), 0
    for seed in range(problems):
        rng = random.Random(seed)
        problem = a_problem(rng, kinds=2, units=6, memory=(200, 700))
        answer = template_table(problem)
        if not isinstance(answer, NoLayout):
            continue
        assert answer.needed_bytes > 0
        assert answer.available_bytes == sum(kind.count * kind.memory_bytes for kind in problem.kinds)
        assert answer.fitting_units < len(problem.units)
        if "Add " not in answer.reason:
            assert "alone needs" in answer.reason or "No number of further devices" in answer.reason
            continue
        number, name = answer.reason.split("Add ")[1].split(" of kind ")
        added = int(number.split()[0])
        kinds = [
            replace(kind, count=kind.count + added if kind.name == name.rstrip(".") else kind.count)
            for kind in problem.kinds
        ]
        assert isinstance(template_table(replace(problem, kinds=tuple(kinds))), TemplateTable)
        helped += 1
    assert helped > problems / 15


def test_a_model_that_fits_nowhere_is_refused_with_bytes_and_a_remedy() -> None:
    problem = a_problem(random.Random(1), kinds=1, units=8, most=1, memory=(500, 500))
    answer = template_table(replace(problem, kinds=(replace(problem.kinds[0], count=2),)))
    assert isinstance(answer, NoLayout)
    assert "the model needs" in answer.reason
    assert "bytes" in answer.reason
    assert f"{answer.fitting_units} of 8 units" in answer.reason


def test_a_unit_larger_than_every_device_is_named() -> None:
    problem = a_problem(random.Random(1), kinds=1, units=3, memory=(1000, 1000))
    units = (replace(problem.units[0], parameter_bytes=600), *problem.units[1:])
    answer = template_table(replace(problem, units=units))
    assert isinstance(answer, NoLayout)
    assert answer.reason.startswith("unit 0 (u0) alone needs")


def test_a_wrong_problem_is_an_answer() -> None:
    answer = template_table(replace(a_problem(random.Random(1)), batch_samples=0))
    assert isinstance(answer, NoLayout)
    assert answer.reason.startswith("batch_samples is 0")


def roomy(seed: int) -> Problem:
    return a_problem(random.Random(seed), kinds=2, units=6, most=3, memory=(9000, 9000), batch_samples=256)


@pytest.mark.parametrize("seed", range(times(gate=6, every=120)))
def test_the_mode_of_all_layouts_is_as_good_as_each_alone(seed: int) -> None:
    templates = template_table(roomy(seed))
    assert isinstance(templates, TemplateTable)
    every = cover(templates)
    assert isinstance(every, Cover)
    for kind in (LayoutKind.REPLICATED, LayoutKind.PIPELINE):
        alone = cover(templates, kinds=frozenset({kind}))
        if isinstance(alone, Cover):
            assert {member.layout.kind for member in alone.members} == {kind}
            assert every.step_s <= alone.step_s * 1.01


def test_devices_that_hold_everything_stay_alone_where_links_are_free() -> None:
    problem = replace(roomy(3), links={}, default_link=Link())
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    found = cover(templates)
    assert isinstance(found, Cover)
    assert {member.layout.kind for member in found.members} == {LayoutKind.REPLICATED}
    assert found.exchange_s == 0
    assert found.prediction.efficiency > 0.8  # units differ in which kind suits them


def test_a_slow_exchange_makes_pipelines_pay() -> None:
    """A pipeline exchanges one stage a device, a replicated member the whole model."""
    fast = replace(roomy(3), links={}, default_link=Link(bytes_per_s=1e5))
    units = tuple(replace(unit, boundary_bytes=0, parameter_bytes=200) for unit in fast.units)
    slow = replace(fast, units=units, default_link=Link(bytes_per_s=1.0))
    kinds = []
    for problem in (replace(fast, units=units), slow):
        templates = template_table(problem)
        assert isinstance(templates, TemplateTable)
        found = cover(templates)
        assert isinstance(found, Cover)
        kinds.append({member.layout.kind for member in found.members})
    assert kinds == [{LayoutKind.REPLICATED}, {LayoutKind.PIPELINE}]


def test_fewer_members_than_asked_is_refused() -> None:
    problem = replace(roomy(3), least_members=50)
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    answer = cover(templates)
    assert isinstance(answer, NoLayout)
    assert "least_members is 50" in answer.reason
    assert answer.reason.endswith("or accept fewer members")


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_the_kinds_that_a_further_member_lacks_make_one(seed: int) -> None:
    """With them, the devices form one member more."""
    problem, templates = a_book(seed, least_members=1)
    if isinstance(templates, NoLayout):
        return
    names, counts = [kind.name for kind in problem.kinds], [kind.count for kind in problem.kinds]
    answer = cover(replace(templates, problem=replace(problem, least_members=50)))
    assert isinstance(answer, NoLayout)
    formed = int(answer.reason.split(" member")[0].rsplit(" ", 1)[1])
    found = re.search(r"a further member lacks (.+?):", answer.reason)
    assert found is not None
    lacking = {name: int(number) for number, name in (each.split() for each in found[1].split(" and "))}

    kinds = tuple(
        replace(kind, count=count + lacking.get(name, 0))
        for kind, name, count in zip(problem.kinds, names, counts, strict=True)
    )
    bigger = template_table(replace(problem, kinds=kinds, least_members=formed + 1))
    assert isinstance(bigger, TemplateTable)
    assert isinstance(cover(bigger), Cover)


def test_a_layout_that_no_device_can_have_is_refused() -> None:
    problem = a_problem(random.Random(5), kinds=1, units=6, most=3, memory=(500, 500))
    templates = template_table(replace(problem, kinds=(replace(problem.kinds[0], count=9),)))
    assert isinstance(templates, TemplateTable)
    answer = cover(templates, kinds=frozenset({LayoutKind.REPLICATED}))
    assert isinstance(answer, NoLayout)
    assert "no replicated layout" in answer.reason


def test_a_sharded_member_takes_part_where_it_is_faster() -> None:
    problem = roomy(3)
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    counts = tuple(kind.count for kind in problem.kinds)
    halves = [
        PlannedShard(
            kind=kind.name, state_ratio=1 / sum(counts), share_samples=1, micro_batch_samples=1, memory_bytes=1
        )
        for kind in problem.kinds
        for _ in range(kind.count)
    ]
    layout = DeviceLayout(kind=LayoutKind.SHARDED, shards=tuple(halves))
    for seconds, expected in ((1e-3, True), (1e6, False)):
        template = Template(devices=counts, micro_batch_samples=8, first_s=seconds, next_s=seconds, layout=layout)
        found = cover(templates, further=(template,))
        assert isinstance(found, Cover)
        assert any(member.layout.kind is LayoutKind.SHARDED for member in found.members) == expected
        assert sum(member.share_samples for member in found.members) == 256


def test_limits_name_what_costs_most() -> None:
    # One device: it computes. Two behind a slow link: they wait for bytes.
    problem = replace(roomy(3), links={}, batch_samples=64)
    one = replace(problem, kinds=(replace(problem.kinds[0], count=1), replace(problem.kinds[1], count=0)))
    two = replace(one, kinds=(replace(one.kinds[0], count=2), one.kinds[1]), default_link=Link(latency_s=3.0))
    for each, kinds, limit in (
        (one, EVERY, Binding.COMPUTE),
        (two, frozenset({LayoutKind.PIPELINE}), Binding.COMMUNICATION),
    ):
        templates = template_table(each)
        assert isinstance(templates, TemplateTable)
        found = cover(templates, kinds=kinds)
        assert isinstance(found, Cover)
        assert found.prediction.bindings == (limit,)
        assert limit.value.lower() in found.reason


def test_a_layout_is_drawn_for_people() -> None:
    templates = template_table(replace(roomy(3), links={}))
    assert isinstance(templates, TemplateTable)
    found = cover(templates, kinds=frozenset({LayoutKind.PIPELINE}))
    assert isinstance(found, Cover)
    text = drawing(found.layouts[0])
    assert text.startswith("[k")
    assert ": units 0-" in text
    assert " | " in text
    shard = PlannedShard(kind="t4", state_ratio=0.25, share_samples=1, micro_batch_samples=1, memory_bytes=1)
    assert drawing(DeviceLayout(kind=LayoutKind.SHARDED, shards=(shard, shard))) == "[t4: 25% + t4: 25%]"


def test_a_ring_moves_twice_the_gradients_of_the_fullest_device() -> None:
    problem = replace(roomy(3), links={}, default_link=Link(bytes_per_s=10.0, latency_s=0.5))
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    found = cover(templates, kinds=frozenset({LayoutKind.REPLICATED}))
    assert isinstance(found, Cover)
    layouts = found.layouts
    size = sum(unit.parameter_bytes for unit in problem.units)
    for members in (1, 2, len(layouts)):
        want = 2 * (members - 1) * (0.5 + size / members / 10.0)
        assert exchange_seconds(problem, layouts[:members]) == pytest.approx(want)


def test_more_devices_than_the_batch_has_samples() -> None:
    problem = roomy(3)
    kinds = tuple(replace(kind, count=65536) for kind in problem.kinds)
    templates = template_table(replace(problem, kinds=kinds, batch_samples=5))
    assert isinstance(templates, TemplateTable)
    found = cover(templates)
    assert isinstance(found, Cover)
    assert sum(member.share_samples for member in found.members) == 5
    assert len(found.members) <= 5


def test_many_kinds_and_deep_models_are_thinned_and_say_so() -> None:
    problem = a_problem(random.Random(1), kinds=4, units=200, most=4, memory=(20000, 30000))
    kinds = tuple(replace(kind, name=f"k{i}", count=3) for i in range(20) for kind in problem.kinds[i % 4 : i % 4 + 1])
    units = tuple(
        replace(unit, seconds={kind.name: unit.seconds[f"k{i % 4}"] for i, kind in enumerate(kinds)})
        for unit in problem.units
    )
    templates = template_table(replace(problem, kinds=kinds, units=units, links={}))
    assert isinstance(templates, TemplateTable)
    assert not templates.complete
    found = cover(templates)
    assert isinstance(found, Cover)
    assert sum(member.share_samples for member in found.members) == problem.batch_samples
    assert all(a.last_unit + 1 == b.first_unit for each in found.layouts for a, b in itertools.pairwise(each.stages))


def test_a_template_takes_what_fits_into_a_time() -> None:
    problem, templates = a_book(3)
    assert isinstance(templates, TemplateTable)
    options = template_options(templates, (), EVERY, 1)
    for level_s in np.linspace(0.5, 1.5, 5) * float(np.median(options.first_BJ[np.isfinite(options.first_BJ)])):
        counts = options.micro_batches(float(level_s))
        for row, costs in enumerate(templates.costs):
            total = math.ceil(problem.batch_samples / costs.micro_batch_samples)
            for column in range(len(templates.family.counts_UK)):
                first_s, next_s = float(options.first_BJ[row, column]), float(options.next_BJ[row, column])
                fitting = sum(first_s + n * next_s <= level_s * (1 + 1e-9) for n in range(total))
                assert counts[row, column] == fitting


@pytest.mark.parametrize("seed", range(times(gate=6, every=200)))
def test_members_of_all_kinds_take_the_batch_in_the_least_time(seed: int) -> None:
    """Whole devices, pipelines and sharded members against every set of them; less memory leaves fewer kinds."""
    problem, templates = a_book(seed, batch_samples=12)
    if isinstance(templates, NoLayout):
        return
    counts = [min(2, kind.count) for kind in problem.kinds]
    further = sharded_templates(problem)
    options = template_options(templates, further, EVERY, 1)
    best_s = by_enumeration(options, counts, 1)
    found = least_level(options, counts, 1)
    if found is None:
        assert math.isinf(best_s)
        return
    assert best_s * (1 - 1e-9) <= found.level_s <= best_s * (1 + 2 * FINE.close)
    best = best_cover(templates, EVERY, devices=counts, further=further)
    assert isinstance(best, Cover)
    for kinds in ({LayoutKind.REPLICATED}, {LayoutKind.SHARDED}, {LayoutKind.PIPELINE}):
        alone = cover(templates, devices=counts, kinds=frozenset(kinds), further=further)
        if isinstance(alone, Cover):
            assert best.step_s <= alone.step_s * 1.02
    memory = {kind.name: kind.memory_bytes for kind in problem.kinds}
    for layout in best.layouts:
        held = (*layout.stages, *layout.shards)
        assert all(each.memory_bytes <= memory[each.kind] * (1 + 1e-9) for each in held)


def test_every_kind_of_member_is_chosen_somewhere() -> None:
    """The choice follows the predicted step: none of the kinds wins everywhere."""
    chosen: set[LayoutKind] = set()
    for seed in range(60):
        problem, templates = a_book(seed)
        if isinstance(templates, NoLayout) or chosen == set(LayoutKind):
            continue
        best = best_cover(templates, EVERY, further=sharded_templates(problem))
        chosen |= {member.layout.kind for member in best.members} if isinstance(best, Cover) else set()
    assert chosen == set(LayoutKind)
