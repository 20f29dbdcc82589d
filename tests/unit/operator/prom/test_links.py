"""Links between pools as workers have measured them: which values are accepted, and what stays known."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.links import MeasuredLink
from heterotrain_operator.cluster_state.telemetry import MemberId, Telemetry
from heterotrain_operator.prom.history import TelemetryHistory
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.vector import VectorSample

ME, OTHER = MemberId("uid-a", 0), MemberId("uid-b", 0)
POOLS = {"uid-a": "a", "uid-b": "b"}


def row(series: str, value: float, /, *, uid: str = "uid-a", **labels: str) -> VectorSample:
    identity = {"__name__": series, "job_uid": "job-uid", "worker": "job-w0", "worker_uid": uid, "local_rank": "0"}
    return VectorSample({**identity, **labels}, value)


def link(value: float, latency_s: float | None = None, *, uid: str = "uid-a", peer: str = "b") -> list[VectorSample]:
    rows = [row(metrics.LINK_BANDWIDTH, value, uid=uid, peer_pool=peer)]
    return rows if latency_s is None else [*rows, row(metrics.LINK_LATENCY, latency_s, uid=uid, peer_pool=peer)]


def taken(*scrapes: list[VectorSample], pools: dict[str, str] = POOLS) -> Telemetry:
    job = TelemetryHistory()
    for number, rows in enumerate(scrapes):
        steps = [row(metrics.STEP, number, uid=uid) for uid in pools]
        snapshot = parse_everything([*steps, *rows])
        job.take(snapshot, dict.fromkeys(snapshot.gauges, 100.0 + number), pools=pools)
    return job.telemetry


def test_of_both_ends_the_faster_measurement_counts() -> None:
    """A rank that waits for the other one measures too long."""
    rows = [*link(1e8, 0.004), *link(3e8, 0.009, uid="uid-b", peer="a")]
    assert taken(rows).links == {("a", "b"): MeasuredLink(3e8, 0.004)}


def test_a_link_is_kept_until_it_is_measured_again() -> None:
    assert taken(link(1e8), []).links == {("a", "b"): MeasuredLink(1e8, 0.0)}
    assert taken(link(1e8), link(5e7)).links == {("a", "b"): MeasuredLink(5e7, 0.0)}


def test_links_of_unknown_pools_are_left_out() -> None:
    assert taken(link(1e8, peer="elsewhere")).links == {}
    assert taken(link(1e8), pools={"uid-a": "a"}).links == {}


@pytest.mark.parametrize(
    "rows",
    [
        link(0.0),
        link(-1e9),
        link(1e300),
        link(1e8, peer=""),
        link(1e8, peer="x" * 1000),
        [row(metrics.LINK_BANDWIDTH, 1e8)],
        [row(metrics.LINK_LATENCY, 0.1, peer_pool="b")],
    ],
    ids=str,
)
def test_implausible_links_are_dropped(rows: list[VectorSample]) -> None:
    assert taken(rows).links == {}


@pytest.mark.parametrize("latency_s", [-1.0, 1e9])
def test_an_implausible_latency_leaves_the_bandwidth(latency_s: float) -> None:
    found = parse_everything(link(1e8, latency_s))
    assert found.gauges[ME].links == {"b": MeasuredLink(1e8, 0.0)}
    assert "implausible" in found.dropped


def test_a_rank_has_a_limited_number_of_links() -> None:
    rows = [each for number in range(1000) for each in link(1e8, peer=f"pool-{number:03}")]
    assert len(parse_everything(rows).gauges[ME].links) == metrics.MOST_LINKS


def test_the_order_of_an_answer_does_not_matter() -> None:
    rng = random.Random(1)  # noqa: S311  # reproducible
    twice = [VectorSample({**labels, "instance": "other"}, value) for labels, value in link(2e8, 0.2)]
    rows = [*link(1e8, 0.1), *twice, *link(5e8, 0.3, uid="uid-b", peer="a")]
    answers: list[Any] = []
    for _ in range(20):
        rng.shuffle(rows)
        answers.append(replace(taken(rows), dropped="").links)
    assert all(answer == answers[0] for answer in answers)


def test_links_are_forgotten_with_the_profiles() -> None:
    job = TelemetryHistory()
    job.take(parse_everything([row(metrics.STEP, 1), *link(1e8, peer="a")]), {ME: 1.0}, pools=POOLS)
    assert job.telemetry.links == {("a", "a"): MeasuredLink(1e8, 0.0)}
    job.forget_profiles()
    assert job.telemetry.links == {}
