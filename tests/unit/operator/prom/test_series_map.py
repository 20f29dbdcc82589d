"""Series whose labels were checked once: later reads put in the new values, and find what a first read would."""

from __future__ import annotations

import random
from typing import Any

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.prom import series_map
from heterotrain_operator.prom.accepted import PLAUSIBLE
from heterotrain_operator.prom.series_map import JobReader, SeriesMap
from heterotrain_operator.prom.snapshot import JobSeries
from heterotrain_operator.prom.vector import Vector, VectorSample

WORKERS = {"uid-a": "job-w0", "uid-b": "job-w1"}
LATEST_S = 1e10
VALUES = (0.0, 1.0, 7.5, -1.0, 1e15, 1e300, float("nan"), float("inf"))


def read(reader: JobReader, rows: list[VectorSample], workers: dict[str, str] = WORKERS) -> JobSeries:
    return reader.read(Vector.of(rows), workers=workers, namespace="ns", latest_s=LATEST_S)


def random_rows(rng: random.Random) -> list[VectorSample]:
    """Return series of all kinds, some of other pods, some twice, some with labels or values that are not accepted."""
    rows = []
    for uid, worker in [*WORKERS.items(), ("stranger", "x")]:
        identity = {"job_uid": "u", "worker": worker, "worker_uid": uid, "local_rank": "0", "pod": worker}
        rows.append(VectorSample(identity, rng.uniform(0, 100)))
        for name in PLAUSIBLE:
            shape = {"share": rng.choice(("8", "16", "-1")), "micro_batch": "8"} if rng.random() < 0.5 else {}
            more = {"phase": rng.choice(metrics.PHASES)} if "phase" in name else {}
            more |= {"cause": metrics.CAUSE_LOSS} if name == metrics.PAUSE_SECONDS else {}
            more |= {"check": "nccl", "message": "slow"} if name == metrics.PREFLIGHT_PROBLEM else {}
            more |= {"peer_pool": "b"} if name in (metrics.LINK_BANDWIDTH, metrics.LINK_LATENCY) else {}
            more |= {"name": "accuracy"} if name == metrics.USER_METRIC else {}
            labels = {"__name__": name, **identity, **shape, **more}
            rows.append(VectorSample(labels, rng.choice(VALUES)))
            if rng.random() < 0.1:
                rows.append(VectorSample({**labels, "instance": "other"}, rng.choice(VALUES)))
    rng.shuffle(rows)
    return rows


def test_later_reads_find_what_a_first_read_finds(count_maps: list[SeriesMap]) -> None:
    rng = random.Random(1)  # noqa: S311  # reproducible
    for _ in range(50):
        rows, reader = random_rows(rng), JobReader()
        read(reader, rows)
        count_maps.clear()
        for _ in range(4):
            rows = [row._replace(value=rng.choice(VALUES)) for row in rows]
            found = read(reader, rows)
            assert not count_maps, "the labels are not decoded again"
            assert found == read(JobReader(), rows)
            count_maps.clear()


@pytest.fixture
def count_maps(monkeypatch: pytest.MonkeyPatch) -> list[SeriesMap]:
    """Maps that were made."""
    made: list[SeriesMap] = []

    class Counted(SeriesMap):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(series_map, "SeriesMap", Counted)
    return made


def step(uid: str, value: float) -> VectorSample:
    return VectorSample({"__name__": metrics.STEP, "worker": "w", "worker_uid": uid, "local_rank": "0"}, value)


def test_a_new_worker_and_a_new_series_are_found() -> None:
    reader, rows = JobReader(), [step("uid-a", 1.0), step("uid-b", 1.0)]
    one = read(reader, rows, {"uid-a": "job-w0"})
    assert [*one.gauges] == [MemberId("uid-a", 0)]
    assert "1 of other workers" in one.dropped
    both = read(reader, rows)
    assert ([*both.gauges], both.dropped) == ([MemberId("uid-a", 0), MemberId("uid-b", 0)], "")
    rows.append(VectorSample({**rows[0].labels, "__name__": metrics.LOSS}, 0.25))
    assert read(reader, rows).gauges[MemberId("uid-a", 0)].loss == 0.25
    rows[-1] = VectorSample({**rows[0].labels, "__name__": metrics.EPOCH}, 3.0)
    exchanged = read(reader, rows).gauges[MemberId("uid-a", 0)]
    assert (exchanged.epoch, exchanged.loss) == (3, None), "as many series as before, but another one"
    del rows[-1]
    assert read(reader, rows).gauges[MemberId("uid-a", 0)].epoch is None


def test_a_value_that_is_wild_once_is_back_at_the_next_read() -> None:
    reader, me = JobReader(), MemberId("uid-a", 0)
    found = [read(reader, [step("uid-a", value)]) for value in (1.0, -1.0, float("nan"), 2.0)]
    assert [each.gauges[me].step for each in found] == [1, None, None, 2]
    assert [bool(each.dropped) for each in found] == [False, True, False, False]


def test_a_script_that_reports_endless_names_fills_no_memory() -> None:
    """As ``job.report`` does with the number of the step in each name."""
    labels = {**step("uid-a", 1.0).labels, "__name__": metrics.USER_METRIC}
    rows = [VectorSample({**labels, "name": f"loss_{number:04}"}, float(number)) for number in reversed(range(1000))]
    reader = JobReader()
    for _ in range(2):
        found = read(reader, [step("uid-a", 7.0), *rows])
        gauges = found.gauges[MemberId("uid-a", 0)]
        assert sorted(gauges.user_metrics) == [f"loss_{number:04}" for number in range(series_map.MOST_ALIKE)]
        assert gauges.step == 7
        assert found.dropped.startswith(
            "series were dropped: 936 with invalid labels; e.g. heterotrain_user_metric, more"
        )
    assert len(reader._map._special) == series_map.MOST_ALIKE


def test_shapes_cost_no_places_for_the_values_of_members() -> None:
    """A pod may export tens of thousands of shapes: each takes a place for each of its own values only."""
    labels = {**step("uid-a", 1.0).labels, "__name__": metrics.STEPS, "micro_batch": "1"}
    few, many = ([VectorSample({**labels, "share": str(n + 1)}, 1.0) for n in range(count)] for count in (1, 51))
    places = [max(SeriesMap([row.labels for row in rows], workers=WORKERS)._places) for rows in (few, many)]
    assert places[1] - places[0] == 50 * (3 + 2 * len(metrics.PHASES))


def test_series_with_a_label_that_does_not_belong_to_them_are_dropped_and_named() -> None:
    labels = step("uid-a", 1.0).labels
    odd = [
        VectorSample({**labels, "share": "8", "micro_batch": "8"}, 5.0),
        VectorSample({**labels, "phase": "sync"}, 6.0),
    ]
    found = read(JobReader(), [*odd, step("uid-a", 7.0)])
    assert found.gauges[MemberId("uid-a", 0)].step == 7
    assert found.dropped.startswith("series were dropped: 2 with invalid labels; e.g. heterotrain_step with ")
    assert found.counters == {}
