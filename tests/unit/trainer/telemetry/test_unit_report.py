"""The export of the units' profiles."""

from __future__ import annotations

import pytest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.telemetry.report import Report
from heterotrain.telemetry.unit_report import report_units
from heterotrain_core.contract import metrics as names
from heterotrain_core.layout.problem import UnitProfile, UnitSeconds
from prometheus_client import generate_latest

IDENTITY = Identity(mode=Mode.OPERATED, job_uid="j", worker="w0", worker_uid="u0")


def unit(*sizes: int) -> UnitProfile:
    """Return a unit that takes 10 ms forward and 20 ms backward for each sample."""
    points = tuple(UnitSeconds(micro_batch_samples=n, forward_s=0.01 * n, backward_s=0.02 * n) for n in sizes)
    return UnitProfile(
        name="block", parameter_bytes=1000, activation_bytes=30, boundary_bytes=5, seconds={"here": points}
    )


def lines(report: Report) -> list[str]:
    """Return the samples of a scrape, without the identity labels."""
    text = generate_latest(report.registry).decode()
    return [line.replace('job_uid="j",', "") for line in text.splitlines() if not line.startswith("#")]


def test_every_unit_is_exported_with_its_number() -> None:
    """Seconds by phase and size, bytes by what they are; the number of units and the memory beside them."""
    report = Report(IDENTITY)
    report_units(report, [unit(1, 2), unit(1, 2)], kind="here", memory_bytes=2**30)
    found = "\n".join(lines(report))
    assert found.count(names.UNIT_SECONDS + "{") == 2 * 2 * 2
    assert found.count(names.UNIT_BYTES + "{") == 2 * 3
    seconds = [each for each in lines(report) if each.startswith(names.UNIT_SECONDS)]
    [row] = [each for each in seconds if 'unit="1"' in each and 'phase="backward"' in each and 'samples="2"' in each]
    assert float(row.rsplit(" ", 1)[1]) == 0.04
    values = report.current()
    assert values[names.UNITS] == 2
    assert values[names.USABLE_MEMORY] == 2**30
    assert values[names.UNIT_PROFILE_COMPLETE] == 1


def test_nothing_is_said_to_be_complete_before_there_is_a_profile() -> None:
    """Without a profile, no series of it exist."""
    assert not any("heterotrain_unit" in line for line in lines(Report(IDENTITY)))


@pytest.mark.parametrize(
    ("profiles", "clause"),
    [
        ([unit(1)] * (names.MAX_PROFILED_UNITS + 1), "has 513 units"),
        ([unit(1, 2), unit(4, 8)], "4 sizes of micro-batches"),
    ],
)
def test_a_profile_that_is_too_large_is_refused(profiles: list[UnitProfile], clause: str) -> None:
    """The number of series of a rank is bounded."""
    report = Report(IDENTITY)
    with pytest.raises(UsageError, match=clause):
        report_units(report, profiles, kind="here", memory_bytes=1)
    assert names.UNIT_PROFILE_COMPLETE not in report.current()
