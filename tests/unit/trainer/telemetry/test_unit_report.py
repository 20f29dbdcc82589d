"""The export of the units' profiles."""

from __future__ import annotations

import pytest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.telemetry.report import RankMetrics
from heterotrain.telemetry.unit_report import report_units
from heterotrain_core.contract import metrics as names
from heterotrain_core.units import UnitProfile
from support.unit_series import KIND, MEMORY_BYTES, series, unit

IDENTITY = Identity(mode=Mode.OPERATED, job_uid="j", worker="w0", worker_uid="u0")


def samples(report: RankMetrics) -> list[tuple[dict[str, str], float]]:
    """Return the samples of a scrape about units, without the identity labels."""
    return [
        ({"__name__": found.name, **{k: v for k, v in found.labels.items() if k not in names.IDENTITY_LABELS}}, value)
        for family in report.collect()
        for found in family.samples
        for value in [float(found.value)]
        if "unit" in found.name or found.name == names.USABLE_MEMORY
    ]


def test_every_unit_is_exported_as_the_operator_reads_it() -> None:
    """Seconds by phase and size, bytes by what they are; the number of units and the memory beside them."""
    report, profiles = RankMetrics(IDENTITY), [unit(0), unit(1), unit(2)]
    report_units(report, profiles, kind=KIND, memory_bytes=MEMORY_BYTES)

    def key(each: tuple[dict[str, str], float]) -> list[tuple[str, str]]:
        return sorted(each[0].items())

    assert sorted(samples(report), key=key) == sorted(series(profiles), key=key)


def test_nothing_is_said_to_be_complete_before_there_is_a_profile() -> None:
    """Without a profile, no series of it exist."""
    assert samples(RankMetrics(IDENTITY)) == []


@pytest.mark.parametrize(
    ("profiles", "clause"),
    [
        ([unit(0)] * (names.MAX_PROFILED_UNITS + 1), "has 513 units"),
        ([unit(0), unit(1, sizes=(4, 8))], "4 sizes of micro-batches"),
    ],
)
def test_a_profile_that_is_too_large_is_refused(profiles: list[UnitProfile], clause: str) -> None:
    """The number of series of a rank is bounded."""
    report = RankMetrics(IDENTITY)
    with pytest.raises(UsageError, match=clause):
        report_units(report, profiles, kind=KIND, memory_bytes=1)
    assert names.UNIT_PROFILE_COMPLETE not in report.current()
