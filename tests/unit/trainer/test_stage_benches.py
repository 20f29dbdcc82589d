"""What the benchmarks of pipelines compute from their measurements."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.costs import costs_of

sys.path.insert(0, str(Path(__file__).parents[3] / "deploy" / "dev" / "bench"))
from paced_pipelines import StepOfStage, planned, problem_of, stages_of  # after the path is set
from pipeline_layouts import (  # after the path is set
    balanced_s,
    begins_of,
    draw,
    even_cuts,
    least_s,
    step_s,
)
from trainer_stage_losses import longest_gap_s  # after the path is set

SPEEDS = {"d0": 4.0, "d1": 2.0, "d2": 1.0}


def units(count: int) -> tuple[UnitProfile, ...]:
    """Return equal units without bytes: a sample takes a second forward and two back on the slowest device."""
    seconds = {
        name: (UnitSeconds(micro_batch_samples=1, forward_s=1 / speed, backward_s=2 / speed),)
        for name, speed in SPEEDS.items()
    }
    return tuple(
        UnitProfile(name=f"{unit}", parameter_bytes=4, activation_bytes=0, boundary_bytes=0, seconds=seconds)
        for unit in range(count)
    )


def test_equal_stages_take_what_their_fill_takes_and_the_planner_finds_them() -> None:
    """Seven units on speeds 4, 2 and 1: stages of 4, 2 and 1 units take 3 s each for a sample."""
    problem = problem_of(units(7), list(SPEEDS), share=8, micro=1)
    costs = costs_of(problem, 1)
    assert balanced_s(problem, costs) == pytest.approx((8 + 3 - 1) * 3.0)
    assert step_s(problem, planned(problem, costs)) == pytest.approx(balanced_s(problem, costs))
    assert least_s(problem, costs) == pytest.approx(balanced_s(problem, costs))
    even = stages_of(problem, costs, (0, 1, 2), (2, 4))
    assert [(stage.kind, stage.first_unit, stage.last_unit) for stage in even] == [
        ("d0", 0, 1),
        ("d1", 2, 3),
        ("d2", 4, 6),
    ]
    assert step_s(problem, even) > 8 * 9.0  # the slowest device has three units


@pytest.mark.parametrize("seed", range(20))
def test_drawn_layouts_can_run_and_are_the_same_for_a_seed(seed: int) -> None:
    drawn = draw(random.Random(seed), 14)  # noqa: S311  # seeded chance
    assert drawn == draw(random.Random(seed), 14)  # noqa: S311  # seeded chance
    stages = len(drawn.speeds)
    assert sorted(drawn.order) == list(range(stages))
    assert len(drawn.cuts) == stages - 1
    assert all(a < b for a, b in pairwise((0, *drawn.cuts, 14)))
    assert drawn.share % drawn.micro == 0
    assert drawn.share // drawn.micro > stages


def test_even_cuts_give_each_stage_the_same_blocks() -> None:
    assert even_cuts(12, 2) == (7,)
    assert even_cuts(12, 3) == (5, 9)


def test_steps_of_a_layout_are_those_that_all_its_stages_took_after_its_plan() -> None:
    def steps(first: int, end: int, numbers: range, began_s: float) -> list[StepOfStage]:
        return [StepOfStage(n, first, end, began_s + n, []) for n in numbers]

    before = [steps(0, 3, range(4), 10.0), steps(3, 5, range(4), 10.1)]
    after = [steps(0, 2, range(4, 9), 10.0), steps(2, 5, range(5, 9), 10.1)]
    lines = [one + other for one, other in zip(before, after, strict=True)]
    assert begins_of(lines, (0, 2, 5), 12.5) == [16.0, 17.0, 18.0]  # the first one, number 5, does not count
    assert begins_of(lines, (0, 3, 5), 11.5) == [13.0]
    assert begins_of(lines, (0, 4, 5), 0.0) == []


def test_a_pause_is_the_longest_gap_around_the_event() -> None:
    times_s = [1.0, 2.0, 3.0, 3.1, 5.6, 6.0, 7.0, 12.0]
    assert longest_gap_s(times_s, 3.05, after=3) == pytest.approx((2.5, 2.55))
    assert longest_gap_s(times_s, 3.5, after=3) == pytest.approx((2.5, 2.1))  # the gap had begun
    assert longest_gap_s(times_s, 3.5, after=4) == pytest.approx((5.0, 8.5))
