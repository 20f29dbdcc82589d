"""Seconds of the optimizer's update: against every element, and what the planner makes of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.best import best_members
from heterotrain_planner.layout.problem import DeviceKind, Problem
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.template_table import template_table
from heterotrain_planner.layout.update import rough_update, update_seconds
from support.repeat import times
from unit.planner.layout.instances import a_problem
from unit.planner.layout.test_exchange import drawn, longest_update, with_updates


@pytest.mark.parametrize("seed", range(times(gate=20, every=1000)))
def test_the_device_that_takes_longest_counts(seed: int) -> None:
    rng = random.Random(seed)
    problem = with_updates(a_problem(rng, kinds=3, units=5), rng)
    layout = drawn(rng, problem)
    assert update_seconds(problem, layout) == pytest.approx(longest_update(problem, layout))


def two_kinds(**updates: float) -> Problem:
    """Return a model of four equal units for one member of two equally fast devices."""
    points = (UnitSeconds(micro_batch_samples=1, forward_s=0.01, backward_s=0.02),)
    unit = UnitProfile(
        name="u", parameter_bytes=100, activation_bytes=1, boundary_bytes=0, seconds=dict.fromkeys("ab", points)
    )
    return Problem(
        units=(unit,) * 4,
        kinds=tuple(
            DeviceKind(name=name, count=1, memory_bytes=1500, update_s_per_byte=updates.get(name, 0.0)) for name in "ab"
        ),
        batch_samples=8,
        micro_batches=(1,),
    )


def planned(problem: Problem) -> Cover:
    found = best_members(template_table(problem), problem)
    assert isinstance(found, Cover)
    return found


def test_a_step_ends_with_the_update() -> None:
    without, found = planned(two_kinds()), planned(two_kinds(a=1e-3, b=1e-3))
    held = [stage.last_unit - stage.first_unit + 1 for stage in found.layouts[0].stages]
    assert update_seconds(two_kinds(a=1e-3, b=1e-3), found.layouts[0]) == pytest.approx(1e-3 * 100 * max(held))
    assert found.step_s >= without.step_s + 1e-3 * 100 * 2


def test_a_device_with_slow_updates_holds_less() -> None:
    found = planned(two_kinds(a=5e-3))
    (layout,) = found.layouts
    held = {stage.kind: stage.last_unit - stage.first_unit + 1 for stage in layout.stages}
    assert held["a"] < held["b"]


def test_about_the_update_is_that_of_equal_parts() -> None:
    problem = two_kinds(a=1e-3, b=2e-3)
    assert rough_update(problem, [(1, 0), (1, 1)]) == pytest.approx(1e-3 * 400)
    assert rough_update(problem, [(1, 1)]) == pytest.approx(2e-3 * 200)
    assert rough_update(replace(problem, kinds=two_kinds().kinds), [(1, 1)]) == 0.0
