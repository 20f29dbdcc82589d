"""Covers whose exchange decides: more members at a lower level must not win by leaving their exchange out."""

from __future__ import annotations

from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.cover import cover
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.template_table import TemplateTable, template_table

GIB = 2**30
SPEEDS = {
    "a100": (38, ((2, 2.61, 8.14), (4, 4.97, 12.65))),
    "a6000": (46, ((2, 5.09, 15.26), (4, 9.43, 24.40))),
    "a10g": (20.5, ((2, 9.32, 25.33), (4, 17.15, 40.62))),
    "t4": (13, ((2, 16.52, 44.28), (4, 28.73, 78.60))),
}
"""GiB, and (samples, forward, backward) in milliseconds of one layer of a published model."""


def a_large_model() -> Problem:
    seconds = {
        name: tuple(
            UnitSeconds(micro_batch_samples=size, forward_s=forward / 1e3, backward_s=backward / 1e3)
            for size, forward, backward in points
        )
        for name, (_, points) in SPEEDS.items()
    }
    unit = UnitProfile(
        name="layer", parameter_bytes=859_865_600, activation_bytes=2**22, boundary_bytes=2**22, seconds=seconds
    )
    return Problem(
        units=(unit,) * 32,
        kinds=tuple(DeviceKind(name=name, count=2, memory_bytes=int(gib * GIB)) for name, (gib, _) in SPEEDS.items()),
        default_link=Link(bytes_per_s=1.25e9),
        links={(name, name): Link(bytes_per_s=10e9) for name in SPEEDS},
        batch_samples=64,
        micro_batches=(2, 4),
    )


def test_one_member_is_chosen_where_two_would_exchange_for_longer_than_they_gain() -> None:
    templates = template_table(a_large_model())
    assert isinstance(templates, TemplateTable), templates
    found = cover(templates)
    assert isinstance(found, Cover), found
    # Two members exchange at least a fifth of 27 GB over 10 Gb/s, which is longer than the whole step of one.
    assert len(found.members) == 1
    assert found.exchange_s == 0
    assert found.step_s < 5
