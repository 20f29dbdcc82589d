"""Seconds in which a member's optimizer updates the parameters that its devices hold, once a step.

Every device updates its own part when the gradients are there, so the largest time counts. It is in proportion to the
bytes: an optimizer reads and writes each element a few times and computes little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import DeviceLayout


def update_seconds(problem: Problem, layout: DeviceLayout) -> float:
    """Return the seconds of the update on the device of a member that takes longest."""
    rates = {kind.name: kind.update_s_per_byte for kind in problem.kinds}
    return max(
        rates[kind]
        * (part.stop - part.start)
        * sum(unit.parameter_bytes for unit in problem.units[part.first : part.end])
        for kind, part in zip(layout.kinds, layout.held(len(problem.units)), strict=True)
    )


def rough_update(problem: Problem, members: Iterable[Sequence[int]]) -> float:
    """Return about the longest seconds of the update, where the devices of a member hold equal parts of the model.

    Args:
        problem: sound.
        members: devices of each member by kind.
    """
    whole = sum(unit.parameter_bytes for unit in problem.units)

    def seconds(devices: Sequence[int]) -> float:
        used = zip(problem.kinds, devices, strict=True)
        return max(kind.update_s_per_byte for kind, count in used if count) * whole / sum(devices)

    return max(map(seconds, members), default=0.0)
