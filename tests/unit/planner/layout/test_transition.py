"""Transitions between layouts: who takes which place, what moves, how long it takes, and whether it pays."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import LayoutKind
from heterotrain_planner.layout.assignment import assign
from heterotrain_planner.layout.cover import cover
from heterotrain_planner.layout.problem import Link, Problem
from heterotrain_planner.layout.result import Cover, DeviceLayout, HeldUnits, NoLayout, PlannedShard, PlannedStage
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from heterotrain_planner.layout.transition import Holder, Transition, pays, transition
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from support.repeat import times
from unit.planner.layout.instances import a_problem

SECONDS = {"forward_s": 1.0, "backward_s": 1.0, "input_s": 0.0, "gradient_s": 0.0}


def a_model(units: int = 8, **changes: object) -> Problem:
    """Return a model whose units have 25 bytes of parameters, so 100 of state, and links of 100 bytes a second."""
    problem = a_problem(random.Random(1), kinds=2, units=units)
    profiles = tuple(replace(unit, parameter_bytes=25) for unit in problem.units)
    kinds = tuple(replace(kind, count=4) for kind in problem.kinds)
    link = Link(bytes_per_s=100.0)
    return replace(problem, units=profiles, kinds=kinds, links={}, default_link=link, **changes)  # type: ignore[arg-type]  # a builder


def a_pipeline(cuts: list[int], kinds: str, units: int = 8) -> DeviceLayout:
    edges = [0, *cuts, units]
    stages = [
        PlannedStage(kind=f"k{kind}", first_unit=a, last_unit=b - 1, **SECONDS, memory_bytes=0)
        for kind, (a, b) in zip(kinds, itertools.pairwise(edges), strict=True)
    ]
    return DeviceLayout(kind=LayoutKind.PIPELINE, stages=tuple(stages))


def sharded(ratios: list[float], kind: str = "k0") -> DeviceLayout:
    shards = [
        PlannedShard(kind=kind, state_ratio=r, share_samples=1, micro_batch_samples=1, memory_bytes=0) for r in ratios
    ]
    return DeviceLayout(kind=LayoutKind.SHARDED, shards=tuple(shards))


def holders_of(problem: Problem, layouts: list[DeviceLayout]) -> list[Holder]:
    found = []
    for layout in layouts:
        for kind, part in zip(layout.kinds, layout.held(len(problem.units)), strict=True):
            found.append(Holder(device=f"d{len(found)}", kind=kind, parts=(part,)))
    return found


def found_for(problem: Problem, holders: list[Holder], layouts: list[DeviceLayout], **more: float) -> Transition:
    answer = transition(problem, holders, layouts, **more)
    assert isinstance(answer, Transition)
    return answer


@pytest.mark.parametrize("seed", range(times(gate=20, every=1000)))
def test_the_assignment_is_the_cheapest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    places = int(rng.integers(1, 12))
    cost = rng.integers(0, 9, (places, places + int(rng.integers(0, 5)))).astype(float)
    rows, columns = linear_sum_assignment(cost)
    found = assign(cost)
    assert len(set(found)) == places
    assert cost[range(places), found].sum() == cost[rows, columns].sum()


def test_the_same_layout_moves_nothing() -> None:
    problem = a_model()
    layouts = [a_pipeline([3], "01"), a_pipeline([4], "10")]
    found = found_for(problem, holders_of(problem, layouts), layouts)
    assert (found.moved_bytes, found.lost_bytes, found.pause_s) == ({}, 0, 0.0)
    assert found.places == (("d0", "d1"), ("d2", "d3"))


def test_a_moved_cut_moves_the_units_between() -> None:
    problem = a_model()
    holders = holders_of(problem, [a_pipeline([3], "01")])
    found = found_for(problem, holders, [a_pipeline([5], "01")])
    assert found.moved_bytes == {"d0": 200}
    assert found.pause_s == pytest.approx(2.0)


def test_several_holders_send_equal_parts() -> None:
    problem = a_model()
    holders = holders_of(problem, [a_pipeline([], "0"), a_pipeline([], "0")])
    found = found_for(problem, [*holders, Holder(device="new", kind="k0")], [a_pipeline([], "0")] * 3)
    assert found.moved_bytes == {"new": 800}
    assert found.pause_s == pytest.approx(8.0)  # the newcomer's own link; each of the others sends half
    slow = replace(problem, links={("k0", "k1"): Link(bytes_per_s=10.0)})
    mixed = [holders[0], replace(holders[1], kind="k1"), Holder(device="new", kind="k0")]
    layouts = [a_pipeline([], "0"), a_pipeline([], "1"), a_pipeline([], "0")]
    assert found_for(slow, mixed, layouts).pause_s == pytest.approx(400 / 100 + 400 / 10)


def test_a_lone_holder_of_many_receivers_is_the_bottleneck() -> None:
    problem = a_model()
    new = [Holder(device=f"new{i}", kind="k0") for i in range(3)]
    found = found_for(problem, [*holders_of(problem, [a_pipeline([], "0")]), *new], [a_pipeline([], "0")] * 4)
    assert found.pause_s == pytest.approx(24.0)


def test_what_nobody_holds_comes_from_a_checkpoint() -> None:
    problem = a_model()
    survivor = holders_of(problem, [a_pipeline([3], "01")])[1:]
    found = found_for(problem, [*survivor, Holder(device="new", kind="k0")], [a_pipeline([3], "01")], restart_s=1.5)
    assert found.lost_bytes == 300
    assert found.moved_bytes == {}
    assert found.pause_s == 1.5
    assert "checkpoint" in found.reason


def test_shards_move_only_the_rows_that_change_place() -> None:
    problem = a_model()
    holders = holders_of(problem, [sharded([0.5, 0.5])])
    found = found_for(problem, [*holders, Holder(device="new", kind="k0")], [sharded([0.25, 0.5, 0.25])])
    # d0 has the first half; whoever takes the middle half lacks a quarter, the newcomer its whole part.
    assert sum(found.moved_bytes.values()) == pytest.approx(800 * 0.5)


def test_a_pipeline_from_shards_and_back() -> None:
    problem = a_model()
    shards, stages = [sharded([0.25, 0.75])], [a_pipeline([4], "00")]
    there = found_for(problem, holders_of(problem, shards), stages)
    assert sum(there.moved_bytes.values()) == pytest.approx(400 * 0.75 + 400 * 0.25)
    back = found_for(problem, holders_of(problem, stages), shards)
    assert sum(back.moved_bytes.values()) == pytest.approx(200 / 2 + 600 / 2)


def by_permutations(problem: Problem, holders: list[Holder], layouts: list[DeviceLayout]) -> float:
    """Return the fewest bytes that have to come from elsewhere, over all devices for all places."""
    wanted = [pair for layout in layouts for pair in zip(layout.kinds, layout.held(len(problem.units)), strict=True)]
    best = math.inf
    for chosen in itertools.permutations(holders, len(wanted)):
        if any(holder.kind != kind for holder, (kind, _) in zip(chosen, wanted, strict=True)):
            continue
        total = 0.0
        for holder, (_, part) in zip(chosen, wanted, strict=True):
            held = {unit for each in holder.parts for unit in range(each.first, each.end)}
            total += 100 * len(set(range(part.first, part.end)) - held)
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_the_fewest_bytes_move(seed: int) -> None:
    rng = random.Random(seed)
    problem = a_model()

    def layouts(stages: int) -> list[DeviceLayout]:
        cut = [sorted(rng.sample(range(1, 8), count - 1)) for count in (stages, rng.randint(1, 2))]
        return [a_pipeline(cuts, "".join(rng.choice("01") for _ in range(len(cuts) + 1))) for cuts in cut]

    holders = holders_of(problem, layouts(rng.randint(2, 4)))
    holders += [Holder(device=f"new{i}", kind=rng.choice(["k0", "k1"])) for i in range(2)]
    rng.shuffle(holders)
    new = layouts(2)
    want = by_permutations(problem, holders, new)
    answer = transition(problem, holders, new)
    if math.isinf(want):
        assert isinstance(answer, NoLayout)
        assert "devices of kind" in answer.reason
        return
    assert isinstance(answer, Transition)
    kinds = {holder.device: holder.kind for holder in holders}
    for layout, names in zip(new, answer.places, strict=True):
        assert [stage.kind for stage in layout.stages] == [kinds[name] for name in names]
    used = [name for names in answer.places for name in names]
    assert len(set(used)) == len(used)
    held = {unit for each in holders for part in each.parts for unit in range(part.first, part.end)}
    missing_copies = sum(
        100
        for layout in new
        for stage in layout.stages
        for unit in range(stage.first_unit, stage.last_unit + 1)
        if unit not in held
    )
    assert sum(answer.moved_bytes.values()) + missing_copies == pytest.approx(want)


def test_very_many_places_are_filled_one_by_one() -> None:
    problem = a_model()
    holders = [Holder(device=f"d{index}", kind="k0", parts=(HeldUnits(index % 8, 8),)) for index in range(400)]
    found = found_for(problem, holders, [a_pipeline([index % 7 + 1], "00") for index in range(150)])
    used = [name for names in found.places for name in names]
    assert len(set(used)) == len(used) == 300


@pytest.mark.parametrize(
    ("holders", "sentence"),
    [
        ([], "need 1 devices of kind k0, and there are 0"),
        ([Holder(device="a", kind="k0"), Holder(device="a", kind="k0")], "listed twice"),
        ([Holder(device="a", kind="k0", parts=(HeldUnits(0, 100),))], "not a part of this model"),
        ([Holder(device="a", kind="k0", parts=(HeldUnits(0, 2, stop=math.nan),))], "not a part"),
        ([Holder(device=f"{i}", kind="k0") for i in range(3000)], "more than"),
    ],
)
def test_wrong_holders_are_an_answer(holders: list[Holder], sentence: str) -> None:
    answer = transition(a_model(), holders, [a_pipeline([], "0")])
    assert isinstance(answer, NoLayout)
    assert sentence in answer.reason


@given(current=st.floats(0.1, 100), new=st.floats(0.1, 100), pause=st.floats(0, 1000), dwell=st.floats(0, 10**6))
def test_a_change_pays_if_it_makes_more_steps(current: float, new: float, pause: float, dwell: float) -> None:
    answer = pays(current_step_s=current, new_step_s=new, pause_s=pause, dwell_s=dwell, least_gain=0.0)
    stay, go = dwell / current, max(0.0, dwell - pause) / new
    if abs(stay - go) > 1e-6 * max(stay, go, 1e-9):
        assert answer.pays == (go > stay)
    assert answer.reason


def test_a_small_gain_does_not_pay_and_a_broken_layout_always_does() -> None:
    small = pays(current_step_s=1.02, new_step_s=1.0, pause_s=0.0, dwell_s=1e9)
    assert not small.pays
    assert "2.0%" in small.reason
    assert pays(current_step_s=None, new_step_s=5.0, pause_s=100.0, dwell_s=1.0).pays
    large = pays(current_step_s=2.0, new_step_s=1.0, pause_s=10.0, dwell_s=60.0)
    assert (large.pays, large.payback_s) == (True, 20.0)


@pytest.mark.parametrize("seed", range(times(gate=5, every=100)))
def test_a_loss_is_planned_from_the_book_and_moves_less_than_everything(seed: int) -> None:
    """As an operator does it: cover, lose a device, cover what is left, and move what has to move."""
    problem = a_problem(random.Random(seed), kinds=2, units=6, most=3, memory=(1200, 2000))
    problem = replace(problem, kinds=tuple(replace(kind, count=3) for kind in problem.kinds))
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    before = cover(templates)
    assert isinstance(before, Cover)
    holders = holders_of(problem, list(before.layouts))
    lost = next(index for index, holder in enumerate(holders) if holder.kind == "k0")
    left = [*holders[:lost], *holders[lost + 1 :]]
    left += [Holder(device=f"spare{name}{index}", kind=name) for name, n in before.unused.items() for index in range(n)]
    counts = [sum(holder.kind == kind.name for holder in left) for kind in problem.kinds]
    after = cover(templates, devices=counts)
    assert isinstance(after, Cover)
    found = found_for(problem, left, list(after.layouts))
    whole = sum(unit.parameter_bytes for unit in problem.units) * 4
    assert sum(found.moved_bytes.values()) <= whole * len(after.members)
    assert math.isfinite(found.pause_s)
