"""Measured units: what the planner gets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import pytest
import torch
from heterotrain.parts.planned.unit_profile import profile
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import Units, units_of
from heterotrain_core.units import UnitProfile

CPU = torch.device("cpu")
RUNS: list[tuple[str, int]] = []


class Counted(torch.nn.Linear):
    """A layer that notes each of its passes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            RUNS.append((f"{self.in_features}", len(x)))
        return super().forward(x)


def build() -> Units:
    return units_of(built(lambda: torch.nn.Sequential(Counted(8, 16), torch.nn.Tanh(), Counted(16, 4))), None)


def measured(limit_s: float, *, processors: float = math.inf) -> tuple[UnitProfile, ...]:
    """Profile with clocks that advance at each look: by one second, and by half a second of processor time."""
    RUNS.clear()
    ticks, processor_ticks = itertools.count(), itertools.count()

    class OneAtATime(InitialValues):
        def fill(self, units: Units, parts: Collection[str] | None = None, *, with_parameters: bool = True) -> None:
            super().fill(units, parts, with_parameters=with_parameters)
            held = [name for name, p in units.model.named_parameters() if not p.is_meta]
            assert all(name.partition(".")[0] in (parts or ()) for name in held)  # one unit at a time has memory

    return profile(
        build, lambda size: torch.ones(size, 8), kind="cpu", values=OneAtATime(seed=0, device=CPU), limit_s=limit_s,
        processors=processors, clock=lambda: float(next(ticks)), processor_clock=lambda: next(processor_ticks) / 2,
    )  # fmt: skip


def test_each_unit_has_its_times_and_bytes() -> None:
    found = measured(1000.0)
    assert [unit.name for unit in found] == ["0", "1", "2"]
    assert [unit.parameter_bytes for unit in found] == [(8 * 16 + 16) * 4, 0, (16 * 4 + 4) * 4]
    assert [unit.boundary_bytes for unit in found] == [64, 64, 16]
    for unit in found:
        points = unit.seconds["cpu"]
        assert [point.micro_batch_samples for point in points] == [1, 2, 4]
        assert all(point.forward_s == point.backward_s == 1.0 for point in points)
    assert {run: RUNS.count(run) for run in RUNS} == {(layer, size): 5 for layer in ("8", "16") for size in (1, 2, 4)}


def test_the_time_is_bounded_and_every_unit_is_still_measured() -> None:
    found = measured(0.0)
    assert {run: RUNS.count(run) for run in RUNS} == {(layer, size): 1 for layer in ("8", "16") for size in (1, 2, 4)}
    assert all(len(unit.seconds["cpu"]) == 3 for unit in found)


@pytest.mark.parametrize(("processors", "seconds"), [(2.0, 1.0), (0.5, 1.0), (0.125, 4.0)])
def test_a_limit_of_processors_counts_as_if_it_were_used_up(processors: float, seconds: float) -> None:
    """A container's whole time for a period is there at once, so a single short pass does not wait for it."""
    for unit in measured(1000.0, processors=processors):
        assert all(point.forward_s == point.backward_s == seconds for point in unit.seconds["cpu"])
