"""A rank's profile of the model's units, as it is read from Prometheus."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId
from heterotrain_operator.prom.queries import everything_of
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.unit_profiles import parse_profile, profile_of
from heterotrain_operator.prom.vector import VectorSample
from support.unit_series import series, unit

ME = MemberId("uid-a", 0)
WORKERS = {"uid-a": "job-w0"}


PROFILES = tuple(map(unit, range(3)))


def exported() -> list[VectorSample]:
    """Return what a rank exports, as Prometheus has it."""
    identity = {
        "job_uid": "job-uid", "worker": "job-w0", "worker_uid": "uid-a", "local_rank": "0", "pod": "job-w0",
    }  # fmt: skip
    return [VectorSample({**labels, **identity}, value) for labels, value in series(PROFILES)]


def parsed(rows: list[VectorSample], **gauges: object) -> PoolProfile | str:
    """Return the profile in these rows."""
    known = {"units": 3, "usable_memory_bytes": 2.0**30, "profile_complete": True, **gauges}
    found = MemberGauges(worker="job-w0", **known)  # type: ignore[arg-type]  # tests pass what they mean
    return parse_profile(rows, ME, found, pool="a100", workers=WORKERS, namespace="ns")


def test_what_a_rank_exports_is_what_the_operator_reads() -> None:
    """The trainer's own test compares its export with the same series."""
    gauges = parse_everything(exported(), workers=WORKERS).gauges[ME]
    assert (gauges.units, gauges.usable_memory_bytes, gauges.profile_complete) == (3, 2.0**30, True)
    assert parsed(exported()) == PoolProfile(memory_bytes=2**30, units=PROFILES)


def test_what_an_update_takes_is_read_within_bounds() -> None:
    units = next(labels for labels, _ in exported() if labels["__name__"] == metrics.UNITS)
    identity = {**units, "__name__": metrics.UPDATE_SECONDS_PER_BYTE}
    for value, expected in ((1e-9, 1e-9), (1.0, None), (-1.0, None)):
        gauges = parse_everything([*exported(), VectorSample(identity, value)], workers=WORKERS).gauges[ME]
        assert gauges.update_s_per_byte == expected
    found = parsed(exported(), update_s_per_byte=1e-9)
    assert isinstance(found, PoolProfile)
    assert found.update_s_per_byte == 1e-9


def test_the_many_series_are_read_by_a_query_of_their_own() -> None:
    assert metrics.UNIT_SECONDS not in everything_of("job-uid")
    assert metrics.UNIT_PROFILE_COMPLETE in everything_of("job-uid")
    query = profile_of("job-uid", ME)
    assert metrics.UNIT_SECONDS in query
    assert 'worker_uid="uid-a",local_rank="0"' in query


def without(name: str, **labels: str) -> list[VectorSample]:
    """Return what is exported without the series of this name that have these labels."""
    return [
        row for row in exported() if row.labels["__name__"] != name or not labels.items() <= dict(row.labels).items()
    ]


@pytest.mark.parametrize(
    ("rows", "clause"),
    [
        (without(metrics.UNIT_BYTES, unit="1", what="boundary"), "the bytes of unit 1 are missing"),
        (without(metrics.UNIT_SECONDS, unit="2", phase="backward"), "the seconds of unit 2 are missing"),
        ([*exported(), VectorSample({**exported()[0].labels, "unit": "3"}, 1.0)], "a unit beyond the 3"),
        (
            [
                VectorSample(row.labels, -1.0) if row.labels["__name__"] == metrics.UNIT_SECONDS else row
                for row in exported()
            ],
            "the seconds of unit 0 are missing or implausible",
        ),
        (
            [
                VectorSample({**row.labels, "samples": str(size)}, row.value)
                for row in exported()
                for size in ([1, 2, 3, 4] if row.labels["__name__"] == metrics.UNIT_SECONDS else [1])
            ],
            "more than 3 sizes",
        ),
    ],
)
def test_a_profile_that_is_incomplete_or_implausible_is_refused(rows: list[VectorSample], clause: str) -> None:
    found = parsed(rows)
    assert isinstance(found, str)
    assert clause in found


@pytest.mark.parametrize("name", ["", "a;b", "x" * 41, "blocks.0\n", "\u202eblocks.0"])
def test_a_name_that_no_model_has_is_left_out(name: str) -> None:
    """Older images export none, and a hostile one could write anything into the status."""
    found = parsed([VectorSample({**row.labels, metrics.LABEL_UNIT_NAME: name}, row.value) for row in exported()])
    assert isinstance(found, PoolProfile)
    assert [unit.name for unit in found.units] == ["", "", ""]


def test_a_profile_without_its_memory_is_refused() -> None:
    assert parsed(exported(), usable_memory_bytes=None) == "it has no number of units or no usable memory"


def test_series_of_other_pods_are_left_out() -> None:
    """Any pod may export the uid of another one."""
    foreign = [VectorSample({**row.labels, "pod": "other"}, row.value * 7) for row in exported()]
    assert parsed([*foreign, *exported()]) == PoolProfile(memory_bytes=2**30, units=PROFILES)
